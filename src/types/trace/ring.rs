//! The latest traces, those of requests under way among them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Trace;
use crate::types::RequestId;

/// Keeps a number of traces; the oldest that has ended makes room for a new one.
///
/// The lock is held for a look through the list, and by nothing that computes.
#[derive(Debug)]
pub struct TraceRing {
    capacity: usize,
    traces: Mutex<VecDeque<Trace>>,
}

impl TraceRing {
    /// An empty ring for `capacity` traces; 0 keeps none.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, traces: Mutex::default() }
    }

    /// Adds a trace that is in no ring yet.
    pub fn insert(&self, trace: &Trace) {
        if self.capacity == 0 || !trace.list() {
            return;
        }
        let mut traces = self.lock();
        if traces.len() >= self.capacity {
            // A long request must not be forgotten for many short ones.
            let ended = traces.iter().position(|trace| trace.outcome().is_some());
            traces.remove(ended.unwrap_or(0));
        }
        traces.push_back(trace.clone());
    }

    /// The latest trace with this id: a request's, or one that a client gave.
    pub fn find(&self, id: &str) -> Option<Trace> {
        // As ids are shown: 32 digits.
        let own = (id.len() == 32).then(|| u128::from_str_radix(id, 16).ok()).flatten().map(RequestId);
        let named = |trace: &&Trace| trace.client_id() == Some(id) || own == Some(trace.id());
        self.lock().iter().rev().find(named).cloned()
    }

    /// All of them, the latest first.
    pub fn recent(&self) -> Vec<Trace> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Trace>> {
        self.traces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::types::TraceOrigin;

    fn trace(id: u128) -> Trace {
        Trace::new(RequestId(id), Duration::ZERO)
    }

    fn ids(ring: &TraceRing) -> Vec<u128> {
        ring.recent().iter().map(|trace| trace.id().0).collect()
    }

    #[test]
    fn the_oldest_that_has_ended_makes_room_and_else_the_oldest() {
        let ring = TraceRing::new(3);
        let traces: Vec<Trace> = (1..=6).map(trace).collect();
        for trace in &traces[..3] {
            ring.insert(trace);
        }
        ring.insert(&traces[0]);
        assert_eq!(ids(&ring), [3, 2, 1], "no trace is there twice");
        traces[1].finish("stop", Duration::ZERO);
        ring.insert(&traces[3]);
        assert_eq!(ids(&ring), [4, 3, 1]);
        ring.insert(&traces[4]);
        assert_eq!(ids(&ring), [5, 4, 3], "all are under way");
    }

    #[test]
    fn a_trace_is_found_by_either_id_and_the_latest_wins() {
        let ring = TraceRing::new(8);
        for id in [10, 11] {
            let origin = TraceOrigin { client_id: Some("mine".into()), route: "/" };
            ring.insert(&Trace::of(origin, RequestId(id), Duration::ZERO));
        }
        assert_eq!(ring.find("mine").map(|trace| trace.id()), Some(RequestId(11)));
        assert_eq!(ring.find(&RequestId(10).to_string()).map(|trace| trace.id()), Some(RequestId(10)));
        assert!(ring.find("other").is_none());
    }

    #[test]
    fn a_ring_for_none_keeps_none() {
        let ring = TraceRing::new(0);
        ring.insert(&trace(1));
        assert!(ring.recent().is_empty());
    }
}
