//! Start and stop: the only place that knows every actor.
//!
//! `start` returns at once; models load in the background. `stop` leaves no thread and
//! no actor behind. Neither touches signals, subscribers, panic hooks or the `System`.

use std::sync::Arc;
use std::time::Duration;

use actix::Recipient;
use tokio::sync::watch;

use crate::actors::messages::{CacheStatistics, ChatStream, ClearCache, OpenChat, Transcribe};
use crate::actors::status::{Board, Health, ModelStatus};
use crate::config::Config;
use crate::model::ModelSource;
use crate::observe::{Gauges, Pulse};
use crate::types::{ChatRequest, Clock, Refusal, SystemClock};

/// Why an instance could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is no actix `System` on this thread.
    #[error("Greenroom must be started inside a running actix System")]
    NoSystem,
    /// Nothing to answer with.
    #[error("no model was given: call `model` on the builder at least once")]
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
    pub(crate) config: Config,
    pub(crate) models: Vec<Arc<dyn ModelSource>>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl GreenroomBuilder {
    /// Adds a chat model; the first one is the default.
    #[must_use]
    pub fn model(mut self, source: Arc<dyn ModelSource>) -> Self {
        self.models.push(source);
        self
    }

    /// Replaces the clock of all policies (tests).
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Starts threads and actors; models load in the background. Needs a running actix `System`.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(self) -> Result<Greenroom, StartError> {
        Err(StartError::NoModel)
    }
}

/// A running instance. Dropping it without [`Greenroom::stop`] leaves its threads to the process' end.
pub struct Greenroom {
    handles: Handles,
}

impl Greenroom {
    /// Begins an instance with these settings.
    pub fn builder(config: Config) -> GreenroomBuilder {
        GreenroomBuilder { config, models: Vec::new(), clock: Arc::new(SystemClock::new()) }
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
    /// [`crate::types::FailureReason::ShuttingDown`].
    pub async fn drain(&self, deadline: Duration) {
        let _ = deadline;
    }

    /// Ends all actors and threads. Streams that are still open are ended.
    pub async fn stop(self) {}
}

/// What HTTP and a host's own actors need of an instance.
#[derive(Clone)]
pub struct Handles {
    open_chat: Recipient<OpenChat>,
    transcribe: Recipient<Transcribe>,
    cache: Recipient<CacheStatistics>,
    clear_cache: Recipient<ClearCache>,
    board: Arc<Board>,
    gauges: Arc<Gauges>,
    pulses: Arc<[Pulse]>,
    clock: Arc<dyn Clock>,
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

    /// Where transcriptions go.
    pub fn transcribe(&self) -> &Recipient<Transcribe> {
        &self.transcribe
    }

    /// Where questions about prompt reuse go.
    pub fn cache(&self) -> &Recipient<CacheStatistics> {
        &self.cache
    }

    /// Where the order to forget finished rows goes.
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
