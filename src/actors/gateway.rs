//! `Gateway`: admission and the table of models. On the system's arbiter; never blocks.
//!
//! A request passes in four stages: ticket (taken or refused at once), preparation,
//! admission to its model's queue, reply. Then the gateway is out of its path. A
//! requester that goes away before the reply ends its request where it is: in
//! preparation the job is skipped when its turn comes, and holds its ticket until then;
//! after admission the scheduler sees a closed receiver.

use std::sync::Arc;
use std::time::Duration;

use actix::dev::{MessageResponse, OneshotSender};
use actix::prelude::*;

use crate::actors::messages::{
    Admit, ChatStream, CountTokens, Drain, Drained, EngineCondition, EngineState, Halt, OpenChat, Prepare,
    Prepared,
};
use crate::actors::preparation::PreparationExecutor;
use crate::actors::retry::RetryAdvice;
use crate::actors::scheduler::BatchScheduler;
use crate::actors::status::{Board, ModelState};
use crate::actors::stream::{EVENT_SLOTS, channel};
use crate::actors::watchdog::Watchdog;
use crate::model::text::TextModel;
use crate::observe::{Gauges, Outcome};
use crate::types::{
    ChatRequest, Clock, Epoch, LiveCount, PrepareError, Refusal, RequestId, Terms, TicketOffice, Trace,
    TraceRing,
};

/// What a client is told to wait for a model that is being loaded.
const LOADING_RETRY: Duration = Duration::from_secs(2);

/// A model as the gateway knows it.
pub(crate) struct Served {
    pub(crate) id: String,
    pub(crate) scheduler: Addr<BatchScheduler>,
    pub(crate) epoch: Epoch,
    pub(crate) state: ModelState,
    pub(crate) text: Option<Arc<TextModel>>,
    pub(crate) context: u32,
}

impl Served {
    pub(crate) fn new(id: String, scheduler: Addr<BatchScheduler>) -> Self {
        Self { id, scheduler, epoch: Epoch(0), state: ModelState::Loading, text: None, context: 0 }
    }
}

/// See the module.
pub(crate) struct Gateway {
    /// The default model first.
    pub(crate) models: Vec<Served>,
    pub(crate) preparation: Addr<PreparationExecutor>,
    pub(crate) tickets: TicketOffice,
    pub(crate) live: LiveCount,
    pub(crate) max_rows: usize,
    /// The operator's limit of context, if there is one.
    pub(crate) context_limit: Option<u32>,
    pub(crate) board: Arc<Board>,
    pub(crate) watchdog: Watchdog,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) traces: Arc<TraceRing>,
    pub(crate) retry: RetryAdvice,
}

/// An accepted request on its way to its model.
struct Opening {
    id: RequestId,
    terms: Terms,
    prepare: Prepare,
    model: String,
    preparation: Addr<PreparationExecutor>,
    scheduler: Addr<BatchScheduler>,
    gauges: Arc<Gauges>,
    trace: Trace,
    clock: Arc<dyn Clock>,
}

/// Reply of [`OpenChat`]: a refusal at once, or what comes of the opening.
pub(crate) struct Opened(Result<Box<Opening>, Refusal>);

impl Gateway {
    fn begin(&mut self, mut request: ChatRequest) -> Result<Opening, Refusal> {
        let (id, seed) = draw()?;
        let now = self.clock.now();
        let trace = request.trace.take().unwrap_or_else(|| Trace::new(id, now));
        self.traces.insert(&trace);
        self.accept(request, &trace, seed, now).inspect_err(|_| trace.finish(Outcome::Refused.as_str(), now))
    }

    fn accept(
        &mut self,
        request: ChatRequest,
        trace: &Trace,
        seed: u64,
        now: Duration,
    ) -> Result<Opening, Refusal> {
        if self.board.is_draining() {
            return Err(Refusal::Draining);
        }
        let served = self.find(request.model.as_deref())?;
        let text = ready_text(served)?;
        let (model, scheduler) = (served.id.clone(), served.scheduler.clone());
        let context = self.context_limit.map_or(served.context, |limit| limit.min(served.context));
        let id = trace.id();
        let (live, freed) = (self.live.get(), self.gauges.left());
        self.retry.note(now, live > self.max_rows, freed);
        let Some(mut ticket) = self.tickets.try_take(id, now) else {
            let average = self.gauges.request_average();
            let retry_after = self.retry.refuse(&request.client, now, live, freed, average);
            return Err(Refusal::Busy { retry_after });
        };
        self.retry.accept(&request.client);
        let terms = Terms {
            client: request.client.clone(),
            priority: request.priority,
            deadline: request.timeout.map(|timeout| ticket.accepted.saturating_add(timeout)),
        };
        trace.begin_lasting("completion.total", now, &[("priority", terms.priority.as_str().into())]);
        ticket.trace = trace.clone();
        Ok(Opening {
            id,
            terms,
            prepare: Prepare { ticket, request, text, context, seed, now: self.clock.wall() },
            model,
            preparation: self.preparation.clone(),
            scheduler,
            gauges: Arc::clone(&self.gauges),
            trace: trace.clone(),
            clock: Arc::clone(&self.clock),
        })
    }

    fn counting(&mut self, request: ChatRequest) -> Result<Prepare, Refusal> {
        if self.board.is_draining() {
            return Err(Refusal::Draining);
        }
        let served = self.find(request.model.as_deref())?;
        let text = ready_text(served)?;
        let (id, seed) = draw()?;
        let ticket = self.tickets.try_take(id, self.clock.now());
        let ticket = ticket.ok_or(Refusal::Busy { retry_after: LOADING_RETRY })?;
        Ok(Prepare { ticket, request, context: text.context, text, seed, now: self.clock.wall() })
    }

    fn find(&self, asked: Option<&str>) -> Result<&Served, Refusal> {
        let found = match asked {
            None | Some("default") => self.models.first(),
            Some(asked) => self.models.iter().find(|model| model.id == asked),
        };
        if self.models.is_empty() {
            let message = "no chat model is served here: start the server with one beside the speech model";
            return Err(Refusal::NotAvailable { message: message.into() });
        }
        found.ok_or_else(|| Refusal::UnknownModel {
            asked: asked.unwrap_or("default").to_owned(),
            known: self.models.iter().map(|model| model.id.clone()).collect(),
        })
    }

    fn note(&mut self, report: EngineState) {
        let Some(served) = self.models.iter_mut().find(|model| model.id == report.model) else { return };
        if report.epoch < served.epoch {
            return;
        }
        served.epoch = report.epoch;
        let mut seen = None;
        served.state = match report.state {
            EngineCondition::Ready { text, context, facts } => {
                let context = self.context_limit.map_or(context, |limit| limit.min(context));
                served.text = Some(text);
                served.context = context;
                seen = Some((context, facts));
                ModelState::Ready
            }
            EngineCondition::Restarting => ModelState::Restarting,
            EngineCondition::Failed { message } => ModelState::Failed { message },
        };
        let state = served.state.clone();
        self.board.update(&report.model, |model| {
            model.state = state;
            if let Some((context, facts)) = seen {
                model.context = Some(context);
                model.facts = facts;
            }
        });
    }
}

fn ready_text(served: &Served) -> Result<Arc<TextModel>, Refusal> {
    let model = served.id.clone();
    match (&served.state, &served.text) {
        (ModelState::Ready, Some(text)) => Ok(Arc::clone(text)),
        (ModelState::Failed { .. }, _) => Err(Refusal::EngineFailed {
            model,
            message: "it could not be loaded; see the server's log".into(),
        }),
        _ => Err(Refusal::Loading { model, retry_after: LOADING_RETRY }),
    }
}

/// An id and a seed from the system's randomness.
pub(crate) fn draw() -> Result<(RequestId, u64), Refusal> {
    let mut bytes = [0u8; 24];
    getrandom::fill(&mut bytes)
        .map_err(|error| Refusal::Internal { message: format!("no randomness: {error}") })?;
    let (id, seed) = bytes.split_at(16);
    let number = |bytes: &[u8]| bytes.iter().fold(0u128, |sum, byte| sum << 8 | u128::from(*byte));
    Ok((RequestId(number(id)), number(seed) as u64))
}

impl Opening {
    /// Preparation, which the requester's leaving cuts short, then admission, which it does not.
    async fn run(
        self,
        reply: &mut OneshotSender<Result<ChatStream, Refusal>>,
    ) -> Result<ChatStream, Refusal> {
        let created = self.prepare.now;
        self.trace.begin("request.prompt_prepare", self.clock.now(), &[]);
        let prepared = tokio::select! {
            biased;
            () = reply.closed() => {
                self.gauges.ended(Outcome::Cancelled);
                self.trace.finish(Outcome::Cancelled.as_str(), self.clock.now());
                // Nobody reads this reply.
                return Err(Refusal::Draining);
            }
            prepared = self.preparation.send(self.prepare) => prepared,
        };
        let tokens = prepared.as_ref().ok().and_then(|prepared| prepared.as_ref().ok()).map(prompt_tokens);
        let known = tokens.map(|tokens| ("promptTokens", tokens.into()));
        self.trace.end("request.prompt_prepare", self.clock.now(), known.as_slice());
        let priority = self.terms.priority;
        let admitted = async {
            let Prepared { ticket, prompt } = prepared.map_err(gone)??;
            let (events, receiver) = channel(EVENT_SLOTS);
            let stream = ChatStream {
                id: self.id,
                model: self.model,
                created,
                prompt_tokens: tokens.unwrap_or_default(),
                seed: prompt.sampling.seed,
                events: receiver,
            };
            self.scheduler
                .send(Admit { ticket, terms: self.terms, prompt, fill: None, events })
                .await
                .map_err(gone)??;
            Ok(stream)
        };
        let admitted = admitted.await;
        match &admitted {
            Ok(_) => self.gauges.admitted.up(priority.as_str()),
            Err(refusal) => {
                count(&self.gauges, refusal);
                self.trace.finish(Outcome::Refused.as_str(), self.clock.now());
            }
        }
        admitted
    }
}

/// Counts a refusal and why.
fn count(gauges: &Gauges, refusal: &Refusal) {
    gauges.ended(Outcome::Refused);
    gauges.refusals.up(match refusal {
        Refusal::UnknownModel { .. } => "unknown_model",
        Refusal::Busy { .. } | Refusal::SessionLimit { .. } => "busy",
        Refusal::Loading { .. } => "loading",
        Refusal::EngineFailed { .. } => "engine_failed",
        Refusal::WouldExpire { .. } => "would_expire",
        Refusal::Draining => "draining",
        Refusal::Prepare(_) => "prompt",
        Refusal::NotAvailable { .. } | Refusal::Internal { .. } => "internal",
    });
}

fn prompt_tokens(prepared: &Prepared) -> u32 {
    u32::try_from(prepared.prompt.tokens.len()).unwrap_or(u32::MAX)
}

/// An actor that is not there: its arbiter is stopping.
fn gone(_: MailboxError) -> Refusal {
    Refusal::Draining
}

impl MessageResponse<Gateway, OpenChat> for Opened {
    fn handle(self, _: &mut Context<Gateway>, reply: Option<OneshotSender<Result<ChatStream, Refusal>>>) {
        // Without anyone to take the stream there is nothing to do.
        let Some(mut reply) = reply else { return };
        match self.0 {
            Err(refusal) => {
                let _gone = reply.send(Err(refusal));
            }
            // A task of its own: the actor is not polled for it.
            Ok(opening) => {
                actix::spawn(async move {
                    let result = opening.run(&mut reply).await;
                    // A stream that comes back is dropped here, which cancels its request.
                    let _gone = reply.send(result);
                });
            }
        }
    }
}

impl Actor for Gateway {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        // Here, because this thread never waits for the one that is watched.
        ctx.run_interval(self.watchdog.interval(), |me, _| me.watchdog.look());
    }
}

impl Handler<OpenChat> for Gateway {
    type Result = Opened;

    fn handle(&mut self, open: OpenChat, _: &mut Self::Context) -> Self::Result {
        let opening = self.begin(open.request).inspect_err(|refusal| count(&self.gauges, refusal));
        Opened(opening.map(Box::new))
    }
}

impl Handler<CountTokens> for Gateway {
    type Result = ResponseFuture<Result<u32, Refusal>>;

    /// Prepares the request as if it were to be answered; its place is free again then.
    fn handle(&mut self, count: CountTokens, _: &mut Self::Context) -> Self::Result {
        let job = self.counting(count.request);
        let preparation = self.preparation.clone();
        Box::pin(async move {
            match preparation.send(job?).await.map_err(gone)? {
                Ok(prepared) => Ok(prompt_tokens(&prepared)),
                // It would not fit, but its length is known.
                Err(Refusal::Prepare(PrepareError::ContextExceeded { prompt, .. })) => Ok(prompt),
                Err(refusal) => Err(refusal),
            }
        })
    }
}

impl Handler<EngineState> for Gateway {
    type Result = ();

    fn handle(&mut self, report: EngineState, _: &mut Self::Context) {
        self.note(report);
    }
}

impl Handler<Drain> for Gateway {
    type Result = ResponseFuture<Drained>;

    fn handle(&mut self, drain: Drain, _: &mut Self::Context) -> Self::Result {
        self.board.set_draining();
        let live = self.live.clone();
        Box::pin(async move {
            let _at_most = tokio::time::timeout(drain.deadline, live.none_left()).await;
            Drained
        })
    }
}

impl Handler<Halt> for Gateway {
    type Result = ();

    fn handle(&mut self, _: Halt, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use tokio::sync::oneshot;

    use super::*;
    use crate::config::SamplingConfig;
    use crate::types::{ChatMessage, Role, SystemClock};

    /// A pool whose one thread begins when the test says so.
    fn preparation() -> (Addr<PreparationExecutor>, mpsc::Sender<()>) {
        let (begin, wait) = mpsc::channel();
        let wait = Arc::new(Mutex::new(wait));
        let (alive, _) = tokio::sync::mpsc::channel(1);
        let pool = SyncArbiter::start(1, move || {
            let _opened = wait.lock().unwrap().recv();
            PreparationExecutor {
                defaults: Arc::new(SamplingConfig::default()),
                nonce_lines: Arc::default(),
                history: Arc::default(),
                clock: Arc::new(SystemClock::new()),
                primers: Default::default(),
                _alive: alive.clone(),
            }
        });
        (pool, begin)
    }

    fn gateway(preparation: Addr<PreparationExecutor>) -> Gateway {
        let mut served = Served::new("fake".into(), Context::<BatchScheduler>::new().address());
        served.state = ModelState::Ready;
        served.text = Some(Arc::new(TextModel::scripted()));
        served.context = 4096;
        let live = LiveCount::default();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let board = Arc::new(Board::new(&["fake".into()], clock.wall()));
        Gateway {
            models: vec![served],
            preparation,
            tickets: TicketOffice::new(1, live.clone()),
            live,
            max_rows: 1,
            context_limit: None,
            watchdog: Watchdog::new(Vec::new(), &board, &clock, Duration::from_secs(1)),
            board,
            gauges: Arc::default(),
            clock,
            traces: Arc::new(TraceRing::new(4)),
            retry: RetryAdvice::default(),
        }
    }

    #[test]
    fn a_job_whose_requester_left_keeps_its_place_until_it_is_skipped() {
        System::new().block_on(async {
            let (preparation, begin) = preparation();
            let mut gateway = gateway(preparation);
            let request = ChatRequest {
                messages: vec![ChatMessage::text(Role::User, "hello")],
                ..ChatRequest::default()
            };
            let opening = gateway.begin(request.clone()).unwrap();
            let (mut reply, requester) = oneshot::channel();
            drop(requester);
            assert!(opening.run(&mut reply).await.is_err());
            assert_eq!(gateway.gauges.requests(Outcome::Cancelled), 1);
            assert_eq!(gateway.live.get(), 1, "the job is still in the pool's queue");
            let refused = gateway.begin(request).err();
            assert!(matches!(refused, Some(Refusal::Busy { .. })), "{refused:?}");
            begin.send(()).unwrap();
            gateway.live.none_left().await;
        });
    }
}
