//! `SsdWriter`: the thread that owns the prompt cache's folder. Bytes only.
//!
//! Jobs come in order through a channel and are answered with messages, one each. Writing is held
//! to a rate; what is to be read meanwhile is read at once, because somebody waits for it. The
//! first write that fails for a reason of the disk's is the last one: the tier goes on reading.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use actix::Recipient;

use crate::actors::messages::{SsdAnswer, SsdEvent};
use crate::actors::scheduler::disk::{ReadId, ReadPieces};
use crate::cache::ssd::{Codec, Folder, OpenError, ReadError, SegmentHead, SegmentId};

/// What is to be done in the folder.
#[derive(Debug)]
pub(crate) enum SsdJob {
    Write { head: SegmentHead, pieces: Vec<Vec<u8>>, codec: Codec },
    Read { model: usize, read: ReadId, head: Arc<SegmentHead>, upto: u32, codec: Codec },
    Remove { id: SegmentId },
}

/// Settings of the tier.
#[derive(Clone, Debug)]
pub(crate) struct SsdSettings {
    pub(crate) dir: PathBuf,
    pub(crate) budget_bytes: u64,
    /// Bytes a second that are written at most.
    pub(crate) rate: u64,
}

/// Hands jobs to the thread, which ends when this is dropped and its queue is done.
#[derive(Debug)]
pub(crate) struct SsdWriter {
    jobs: Sender<SsdJob>,
}

impl SsdWriter {
    /// Starts the thread. What the folder holds comes as [`SsdEvent::Opened`].
    pub(crate) fn start(
        settings: SsdSettings,
        answers: Recipient<SsdAnswer>,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (jobs, queue) = mpsc::channel();
        let thread = std::thread::Builder::new().name("greenroom-ssd".into()).spawn(move || {
            // BOUND: one for the folder, then one a job.
            let answer = |event| answers.do_send(SsdAnswer(event));
            match Folder::open(&settings.dir) {
                Ok((folder, heads, report)) => {
                    answer(SsdEvent::Opened(Ok((heads, report))));
                    Thread { folder, queue, kept: Vec::new(), rate: settings.rate.max(1), is_open: true }
                        .run(&answer);
                }
                Err(error) => answer(SsdEvent::Opened(Err(said(&error)))),
            }
        })?;
        Ok((Self { jobs }, thread))
    }

    /// Queues a job; false when the thread has ended.
    pub(crate) fn order(&self, job: SsdJob) -> bool {
        self.jobs.send(job).is_ok()
    }
}

fn said(error: &OpenError) -> String {
    error.to_string()
}

struct Thread {
    folder: Folder,
    queue: Receiver<SsdJob>,
    /// Jobs that came while something was written.
    kept: Vec<SsdJob>,
    rate: u64,
    /// More jobs may come.
    is_open: bool,
}

impl Thread {
    fn run(mut self, answer: &impl Fn(SsdEvent)) {
        loop {
            let job = if self.kept.is_empty() { self.queue.recv().ok() } else { Some(self.kept.remove(0)) };
            match job {
                None => return,
                Some(SsdJob::Write { head, pieces, codec }) => {
                    let pieces: Vec<_> = pieces.into_iter().map(|piece| codec.encode(piece)).collect();
                    self.write(head, &pieces, answer);
                }
                Some(job) => at_once(&self.folder, job, answer),
            }
        }
    }

    fn write(&mut self, head: SegmentHead, pieces: &[Vec<u8>], answer: &impl Fn(SsdEvent)) {
        let Self { folder, queue, kept, rate, is_open } = self;
        let begun = Instant::now();
        let mut written = 0;
        let result = folder.write(&head, pieces, &mut |bytes| {
            written += bytes;
            // Without anybody who could order more, it is to end soon.
            while *is_open {
                let due = Duration::from_secs_f64(written as f64 / *rate as f64);
                let Some(left) = due.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) else {
                    break;
                };
                match queue.recv_timeout(left) {
                    Ok(job @ (SsdJob::Read { .. } | SsdJob::Remove { .. })) => at_once(folder, job, answer),
                    Ok(job) => kept.push(job),
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => *is_open = false,
                }
            }
        });
        answer(match result {
            Ok(bytes) => SsdEvent::Written { head: SegmentHead { bytes, ..head } },
            Err(error) => SsdEvent::NotWritten { message: error.to_string() },
        });
    }
}

fn at_once(folder: &Folder, job: SsdJob, answer: &impl Fn(SsdEvent)) {
    match job {
        SsdJob::Read { model, read, head, upto, codec } => {
            let tokens = upto.saturating_sub(head.start);
            let pieces = folder.read(&head, tokens).map(|pieces| {
                let tokens = head.tokens.len() as u32;
                let pieces = pieces.into_iter().map(|piece| codec.decode(piece)).collect();
                ReadPieces { start: head.start, tokens, pieces }
            });
            let (pieces, error) = match pieces {
                Ok(pieces) => (Some(pieces), None),
                Err(error) => (None, Some(error)),
            };
            // What is wrong for good goes; a disk that does not answer now may answer later.
            let is_bad = matches!(error, Some(ReadError::Corrupt { .. } | ReadError::Missing));
            let message = error.map(|error| error.to_string());
            answer(SsdEvent::Read { model, read, id: head.id, pieces, message, is_bad });
        }
        SsdJob::Remove { id } => {
            let result = folder.remove(id);
            answer(SsdEvent::Removed { message: result.err().map(|error| error.to_string()) });
        }
        // Writes have their own way.
        SsdJob::Write { .. } => {}
    }
}
