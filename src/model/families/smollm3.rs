//! SmolLM3: Llama's blocks, some layers without rotation (every fourth where the
//! configuration says nothing), which may have a window.

use serde_json::json;

use super::hyperparameters::{Hyperparameters, MAX_CONTEXT};
use super::stack::StackSpec;
use super::{rope, windows};
use crate::types::LoadError;

const DEFAULT_THETA: f64 = 2_000_000.0;

/// The decoder that a SmolLM3 configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation, rope scaling or kinds of layers.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let defaults = json!({"tie_word_embeddings": true, "num_key_value_heads": 4});
    let config = &config.with_defaults(&defaults);
    let sizes = config.sizes()?;
    let rotated = rotated(config, sizes.layers)?;
    let width = if config.switch("use_sliding_window")? { windows::width(config)? } else { None };
    let slides = |layer: usize| width.is_some() && rotated.get(layer) == Some(&false);
    let windows = windows::by_layer(config, sizes.layers, width, slides)?;
    let rope = rope::read(config, sizes.head_dim, DEFAULT_THETA)?;
    let mut spec = StackSpec::standard(sizes, rope).with_windows(&windows);
    for (layer, rotated) in spec.layers.iter_mut().zip(rotated) {
        layer.rope = rotated.then_some(0);
    }
    spec.block.act = config.activation("hidden_act")?;
    spec.block.qkv_bias = config.switch("attention_bias")?;
    spec.block.output_bias = spec.block.qkv_bias;
    spec.block.mlp_bias = config.switch("mlp_bias")?;
    Ok(spec)
}

/// Which layers rotate: `no_rope_layers` has a 1 for those that do.
fn rotated(config: &Hyperparameters<'_>, layers: usize) -> Result<Vec<bool>, LoadError> {
    let key = "no_rope_layers";
    let Some(value) = config.get(key) else {
        let interval = config.count("no_rope_layer_interval", MAX_CONTEXT)?.unwrap_or(4);
        return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    let list = value.as_array().ok_or_else(|| config.wrong(key, "is not a list"))?;
    if list.len() != layers {
        return Err(config.wrong(key, &format!("has {} entries for {layers} layers", list.len())));
    }
    let flag = |value: &serde_json::Value| match value.as_u64() {
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        _ => Err(config.wrong(key, &format!("holds {value}, 0 or 1 is needed"))),
    };
    list.iter().map(flag).collect()
}
