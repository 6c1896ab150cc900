//! The operators a model family is written in, and the key-value seam.
//!
//! One implementation a backend: the eager `CpuOps`, and `MlxOps` over MLX's
//! lazy graph. A family's file knows only this trait: no `if device` there.
//! Operators are cut where both backends do well: fused on the CPU (a norm with
//! the product that follows), a handful of graph nodes on MLX.
//!
//! Activations are `[tokens, width]`, all rows of a step packed; only
//! [`Ops::attend`] looks at rows.

use std::ops::Range;

use crate::model::KvNumbers;
use crate::model::load::HostTensor;
use crate::types::{EngineError, LoadError, SequenceId, TokenId};

pub mod speech;

/// Index of a decoder layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayerId(pub usize);

/// One row of a step inside the packed tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepRow {
    /// The row's key-value state.
    pub sequence: SequenceId,
    /// Index of its first token in the packed step.
    pub first: usize,
    /// How many tokens it has in this step, at least 1.
    pub len: usize,
    /// Absolute position of the first of them = committed length of the sequence.
    pub start: u32,
}

/// A step as operators see it.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// All tokens, packed row after row.
    pub tokens: &'a [TokenId],
    /// Absolute position of each token.
    pub positions: &'a [u32],
    /// The rows, in order, covering `tokens` exactly.
    pub rows: &'a [StepRow],
}

/// Root-mean-square norm: `x / sqrt(mean(x²) + eps) · weight`.
#[derive(Clone, Debug)]
pub struct Norm<V> {
    /// `[width]`.
    pub weight: V,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rotary position embedding of the first `2 · inv_freq.len()` dimensions of a
/// head; pair `i` is `(x[i], x[i + n])` with `n = inv_freq.len()` ("halves").
/// Checkpoints with neighbouring pairs have their rows reordered at load.
#[derive(Clone, Debug)]
pub struct Rope<V> {
    /// Radians a position, `[rotated / 2]`; scaling is already inside.
    pub inv_freq: V,
    /// Dimensions of a head that are rotated.
    pub dims: usize,
    /// Multiplies what is rotated, of queries and of keys; usually 1.
    pub scale: f32,
}

/// Grouped-query attention of one layer.
#[derive(Clone, Debug)]
pub struct AttnSpec<V> {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// A scaled score `s` becomes `cap · tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Sees only the last so many positions, itself included.
    pub window: Option<u32>,
    /// Applied to queries and keys after the norms.
    pub rope: Option<Rope<V>>,
    /// Norm of the queries: `[head_dim]` norms each head, `[heads · head_dim]` all heads as one.
    pub q_norm: Option<Norm<V>>,
    /// Norm of the keys, likewise `[head_dim]` or `[kv_heads · head_dim]`.
    pub k_norm: Option<Norm<V>>,
}

/// Activation of a gated unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU, tanh approximation.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
}

/// Logits on the host: `[rows][vocab]`, f32, row-major.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Logits {
    /// Width of a row.
    pub vocab: usize,
    /// `rows · vocab` values.
    pub data: Vec<f32>,
}

impl Logits {
    /// One row's logits, or an empty slice beyond the end.
    pub fn row(&self, row: usize) -> &[f32] {
        let start = row.saturating_mul(self.vocab);
        self.data.get(start..start + self.vocab).unwrap_or(&[])
    }

    /// Shapes every logit, one after the other: what backends without an own loop do.
    pub fn shape(&mut self, shape: &LogitShape) {
        for logit in &mut self.data {
            let scaled = *logit * shape.scale;
            *logit = shape.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        }
    }
}

/// What a family does to logits after the head.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogitShape {
    /// Multiplies them first.
    pub scale: f32,
    /// A scaled logit `x` becomes `cap · tanh(x / cap)`.
    pub softcap: Option<f32>,
}

/// Shape of a model's key-value state; every layer alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvShape {
    /// Decoder layers.
    pub layers: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Keys and values leave a store in pieces that do not cross a multiple of so many tokens.
pub const EXPORT_TOKENS: u32 = 64;

/// Checks a piece's range; `committed` is where it must end at the latest.
pub(crate) fn check_piece(range: &Range<u32>, most: u32) -> Result<(), EngineError> {
    let Range { start, end } = *range;
    if start < end && end <= most && start / EXPORT_TOKENS == (end - 1) / EXPORT_TOKENS {
        return Ok(());
    }
    let message = format!("{start}..{end} is no piece of a sequence of {most} tokens");
    Err(EngineError::InvalidPlan { message })
}

/// Checks a piece's length in bytes.
pub(crate) fn check_bytes(have: usize, needed: usize) -> Result<(), EngineError> {
    if have == needed {
        return Ok(());
    }
    Err(EngineError::InvalidPlan { message: format!("a piece of {have} bytes, it must have {needed}") })
}

/// Key-value memory, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvStats {
    /// All there is.
    pub capacity_bytes: u64,
    /// In use, shared blocks counted once.
    pub used_bytes: u64,
    /// Of one token, all layers.
    pub bytes_per_token: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// The rows' key-value state. Two layouts: the CPU's pool of shared blocks, and
/// MLX's contiguous array a row.
///
/// Appending is a positional write that [`Ops::attend`] does beyond the committed
/// length; only [`KvStore::commit`] makes it count. A block that two sequences
/// share is never written.
pub trait KvStore {
    /// Sequences with a common prefix share its memory.
    const SHARES_PREFIXES: bool;

    /// Opens a sequence, empty or sharing a prefix of `.1` tokens of another.
    ///
    /// # Errors
    /// See [`crate::model::Engine::open`].
    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError>;

    /// Makes room for `tokens` in all.
    ///
    /// # Errors
    /// `KvFull` with the missing bytes; what was there stays.
    fn reserve(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError>;

    /// Declares the first `tokens` positions as good.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` beyond what is reserved.
    fn commit(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError>;

    /// Forgets positions from `tokens` on and gives whole blocks back.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`.
    fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError>;

    /// The committed length.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`.
    fn len(&self, sequence: SequenceId) -> Result<u32, EngineError>;

    /// The largest length `≤ at` that a fork can start from.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`.
    fn restorable(&self, sequence: SequenceId, at: u32) -> Result<u32, EngineError>;

    /// Gives everything back; unknown sequences are ignored.
    fn close(&mut self, sequence: SequenceId);

    /// Committed keys and values as they are stored, see [`crate::model::Engine::export`].
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` for a range that is empty, not committed, or
    /// crosses a multiple of [`EXPORT_TOKENS`]; `Device`.
    fn export(&self, sequence: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError>;

    /// Writes what [`KvStore::export`] gave behind the committed tokens; it counts once committed.
    ///
    /// # Errors
    /// As for `export`; `InvalidPlan` where room is missing, or the bytes are not as many as they
    /// must be.
    fn import(&mut self, sequence: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError>;

    /// How [`KvStore::export`] lays bytes out, in words that differ where bytes do.
    fn format(&self) -> String;

    /// What those bytes are numbers of.
    fn numbers(&self) -> KvNumbers;

    /// Memory now.
    fn stats(&self) -> KvStats;
}

fn draws_on_the_host() -> EngineError {
    EngineError::InvalidPlan { message: "this backend draws tokens on the host".into() }
}

/// What a backend is started with, on the compute thread.
#[derive(Clone, Debug)]
pub struct StartOps {
    /// Stamped on every sequence.
    pub epoch: crate::types::Epoch,
    /// Of the model.
    pub kv: KvShape,
    /// Key-value bytes that may be used.
    pub kv_budget_bytes: u64,
    /// Most tokens a sequence may hold.
    pub context: u32,
}

/// Draws of an earlier step, and for some packed indices which of them stands there.
pub type Placed<'a, D> = (&'a D, &'a [(usize, usize)]);

/// The operators. `T` is a packed activation `[tokens, width]`, `W` a packed
/// weight (rows of several matrices stacked), `V` a small f32 vector.
///
/// Every method may fail with `EngineError::Device`; the CPU's never does.
pub trait Ops: Sized {
    /// Settings of the backend; the loader thread packs with them, the compute thread starts with them.
    type Config: Clone + Send + 'static;
    /// Activations.
    type T;
    /// Tokens that a device was told to draw; perhaps not drawn yet.
    type Draws;
    /// Packed weight.
    type W;
    /// Small vector on the device: norm weights, frequencies.
    type V: Clone;
    /// A weight between the two threads.
    type Packed: Send + 'static;
    /// Key-value state.
    type Kv: KvStore;

    /// Whether weights, committed keys and values and the backend itself are as before after a panic
    /// in a step: true where every write of a step goes beyond the committed lengths.
    const SURVIVES_PANICS: bool;

    /// Packs matrices of equal width, stacked by rows, for this backend. Loader thread, no device.
    ///
    /// # Errors
    /// `Tensor` or `Unsupported` where the type or the width cannot be packed.
    fn pack(config: &Self::Config, parts: &[HostTensor<'_>]) -> Result<Self::Packed, LoadError>;

    /// Brings the backend up. Compute thread.
    ///
    /// # Errors
    /// `Device`.
    fn start(config: &Self::Config, start: &StartOps) -> Result<(Self, Self::Kv), EngineError>;

    /// Takes a packed weight over; no copy on the CPU.
    ///
    /// # Errors
    /// `Device`.
    fn adopt(&mut self, packed: Self::Packed) -> Result<Self::W, EngineError>;

    /// Puts a small vector on the device.
    ///
    /// # Errors
    /// `Device`.
    fn vector(&mut self, values: &[f32]) -> Result<Self::V, EngineError>;

    /// Rows of the embedding: `[tokens, width]`.
    ///
    /// # Errors
    /// `Device`.
    fn embed(&mut self, table: &Self::W, step: &Step<'_>) -> Result<Self::T, EngineError>;

    /// `norm(x) · wᵀ`: `[tokens, rows of w]`. q·k·v in one, gate·up in one.
    ///
    /// # Errors
    /// `Device`.
    fn norm_linear(&mut self, x: &Self::T, norm: &Norm<Self::V>, w: &Self::W)
    -> Result<Self::T, EngineError>;

    /// `x · wᵀ`: `[tokens, rows of w]`.
    ///
    /// # Errors
    /// `Device`.
    fn linear(&mut self, x: &Self::T, w: &Self::W) -> Result<Self::T, EngineError>;

    /// `x + bias`, the bias `[width]` for every token.
    ///
    /// # Errors
    /// `Device`.
    fn add_bias(&mut self, x: Self::T, bias: &Self::V) -> Result<Self::T, EngineError>;

    /// `x · by`.
    ///
    /// # Errors
    /// `Device`.
    fn scale(&mut self, x: Self::T, by: f32) -> Result<Self::T, EngineError>;

    /// `residual + by · norm(x)`; without a norm `residual + by · x`.
    ///
    /// # Errors
    /// `Device`.
    fn add_residual(
        &mut self,
        x: Self::T,
        norm: Option<&Norm<Self::V>>,
        by: f32,
        residual: Self::T,
    ) -> Result<Self::T, EngineError>;

    /// Norms and rotates heads, appends keys and values at the tokens' positions, attends causally.
    /// `qkv` is `[tokens, (heads + 2 · kv_heads) · head_dim]`, the result `[tokens, heads · head_dim]`.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` where room is missing.
    fn attend(
        &mut self,
        kv: &mut Self::Kv,
        layer: LayerId,
        qkv: Self::T,
        spec: &AttnSpec<Self::V>,
        step: &Step<'_>,
    ) -> Result<Self::T, EngineError>;

    /// `x · wᵀ + residual`.
    ///
    /// # Errors
    /// `Device`.
    fn linear_add(&mut self, x: Self::T, w: &Self::W, residual: Self::T) -> Result<Self::T, EngineError>;

    /// `act(x[:, ..n/2]) · x[:, n/2..]`: `[tokens, n/2]`.
    ///
    /// # Errors
    /// `Device`.
    fn glu(&mut self, x: Self::T, act: Act) -> Result<Self::T, EngineError>;

    /// Logits of the given packed token indices: `norm(x[rows]) · wᵀ`, on the host.
    /// Called once a step, last, also without rows: a lazy backend computes the step here.
    ///
    /// # Errors
    /// `Device`.
    fn head(
        &mut self,
        x: &Self::T,
        norm: &Norm<Self::V>,
        w: &Self::W,
        rows: &[usize],
    ) -> Result<Logits, EngineError>;

    /// Whether the device can draw tokens itself, so that the next step can begin before this one's
    /// are known: then [`Self::draw`] and [`Self::drawn`] are there.
    const OVERLAPS: bool = false;

    /// Announces a step before its first operator. `drawn` are packed indices whose token is not
    /// [`Step::tokens`]'s but the `.1`-th of an earlier step's draws.
    ///
    /// # Errors
    /// `Device`.
    fn begin(
        &mut self,
        _step: &Step<'_>,
        _drawn: Option<Placed<'_, Self::Draws>>,
    ) -> Result<(), EngineError> {
        Ok(())
    }

    /// In place of [`Self::head`]: has the device draw the best token of each given packed index,
    /// the first among equals, and starts to compute the step without waiting for it.
    ///
    /// # Errors
    /// `Device`; `InvalidPlan` where [`Self::OVERLAPS`] is false.
    fn draw(
        &mut self,
        _kv: &mut Self::Kv,
        _hidden: &Self::T,
        _head: (&Norm<Self::V>, &Self::W, &LogitShape),
        _rows: &[usize],
    ) -> Result<Self::Draws, EngineError> {
        Err(draws_on_the_host())
    }

    /// Waits for draws: a token for each, or `None` where a logit was not finite.
    ///
    /// # Errors
    /// `Device`; `InvalidPlan` where [`Self::OVERLAPS`] is false.
    fn drawn(&mut self, _draws: &Self::Draws) -> Result<Vec<Option<TokenId>>, EngineError> {
        Err(draws_on_the_host())
    }

    /// Whether overlapping steps pay so far.
    fn overlap_pays(&self) -> bool {
        Self::OVERLAPS
    }

    /// Shapes logits on the host.
    fn shape_logits(&mut self, logits: &mut Logits, shape: &LogitShape) {
        logits.shape(shape);
    }

    /// Everything that changes bits, see [`crate::model::EngineInfo::numerics_id`].
    fn numerics_id(&self) -> String;

    /// The device in words.
    fn device(&self) -> String;

    /// Bytes of the weights adopted so far.
    fn weight_bytes(&self) -> u64;
}
