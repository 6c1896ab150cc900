//! One scheduler's share of the instance's gauges.

use std::sync::Arc;

use crate::observe::{Gauges, Level};

/// Levels that a scheduler writes.
const LEVELS: usize = 7;

/// Writes levels by difference, and takes its share back when dropped, so that gauges
/// return to zero however a scheduler ends.
#[derive(Debug)]
pub(crate) struct Shares {
    gauges: Arc<Gauges>,
    said: [u64; LEVELS],
}

impl Shares {
    pub(crate) fn new(gauges: Arc<Gauges>) -> Self {
        Self { gauges, said: [0; LEVELS] }
    }

    /// Rows running, waiting, parked, paused; key-value bytes used, capacity; kept rows.
    pub(crate) fn publish(&mut self, now: [u64; LEVELS]) {
        for ((level, before), now) in self.levels().into_iter().zip(self.said).zip(now) {
            if before != now {
                level.shift(before, now);
            }
        }
        self.said = now;
    }

    fn levels(&self) -> [&Level; LEVELS] {
        let gauges = &self.gauges;
        [
            &gauges.rows_running,
            &gauges.rows_waiting,
            &gauges.rows_parked,
            &gauges.rows_paused,
            &gauges.kv_used_bytes,
            &gauges.kv_capacity_bytes,
            &gauges.cache_entries,
        ]
    }
}

impl Drop for Shares {
    fn drop(&mut self) {
        self.publish([0; LEVELS]);
    }
}
