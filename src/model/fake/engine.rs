//! The scripted engine itself: blocks, sequences, steps.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::control::FakeControl;
use super::{Fault, Reply, Script};
use crate::model::engine::{draws_on_device, is_best_token};
use crate::model::ops::{check_bytes, check_piece};
use crate::model::sampler::Scores;
use crate::model::text::TextModel;
use crate::model::{
    Engine, EngineInfo, EngineMemory, KvNumbers, PREVIOUS, RowOutcome, StepHandle, StepOutcome, StepPlan,
    Want,
};
use crate::types::{EngineError, Epoch, SamplingParams, SequenceId, TokenId};

const BYTES_PER_TOKEN: u64 = 64;

#[derive(Debug, Default)]
struct Sequence {
    tokens: Vec<TokenId>,
    blocks: Vec<u64>,
}

#[derive(Debug)]
struct PendingRow {
    sequence: SequenceId,
    start: u32,
    input: Vec<TokenId>,
    /// Its sequence was closed or truncated since.
    is_void: bool,
    /// Tokens of output so far, if a token is wanted.
    sample: Option<usize>,
    /// Log-probabilities wanted.
    scores: Option<u8>,
    /// The inputs after the first are proposals.
    verify: bool,
}

/// See the module.
pub(super) struct FakeEngine {
    info: EngineInfo,
    script: Arc<Script>,
    text: Arc<TextModel>,
    control: FakeControl,
    sequences: BTreeMap<u64, Sequence>,
    /// Owners of each block in use.
    owners: BTreeMap<u64, u32>,
    numbers: u64,
    /// Steps under way, oldest first.
    pending: VecDeque<(u64, Vec<PendingRow>)>,
    /// What the last step drew, by sequence.
    drawn: BTreeMap<u64, TokenId>,
    panics_when_dropped: bool,
}

impl FakeEngine {
    pub(super) fn new(script: Arc<Script>, text: Arc<TextModel>, control: FakeControl, epoch: Epoch) -> Self {
        let info = EngineInfo {
            epoch,
            vocab: text.tokenizer.vocab_size(),
            context: text.context,
            kv_bytes_per_token: BYTES_PER_TOKEN,
            kv_block_tokens: script.block_tokens,
            pipelined: script.overlaps,
            numerics_id: "fake".into(),
            kv_format: "tokens".into(),
            kv_numbers: KvNumbers::Opaque,
            device: "scripted".into(),
            batches: script.batches,
            survives_panics: script.survives_panics,
            shares_prefixes: true,
            trims: script.trims,
        };
        Self {
            info,
            script,
            text,
            control,
            sequences: BTreeMap::new(),
            owners: BTreeMap::new(),
            numbers: 0,
            pending: VecDeque::new(),
            drawn: BTreeMap::new(),
            panics_when_dropped: false,
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn known(&self, sequence: SequenceId) -> Result<&Sequence, EngineError> {
        if sequence.epoch != self.info.epoch {
            return Err(EngineError::StaleEpoch { sequence });
        }
        self.sequences.get(&sequence.number).ok_or(EngineError::UnknownSequence { sequence })
    }

    fn block_bytes(&self) -> u64 {
        u64::from(self.info.kv_block_tokens) * BYTES_PER_TOKEN
    }

    fn blocks_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.info.kv_block_tokens) as usize
    }

    fn need(&self, blocks: usize) -> Result<(), EngineError> {
        let free = (self.script.kv_blocks as usize).saturating_sub(self.owners.len());
        if blocks <= free {
            return Ok(());
        }
        let bytes = |blocks: usize| blocks as u64 * self.block_bytes();
        Err(EngineError::KvFull { need: bytes(blocks), free: bytes(free) })
    }

    fn new_block(&mut self) -> u64 {
        let block = self.number();
        self.owners.insert(block, 1);
        block
    }

    fn release(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            if let Some(owners) = self.owners.get_mut(&block) {
                *owners -= 1;
                if *owners == 0 {
                    self.owners.remove(&block);
                }
            }
        }
    }

    /// The sequence's row in the last step under way.
    fn under_way(&self, sequence: SequenceId) -> Option<&PendingRow> {
        let rows = self.pending.iter().flat_map(|(_, rows)| rows);
        rows.rev().find(|row| row.sequence == sequence && !row.is_void)
    }

    fn void(&mut self, sequence: SequenceId) {
        let rows = self.pending.iter_mut().flat_map(|(_, rows)| rows);
        rows.filter(|row| row.sequence == sequence).for_each(|row| row.is_void = true);
    }

    fn check(&self, plan: &StepPlan<'_>) -> Result<(), EngineError> {
        let broken = |message: String| Err(EngineError::InvalidPlan { message });
        let overlaps = plan.rows.iter().any(|row| row.input == [PREVIOUS]);
        // An engine would forget a step under way here; whoever schedules is not to let it.
        if plan.rows.is_empty() || self.pending.len() != usize::from(overlaps) {
            return broken(format!("an empty plan, or {} steps under way", self.pending.len()));
        }
        for (index, row) in plan.rows.iter().enumerate() {
            let sequence = self.known(row.sequence)?;
            let before = self.under_way(row.sequence);
            let held = before.map_or(sequence.tokens.len(), |row| row.start as usize + row.input.len());
            if plan.rows.iter().take(index).any(|other| other.sequence == row.sequence) {
                return broken(format!("{:?} twice", row.sequence));
            }
            if row.input.is_empty() || row.start as usize != held {
                return broken(format!("starts at {}, has {held}", row.start));
            }
            if row.input == [PREVIOUS] && before.and_then(|row| row.sample).is_none() {
                return broken("nothing is drawn for it".into());
            }
            if overlaps && !draws_on_device(row) {
                return broken("the host draws for a row of steps that overlap".into());
            }
            let all = u32::try_from(held + row.input.len()).unwrap_or(u32::MAX);
            if all > self.info.context || self.blocks_for(all) > sequence.blocks.len() {
                return broken(format!("no room for {all} tokens"));
            }
        }
        Ok(())
    }

    fn text_of(&self, tokens: &[TokenId]) -> String {
        self.text.tokenizer.decode(tokens, true)
    }

    /// The next token: from the script, or from all tokens before it.
    fn next(&self, tokens: &[TokenId], produced: usize) -> TokenId {
        let prompt = if self.script.replies.is_empty() {
            String::new()
        } else {
            self.text_of(&tokens[..tokens.len().saturating_sub(produced)])
        };
        let found = self
            .script
            .replies
            .iter()
            .filter_map(|(when, reply)| Some((prompt.rfind(when.as_str())?, reply)))
            .max_by_key(|(place, _)| *place);
        let end = self.text.end_tokens.first().copied().unwrap_or(TokenId(0));
        let byte = |byte: &u8| TokenId(u32::from(*byte));
        match found {
            Some((_, Reply::Say(text))) => text.as_bytes().get(produced).map_or(end, byte),
            Some((_, Reply::Repeat(text))) => {
                text.as_bytes().get(produced % text.len().max(1)).map_or(end, byte)
            }
            None => {
                let hash = hash(tokens);
                if produced > 0 && hash.is_multiple_of(41) {
                    end
                } else {
                    TokenId(u32::from(b'a') + (hash / 41 % 26) as u32)
                }
            }
        }
    }

    /// Draws after each of `tokens[start..]` until one differs from the token that follows there.
    fn confirm(&self, tokens: &[TokenId], start: usize, produced: usize) -> Vec<TokenId> {
        let prompt = tokens.len() - produced;
        let mut drawn = Vec::new();
        for end in start + 1..=tokens.len() {
            let token = self.next(&tokens[..end], end - prompt);
            drawn.push(token);
            if tokens.get(end) != Some(&token) {
                break;
            }
        }
        drawn
    }

    /// Made up: the drawn token is the best one, those after it follow, each by half less.
    fn scores(&self, drawn: TokenId, count: u8) -> Scores {
        let of = |rank: u32| (TokenId((drawn.0 + rank) % self.info.vocab), -0.5 * (rank + 1) as f32);
        Scores { drawn: -0.5, top: (0..u32::from(count)).map(of).collect() }
    }

    fn run(&mut self, mut row: PendingRow) -> RowOutcome {
        let Some(sequence) = self.sequences.get(&row.sequence.number) else {
            return RowOutcome::Failed(EngineError::UnknownSequence { sequence: row.sequence });
        };
        if row.is_void || row.start as usize != sequence.tokens.len() {
            let message = "its sequence was changed meanwhile".into();
            return RowOutcome::Failed(EngineError::InvalidPlan { message });
        }
        for token in row.input.iter_mut().filter(|token| **token == PREVIOUS) {
            *token = self.drawn.get(&row.sequence.number).copied().unwrap_or(PREVIOUS);
        }
        let mut tokens = sequence.tokens.clone();
        let start = tokens.len();
        tokens.extend(&row.input);
        if !self.script.row_faults.is_empty() {
            let text = self.text_of(&tokens);
            let fault = self.script.row_faults.iter().find(|(when, _)| text.contains(when.as_str()));
            if let Some((_, error)) = fault {
                return RowOutcome::Failed(error.clone());
            }
        }
        let outcome = match row.sample {
            None => RowOutcome::Advanced,
            Some(produced) if row.verify => {
                let drawn = self.confirm(&tokens, start, produced);
                tokens.truncate(start + drawn.len());
                RowOutcome::Verified { tokens: drawn }
            }
            Some(produced) => {
                let token = self.next(&tokens, produced);
                self.drawn.insert(row.sequence.number, token);
                let scores = row.scores.map(|count| self.scores(token, count));
                RowOutcome::Sampled { token, scores }
            }
        };
        if let Some(sequence) = self.sequences.get_mut(&row.sequence.number) {
            sequence.tokens = tokens;
        }
        outcome
    }
}

impl Engine for FakeEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn memory(&self) -> EngineMemory {
        EngineMemory {
            weight_bytes: 0,
            kv_capacity_bytes: u64::from(self.script.kv_blocks) * self.block_bytes(),
            kv_used_bytes: self.owners.len() as u64 * self.block_bytes(),
        }
    }

    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        let mut opened = Sequence::default();
        if let Some((source, length)) = from {
            let source = self.known(source)?;
            let Some(tokens) = source.tokens.get(..length as usize) else {
                let message = format!("{length} of {} tokens", source.tokens.len());
                return Err(EngineError::InvalidPlan { message });
            };
            if !self.info.trims && tokens.len() < source.tokens.len() {
                let message = format!("a fork at {length} of a state of {} tokens", source.tokens.len());
                return Err(EngineError::InvalidPlan { message });
            }
            opened.tokens = tokens.to_vec();
            opened.blocks = source.blocks[..(length / self.info.kv_block_tokens) as usize].to_vec();
            // The tail is copied: a block with two owners is never written.
            let tail = self.blocks_for(length) - opened.blocks.len();
            self.need(tail)?;
            for block in &opened.blocks {
                *self.owners.entry(*block).or_insert(0) += 1;
            }
            for _ in 0..tail {
                let block = self.new_block();
                opened.blocks.push(block);
            }
        }
        let number = self.number();
        self.sequences.insert(number, opened);
        Ok(SequenceId { epoch: self.info.epoch, number })
    }

    fn reserve(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        if tokens > self.info.context {
            return Err(EngineError::InvalidPlan { message: format!("{tokens} beyond the context") });
        }
        let missing = self.blocks_for(tokens).saturating_sub(self.known(sequence)?.blocks.len());
        self.need(missing)?;
        for _ in 0..missing {
            let block = self.new_block();
            if let Some(sequence) = self.sequences.get_mut(&sequence.number) {
                sequence.blocks.push(block);
            }
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        if (tokens as usize) < self.known(sequence)?.tokens.len() && !self.info.trims {
            return Err(EngineError::InvalidPlan { message: format!("cut back to {tokens}") });
        }
        self.void(sequence);
        let keep = self.blocks_for(tokens);
        let mut freed = Vec::new();
        if let Some(sequence) = self.sequences.get_mut(&sequence.number) {
            sequence.tokens.truncate(tokens as usize);
            freed = sequence.blocks.split_off(keep.min(sequence.blocks.len()));
        }
        self.release(freed);
        Ok(())
    }

    fn close(&mut self, sequence: SequenceId) {
        if sequence.epoch == self.info.epoch
            && let Some(closed) = self.sequences.remove(&sequence.number)
        {
            self.void(sequence);
            self.drawn.remove(&sequence.number);
            self.release(closed.blocks);
        }
    }

    /// The tokens themselves, so that wrong bytes give other answers.
    fn export(&mut self, sequence: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError> {
        let sequence = self.known(sequence)?;
        check_piece(&range, sequence.tokens.len() as u32)?;
        let tokens = &sequence.tokens[range.start as usize..range.end as usize];
        Ok(tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect())
    }

    fn import(&mut self, sequence: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError> {
        let known = self.known(sequence)?;
        check_piece(&range, known.blocks.len() as u32 * self.info.kv_block_tokens)?;
        check_bytes(bytes.len(), 4 * range.len())?;
        if range.start as usize != known.tokens.len() {
            return Err(EngineError::InvalidPlan { message: "the piece does not follow".into() });
        }
        let tokens = bytes.as_chunks::<4>().0.iter().map(|token| TokenId(u32::from_le_bytes(*token)));
        if let Some(sequence) = self.sequences.get_mut(&sequence.number) {
            sequence.tokens.extend(tokens);
        }
        Ok(())
    }

    fn submit(&mut self, plan: &StepPlan<'_>) -> Result<StepHandle, EngineError> {
        self.check(plan)?;
        let rows: Vec<PendingRow> = plan
            .rows
            .iter()
            .map(|row| PendingRow {
                sequence: row.sequence,
                start: row.start,
                input: row.input.to_vec(),
                is_void: false,
                sample: match &row.want {
                    // Where the token before it is being drawn, that one counts as well.
                    Want::Sample(sample) | Want::Verify(sample) => {
                        Some(sample.output.len() + usize::from(row.input == [PREVIOUS]))
                    }
                    _ => None,
                },
                scores: match &row.want {
                    Want::Sample(sample) => sample.scores,
                    _ => None,
                },
                verify: matches!(row.want, Want::Verify(_)),
            })
            .collect();
        let handle = self.number();
        self.pending.push_back((handle, rows));
        Ok(StepHandle(handle))
    }

    fn collect(&mut self, step: StepHandle) -> Result<StepOutcome, EngineError> {
        let rows = match self.pending.pop_front() {
            Some((number, rows)) if number == step.0 => rows,
            _ => return Err(EngineError::InvalidPlan { message: "no such step".into() }),
        };
        let described = rows.iter().map(|row| {
            let start = self.sequences.get(&row.sequence.number).map_or(0, |known| known.tokens.len());
            (row.sequence, start as u32, row.input.len() as u32, row.sample.is_some())
        });
        let number = self.control.begin(described);
        if let Some(clock) = &self.script.clock {
            let tokens = rows.iter().map(|row| row.input.len() as u32).sum::<u32>();
            let attended = rows.iter().map(|row| self.attended(row)).sum::<u32>();
            clock.advance(
                self.script.step_time
                    + self.script.token_time * tokens
                    + self.script.position_time * attended,
            );
        }
        let fault = self.script.step_faults.get(&number).cloned().or_else(|| self.poisoned(&rows));
        if let Some(fault @ (Fault::Panic(_) | Fault::PanicTwice(_) | Fault::Fail(_))) = fault {
            self.control.finish(number);
            self.pending.clear();
            return self.break_down(fault);
        }
        let mut outcome = StepOutcome::default();
        for (index, row) in rows.into_iter().enumerate() {
            outcome.rows.push(match &fault {
                Some(Fault::FailRow(which, error)) if *which == index => RowOutcome::Failed(error.clone()),
                _ => self.run(row),
            });
        }
        self.control.finish(number);
        Ok(outcome)
    }

    fn can_pipeline(&self, params: &SamplingParams) -> bool {
        self.script.overlaps && is_best_token(params)
    }
}

impl FakeEngine {
    fn attended(&self, row: &PendingRow) -> u32 {
        let held = self.sequences.get(&row.sequence.number).map_or(0, |known| known.tokens.len());
        (held * row.input.len()) as u32
    }

    fn poisoned(&self, rows: &[PendingRow]) -> Option<Fault> {
        let contains = |row: &PendingRow, when: &str| {
            let held = self.sequences.get(&row.sequence.number).map_or(&[][..], |known| &known.tokens);
            self.text_of(&[held, &row.input].concat()).contains(when)
        };
        let poisons = self.script.poisons.iter();
        poisons
            .filter(|(when, _)| rows.iter().any(|row| contains(row, when)))
            .map(|(_, fault)| fault.clone())
            .next()
    }

    fn break_down(&mut self, fault: Fault) -> Result<StepOutcome, EngineError> {
        match fault {
            Fault::Fail(error) => Err(error),
            Fault::FailRow(_, error) => Err(error),
            Fault::PanicTwice(message) => {
                self.panics_when_dropped = !self.info.survives_panics;
                // PANIC: the script asks for it.
                std::panic::panic_any(message)
            }
            // PANIC: the script asks for it.
            Fault::Panic(message) => std::panic::panic_any(message),
        }
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        if self.panics_when_dropped && !std::thread::panicking() {
            // PANIC: the script asks for it.
            std::panic::panic_any("the broken engine panics once more".to_owned());
        }
    }
}

/// FNV-1a over ids: any change anywhere changes what follows.
fn hash(tokens: &[TokenId]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64;
    let mixed = tokens
        .iter()
        .flat_map(|token| token.0.to_le_bytes())
        .fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    // The low bits of FNV are weak.
    mixed ^ (mixed >> 29)
}
