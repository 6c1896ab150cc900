//! The right to be worked on, which travels with a request.
//!
//! A ticket is taken once, without waiting, before anything is done for a request, and
//! moves with it from hand to hand. Dropping it is the only way to give it back, so a
//! request that ends in whatever way frees its place exactly once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::ids::RequestId;
use super::trace::Trace;

/// How many tickets are out, and a way to wait until none is.
#[derive(Clone, Debug, Default)]
pub struct LiveCount {
    shared: Arc<LiveShared>,
}

#[derive(Debug, Default)]
struct LiveShared {
    count: AtomicUsize,
    zero: Notify,
}

impl LiveCount {
    /// Tickets out now.
    pub fn get(&self) -> usize {
        self.shared.count.load(Ordering::Acquire)
    }

    /// Returns once no ticket is out. New ones may be taken meanwhile: close the gate first.
    ///
    /// # Cancellation
    /// Safe: nothing is held.
    pub async fn none_left(&self) {
        loop {
            let notified = self.shared.zero.notified();
            tokio::pin!(notified);
            // Registered before the look, so that a drop in between is not missed.
            notified.as_mut().enable();
            if self.get() == 0 {
                return;
            }
            notified.await;
        }
    }

    fn enter(&self) -> LiveGuard {
        self.shared.count.fetch_add(1, Ordering::AcqRel);
        LiveGuard { shared: Arc::clone(&self.shared) }
    }
}

#[derive(Debug)]
struct LiveGuard {
    shared: Arc<LiveShared>,
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        if self.shared.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.zero.notify_waiters();
        }
    }
}

/// Where tickets come from: as many as there are rows and places in the queue.
#[derive(Clone, Debug)]
pub struct TicketOffice {
    places: Arc<Semaphore>,
    capacity: usize,
    live: LiveCount,
}

impl TicketOffice {
    /// An office with `capacity` tickets.
    pub fn new(capacity: usize, live: LiveCount) -> Self {
        Self { places: Arc::new(Semaphore::new(capacity)), capacity, live }
    }

    /// A ticket, or `None` when all are out. Never waits.
    pub fn try_take(&self, id: RequestId, accepted: Duration) -> Option<Ticket> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let trace = Trace::new(id, accepted);
        Some(Ticket { id, accepted, trace, _live: self.live.enter(), _permit: permit })
    }

    /// All tickets there are.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tickets that could be taken now.
    pub fn available(&self) -> usize {
        self.places.available_permits()
    }
}

/// The right to be worked on. Dropped = given back.
#[derive(Debug)]
#[must_use = "a dropped ticket gives its place back"]
pub struct Ticket {
    /// Whose it is.
    pub id: RequestId,
    /// When it was taken, on the clock's scale.
    pub accepted: Duration,
    /// What is recorded of its way.
    pub trace: Trace,
    // Fields drop in order: the count goes down before the place is free, so
    // the count never exceeds the places.
    _live: LiveGuard,
    _permit: OwnedSemaphorePermit,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_refused_when_all_are_out_and_returns_by_drop() {
        let live = LiveCount::default();
        let office = TicketOffice::new(2, live.clone());
        let first = office.try_take(RequestId(1), Duration::ZERO).unwrap();
        let second = office.try_take(RequestId(2), Duration::ZERO).unwrap();
        assert!(office.try_take(RequestId(3), Duration::ZERO).is_none());
        assert_eq!((live.get(), office.available()), (2, 0));
        drop(first);
        let third = office.try_take(RequestId(3), Duration::ZERO).unwrap();
        drop((second, third));
        assert_eq!((live.get(), office.available()), (0, 2));
    }

    #[tokio::test]
    async fn waiting_for_none_left_ends_with_the_last_drop() {
        let live = LiveCount::default();
        let office = TicketOffice::new(1, live.clone());
        live.none_left().await;
        let ticket = office.try_take(RequestId(1), Duration::ZERO).unwrap();
        let wait = live.none_left();
        tokio::pin!(wait);
        assert!(futures_util::FutureExt::now_or_never(wait.as_mut()).is_none());
        drop(ticket);
        wait.await;
    }
}
