//! Llama and what shares its shape (SmolLM2 among them): standard blocks, rotary
//! embedding with optional Llama 3 scaling, no biases.

use crate::model::load::ModelFiles;
use crate::model::ops::Ops;
use crate::types::LoadError;

use super::block::BlockSpec;
use super::hyperparameters::Hyperparameters;
use super::{PackedDecoder, rope, stack};

/// Reads the configuration and packs the weights.
///
/// # Errors
/// See [`super::pack`].
pub fn pack<O: Ops + 'static>(files: &ModelFiles, config: &O::Config) -> Result<PackedDecoder<O>, LoadError> {
    stack::pack(files, spec(&Hyperparameters::new(files))?, config)
}

/// The blocks that a llama configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for biases, another activation or rope scaling.
pub fn spec(config: &Hyperparameters<'_>) -> Result<BlockSpec, LoadError> {
    config.refuse_switches(&["attention_bias", "mlp_bias"])?;
    config.require_silu()?;
    let sizes = config.sizes()?;
    let inv_freq = rope::inverse_frequencies(config, sizes.head_dim)?;
    Ok(BlockSpec { sizes, inv_freq, head_norms: false })
}
