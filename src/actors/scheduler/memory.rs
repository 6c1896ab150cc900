//! Key-value memory: admission, growth, and what is given up when it runs short.
//!
//! Order of giving up: finished rows in the prefix index, then the youngest running row
//! (set back to the head of the queue, where the one rule computes it again), and a row
//! that is alone and still too big ends. The oldest row is never set back, so it always
//! gets through. A row is admitted only where every other one can still grow by a block.

use crate::actors::scheduler::core::{Core, End};
use crate::actors::scheduler::row::Row;
use crate::cache::Found;
use crate::types::{EngineError, Failure, FailureReason, FinishReason, SequenceId};

/// Shorter common beginnings are not worth a fork: every template begins alike.
pub(crate) const LEAST_REUSE_TOKENS: u32 = 16;
/// A cancelled row with so many tokens computed is kept for the client's next try.
const KEEP_CANCELLED_TOKENS: u32 = 64;

/// What became of the first waiting row.
enum Opened {
    /// It has a sequence with so many tokens in it.
    Yes(SequenceId, u32),
    /// Not enough memory now.
    NotNow,
    /// Never enough memory.
    Never,
}

impl Core {
    /// Gives sequences to waiting rows, first come first served, as long as rows and
    /// memory are free.
    pub(crate) fn admit_waiting(&mut self) -> Result<(), EngineError> {
        while self.running.len() < self.settings.max_rows && self.engine.is_some() {
            let Some(order) = self.waiting.first().map(|row| row.order) else { break };
            self.in_step = vec![order];
            match self.open_first()? {
                Opened::Yes(sequence, reused) => {
                    let row = self.waiting.remove(0);
                    self.begin(row, sequence, reused);
                }
                Opened::NotNow => break,
                Opened::Never => {
                    let row = self.waiting.remove(0);
                    self.too_big(row);
                }
            }
        }
        self.in_step.clear();
        Ok(())
    }

    fn begin(&mut self, mut row: Row, sequence: SequenceId, reused: u32) {
        let first_time = row.admit(sequence, reused, self.now());
        if first_time {
            let gauges = &self.settings.gauges;
            gauges.prompt_tokens.add(u64::from(row.prompt_tokens));
            if self.index.borrow().is_enabled() {
                let counter = if reused > 0 { &gauges.cache_hits } else { &gauges.cache_misses };
                counter.up();
                gauges.cache_hit_tokens.add(u64::from(reused));
                if reused == 0 {
                    self.index.borrow_mut().miss();
                }
            }
        }
        self.running.push(row);
    }

    fn open_first(&mut self) -> Result<Opened, EngineError> {
        let Some(row) = self.waiting.first() else { return Ok(Opened::NotNow) };
        let (all, wanted, first_time) = (row.len(), row.reservation(), row.cached.is_none());
        // One token at least must be computed, or there is nothing to sample from.
        let reusable = row.tokens.get(..all as usize - 1).unwrap_or(&[]);
        let found = self.index.borrow().longest(reusable).filter(|found| found.length >= LEAST_REUSE_TOKENS);
        if !self.running.is_empty() && !self.could_fit(wanted) {
            return Ok(Opened::NotNow);
        }
        if let Some(found) = found {
            self.index.borrow_mut().touch(found.entry);
        }
        let Some((sequence, reused)) = self.open(found)? else { return Ok(Opened::NotNow) };
        let mut room = self.reserve_evicting(sequence, wanted)?;
        if !room && self.running.is_empty() {
            room = self.reserve_evicting(sequence, all.saturating_add(1))?;
            if !room {
                self.close_sequence(sequence);
                return Ok(Opened::Never);
            }
        }
        if !room {
            self.put_back(sequence, reused);
            return Ok(Opened::NotNow);
        }
        if let Some(found) = found.filter(|_| reused > 0 && first_time) {
            self.index.borrow_mut().hit(found.entry, reused);
        }
        Ok(Opened::Yes(sequence, reused))
    }

    /// Opens a sequence, with a prefix if there is one; `None` when memory is short even
    /// for that.
    fn open(
        &mut self,
        mut from: Option<Found<SequenceId>>,
    ) -> Result<Option<(SequenceId, u32)>, EngineError> {
        loop {
            let Some(engine) = self.engine.as_mut() else { return Ok(None) };
            match engine.open(from.map(|found| (found.payload, found.length))) {
                Ok(sequence) => return Ok(Some((sequence, from.map_or(0, |found| found.length)))),
                // The fork's own block is missing. Giving up the prefix frees more than any other.
                Err(EngineError::KvFull { .. }) => match from.take() {
                    Some(_) => continue,
                    None if self.evict() => continue,
                    None => return Ok(None),
                },
                Err(error @ (EngineError::UnknownSequence { .. } | EngineError::StaleEpoch { .. })) => {
                    let Some(found) = from.take() else { return Err(error) };
                    self.index.borrow_mut().forget(found.entry);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The first waiting row cannot run yet. The prefix that it found is kept for its next
    /// try, also where the finished row that it came from was given up on the way.
    fn put_back(&mut self, sequence: SequenceId, reused: u32) {
        let prefix = self.waiting.first().and_then(|row| row.tokens.get(..reused as usize));
        let prefix = prefix.unwrap_or(&[]).to_vec();
        let given_up = self.index.borrow_mut().insert(prefix, sequence);
        given_up.into_iter().for_each(|sequence| self.close_sequence(sequence));
    }

    /// Whether giving up all finished rows could make room: if not, they are left alone.
    /// A prefix to be shared needs no place of its own here: its blocks count as
    /// reclaimable, and as part of `tokens`.
    fn could_fit(&self, tokens: u32) -> bool {
        let Some(engine) = self.engine.as_ref() else { return false };
        let (info, memory) = (engine.info(), engine.memory());
        let block = u64::from(info.kv_block_tokens.max(1));
        let block_bytes = block * info.kv_bytes_per_token;
        let kept = self.index.borrow().statistics();
        let reclaimable = (kept.tokens / block + kept.entries) * block_bytes;
        let growing = self.running.iter().filter(|row| row.may_grow()).count() as u64;
        let needed = (u64::from(tokens).div_ceil(block) + growing) * block_bytes;
        needed <= memory.kv_capacity_bytes.saturating_sub(memory.kv_used_bytes) + reclaimable
    }

    /// Makes room for `tokens` at the cost of finished rows only.
    fn reserve_evicting(&mut self, sequence: SequenceId, tokens: u32) -> Result<bool, EngineError> {
        loop {
            let Some(engine) = self.engine.as_mut() else { return Ok(false) };
            let tokens = tokens.min(engine.info().context);
            match engine.reserve(sequence, tokens) {
                Ok(()) => return Ok(true),
                Err(EngineError::KvFull { .. }) if self.evict() => continue,
                Err(EngineError::KvFull { .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes room for a running row's next tokens, whatever it takes. False when the row
    /// itself was set back or ended.
    pub(crate) fn make_room(&mut self, order: u64, tokens: u32) -> Result<bool, EngineError> {
        loop {
            let Some(row) = self.running.iter().find(|row| row.order == order) else { return Ok(false) };
            let Some(sequence) = row.sequence else { return Ok(false) };
            if self.reserve_evicting(sequence, tokens)? {
                return Ok(true);
            }
            let youngest = self.running.iter().map(|row| row.order).max();
            if self.running.len() > 1 {
                self.set_back(youngest.unwrap_or(order));
                continue;
            }
            if let Some(mut row) = self.take_running(order) {
                self.close(&mut row);
                self.too_big(row);
            }
            return Ok(false);
        }
    }

    /// Takes a running row's memory and puts it at the head of the queue.
    fn set_back(&mut self, order: u64) {
        let Some(mut row) = self.take_running(order) else { return };
        tracing::debug!(request_id = %row.ticket.id, computed = row.computed, "set back for memory");
        self.close(&mut row);
        row.set_back();
        self.settings.gauges.preemptions.up();
        let place = self.waiting.iter().position(|other| other.order > order).unwrap_or(self.waiting.len());
        self.waiting.insert(place, row);
    }

    /// All memory is not enough for this row: it ends with what it has.
    fn too_big(&mut self, mut row: Row) {
        if row.produced() > 0 {
            let finish = row.end_of_text(FinishReason::Length);
            self.leave(row, End::Done(finish));
            return;
        }
        let message = format!(
            "the prompt's {} tokens need more key-value memory than there is: shorten it",
            row.prompt_tokens
        );
        self.leave(row, End::Failed(Failure::new(FailureReason::OutOfMemory, message)));
    }

    /// Keeps the row's sequence for later prompts, or closes it.
    pub(crate) fn deposit(&mut self, row: &mut Row, end: &End) {
        let least = match end {
            End::Done(_) => LEAST_REUSE_TOKENS,
            End::Cancelled => KEEP_CANCELLED_TOKENS,
            End::Failed(_) => u32::MAX,
        };
        if row.computed < least || !self.index.borrow().is_enabled() {
            return self.close(row);
        }
        let (Some(engine), Some(sequence)) = (self.engine.as_mut(), row.sequence) else { return };
        // What was set aside for tokens that never came is given back.
        if engine.truncate(sequence, row.computed).is_err() {
            return self.close(row);
        }
        row.sequence = None;
        let tokens = row.tokens.get(..row.computed as usize).unwrap_or(&[]).to_vec();
        let given_up = self.index.borrow_mut().insert(tokens, sequence);
        given_up.into_iter().for_each(|sequence| engine.close(sequence));
    }

    /// Gives the row's memory back.
    pub(crate) fn close(&mut self, row: &mut Row) {
        if let Some(sequence) = row.sequence.take() {
            self.close_sequence(sequence);
        }
    }

    /// Closes what the prompt cache gave up.
    pub(crate) fn close_released(&mut self) {
        let released = self.index.borrow_mut().take_released();
        released.into_iter().for_each(|sequence| self.close_sequence(sequence));
    }

    pub(crate) fn take_running(&mut self, order: u64) -> Option<Row> {
        let index = self.running.iter().position(|row| row.order == order)?;
        Some(self.running.remove(index))
    }

    fn evict(&mut self) -> bool {
        let oldest = self.index.borrow_mut().evict();
        oldest.map(|sequence| self.close_sequence(sequence)).is_some()
    }

    fn close_sequence(&mut self, sequence: SequenceId) {
        if let Some(engine) = self.engine.as_mut() {
            engine.close(sequence);
        }
    }
}
