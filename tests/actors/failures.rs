//! Engines that break, loads that fail.

use std::sync::Arc;
use std::time::Duration;

use greenroom::actors::{ChatStream, Greenroom, Health, RestartPolicy};
use greenroom::config::Config;
use greenroom::model::fake::{FakeModel, Fault, LoadFault, Script};
use greenroom::types::{EngineError, FailureReason, Refusal};

use crate::harness::{accepted_between_steps, ask, failure, read, run, start, stop};

const QUESTION: &str = "hello, this is long enough to be worth keeping";

#[test]
fn a_broken_step_costs_nobody_an_answer() {
    let device = || Fault::Fail(EngineError::Device { message: "the device is lost".into() });
    let panic = || Fault::Panic("index out of range".into());
    for (fault, survives, loads) in [
        (panic(), true, 1),
        (panic(), false, 2),
        (Fault::PanicTwice("and again in drop".into()), false, 2),
        (device(), true, 2),
    ] {
        run(async {
            let answer = "abc".repeat(25);
            let script = Script::new()
                .say("long", &answer)
                .say("waiting", "I waited")
                .say("later", "works")
                .at_step(50, fault)
                .gated();
            let script = if survives { script } else { script.dies_of_panics() };
            let (greenroom, control) = start(script, |config| config.scheduler.max_rows = 1).await;
            let hit = greenroom.chat(ask("long")).await.unwrap();
            let waiting = accepted_between_steps(&greenroom, &control, "waiting").await;
            assert!(control.begun() < 50, "it waits before the engine breaks");
            control.open();
            let (text, end) = read(hit).await;
            assert_eq!((failure(&end), text), (None, answer));
            assert_eq!(read(waiting).await.0, "I waited");
            assert_eq!(read(greenroom.chat(ask("later")).await.unwrap()).await.0, "works");
            assert_eq!(control.loads(), loads);
            assert_eq!(greenroom.handles().gauges().engine_restarts.get(), loads - 1);
            stop(greenroom).await;
        });
    }
}

#[test]
fn rows_kept_by_a_dead_engine_are_never_used() {
    run(async {
        let script = Script::new().say("hello", "Hi").at_step(5, Fault::Panic("gone".into()));
        let (greenroom, control) = start(script.dies_of_panics(), |_| {}).await;
        // Steps 1 to 3, then the same prompt from the kept row: steps 4 and 5, and all again.
        for _ in 0..2 {
            assert_eq!(read(accepted(&greenroom).await.unwrap()).await.0, "Hi");
        }
        assert_eq!(control.loads(), 2);
        let anew = control
            .records()
            .iter()
            .filter(|record| record.sequence.epoch.0 == 1)
            .map(|record| record.start)
            .min();
        assert_eq!(anew, Some(0), "nothing of the old engine was used");
        stop(greenroom).await;
    });
}

#[test]
fn a_spent_restart_budget_makes_health_failed() {
    run(async {
        let script = (1..=40)
            .fold(Script::new(), |script, step| script.at_step(step, Fault::Panic("every time".into())));
        let (greenroom, control) = start(script.dies_of_panics(), |_| {}).await;
        while let Some(stream) = accepted(&greenroom).await {
            let (_, end) = read(stream).await;
            let reason = failure(&end);
            assert!(matches!(reason, Some(FailureReason::EngineRestarted | FailureReason::RowFailed)));
        }
        assert!(matches!(greenroom.health(), Health::Failed { .. }));
        assert_eq!(greenroom.handles().step_age(), None, "it failed, it does not hang");
        assert!(control.loads() <= 12, "rows are blamed three times, then the engine: {}", control.loads());
        let refused = greenroom.chat(ask("q")).await.unwrap_err();
        assert!(matches!(refused, Refusal::EngineFailed { .. }), "{refused:?}");
        stop(greenroom).await;
    });
}

/// Asks until the engine is back; `None` when it stays away.
async fn accepted(greenroom: &Greenroom) -> Option<ChatStream> {
    loop {
        match greenroom.chat(ask(QUESTION)).await {
            Ok(stream) => return Some(stream),
            Err(Refusal::Loading { .. }) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(_) => return None,
        }
    }
}

#[test]
fn a_model_that_cannot_be_loaded_says_why() {
    for fault in [LoadFault::Fail("tensor `x` is missing".into()), LoadFault::Panic("tensor `x`".into())] {
        run(async {
            let model = FakeModel::new("broken", Script::new().at_load(1, fault));
            let greenroom =
                Greenroom::builder(Config::default()).model(Arc::new(model)).start().await.unwrap();
            let message = greenroom.ready().await.unwrap_err();
            assert!(message.contains("tensor `x`"), "{message}");
            assert!(matches!(greenroom.health(), Health::Failed { .. }));
            let refused = greenroom.chat(ask("q")).await.unwrap_err();
            assert!(matches!(refused, Refusal::EngineFailed { .. }));
            stop(greenroom).await;
        });
    }
}

#[test]
fn a_reload_that_fails_is_tried_again() {
    run(async {
        let script = Script::new()
            .say("hello", "yes")
            .dies_of_panics()
            .at_step(1, Fault::Panic("once".into()))
            .at_load(2, LoadFault::Fail("busy".into()));
        let model = FakeModel::new("fake", script);
        let control = model.control();
        let greenroom = Greenroom::builder(Config::default())
            .model(Arc::new(model))
            .restarts(RestartPolicy::without_pause())
            .start()
            .await
            .unwrap();
        greenroom.ready().await.unwrap();
        assert_eq!(read(greenroom.chat(ask(QUESTION)).await.unwrap()).await.0, "yes");
        assert_eq!(control.loads(), 3);
        assert_eq!(read(accepted(&greenroom).await.unwrap()).await.0, "yes");
        stop(greenroom).await;
    });
}
