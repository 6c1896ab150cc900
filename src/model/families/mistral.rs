//! Mistral: Llama's blocks, every layer with the same sliding window where there
//! is one.

use serde_json::json;

use super::hyperparameters::Hyperparameters;
use super::rope::{self, DEFAULT_THETA};
use super::stack::StackSpec;
use super::windows;
use crate::types::LoadError;

/// The decoder that a Mistral configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation, rope scaling or kinds of layers.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let defaults = json!({"sliding_window": 4096});
    let config = &config.with_defaults(&defaults);
    config.refuse_switches(&["attention_bias", "mlp_bias"])?;
    if let Some(kinds) = config.get("layer_types") {
        // The reference passes them over with a warning; whoever wrote them meant another family.
        return Err(config.refused("layer_types", kinds, "all layers of this family are alike"));
    }
    let sizes = config.sizes()?;
    let windows = vec![windows::width(config)?; sizes.layers];
    let rope = rope::read(config, sizes.head_dim, DEFAULT_THETA)?;
    let mut spec = StackSpec::standard(sizes, rope).with_windows(&windows);
    spec.block.act = config.activation("hidden_act")?;
    Ok(spec)
}
