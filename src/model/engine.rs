//! The engine over any backend: checks a plan, runs the family's forward over
//! the packed step, samples, commits.
//!
//! Knows neither files nor devices; a family and a backend meet here. What holds
//! after every call, also one that failed or panicked: a sequence's committed
//! tokens are exactly those of steps that were collected, because the operators
//! only write beyond the committed length.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use crate::model::families::{Decoder, DecoderFacts, PackedDecoder};
use crate::model::ops::{KvStore, Logits, Ops, StartOps, Step, StepRow};
use crate::model::sampler::Sampler;
use crate::model::{Engine, EngineInfo, EngineMemory, PlanRow, PreparedEngine, RowOutcome, SampleFor};
use crate::model::{PREVIOUS, StepHandle, StepOutcome, StepPlan, Want};
use crate::types::{EngineError, Epoch, SamplingParams, SequenceId, TokenId};

/// A family's decoder on a backend.
pub struct DecoderEngine<O: Ops> {
    info: EngineInfo,
    // In this order: a backend goes when nothing of its own is left.
    /// Steps under way, at most two; the second takes tokens that the first draws.
    pending: VecDeque<Pending<O::Draws>>,
    decoder: Box<dyn Decoder<O>>,
    kv: O::Kv,
    ops: O,
    sampler: Sampler,
    /// Tokens that each open sequence has room for.
    rooms: HashMap<SequenceId, u32>,
    next_step: u64,
}

/// A step that runs or ran, and waits to be collected.
struct Pending<D> {
    step: u64,
    rows: Vec<PendingRow>,
    /// Of a step that draws on the device.
    draws: Option<D>,
}

struct PendingRow {
    sequence: SequenceId,
    /// Committed length when it ran.
    start: u32,
    /// Committed length once collected.
    end: u32,
    /// Of a token that the device draws: what becomes of the row without it.
    outcome: RowOutcome,
    /// Which of the step's draws is the row's.
    draw: Option<usize>,
    /// Its sequence was closed or truncated since it was submitted.
    is_void: bool,
}

/// A plan, packed.
struct PackedStep {
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    rows: Vec<StepRow>,
    /// Packed indices whose logits are wanted.
    wanted: Vec<usize>,
}

impl<O: Ops> DecoderEngine<O> {
    /// Joins a started backend with the family's adopted weights. `context` is the
    /// most tokens a sequence may hold.
    pub fn new(ops: O, kv: O::Kv, decoder: Box<dyn Decoder<O>>, facts: &DecoderFacts, life: Life) -> Self {
        let stats = kv.stats();
        let info = EngineInfo {
            epoch: life.epoch,
            vocab: facts.vocab,
            context: life.context,
            kv_bytes_per_token: stats.bytes_per_token,
            kv_block_tokens: stats.block_tokens,
            pipelined: O::OVERLAPS,
            numerics_id: ops.numerics_id(),
            kv_format: kv.format(),
            kv_numbers: kv.numbers(),
            device: ops.device(),
            batches: true,
            survives_panics: O::SURVIVES_PANICS,
            shares_prefixes: O::Kv::SHARES_PREFIXES,
            // Windows are masks and there are no recurrent layers yet: every length is restorable.
            trims: true,
        };
        Self {
            info,
            ops,
            kv,
            decoder,
            sampler: Sampler::default(),
            rooms: HashMap::new(),
            next_step: 0,
            pending: VecDeque::new(),
        }
    }

    fn check_row(&self, row: &PlanRow<'_>) -> Result<(), EngineError> {
        let mut committed = self.kv.len(row.sequence)?;
        let under_way = self.under_way(row.sequence);
        if let Some(before) = under_way {
            committed = before.end;
        }
        let previous = row.input == [PREVIOUS];
        let room = self.rooms.get(&row.sequence).copied().unwrap_or(0);
        let end = u64::from(row.start) + row.input.len() as u64;
        let message = if row.input.is_empty() {
            "a row has no input".into()
        } else if row.start != committed {
            format!("a row starts at {}, its sequence holds {committed} tokens", row.start)
        } else if end > u64::from(room) {
            format!("a row ends at {end}, its sequence has room for {room} tokens")
        } else if previous && under_way.and_then(|row| row.draw).is_none() {
            "no step under way draws a token for a row that is to continue with it".into()
        } else if let Some(token) = row.input.iter().find(|token| !previous && token.0 >= self.info.vocab) {
            format!("token {token} is outside the vocabulary of {}", self.info.vocab)
        } else {
            return Ok(());
        };
        Err(EngineError::InvalidPlan { message })
    }

    fn check(&self, plan: &StepPlan<'_>) -> Result<(), EngineError> {
        if plan.rows.is_empty() {
            return Err(EngineError::InvalidPlan { message: "a plan has no rows".into() });
        }
        let mut seen = HashSet::new();
        for row in &plan.rows {
            if !seen.insert(row.sequence) {
                let message = format!("sequence {:?} is in the plan twice", row.sequence);
                return Err(EngineError::InvalidPlan { message });
            }
            self.check_row(row)?;
        }
        Ok(())
    }

    fn run(&mut self, packed: &PackedStep) -> Result<Logits, EngineError> {
        let step = packed.step();
        self.ops.begin(&step, None)?;
        let hidden = self.decoder.forward(&mut self.ops, &mut self.kv, &step)?;
        // Also without wanted rows: a lazy backend computes the step here.
        self.decoder.logits(&mut self.ops, &hidden, &packed.wanted)
    }

    /// Draws position by position until a draw differs from what was proposed.
    fn verify(&mut self, row: &PlanRow<'_>, logits: &[&[f32]], wanted: &SampleFor<'_>) -> RowOutcome {
        let proposed = &row.input[1..];
        let Some(before) = wanted.output.len().checked_sub(proposed.len()) else {
            let message = format!("{} proposals, {} tokens of output", proposed.len(), wanted.output.len());
            return RowOutcome::Failed(EngineError::InvalidPlan { message });
        };
        let mut tokens = Vec::new();
        for (index, logits) in logits.iter().enumerate() {
            let output = &wanted.output[..before + index];
            let position = wanted.position + index as u32;
            if !logits.iter().all(|value| value.is_finite()) {
                return RowOutcome::Failed(EngineError::NotANumber);
            }
            match self.sampler.draw(logits, &SampleFor { position, output, scores: None, ..*wanted }) {
                Ok(drawn) => tokens.push(drawn.token),
                Err(error) => return RowOutcome::Failed(error),
            }
            if proposed.get(index) != tokens.last() {
                break;
            }
        }
        RowOutcome::Verified { tokens }
    }

    fn outcome(&mut self, row: &PlanRow<'_>, logits: &[&[f32]]) -> RowOutcome {
        // Behind a proposal that was wrong anything may stand.
        if let Want::Verify(wanted) = row.want {
            return self.verify(row, logits, &wanted);
        }
        if !logits.iter().all(|row| row.iter().all(|value| value.is_finite())) {
            return RowOutcome::Failed(EngineError::NotANumber);
        }
        match (row.want, logits.last()) {
            (Want::Sample(wanted), Some(last)) => match self.sampler.draw(last, &wanted) {
                Ok(drawn) => RowOutcome::Sampled { token: drawn.token, scores: drawn.scores },
                Err(error) => RowOutcome::Failed(error),
            },
            (Want::Nothing, _) | (Want::Sample(_), None) => RowOutcome::Advanced,
            _ => RowOutcome::Logits(logits.iter().map(|row| row.to_vec()).collect()),
        }
    }
}

/// Committed length of a row once its outcome is collected.
fn end_of(row: &PlanRow<'_>, outcome: &RowOutcome) -> u32 {
    let computed = match outcome {
        RowOutcome::Verified { tokens } => tokens.len(),
        _ => row.input.len(),
    };
    row.start + u32::try_from(computed).unwrap_or(u32::MAX)
}

/// What an engine's life is given: which one it is, and its limit.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// Stamped on every sequence.
    pub epoch: Epoch,
    /// Most tokens a sequence may hold.
    pub context: u32,
}

/// Whether a draw is the token with the highest logit, whatever came before.
pub(super) fn is_best_token(params: &SamplingParams) -> bool {
    params.is_greedy()
        && params.logit_bias.is_empty()
        && params.repetition_penalty == 1.0
        && params.presence_penalty == 0.0
        && params.frequency_penalty == 0.0
}

/// Whether nothing of a row has to be known on the host for the step to be started.
pub(super) fn draws_on_device(row: &PlanRow<'_>) -> bool {
    match row.want {
        Want::Nothing => true,
        Want::Sample(wanted) => wanted.scores.is_none() && is_best_token(wanted.params),
        _ => false,
    }
}

/// How many positions of a row want logits.
fn wanted_of(row: &PlanRow<'_>) -> usize {
    match row.want {
        Want::Nothing => 0,
        Want::Sample(_) | Want::LastLogits => 1,
        Want::Verify(_) | Want::AllLogits => row.input.len(),
    }
}

fn pack(plan: &StepPlan<'_>) -> PackedStep {
    let mut packed =
        PackedStep { tokens: Vec::new(), positions: Vec::new(), rows: Vec::new(), wanted: Vec::new() };
    for row in &plan.rows {
        let first = packed.tokens.len();
        packed.tokens.extend_from_slice(row.input);
        let end = row.start + row.input.len() as u32;
        packed.positions.extend(row.start..end);
        packed.rows.push(StepRow { sequence: row.sequence, first, len: row.input.len(), start: row.start });
        let after = packed.tokens.len();
        packed.wanted.extend(after - wanted_of(row)..after);
    }
    packed
}

impl PackedStep {
    fn step(&self) -> Step<'_> {
        Step { tokens: &self.tokens, positions: &self.positions, rows: &self.rows }
    }
}

impl<O: Ops> Engine for DecoderEngine<O> {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn memory(&self) -> EngineMemory {
        let stats = self.kv.stats();
        EngineMemory {
            weight_bytes: self.ops.weight_bytes(),
            kv_capacity_bytes: stats.capacity_bytes,
            kv_used_bytes: stats.used_bytes,
        }
    }

    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        let sequence = self.kv.open(from)?;
        self.rooms.insert(sequence, from.map_or(0, |(_, tokens)| tokens));
        Ok(sequence)
    }

    fn reserve(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        if tokens > self.info.context {
            let context = self.info.context;
            let message = format!("room for {tokens} tokens asked for, the context is {context}");
            return Err(EngineError::InvalidPlan { message });
        }
        self.kv.reserve(sequence, tokens)?;
        let room = self.rooms.entry(sequence).or_insert(0);
        *room = tokens.max(*room);
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        self.kv.truncate(sequence, tokens)?;
        self.void(sequence);
        if let Some(room) = self.rooms.get_mut(&sequence) {
            *room = tokens.min(*room);
        }
        Ok(())
    }

    fn close(&mut self, sequence: SequenceId) {
        self.kv.close(sequence);
        self.void(sequence);
        self.rooms.remove(&sequence);
    }

    fn export(&mut self, sequence: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError> {
        self.kv.export(sequence, range)
    }

    fn import(&mut self, sequence: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError> {
        let (end, committed) = (range.end, self.kv.len(sequence)?);
        if range.start != committed {
            let message = format!("a piece from {} on, the sequence holds {committed} tokens", range.start);
            return Err(EngineError::InvalidPlan { message });
        }
        self.kv.import(sequence, range, bytes)?;
        self.kv.commit(sequence, end)
    }

    fn submit(&mut self, plan: &StepPlan<'_>) -> Result<StepHandle, EngineError> {
        let overlaps = plan.rows.iter().any(|row| row.input == [PREVIOUS]);
        if !overlaps {
            // A step that was never collected is forgotten: it committed nothing.
            self.pending.clear();
        }
        self.check(plan)?;
        let packed = pack(plan);
        if O::OVERLAPS && plan.rows.iter().all(draws_on_device) {
            return self.start(plan, &packed);
        }
        if overlaps {
            let message = "a step that overlaps another has a row whose token the host draws".into();
            return Err(EngineError::InvalidPlan { message });
        }
        let logits = self.run(&packed)?;
        let mut rows = Vec::with_capacity(plan.rows.len());
        let mut first = 0;
        for row in &plan.rows {
            let wanted: Vec<&[f32]> = (first..first + wanted_of(row)).map(|at| logits.row(at)).collect();
            first += wanted.len();
            let outcome = self.outcome(row, &wanted);
            let end = end_of(row, &outcome);
            rows.push(PendingRow {
                sequence: row.sequence,
                start: row.start,
                end,
                outcome,
                draw: None,
                is_void: false,
            });
        }
        Ok(self.push(rows, None))
    }

    fn collect(&mut self, step: StepHandle) -> Result<StepOutcome, EngineError> {
        if self.pending.front().is_none_or(|pending| pending.step != step.0) {
            let message = format!("step {} is not the next one to be collected", step.0);
            return Err(EngineError::InvalidPlan { message });
        }
        let outcome = match self.pending.pop_front() {
            Some(pending) => self.finish(pending),
            None => Ok(StepOutcome::default()),
        };
        if outcome.is_err() {
            // What went on from this step is worth nothing either.
            self.pending.clear();
        }
        outcome
    }

    fn can_pipeline(&self, params: &SamplingParams) -> bool {
        O::OVERLAPS && self.ops.overlap_pays() && is_best_token(params)
    }
}

/// A packed model with what its backend is started with.
pub struct Prepared<O: Ops> {
    /// Of the backend.
    pub config: O::Config,
    /// The family's weights.
    pub packed: PackedDecoder<O>,
    /// Most tokens a sequence may hold.
    pub context: u32,
    /// Key-value bytes that may be used.
    pub kv_budget_bytes: u64,
}

impl<O: Ops + 'static> Prepared<O> {
    /// Brings the backend up and takes the weights over, on the compute thread.
    ///
    /// # Errors
    /// `Device` when the backend cannot be brought up.
    pub fn into_engine(self, epoch: Epoch) -> Result<DecoderEngine<O>, EngineError> {
        let start = StartOps {
            epoch,
            kv: self.packed.facts.kv,
            kv_budget_bytes: self.kv_budget_bytes,
            context: self.context,
        };
        let (mut ops, kv) = O::start(&self.config, &start)?;
        let facts = self.packed.facts.clone();
        let decoder = self.packed.adopt(&mut ops, self.context)?;
        Ok(DecoderEngine::new(ops, kv, decoder, &facts, Life { epoch, context: self.context }))
    }
}

impl<O: Ops + 'static> PreparedEngine for Prepared<O> {
    fn adopt(self: Box<Self>, epoch: Epoch) -> Result<Box<dyn Engine>, EngineError> {
        Ok(Box::new(self.into_engine(epoch)?))
    }
}

mod overlap;
#[cfg(test)]
mod tests;
