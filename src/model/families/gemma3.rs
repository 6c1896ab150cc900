//! Gemma 3, text: Gemma 2's blocks with norms on query and key heads instead of
//! soft-capped scores; most layers with a window and a rope of their own, every
//! sixth without. Images are not read.

use serde_json::{Value, json};

use super::block::{HeadNorms, LayerSpec};
use super::hyperparameters::{Hyperparameters, MAX_CONTEXT};
use super::stack::{StackSpec, rounded_as_declared};
use super::{declared_type, gemma2, rope, windows};
use crate::types::LoadError;

/// Base of layers that see everything, and of those with a window.
const THETAS: [f64; 2] = [1_000_000.0, 10_000.0];

/// The decoder that a Gemma 3 text configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation, rope scaling or kinds of
/// layers, soft-capped scores, and attention in both directions.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let defaults = defaults();
    let config = &config.with_defaults(&defaults);
    if let Some(cap) = config.get("attn_logit_softcapping") {
        return Err(config.refused("attn_logit_softcapping", cap, "this family has none"));
    }
    let sizes = config.sizes()?;
    let pattern = config.count("sliding_window_pattern", MAX_CONTEXT)?.unwrap_or(6);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let windows = windows::by_layer(config, sizes.layers, windows::width(config)?, slides)?;
    let [full, sliding] = ropes(config, sizes.head_dim)?;
    let mut spec = StackSpec::standard(sizes, full);
    spec.ropes.push(sliding);
    spec.layers = windows
        .into_iter()
        .map(|window| LayerSpec { window, rope: Some(usize::from(window.is_some())) })
        .collect();
    gemma2::shape(config, &mut spec)?;
    spec.block.head_norms = HeadNorms::Each;
    Ok(spec)
}

/// The text part of a configuration that describes more.
///
/// # Errors
/// As [`spec`]; `Format` without a text part.
pub fn text_part(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    match config.object("text_config", "text_config.")? {
        Some(text) => {
            let mut spec = spec(&text)?;
            // The outer type holds for all parts that name none of their own.
            if declared_type(text.raw()).is_none() {
                let root = (spec.sizes.hidden as f32).sqrt();
                spec.embedding_scale = rounded_as_declared(config.raw(), root);
            }
            Ok(spec)
        }
        None => Err(config.wrong("text_config", "is missing")),
    }
}

fn defaults() -> Value {
    json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    })
}

/// Frequencies of full and of sliding layers, in the newer spelling (an object for each) or
/// the older one (scaling is for full layers alone).
fn ropes(config: &Hyperparameters<'_>, head_dim: usize) -> Result<[rope::RopeSpec; 2], LoadError> {
    let [full, sliding] = THETAS;
    rope::refuse_partial(config)?;
    if let Some(parameters) = config.object("rope_parameters", "rope_parameters.")? {
        let of = |key, prefix| parameters.object(key, prefix);
        let both = [
            of("full_attention", "rope_parameters.full_attention.")?,
            of("sliding_attention", "rope_parameters.sliding_attention.")?,
        ];
        if let [None, None] = both {
            let message = "has neither `full_attention` nor `sliding_attention`";
            return Err(config.wrong("rope_parameters", message));
        }
        // An older object would be for full layers alone: it may only repeat what is said of them.
        let older = config.object("rope_scaling", "rope_scaling.")?.filter(|older| !older.is_empty());
        if older.is_some_and(|older| both[0].is_none_or(|full| full.raw() != older.raw())) {
            return Err(rope::two_ropes(config));
        }
        return Ok([
            rope::of_layers(both[0].as_ref(), head_dim, full)?,
            rope::of_layers(both[1].as_ref(), head_dim, sliding)?,
        ]);
    }
    let scaling = config.object("rope_scaling", "rope_scaling.")?;
    let theta = config.positive("rope_theta")?.unwrap_or(full);
    let local = config.positive("rope_local_base_freq")?.unwrap_or(sliding);
    Ok([rope::of_layers(scaling.as_ref(), head_dim, theta)?, rope::of_layers(None, head_dim, local)?])
}
