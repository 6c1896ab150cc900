//! Qwen2 and 2.5, dense: Llama's blocks with biases on queries, keys and values;
//! later layers may slide.

use serde_json::json;

use super::hyperparameters::{Hyperparameters, MAX_CONTEXT};
use super::rope::{self, DEFAULT_THETA};
use super::stack::StackSpec;
use super::windows;
use crate::types::LoadError;

/// The decoder that a Qwen2 configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation, rope scaling or kinds of layers.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let mut spec = standard(config)?;
    spec.block.qkv_bias = true;
    Ok(spec)
}

/// What Qwen2 and Qwen3 share.
///
/// # Errors
/// As [`spec`].
pub(super) fn standard(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let sizes = config.sizes()?;
    let windows = windows_of(config, sizes.layers)?;
    let rope = rope::read(config, sizes.head_dim, DEFAULT_THETA)?;
    let mut spec = StackSpec::standard(sizes, rope).with_windows(&windows);
    spec.block.act = config.activation("hidden_act")?;
    Ok(spec)
}

/// Windows only where they are switched on, and then from layer `max_window_layers` on.
fn windows_of(config: &Hyperparameters<'_>, layers: usize) -> Result<Vec<Option<u32>>, LoadError> {
    if !config.switch("use_sliding_window")? {
        return windows::by_layer(config, layers, None, |_| false);
    }
    let defaults = json!({"sliding_window": 4096, "max_window_layers": 28});
    let config = &config.with_defaults(&defaults);
    let key = "max_window_layers";
    let first = match config.get(key).and_then(|value| value.as_u64()) {
        Some(0) => 0,
        _ => config.needed_count(key, MAX_CONTEXT)?,
    };
    let width = windows::width(config)?;
    windows::by_layer(config, layers, width, |layer| width.is_some() && layer >= first)
}
