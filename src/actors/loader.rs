//! The loader thread: reads and packs models, one at a time, seconds each.
//!
//! One a instance. It ends when the last [`Loader`] is dropped and the load under way
//! is done; a load cannot be interrupted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use actix::Recipient;

use crate::actors::messages::Loaded;
use crate::actors::scheduler::core::panic_message;
use crate::model::ModelSource;
use crate::types::Epoch;

/// A model to be loaded, and who wants it.
pub(crate) struct LoadJob {
    pub(crate) source: Arc<dyn ModelSource>,
    pub(crate) epoch: Epoch,
    pub(crate) reply: Recipient<Loaded>,
}

/// Hands jobs to the loader thread.
#[derive(Clone)]
pub(crate) struct Loader {
    jobs: mpsc::Sender<LoadJob>,
}

impl Loader {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<(Self, JoinHandle<()>)> {
        let (jobs, queue) = mpsc::channel::<LoadJob>();
        let thread = std::thread::Builder::new().name("greenroom-loader".into()).spawn(move || {
            for job in queue {
                let LoadJob { source, epoch, reply } = job;
                let result = catch_unwind(AssertUnwindSafe(|| source.load()));
                let result = match result {
                    Ok(loaded) => loaded.map_err(|error| error.to_string()),
                    Err(payload) => Err(format!("loading panicked: {}", panic_message(&*payload))),
                };
                // BOUND: one reply a job. A closed address drops the model.
                reply.do_send(Loaded { epoch, result });
            }
        })?;
        Ok((Self { jobs }, thread))
    }

    /// Queues a job; the reply comes as a message.
    pub(crate) fn load(&self, job: LoadJob) -> Result<(), String> {
        self.jobs.send(job).map_err(|_| "the loader thread has ended".to_owned())
    }
}
