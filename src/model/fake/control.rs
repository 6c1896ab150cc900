//! A test's hand on scripted engines: what they did, and when they may go on.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::types::SequenceId;

/// No test waits longer for a step.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// One row of a step that was begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepRecord {
    /// Number of the step, from 1, over all lives.
    pub step: u64,
    /// The row's sequence.
    pub sequence: SequenceId,
    /// Position of the first token computed.
    pub start: u32,
    /// Tokens computed.
    pub tokens: u32,
    /// Whether a token was drawn.
    pub sampled: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Steps that may run; `None` = all.
    allowed: Option<u64>,
    begun: u64,
    finished: u64,
    loads: u64,
    records: Vec<StepRecord>,
}

/// See the module. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct FakeControl {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl FakeControl {
    pub(super) fn new(gated: bool) -> Self {
        let control = Self::default();
        control.lock().allowed = gated.then_some(0);
        control
    }

    /// Lets `steps` more steps run.
    pub fn allow(&self, steps: u64) {
        let mut state = self.lock();
        state.allowed = state.allowed.map(|allowed| allowed + steps);
        self.shared.1.notify_all();
    }

    /// Lets all further steps run.
    pub fn open(&self) {
        self.lock().allowed = None;
        self.shared.1.notify_all();
    }

    /// Blocks until step `number` has begun: with a gate it waits there, with everything
    /// before it done. False if that takes too long.
    pub fn wait_begun(&self, number: u64) -> bool {
        self.wait(|state| state.begun >= number)
    }

    /// Blocks until step `number` has finished. False if that takes too long.
    pub fn wait_finished(&self, number: u64) -> bool {
        self.wait(|state| state.finished >= number)
    }

    /// Blocks until a step waits at the gate. False if that takes too long.
    pub fn wait_at_gate(&self) -> bool {
        self.wait(|state| state.allowed.is_none_or(|allowed| state.begun > allowed))
    }

    /// Steps begun so far.
    pub fn begun(&self) -> u64 {
        self.lock().begun
    }

    /// Loads so far.
    pub fn loads(&self) -> u64 {
        self.lock().loads
    }

    /// All rows of all steps so far.
    pub fn records(&self) -> Vec<StepRecord> {
        self.lock().records.clone()
    }

    pub(super) fn count_load(&self) -> u64 {
        let mut state = self.lock();
        state.loads += 1;
        state.loads
    }

    /// Notes a step and waits until it may run. Gives its number.
    pub(super) fn begin(&self, rows: impl Iterator<Item = (SequenceId, u32, u32, bool)>) -> u64 {
        let mut state = self.lock();
        state.begun += 1;
        let step = state.begun;
        let records = rows.map(|(sequence, start, tokens, sampled)| StepRecord {
            step,
            sequence,
            start,
            tokens,
            sampled,
        });
        state.records.extend(records);
        self.shared.1.notify_all();
        while state.allowed.is_some_and(|allowed| allowed < step) {
            state = self.shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        step
    }

    pub(super) fn finish(&self, step: u64) {
        self.lock().finished = step;
        self.shared.1.notify_all();
    }

    fn wait(&self, done: impl Fn(&State) -> bool) -> bool {
        let state = self.lock();
        let waited = self.shared.1.wait_timeout_while(state, LONGEST_WAIT, |state| !done(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        done(&state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
