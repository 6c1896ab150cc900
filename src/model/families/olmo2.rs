//! OLMo 2: norms after attention and after the gated unit alone, and norms that
//! take all query heads, and all key heads, as one.

use super::block::{HeadNorms, Norms};
use super::hyperparameters::Hyperparameters;
use super::llama;
use super::stack::StackSpec;
use crate::types::LoadError;

/// The decoder that an OLMo 2 configuration describes.
///
/// # Errors
/// As [`llama::spec`].
pub fn spec(config: &Hyperparameters<'_>) -> Result<StackSpec, LoadError> {
    let mut spec = llama::spec(config)?;
    spec.block.norms = Norms::After;
    spec.block.head_norms = HeadNorms::Whole;
    Ok(spec)
}
