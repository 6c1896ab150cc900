//! Model families: configuration and tensor names of a checkpoint become a
//! decoder, written once over [`Ops`] for every backend.
//!
//! A family is one file and a row in [`KNOWN`]. All here are a [`stack`] of blocks and
//! only say how theirs differ from the usual; one that is no stack would write its own
//! forward as another [`Decoder`]. No file here knows a device or a file format. Values of a
//! configuration are untrusted: [`hyperparameters`] bounds every one of them.

use std::path::Path;

use serde_json::Value;

use crate::model::load::ModelFiles;
use crate::model::ops::{KvShape, Logits, Ops, Step};
use crate::types::{EngineError, LoadError};

pub mod block;
pub mod gemma2;
pub mod gemma3;
pub mod granite;
pub mod hyperparameters;
pub mod llama;
pub mod mistral;
pub mod olmo2;
pub mod phi3;
pub mod qwen2;
pub mod qwen3;
pub mod rope;
pub mod smollm3;
pub mod stack;
pub mod windows;

use hyperparameters::{Hyperparameters, Sizes};
use stack::StackSpec;

/// What a configuration of a family says.
type ReadSpec = fn(&Hyperparameters<'_>) -> Result<StackSpec, LoadError>;

/// Families there are, by `model_type` of a Hugging Face configuration. GGUF files name
/// architectures, which [`crate::model::load::ARCHITECTURES`] lists.
pub const KNOWN: &[(&str, ReadSpec)] = &[
    ("llama", llama::spec),
    ("mistral", mistral::spec),
    ("qwen2", qwen2::spec),
    ("qwen3", qwen3::spec),
    ("gemma2", gemma2::spec),
    ("gemma3", gemma3::text_part),
    ("gemma3_text", gemma3::spec),
    ("phi3", phi3::spec),
    ("granite", granite::spec),
    ("smollm3", smollm3::spec),
    ("olmo2", olmo2::spec),
];

/// A decoder on a backend, on the compute thread.
pub trait Decoder<O: Ops> {
    /// The last layer's activations `[tokens, width]` of a packed step; writes keys
    /// and values beyond the rows' committed lengths.
    ///
    /// # Errors
    /// Those of the operators.
    fn forward(&self, ops: &mut O, kv: &mut O::Kv, step: &Step<'_>) -> Result<O::T, EngineError>;

    /// Logits of the given packed token indices, `[rows][vocab]`.
    ///
    /// # Errors
    /// Those of the operators.
    fn logits(&self, ops: &mut O, hidden: &O::T, rows: &[usize]) -> Result<Logits, EngineError>;

    /// The best tokens of the given packed token indices, drawn by the device: see [`Ops::draw`].
    ///
    /// # Errors
    /// Those of the operators.
    fn draw(
        &self,
        ops: &mut O,
        kv: &mut O::Kv,
        hidden: &O::T,
        rows: &[usize],
    ) -> Result<O::Draws, EngineError>;
}

/// What is known about a decoder from its configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderFacts {
    /// Tokens in the vocabulary.
    pub vocab: u32,
    /// Most tokens the model was made for.
    pub context: u32,
    /// Shape of the key-value state.
    pub kv: KvShape,
}

/// A family's weights, packed, between the loader thread and the compute thread.
pub trait Adopt<O: Ops>: Send {
    /// Hands the weights to the backend; no copy on the CPU. `context` is the most tokens a
    /// sequence may hold.
    ///
    /// # Errors
    /// `Device`.
    fn adopt(self: Box<Self>, ops: &mut O, context: u32) -> Result<Box<dyn Decoder<O>>, EngineError>;
}

/// A decoder packed for a backend, on its way to the compute thread.
pub struct PackedDecoder<O: Ops> {
    /// What is known about it.
    pub facts: DecoderFacts,
    /// Its weights.
    pub weights: Box<dyn Adopt<O>>,
}

impl<O: Ops> PackedDecoder<O> {
    /// Takes the weights over on the compute thread, for sequences of at most `context` tokens.
    ///
    /// # Errors
    /// `Device`.
    pub fn adopt(self, ops: &mut O, context: u32) -> Result<Box<dyn Decoder<O>>, EngineError> {
        self.weights.adopt(ops, context)
    }
}

/// Checks a model's configuration and tensors and packs them for a backend; on
/// the loader thread, no device. The files can be dropped afterwards.
///
/// # Errors
/// `Unsupported` for an unknown family or a switch that it does not have,
/// `Format` naming a configuration key, `Tensor` for one that is missing, of
/// another shape, or not part of the model.
pub fn pack<O: Ops + 'static>(files: &ModelFiles, config: &O::Config) -> Result<PackedDecoder<O>, LoadError> {
    let packed = stack::pack(files, spec(&files.path, &files.config)?, config)?;
    match files.tensors.unconsumed().as_slice() {
        [] => Ok(packed),
        [first, rest @ ..] => Err(LoadError::Tensor { name: first.clone(), message: left_over(rest) }),
    }
}

/// A model's sizes, with its family's defaults for what its configuration leaves out.
///
/// # Errors
/// `Unsupported` and `Format` as [`pack`].
pub fn sizes(files: &ModelFiles) -> Result<Sizes, LoadError> {
    sizes_of(&files.path, &files.config)
}

/// As [`sizes`], of a configuration alone; `path` is for errors.
///
/// # Errors
/// As [`sizes`].
pub fn sizes_of(path: &Path, config: &Value) -> Result<Sizes, LoadError> {
    Ok(spec(path, config)?.sizes)
}

fn spec(path: &Path, config: &Value) -> Result<StackSpec, LoadError> {
    let model_type = config.get("model_type").and_then(Value::as_str);
    let family = KNOWN.iter().find(|(known, _)| Some(*known) == model_type);
    let (_, read) = family.ok_or_else(|| unknown(model_type))?;
    read(&Hyperparameters::of(path, config))
}

/// Families whose residual stream grows beyond the largest float16, 65,504.
const BEYOND_FLOAT16: [&str; 3] = ["gemma2", "gemma3", "gemma3_text"];

/// Whether a model computes in float16 where a device computes in half precision: when its configuration
/// says so and its family's numbers stay small. All else is for bfloat16, whose range is single precision's.
pub fn fits_float16(config: &Value) -> bool {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    declared_type(config) == Some("float16") && !BEYOND_FLOAT16.contains(&model_type)
}

/// The type that a configuration says its checkpoint has, as PyTorch names it.
fn declared_type(config: &Value) -> Option<&str> {
    let declared = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(key)?.as_str())?;
    Some(declared.strip_prefix("torch.").unwrap_or(declared))
}

/// The error for a family that is not [`KNOWN`].
pub fn unknown(model_type: Option<&str>) -> LoadError {
    let known: Vec<&str> = KNOWN.iter().map(|(model_type, _)| *model_type).collect();
    let asked =
        model_type.map_or("a model without `model_type`".into(), |kind| format!("model_type `{kind}`"));
    LoadError::Unsupported { message: format!("{asked}; known are {}", known.join(", ")) }
}

fn left_over(others: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut message = String::from("is not part of this model as its configuration describes it");
    if !others.is_empty() {
        let names: Vec<&str> = others.iter().take(SHOWN).map(String::as_str).collect();
        let more = others.len().saturating_sub(SHOWN);
        message += &format!("; nor are {}", names.join(", "));
        if more > 0 {
            message += &format!(" and {more} more");
        }
    }
    message
}

#[cfg(test)]
mod tests;
