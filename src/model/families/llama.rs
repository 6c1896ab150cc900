//! Llama and what shares its shape (SmolLM2 among them): standard blocks, rotary
//! embedding with optional Llama 3 scaling, optional biases.

use super::hyperparameters::Hyperparameters;
use super::rope::{self, DEFAULT_THETA};
use super::stack::StackSpec;
use super::windows;
use crate::types::LoadError;

/// The decoder that a llama configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for another activation or rope scaling, or windows.
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let sizes = config.sizes()?;
    windows::refuse(config, sizes.layers)?;
    let rope = rope::read(config, sizes.head_dim, DEFAULT_THETA)?;
    let mut spec = StackSpec::standard(sizes, rope);
    spec.block.act = config.activation("hidden_act")?;
    spec.block.qkv_bias = config.switch("attention_bias")?;
    spec.block.output_bias = spec.block.qkv_bias;
    spec.block.mlp_bias = config.switch("mlp_bias")?;
    Ok(spec)
}
