//! Phi-3 and 3.5, and Phi-4 mini: Llama's blocks with fused tensors, heads that
//! may be rotated in part, and frequencies for short and for long contexts.

use serde_json::json;

use super::hyperparameters::Hyperparameters;
use super::stack::StackSpec;
use super::{rope, windows};
use crate::types::LoadError;

/// The decoder that a Phi-3 configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation or rope scaling, or biases.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let defaults = json!({"original_max_position_embeddings": 4096});
    let config = &config.with_defaults(&defaults);
    config.refuse_switches(&["attention_bias", "mlp_bias"])?;
    let sizes = config.sizes()?;
    let windows = vec![windows::width(config)?; sizes.layers];
    let rope = rope::read_long(config, sizes.head_dim, sizes.context)?;
    let mut spec = StackSpec::standard(sizes, rope).with_windows(&windows);
    spec.block.act = config.activation("hidden_act")?;
    spec.block.fused = true;
    Ok(spec)
}
