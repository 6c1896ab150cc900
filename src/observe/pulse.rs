//! The step loop's beat, for liveness.
//!
//! Read by `/livez` without asking any actor: a loop that hangs could not answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// When a step loop last moved, and whether it has anything to do.
#[derive(Debug, Default)]
pub struct Pulse {
    beat_ns: AtomicU64,
    working: AtomicBool,
}

impl Pulse {
    /// The loop moved at `now` (the instance's clock) and has more to do if `working`.
    pub fn beat(&self, now: Duration, working: bool) {
        self.beat_ns.store(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
        self.working.store(working, Ordering::Release);
    }

    /// Time since the last beat while there is work; `None` when the loop is idle.
    pub fn age(&self, now: Duration) -> Option<Duration> {
        self.working
            .load(Ordering::Acquire)
            .then(|| now.saturating_sub(Duration::from_nanos(self.beat_ns.load(Ordering::Acquire))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_loop_has_no_age_and_a_working_one_counts_from_its_beat() {
        let pulse = Pulse::default();
        assert_eq!(pulse.age(Duration::from_secs(9)), None);
        pulse.beat(Duration::from_secs(1), true);
        assert_eq!(pulse.age(Duration::from_secs(9)), Some(Duration::from_secs(8)));
        pulse.beat(Duration::from_secs(10), false);
        assert_eq!(pulse.age(Duration::from_secs(12)), None);
    }
}
