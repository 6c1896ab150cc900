//! Time as a parameter: policies ask a [`Clock`], tests hand them a [`ManualClock`].
//!
//! Not a timer: nothing here waits. Sleeping is the runtime's matter.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

/// A source of time that can be replaced by a test.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since the clock was made; never goes back.
    fn now(&self) -> Duration;

    /// The date, for logs and responses.
    fn wall(&self) -> SystemTime;
}

/// The machine's own time.
#[derive(Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock that only moves when told to.
#[derive(Debug, Default)]
pub struct ManualClock {
    elapsed: Mutex<Duration>,
}

impl ManualClock {
    /// A clock at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let mut elapsed = self.elapsed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *elapsed = elapsed.saturating_add(by);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.elapsed.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.now()
    }
}
