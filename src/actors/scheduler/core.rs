//! The scheduler without an actor: rows, engine, prefix index, one step at a time.
//!
//! Every row is in exactly one list: `waiting` (no sequence), `running` (a sequence),
//! `ending` (nothing left to compute, text left to send). Leaving the lists goes through
//! `conclude` alone, which counts, logs, gives the ticket back and sends the one
//! terminal event. Knows no actor framework, so that tests can drive it step by step.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::actors::messages::Admit;
use crate::actors::scheduler::gauge::Shares;
use crate::actors::scheduler::plan::{Limits, Pace};
use crate::actors::scheduler::row::{Flow, Row};
use crate::cache::PrefixIndex;
use crate::config::Config;
use crate::model::Engine;
use crate::model::text::TextModel;
use crate::observe::{Gauges, Pulse};
use crate::types::{
    Clock, EngineError, Epoch, Failure, FailureReason, FinishReason, PrepareError, Refusal, SequenceId,
};

/// Pause of the loop while no row can be computed but some wait for something.
const PARKED_PAUSE: Duration = Duration::from_millis(5);
/// The same while there is no engine: only clients that go away are looked for.
const NO_ENGINE_PAUSE: Duration = Duration::from_millis(50);

/// The prefix index as the two actors of the compute thread share it.
pub(crate) type SharedIndex = Rc<RefCell<PrefixIndex<SequenceId>>>;

/// What a scheduler is told once.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) model: String,
    pub(crate) max_rows: usize,
    pub(crate) limits: Limits,
    pub(crate) stall_timeout: Duration,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) pulse: Arc<Pulse>,
}

impl Settings {
    pub(crate) fn new(model: &str, config: &Config, clock: &Arc<dyn Clock>, gauges: &Arc<Gauges>) -> Self {
        Self {
            model: model.to_owned(),
            max_rows: config.scheduler.max_rows.max(1),
            limits: Limits {
                max_chunk: config.scheduler.max_chunk_tokens.max(1),
                prefill_budget: Duration::from_millis(config.scheduler.prefill_budget_ms),
            },
            stall_timeout: Duration::from_secs(config.scheduler.stall_timeout_s),
            clock: Arc::clone(clock),
            gauges: Arc::clone(gauges),
            pulse: Arc::default(),
        }
    }
}

/// What the loop does after a step.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Progress {
    /// Step again, after a yield.
    More,
    /// Nothing can move now: look again after a pause.
    Pause(Duration),
    /// Nothing to do until a request comes.
    Idle,
    /// The engine is lost: see [`Core::lose_engine`].
    Broken(EngineError),
}

/// How a row leaves.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum End {
    Done(FinishReason),
    Cancelled,
    Failed(Failure),
}

/// See the module.
pub(crate) struct Core {
    pub(crate) settings: Settings,
    pub(crate) engine: Option<Box<dyn Engine>>,
    pub(crate) index: SharedIndex,
    pub(crate) epoch: Epoch,
    pub(crate) waiting: Vec<Row>,
    pub(crate) running: Vec<Row>,
    pub(crate) ending: Vec<Row>,
    /// Rows that the engine is busy with: they fail if it breaks.
    pub(crate) in_step: Vec<u64>,
    pub(crate) pace: Pace,
    pub(crate) shares: Shares,
    text: Option<Arc<TextModel>>,
    arrivals: u64,
}

impl Core {
    pub(crate) fn new(settings: Settings, index: SharedIndex) -> Self {
        Self {
            shares: Shares::new(Arc::clone(&settings.gauges)),
            settings,
            engine: None,
            index,
            epoch: Epoch(0),
            waiting: Vec::new(),
            running: Vec::new(),
            ending: Vec::new(),
            in_step: Vec::new(),
            pace: Pace::default(),
            text: None,
            arrivals: 0,
        }
    }

    /// Takes an engine into service.
    pub(crate) fn attach(&mut self, engine: Box<dyn Engine>, text: Arc<TextModel>) {
        self.epoch = engine.info().epoch;
        self.engine = Some(engine);
        self.text = Some(text);
        self.publish();
    }

    /// Most tokens that a row can hold: what the model knows, or what all key-value memory
    /// has room for. `None` without an engine.
    pub(crate) fn context(&self) -> Option<u32> {
        let engine = self.engine.as_ref()?;
        let (info, memory) = (engine.info(), engine.memory());
        let block = u64::from(info.kv_block_tokens.max(1));
        let block_bytes = block.saturating_mul(info.kv_bytes_per_token).max(1);
        let room = (memory.kv_capacity_bytes / block_bytes).saturating_mul(block);
        Some(info.context.min(u32::try_from(room).unwrap_or(u32::MAX)))
    }

    /// Puts a request at the end of the queue.
    ///
    /// # Errors
    /// `Loading` before the first engine, `ContextExceeded` for a prompt that leaves no room
    /// for one token of an answer, however much is given up for it.
    pub(crate) fn enqueue(&mut self, admit: Admit) -> Result<(), Refusal> {
        let Some(text) = self.text.clone() else {
            let model = self.settings.model.clone();
            return Err(Refusal::Loading { model, retry_after: Duration::from_secs(2) });
        };
        if admit.prompt.tokens.is_empty() {
            return Err(Refusal::Internal { message: "a prompt without tokens reached the queue".into() });
        }
        let prompt = u32::try_from(admit.prompt.tokens.len()).unwrap_or(u32::MAX);
        // Admission stops at the first row that must wait, so one that can never run must not get in.
        if let Some(limit) = self.context().filter(|limit| prompt >= *limit) {
            return Err(PrepareError::ContextExceeded { prompt, limit }.into());
        }
        self.arrivals += 1;
        self.waiting.push(Row::new(self.arrivals, admit.ticket, admit.prompt, admit.events, text));
        self.publish();
        Ok(())
    }

    /// One step: look after clients, admit, plan, compute, commit. Panics are caught.
    pub(crate) fn step(&mut self) -> Progress {
        self.beat(true);
        let progress = match catch_unwind(AssertUnwindSafe(|| self.compute())) {
            Ok(Ok(true)) if !self.is_empty() => Progress::More,
            Ok(Ok(_)) if self.is_empty() => Progress::Idle,
            Ok(Ok(_)) if self.engine.is_none() => Progress::Pause(NO_ENGINE_PAUSE),
            Ok(Ok(_)) => Progress::Pause(PARKED_PAUSE),
            Ok(Err(error)) => Progress::Broken(error),
            Err(payload) => Progress::Broken(EngineError::Panicked { message: panic_message(&*payload) }),
        };
        self.publish();
        self.beat(progress != Progress::Idle);
        progress
    }

    /// Whether no request is here.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.ending.is_empty()
    }

    /// The engine cannot be trusted any more. The rows of the step fail, all others
    /// begin anew from their tokens; finished rows are forgotten.
    pub(crate) fn lose_engine(&mut self) {
        let engine = self.engine.take();
        // A broken engine may panic again on its way out.
        let _lost = catch_unwind(AssertUnwindSafe(move || drop(engine)));
        self.index.borrow_mut().retain(|_| false);
        self.epoch = Epoch(self.epoch.0 + 1);
        let hit = std::mem::take(&mut self.in_step);
        let (failed, mut back) = split(&mut self.running, |row| hit.contains(&row.order));
        let (refused, still_waiting) = split(&mut self.waiting, |row| hit.contains(&row.order));
        back.iter_mut().for_each(Row::set_back);
        back.extend(still_waiting);
        back.sort_by_key(|row| row.order);
        self.waiting = back;
        for row in failed.into_iter().chain(refused) {
            self.conclude(row, End::Failed(engine_failed()));
        }
        self.publish();
    }

    /// Ends every request with the same failure.
    pub(crate) fn fail_all(&mut self, failure: &Failure) {
        let lists = [&mut self.running, &mut self.waiting, &mut self.ending];
        let rows: Vec<Row> = lists.into_iter().flat_map(std::mem::take).collect();
        for mut row in rows {
            self.close(&mut row);
            let _last_words = row.flush(self.now(), self.settings.stall_timeout);
            self.conclude(row, End::Failed(failure.clone()));
        }
        self.publish();
    }

    /// Looks at every client: sends text that waited for room, ends rows whose client is
    /// gone or reads nothing for too long.
    pub(crate) fn sweep(&mut self) {
        let now = self.now();
        let stall_timeout = self.settings.stall_timeout;
        let mut gone = Vec::new();
        for list in [&mut self.waiting, &mut self.running, &mut self.ending] {
            let mut index = 0;
            while index < list.len() {
                let row = &mut list[index];
                let end = match row.flush(now, stall_timeout) {
                    Flow::Closed => Some(End::Cancelled),
                    Flow::Stalled => Some(End::Failed(stalled())),
                    Flow::Open => row.ended.map(End::Done),
                    Flow::Parked => None,
                };
                match end {
                    Some(end) => gone.push((list.remove(index), end)),
                    None => index += 1,
                }
            }
        }
        for (row, end) in gone {
            self.leave(row, end);
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.settings.clock.now()
    }

    /// The loop has come to its end.
    pub(crate) fn rest(&self) {
        self.beat(false);
    }

    fn beat(&self, working: bool) {
        self.settings.pulse.beat(self.now(), working);
    }

    /// Brings the gauges up to date.
    pub(crate) fn publish(&mut self) {
        let memory = self.engine.as_ref().map(|engine| engine.memory()).unwrap_or_default();
        let parked = self.running.iter().chain(&self.ending).filter(|row| row.is_parked()).count();
        let entries = self.index.borrow().statistics().entries;
        self.shares.publish([
            self.running.len() as u64 + self.ending.len() as u64,
            self.waiting.len() as u64,
            parked as u64,
            memory.kv_used_bytes,
            memory.kv_capacity_bytes,
            entries,
        ]);
    }
}

/// Takes the rows that `which` names out of a list; the second list is the rest.
fn split(list: &mut Vec<Row>, which: impl Fn(&Row) -> bool) -> (Vec<Row>, Vec<Row>) {
    std::mem::take(list).into_iter().partition(which)
}

/// What a panic said.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

pub(crate) fn engine_failed() -> Failure {
    Failure::new(
        FailureReason::EngineRestarted,
        "the engine failed while this answer was computed and is being restarted; send the request again",
    )
}

fn stalled() -> Failure {
    Failure::new(
        FailureReason::StreamStalled,
        "the client read nothing for too long, so the answer was given up",
    )
}
