//! GGUF's metadata as a Hugging-Face-shaped configuration.

use serde_json::{Map, Value, json};

use super::reader::{Metadata, TensorInfo};
use crate::types::LoadError;

/// The configuration, and the width of a head.
pub(super) fn hugging_face(
    metadata: &Metadata<'_>,
    architecture: &str,
    tensors: &[TensorInfo<'_>],
    vocab: usize,
    rope_factors: Option<Vec<f32>>,
) -> Result<(Value, usize), LoadError> {
    let key = |name: &str| format!("{architecture}.{name}");
    let hidden = metadata.required(&key("embedding_length"))?;
    let heads = metadata.required(&key("attention.head_count"))?;
    let kv_heads = metadata.number(&key("attention.head_count_kv"))?.unwrap_or(heads);
    let head_dim = match metadata.number(&key("attention.key_length"))? {
        Some(width) => width,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(refused(&key("attention.head_count"), "does not divide the embedding length")),
    };
    // What the families cannot do yet must not be overlooked.
    let same = |name: &str, must: u64, why: &str| match metadata.number(&key(name))? {
        Some(value) if value != must => Err(refused(&key(name), &format!("is {value}, {why}"))),
        _ => Ok(()),
    };
    same("attention.value_length", head_dim, "keys and values of different widths are not supported")?;
    same("rope.dimension_count", head_dim, "rotating a part of a head is not supported")?;
    same("expert_count", 0, "mixtures of experts are not supported")?;
    same("attention.sliding_window", 0, "sliding windows are not supported")?;

    let mut config = Map::new();
    let has = |name: &str| tensors.iter().any(|info| info.name == name);
    config.insert("model_type".into(), architecture.into());
    config.insert("hidden_size".into(), hidden.into());
    config.insert("num_hidden_layers".into(), metadata.required(&key("block_count"))?.into());
    config.insert("num_attention_heads".into(), heads.into());
    config.insert("num_key_value_heads".into(), kv_heads.into());
    config.insert("head_dim".into(), head_dim.into());
    config.insert("intermediate_size".into(), metadata.required(&key("feed_forward_length"))?.into());
    config.insert("vocab_size".into(), vocab.into());
    config.insert("hidden_act".into(), "silu".into());
    let eps = metadata.float(&key("attention.layer_norm_rms_epsilon"))?;
    let eps = eps.ok_or_else(|| refused(&key("attention.layer_norm_rms_epsilon"), "is missing"))?;
    config.insert("rms_norm_eps".into(), eps.into());
    let theta = metadata.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    config.insert("rope_theta".into(), theta.into());
    let context = metadata.required(&key("context_length"))?;
    if context == 0 || u32::try_from(context).is_err() {
        return Err(refused(&key("context_length"), &format!("is {context}")));
    }
    config.insert("max_position_embeddings".into(), context.into());
    config.insert("tie_word_embeddings".into(), (!has("output.weight")).into());
    if let Some(factors) = rope_factors {
        config.insert("rope_freq_factors".into(), factors.into());
    }
    if let Some(scaling) = rope_scaling(metadata, &key)? {
        config.insert("rope_scaling".into(), scaling);
    }
    let head_dim =
        usize::try_from(head_dim).map_err(|_| refused(&key("attention.key_length"), "is too large"))?;
    Ok((Value::Object(config), head_dim))
}

fn rope_scaling(metadata: &Metadata<'_>, key: &impl Fn(&str) -> String) -> Result<Option<Value>, LoadError> {
    match metadata.optional_text(&key("rope.scaling.type"))? {
        None | Some("none") => Ok(None),
        Some(kind) => {
            let factor = metadata.float(&key("rope.scaling.factor"))?.unwrap_or(1.0);
            Ok(Some(json!({"rope_type": kind, "factor": factor})))
        }
    }
}

fn refused(key: &str, message: &str) -> LoadError {
    LoadError::Unsupported { message: format!("metadata `{key}` {message}") }
}
