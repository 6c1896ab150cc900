//! Reuse of prefixes: matching, opening from them, keeping what was computed, and waiting for
//! whoever computes the same right now.
//!
//! A row that goes on from the very end of what is kept gets that sequence itself, lent by the
//! tree; any other shares a prefix of it. While a row computes its prompt its own sequence is in
//! the tree as well, up to the last chunk that was committed: others read from it at once, and
//! nothing is lost where it is cancelled. Who shares the beginning of a prompt that a running row
//! is computing waits for it, as long as it runs.

use std::ops::Range;
use std::time::Duration;

use crate::actors::scheduler::core::{Core, End};
use crate::actors::scheduler::disk::ReadId;
use crate::actors::scheduler::pace::Work;
use crate::actors::scheduler::row::Row;
use crate::cache::sessions::Change;
use crate::cache::{
    Evicted, Found, Lookup, Namespace, NodeRef, PrefixTree, SessionKey, Terms, TokenHistory, shared,
};
use crate::observe::fields;
use crate::types::{EngineError, FailureReason, PreparedPrompt, Priority, SequenceId, TokenId, TraceValue};

/// Shorter common beginnings are not worth a fork: every template begins alike.
pub(crate) const LEAST_REUSE_TOKENS: u32 = 16;
/// A cancelled row with so many tokens computed is kept for the client's next try.
const KEEP_CANCELLED_TOKENS: u32 = 64;
/// Tokens that another row must be about to save before it is waited for.
const LEAST_SHARED_TOKENS: u32 = 64;

/// A row's part in the prompt cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reuse {
    /// Whose state it may share.
    pub(crate) namespace: Namespace,
    /// Length of the prompt that the next one will begin with.
    pub(crate) stable: u32,
    /// Lengths that the client marked.
    pub(crate) breakpoints: Vec<u32>,
    pub(crate) session: Option<String>,
    /// Lines that were taken out of the prompt.
    pub(crate) stripped: u32,
    /// What the cache had for it when it was first admitted.
    pub(crate) found: Option<Lookup<SequenceId>>,
    /// The prefix that it shares memory with, which is kept meanwhile.
    pub(crate) pinned: Option<NodeRef>,
    /// The read that it waits for.
    pub(crate) reading: Option<ReadId>,
    /// Since when it waits for the disk.
    pub(crate) waits_to_read: Option<Duration>,
    /// The disk was looked at for it.
    pub(crate) has_read: bool,
    /// Positions that the disk brought.
    pub(crate) from_disk: Range<u32>,
    /// Tokens of it that the disk was told of while it ran.
    pub(crate) told: u32,
    /// Whom it waits for.
    follows: Option<Follows>,
}

/// A row that computes what another needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Follows {
    leader: u64,
    /// The leader's, see [`Row::life`].
    life: u32,
    /// Tokens that both begin with.
    upto: u32,
}

impl Reuse {
    pub(crate) fn of(prompt: &PreparedPrompt) -> Self {
        Self {
            namespace: prompt.salt.as_deref().unwrap_or("").into(),
            stable: prompt.stable,
            breakpoints: prompt.breakpoints.clone(),
            session: prompt.session.clone(),
            stripped: prompt.stripped,
            found: None,
            pinned: None,
            reading: None,
            waits_to_read: None,
            has_read: false,
            from_disk: 0..0,
            told: 0,
            follows: None,
        }
    }
}

impl Reuse {
    /// All state is gone, wherever it was.
    pub(crate) fn forget_state(&mut self) {
        (self.pinned, self.reading, self.waits_to_read) = (None, None, None);
        self.told = 0;
    }
}

impl Row {
    /// What can be reused at most: one token at least must be computed, or there is nothing to
    /// sample from.
    pub(crate) fn reusable(&self) -> &[TokenId] {
        self.tokens.get(..self.tokens.len().saturating_sub(1)).unwrap_or(&[])
    }

    /// Of `reused` tokens, those that the disk brought.
    pub(crate) fn disk_tokens(&self, reused: u32) -> u32 {
        let Range { start, end } = self.reuse.from_disk;
        end.min(reused).saturating_sub(start)
    }

    /// Whether it computes its prompt, and goes on doing so.
    fn is_leading(&self) -> bool {
        self.placement.prompt_cache && !self.is_parked() && !self.is_decoding() && self.produced() == 0
    }
}

impl Core {
    /// What is kept of a row's tokens.
    pub(crate) fn look_up(&self, row: &Row) -> Lookup<SequenceId> {
        let mut lookup = self.tree.borrow().find(&row.reuse.namespace, row.reusable());
        lookup.found = lookup.found.filter(|found| found.length >= LEAST_REUSE_TOKENS);
        lookup
    }

    /// Opens a sequence, with a prefix if there is one; `None` when memory is short even
    /// for that.
    pub(crate) fn open(
        &mut self,
        mut from: Option<Found<SequenceId>>,
    ) -> Result<Option<(SequenceId, u32)>, EngineError> {
        loop {
            let Some(engine) = self.engine.as_mut() else { return Ok(None) };
            let is_tail = |found: &Found<SequenceId>| !found.lent && found.holds == found.length;
            if let Some(found) = from.filter(|found| engine.info().trims && is_tail(found)) {
                self.tree.borrow_mut().lend(found.payload);
                return Ok(Some((found.payload, found.length)));
            }
            match engine.open(from.map(|found| (found.payload, found.length))) {
                Ok(sequence) => return Ok(Some((sequence, from.map_or(0, |found| found.length)))),
                // The fork's own block is missing. What it is of is pinned meanwhile.
                Err(EngineError::KvFull { .. }) => {
                    if !self.evict() && from.take().is_none() {
                        return Ok(None);
                    }
                }
                Err(error @ (EngineError::UnknownSequence { .. } | EngineError::StaleEpoch { .. })) => {
                    let Some(found) = from.take() else { return Err(error) };
                    self.tree.borrow_mut().forget(found.payload);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// A waiting row cannot run yet. The prefix that it found is kept for its next try, also where
    /// what it came from was given up on the way.
    pub(crate) fn put_back(&mut self, order: u64, sequence: SequenceId, reused: u32) {
        let Some(row) = self.waiting.iter().find(|row| row.order == order) else {
            return self.close_sequence(sequence);
        };
        let prefix = row.tokens.get(..reused as usize).unwrap_or(&[]);
        let given_up =
            self.tree.borrow_mut().insert(&row.reuse.namespace, prefix, sequence, Terms::default());
        given_up.into_iter().for_each(|sequence| self.close_sequence(sequence));
    }

    /// Keeps the row's sequence for later prompts, or closes it.
    pub(crate) fn deposit(&mut self, row: &mut Row, end: &End) {
        if matches!(end, End::Done(_))
            && row.placement.prompt_cache
            && let Some(text) = &self.text
        {
            let of = TokenHistory::of(&text.name, Some(&row.reuse.namespace));
            self.settings.history.remember(&of, row.tokens.clone());
        }
        let least = match end {
            End::Done(_) => LEAST_REUSE_TOKENS,
            End::Cancelled => KEEP_CANCELLED_TOKENS,
            // What was computed is right, and a next try goes on from it.
            End::Failed(failure) if is_about_time(failure.reason) => KEEP_CANCELLED_TOKENS,
            End::Failed(_) => return self.discard(row),
        };
        self.keep(row, least);
    }

    /// Keeps the row's sequence if it holds `least` tokens or more.
    pub(crate) fn keep(&mut self, row: &mut Row, least: u32) {
        if row.computed < least || !row.placement.prompt_cache {
            return self.close(row);
        }
        let (Some(engine), Some(sequence)) = (self.engine.as_mut(), row.sequence) else { return };
        // What was set aside for tokens that never came is given back.
        if engine.truncate(sequence, row.computed).is_err() {
            return self.discard(row);
        }
        row.sequence = None;
        row.reuse.pinned.take().inspect(|node| self.tree.borrow_mut().unpin(*node));
        let tokens = row.tokens.get(..row.computed as usize).unwrap_or(&[]);
        let Reuse { namespace, stable, breakpoints, .. } = &row.reuse;
        let terms = Terms { lent: false, boundaries: &[*stable], hints: breakpoints };
        let given_up = self.tree.borrow_mut().insert(namespace, tokens, sequence, terms);
        given_up.into_iter().for_each(|sequence| engine.close(sequence));
        if let Some(session) = &row.reuse.session {
            let owner = row.terms.client.api_key().unwrap_or_default().to_owned();
            self.keep_session(SessionKey { owner, id: session.clone() }, namespace, tokens);
        }
        self.tell_disk(namespace, tokens);
        self.keep_budget();
    }

    /// These tokens are the newest of a conversation.
    fn keep_session(&mut self, key: SessionKey, namespace: &Namespace, tokens: &[TokenId]) {
        let mut tree = self.tree.borrow_mut();
        let Some(node) = tree.node_of(namespace, tokens) else { return };
        let now = self.settings.clock.now();
        let changes = self.sessions.borrow_mut().touch(key, node, namespace, tokens, now);
        tell_tree(&mut tree, changes);
    }

    /// Lets others read what a row has computed of its prompt so far.
    pub(crate) fn publish_prefix(&mut self, order: u64) {
        let Some(row) = self.running.iter().find(|row| row.order == order) else { return };
        let Some(engine) = self.engine.as_mut().filter(|_| row.placement.prompt_cache) else { return };
        let (Some(sequence), Some(tokens)) = (row.sequence, row.tokens.get(..row.computed as usize)) else {
            return;
        };
        if row.computed < LEAST_REUSE_TOKENS {
            return;
        }
        let given_up = if engine.info().trims {
            let terms = Terms { lent: true, ..Terms::default() };
            self.tree.borrow_mut().insert(&row.reuse.namespace, tokens, sequence, terms)
        } else if row.computed == row.reuse.stable {
            // Only a copy can be gone back to. It is worth no more than what memory there is to spare.
            let Ok(copy) = engine.open(Some((sequence, row.computed))) else { return };
            self.tree.borrow_mut().insert(&row.reuse.namespace, tokens, copy, Terms::default())
        } else {
            return;
        };
        given_up.into_iter().for_each(|sequence| engine.close(sequence));
        self.tell_disk_of_running(order);
        self.keep_budget();
    }

    /// Gives the row's memory back: to the tree as far as that has it.
    pub(crate) fn close(&mut self, row: &mut Row) {
        row.reuse.pinned.take().inspect(|node| self.tree.borrow_mut().unpin(*node));
        let Some(sequence) = row.sequence.take() else { return };
        let kept = self.tree.borrow_mut().reclaim(sequence);
        let Some(engine) = self.engine.as_mut() else { return };
        let is_kept = kept.is_some_and(|tokens| engine.truncate(sequence, tokens).is_ok());
        if !is_kept {
            self.tree.borrow_mut().forget(sequence);
            engine.close(sequence);
        }
    }

    /// Gives the row's memory back, and with it what others could have read of it.
    pub(crate) fn discard(&mut self, row: &mut Row) {
        row.reuse.pinned.take().inspect(|node| self.tree.borrow_mut().unpin(*node));
        let Some(sequence) = row.sequence.take() else { return };
        self.tree.borrow_mut().forget(sequence);
        self.close_sequence(sequence);
    }

    /// Closes what the prompt cache gave up.
    pub(crate) fn close_released(&mut self) {
        let released = self.tree.borrow_mut().take_released();
        for evicted in released {
            self.carry_out(Some(evicted));
        }
    }

    /// A prefix that the row `order` shares memory with is kept as long as it does. A row with a copy
    /// of its own needs it no more.
    pub(crate) fn pin_for(&mut self, order: u64, found: &Found<SequenceId>) {
        let shares = self.engine.as_ref().is_some_and(|engine| engine.info().shares_prefixes);
        let Some(row) = self.waiting.iter_mut().find(|row| row.order == order) else { return };
        let mut tree = self.tree.borrow_mut();
        let pinned = shares.then(|| tree.pin_found(found));
        let before = std::mem::replace(&mut row.reuse.pinned, pinned);
        before.inspect(|node| tree.unpin(*node));
    }

    /// Gives up the least valuable of what is kept and nobody uses; false where there is none.
    pub(crate) fn evict(&mut self) -> bool {
        let evicted = self.tree.borrow_mut().evict();
        self.carry_out(evicted) || self.drop_export()
    }

    /// The same, of what is pinned.
    pub(crate) fn evict_pinned(&mut self) -> bool {
        let evicted = self.tree.borrow_mut().evict_pinned();
        self.carry_out(evicted)
    }

    fn carry_out(&mut self, evicted: Option<Evicted<SequenceId>>) -> bool {
        match evicted {
            None => return false,
            Some(Evicted::Close(sequence)) => self.close_sequence(sequence),
            Some(Evicted::Truncate(sequence, tokens)) => {
                let Some(engine) = self.engine.as_mut() else { return true };
                if engine.truncate(sequence, tokens).is_err() {
                    self.tree.borrow_mut().forget(sequence);
                    engine.close(sequence);
                }
            }
        }
        true
    }

    /// Gives up what is beyond the budget of what is kept.
    pub(crate) fn keep_budget(&mut self) {
        let Some(budget) = self.settings.cache_bytes else { return };
        let Some(info) = self.engine.as_ref().map(|engine| engine.info()) else { return };
        let block = u64::from(info.kv_block_tokens.max(1)) * info.kv_bytes_per_token;
        while self.tree.borrow().evictable_blocks().saturating_mul(block) > budget {
            let evicted = self.tree.borrow_mut().evict();
            if !self.carry_out(evicted) {
                return;
            }
        }
    }

    pub(crate) fn close_sequence(&mut self, sequence: SequenceId) {
        if let Some(engine) = self.engine.as_mut() {
            engine.close(sequence);
        }
    }

    /// Whether a running row is computing what the waiting row `order` needs: then that is waited
    /// for, and hurried as if it were as urgent.
    pub(crate) fn must_follow(&mut self, order: u64, level: Priority) -> bool {
        let Some(index) = self.waiting.iter().position(|row| row.order == order) else { return false };
        let row = &self.waiting[index];
        if !row.placement.prompt_cache || row.sequence.is_some() || row.cached.is_some() {
            return false;
        }
        let was = row.reuse.follows;
        let still = was.filter(|follows| self.leads(*follows));
        let follows = still.or_else(|| self.find_leader(row));
        let now = self.now();
        let row = &mut self.waiting[index];
        if follows.is_some() && was.is_none() {
            let upto = follows.map_or(0, |follows| follows.upto);
            row.ticket.trace.mark("cache.wait_for_other", now, &[("sharedTokens", upto.into())]);
        }
        row.reuse.follows = follows;
        let Some(follows) = follows else { return false };
        if let Some(leader) = self.find_running(follows.leader) {
            leader.raised = leader.raised.max(Some(level));
        }
        true
    }

    fn leads(&self, follows: Follows) -> bool {
        let leader = self.running.iter().find(|row| row.order == follows.leader);
        leader.is_some_and(|row| row.life == follows.life && row.is_leading() && row.computed < follows.upto)
    }

    /// The running row that will have most of this row's prompt, if it is much more than is kept.
    fn find_leader(&self, row: &Row) -> Option<Follows> {
        if !self.engine.as_ref()?.info().trims {
            return None;
        }
        let wanted = row.reusable();
        let leaders = self.running.iter().filter(|leader| leader.is_leading());
        let shared = leaders
            .filter(|leader| leader.reuse.namespace == row.reuse.namespace)
            .map(|leader| (shared(&leader.tokens, wanted) as u32, leader));
        let (upto, leader) = shared.max_by_key(|(upto, leader)| (*upto, leader.computed))?;
        if upto < LEAST_SHARED_TOKENS || leader.computed >= upto {
            return None;
        }
        let kept = self.look_up(row).found.map_or(0, |found| found.length);
        (upto >= kept.max(leader.computed) + LEAST_SHARED_TOKENS).then_some(Follows {
            leader: leader.order,
            life: leader.life,
            upto,
        })
    }

    /// Counts what the cache did for a row that was just admitted for the first time, and explains
    /// it in its trace.
    pub(crate) fn explain_reuse(&mut self, row: &Row, reused: u32, now: Duration) {
        if !row.placement.prompt_cache {
            return;
        }
        let gauges = std::sync::Arc::clone(&self.settings.gauges);
        let counter = if reused > 0 { &gauges.cache_hits } else { &gauges.cache_misses };
        counter.up();
        gauges.cache_hit_tokens.add(u64::from(reused));
        if reused == 0 {
            self.tree.borrow_mut().miss();
        }
        let mut attributes: Vec<(&'static str, TraceValue)> = vec![("cachedTokens", reused.into())];
        if let Some(lookup) = &row.reuse.found {
            attributes.push(("knownTokens", lookup.equal.into()));
            attributes.push(("endedAt", lookup.found.map_or(0, |found| found.length).into()));
            attributes.push(("why", lookup.why.as_str().into()));
        }
        let disk = row.disk_tokens(reused);
        gauges.cache_ssd_hit_tokens.add(u64::from(disk));
        if disk > 0 {
            attributes.push(("ssdTokens", disk.into()));
        }
        if reused == 0 && tracing::enabled!(target: fields::CACHE, tracing::Level::DEBUG) {
            // Not in the trace: a client would learn what others say.
            let elsewhere = self.tree.borrow().elsewhere(&row.reuse.namespace, row.reusable());
            tracing::debug!(target: fields::CACHE, request_id = %row.ticket.id, elsewhere, "kept under other salts");
        }
        attributes.push(("savedMs", self.milliseconds(0, reused).into()));
        row.ticket.trace.mark("cache.lookup_restore", now, &attributes);
    }

    /// What computing tokens of a prompt takes here, as far as is known.
    pub(crate) fn milliseconds(&self, start: u32, tokens: u32) -> u64 {
        (self.pace.seconds(Work::default().with_prompt(start, tokens)) * 1e3) as u64
    }
}

/// Failures that say nothing about what was computed.
fn is_about_time(reason: FailureReason) -> bool {
    match reason {
        FailureReason::StreamStalled | FailureReason::DeadlineExceeded | FailureReason::QueueTimeout => true,
        FailureReason::EngineRestarted
        | FailureReason::RowFailed
        | FailureReason::ShuttingDown
        | FailureReason::OutOfMemory => false,
    }
}

/// Passes on what sessions make of the tree's nodes.
pub(crate) fn tell_tree(tree: &mut PrefixTree<SequenceId>, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Favour(node, is_on) => tree.favour(node, is_on),
            Change::Pin(node, true) => tree.pin(node),
            Change::Pin(node, false) => tree.unpin(node),
        }
    }
}
