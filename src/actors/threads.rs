//! The threads of an instance and the actors that live on them.
//!
//! The compute arbiter (schedulers, prompt cache, transcription), the preparation pool,
//! the loader. All of them end in [`Threads::join`]; dropped without it, they are asked
//! to end and not waited for.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use actix::WeakRecipient;
use actix::prelude::*;
use tokio::sync::{mpsc, oneshot};

use crate::actors::loader::Loader;
use crate::actors::messages::EngineState;
use crate::actors::preparation::{PreparationExecutor, Primers};
use crate::actors::prompt_cache::{CacheOf, PromptCache, Ssd};
use crate::actors::scheduler::core::{Settings, SharedSessions};
use crate::actors::scheduler::disk::{Segments, SharedSegments};
use crate::actors::scheduler::restart::RestartPolicy;
use crate::actors::scheduler::{BatchScheduler, SchedulerParts};
use crate::actors::ssd_writer::{SsdSettings, SsdWriter};
use crate::actors::transcription::{SpeechParts, TranscriptionService};
use crate::actors::turns::ComputeTurns;
use crate::actors::wiring::StartError;
use crate::cache::ssd::Codec;
use crate::cache::{PrefixTree, TokenHistory};
use crate::config::Config;
use crate::model::ModelSource;
use crate::observe::{Gauges, Pulse, fields};
use crate::types::Clock;

/// How long a stop waits for the threads.
const JOIN_LIMIT: Duration = Duration::from_secs(3);

/// What the compute thread's actors are made of; sent there whole.
pub(crate) struct ComputeActors {
    pub(crate) settings: Vec<Settings>,
    pub(crate) sources: Vec<Arc<dyn ModelSource>>,
    /// Prefixes are kept.
    pub(crate) caches: bool,
    /// The tier on disk, where there is to be one.
    pub(crate) ssd: Option<SsdSettings>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) history: Arc<TokenHistory>,
    pub(crate) restarts: RestartPolicy,
    pub(crate) loader: Loader,
    pub(crate) gateway: WeakRecipient<EngineState>,
    pub(crate) clock: Arc<dyn Clock>,
    /// Where there is a speech model.
    pub(crate) speech: Option<SpeechParts>,
}

/// Where the compute thread's actors are reached.
pub(crate) struct Addresses {
    pub(crate) schedulers: Vec<Addr<BatchScheduler>>,
    pub(crate) cache: Addr<PromptCache>,
    pub(crate) transcription: Addr<TranscriptionService>,
    /// The thread that has the folder of the tier on disk.
    pub(crate) ssd: Option<JoinHandle<()>>,
}

impl ComputeActors {
    pub(crate) fn pulses(&self) -> Vec<Arc<Pulse>> {
        self.settings.iter().map(|settings| Arc::clone(&settings.pulse)).collect()
    }

    /// On the compute thread. The schedulers and the prompt cache share each model's tree,
    /// so they are made together.
    fn start(self) -> Addresses {
        let cache = Context::<PromptCache>::new();
        let clock = Arc::clone(&self.clock);
        let turns = ComputeTurns::new(Arc::clone(&clock));
        let segments = SharedSegments::default();
        let has_ssd = self.ssd.is_some() && self.caches;
        let (mut schedulers, mut models) = (Vec::new(), Vec::new());
        for (model, (settings, source)) in self.settings.into_iter().zip(self.sources).enumerate() {
            let tree = Rc::new(RefCell::new(PrefixTree::new(self.caches)));
            let sessions = SharedSessions::default();
            let name = settings.model.clone();
            let parts = SchedulerParts {
                settings,
                tree: Rc::clone(&tree),
                sessions: Rc::clone(&sessions),
                turns: turns.clone(),
                model,
                source,
                loader: self.loader.clone(),
                restarts: self.restarts,
                gateway: self.gateway.clone(),
                cache: cache.address().downgrade(),
                segments: has_ssd.then(|| Rc::clone(&segments)),
            };
            let scheduler = Supervisor::start(move |_| BatchScheduler::new(parts));
            models.push(CacheOf {
                name,
                tree,
                sessions,
                scheduler: scheduler.downgrade(),
                namespace: None,
                forgetful: None,
                codec: Codec::Stored,
            });
            schedulers.push(scheduler);
        }
        let (mut ssd, mut thread) = (None, None);
        if let Some(settings) = self.ssd.filter(|_| has_ssd) {
            match SsdWriter::start(settings.clone(), cache.address().recipient()) {
                Ok((writer, handle)) => {
                    *segments.borrow_mut() = Segments::Opening;
                    ssd = Some(Ssd::new(settings, segments, writer, self.gauges, self.clock));
                    thread = Some(handle);
                }
                Err(error) => {
                    tracing::warn!(target: fields::CACHE, %error, "the prompt cache keeps nothing on disk");
                }
            }
        }
        let cache = cache.run(PromptCache { models, ssd, history: self.history, clock });
        let transcription = TranscriptionService::new(self.speech, &turns).start();
        Addresses { schedulers, cache, transcription, ssd: thread }
    }
}

/// See the module.
pub(crate) struct Threads {
    compute: Option<Arbiter>,
    loader: Option<JoinHandle<()>>,
    ssd: Option<JoinHandle<()>>,
    /// Ends when the last preparation thread has dropped its actor.
    preparation_ended: Option<mpsc::Receiver<()>>,
}

impl Threads {
    /// Starts the loader and the compute thread.
    pub(crate) fn start() -> Result<(Self, Loader), StartError> {
        let compute = Arbiter::try_new().map_err(|source| StartError::Thread { source })?;
        let mut threads = Self { compute: Some(compute), loader: None, ssd: None, preparation_ended: None };
        let (loader, thread) = Loader::start().map_err(|source| StartError::Thread { source })?;
        threads.loader = Some(thread);
        Ok((threads, loader))
    }

    /// Starts the compute thread's actors there.
    pub(crate) async fn start_actors(&mut self, actors: ComputeActors) -> Result<Addresses, StartError> {
        let (reply, addresses) = oneshot::channel();
        let started = self.compute.as_ref().is_some_and(|compute| {
            compute.spawn_fn(move || {
                // Dropped by a starter that did not wait: then nobody needs them.
                let _gone = reply.send(actors.start());
            })
        });
        let stopped = || StartError::Thread {
            source: std::io::Error::other("the compute thread ended while it was started"),
        };
        if !started {
            return Err(stopped());
        }
        let mut addresses = addresses.await.map_err(|_| stopped())?;
        self.ssd = addresses.ssd.take();
        Ok(addresses)
    }

    /// Starts the preparation pool.
    pub(crate) fn start_preparation(
        &mut self,
        config: &Config,
        history: Arc<TokenHistory>,
        clock: Arc<dyn Clock>,
    ) -> Addr<PreparationExecutor> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (alive, ended) = mpsc::channel(1);
        self.preparation_ended = Some(ended);
        let defaults = Arc::new(config.sampling.clone());
        let nonce_lines: Arc<[String]> = config.cache.nonce_lines.clone().into();
        SyncArbiter::start_with_thread_builder(
            (cores / 2).clamp(1, 4),
            || std::thread::Builder::new().name("greenroom-prepare".into()),
            move || PreparationExecutor {
                defaults: Arc::clone(&defaults),
                nonce_lines: Arc::clone(&nonce_lines),
                history: Arc::clone(&history),
                clock: Arc::clone(&clock),
                primers: Primers::default(),
                _alive: alive.clone(),
            },
        )
    }

    /// Ends the threads and waits for them, a few seconds at most. The actors' addresses
    /// must be gone, or the preparation pool stays.
    pub(crate) async fn join(mut self) {
        let (compute, loader, ssd) = (self.compute.take(), self.loader.take(), self.ssd.take());
        if let Some(compute) = &compute {
            compute.stop();
        }
        let (joined, all) = oneshot::channel();
        // Joining blocks, and this thread serves others: a thread of its own does it.
        let helper = std::thread::Builder::new().name("greenroom-join".into()).spawn(move || {
            // A thread that panicked has ended too.
            let _panicked = compute.map(Arbiter::join);
            let _panicked = loader.map(JoinHandle::join);
            // Ends when the compute thread's actors are gone and what they ordered is done.
            let _panicked = ssd.map(JoinHandle::join);
            let _nobody_waits = joined.send(());
        });
        let Ok(helper) = helper else { return };
        let pool = self.preparation_ended.take();
        let wait = async {
            let _ended = all.await;
            if let Some(mut pool) = pool {
                let _ended = pool.recv().await;
            }
        };
        match tokio::time::timeout(JOIN_LIMIT, wait).await {
            // It has sent its last word: this takes no time.
            Ok(()) => drop(helper.join()),
            Err(_) => tracing::warn!(
                target: fields::LIFE,
                "a thread is still busy and is left to end by itself: a step or a load takes long"
            ),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(compute) = &self.compute {
            compute.stop();
        }
    }
}
