//! Going down: streams end properly, nothing new is accepted.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use greenroom::actors::Health;
use greenroom::model::fake::Script;
use greenroom::types::{ChatEvent, FailureReason, Refusal};

use crate::harness::{ask, failure, read, run, start, stop};

#[test]
fn streams_that_end_in_time_end_as_always() {
    run(async {
        let (greenroom, control) = start(Script::new().say("q", "the whole answer").gated(), |_| {}).await;
        let stream = greenroom.chat(ask("q")).await.unwrap();
        let handles = greenroom.handles();
        let mut drain = Box::pin(greenroom.drain(Duration::from_secs(30)));
        assert!(drain.as_mut().now_or_never().is_none());
        while !handles.is_draining() {
            assert!(drain.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        assert_eq!(handles.health(), Health::Draining);
        assert_eq!(handles.chat(ask("q")).await.unwrap_err(), Refusal::Draining);
        control.open();
        let (read, ()) = tokio::join!(read(stream), &mut drain);
        assert_eq!(read.0, "the whole answer");
        assert!(matches!(read.1, ChatEvent::Done { .. }));
        drop(drain);
        stop(greenroom).await;
    });
}

#[test]
fn at_the_deadline_every_stream_ends_with_a_reason() {
    run(async {
        let (greenroom, _) = start(Script::new().repeat("loop", "abc"), |config| {
            config.scheduler.max_rows = 2;
        })
        .await;
        let mut streams = Vec::new();
        for _ in 0..4 {
            streams.push(greenroom.chat(ask("loop")).await.unwrap());
        }
        greenroom.drain(Duration::from_millis(20)).await;
        let mut silent = 0;
        for stream in streams {
            let (text, end) = read(stream).await;
            assert_eq!(failure(&end), Some(FailureReason::ShuttingDown));
            assert!("abc".repeat(text.len() / 3 + 1).starts_with(&text));
            silent += usize::from(text.is_empty());
        }
        assert!(silent <= 2, "two ran at least: {silent} got nothing");
        stop(greenroom).await;
    });
}

#[test]
fn a_stream_that_nobody_reads_has_room_for_its_end() {
    run(async {
        let (greenroom, _) = start(Script::new().repeat("loop", "abc"), |_| {}).await;
        let stream = greenroom.chat(ask("loop")).await.unwrap();
        let gauges = greenroom.handles().gauges().clone();
        crate::harness::until("a parked row", || gauges.rows_parked.get() == 1).await;
        greenroom.drain(Duration::ZERO).await;
        let (text, end) = read(stream).await;
        assert_eq!(text, "abc".repeat(21), "63 pieces, and the end in the 64th slot");
        assert_eq!(failure(&end), Some(FailureReason::ShuttingDown));
        stop(greenroom).await;
    });
}

#[test]
fn stop_without_drain_ends_streams_too() {
    run(async {
        let (greenroom, _) = start(Script::new().repeat("loop", "abc"), |_| {}).await;
        let stream = greenroom.chat(ask("loop")).await.unwrap();
        let handles = greenroom.handles();
        greenroom.stop().await;
        let (_, end) = read(stream).await;
        assert_eq!(failure(&end), Some(FailureReason::ShuttingDown));
        assert_eq!(handles.chat(ask("q")).await.unwrap_err(), Refusal::Draining, "handles outlive it");
        assert_eq!(handles.gauges().tickets_live(), 0);
    });
}

#[test]
fn a_step_that_hangs_does_not_hold_up_the_end() {
    run(async {
        let (greenroom, control) = start(Script::new().repeat("loop", "abc").gated(), |_| {}).await;
        let stream = greenroom.chat(ask("loop")).await.unwrap();
        assert!(control.wait_at_gate());
        let gauges = greenroom.handles().gauges().clone();
        let begun = Instant::now();
        greenroom.stop().await;
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        // The thread that was left to itself ends with its step, and gives everything back.
        control.open();
        let (text, end) = read(stream).await;
        assert_eq!(failure(&end), Some(FailureReason::ShuttingDown));
        assert!("abc".starts_with(&text));
        crate::harness::until("the place", || gauges.tickets_live() == 0).await;
    });
}

#[test]
fn two_instances_do_not_know_each_other() {
    run(async {
        let (first, _) = start(Script::new().say("q", "one"), |_| {}).await;
        let (second, _) = start(Script::new().say("q", "two"), |_| {}).await;
        assert_eq!(read(first.chat(ask("q")).await.unwrap()).await.0, "one");
        stop(first).await;
        assert_eq!(read(second.chat(ask("q")).await.unwrap()).await.0, "two");
        stop(second).await;
    });
}
