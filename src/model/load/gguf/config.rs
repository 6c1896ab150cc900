//! GGUF's metadata as a Hugging-Face-shaped configuration.

use serde_json::{Map, Value, json};

use super::reader::{Metadata, TensorInfo, Value as Field};
use crate::types::LoadError;

/// Architectures whose window is read.
const WINDOWED: &[&str] = &["llama", "gemma2", "gemma3", "phi3"];

/// Tensors that divide rotary frequencies.
pub(super) struct RopeFactors {
    /// For any context.
    pub all: Option<Vec<f32>>,
    /// For contexts longer than the original one.
    pub long: Option<Vec<f32>>,
    /// For the others.
    pub short: Option<Vec<f32>>,
}

/// The configuration, and the width of a head.
pub(super) fn hugging_face(
    metadata: &Metadata<'_>,
    architecture: &str,
    tensors: &[TensorInfo<'_>],
    vocab: usize,
    rope_factors: RopeFactors,
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
    if metadata.flag(&key("attention.causal"))? == Some(false) {
        return Err(refused(
            &key("attention.causal"),
            "is false, attention in both directions is not supported",
        ));
    }
    if architecture != "phi3" {
        let name = key("rope.scaling.attn_factor");
        if let Some(factor) = metadata.float(&name)?.filter(|factor| *factor != 1.0) {
            return Err(refused(&name, &format!("is {factor}, 1 is supported in this architecture")));
        }
        same("rope.dimension_count", head_dim, "rotating a part of a head is not supported")?;
    }
    same("expert_count", 0, "mixtures of experts are not supported")?;
    if !WINDOWED.contains(&architecture) {
        same("attention.sliding_window", 0, "windows are not supported in this architecture")?;
    }

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
    if let Some(factors) = rope_factors.all {
        config.insert("rope_freq_factors".into(), factors.into());
    }
    if let Some(scaling) = rope_scaling(metadata, &key)? {
        config.insert("rope_scaling".into(), scaling);
    }
    let own = Own { metadata, architecture, head_dim };
    match architecture {
        "llama" => own.mistral(&mut config)?,
        "gemma2" | "gemma3" => own.gemma(&mut config)?,
        "phi3" => own.phi3(&mut config, rope_factors.long, rope_factors.short)?,
        "granite" => own.granite(&mut config)?,
        "smollm3" => {
            // Not in the file: every fourth layer is without rotation.
            config.insert("no_rope_layer_interval".into(), 4.into());
        }
        _ => {}
    }
    let head_dim =
        usize::try_from(head_dim).map_err(|_| refused(&key("attention.key_length"), "is too large"))?;
    Ok((Value::Object(config), head_dim))
}

/// What one architecture has for itself.
struct Own<'a> {
    metadata: &'a Metadata<'a>,
    architecture: &'a str,
    head_dim: u64,
}

impl Own<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn window(&self) -> Result<Option<u64>, LoadError> {
        let window = self.metadata.number(&self.key("attention.sliding_window"))?;
        Ok(window.filter(|window| *window > 0))
    }

    /// Copies a float under another name, when it is there.
    fn float(&self, config: &mut Map<String, Value>, from: &str, to: &str) -> Result<(), LoadError> {
        if let Some(value) = self.metadata.float(&self.key(from))? {
            config.insert(to.into(), value.into());
        }
        Ok(())
    }

    /// Mistral's files call themselves llama; a window tells them apart.
    fn mistral(&self, config: &mut Map<String, Value>) -> Result<(), LoadError> {
        if let Some(window) = self.window()? {
            config.insert("model_type".into(), "mistral".into());
            config.insert("sliding_window".into(), window.into());
        }
        Ok(())
    }

    fn gemma(&self, config: &mut Map<String, Value>) -> Result<(), LoadError> {
        let key = self.key("attention.sliding_window");
        let window = self.window()?.ok_or_else(|| refused(&key, "is missing"))?;
        config.insert("sliding_window".into(), window.into());
        config.insert("rms_norm_one_is_added".into(), true.into());
        config.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
        self.float(config, "attn_logit_softcapping", "attn_logit_softcapping")?;
        self.float(config, "final_logit_softcapping", "final_logit_softcapping")?;
        config.insert("query_pre_attn_scalar".into(), self.query_scalar(config).into());
        if self.architecture == "gemma3" {
            config.insert("model_type".into(), "gemma3_text".into());
            if self.metadata.float(&self.key("rope.freq_base"))?.is_none() {
                return Err(refused(&self.key("rope.freq_base"), "is missing"));
            }
            self.float(config, "rope.freq_base_swa", "rope_local_base_freq")?;
            self.pattern(config)?;
        }
        Ok(())
    }

    /// Not in the file: the root of it divides scores. The width of a head, but for the two largest
    /// models, which are known by their layers: there the hidden size over the heads.
    fn query_scalar(&self, config: &Map<String, Value>) -> f64 {
        let number = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0) as f64;
        let layers = if self.architecture == "gemma2" { 46.0 } else { 62.0 };
        match number("num_hidden_layers") == layers {
            true => number("hidden_size") / number("num_attention_heads"),
            false => self.head_dim as f64,
        }
    }

    /// Which layers slide, where the file says it by a period; flags for single layers are refused.
    fn pattern(&self, config: &mut Map<String, Value>) -> Result<(), LoadError> {
        let key = self.key("attention.sliding_window_pattern");
        match self.metadata.get(&key) {
            None => {}
            Some(Field::Int(period)) if *period > 0 => {
                config.insert("sliding_window_pattern".into(), json!(u64::try_from(*period).unwrap_or(0)));
            }
            Some(_) => return Err(refused(&key, "is not a number above 0")),
        }
        Ok(())
    }

    fn phi3(
        &self,
        config: &mut Map<String, Value>,
        long: Option<Vec<f32>>,
        short: Option<Vec<f32>>,
    ) -> Result<(), LoadError> {
        config.insert("sliding_window".into(), self.window()?.into());
        if let Some(dims) = self.metadata.number(&self.key("rope.dimension_count"))? {
            config.insert("rope_dimension_count".into(), dims.into());
        }
        let (long, short) = match (long, short) {
            (Some(long), Some(short)) => (long, short),
            (None, None) => return Ok(()),
            _ => {
                let message = "one of rope_factors_long and rope_factors_short is missing";
                return Err(LoadError::Tensor { name: "rope_factors".into(), message: message.into() });
            }
        };
        let original = self.metadata.required(&self.key("rope.scaling.original_context_length"))?;
        let scale = self.metadata.float(&self.key("rope.scaling.attn_factor"))?.unwrap_or(1.0);
        let scaling = json!({
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "attention_factor": scale,
        });
        config.insert("original_max_position_embeddings".into(), original.into());
        config.insert("rope_scaling".into(), scaling);
        Ok(())
    }

    fn granite(&self, config: &mut Map<String, Value>) -> Result<(), LoadError> {
        let usual = 1.0 / (self.head_dim as f64).sqrt();
        config.insert("attention_multiplier".into(), usual.into());
        self.float(config, "attention.scale", "attention_multiplier")?;
        self.float(config, "embedding_scale", "embedding_multiplier")?;
        self.float(config, "residual_scale", "residual_multiplier")?;
        self.float(config, "logit_scale", "logits_scaling")?;
        if self.metadata.flag(&self.key("rope.scaling.finetuned"))? == Some(false) {
            return Err(refused(
                &self.key("rope.scaling.finetuned"),
                "is false, models without rotation are not supported",
            ));
        }
        Ok(())
    }
}

/// A factor without a kind means linear; 0 and 1 mean none. Older files have it under another name.
fn rope_scaling(metadata: &Metadata<'_>, key: &impl Fn(&str) -> String) -> Result<Option<Value>, LoadError> {
    let factor = match metadata.float(&key("rope.scaling.factor"))? {
        None => metadata.float(&key("rope.scale_linear"))?,
        factor => factor,
    };
    let factor = factor.filter(|factor| *factor != 0.0).unwrap_or(1.0);
    match metadata.optional_text(&key("rope.scaling.type"))? {
        Some("none") => Ok(None),
        None if factor == 1.0 => Ok(None),
        kind => Ok(Some(json!({"rope_type": kind.unwrap_or("linear"), "factor": factor}))),
    }
}

fn refused(key: &str, message: &str) -> LoadError {
    LoadError::Unsupported { message: format!("metadata `{key}` {message}") }
}
