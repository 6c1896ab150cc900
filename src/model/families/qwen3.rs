//! Qwen3, dense: Llama's blocks with a norm on each query and key head and an
//! explicit head width.

use serde_json::json;

use super::block::HeadNorms;
use super::hyperparameters::Hyperparameters;
use super::qwen2;
use super::stack::StackSpec;
use crate::types::LoadError;

/// The decoder that a Qwen3 configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation, rope scaling or kinds of layers.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let defaults = json!({"head_dim": 128});
    let config = &config.with_defaults(&defaults);
    let mut spec = qwen2::standard(config)?;
    spec.block.head_norms = HeadNorms::Each;
    spec.block.qkv_bias = config.switch("attention_bias")?;
    spec.block.output_bias = spec.block.qkv_bias;
    Ok(spec)
}
