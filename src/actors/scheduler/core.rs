//! The scheduler without an actor: rows, engine, kept prefixes, one step at a time.
//!
//! Every row is in exactly one list: `waiting` (also paused ones, which keep their sequence),
//! `running` (a sequence), `ending` (nothing left to compute, text left to send). Leaving the
//! lists goes through
//! `conclude` alone, which counts, logs, gives the ticket back and sends the one
//! terminal event. Knows no actor framework, so that tests can drive it step by step.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::actors::messages::Admit;
use crate::actors::scheduler::ahead::UnderWay;
use crate::actors::scheduler::disk::Disk;
use crate::actors::scheduler::fairness::Accounts;
use crate::actors::scheduler::gauge::Shares;
use crate::actors::scheduler::pace::Pace;
use crate::actors::scheduler::placement::{Abilities, Lane, Shape, Switches, place};
use crate::actors::scheduler::plan::Limits;
use crate::actors::scheduler::rate::QueueRate;
use crate::actors::scheduler::recover::CrashState;
use crate::actors::scheduler::row::{Flow, Row};
use crate::cache::{PrefixTree, Sessions, Storage, TokenHistory};
use crate::config::{Config, SsdKv};
use crate::model::Engine;
use crate::model::text::TextModel;
use crate::observe::{Gauges, Pulse};
use crate::types::{Clock, EngineError, Epoch, Failure, FailureReason, FinishReason, Refusal, SequenceId};

/// Pause of the loop while no row can be computed but some wait for something.
const PARKED_PAUSE: Duration = Duration::from_millis(5);
/// The same while there is no engine: only clients that go away are looked for.
const NO_ENGINE_PAUSE: Duration = Duration::from_millis(50);

/// The kept prefixes as the two actors of the compute thread share them.
pub(crate) type SharedTree = Rc<RefCell<PrefixTree<SequenceId>>>;
/// Conversations, shared likewise.
pub(crate) type SharedSessions = Rc<RefCell<Sessions>>;

/// What a scheduler is told once.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) model: String,
    pub(crate) max_rows: usize,
    pub(crate) limits: Limits,
    pub(crate) stall_timeout: Duration,
    /// A waiting request rises by a class after so long.
    pub(crate) ageing: Duration,
    pub(crate) switches: Switches,
    /// Bytes that what is kept may take; unset: all that live rows leave.
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) ssd_kv: SsdKv,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) pulse: Arc<Pulse>,
    /// Told of what answers were made of.
    pub(crate) history: Arc<TokenHistory>,
}

impl Settings {
    pub(crate) fn new(model: &str, config: &Config, clock: &Arc<dyn Clock>, gauges: &Arc<Gauges>) -> Self {
        Self {
            model: model.to_owned(),
            max_rows: config.scheduler.max_rows.max(1),
            limits: Limits {
                max_chunk: config.scheduler.max_chunk_tokens.max(1),
                max_itl: Duration::from_millis(config.scheduler.max_itl_ms),
                growth: config.scheduler.max_itl_growth,
            },
            stall_timeout: Duration::from_secs(config.scheduler.stall_timeout_s),
            ageing: Duration::from_secs(config.scheduler.ageing_s),
            switches: Switches {
                prompt_cache: config.cache.enabled,
                prompt_lookup: config.scheduler.prompt_lookup,
            },
            ssd_kv: config.cache.ssd_kv,
            cache_bytes: config.cache.memory_mib.map(|mib| mib.saturating_mul(1 << 20)),
            clock: Arc::clone(clock),
            gauges: Arc::clone(gauges),
            pulse: Arc::default(),
            history: Arc::default(),
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
    pub(crate) tree: SharedTree,
    pub(crate) sessions: SharedSessions,
    pub(crate) epoch: Epoch,
    pub(crate) waiting: Vec<Row>,
    pub(crate) running: Vec<Row>,
    pub(crate) ending: Vec<Row>,
    /// Rows that the engine is busy with: suspects if it breaks.
    pub(crate) in_step: Vec<u64>,
    pub(crate) disk: Disk,
    /// A step that is collected after the next one is submitted.
    pub(crate) under_way: Option<UnderWay>,
    /// When the last step was collected.
    pub(crate) collected: Duration,
    pub(crate) pace: Pace,
    pub(crate) shares: Shares,
    pub(crate) accounts: Accounts,
    pub(crate) rate: QueueRate,
    pub(crate) crash: CrashState,
    /// The last step was taken by a row alone: the next one belongs to the others.
    pub(crate) alone_last: bool,
    /// Memory ran out in the last step: nobody is admitted in the next.
    pub(crate) memory_short: bool,
    pub(crate) text: Option<Arc<TextModel>>,
    arrivals: u64,
}

impl Core {
    pub(crate) fn new(settings: Settings, tree: SharedTree) -> Self {
        Self {
            shares: Shares::new(Arc::clone(&settings.gauges)),
            settings,
            engine: None,
            tree,
            sessions: SharedSessions::default(),
            epoch: Epoch(0),
            waiting: Vec::new(),
            running: Vec::new(),
            ending: Vec::new(),
            in_step: Vec::new(),
            disk: Disk::default(),
            under_way: None,
            collected: Duration::ZERO,
            pace: Pace::default(),
            accounts: Accounts::default(),
            rate: QueueRate::default(),
            crash: CrashState::default(),
            alone_last: false,
            memory_short: false,
            text: None,
            arrivals: 0,
        }
    }

    /// With sessions that another actor has as well.
    pub(crate) fn with_sessions(self, sessions: SharedSessions) -> Self {
        Self { sessions, ..self }
    }

    /// Takes an engine into service.
    pub(crate) fn attach(&mut self, engine: Box<dyn Engine>, text: Arc<TextModel>) {
        let info = engine.info();
        self.epoch = info.epoch;
        self.tree.borrow_mut().set_storage(Storage {
            block_tokens: info.kv_block_tokens,
            shares: info.shares_prefixes,
            trims: info.trims,
        });
        self.engine = Some(engine);
        self.text = Some(text);
        self.publish();
    }

    /// What the engine can do and has; `None` without one.
    pub(crate) fn abilities(&self) -> Option<Abilities> {
        let engine = self.engine.as_ref()?;
        let (info, memory) = (engine.info(), engine.memory());
        Some(Abilities {
            batches: info.batches,
            context: info.context,
            kv_capacity_bytes: memory.kv_capacity_bytes,
            kv_bytes_per_token: info.kv_bytes_per_token,
            kv_block_tokens: info.kv_block_tokens,
        })
    }

    /// Most tokens that a row can hold: what the model knows, or what all key-value memory
    /// has room for. `None` without an engine.
    pub(crate) fn context(&self) -> Option<u32> {
        self.abilities().map(|abilities| abilities.context.min(abilities.room_tokens()))
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// `Loading` before the first engine; `ContextExceeded` or `MemoryExceeded` for a prompt that
    /// leaves no room for one token of an answer, however much is given up for it; `WouldExpire`
    /// where the queue is longer than the request's timeout.
    pub(crate) fn enqueue(&mut self, admit: Admit) -> Result<(), Refusal> {
        let Some(text) = self.text.clone() else {
            let model = self.settings.model.clone();
            return Err(Refusal::Loading { model, retry_after: Duration::from_secs(2) });
        };
        if admit.prompt.tokens.is_empty() {
            return Err(Refusal::Internal { message: "a prompt without tokens reached the queue".into() });
        }
        let shape = Shape {
            prompt_tokens: u32::try_from(admit.prompt.tokens.len()).unwrap_or(u32::MAX),
            logprobs: admit.prompt.scores.is_some(),
            fill: admit.fill.is_some(),
        };
        // While an engine is rebuilt nobody knows how much memory the next one has: a row is placed
        // as on one without limits, and looked at again when it is admitted.
        let abilities = self.abilities().unwrap_or(Abilities {
            batches: true,
            context: u32::MAX,
            kv_capacity_bytes: u64::MAX,
            kv_bytes_per_token: 1,
            kv_block_tokens: 1,
        });
        let placement = place(&shape, &abilities, &self.settings.switches)?;
        let now = self.now();
        self.refuse_hopeless(&admit, now)?;
        let reasons: Vec<&str> = placement.reasons.iter().map(|reason| reason.code()).collect();
        let lane = if placement.lane == Lane::Serial { "serial" } else { "batched" };
        let attributes = [("mechanism", lane.into()), ("reasons", reasons.join(", ").as_str().into())];
        admit.ticket.trace.mark("completion.placement", now, &attributes);
        self.arrivals += 1;
        self.accounts.enter(&admit.terms.client);
        self.waiting.push(Row::new(self.arrivals, admit, placement, text, now));
        self.publish();
        Ok(())
    }

    /// A request that would still be waiting when its time is up is told so at once.
    fn refuse_hopeless(&self, admit: &Admit, now: Duration) -> Result<(), Refusal> {
        let Some(deadline) = admit.terms.deadline else { return Ok(()) };
        let left = deadline.saturating_sub(now);
        let urgent = |row: &&Row| row.terms.priority >= admit.terms.priority;
        let ahead = self.waiting.iter().filter(urgent).count();
        let free = self.settings.max_rows.saturating_sub(self.running.len());
        let wait = self.rate.wait(ahead.saturating_sub(free), free > ahead);
        if wait <= left && !left.is_zero() {
            return Ok(());
        }
        let timeout = deadline.saturating_sub(admit.ticket.accepted);
        Err(Refusal::WouldExpire { wait, timeout, retry_after: wait.saturating_sub(left) })
    }

    /// One step: look after clients, admit, plan, compute, commit. Panics are caught.
    /// `turn`: how long others on the thread can spare it.
    pub(crate) fn step(&mut self, turn: Option<Duration>) -> Progress {
        self.beat(true);
        let progress = match catch_unwind(AssertUnwindSafe(|| self.compute(turn))) {
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

    /// Ends every request with the same failure.
    pub(crate) fn fail_all(&mut self, failure: &Failure) {
        let lists = [&mut self.running, &mut self.waiting, &mut self.ending];
        let rows: Vec<Row> = lists.into_iter().flat_map(std::mem::take).collect();
        self.under_way = None;
        for mut row in rows {
            self.close(&mut row);
            let _last_words = row.flush(self.now(), self.settings.stall_timeout);
            self.conclude(row, End::Failed(failure.clone()));
        }
        self.publish();
    }

    /// Looks at every client: sends text that waited for room, ends rows whose client is
    /// gone or reads nothing for too long, and rows whose time is up.
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
                let late = row.terms.deadline.is_some_and(|deadline| now >= deadline);
                match end.or_else(|| late.then(|| End::Failed(late_end(row, &self.rate)))) {
                    Some(end) => gone.push((list.remove(index), end)),
                    None => index += 1,
                }
            }
        }
        for (row, end) in gone {
            self.leave(row, end);
        }
        self.end_idle_reads();
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
        let rows = || self.waiting.iter().chain(&self.running).chain(&self.ending);
        let parked = rows().filter(|row| row.is_parked()).count();
        let paused = self.waiting.iter().filter(|row| row.sequence.is_some()).count();
        let entries = self.tree.borrow().statistics().entries;
        self.shares.publish([
            self.running.len() as u64 + self.ending.len() as u64,
            (self.waiting.len() - paused) as u64,
            parked as u64,
            paused as u64,
            memory.kv_used_bytes,
            memory.kv_capacity_bytes,
            entries,
        ]);
    }

    /// Most tokens that the model knows; 0 without an engine.
    pub(crate) fn model_context(&self) -> u32 {
        self.engine.as_ref().map_or(0, |engine| engine.info().context)
    }

    pub(crate) fn find_running(&mut self, order: u64) -> Option<&mut Row> {
        self.running.iter_mut().find(|row| row.order == order)
    }
}

fn late_end(row: &Row, rate: &QueueRate) -> Failure {
    if row.admitted().is_none() {
        let message = "the request's timeout passed before there was a place for it; nothing was computed";
        let failure = Failure::new(FailureReason::QueueTimeout, message);
        return Failure { retry_after: Some(rate.wait(1, false)), ..failure };
    }
    let message = format!(
        "the request's timeout passed after {} of its tokens were produced; allow more time or fewer tokens",
        row.produced()
    );
    Failure::new(FailureReason::DeadlineExceeded, message)
}

/// What a panic said.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

fn stalled() -> Failure {
    Failure::new(
        FailureReason::StreamStalled,
        "the client read nothing for too long, so the answer was given up",
    )
}
