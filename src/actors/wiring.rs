//! Start and stop: the only place that knows every actor.
//!
//! `start` returns at once; models load in the background. `stop` leaves no thread and
//! no actor behind. Neither touches signals, subscribers, panic hooks or the `System`.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use tokio::sync::watch;

use crate::actors::gateway::{Gateway, Served};
use crate::actors::loader::Loader;
use crate::actors::messages::{
    CacheStatistics, ChangeSession, ChatStream, ClearCache, CountTokens, Drain, FlushDisk, Halt,
    ListSessions, OpenChat, OpenSession, SpeechStatistics, SpeechStatus, Transcribe, TranscriptStream,
    UnloadSpeech,
};
use crate::actors::retry::RetryAdvice;
use crate::actors::scheduler::BatchScheduler;
use crate::actors::scheduler::core::Settings;
use crate::actors::scheduler::restart::RestartPolicy;
use crate::actors::ssd_writer::SsdSettings;
use crate::actors::status::{Board, Health, ModelStatus};
use crate::actors::threads::{ComputeActors, Threads};
use crate::actors::transcription::{Sessions, SpeechParts, SpeechSession, TranscriptionService};
use crate::actors::watchdog::Watchdog;
use crate::cache::TokenHistory;
use crate::config::{Config, Problem};
use crate::model::ModelSource;
use crate::model::speech::source::SpeechSource;
use crate::observe::{Gauges, Pulse, fields};
use crate::types::speech::{SessionSpec, SessionStatus};
use crate::types::{ChatRequest, Clock, LiveCount, Refusal, SystemClock, TicketOffice, TraceRing};

/// How long a drain waits for requests that were in preparation at its deadline.
const LAST_REFUSALS: Duration = Duration::from_secs(1);
/// How long the prompt cache may take to write what it keeps.
const LAST_WRITES: Duration = Duration::from_secs(8);
/// How long the schedulers may take to end their streams: more than a step, unless it hangs.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Why an instance could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is no actix `System` on this thread.
    #[error("Greenroom must be started inside a running actix System")]
    NoSystem,
    /// Settings with values that make no sense.
    #[error("the settings do not fit: {}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Config {
        /// All of them.
        problems: Vec<Problem>,
    },
    /// Nothing to answer with.
    #[error("no model was given: call `model` or `speech` on the builder")]
    NoModel,
    /// Two models with one id.
    #[error("two models are called `{id}`: ids must differ")]
    DuplicateModel {
        /// Which.
        id: String,
    },
    /// A thread could not be started.
    #[error("a thread could not be started: {source}")]
    Thread {
        /// Why.
        source: std::io::Error,
    },
}

/// Collects what an instance is made of. See [`Greenroom::builder`].
pub struct GreenroomBuilder {
    config: Config,
    models: Vec<Arc<dyn ModelSource>>,
    speech: Option<Arc<dyn SpeechSource>>,
    clock: Arc<dyn Clock>,
    restarts: RestartPolicy,
}

impl GreenroomBuilder {
    /// Adds a chat model; the first one is the default.
    #[must_use]
    pub fn model(mut self, source: Arc<dyn ModelSource>) -> Self {
        self.models.push(source);
        self
    }

    /// Adds the speech model; it is loaded with the first recording, or as `speech.preload` says. A chat model
    /// is not needed then.
    #[must_use]
    pub fn speech(mut self, source: Arc<dyn SpeechSource>) -> Self {
        self.speech = Some(source);
        self
    }

    /// Replaces the clock of all policies (tests).
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Replaces how often and after what pause a broken engine is rebuilt.
    #[must_use]
    pub fn restarts(mut self, policy: RestartPolicy) -> Self {
        self.restarts = policy;
        self
    }

    /// Starts threads and actors; models load in the background. Needs a running actix `System`.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(self) -> Result<Greenroom, StartError> {
        let ids = self.check()?;
        let live = LiveCount::default();
        let gauges = Arc::new(Gauges::default());
        gauges.watch_tickets(Arc::new({
            let live = live.clone();
            move || live.get()
        }));
        let board = Arc::new(Board::new(&ids, self.clock.wall()));
        let (mut threads, loader) = Threads::start()?;
        // The gateway's address exists before it runs: the schedulers report to it.
        let gateway = Context::<Gateway>::new();
        let history = Arc::new(TokenHistory::default());
        let sessions = Sessions::default();
        let traces = Arc::new(TraceRing::new(self.config.trace.ring));
        let speech = self.speech.clone().map(|source| SpeechParts {
            source,
            config: self.config.speech.clone(),
            live: live.clone(),
            clock: Arc::clone(&self.clock),
            gauges: Arc::clone(&gauges),
            sessions: Arc::clone(&sessions),
            traces: Arc::clone(&traces),
        });
        let compute = self.compute_actors(&gateway.address(), &gauges, &history, loader, speech);
        let pulses = compute.pulses();
        let addresses = threads.start_actors(compute).await?;
        let max_rows = self.config.scheduler.max_rows.max(1);
        let (open_chat, count_tokens) = (gateway.address(), gateway.address());
        let gateway = gateway.run(Gateway {
            models: ids
                .iter()
                .zip(&addresses.schedulers)
                .map(|(id, scheduler)| Served::new(id.clone(), scheduler.clone()))
                .collect(),
            preparation: threads.start_preparation(&self.config, history, Arc::clone(&self.clock)),
            tickets: TicketOffice::new(
                max_rows.saturating_add(self.config.scheduler.max_queue),
                live.clone(),
            ),
            live: live.clone(),
            max_rows,
            context_limit: self.config.engine.context,
            watchdog: Watchdog::new(
                pulses.clone(),
                &board,
                &self.clock,
                Duration::from_secs(self.config.scheduler.hang_timeout_s),
            ),
            board: Arc::clone(&board),
            gauges: Arc::clone(&gauges),
            clock: Arc::clone(&self.clock),
            traces: Arc::clone(&traces),
            retry: RetryAdvice::default(),
        });
        let handles = Handles {
            open_chat: open_chat.recipient(),
            count_tokens: count_tokens.recipient(),
            transcribe: addresses.transcription.clone().recipient(),
            open_session: addresses.transcription.clone().recipient(),
            sessions,
            speech_statistics: addresses.transcription.clone().recipient(),
            unload_speech: addresses.transcription.clone().recipient(),
            speech_model: self.speech.as_ref().map(|source| source.id().to_owned()),
            max_recording_bytes: self.config.speech.max_file_mib.saturating_mul(1 << 20),
            max_sessions: self.config.speech.max_sessions,
            cache: addresses.cache.clone().recipient(),
            clear_cache: addresses.cache.clone().recipient(),
            list_sessions: addresses.cache.clone().recipient(),
            change_session: addresses.cache.clone().recipient(),
            board,
            gauges,
            pulses,
            clock: self.clock,
            traces,
        };
        let flush = addresses.cache.recipient();
        let transcription = addresses.transcription;
        Ok(Greenroom {
            handles,
            gateway,
            schedulers: addresses.schedulers,
            transcription,
            flush,
            live,
            threads,
        })
    }

    fn check(&self) -> Result<Vec<String>, StartError> {
        if actix::System::try_current().is_none() {
            return Err(StartError::NoSystem);
        }
        self.config.validate().map_err(|problems| StartError::Config { problems })?;
        let mut ids: Vec<String> = Vec::new();
        for model in &self.models {
            if ids.iter().any(|id| id == model.id()) {
                return Err(StartError::DuplicateModel { id: model.id().to_owned() });
            }
            ids.push(model.id().to_owned());
        }
        if ids.is_empty() && self.speech.is_none() {
            return Err(StartError::NoModel);
        }
        Ok(ids)
    }

    fn compute_actors(
        &self,
        gateway: &Addr<Gateway>,
        gauges: &Arc<Gauges>,
        history: &Arc<TokenHistory>,
        loader: Loader,
        speech: Option<SpeechParts>,
    ) -> ComputeActors {
        ComputeActors {
            settings: self
                .models
                .iter()
                .map(|model| Settings {
                    history: Arc::clone(history),
                    ..Settings::new(model.id(), &self.config, &self.clock, gauges)
                })
                .collect(),
            sources: self.models.clone(),
            caches: self.config.cache.enabled,
            ssd: self.config.cache.dir.as_ref().map(|dir| SsdSettings {
                dir: dir.clone(),
                budget_bytes: self.config.cache.ssd_bytes(),
                rate: self.config.cache.ssd_write_mib_s.saturating_mul(1 << 20),
            }),
            gauges: Arc::clone(gauges),
            history: Arc::clone(history),
            restarts: self.restarts,
            loader,
            gateway: gateway.downgrade().recipient(),
            clock: Arc::clone(&self.clock),
            speech,
        }
    }
}

/// A running instance.
///
/// Dropping it without [`Greenroom::stop`] asks its threads to end but does not wait for them.
pub struct Greenroom {
    handles: Handles,
    gateway: Addr<Gateway>,
    schedulers: Vec<Addr<BatchScheduler>>,
    transcription: Addr<TranscriptionService>,
    flush: Recipient<FlushDisk>,
    live: LiveCount,
    threads: Threads,
}

impl Greenroom {
    /// Begins an instance with these settings.
    pub fn builder(config: Config) -> GreenroomBuilder {
        GreenroomBuilder {
            config,
            models: Vec::new(),
            speech: None,
            clock: Arc::new(SystemClock::new()),
            restarts: RestartPolicy::default(),
        }
    }

    /// What HTTP and a host's own actors need; cheap to clone.
    pub fn handles(&self) -> Handles {
        self.handles.clone()
    }

    /// Where chat requests go, for actors that hold a recipient.
    pub fn open_chat(&self) -> Recipient<OpenChat> {
        self.handles.open_chat.clone()
    }

    /// Asks for an answer.
    ///
    /// # Errors
    /// See [`Refusal`].
    ///
    /// # Cancellation
    /// Dropping the future, and later the stream, cancels the request.
    pub async fn chat(&self, request: ChatRequest) -> Result<ChatStream, Refusal> {
        self.handles.chat(request).await
    }

    /// State of the instance.
    pub fn health(&self) -> Health {
        self.handles.health()
    }

    /// Waits until every model answers.
    ///
    /// # Errors
    /// The operator's message when a model cannot be loaded, or the instance goes down first.
    pub async fn ready(&self) -> Result<(), String> {
        self.handles.ready().await
    }

    /// Refuses new work, waits for what is under way, at the deadline ends streams with
    /// [`crate::types::FailureReason::ShuttingDown`]. Returns a few seconds after the
    /// deadline at the latest, also when a step hangs.
    ///
    /// # Cancellation
    /// New work stays refused; open streams go on.
    pub async fn drain(&self, deadline: Duration) {
        let drain = Drain { deadline };
        // Who is dictating gets what was said so far.
        self.handles.sessions.iter().for_each(|session| session.finish());
        // An actor that is gone has nothing under way.
        let _gone = self.gateway.send(drain).await;
        // Tasks of their own: an order that nobody waits for any more is still carried out.
        let ending: Vec<_> =
            self.schedulers.iter().map(|scheduler| tokio::spawn(scheduler.send(drain))).collect();
        // A mailbox that is gone has nothing under way.
        let _gone = tokio::time::timeout(LAST_WORDS, self.transcription.send(drain)).await;
        if tokio::time::timeout(LAST_WORDS, join_all(ending)).await.is_err() {
            tracing::error!(
                target: fields::LIFE,
                "a step hangs: its streams could not be ended and are left as they are"
            );
        }
        // Requests in preparation are refused at the scheduler's door.
        let _at_most = tokio::time::timeout(LAST_REFUSALS, self.live.none_left()).await;
    }

    /// Ends all actors and threads. Streams that are still open are ended.
    ///
    /// A load or a step under way cannot be interrupted: if it takes longer than a few
    /// seconds its thread is left to end by itself.
    pub async fn stop(self) {
        self.drain(Duration::ZERO).await;
        // What is kept goes to the disk before everything ends; a disk that is too slow for that loses it.
        let _late = tokio::time::timeout(LAST_WRITES, self.flush.send(FlushDisk)).await;
        let _gone = self.gateway.send(Halt).await;
        drop((self.gateway, self.schedulers, self.transcription, self.flush, self.handles));
        self.threads.join().await;
    }
}

/// What HTTP and a host's own actors need of an instance.
#[derive(Clone)]
pub struct Handles {
    open_chat: Recipient<OpenChat>,
    count_tokens: Recipient<CountTokens>,
    transcribe: Recipient<Transcribe>,
    open_session: Recipient<OpenSession>,
    sessions: Sessions,
    speech_statistics: Recipient<SpeechStatistics>,
    unload_speech: Recipient<UnloadSpeech>,
    speech_model: Option<String>,
    max_recording_bytes: usize,
    max_sessions: usize,
    cache: Recipient<CacheStatistics>,
    clear_cache: Recipient<ClearCache>,
    list_sessions: Recipient<ListSessions>,
    change_session: Recipient<ChangeSession>,
    board: Arc<Board>,
    gauges: Arc<Gauges>,
    pulses: Vec<Arc<Pulse>>,
    clock: Arc<dyn Clock>,
    traces: Arc<TraceRing>,
}

impl Handles {
    /// Where chat requests go.
    pub fn open_chat(&self) -> &Recipient<OpenChat> {
        &self.open_chat
    }

    /// Asks for an answer; see [`Greenroom::chat`].
    ///
    /// # Errors
    /// See [`Refusal`].
    pub async fn chat(&self, request: ChatRequest) -> Result<ChatStream, Refusal> {
        self.open_chat.send(OpenChat { request }).await.unwrap_or(Err(Refusal::Draining))
    }

    /// How many tokens a request's prompt has; nothing is generated.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub async fn count_tokens(&self, request: ChatRequest) -> Result<u32, Refusal> {
        self.count_tokens.send(CountTokens { request }).await.unwrap_or(Err(Refusal::Draining))
    }

    /// Where transcriptions go.
    pub fn transcribe(&self) -> &Recipient<Transcribe> {
        &self.transcribe
    }

    /// Has a recording written down.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub async fn transcribe_file(&self, request: Transcribe) -> Result<TranscriptStream, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining);
        }
        self.transcribe.send(request).await.unwrap_or(Err(Refusal::Draining))
    }

    /// Begins a live session.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub async fn open_session(&self, spec: SessionSpec) -> Result<SpeechSession, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining);
        }
        self.open_session.send(OpenSession { spec }).await.unwrap_or(Err(Refusal::Draining))
    }

    /// The live session of this id, open or ended lately.
    pub fn find_session(&self, id: &str) -> Option<SpeechSession> {
        let found = self.sessions.get(id)?.value().clone();
        // One that was given up is only waiting for its task to notice.
        let is_there = !found.is_deleted() && found.status() != SessionStatus::Cancelled;
        is_there.then_some(found)
    }

    /// Id of the speech model, where there is one.
    pub fn speech_model(&self) -> Option<&str> {
        self.speech_model.as_deref()
    }

    /// Bytes of the largest recording that is taken.
    pub fn max_recording_bytes(&self) -> usize {
        self.max_recording_bytes
    }

    /// Whether the speech model's weights are in memory, from a gauge.
    pub fn is_speech_loaded(&self) -> bool {
        self.gauges.speech.weight_bytes.get() > 0
    }

    /// Live sessions that may be open.
    pub fn max_sessions(&self) -> usize {
        self.max_sessions
    }

    /// How the speech model is; `None` without one.
    pub async fn speech(&self) -> Option<SpeechStatus> {
        self.speech_statistics.send(SpeechStatistics).await.ok().flatten()
    }

    /// Gives the speech model's weights back, unless they are in use: whether it did.
    pub async fn unload_speech(&self) -> bool {
        self.unload_speech.send(UnloadSpeech).await.unwrap_or(false)
    }

    /// Where questions about prompt reuse go.
    pub fn cache(&self) -> &Recipient<CacheStatistics> {
        &self.cache
    }

    /// Where questions about conversations go.
    pub fn list_sessions(&self) -> &Recipient<ListSessions> {
        &self.list_sessions
    }

    /// Where orders about conversations go.
    pub fn change_session(&self) -> &Recipient<ChangeSession> {
        &self.change_session
    }

    /// Where the order to forget what is kept goes.
    pub fn clear_cache(&self) -> &Recipient<ClearCache> {
        &self.clear_cache
    }

    /// State of the instance.
    pub fn health(&self) -> Health {
        self.board.health()
    }

    /// Follows the state of the instance.
    pub fn watch_health(&self) -> watch::Receiver<Health> {
        self.board.watch_health()
    }

    /// Waits until every model answers.
    ///
    /// # Errors
    /// The operator's message when a model cannot be loaded, or the instance goes down first.
    pub async fn ready(&self) -> Result<(), String> {
        let mut health = self.board.watch_health();
        let end = health
            .wait_for(|health| matches!(health, Health::Ready | Health::Draining | Health::Failed { .. }))
            .await;
        match end.as_deref() {
            Ok(Health::Ready) => Ok(()),
            Ok(Health::Failed { message }) => Err(message.clone()),
            _ => Err("the server is shutting down".into()),
        }
    }

    /// The models, the default one first.
    pub fn models(&self) -> Vec<ModelStatus> {
        self.board.models()
    }

    /// Gauges and counters; their text is [`Gauges::render`].
    pub fn gauges(&self) -> &Arc<Gauges> {
        &self.gauges
    }

    /// Traces of the latest requests.
    pub fn traces(&self) -> &Arc<TraceRing> {
        &self.traces
    }

    /// The clock of all times of this instance.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Time since a step loop that has work last moved; `None` when all are idle.
    /// Reads atomics only: right also when the compute thread hangs.
    pub fn step_age(&self) -> Option<Duration> {
        let now = self.clock.now();
        self.pulses.iter().filter_map(|pulse| pulse.age(now)).max()
    }

    /// Whether the instance is going down.
    pub fn is_draining(&self) -> bool {
        self.board.is_draining()
    }
}
