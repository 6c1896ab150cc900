//! A bounded queue of audio bytes and marks between them, from any thread to the one that hears.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::{Buf, Bytes};
use tokio::sync::Notify;

use super::ear::{Gone, Listener};

/// What a chunk takes at least, however short it is.
const LEAST_COST: usize = 64;
/// Marks that may wait.
const MOST_MARKS: usize = 64;

/// Something that a client says between two bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// The turn ends here.
    Commit,
    /// What was said in this turn is to be forgotten.
    Clear,
}

/// Why something was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InletError {
    /// As much as may wait is waiting.
    Full,
    /// The end was said.
    Closed,
}

pub(super) enum Item {
    Bytes(Bytes),
    Mark(Mark),
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    bytes: usize,
    marks: usize,
    over: bool,
}

/// See the module.
pub struct Inlet {
    queue: Mutex<Queue>,
    come: Condvar,
    /// Somebody took something out.
    taken: Notify,
    limit: usize,
}

impl Inlet {
    /// Takes so many bytes, and one chunk of any size while it is empty.
    pub fn new(limit: usize) -> Self {
        Self { queue: Mutex::default(), come: Condvar::new(), taken: Notify::new(), limit }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// See [`InletError`].
    pub fn push(&self, bytes: Bytes) -> Result<(), InletError> {
        let mut queue = self.lock();
        if queue.over {
            return Err(InletError::Closed);
        }
        let cost = bytes.len().max(LEAST_COST);
        if queue.bytes > 0 && queue.bytes + cost > self.limit {
            return Err(InletError::Full);
        }
        queue.bytes += cost;
        queue.items.push_back(Item::Bytes(bytes));
        self.come.notify_one();
        Ok(())
    }

    /// Appends a mark.
    ///
    /// # Errors
    /// See [`InletError`].
    pub fn mark(&self, mark: Mark) -> Result<(), InletError> {
        let mut queue = self.lock();
        if queue.over {
            return Err(InletError::Closed);
        }
        if queue.marks == MOST_MARKS {
            return Err(InletError::Full);
        }
        queue.marks += 1;
        queue.items.push_back(Item::Mark(mark));
        self.come.notify_one();
        Ok(())
    }

    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.lock().items.is_empty()
    }

    /// Nothing comes after what waits.
    pub fn finish(&self) {
        self.lock().over = true;
        self.come.notify_all();
        self.taken.notify_waiters();
    }

    /// Nobody wants what waits.
    pub fn close(&self) {
        *self.lock() = Queue { over: true, ..Queue::default() };
        self.come.notify_all();
        self.taken.notify_waiters();
    }

    /// Waits until a chunk of this size is taken or refused for good.
    ///
    /// # Cancellation
    /// Safe.
    pub async fn room(&self, size: usize) {
        loop {
            let taken = self.taken.notified();
            tokio::pin!(taken);
            // Who takes something out from here on is noticed.
            taken.as_mut().enable();
            {
                let queue = self.lock();
                if queue.over || queue.bytes == 0 || queue.bytes + size.max(LEAST_COST) <= self.limit {
                    return;
                }
            }
            taken.await;
        }
    }

    /// The next item; blocks. `None` at the end.
    pub(super) fn take(&self) -> Option<Item> {
        let mut queue = self.lock();
        loop {
            if let Some(item) = queue.items.pop_front() {
                match &item {
                    Item::Bytes(bytes) => queue.bytes -= bytes.len().max(LEAST_COST),
                    Item::Mark(_) => queue.marks -= 1,
                }
                self.taken.notify_waiters();
                return Some(item);
            }
            if queue.over {
                return None;
            }
            queue = self.come.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The bytes alone, for a demultiplexer; marks go to the listener as they are come upon.
pub(super) struct InletReader {
    pub(super) inlet: Arc<Inlet>,
    pub(super) rest: Bytes,
    pub(super) listener: Arc<Mutex<Option<Listener>>>,
}

impl Read for InletReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.inlet.take() {
                Some(Item::Bytes(bytes)) => self.rest = bytes,
                Some(Item::Mark(mark)) => {
                    let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
                    let told = listener.as_mut().map_or(Err(Gone), |listener| listener.mark(mark));
                    if told.is_err() {
                        return Ok(0);
                    }
                }
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.rest.len());
        self.rest.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}
