//! How fast places become free, for estimates of a wait. Pure.

use std::time::Duration;

/// Weight of the latest interval in the moving average.
const NEWEST: f64 = 0.2;

/// Moving average of the time between two ends while others waited.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueRate {
    interval_s: Option<f64>,
    last: Option<Duration>,
}

impl QueueRate {
    /// A request has ended and made room; `waited` if others were waiting for it.
    pub(crate) fn ended(&mut self, now: Duration, waited: bool) {
        if let Some(last) = self.last.filter(|_| waited) {
            let interval = now.saturating_sub(last).as_secs_f64();
            let old = self.interval_s.unwrap_or(interval);
            self.interval_s = Some(old + NEWEST * (interval - old));
        }
        // An interval counts only if the queue was there all the time.
        self.last = waited.then_some(now);
    }

    /// Expected wait behind `ahead` others; none where a place is free.
    pub(crate) fn wait(&self, ahead: usize, free: bool) -> Duration {
        if free {
            return Duration::ZERO;
        }
        let turns = u32::try_from(ahead).unwrap_or(u32::MAX).saturating_add(1);
        match self.interval_s {
            // Whoever knows nothing turns nobody away.
            None => Duration::ZERO,
            Some(interval) => {
                Duration::try_from_secs_f64(interval * f64::from(turns)).unwrap_or(Duration::MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_follows_from_how_fast_others_end() {
        let seconds = Duration::from_secs;
        let mut rate = QueueRate::default();
        assert_eq!(rate.wait(0, false), Duration::ZERO);
        (0..20).for_each(|step| rate.ended(seconds(3 * step), true));
        assert_eq!(rate.wait(0, true), Duration::ZERO);
        assert_eq!(rate.wait(0, false), seconds(3));
        assert_eq!(rate.wait(9, false), seconds(30));
        // A pause without a queue is no interval.
        rate.ended(seconds(60), false);
        rate.ended(seconds(500), true);
        assert_eq!(rate.wait(0, false), seconds(3));
    }
}
