//! The step loop's futures: one at a time, whatever wakes it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;

use crate::actors::gateway::Gateway;
use crate::actors::loader::Loader;
use crate::actors::prompt_cache::PromptCache;
use crate::actors::scheduler::core::Settings;
use crate::actors::scheduler::restart::RestartPolicy;
use crate::actors::scheduler::{BatchScheduler, Loop, SchedulerParts};
use crate::actors::turns::ComputeTurns;
use crate::cache::PrefixTree;
use crate::config::Config;
use crate::model::fake::{FakeModel, Script};
use crate::types::{Clock, ManualClock};

/// A scheduler's parts around a scripted model.
pub(super) fn parts(clock: &Arc<ManualClock>) -> SchedulerParts {
    let shared: Arc<dyn Clock> = clock.clone();
    SchedulerParts {
        settings: Settings::new("fake", &Config::default(), &shared, &Arc::default()),
        turns: ComputeTurns::new(clock.clone()),
        sessions: Default::default(),
        tree: Rc::new(RefCell::new(PrefixTree::new(false))),
        model: 0,
        source: Arc::new(FakeModel::new("fake", Script::new())),
        loader: Loader::start().unwrap().0,
        restarts: RestartPolicy::without_pause(),
        gateway: Context::<Gateway>::new().address().downgrade().recipient(),
        cache: Context::<PromptCache>::new().address().downgrade(),
        segments: None,
    }
}

/// A cancelled future is taken out of its context only after everything due was polled.
#[test]
fn a_pause_that_ends_while_a_message_cuts_it_short_is_no_second_loop() {
    System::new().block_on(async {
        let clock = Arc::new(ManualClock::new());
        let mut scheduler = BatchScheduler::new(parts(&clock));
        let mut ctx = Context::<BatchScheduler>::new();
        let paused = scheduler.next_turn();
        scheduler.turn = Loop::Paused(ctx.run_later(Duration::from_secs(9), |_, _| {}));
        scheduler.wake(&mut ctx);
        let woken = scheduler.turn_number;
        scheduler.pause_is_over(paused, &mut ctx);
        assert_eq!(scheduler.turn_number, woken);
        assert!(matches!(scheduler.turn, Loop::Armed), "the pause has no turn any more");
        let turn = scheduler.steps.turn().await;
        scheduler.turn(woken, &turn, &mut ctx);
        assert!(matches!(scheduler.turn, Loop::Idle), "the loop has");
    });
}
