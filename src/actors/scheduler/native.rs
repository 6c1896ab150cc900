//! Native jobs: work that needs a model's weights and is no row (embeddings, media, warming up),
//! run in slices between steps, on a lane of its own.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::actors::scheduler::core::panic_message;
use crate::model::Engine;
use crate::observe::fields;
use crate::types::{EngineError, Failure, FailureReason, Ticket};

/// What a slice of a job came to.
#[derive(Clone, PartialEq, Debug)]
#[allow(dead_code, reason = "its first jobs come with embeddings and media")]
pub enum Slice {
    /// There is more to do.
    More,
    /// It is done, and its requester has been told.
    Done,
    /// It failed; see [`NativeJob::fail`].
    Failed(EngineError),
}

/// Work that needs an engine, in slices. Owns the way back to its requester.
pub trait NativeJob: Send {
    /// Goes on for about `budget`; without one, as long as is sensible at a stretch.
    /// Sequences that it opens it closes before it is done.
    fn slice(&mut self, engine: &mut dyn Engine, budget: Option<Duration>) -> Slice;

    /// Whether nobody waits for it any more.
    fn is_cancelled(&self) -> bool;

    /// It ends without a result. `engine`: the one it worked with, if that is still there, to
    /// close its sequences.
    fn fail(self: Box<Self>, failure: Failure, engine: Option<&mut dyn Engine>);
}

/// A job with its requester's place.
pub(crate) struct Queued {
    pub(crate) job: Box<dyn NativeJob>,
    pub(crate) ticket: Ticket,
}

/// Jobs in order of arrival; the first one runs.
#[derive(Default)]
pub(crate) struct NativeJobs {
    queue: VecDeque<Queued>,
}

impl NativeJobs {
    pub(crate) fn push(&mut self, job: Queued) {
        self.queue.push_back(job);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Ends jobs that nobody waits for, then gives the first one a slice. A panic in it is its own
    /// end; true then: the engine was in its hands.
    pub(crate) fn run(&mut self, engine: &mut dyn Engine, budget: Option<Duration>) -> bool {
        let (gone, left): (Vec<_>, Vec<_>) =
            self.queue.drain(..).partition(|queued| queued.job.is_cancelled());
        self.queue.extend(left);
        for queued in gone {
            end(queued, Failure::new(FailureReason::ShuttingDown, "nobody waits for it"), Some(engine));
        }
        let Some(mut first) = self.queue.pop_front() else { return false };
        match catch_unwind(AssertUnwindSafe(|| first.job.slice(engine, budget))) {
            Ok(Slice::More) => self.queue.push_front(first),
            Ok(Slice::Done) => {}
            Ok(Slice::Failed(error)) => {
                tracing::warn!(target: fields::ENGINE, request_id = %first.ticket.id, %error, "a native job failed");
                let message = "this request could not be computed";
                end(first, Failure::new(FailureReason::RowFailed, message), Some(engine));
            }
            Err(payload) => {
                let panic = panic_message(&*payload);
                tracing::error!(target: fields::ENGINE, request_id = %first.ticket.id, panic, "a native job panicked");
                let message = "this request could not be computed";
                end(first, Failure::new(FailureReason::RowFailed, message), Some(engine));
                return true;
            }
        }
        false
    }

    /// Ends all jobs.
    pub(crate) fn fail_all(&mut self, failure: &Failure, mut engine: Option<&mut dyn Engine>) {
        for queued in self.queue.drain(..) {
            // Spelled out: `as_deref_mut` would tie all turns of the loop together.
            match engine.as_mut() {
                Some(engine) => end(queued, failure.clone(), Some(&mut **engine)),
                None => end(queued, failure.clone(), None),
            }
        }
    }
}

/// A job's own end may panic as well; its place is given back all the same.
fn end(queued: Queued, failure: Failure, engine: Option<&mut dyn Engine>) {
    let Queued { job, ticket } = queued;
    let _panicked = catch_unwind(AssertUnwindSafe(move || job.fail(failure, engine)));
    drop(ticket);
}
