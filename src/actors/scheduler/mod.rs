//! `BatchScheduler`: one a chat model, supervised, on the compute thread.
//!
//! Handlers only, and the loop: one spawned future at a time that asks for a turn on the
//! compute thread ([`super::turns`]) before each step, so that other lanes, neighbours on the
//! thread, timers and mail get theirs. Native jobs run on a lane of their own, between steps.
//! It never sends itself messages. What a step does is in [`core`] and its siblings,
//! which know no actor.
//!
//! A life: `started` asks the loader thread for the model; `Loaded` takes it over; a
//! step that breaks the engine stops the actor, its supervisor starts it again with its
//! fields and its mail, and `started` asks the loader again after a pause, as long as
//! the restart budget lasts.

mod admission;
mod ahead;
pub(crate) mod core;
pub(crate) mod disk;
mod fairness;
pub(crate) mod fill;
mod finish;
mod gauge;
mod lookup;
mod memory;
pub(crate) mod native;
mod pace;
mod placement;
pub(crate) mod plan;
mod rate;
mod read;
mod recover;
pub(crate) mod restart;
pub(crate) mod reuse;
pub(crate) mod row;
mod scores;
mod step;
pub(crate) mod stop;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use actix::{WeakAddr, WeakRecipient};

use crate::actors::loader::{LoadJob, Loader};
use crate::actors::messages::{
    Accepted, Admit, CloseReleased, Drain, Drained, EngineCondition, EngineState, ExportSegment, Loaded,
    OrderDisk, Reset, RunNative, SegmentRead,
};
use crate::actors::prompt_cache::PromptCache;
use crate::actors::scheduler::core::{Core, Progress, SharedSessions, SharedTree, panic_message};
use crate::actors::scheduler::disk::{DiskOrder, SharedSegments};
use crate::actors::scheduler::native::{NativeJobs, Queued};
use crate::actors::scheduler::recover::Fault;
use crate::actors::scheduler::restart::{RestartBudget, RestartPolicy};
use crate::actors::turns::{ComputeTurns, Lane, Turn};
use crate::cache::ssd::{Codec, Element};
use crate::config::SsdKv;
use crate::model::text::TextModel;
use crate::model::{Engine, EngineInfo, KvNumbers, LoadedModel, ModelSource};
use crate::observe::fields;
use crate::types::{EngineError, Epoch, Failure, FailureReason, Refusal};

/// What copying out gets beside one of each other lane.
const EXPORTS_WEIGHT: f64 = 0.05;
/// Longest slice of the disk's bytes where nobody else wants the thread: mail is read in between.
const LONGEST_SLICE: Duration = Duration::from_millis(10);

/// Everything a scheduler is made of, put together in the wiring.
pub(crate) struct SchedulerParts {
    pub(crate) settings: core::Settings,
    pub(crate) tree: SharedTree,
    pub(crate) sessions: SharedSessions,
    pub(crate) turns: ComputeTurns,
    /// Index of the model in the instance.
    pub(crate) model: usize,
    pub(crate) source: Arc<dyn ModelSource>,
    pub(crate) loader: Loader,
    pub(crate) restarts: RestartPolicy,
    /// Weak: the gateway holds this scheduler's address.
    pub(crate) gateway: WeakRecipient<EngineState>,
    pub(crate) cache: WeakAddr<PromptCache>,
    /// What is on disk, where there is such a tier.
    pub(crate) segments: Option<SharedSegments>,
}

#[derive(Clone, PartialEq, Debug)]
enum Phase {
    /// The first load is under way.
    Loading,
    Ready,
    /// The engine is lost; a load is due or under way.
    Restarting,
    Failed(String),
}

#[derive(Debug)]
enum Loop {
    Idle,
    Armed,
    Paused(SpawnHandle),
}

/// See the module.
pub(crate) struct BatchScheduler {
    core: Core,
    model: usize,
    source: Arc<dyn ModelSource>,
    loader: Loader,
    budget: RestartBudget,
    gateway: WeakRecipient<EngineState>,
    cache: WeakAddr<PromptCache>,
    segments: Option<SharedSegments>,
    phase: Phase,
    steps: Lane,
    jobs: NativeJobs,
    jobs_lane: Lane,
    /// A turn for native jobs is asked for.
    jobs_armed: bool,
    /// What waiting rows need of the disk.
    reads_lane: Lane,
    reads_armed: bool,
    /// What is copied out for the disk.
    exports_lane: Lane,
    exports_armed: bool,
    turn: Loop,
    /// Whether the restart that is due counts against the budget.
    counts: bool,
    /// Names the one future that may take the next turn. A pause that was cut short can be
    /// polled once more before it is gone, and must not become a second loop.
    turn_number: u64,
    draining: bool,
}

impl BatchScheduler {
    pub(crate) fn new(parts: SchedulerParts) -> Self {
        Self {
            core: Core::new(parts.settings, parts.tree).with_sessions(parts.sessions),
            steps: parts.turns.lane(1.0),
            jobs: NativeJobs::default(),
            jobs_lane: parts.turns.lane(1.0),
            jobs_armed: false,
            reads_lane: parts.turns.lane(1.0),
            reads_armed: false,
            exports_lane: parts.turns.background(EXPORTS_WEIGHT),
            exports_armed: false,
            segments: parts.segments,
            counts: true,
            model: parts.model,
            source: parts.source,
            loader: parts.loader,
            budget: RestartBudget::new(parts.restarts),
            gateway: parts.gateway,
            cache: parts.cache,
            phase: Phase::Loading,
            turn: Loop::Idle,
            turn_number: 0,
            draining: false,
        }
    }

    /// Makes sure that the loop runs. Never two of them.
    fn wake(&mut self, ctx: &mut Context<Self>) {
        match self.turn {
            Loop::Armed => return,
            Loop::Paused(pause) => {
                ctx.cancel_future(pause);
            }
            Loop::Idle => {}
        }
        self.turn = Loop::Armed;
        let number = self.next_turn();
        let turn = self.steps.turn().into_actor(self).map(move |turn, me, ctx| me.turn(number, &turn, ctx));
        ctx.spawn(turn);
    }

    fn next_turn(&mut self) -> u64 {
        self.turn_number += 1;
        self.turn_number
    }

    fn turn(&mut self, number: u64, turn: &Turn, ctx: &mut Context<Self>) {
        if number != self.turn_number {
            return;
        }
        self.turn = Loop::Idle;
        let progress = self.core.step(turn.budget);
        self.wake_disk(ctx);
        match progress {
            Progress::More => self.wake(ctx),
            Progress::Pause(pause) => {
                let number = self.next_turn();
                let handle = ctx.run_later(pause, move |me, ctx| me.pause_is_over(number, ctx));
                self.turn = Loop::Paused(handle);
            }
            Progress::Idle => {}
            Progress::Broken(error) => self.broke(&error, ctx),
        }
    }

    fn pause_is_over(&mut self, number: u64, ctx: &mut Context<Self>) {
        if number == self.turn_number {
            self.turn = Loop::Idle;
            self.wake(ctx);
        }
    }

    /// Makes sure that native jobs get a turn.
    fn wake_jobs(&mut self, ctx: &mut Context<Self>) {
        if self.jobs_armed || self.jobs.is_empty() || self.core.engine.is_none() {
            return;
        }
        self.jobs_armed = true;
        let turn = self.jobs_lane.turn().into_actor(self).map(|turn, me, ctx| me.run_jobs(&turn, ctx));
        ctx.spawn(turn);
    }

    fn run_jobs(&mut self, turn: &Turn, ctx: &mut Context<Self>) {
        self.jobs_armed = false;
        if let Err(error) = self.core.settle() {
            return self.broke(&error, ctx);
        }
        let Some(engine) = self.core.engine.as_deref_mut() else { return };
        let panicked = self.jobs.run(engine, turn.budget);
        if panicked && !engine.info().survives_panics {
            let message = "a native job panicked".to_owned();
            return self.broke(&EngineError::Panicked { message }, ctx);
        }
        self.core.publish();
        self.wake_jobs(ctx);
    }

    /// Sends what the core wants of the disk, and makes sure that its bytes get turns.
    fn wake_disk(&mut self, ctx: &mut Context<Self>) {
        if self.segments.is_none() {
            return;
        }
        let orders = std::mem::take(&mut self.core.disk.orders);
        if let Some(cache) = self.cache.upgrade() {
            for order in orders {
                // BOUND: two a read, of which few are under way; one a deposit or half a thousand tokens.
                cache.do_send(OrderDisk { model: self.model, order });
            }
        }
        if self.core.disk.has_read() && !self.reads_armed {
            self.reads_armed = true;
            let turn = self.reads_lane.turn().into_actor(self);
            ctx.spawn(turn.map(|turn, me, ctx| {
                me.reads_armed = false;
                me.serve_disk(Core::read_slice, turn.budget.unwrap_or(LONGEST_SLICE), ctx);
                me.wake(ctx);
            }));
        }
        if self.core.disk.has_export() && !self.exports_armed {
            self.exports_armed = true;
            let turn = self.exports_lane.turn().into_actor(self);
            ctx.spawn(turn.map(|turn, me, ctx| {
                me.exports_armed = false;
                // Beside streams one piece at a time: nobody waits for it.
                let budget = if turn.budget.is_some() { Duration::ZERO } else { LONGEST_SLICE };
                me.serve_disk(Core::export_slice, budget, ctx);
            }));
        }
    }

    fn serve_disk(
        &mut self,
        slice: fn(&mut Core, Duration) -> Result<(), EngineError>,
        budget: Duration,
        ctx: &mut Context<Self>,
    ) {
        let served = catch_unwind(AssertUnwindSafe(|| {
            self.core.settle()?;
            slice(&mut self.core, budget)
        }));
        let error = match served {
            Ok(Ok(())) => {
                self.core.publish();
                return self.wake_disk(ctx);
            }
            Ok(Err(error)) => error,
            Err(payload) => EngineError::Panicked { message: panic_message(&*payload) },
        };
        self.broke(&error, ctx);
    }

    fn broke(&mut self, error: &EngineError, ctx: &mut Context<Self>) {
        tracing::error!(
            target: fields::ENGINE,
            model = %self.core.settings.model,
            epoch = %self.core.epoch,
            step = self.core.settings.gauges.steps.get(),
            rows = self.core.in_step.len(),
            %error,
            "the engine failed; its requests wait for a new one"
        );
        // Before any client hears of it, so that its next try finds the state changed.
        self.report(EngineCondition::Restarting);
        let failure = Failure::new(
            FailureReason::EngineRestarted,
            "the engine failed while this was computed and is being restarted; send the request again",
        );
        self.jobs.fail_all(&failure, None);
        self.counts = match self.core.lose_engine() {
            Fault::Engine => true,
            Fault::Row => {
                // Its first break was taken for the engine's.
                self.budget.give_back();
                false
            }
        };
        // A copy that was being made is none any more: nobody is to wait for it.
        self.wake_disk(ctx);
        self.phase = Phase::Restarting;
        // The supervisor calls `restarting`, then `started`.
        ctx.stop();
    }

    /// Takes one restart from the budget and loads after its pause, or gives up.
    fn rebuild(&mut self, ctx: &mut Context<Self>) {
        let now = self.core.settings.clock.now();
        let counts = std::mem::replace(&mut self.counts, true);
        let pause = if counts { self.budget.take(now) } else { Some(self.budget.uncounted()) };
        let Some(pause) = pause else {
            return self.fail("its engine failed too often in too short a time".into());
        };
        self.core.settings.gauges.engine_restarts.up();
        if pause.is_zero() {
            self.load(ctx);
        } else {
            ctx.run_later(pause, Self::load);
        }
        // Waiting clients that go away meanwhile are noticed.
        self.wake(ctx);
    }

    fn load(&mut self, ctx: &mut Context<Self>) {
        let job = LoadJob {
            source: Arc::clone(&self.source),
            epoch: self.core.epoch,
            reply: ctx.address().recipient(),
        };
        if let Err(message) = self.loader.load(job) {
            self.fail(message);
        }
    }

    fn adopt(&mut self, loaded: LoadedModel, ctx: &mut Context<Self>) -> Result<(), String> {
        let LoadedModel { text, engine, fingerprint } = loaded;
        let epoch = self.core.epoch;
        let engine = catch_unwind(AssertUnwindSafe(move || engine.adopt(epoch)))
            .map_err(|payload| panic_message(&*payload))?
            .map_err(|error| error.to_string())?;
        self.name_on_disk(&*engine, fingerprint.as_deref());
        self.serve(engine, text);
        self.wake(ctx);
        self.wake_jobs(ctx);
        Ok(())
    }

    /// What this engine's state is called on disk: all that makes its bytes mean what they mean.
    fn name_on_disk(&mut self, engine: &dyn Engine, fingerprint: Option<&str>) {
        let (Some(segments), Some(fingerprint)) = (&self.segments, fingerprint) else { return };
        // Of the context: a model may have other frequencies for long ones.
        let EngineInfo { numerics_id, kv_format, context, kv_numbers, .. } = engine.info();
        let element = match kv_numbers {
            KvNumbers::F16 => Some(Element::F16),
            KvNumbers::Bf16 => Some(Element::Bf16),
            KvNumbers::F32 => Some(Element::F32),
            KvNumbers::Opaque => None,
        };
        let rounds = element.filter(|_| self.core.settings.ssd_kv == SsdKv::Q8);
        let codec = rounds.map_or(Codec::Stored, Codec::Q8);
        self.core.disk.codec = codec;
        let lossy = codec.name();
        self.core.disk.segments = Rc::clone(segments);
        self.core.disk.namespace =
            Some(format!("{fingerprint} | {numerics_id} | {kv_format} | {context}{lossy}").into());
    }

    fn serve(&mut self, engine: Box<dyn Engine>, text: Arc<TextModel>) {
        let info = engine.info().clone();
        self.core.attach(engine, Arc::clone(&text));
        let context = self.core.context().unwrap_or(info.context);
        tracing::info!(
            target: fields::ENGINE,
            model = %self.core.settings.model,
            epoch = %info.epoch,
            device = %info.device,
            context,
            "the model is loaded"
        );
        self.phase = Phase::Ready;
        if let Some(cache) = self.cache.upgrade() {
            // BOUND: one an epoch.
            let namespace = self.core.disk.namespace.clone();
            let codec = self.core.disk.codec;
            cache.do_send(Reset { model: self.model, namespace, text: text.name.clone(), codec });
        }
        let facts = facts(&text, &info);
        self.report(EngineCondition::Ready { text, context, facts });
    }

    fn fail(&mut self, message: String) {
        tracing::error!(
            target: fields::ENGINE, model = %self.core.settings.model, %message, "the model is not available"
        );
        self.phase = Phase::Failed(message.clone());
        // No loop runs any more: that is a failure, which health tells, and not a hang.
        self.core.rest();
        let failure = Failure::new(FailureReason::EngineRestarted, "the engine could not be brought up");
        self.jobs.fail_all(&failure, None);
        self.core.fail_all(&Failure::new(
            FailureReason::EngineRestarted,
            "the engine could not be brought up again",
        ));
        self.report(EngineCondition::Failed { message });
    }

    fn report(&self, state: EngineCondition) {
        let Some(gateway) = self.gateway.upgrade() else { return };
        let model = self.core.settings.model.clone();
        // BOUND: one a change of the engine.
        gateway.do_send(EngineState { model, epoch: self.core.epoch, state });
    }

    /// Whether requests are taken.
    fn open(&self) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        let model = self.core.settings.model.clone();
        match &self.phase {
            Phase::Ready | Phase::Restarting => {}
            Phase::Loading => return Err(Refusal::Loading { model, retry_after: Duration::from_secs(2) }),
            Phase::Failed(_) => {
                let message = "its engine could not be brought up; see the server's log".into();
                return Err(Refusal::EngineFailed { model, message });
            }
        }
        Ok(())
    }
}

/// Facts for people: the text side's, then the engine's.
fn facts(text: &TextModel, info: &EngineInfo) -> Vec<(String, String)> {
    let mut facts = text.facts.clone();
    facts.push(("device".into(), info.device.clone()));
    facts.push(("numerics".into(), info.numerics_id.clone()));
    facts
}

impl Actor for BatchScheduler {
    type Context = Context<Self>;

    /// Runs again after every restart: the only place that starts anything.
    fn started(&mut self, ctx: &mut Self::Context) {
        self.turn = Loop::Idle;
        match self.phase {
            Phase::Loading => self.load(ctx),
            Phase::Restarting => self.rebuild(ctx),
            Phase::Ready => self.wake(ctx),
            Phase::Failed(_) => {}
        }
    }
}

impl Supervised for BatchScheduler {
    fn restarting(&mut self, _: &mut Self::Context) {
        // Futures and timers of the old context are gone; handles to them mean nothing.
        self.turn = Loop::Idle;
        self.jobs_armed = false;
        self.reads_armed = false;
        self.exports_armed = false;
    }
}

impl Handler<Admit> for BatchScheduler {
    type Result = Result<Accepted, Refusal>;

    fn handle(&mut self, admit: Admit, ctx: &mut Self::Context) -> Self::Result {
        self.open()?;
        self.core.enqueue(admit)?;
        self.wake(ctx);
        Ok(Accepted)
    }
}

impl Handler<RunNative> for BatchScheduler {
    type Result = Result<Accepted, Refusal>;

    fn handle(&mut self, run: RunNative, ctx: &mut Self::Context) -> Self::Result {
        self.open()?;
        self.jobs.push(Queued { job: run.job, ticket: run.ticket });
        self.wake_jobs(ctx);
        Ok(Accepted)
    }
}

impl Handler<Loaded> for BatchScheduler {
    type Result = ();

    fn handle(&mut self, loaded: Loaded, ctx: &mut Self::Context) {
        // A load of another life, or one that nobody waits for.
        if loaded.epoch != self.core.epoch || !matches!(self.phase, Phase::Loading | Phase::Restarting) {
            return;
        }
        let Err(message) = loaded.result.and_then(|model| self.adopt(model, ctx)) else { return };
        if self.phase == Phase::Loading {
            // Nothing has worked yet: trying again would give the same.
            return self.fail(message);
        }
        tracing::error!(target: fields::ENGINE, %message, "the engine could not be rebuilt");
        self.core.epoch = Epoch(self.core.epoch.0 + 1);
        self.rebuild(ctx);
    }
}

impl Handler<ExportSegment> for BatchScheduler {
    type Result = ();

    fn handle(&mut self, export: ExportSegment, ctx: &mut Self::Context) {
        let ExportSegment { namespace, tokens, range } = export;
        if !self.core.begin_export(&namespace, &tokens, range) {
            self.core.disk.orders.push(DiskOrder::Exported { pieces: None });
        }
        self.wake_disk(ctx);
    }
}

impl Handler<SegmentRead> for BatchScheduler {
    type Result = ();

    fn handle(&mut self, answer: SegmentRead, ctx: &mut Self::Context) {
        self.core.segment_arrived(answer.read, answer.pieces);
        self.wake_disk(ctx);
        self.wake(ctx);
    }
}

impl Handler<CloseReleased> for BatchScheduler {
    type Result = ();

    fn handle(&mut self, _: CloseReleased, ctx: &mut Self::Context) {
        // A step begins with it; an idle one does nothing else.
        self.wake(ctx);
    }
}

impl Handler<Drain> for BatchScheduler {
    type Result = Drained;

    /// The gateway has waited already: what is still here ends now.
    fn handle(&mut self, _: Drain, _: &mut Self::Context) -> Self::Result {
        self.draining = true;
        let failure = Failure::new(
            FailureReason::ShuttingDown,
            "the server is shutting down; send the request again later",
        );
        let ended = catch_unwind(AssertUnwindSafe(|| {
            self.core.fail_all(&failure);
            self.jobs.fail_all(&failure, self.core.engine.as_deref_mut().map(|engine| engine as _));
        }));
        if let Err(payload) = ended {
            let message = panic_message(&*payload);
            tracing::error!(target: fields::ENGINE, %message, "the engine failed while draining");
        }
        Drained
    }
}

#[cfg(test)]
mod tests;
