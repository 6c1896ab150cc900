//! Native jobs and a scripted lane that stands for speech, beside real steps of the actor.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::mpsc::Receiver;
use tokio::sync::oneshot;

use super::loops::parts;
use crate::actors::messages::{Admit, RunNative};
use crate::actors::scheduler::BatchScheduler;
use crate::actors::scheduler::native::{NativeJob, Slice};
use crate::actors::stream::channel;
use crate::actors::turns::ComputeTurns;
use crate::model::Engine;
use crate::model::fake::{FakeModel, Script};
use crate::types::{
    ChatEvent, Clock, Epoch, Failure, FailureReason, LiveCount, ManualClock, PreparedPrompt, RequestId,
    SamplingParams, StopRules, Terms, TicketOffice, TokenId,
};

const MS: Duration = Duration::from_millis(1);

/// Works for so many slices of 3 ms; the last one panics if it is told to.
struct Job {
    left: u32,
    panics: bool,
    clock: Arc<ManualClock>,
    sequence: Option<crate::types::SequenceId>,
    reply: Option<oneshot::Sender<Result<u32, Failure>>>,
    slices: u32,
}

impl NativeJob for Job {
    fn slice(&mut self, engine: &mut dyn Engine, budget: Option<Duration>) -> Slice {
        if self.sequence.is_none() {
            self.sequence = engine.open(None).ok();
            let reserved = self.sequence.map(|sequence| engine.reserve(sequence, 16));
            assert!(matches!(reserved, Some(Ok(()))));
        }
        assert!(budget.is_none_or(|budget| budget <= 100 * MS));
        self.clock.advance(3 * MS);
        self.slices += 1;
        self.left -= 1;
        assert!(self.left > 0 || !self.panics, "the job panics");
        if self.left > 0 {
            return Slice::More;
        }
        if let Some(sequence) = self.sequence.take() {
            engine.close(sequence);
        }
        if let Some(reply) = self.reply.take() {
            let _gone = reply.send(Ok(self.slices));
        }
        Slice::Done
    }

    fn is_cancelled(&self) -> bool {
        self.reply.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn fail(mut self: Box<Self>, failure: Failure, engine: Option<&mut dyn Engine>) {
        if let (Some(engine), Some(sequence)) = (engine, self.sequence.take()) {
            engine.close(sequence);
        }
        if let Some(reply) = self.reply.take() {
            let _gone = reply.send(Err(failure));
        }
    }
}

/// An actor with an engine, its clock moved by steps and jobs.
struct World {
    scheduler: Addr<BatchScheduler>,
    turns: ComputeTurns,
    clock: Arc<ManualClock>,
    office: TicketOffice,
    live: LiveCount,
    model: FakeModel,
    gauges: Arc<crate::observe::Gauges>,
}

impl World {
    fn new(script: Script) -> Self {
        let clock = Arc::new(ManualClock::new());
        let turns = ComputeTurns::new(clock.clone());
        let model = FakeModel::new("fake", script.takes(4 * MS, MS, clock.clone()));
        let mut parts = parts(&clock);
        parts.turns = turns.clone();
        let gauges = Arc::clone(&parts.settings.gauges);
        let mut scheduler = BatchScheduler::new(parts);
        scheduler.serve(model.engine(Epoch(0)), model.text());
        let live = LiveCount::default();
        let office = TicketOffice::new(100, live.clone());
        Self { scheduler: Supervisor::start(|_| scheduler), turns, clock, office, live, model, gauges }
    }

    fn ticket(&self) -> crate::types::Ticket {
        self.office.try_take(RequestId(1), self.clock.now()).unwrap()
    }

    async fn job(&self, slices: u32, panics: bool) -> oneshot::Receiver<Result<u32, Failure>> {
        let (reply, result) = oneshot::channel();
        let clock = Arc::clone(&self.clock);
        let job = Job { left: slices, panics, clock, sequence: None, reply: Some(reply), slices: 0 };
        let run = RunNative { ticket: self.ticket(), job: Box::new(job) };
        assert!(self.scheduler.send(run).await.unwrap().is_ok());
        result
    }

    async fn chat(&self, max_new: u32) -> Receiver<ChatEvent> {
        let (events, rx) = channel(2000);
        let prompt = PreparedPrompt {
            tokens: "loop".bytes().map(|byte| TokenId(u32::from(byte))).collect(),
            sampling: Arc::new(SamplingParams::greedy()),
            stop: StopRules::default(),
            max_new_tokens: max_new,
            scores: None,
            read: None,
            stable: 0,
            breakpoints: Vec::new(),
            stripped: 0,
            session: None,
            salt: None,
        };
        let admit = Admit { ticket: self.ticket(), terms: Terms::default(), prompt, fill: None, events };
        assert!(self.scheduler.send(admit).await.unwrap().is_ok());
        rx
    }

    async fn empty(&self) {
        tokio::time::timeout(Duration::from_secs(20), self.live.none_left()).await.expect("nothing is left");
        tokio::task::yield_now().await;
        self.gauges_are_zero();
    }

    fn gauges_are_zero(&self) {
        for level in [&self.gauges.rows_running, &self.gauges.rows_waiting, &self.gauges.rows_paused] {
            assert_eq!(level.get(), 0);
        }
    }
}

fn looping() -> Script {
    Script::new().repeat("loop", "abc")
}

async fn end(mut events: Receiver<ChatEvent>) -> ChatEvent {
    loop {
        match events.recv().await {
            Some(ChatEvent::Text(_)) => {}
            Some(end) => return end,
            None => panic!("no end"),
        }
    }
}

#[test]
fn a_job_runs_in_slices_between_the_steps_of_streams() {
    System::new().block_on(async {
        let world = World::new(looping().overlaps());
        let stream = world.chat(400).await;
        let before = world.model.control().begun();
        let job = world.job(100, false).await;
        assert_eq!(job.await.unwrap(), Ok(100));
        let steps = world.model.control().begun() - before;
        assert!((40..=90).contains(&steps), "300 ms of slices beside as much of steps of 5 ms: {steps}");
        assert!(matches!(end(stream).await, ChatEvent::Done { .. }));
        world.empty().await;
    });
}

#[test]
fn a_job_that_nobody_waits_for_gives_everything_back_within_a_slice() {
    System::new().block_on(async {
        let world = World::new(looping());
        let stream = world.chat(1000).await;
        let running = world.job(100_000, false).await;
        let waiting = world.job(100_000, false).await;
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.live.get(), 3);
        let before = world.clock.now();
        drop(waiting);
        drop(running);
        while world.live.get() > 1 {
            tokio::task::yield_now().await;
        }
        assert!(world.clock.now() - before <= 20 * MS, "{:?}", world.clock.now() - before);
        assert!(matches!(end(stream).await, ChatEvent::Done { .. }));
        world.empty().await;
    });
}

#[test]
fn a_job_that_panics_fails_alone() {
    System::new().block_on(async {
        let world = World::new(looping());
        let stream = world.chat(100).await;
        let failed = world.job(5, true).await.await.unwrap().unwrap_err();
        assert_eq!(failed.reason, FailureReason::RowFailed);
        assert_eq!(world.job(5, false).await.await.unwrap(), Ok(5), "the next one works");
        assert!(matches!(end(stream).await, ChatEvent::Done { .. }));
        world.empty().await;
    });
}

/// Stands for speech: slices as long as its turn allows, at most 30 ms.
#[test]
fn speech_and_streams_share_the_thread_and_neither_waits_for_long() {
    System::new().block_on(async {
        let world = World::new(looping());
        let lane = world.turns.lane(1.0);
        let waits = Rc::new(RefCell::new(Vec::new()));
        let stream = world.chat(600).await;
        let speech = actix::spawn({
            let (waits, clock) = (Rc::clone(&waits), Arc::clone(&world.clock));
            async move {
                for _ in 0..150 {
                    let asked = clock.now();
                    let turn = lane.turn().await;
                    waits.borrow_mut().push(clock.now() - asked);
                    clock.advance(turn.budget.unwrap_or(30 * MS).min(30 * MS));
                }
            }
        });
        let before = world.clock.now();
        let steps = world.model.control().begun();
        speech.await.unwrap();
        let took = (world.clock.now() - before).as_secs_f64();
        let stepped = (world.model.control().begun() - steps) as f64 * 0.005;
        assert!((0.35..=0.65).contains(&(stepped / took)), "half of the time: {}", stepped / took);
        let longest = waits.borrow().iter().max().copied().unwrap();
        assert!(longest <= 15 * MS, "{longest:?}: two steps at most");
        assert!(matches!(end(stream).await, ChatEvent::Done { .. }));
        world.empty().await;
    });
}
