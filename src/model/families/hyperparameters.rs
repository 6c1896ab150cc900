//! Reading a configuration: every value is checked and bounded, every error
//! names its key.
//!
//! Configurations come from anywhere. The bounds are far above any real model
//! and low enough that products of them cannot overflow.

use std::fmt::Display;
use std::path::Path;

use serde_json::Value;

use crate::model::load::ModelFiles;
use crate::model::ops::Act;
use crate::types::LoadError;

/// Most layers.
const MAX_LAYERS: usize = 4096;
/// Most heads, and widest head.
const MAX_HEADS: usize = 65_536;
/// Widest activation.
const MAX_WIDTH: usize = 1 << 22;
/// Largest vocabulary.
const MAX_VOCAB: usize = 1 << 26;
/// Longest context.
pub const MAX_CONTEXT: usize = 1 << 30;

/// A configuration object with the file it is from.
#[derive(Clone, Copy, Debug)]
pub struct Hyperparameters<'a> {
    path: &'a Path,
    /// Keys of a nested object are named with it: `rope_scaling.`.
    prefix: &'a str,
    values: &'a Value,
    /// What keys that are absent stand for in this family; null is not absent.
    defaults: Option<&'a Value>,
}

/// The sizes that every decoder has, checked against each other.
#[derive(Clone, PartialEq, Debug)]
pub struct Sizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the gated unit.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Most tokens the model was made for.
    pub context: u32,
    /// Of the root-mean-square norms.
    pub eps: f32,
    /// The head is the embedding.
    pub tied: bool,
}

impl<'a> Hyperparameters<'a> {
    /// The configuration of a model.
    pub fn new(files: &'a ModelFiles) -> Self {
        Self::of(&files.path, &files.config)
    }

    /// A configuration object and the file that errors name.
    pub fn of(path: &'a Path, values: &'a Value) -> Self {
        Self { path, prefix: "", values, defaults: None }
    }

    /// The same with what absent keys stand for: families whose published configurations
    /// leave keys out need the reference implementation's defaults.
    pub fn with_defaults<'b>(&self, defaults: &'b Value) -> Hyperparameters<'b>
    where
        'a: 'b,
    {
        Hyperparameters { defaults: Some(defaults), ..*self }
    }

    /// The configuration as it is in the file.
    pub fn raw(&self) -> &'a Value {
        self.values
    }

    /// An object inside this one; `None` when absent or null.
    ///
    /// # Errors
    /// `Format` when it is something else.
    pub fn object(&self, key: &str, prefix: &'a str) -> Result<Option<Self>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(values) if values.is_object() => {
                Ok(Some(Self { path: self.path, prefix, values, defaults: None }))
            }
            Some(other) => Err(self.wrong(key, &format!("is {other}, an object is needed"))),
        }
    }

    /// The value; the default when absent, `None` when null or absent without a default.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let default = || self.defaults.and_then(|defaults| defaults.get(key));
        self.values.get(key).or_else(default).filter(|value| !value.is_null())
    }

    /// Whether it is an object without keys.
    pub fn is_empty(&self) -> bool {
        self.values.as_object().is_some_and(|values| values.is_empty())
    }

    /// The first key that holds an object.
    pub fn nested(&self) -> Option<&'a str> {
        let (key, _) = self.values.as_object()?.iter().find(|(_, value)| value.is_object())?;
        Some(key)
    }

    /// An error about a key.
    pub fn wrong(&self, key: &str, message: &str) -> LoadError {
        let message = format!("`{}{key}` {message}", self.prefix);
        LoadError::Format { path: self.path.to_path_buf(), message }
    }

    /// An error about a switch that is right but not supported.
    pub fn refused(&self, key: &str, value: impl Display, instead: &str) -> LoadError {
        LoadError::Unsupported { message: format!("`{}{key}` = {value}: {instead}", self.prefix) }
    }

    /// A whole number in `1..=most`; `None` when absent.
    ///
    /// # Errors
    /// `Format` for anything else.
    pub fn count(&self, key: &str, most: usize) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match number {
            Some(number) if (1..=most).contains(&number) => Ok(Some(number)),
            _ => Err(self.wrong(key, &format!("is {value}, a whole number from 1 to {most} is needed"))),
        }
    }

    /// As [`Self::count`], and must be there.
    ///
    /// # Errors
    /// `Format`.
    pub fn needed_count(&self, key: &str, most: usize) -> Result<usize, LoadError> {
        self.count(key, most)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    /// A finite number above 0; `None` when absent.
    ///
    /// # Errors
    /// `Format` for anything else.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number <= f64::from(f32::MAX) => Ok(Some(number)),
            _ => Err(self.wrong(key, &format!("is {value}, a number above 0 is needed"))),
        }
    }

    /// A switch; off when absent.
    ///
    /// # Errors
    /// `Format` when it is not a boolean.
    pub fn switch(&self, key: &str) -> Result<bool, LoadError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(on)) => Ok(*on),
            Some(other) => Err(self.wrong(key, &format!("is {other}, true or false is needed"))),
        }
    }

    /// A word; `None` when absent.
    ///
    /// # Errors
    /// `Format` when it is not a string.
    pub fn word(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(word)) => Ok(Some(word)),
            Some(other) => Err(self.wrong(key, &format!("is {other}, a string is needed"))),
        }
    }

    /// Refuses switches that are on although the family here does not have them.
    ///
    /// # Errors
    /// `Unsupported` naming the switch, `Format` when it is not a boolean.
    pub fn refuse_switches(&self, keys: &[&str]) -> Result<(), LoadError> {
        for key in keys {
            if self.switch(key)? {
                return Err(self.refused(key, true, "only models without it are supported"));
            }
        }
        Ok(())
    }

    /// The gated unit's activation; SiLU when absent.
    ///
    /// # Errors
    /// `Unsupported` for one that is not known, `Format`.
    pub fn activation(&self, key: &str) -> Result<Act, LoadError> {
        if self.values.get(key).is_some_and(Value::is_null) {
            return Err(self.refused(key, "null", "name the activation, or leave the key out"));
        }
        match self.word(key)? {
            None | Some("silu" | "swish") => Ok(Act::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Act::GeluTanh),
            Some("gelu") => Ok(Act::Gelu),
            Some(other) => {
                Err(self.refused(key, other, "`silu`, `gelu` and `gelu_pytorch_tanh` are supported"))
            }
        }
    }

    /// The sizes that every decoder has.
    ///
    /// # Errors
    /// `Format` naming the key that is missing, out of bounds or does not fit another.
    pub fn sizes(&self) -> Result<Sizes, LoadError> {
        let hidden = self.needed_count("hidden_size", MAX_WIDTH)?;
        let heads = self.needed_count("num_attention_heads", MAX_HEADS)?;
        let kv_heads = self.count("num_key_value_heads", MAX_HEADS)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let message = format!("is {kv_heads}, it must divide the {heads} attention heads");
            return Err(self.wrong("num_key_value_heads", &message));
        }
        let eps = self.positive("rms_norm_eps")?.ok_or_else(|| self.wrong("rms_norm_eps", "is missing"))?;
        if !(1e-30..1.0).contains(&eps) {
            return Err(self.wrong("rms_norm_eps", &format!("is {eps}, a small number is needed")));
        }
        Ok(Sizes {
            hidden,
            intermediate: self.needed_count("intermediate_size", MAX_WIDTH)?,
            layers: self.needed_count("num_hidden_layers", MAX_LAYERS)?,
            heads,
            kv_heads,
            head_dim: self.head_dim(hidden, heads)?,
            vocab: self.needed_count("vocab_size", MAX_VOCAB)?,
            context: self.needed_count("max_position_embeddings", MAX_CONTEXT)? as u32,
            eps: eps as f32,
            tied: self.switch("tie_word_embeddings")?,
        })
    }

    /// Explicit, or the hidden size over the heads.
    fn head_dim(&self, hidden: usize, heads: usize) -> Result<usize, LoadError> {
        let head_dim = match self.count("head_dim", MAX_HEADS)? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let message = format!("is {heads}, it must divide `hidden_size` = {hidden}");
                return Err(self.wrong("num_attention_heads", &message));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(self.wrong("head_dim", &format!("is {head_dim}, an even number is needed")));
        }
        if head_dim.saturating_mul(heads) > MAX_WIDTH {
            return Err(self.wrong("head_dim", &format!("is {head_dim}, too wide for {heads} heads")));
        }
        Ok(head_dim)
    }
}
