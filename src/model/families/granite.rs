//! Granite, dense: Llama's blocks with multipliers on the embedding, on what is
//! added to the residual stream, on scores and on logits.

use super::hyperparameters::Hyperparameters;
use super::llama;
use super::stack::StackSpec;
use crate::types::LoadError;

/// The decoder that a Granite configuration describes.
///
/// # Errors
/// As [`llama::spec`].
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let multiplier = |key: &str| Ok::<_, LoadError>(config.positive(key)?.unwrap_or(1.0) as f32);
    let mut spec = llama::spec(config)?;
    spec.block.scale = multiplier("attention_multiplier")?;
    spec.block.residual_scale = multiplier("residual_multiplier")?;
    spec.embedding_scale = multiplier("embedding_multiplier")?;
    spec.logits.scale = 1.0 / multiplier("logits_scaling")?;
    Ok(spec)
}
