//! Qwen3, dense: standard blocks with a norm on each query and key head and an
//! explicit head width.

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

/// The blocks that a Qwen3 configuration describes.
///
/// # Errors
/// `Format` naming the key, `Unsupported` for biases, windows, another activation or rope scaling.
pub fn spec(config: &Hyperparameters<'_>) -> Result<BlockSpec, LoadError> {
    config.refuse_switches(&["attention_bias", "use_sliding_window"])?;
    config.require_silu()?;
    refuse_windows(config)?;
    let sizes = config.sizes()?;
    let inv_freq = rope::inverse_frequencies(config, sizes.head_dim)?;
    Ok(BlockSpec { sizes, inv_freq, head_norms: true })
}

/// `layer_types` says for each layer what it sees; all must see everything.
fn refuse_windows(config: &Hyperparameters<'_>) -> Result<(), LoadError> {
    let key = "layer_types";
    let Some(value) = config.get(key) else { return Ok(()) };
    let kinds = value.as_array().ok_or_else(|| config.wrong(key, "is not a list"))?;
    match kinds.iter().find(|kind| kind.as_str() != Some("full_attention")) {
        None => Ok(()),
        Some(other) => Err(config.refused(key, other, "only `full_attention` is supported")),
    }
}
