//! Key-value memory: opening, growth, and what is given up when it runs short.
//!
//! Order of giving up: kept prefixes that nobody uses, what is being read from disk, then the sequences of paused rows, then
//! the youngest running row of the lowest class. What a row loses is kept among the prefixes
//! and the row queues again, where the one rule computes what is missing; a row that is alone and
//! still too big ends. The oldest running row is never set back for another, so it gets through. A
//! row is admitted only where, by what is reserved, every other one can still grow by a block.

use crate::actors::scheduler::core::{Core, End};
use crate::actors::scheduler::reuse::LEAST_REUSE_TOKENS;
use crate::actors::scheduler::row::Row;
use crate::types::{EngineError, Failure, FailureReason, FinishReason, Priority, SequenceId};

/// What became of a waiting row that wants to run.
pub(crate) enum Opened {
    /// It has a sequence.
    Yes {
        /// Where it is computed.
        sequence: SequenceId,
        /// Tokens that it has already.
        reused: u32,
        /// Tokens that there is room for.
        held: u32,
    },
    /// Not enough memory now.
    NotNow,
    /// Never enough memory.
    Never,
}

/// Whom memory may be taken from.
#[derive(Clone, Copy)]
enum Spare {
    /// For a newcomer of this class: paused rows of its class or lower ones, running ones in the
    /// background.
    Below(Priority),
    /// For a row that runs, or is alone: all paused rows.
    Paused,
}

impl Core {
    /// Finds memory for a waiting row of class `level`.
    pub(crate) fn open_waiting(&mut self, order: u64, level: Priority) -> Result<Opened, EngineError> {
        let Some(row) = self.waiting.iter().find(|row| row.order == order) else { return Ok(Opened::NotNow) };
        let (all, wanted, first_time) = (row.len(), row.reservation(), row.cached.is_none());
        let held = row.sequence.map(|sequence| (sequence, row.computed));
        let lookup = held.is_none().then(|| self.look_up(row));
        let found = lookup.and_then(|lookup| lookup.found);
        let alone = self.running.is_empty();
        if !alone && !self.could_fit(order, wanted, level) {
            return Ok(Opened::NotNow);
        }
        // Room for it must not be made by giving up what it goes on from.
        let pinned = found.map(|found| self.tree.borrow_mut().pin_found(&found));
        let opened = match held {
            Some(held) => Ok(Some(held)),
            None => self.open(found),
        };
        pinned.inspect(|node| self.tree.borrow_mut().unpin(*node));
        let Some((sequence, reused)) = opened? else { return Ok(Opened::NotNow) };
        let from = if alone { Spare::Paused } else { Spare::Below(level) };
        let mut given = wanted;
        let mut room = self.reserve_taking(order, sequence, given, from)?;
        if !room && alone {
            given = all.saturating_add(1);
            room = self.reserve_taking(order, sequence, given, from)?;
            if !room {
                if held.is_none() {
                    self.put_back(order, sequence, reused);
                }
                return Ok(Opened::Never);
            }
        }
        if !room {
            if held.is_none() {
                self.put_back(order, sequence, reused);
            }
            return Ok(Opened::NotNow);
        }
        if let Some(found) = found.filter(|_| reused > 0) {
            self.pin_for(order, &found);
        }
        if first_time {
            if let Some(found) = found.filter(|_| reused > 0) {
                self.tree.borrow_mut().hit(&found);
            }
            if let Some(row) = self.waiting.iter_mut().find(|row| row.order == order) {
                row.reuse.found = lookup;
            }
        }
        Ok(Opened::Yes { sequence, reused, held: given })
    }

    /// Whether giving up everything that may be given up for it could make room for the waiting row
    /// `order`: if not, all is left alone. A prefix to be shared needs no place of its own here:
    /// its blocks count as reclaimable, and as part of `tokens`.
    fn could_fit(&self, order: u64, tokens: u32, level: Priority) -> bool {
        let Some(engine) = self.engine.as_ref() else { return false };
        let (info, memory) = (engine.info(), engine.memory());
        let block = u64::from(info.kv_block_tokens.max(1));
        let blocks = |tokens: u32| u64::from(tokens).div_ceil(block);
        // What running rows publish is theirs, and counted with them.
        let kept = { self.tree.borrow().evictable_blocks() };
        let paused = |row: &&Row| row.sequence.is_some() && (row.order == order || below(row, level));
        let oldest = self.running.iter().map(|row| row.order).min();
        let preemptible = |row: &&Row| background(row, level) && Some(row.order) != oldest;
        let spared = self.waiting.iter().filter(paused).chain(self.running.iter().filter(preemptible));
        let taken: u64 =
            spared.map(|row| blocks(row.held)).sum::<u64>() + self.disk.blocks_held(info.kv_block_tokens);
        let reclaimable = kept + taken;
        let growing = self.running.iter().filter(|row| row.may_grow()).count() as u64;
        let free = memory.kv_capacity_bytes.saturating_sub(memory.kv_used_bytes);
        let block_bytes = block * info.kv_bytes_per_token;
        // Shared blocks are counted with everyone who has them: no more is freed than is used.
        let reclaimable = (reclaimable * block_bytes).min(memory.kv_used_bytes);
        (blocks(tokens) + growing) * block_bytes <= free + reclaimable
    }

    /// Makes room for `tokens`; false where all that may be taken for it is not enough.
    fn reserve_taking(
        &mut self,
        order: u64,
        sequence: SequenceId,
        tokens: u32,
        from: Spare,
    ) -> Result<bool, EngineError> {
        loop {
            let Some(engine) = self.engine.as_mut() else { return Ok(false) };
            let tokens = tokens.min(engine.info().context);
            match engine.reserve(sequence, tokens) {
                Ok(()) => return Ok(true),
                Err(EngineError::KvFull { .. }) => {
                    let alone = matches!(from, Spare::Paused);
                    let freed = self.evict()
                        || self.give_up_read()
                        || self.strip(order, from)
                        || self.preempt_for(from)
                        || (alone && self.evict_pinned());
                    if !freed {
                        return Ok(false);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes room for a running row's next tokens where nobody has to give anything up.
    pub(crate) fn has_room(&mut self, order: u64, tokens: u32) -> Result<bool, EngineError> {
        let Some(sequence) = self.find_running(order).and_then(|row| row.sequence) else { return Ok(false) };
        let Some(engine) = self.engine.as_mut() else { return Ok(false) };
        match engine.reserve(sequence, tokens.min(engine.info().context)) {
            Ok(()) => {}
            Err(EngineError::KvFull { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        if let Some(row) = self.find_running(order) {
            row.held = row.held.max(tokens);
        }
        Ok(true)
    }

    /// Makes room for a running row's next tokens, whatever it takes. False when the row
    /// itself was set back or ended.
    pub(crate) fn make_room(&mut self, order: u64, tokens: u32) -> Result<bool, EngineError> {
        loop {
            if self.has_room(order, tokens)? {
                return Ok(true);
            }
            if self.find_running(order).is_none_or(|row| row.sequence.is_none()) {
                return Ok(false);
            }
            if self.evict() || self.give_up_read() || self.strip(order, Spare::Paused) {
                continue;
            }
            let oldest = self.running.iter().map(|row| row.order).min();
            let victim = self
                .running
                .iter()
                .filter(|row| Some(row.order) != oldest)
                .max_by_key(|row| (row.level.rank(), row.order))
                .map(|row| row.order);
            if let Some(victim) = victim {
                self.memory_short = true;
                self.set_back(victim);
                continue;
            }
            if self.evict_pinned() {
                continue;
            }
            if let Some(mut row) = self.take_running(order) {
                self.close(&mut row);
                self.too_big(row);
            }
            return Ok(false);
        }
    }

    /// Takes a running row's memory and queues it again.
    fn set_back(&mut self, order: u64) {
        let Some(mut row) = self.take_running(order) else { return };
        let now = self.now();
        self.uncount(&mut row);
        row.wait(now);
        self.freeze(&mut row);
        self.queue_again(row);
    }

    /// Takes the memory of the paused row that is most easily spared.
    fn strip(&mut self, but: u64, from: Spare) -> bool {
        let spared = |row: &&mut Row| match from {
            Spare::Paused => true,
            Spare::Below(level) => below(row, level),
        };
        let paused = self.waiting.iter_mut().filter(|row| row.sequence.is_some() && row.order != but);
        let Some(index) = paused
            .filter(spared)
            .max_by_key(|row| (row.is_parked(), row.level.rank(), row.order))
            .map(|row| row.order)
            .and_then(|order| self.waiting.iter().position(|row| row.order == order))
        else {
            return false;
        };
        let mut row = self.waiting.remove(index);
        self.freeze(&mut row);
        self.waiting.insert(index, row);
        true
    }

    /// Sets back the youngest running row in the background, but never the oldest of all rows.
    fn preempt_for(&mut self, from: Spare) -> bool {
        let Spare::Below(level) = from else { return false };
        let oldest = self.running.iter().map(|row| row.order).min();
        let victim = self
            .running
            .iter()
            .filter(|row| background(row, level) && Some(row.order) != oldest)
            .map(|row| row.order)
            .max();
        victim.map(|order| self.set_back(order)).is_some()
    }

    /// The row's sequence goes among the kept prefixes, from where it may go on, and the row owes
    /// everything again.
    fn freeze(&mut self, row: &mut Row) {
        let now = self.now();
        tracing::debug!(request_id = %row.ticket.id, computed = row.computed, "set back for memory");
        row.ticket.trace.mark("preempted", now, &[("computed", row.computed.into())]);
        self.settings.gauges.preemptions.up();
        self.keep(row, LEAST_REUSE_TOKENS);
        row.set_back();
    }

    /// All memory is not enough for this row: it ends with what it has.
    pub(crate) fn too_big(&mut self, mut row: Row) {
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

    pub(crate) fn take_running(&mut self, order: u64) -> Option<Row> {
        let index = self.running.iter().position(|row| row.order == order)?;
        Some(self.running.remove(index))
    }
}

/// Whether a paused row's memory may be taken for a newcomer of this class.
fn below(row: &Row, level: Priority) -> bool {
    row.is_parked() || row.level <= level
}

/// Whether a running row may be set back for a newcomer of this class.
fn background(row: &Row, level: Priority) -> bool {
    row.level == Priority::Background && level > Priority::Background
}
