//! Gemma 2: norms before and after, soft-capped scores and logits, scaled
//! embedding, every other layer with a window. Norm weights of Hugging Face folders
//! are stored less 1.

use serde_json::{Value, json};

use super::block::{BlockSpec, Norms};
use super::hyperparameters::{Hyperparameters, Sizes};
use super::rope::{self, DEFAULT_THETA};
use super::stack::{StackSpec, rounded_as_declared};
use super::windows;
use crate::types::LoadError;

/// The decoder that a Gemma 2 configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation, rope scaling or kinds of
/// layers, and for attention in both directions.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let defaults = defaults();
    let config = &config.with_defaults(&defaults);
    let sizes = config.sizes()?;
    let windows = windows::by_layer(config, sizes.layers, windows::width(config)?, |layer| layer % 2 == 0)?;
    let rope = rope::read(config, sizes.head_dim, DEFAULT_THETA)?;
    let mut spec = StackSpec::standard(sizes, rope).with_windows(&windows);
    shape(config, &mut spec)?;
    spec.block.softcap = softcap(config, "attn_logit_softcapping")?;
    Ok(spec)
}

/// The reference implementation's defaults: published configurations leave keys out.
fn defaults() -> Value {
    json!({
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    })
}

/// What Gemma 2 and 3 share.
///
/// # Errors
/// As [`spec`].
pub(super) fn shape(config: &Hyperparameters<'_>, spec: &mut StackSpec) -> Result<(), LoadError> {
    config.refuse_switches(&["use_bidirectional_attention"])?;
    let Sizes { hidden, .. } = spec.sizes;
    let key = "query_pre_attn_scalar";
    let scalar = config.positive(key)?.ok_or_else(|| config.wrong(key, "is missing"))?;
    let biased = config.switch("attention_bias")?;
    // Files of another format have the 1 inside.
    let norm_offset = if config.switch("rms_norm_one_is_added")? { 0.0 } else { 1.0 };
    spec.block = BlockSpec {
        norms: Norms::BeforeAndAfter,
        norm_offset,
        act: config.activation("hidden_activation")?,
        scale: (1.0 / scalar.sqrt()) as f32,
        qkv_bias: biased,
        output_bias: biased,
        ..spec.block.clone()
    };
    spec.embedding_scale = rounded_as_declared(config.raw(), (hidden as f32).sqrt());
    spec.logits.softcap = softcap(config, "final_logit_softcapping")?;
    Ok(())
}

/// A cap; `None` when null.
///
/// # Errors
/// `Format` for anything but a positive number.
fn softcap(config: &Hyperparameters<'_>, key: &str) -> Result<Option<f32>, LoadError> {
    Ok(config.positive(key)?.map(|cap| cap as f32))
}
