//! Watches for a step that hangs. It cannot be interrupted: the watchdog only reports, in the log
//! and as the instance's health, which the program takes for its end and a host for what it likes.
//!
//! Looks at atomics from another thread than the one that may hang.

use std::sync::Arc;
use std::time::Duration;

use crate::actors::status::Board;
use crate::observe::{Pulse, fields};
use crate::types::Clock;

/// See the module.
pub(crate) struct Watchdog {
    pulses: Vec<Arc<Pulse>>,
    board: Arc<Board>,
    clock: Arc<dyn Clock>,
    limit: Duration,
    reported: bool,
}

impl Watchdog {
    /// A step hangs that takes longer than `limit`.
    pub(crate) fn new(
        pulses: Vec<Arc<Pulse>>,
        board: &Arc<Board>,
        clock: &Arc<dyn Clock>,
        limit: Duration,
    ) -> Self {
        Self { pulses, board: Arc::clone(board), clock: Arc::clone(clock), limit, reported: false }
    }

    /// How often to look.
    pub(crate) fn interval(&self) -> Duration {
        (self.limit / 8).clamp(Duration::from_millis(20), Duration::from_secs(5))
    }

    /// Reports a step that hangs, once, and takes it back if it moves on after all.
    pub(crate) fn look(&mut self) {
        let now = self.clock.now();
        let age = self.pulses.iter().filter_map(|pulse| pulse.age(now)).max();
        let hangs = age.filter(|age| *age >= self.limit);
        if hangs.is_some() == self.reported {
            return;
        }
        self.reported = hangs.is_some();
        match hangs {
            Some(age) => {
                let message = format!("a step has not ended for {} s", age.as_secs());
                tracing::error!(target: fields::ENGINE, age_s = age.as_secs(), "a step hangs");
                self.board.set_hung(Some(message));
            }
            None => {
                tracing::warn!(target: fields::ENGINE, "the step that seemed to hang has ended");
                self.board.set_hung(None);
            }
        }
    }
}
