//! Who gets a row: the choice among those that wait, slots that are taken from others, and
//! rows that are paused.
//!
//! A paused row keeps its sequence and waits like any other; only when memory is short is its
//! sequence kept among the prefixes, from which it goes on if nobody needed the place.
//! A slot is taken, in this order, from a row whose client does not read, from the youngest row in
//! the background, and from the client that has at least two rows more than the one that waits.

use std::time::Duration;

use crate::actors::scheduler::core::Core;
use crate::actors::scheduler::memory::Opened;
use crate::actors::scheduler::placement::Lane;
use crate::actors::scheduler::row::Row;
use crate::types::{ClientId, EngineError, Priority, SequenceId};

/// Rows looked at in a step for which there is no memory, at most.
const MAX_SHORT: usize = 8;
/// Rows looked at in a step that wait for what another computes or the disk brings, at most.
const MAX_FOLLOWING: usize = 64;
/// Clients looked at in a step for which there is no slot, at most.
const MAX_WITHOUT_SLOT: usize = 64;
/// Younger rows of its class or lower ones that may pass a row which waits for memory.
pub(crate) const MAX_OVERTAKEN: u32 = 16;

impl Core {
    /// Gives sequences to waiting rows, as long as rows and memory are free or can be taken.
    pub(crate) fn admit_waiting(&mut self) -> Result<(), EngineError> {
        if std::mem::take(&mut self.memory_short) && !self.running.is_empty() {
            return Ok(());
        }
        let now = self.now();
        // Rows that wait for memory, and the class that must wait for one of them.
        let (mut short, mut barrier) = (Vec::new(), None);
        self.running.iter_mut().for_each(|row| row.raised = None);
        // Rows whose prompt somebody else is computing the beginning of.
        let mut following = Vec::new();
        // Clients that cannot have a slot: it depends on the client and its best class alone.
        let mut without = Vec::new();
        while self.engine.is_some()
            && short.len() < MAX_SHORT
            && without.len() < MAX_WITHOUT_SLOT
            && following.len() < MAX_FOLLOWING
        {
            let Some((order, level)) = self.next_waiting(&[&short, &following], &without, now) else { break };
            if barrier.is_some_and(|barrier| level <= barrier) {
                break;
            }
            let full = self.running.len() >= self.settings.max_rows;
            let victim = if full { self.slot_for(order, level) } else { None };
            let has_slot = !full || victim.is_some();
            if self.must_follow(order, level) || self.must_read(order, has_slot) {
                following.push(order);
                continue;
            }
            if !has_slot {
                without.extend(
                    self.waiting.iter().find(|row| row.order == order).map(|row| row.terms.client.clone()),
                );
                continue;
            }
            self.in_step = vec![order];
            match self.open_waiting(order, level)? {
                Opened::Yes { sequence, reused, held } => {
                    // Somebody else may have had to go for its memory.
                    if let Some(victim) = victim.filter(|_| self.running.len() >= self.settings.max_rows) {
                        self.pause(victim);
                    }
                    self.begin(order, sequence, reused, held);
                    self.count_overtaken(&short);
                }
                Opened::NotNow => {
                    short.push(order);
                    if self.waiting.iter().any(|row| row.order == order && row.overtaken >= MAX_OVERTAKEN) {
                        barrier = barrier.max(Some(level));
                    }
                }
                Opened::Never => {
                    if let Some(row) = self.take_waiting(order) {
                        self.too_big(row);
                    }
                }
            }
        }
        self.in_step.clear();
        Ok(())
    }

    /// The waiting row whose turn it is, and its class with age.
    fn next_waiting(
        &self,
        passed: &[&Vec<u64>],
        without: &[ClientId],
        now: Duration,
    ) -> Option<(u64, Priority)> {
        let ageing = self.settings.ageing;
        let serial = self.running.iter().any(|row| row.placement.lane == Lane::Serial);
        self.waiting
            .iter()
            .filter(|row| !row.is_parked() && !passed.iter().any(|passed| passed.contains(&row.order)))
            .filter(|row| !without.contains(&row.terms.client))
            .filter(|row| !(serial && row.placement.lane == Lane::Serial))
            .map(|row| row.candidate(now))
            .min_by_key(|candidate| candidate.place(&self.accounts, ageing))
            .map(|candidate| (candidate.order, candidate.level(ageing)))
    }

    /// A running row whose slot the waiting row `order` may take.
    fn slot_for(&self, order: u64, level: Priority) -> Option<u64> {
        let youngest =
            |which: &dyn Fn(&&Row) -> bool| self.running.iter().filter(which).map(|row| row.order).max();
        youngest(&|row| row.is_parked())
            .or_else(|| {
                let background = |row: &&Row| row.level == Priority::Background;
                (level > Priority::Background).then(|| youngest(&background)).flatten()
            })
            .or_else(|| {
                let client = &self.waiting.iter().find(|row| row.order == order)?.terms.client;
                let mine = self.accounts.running(client);
                let rows = |row: &Row| self.accounts.running(&row.terms.client);
                self.running
                    .iter()
                    .filter(|row| row.level <= level && rows(row) >= mine + 2)
                    .max_by_key(|row| (rows(row), row.order))
                    .map(|row| row.order)
            })
    }

    /// The waiting row runs from now on.
    fn begin(&mut self, order: u64, sequence: SequenceId, reused: u32, held: u32) {
        let now = self.now();
        let ageing = self.settings.ageing;
        let Some(mut row) = self.take_waiting(order) else { return self.close_sequence(sequence) };
        let first_time = row.admit(sequence, reused, held, now);
        row.start(now, ageing);
        row.counted = true;
        self.accounts.start(&row.terms.client);
        if first_time {
            self.count_first(&row, reused, now);
        }
        // In order of arrival, which decides between equals.
        let place = self.running.partition_point(|other| other.order < order);
        self.running.insert(place, row);
    }

    fn count_first(&mut self, row: &Row, reused: u32, now: Duration) {
        let gauges = &self.settings.gauges;
        gauges.prompt_tokens.add(u64::from(row.prompt_tokens));
        let trace = &row.ticket.trace;
        trace.span(
            "engine.admission_wait",
            row.enqueued,
            now,
            &[("class", row.terms.priority.as_str().into())],
        );
        self.explain_reuse(row, reused, now);
    }

    fn count_overtaken(&mut self, short: &[u64]) {
        for row in self.waiting.iter_mut().filter(|row| short.contains(&row.order)) {
            row.overtaken += 1;
        }
    }

    /// The running row waits from now on and keeps its memory.
    pub(crate) fn pause(&mut self, order: u64) {
        let Some(mut row) = self.take_running(order) else { return };
        let now = self.now();
        self.uncount(&mut row);
        row.wait(now);
        row.drop_proposed();
        self.give_up_ahead(&mut row);
        row.ticket.trace.mark("paused", now, &[("computed", row.computed.into())]);
        self.settings.gauges.pauses.up();
        self.queue_again(row);
    }

    /// What is under way for a row that goes on later is not committed meanwhile.
    fn give_up_ahead(&mut self, row: &mut Row) {
        if row.ahead == 0 {
            return;
        }
        row.forget_ahead();
        row.held = row.computed;
        let (Some(engine), Some(sequence)) = (self.engine.as_mut(), row.sequence) else { return };
        if engine.truncate(sequence, row.computed).is_err() {
            self.close(row);
            row.set_back();
        }
    }

    /// Puts a row back into the queue, at its place by arrival.
    pub(crate) fn queue_again(&mut self, row: Row) {
        let place = self.waiting.partition_point(|other| other.order < row.order);
        self.waiting.insert(place, row);
    }

    /// Its client has one running row less.
    pub(crate) fn uncount(&mut self, row: &mut Row) {
        if std::mem::take(&mut row.counted) {
            self.accounts.stop(&row.terms.client);
        }
    }

    pub(crate) fn take_waiting(&mut self, order: u64) -> Option<Row> {
        let index = self.waiting.iter().position(|row| row.order == order)?;
        Some(self.waiting.remove(index))
    }
}
