//! A client that goes away is gone within a step, wherever its request is.

use futures_util::FutureExt;
use greenroom::model::fake::Script;
use greenroom::observe::Outcome;

use crate::harness::{accepted_between_steps, ask, read, run, start, stop, until};

#[test]
fn while_decoding() {
    run(async {
        let (greenroom, control) = start(Script::new().repeat("loop", "abc").gated(), |_| {}).await;
        let stream = greenroom.chat(ask("loop")).await.unwrap();
        control.allow(4);
        assert!(control.wait_begun(5));
        drop(stream);
        control.allow(1);
        let gauges = greenroom.handles().gauges().clone();
        until("the place", || gauges.tickets_live() == 0).await;
        assert_eq!(control.begun(), 5, "no further step");
        assert_eq!(gauges.requests(Outcome::Cancelled), 1);
        stop(greenroom).await;
    });
}

#[test]
fn while_prefilling() {
    run(async {
        let (greenroom, control) =
            start(Script::new().gated(), |config| config.scheduler.max_chunk_tokens = 16).await;
        let stream = greenroom.chat(ask(&"a long prompt ".repeat(50))).await.unwrap();
        assert!(control.wait_begun(1));
        drop(stream);
        control.allow(1);
        let gauges = greenroom.handles().gauges().clone();
        until("the place", || gauges.tickets_live() == 0).await;
        assert_eq!(control.begun(), 1, "the rest of the prompt is not computed");
        stop(greenroom).await;
    });
}

#[test]
fn while_waiting_for_a_row() {
    run(async {
        let (greenroom, control) = start(Script::new().repeat("loop", "abc").gated(), |config| {
            config.scheduler.max_rows = 1;
        })
        .await;
        let running = greenroom.chat(ask("loop")).await.unwrap();
        let waiting = accepted_between_steps(&greenroom, &control, "loop").await;
        assert!(control.wait_at_gate());
        let begun = control.begun();
        drop(waiting);
        control.allow(1);
        let gauges = greenroom.handles().gauges().clone();
        until("the waiting one's place", || gauges.tickets_live() == 1).await;
        assert!(control.begun() <= begun + 1, "within a step");
        drop(running);
        control.open();
        stop(greenroom).await;
    });
}

#[test]
fn before_the_reply() {
    run(async {
        let (greenroom, control) = start(Script::new().repeat("loop", "abc"), |_| {}).await;
        let handles = greenroom.handles();
        for _ in 0..50 {
            until("a quiet instance", || handles.gauges().tickets_live() == 0).await;
            let mut asking = Box::pin(handles.chat(ask(&"loop ".repeat(200))));
            // The gateway takes the ticket on this very thread, preparation is on another.
            while asking.as_mut().now_or_never().is_none() && handles.gauges().tickets_live() == 0 {
                tokio::task::yield_now().await;
            }
            drop(asking);
        }
        let gauges = handles.gauges().clone();
        until("all places", || gauges.tickets_live() == 0).await;
        assert_eq!(gauges.requests(Outcome::Cancelled), 50, "each is counted once");
        drop(control);
        stop(greenroom).await;
    });
}

#[test]
fn clients_that_drop_at_random_leave_nothing_behind_and_others_untouched() {
    run(async {
        let script = Script::new().repeat("loop", "abc").say("steady", "the steady answer");
        let (greenroom, _) = start(script, |config| config.scheduler.max_rows = 4).await;
        let asked = (0..60usize).map(|number| {
            let handles = greenroom.handles();
            async move {
                if number % 3 == 0 {
                    let stream = handles.chat(ask("steady")).await.unwrap();
                    assert_eq!(read(stream).await.0, "the steady answer");
                } else {
                    let mut stream = handles.chat(ask("loop")).await.unwrap();
                    for _ in 0..number % 7 {
                        stream.events.recv().await;
                    }
                }
            }
        });
        futures_util::future::join_all(asked).await;
        stop(greenroom).await;
    });
}
