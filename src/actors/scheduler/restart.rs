//! When an engine may be rebuilt, and after what pause. Pure.

use std::collections::VecDeque;
use std::time::Duration;

/// How often a broken engine is rebuilt before its model is given up.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct RestartPolicy {
    /// Restarts allowed within the window.
    pub budget: usize,
    /// Length of the window.
    pub window: Duration,
    /// Pause before the first restart; each further one within the window waits four times longer.
    pub first_pause: Duration,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self { budget: 3, window: Duration::from_secs(60), first_pause: Duration::from_millis(500) }
    }
}

impl RestartPolicy {
    /// The default budget without pauses, for tests.
    pub fn without_pause() -> Self {
        Self { first_pause: Duration::ZERO, ..Self::default() }
    }
}

/// Counts restarts against a policy.
#[derive(Debug)]
pub(crate) struct RestartBudget {
    policy: RestartPolicy,
    recent: VecDeque<Duration>,
}

impl RestartBudget {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self { policy, recent: VecDeque::new() }
    }

    /// Takes one restart at `now`: the pause before it, or `None` when the budget is spent.
    pub(crate) fn take(&mut self, now: Duration) -> Option<Duration> {
        while self.recent.front().is_some_and(|at| now.saturating_sub(*at) >= self.policy.window) {
            self.recent.pop_front();
        }
        let before = self.recent.len();
        if before >= self.policy.budget {
            return None;
        }
        self.recent.push_back(now);
        let factor = 4u32.saturating_pow(u32::try_from(before).unwrap_or(u32::MAX));
        Some(self.policy.first_pause.saturating_mul(factor))
    }
}

impl RestartBudget {
    /// The last restart was not the engine's fault after all.
    pub(crate) fn give_back(&mut self) {
        self.recent.pop_back();
    }

    /// A restart that does not count: the pause before it.
    pub(crate) fn uncounted(&self) -> Duration {
        self.policy.first_pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn pauses_grow_and_the_budget_ends_and_returns_with_time() {
        let mut budget = RestartBudget::new(RestartPolicy::default());
        assert_eq!(budget.take(at(0)), Some(Duration::from_millis(500)));
        assert_eq!(budget.take(at(10)), Some(Duration::from_secs(2)));
        assert_eq!(budget.take(at(20)), Some(Duration::from_secs(8)));
        assert_eq!(budget.take(at(59)), None);
        assert_eq!(budget.take(at(60)), Some(Duration::from_secs(8)), "the first one is out of the window");
        assert_eq!(budget.take(at(61)), None);
        assert_eq!(budget.take(at(200)), Some(Duration::from_millis(500)));
    }
}
