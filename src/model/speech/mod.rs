//! Speech recognition: everything between samples and words.
//!
//! [`SpeechEngine`] is the seam: below it a model's weights and memories, on the compute thread; above
//! it pure rules (what may be decoded, how segments and words come to be) and [`mod@recognise`], the way
//! of a window and of a whole recording, written over [`compute::Compute`] so that the service decides who
//! computes when.

pub mod audio;
pub mod compute;
pub mod decode;
pub mod engine;
pub mod features;
pub(crate) mod live;
pub mod mel;
pub mod recognise;
pub mod rules;
pub mod segments;
mod silence;
#[cfg_attr(
    not(feature = "cpu"),
    allow(unused_variables, reason = "only the CPU backend has settings, and without any nothing is packed")
)]
pub mod source;
pub mod tokens;
pub mod vad;
pub mod whisper;
pub mod words;

use crate::types::{EngineError, SequenceId, TokenId};

pub use crate::model::load::whisper::WhisperDims;
pub use audio::SAMPLE_RATE;

/// How long so many samples at 16 kHz are.
pub fn seconds(samples: usize) -> f64 {
    samples as f64 / f64::from(SAMPLE_RATE)
}

/// How many samples at 16 kHz are so long.
pub fn samples(seconds: f64) -> usize {
    (seconds * f64::from(SAMPLE_RATE)) as usize
}

/// Samples between two mel frames: 10 ms.
pub const HOP: usize = 160;
/// Mel frames of a window: 30 s.
pub const WINDOW_FRAMES: usize = 3000;
/// Frames a second.
pub const FRAMES_PER_SECOND: usize = 100;

/// A window of audio that an engine encodes or has encoded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WindowId(pub u64);

/// Of which of a row's positions logits are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitsOf {
    /// None: more of the prompt follows.
    Nothing,
    /// The last one.
    Last,
    /// The first and the last one.
    Ends,
    /// Every one.
    All,
}

/// One row of a decoder step: `tokens` continue the sequence at `start`, hearing one window.
#[derive(Clone, Copy, Debug)]
pub struct SpeechRow<'a> {
    /// What it hears.
    pub window: WindowId,
    /// Its own state; each sequence at most once a step.
    pub sequence: SequenceId,
    /// Position of `tokens[0]` = what is computed of the sequence.
    pub start: u32,
    /// At least one.
    pub tokens: &'a [TokenId],
    /// Which logits come back.
    pub logits: LogitsOf,
    /// Cross-attention scores of the alignment heads come back as well.
    pub scores: bool,
}

/// What a row came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeechOut {
    /// `[positions wanted][vocabulary]`.
    pub logits: Vec<Vec<f32>>,
    /// `[alignment heads][tokens][encoder positions]`, scaled, before the softmax.
    pub scores: Vec<f32>,
}

/// A speech model on the compute thread.
pub trait SpeechEngine {
    /// Sizes.
    fn dims(&self) -> WhisperDims;

    /// How many alignment heads scores are of.
    fn alignment_heads(&self) -> usize;

    /// Takes a window's log-mel frames, `[3000][mels]`.
    ///
    /// # Errors
    /// `InvalidPlan` for another length; `Device`.
    fn begin(&mut self, mel: Vec<f32>) -> Result<WindowId, EngineError>;

    /// Encodes a piece after the other while `more` says so, at least one; true once the window is ready.
    ///
    /// # Errors
    /// `Device`; `InvalidPlan` for a window that is not there.
    fn encode(&mut self, window: WindowId, more: &mut dyn FnMut() -> bool) -> Result<bool, EngineError>;

    /// Forgets a window; unknown ones are ignored.
    fn forget(&mut self, window: WindowId);

    /// A decoder sequence, empty or with the first `.1` positions of another.
    ///
    /// # Errors
    /// `KvFull`, `UnknownSequence`.
    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError>;

    /// Gives a sequence back; unknown ones are ignored.
    fn close(&mut self, sequence: SequenceId);

    /// Computes rows, of one window or several, in one step.
    ///
    /// # Errors
    /// `InvalidPlan` for windows that are not ready and rows beyond the context; `KvFull`, `Device`.
    fn decode(&mut self, rows: &[SpeechRow<'_>]) -> Result<Vec<SpeechOut>, EngineError>;

    /// Bytes of weights.
    fn weight_bytes(&self) -> u64;

    /// Bytes of windows and sequences.
    fn state_bytes(&self) -> u64;

    /// The device in words.
    fn device(&self) -> String;
}
