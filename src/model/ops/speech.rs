//! What an encoder-decoder needs besides [`Ops`]: layer norms, convolutions as products of windows, and
//! attention to a memory that is read whole.

use std::ops::Range;

use super::{Act, Ops};
use crate::types::EngineError;

/// Layer norm: `(x − mean) / sqrt(variance + eps) · weight + bias`.
#[derive(Clone, Debug)]
pub struct LayerNorm<V> {
    /// `[width]`.
    pub weight: V,
    /// `[width]`.
    pub bias: V,
    /// Added to the variance.
    pub eps: f32,
}

/// Attention of queries to a memory: every query sees all of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RecallSpec {
    /// Heads of queries, keys and values alike.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// The operators of speech models.
///
/// Every method may fail with `EngineError::Device`, and with `InvalidPlan` where shapes do not fit.
pub trait SpeechOps: Ops {
    /// Keys and values of all positions of one layer, which queries read whole. Owned by whoever holds
    /// it: rows that share one share a reference.
    type Memory;

    /// Encoder positions that are worth computing at a stretch for a model of this width: what a slice
    /// of the encoder is cut into.
    fn tile(&self, width: usize) -> usize;

    /// Values from the host: `[tokens, values.len() / tokens]`.
    ///
    /// # Errors
    /// See the trait.
    fn upload(&mut self, tokens: usize, values: &[f32]) -> Result<Self::T, EngineError>;

    /// Values for the host, row-major, f32. A lazy backend computes them here.
    ///
    /// # Errors
    /// See the trait.
    fn download(&mut self, x: &Self::T) -> Result<Vec<f32>, EngineError>;

    /// Has a lazy backend compute what these are, so that the time is spent now.
    ///
    /// # Errors
    /// See the trait.
    fn settle(&mut self, x: &[&Self::T], memory: Option<&Self::Memory>) -> Result<(), EngineError>;

    /// Rows one below the other.
    ///
    /// # Errors
    /// See the trait.
    fn join(&mut self, parts: Vec<Self::T>) -> Result<Self::T, EngineError>;

    /// Some rows.
    ///
    /// # Errors
    /// See the trait.
    fn slice(&mut self, x: &Self::T, rows: Range<usize>) -> Result<Self::T, EngineError>;

    /// What a convolution of three taps, padded by one, sees at each output position of `rows`:
    /// `[rows, 3 · width]`, rows `stride · i − 1 ..= stride · i + 1` side by side, zeros outside.
    ///
    /// # Errors
    /// See the trait.
    fn windows(&mut self, x: &Self::T, rows: Range<usize>, stride: usize) -> Result<Self::T, EngineError>;

    /// The layer norm of each row.
    ///
    /// # Errors
    /// See the trait.
    fn layer_norm(&mut self, x: &Self::T, norm: &LayerNorm<Self::V>) -> Result<Self::T, EngineError>;

    /// `act(x + bias)`, element by element.
    ///
    /// # Errors
    /// See the trait.
    fn bias_act(&mut self, x: Self::T, bias: &Self::V, act: Act) -> Result<Self::T, EngineError>;

    /// An empty memory for so many positions.
    ///
    /// # Errors
    /// `Device` where there is no room.
    fn memory(&mut self, positions: usize, spec: &RecallSpec) -> Result<Self::Memory, EngineError>;

    /// Writes keys and values, `[tokens, 2 · heads · head_dim]` with the keys first, at `first`.
    /// They come in order, and all of them before the first is read.
    ///
    /// # Errors
    /// See the trait.
    fn remember(
        &mut self,
        memory: &mut Self::Memory,
        first: usize,
        keys_values: &Self::T,
    ) -> Result<(), EngineError>;

    /// Softmax attention of queries `[tokens, heads · head_dim]` to memories; `rows` are consecutive
    /// tokens and what they read, covering `queries`.
    ///
    /// # Errors
    /// See the trait.
    fn recall(
        &mut self,
        queries: &Self::T,
        spec: &RecallSpec,
        rows: &[(usize, &Self::Memory)],
    ) -> Result<Self::T, EngineError>;

    /// Scaled scores before the softmax, on the host: for each of `heads` `[tokens][positions]`, of the
    /// queries in `rows`.
    ///
    /// # Errors
    /// See the trait.
    fn scores(
        &mut self,
        queries: &Self::T,
        rows: Range<usize>,
        spec: &RecallSpec,
        memory: &Self::Memory,
        heads: &[usize],
    ) -> Result<Vec<f32>, EngineError>;

    /// Bytes of a memory.
    fn memory_bytes(&self, memory: &Self::Memory) -> u64;
}
