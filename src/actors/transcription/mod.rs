//! `TranscriptionService`: speech, beside chat on the compute thread.
//!
//! A request gets a place at once or is refused. Its work is a task here: it waits for one of the few
//! places in which recordings are worked on, has the model loaded where it is not, starts an audio thread
//! that turns the recording into features, and recognises. Who drops the stream of events cancels it, at
//! the next piece. Without work for a while the weights are given back.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use bytes::Bytes;
use futures_util::future::{self, FutureExt, LocalBoxFuture};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::actors::gateway::draw;
use crate::actors::messages::{
    Drain, Drained, OpenSession, SpeechStatistics, SpeechStatus, Transcribe, TranscriptStream, UnloadSpeech,
};
use crate::actors::turns::ComputeTurns;
use crate::config::SpeechConfig;
use crate::model::load::give_memory_back;
use crate::model::speech::audio::AudioLimits;
use crate::model::speech::compute::SpeechError;
use crate::model::speech::features::{self, Recording};
use crate::model::speech::recognise::{Progress, recognise};
use crate::model::speech::source::SpeechSource;
use crate::model::speech::tokens::SpeechTokens;
use crate::observe::{Gauges, Outcome, fields};
use crate::types::speech::{SpeechEvent, SpeechFailure, SpeechOptions, Transcription};
use crate::types::{Clock, LiveCount, PrepareError, Refusal, Ticket, TicketOffice, Trace, TraceRing};

mod desk;
mod live;
mod session;

use desk::Desk;
pub(crate) use session::Sessions;
pub use session::{SessionReader, SpeechSession};

/// What a refused client is told to wait.
const RETRY: Duration = Duration::from_secs(2);
/// After a load that failed, the next one is tried no sooner.
const LOAD_PAUSE: Duration = Duration::from_secs(5);

/// Sessions that are open or kept, for each that may be open.
const KEPT_SESSIONS: usize = 4;
/// Names that clients send without knowing what runs here.
const OPENAI_NAMES: [&str; 5] = ["", "default", "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"];

/// Phases of a recording's trace.
const TOTAL: &str = "transcription.total";
const QUEUED: &str = "transcription.queued";
const LOAD: &str = "transcription.load";
const SURVEY: &str = "transcription.survey";
const RECOGNISE: &str = "transcription.recognise";

/// What the service is made of.
pub(crate) struct SpeechParts {
    pub(crate) source: Arc<dyn SpeechSource>,
    pub(crate) config: SpeechConfig,
    pub(crate) live: LiveCount,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gauges: Arc<Gauges>,
    /// Read by everybody who has an id.
    pub(crate) sessions: Sessions,
    pub(crate) traces: Arc<TraceRing>,
}

/// A load that many wait for.
type Loading = future::Shared<LocalBoxFuture<'static, Result<Arc<SpeechTokens>, SpeechFailure>>>;

/// What the tasks share.
struct Shared {
    source: Arc<dyn SpeechSource>,
    config: SpeechConfig,
    clock: Arc<dyn Clock>,
    gauges: Arc<Gauges>,
    desk: Desk,
    tokens: RefCell<Option<Arc<SpeechTokens>>>,
    /// The load under way: all who need the model wait for the same one.
    loading: RefCell<Option<Loading>>,
    /// When the latest load failed, and why.
    failed: RefCell<Option<(Duration, String)>>,
    running: Semaphore,
    /// Utterances that are recognised at a time, of all sessions.
    steps: Semaphore,
    /// Those that are open, and those that ended lately.
    sessions: Sessions,
    traces: Arc<TraceRing>,
    /// Requests that need the model now.
    users: Cell<usize>,
    /// Grows with every use: a timer that finds another number has been overtaken.
    uses: Cell<u64>,
    status: RefCell<SpeechStatus>,
}

/// See the module; without a speech model it says so to everyone who asks.
pub(crate) struct TranscriptionService {
    shared: Option<Rc<Shared>>,
    places: TicketOffice,
    session_places: TicketOffice,
    stop: watch::Sender<bool>,
}

impl TranscriptionService {
    /// With a model, or without.
    pub(crate) fn new(parts: Option<SpeechParts>, turns: &ComputeTurns) -> Self {
        let stop = watch::Sender::new(false);
        let Some(SpeechParts { source, config, live, clock, gauges, sessions, traces }) = parts else {
            let none = || TicketOffice::new(0, LiveCount::default());
            return Self { shared: None, places: none(), session_places: none(), stop };
        };
        let session_places = TicketOffice::new(config.max_sessions, live.clone());
        let places = TicketOffice::new(config.max_running + config.max_queue, live);
        let desk = Desk::new(Arc::clone(&gauges));
        let lane = turns.lane(config.weight);
        actix::spawn(desk.clone().serve(lane, Arc::clone(&clock)));
        let status = SpeechStatus { model: source.id().to_owned(), ..SpeechStatus::default() };
        let shared = Rc::new(Shared {
            running: Semaphore::new(config.max_running),
            steps: Semaphore::new(config.max_running),
            sessions,
            traces,
            source,
            config,
            clock,
            gauges,
            desk,
            tokens: RefCell::default(),
            loading: RefCell::default(),
            failed: RefCell::default(),
            users: Cell::new(0),
            uses: Cell::new(0),
            status: RefCell::new(status),
        });
        if shared.config.preload || shared.config.resident {
            let shared = Rc::clone(&shared);
            actix::spawn(async move {
                let user = User::new(&shared);
                if let Err(failure) = shared.load().await {
                    tracing::warn!(target: fields::LIFE, %failure, "the speech model could not be loaded ahead");
                }
                drop(user);
            });
        }
        Self { shared: Some(shared), places, session_places, stop }
    }

    /// What new work needs, where there is a model and it is not too late.
    fn open(&self) -> Result<&Rc<Shared>, Refusal> {
        let shared = self.shared.as_ref().ok_or_else(Refusal::no_speech_model)?;
        if *self.stop.borrow() { Err(Refusal::Draining) } else { Ok(shared) }
    }

    /// Gives a recording its place and begins.
    fn accept(
        &self,
        shared: &Rc<Shared>,
        message: Transcribe,
        trace: &Trace,
    ) -> Result<TranscriptStream, Refusal> {
        let model = shared.named(message.model)?.to_owned();
        let now = shared.clock.now();
        let ticket = self.places.try_take(trace.id(), now).ok_or(Refusal::Busy { retry_after: RETRY })?;
        trace.begin_lasting(TOTAL, now, &[("bytes", message.audio.len().into())]);
        let (events, receiver) = mpsc::unbounded_channel();
        let stream = TranscriptStream { id: ticket.id, model, events: receiver };
        let ask = Ask { audio: message.audio, options: message.options, events, trace: trace.clone() };
        actix::spawn(work(Rc::clone(shared), ticket, ask, self.stop.subscribe()));
        Ok(stream)
    }
}

impl Actor for TranscriptionService {
    type Context = Context<Self>;
}

impl Handler<Transcribe> for TranscriptionService {
    type Result = Result<TranscriptStream, Refusal>;

    fn handle(&mut self, message: Transcribe, _: &mut Self::Context) -> Self::Result {
        let shared = self.open()?;
        let (request, _) = draw()?;
        let now = shared.clock.now();
        let trace = message.trace.clone().unwrap_or_else(|| Trace::new(request, now));
        shared.traces.insert(&trace);
        self.accept(shared, message, &trace).inspect_err(|_| trace.finish(Outcome::Refused.as_str(), now))
    }
}

impl Handler<OpenSession> for TranscriptionService {
    type Result = Result<SpeechSession, Refusal>;

    fn handle(&mut self, message: OpenSession, _: &mut Self::Context) -> Self::Result {
        let shared = self.open()?;
        let model = shared.named(message.spec.model.clone())?.to_owned();
        // Where the model is not loaded it is said with the first words.
        if let Some(tokens) = shared.loaded() {
            tokens.check(&message.spec.options).map_err(option_refusal)?;
        }
        let limit = shared.config.max_sessions;
        let (number, _) = draw()?;
        let ticket = self.session_places.try_take(number, shared.clock.now());
        let ticket = ticket.ok_or(Refusal::SessionLimit { limit, retry_after: RETRY })?;
        shared.forget_the_oldest();
        let id = format!("sess_{number}");
        let clock = Arc::clone(&shared.clock);
        let session = SpeechSession::new(id.clone(), model, message.spec, &shared.config, clock);
        shared.sessions.insert(id, session.clone());
        actix::spawn(live::run(Rc::clone(shared), session.clone(), ticket, self.stop.subscribe()));
        Ok(session)
    }
}

impl Handler<SpeechStatistics> for TranscriptionService {
    type Result = MessageResult<SpeechStatistics>;

    fn handle(&mut self, _: SpeechStatistics, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.shared.as_ref().map(|shared| shared.report(&self.places, &self.session_places)))
    }
}

impl Handler<UnloadSpeech> for TranscriptionService {
    type Result = bool;

    fn handle(&mut self, _: UnloadSpeech, _: &mut Self::Context) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.users.get() == 0 && shared.unload("on request"))
    }
}

impl Handler<Drain> for TranscriptionService {
    type Result = Drained;

    /// The gateway has waited already: what is still here ends now.
    fn handle(&mut self, _: Drain, _: &mut Self::Context) -> Self::Result {
        self.stop.send_replace(true);
        Drained
    }
}

/// Somebody who needs the model; the idle timer begins when the last one goes.
struct User(Rc<Shared>);

impl User {
    fn new(shared: &Rc<Shared>) -> Self {
        shared.users.set(shared.users.get() + 1);
        shared.uses.set(shared.uses.get() + 1);
        Self(Rc::clone(shared))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let shared = Rc::clone(&self.0);
        shared.users.set(shared.users.get() - 1);
        if shared.users.get() > 0 || shared.config.resident || actix::Arbiter::try_current().is_none() {
            return;
        }
        let (use_number, idle) = (shared.uses.get(), Duration::from_secs(shared.config.idle_unload_s));
        actix::spawn(async move {
            tokio::time::sleep(idle).await;
            if shared.uses.get() == use_number && shared.users.get() == 0 {
                shared.unload("idle");
            }
        });
    }
}

impl Shared {
    /// The model's id, where that is what was asked for.
    fn named(&self, asked: Option<String>) -> Result<&str, Refusal> {
        let id = self.source.id();
        // OpenAI's names for its own models mean the one there is.
        let asked = asked.filter(|asked| !OPENAI_NAMES.contains(&asked.as_str()));
        match asked.filter(|asked| asked != id) {
            Some(asked) => Err(Refusal::UnknownModel { asked, known: vec![id.to_owned()] }),
            None => Ok(id),
        }
    }

    /// Keeps the number of sessions that ended and can still be fetched within bounds.
    fn forget_the_oldest(&self) {
        if self.sessions.len() < KEPT_SESSIONS * self.config.max_sessions {
            return;
        }
        let ended = self.sessions.iter().filter(|session| session.end_now().is_some());
        let oldest = ended.min_by_key(|session| session.created()).map(|session| session.value().clone());
        if let Some(session) = oldest {
            session.delete();
            self.sessions.remove(session.id());
        }
    }

    /// The tokens of the loaded model; loads it where it is not.
    async fn load(self: &Rc<Self>) -> Result<Arc<SpeechTokens>, SpeechFailure> {
        if let Some(tokens) = self.loaded() {
            return Ok(tokens);
        }
        let under_way = self.loading.borrow().clone();
        let load = under_way.unwrap_or_else(|| {
            let shared = Rc::clone(self);
            let load = async move {
                let user = User::new(&shared);
                let loaded = shared.load_now().await;
                *shared.loading.borrow_mut() = None;
                drop(user);
                loaded
            };
            let load = load.boxed_local().shared();
            *self.loading.borrow_mut() = Some(load.clone());
            // It goes on whoever gives up waiting: else each who asks and goes would leave one behind.
            actix::spawn(load.clone().map(drop));
            load
        });
        load.await
    }

    /// The tokens of the loaded model.
    fn loaded(&self) -> Option<Arc<SpeechTokens>> {
        self.tokens.borrow().clone().filter(|_| self.desk.engine().is_loaded())
    }

    /// Loads the model.
    async fn load_now(&self) -> Result<Arc<SpeechTokens>, SpeechFailure> {
        let begun = self.clock.now();
        let unavailable = |message: String| SpeechFailure::Unavailable { message };
        if let Some((when, why)) = &*self.failed.borrow()
            && self.clock.now().saturating_sub(*when) < LOAD_PAUSE
        {
            return Err(unavailable(why.clone()));
        }
        let (reply, loaded) = oneshot::channel();
        let source = Arc::clone(&self.source);
        let thread = std::thread::Builder::new().name("greenroom-speech-load".into()).spawn(move || {
            // Nobody waits any more: the model goes.
            let _gone = reply.send(source.load());
        });
        let failed = |message: String| {
            tracing::warn!(target: fields::LIFE, %message, "the speech model could not be loaded");
            *self.failed.borrow_mut() = Some((self.clock.now(), message.clone()));
            unavailable(message)
        };
        if let Err(error) = thread {
            return Err(failed(error.to_string()));
        }
        let loaded = match loaded.await {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => return Err(failed(error.to_string())),
            Err(_) => return Err(failed("loading panicked".into())),
        };
        let engine = loaded.engine.start().map_err(|error| failed(error.to_string()))?;
        let took = self.clock.now().saturating_sub(begun);
        tracing::info!(
            target: fields::LIFE, model = self.source.id(), format = loaded.format, device = engine.device(),
            mib = engine.weight_bytes() >> 20, ms = took.as_millis() as u64, "the speech model is loaded"
        );
        let tokens = Arc::new(loaded.tokens);
        self.desk.replace(Some(engine));
        *self.tokens.borrow_mut() = Some(Arc::clone(&tokens));
        *self.failed.borrow_mut() = None;
        let mut status = self.status.borrow_mut();
        status.loads += 1;
        status.last_load_ms = took.as_millis() as u64;
        Ok(tokens)
    }

    /// Gives the weights back; whether there were any.
    fn unload(&self, why: &str) -> bool {
        let engine = self.desk.replace(None);
        let was_there = engine.is_some();
        drop(engine);
        // Walks the allocator's heaps, for which streams beside it should not have to wait. Without a thread
        // the memory is merely used again later.
        let _thread = std::thread::Builder::new().name("greenroom-give-back".into()).spawn(give_memory_back);
        *self.tokens.borrow_mut() = None;
        if was_there {
            self.status.borrow_mut().unloads += 1;
            tracing::info!(target: fields::LIFE, model = self.source.id(), why, "the speech model is unloaded");
        }
        was_there
    }

    fn report(&self, places: &TicketOffice, session_places: &TicketOffice) -> SpeechStatus {
        let mut status = self.status.borrow().clone();
        let out = places.capacity() - places.available();
        status.running = (self.config.max_running - self.running.available_permits()) as u64;
        status.queued = (out as u64).saturating_sub(status.running);
        status.sessions = (session_places.capacity() - session_places.available()) as u64;
        status.is_resident = self.desk.engine().is_loaded();
        let bytes = self.desk.engine().with(|engine| Ok((engine.weight_bytes(), engine.state_bytes())));
        (status.weight_bytes, status.state_bytes) = bytes.unwrap_or_default();
        status
    }
}

type Events = mpsc::UnboundedSender<SpeechEvent>;

/// A recording that has its place.
struct Ask {
    audio: Bytes,
    options: SpeechOptions,
    events: Events,
    trace: Trace,
}

/// A request's way from its place to its last event.
async fn work(shared: Rc<Shared>, ticket: Ticket, ask: Ask, mut stop: watch::Receiver<bool>) {
    shared.status.borrow_mut().requests += 1;
    let last = tokio::select! {
        biased;
        () = ask.events.closed() => {
            shared.status.borrow_mut().cancelled += 1;
            ask.trace.finish(Outcome::Cancelled.as_str(), shared.clock.now());
            return;
        }
        _ = stop.wait_for(|stop| *stop) => Err(SpeechFailure::ShuttingDown),
        done = transcribe(&shared, &ask) => done,
    };
    drop(ticket);
    let (last, outcome) = match last {
        Ok(transcription) => (SpeechEvent::Done(transcription), Outcome::Stop),
        Err(failure) => (SpeechEvent::Failed(failure), Outcome::Failed),
    };
    ask.trace.finish(outcome.as_str(), shared.clock.now());
    // BOUND: the last event of a request.
    let _gone = ask.events.send(last);
}

async fn transcribe(shared: &Rc<Shared>, ask: &Ask) -> Result<Transcription, SpeechFailure> {
    let Ask { audio, options, events, trace } = ask;
    let begun = shared.clock.now();
    trace.begin(QUEUED, begun, &[]);
    let _running = shared.running.acquire().await.map_err(|_| SpeechFailure::ShuttingDown)?;
    let _counted = shared.gauges.speech.running.hold();
    trace.end(QUEUED, shared.clock.now(), &[]);
    let user = User::new(shared);
    trace.begin(LOAD, shared.clock.now(), &[("resident", shared.desk.engine().is_loaded().into())]);
    let tokens = shared.load().await?;
    trace.end(LOAD, shared.clock.now(), &[]);
    tokens.check(options)?;
    let mels = shared.desk.engine().with(|engine| Ok(engine.dims().mels)).map_err(failure)?;
    let limits = AudioLimits { max_seconds: shared.config.max_seconds as f64, ..AudioLimits::default() };
    let receiver = features::start(Recording::Encoded(audio.clone()), limits, mels, options.vad_used())
        .map_err(|error| SpeechFailure::Internal { message: error.to_string() })?;
    trace.begin(SURVEY, shared.clock.now(), &[]);
    let mut tell = |progress: Progress<'_>| {
        let event = match progress {
            Progress::Surveyed(survey) => {
                let now = shared.clock.now();
                let audio_ms = (survey.seconds() * 1000.0) as u64;
                // A frame is 10 ms long.
                let heard = [("audioMs", audio_ms.into()), ("speechMs", (survey.frames() * 10).into())];
                trace.end(SURVEY, now, &heard);
                trace.begin(RECOGNISE, now, &[]);
                SpeechEvent::Started { seconds: survey.seconds() }
            }
            Progress::Segment(segment) => SpeechEvent::Segment(segment.clone()),
            Progress::Done(_) => return,
        };
        // BOUND: one a segment of a recording whose length is bounded.
        let _gone = events.send(event);
    };
    let heard = recognise(&shared.desk, &tokens, options, receiver, &mut tell).await;
    drop(user);
    if let Ok(heard) = &heard {
        trace.end(RECOGNISE, shared.clock.now(), &[("segments", heard.segments.len().into())]);
        let speech = &shared.gauges.speech;
        speech.recordings.up();
        speech.audio_ms.add((heard.duration * 1000.0) as u64);
        speech.recording_seconds.record(shared.clock.now().saturating_sub(begun));
    }
    heard.map_err(failure)
}

/// An option that the model cannot serve, said before anything is done.
fn option_refusal(failure: SpeechFailure) -> Refusal {
    match failure {
        SpeechFailure::Option { field, message } => {
            Refusal::Prepare(PrepareError::Field { field: field.to_owned(), message })
        }
        other => Refusal::Internal { message: other.to_string() },
    }
}

fn failure(error: SpeechError) -> SpeechFailure {
    match error {
        SpeechError::Audio(fault) => SpeechFailure::Audio(fault),
        SpeechError::Unloaded => SpeechFailure::Unavailable { message: error.to_string() },
        SpeechError::Engine(error) => {
            tracing::error!(target: fields::ENGINE, %error, "a recording could not be recognised");
            SpeechFailure::Internal { message: "this recording could not be recognised".into() }
        }
    }
}
