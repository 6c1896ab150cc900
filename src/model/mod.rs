//! The model layer: everything with tensors, and the seam above which nobody
//! knows about them.
//!
//! [`Engine`] is that seam: the scheduler plans steps, the engine runs them.
//! Below it, a family is written once over [`ops::Ops`], which each backend
//! implements. Every method is synchronous and fallible; engines live and die
//! on one thread, their weights are prepared on another.
//!
//! This layer does not know actors, HTTP or the prompt cache.

use std::ops::Range;
use std::sync::Arc;

use crate::model::sampler::Scores;
use crate::model::text::TextModel;
use crate::types::{EngineError, Epoch, LoadError, SamplingParams, SequenceId, TokenId};

#[cfg(feature = "cpu")]
pub mod cpu;
pub mod engine;
#[cfg(feature = "fake")]
pub mod fake;
pub mod families;
pub mod hub;
pub mod inspect;
pub mod load;
#[cfg(feature = "mlx")]
pub mod mlx;
pub mod ops;
pub mod output;
pub mod plain;
pub mod sampler;
#[cfg_attr(
    not(any(feature = "cpu", feature = "mlx")),
    allow(dead_code, unused_variables, reason = "without a backend nothing is packed")
)]
pub mod source;
pub mod speech;
pub mod template;
pub mod text;
pub mod tokenizer;

/// In a [`PlanRow`]'s input: the token that the step before drew for this sequence, wherever it is.
/// No vocabulary has it.
pub const PREVIOUS: TokenId = TokenId(u32::MAX);

/// What a plan row wants back besides the key-value state.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// Nothing: more of the prompt follows.
    Nothing,
    /// A token sampled from the row's last position.
    Sample(SampleFor<'a>),
    /// Tokens sampled from the first position on, as long as each equals the row's next input:
    /// `input[1..]` are proposals, the last ones of `output` as well. What was drawn up to and with
    /// the first difference comes back, and only what agrees is committed. With draws keyed by
    /// position these are the very tokens that single steps would have drawn.
    Verify(SampleFor<'a>),
    /// Logits of the last position (tests, scoring).
    LastLogits,
    /// Logits of every position of the row's input (tests, scoring).
    AllLogits,
}

/// How to sample a row's next token.
#[derive(Clone, Copy, Debug)]
pub struct SampleFor<'a> {
    /// Parameters, the seed included.
    pub params: &'a Arc<SamplingParams>,
    /// Absolute position of the (first) token to be drawn: keys the random number.
    pub position: u32,
    /// Tokens produced so far, for the penalties.
    pub output: &'a [TokenId],
    /// Log-probabilities wanted: the token's and those of so many of the best. A pass over the vocabulary.
    pub scores: Option<u8>,
}

/// One row of a step: `input` continues the sequence at `start`.
#[derive(Clone, Copy, Debug)]
pub struct PlanRow<'a> {
    /// The row's state; each sequence at most once a plan.
    pub sequence: SequenceId,
    /// Tokens to compute, at least one; or [`PREVIOUS`] alone.
    pub input: &'a [TokenId],
    /// Position of `input[0]`: equals the sequence's committed length, once the step before is collected.
    pub start: u32,
    /// What comes back.
    pub want: Want<'a>,
}

/// All rows of a step, packed: one token for a decoding row, a chunk for a
/// prefilling one.
#[derive(Clone, Debug, Default)]
pub struct StepPlan<'a> {
    /// In the order in which outcomes come back.
    pub rows: Vec<PlanRow<'a>>,
}

/// A step under way.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a submitted step must be collected"]
pub struct StepHandle(pub u64);

/// What became of one row of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum RowOutcome {
    /// Computed and committed; nothing was wanted.
    Advanced,
    /// Computed, committed and sampled.
    Sampled {
        /// The token; not yet computed itself.
        token: TokenId,
        /// Log-probabilities, where they were wanted.
        scores: Option<Scores>,
    },
    /// Proposals were verified: the tokens drawn, at least one. All but the last are the row's inputs
    /// and committed with it; the last is not yet computed itself.
    Verified {
        /// In order of position.
        tokens: Vec<TokenId>,
    },
    /// Computed and committed, with logits `[positions][vocab]`.
    Logits(Vec<Vec<f32>>),
    /// This row alone failed; its committed length is unchanged.
    Failed(EngineError),
}

/// A finished step: one outcome a plan row, in the plan's order.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct StepOutcome {
    /// In the plan's order.
    pub rows: Vec<RowOutcome>,
}

/// What is fixed about an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineInfo {
    /// Which life this is.
    pub epoch: Epoch,
    /// Tokens in the vocabulary.
    pub vocab: u32,
    /// Most tokens a sequence can hold.
    pub context: u32,
    /// Key-value bytes a token.
    pub kv_bytes_per_token: u64,
    /// Key-value memory is handed out in blocks of so many tokens.
    pub kv_block_tokens: u32,
    /// Whether a step can begin before the one before it is collected, see [`Engine::submit`].
    pub pipelined: bool,
    /// Everything that changes bits: backend, kernel version, activation mode, key-value type. Not the
    /// CPU's instruction set: all paths give the same bits.
    pub numerics_id: String,
    /// How keys and values are laid out in [`Engine::export`]'s bytes: model shape, layout, type.
    pub kv_format: String,
    /// What those bytes are numbers of.
    pub kv_numbers: KvNumbers,
    /// The device in words, for people.
    pub device: String,
    /// Whether several rows can share a step. If not, rows run one at a time.
    pub batches: bool,
    /// Whether a step that panicked leaves weights, sequences and the engine usable: what was not
    /// collected was not committed. If not, the engine must be rebuilt after a panic.
    pub survives_panics: bool,
    /// Sequences with a common prefix share its memory.
    pub shares_prefixes: bool,
    /// A sequence can be cut back to any length, and forked at any. If not, it can be forked at its
    /// committed length alone.
    pub trims: bool,
}

/// What the bytes of [`Engine::export`] are numbers of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvNumbers {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// Single precision.
    F32,
    /// No numbers: to be kept as they are.
    Opaque,
}

/// Key-value and weight memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EngineMemory {
    /// Packed weights.
    pub weight_bytes: u64,
    /// Key-value memory there is.
    pub kv_capacity_bytes: u64,
    /// Key-value memory in use, shared blocks counted once.
    pub kv_used_bytes: u64,
}

/// The seam between scheduling and tensors. One owner, one thread.
///
/// A row owes `tokens − computed` tokens; a step computes a span of them and
/// commits it only when all went well, so a step that failed leaves nothing to undo.
pub trait Engine {
    /// What is fixed.
    fn info(&self) -> &EngineInfo;

    /// Memory now.
    fn memory(&self) -> EngineMemory;

    /// Opens a sequence: empty, or sharing the first `n` tokens of another.
    ///
    /// # Errors
    /// `KvFull` when a fork needs a block and none is free; `UnknownSequence`, `StaleEpoch`;
    /// `InvalidPlan` when `n` is more than the source holds.
    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError>;

    /// Makes room for `tokens` in all. What was there stays, also on failure.
    ///
    /// # Errors
    /// `KvFull` with the missing bytes; `UnknownSequence`, `StaleEpoch`; `InvalidPlan` beyond the context.
    fn reserve(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError>;

    /// Forgets everything from position `tokens` on.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`.
    fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError>;

    /// Gives the sequence's memory back. Unknown or stale sequences are ignored.
    fn close(&mut self, sequence: SequenceId);

    /// Committed keys and values as they are stored, layer by layer, for a tier outside: bytes that
    /// mean nothing to anybody but an engine with the same [`EngineInfo::kv_format`]. A piece lies
    /// between two multiples of [`ops::EXPORT_TOKENS`]. Copies; about a millisecond a piece.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` for a range that is no such piece or not
    /// committed; `Device`.
    fn export(&mut self, sequence: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError>;

    /// Takes in what [`Engine::export`] gave for the same tokens and range, right behind the
    /// committed ones, and commits it. Room must have been reserved.
    ///
    /// # Errors
    /// As for `export`; `InvalidPlan` where room is missing, the range does not follow, or the bytes
    /// are not as many as they must be.
    fn import(&mut self, sequence: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError>;

    /// Starts a step. Room must have been reserved.
    ///
    /// A step whose rows have [`PREVIOUS`] as input may be started before the one before it is
    /// collected, so that a device is never idle between two: at most two are under way, and are
    /// collected in their order. All rows of both must be such that the device can draw
    /// ([`Self::can_pipeline`], no log-probabilities, or `Want::Nothing`). Rows that end with the
    /// first are to be closed or truncated: their part of the second fails and is not committed.
    /// Without such a row, steps that were not collected are forgotten.
    ///
    /// # Errors
    /// `InvalidPlan` before anything ran; `Device` when every array is suspect.
    fn submit(&mut self, plan: &StepPlan<'_>) -> Result<StepHandle, EngineError>;

    /// Waits for the step and commits its rows. An error of the step voids the one after it.
    ///
    /// # Errors
    /// `Device` when every array is suspect, `InvalidPlan` for a foreign handle.
    fn collect(&mut self, step: StepHandle) -> Result<StepOutcome, EngineError>;

    /// Whether tokens with these parameters can be drawn on the device, and overlapping steps have
    /// not turned out to cost more than they gain. A hint: [`Self::submit`] takes such plans anyway.
    fn can_pipeline(&self, _params: &SamplingParams) -> bool {
        false
    }
}

/// Weights packed for a backend, on their way from the loader thread to the
/// compute thread.
pub trait PreparedEngine: Send {
    /// Takes the weights over on the compute thread, without copying on the CPU.
    ///
    /// # Errors
    /// `Device` when the backend cannot be brought up.
    fn adopt(self: Box<Self>, epoch: Epoch) -> Result<Box<dyn Engine>, EngineError>;
}

/// A model read, checked and packed by a [`ModelSource`].
pub struct LoadedModel {
    /// The text side, for preparation and detokenizing.
    pub text: Arc<TextModel>,
    /// The weights, for the compute thread.
    pub engine: Box<dyn PreparedEngine>,
    /// Names the weights by all that is in them, where somebody asked for that: another file under
    /// the same name has another.
    pub fingerprint: Option<String>,
}

/// Where a model comes from. Asked on a loader thread, again after an engine was lost.
pub trait ModelSource: Send + Sync {
    /// The model's id in the API: the file's stem or the folder's name.
    fn id(&self) -> &str;

    /// Reads, checks and packs everything. Takes seconds; blocks.
    ///
    /// # Errors
    /// Any [`LoadError`]; never panics on what a file holds.
    fn load(&self) -> Result<LoadedModel, LoadError>;
}
