//! Plans, text, ends, clients that go away or do not read.

use std::sync::Arc;
use std::time::Duration;

use super::bench::{Ask, Bench, seconds};
use crate::actors::scheduler::core::Progress;
use crate::model::fake::Script;
use crate::observe::Outcome;
use crate::types::{ChatEvent, Clock, EngineError, FailureReason, FinishReason, ManualClock, Priority};

fn say(prompt: &str, answer: &str) -> Bench {
    Bench::new(Script::new().say(prompt, answer), |_| {})
}

#[test]
fn a_prompt_prefills_in_chunks_and_its_last_chunk_samples() {
    let mut bench = Bench::new(Script::new().say("x", "Hi!"), |config| {
        config.scheduler.max_chunk_tokens = 16;
    });
    bench.submit(&Ask::new(&"x".repeat(40), 100));
    bench.finish();
    let spans: Vec<(u32, u32, bool)> = bench
        .model
        .control()
        .records()
        .iter()
        .map(|record| (record.start, record.tokens, record.sampled))
        .collect();
    assert_eq!(
        spans,
        [(0, 16, false), (16, 16, false), (32, 8, true), (40, 1, true), (41, 1, true), (42, 1, true)]
    );
    assert_eq!(bench.clients[0].text, "Hi!");
    let (finish, usage) = bench.clients[0].done().unwrap();
    assert_eq!((finish, usage.prompt_tokens, usage.completion_tokens), (FinishReason::Stop, 40, 4));
    bench.check_empty();
}

#[test]
fn decode_tokens_come_first_and_a_prompt_goes_beside_them() {
    let clock = Arc::new(ManualClock::new());
    let (step, token) = (Duration::from_millis(10), Duration::from_millis(2));
    let script = Script::new().repeat("loop", "abc").takes(step, token, clock.clone());
    let mut bench = Bench::timed(script, clock.clone(), |_| {});
    bench.submit(&Ask::new("loop", 200));
    bench.step();
    bench.submit(&Ask::new(&"p".repeat(100), 4));
    let before = clock.now();
    bench.step();
    assert!(clock.now() - before <= Duration::from_millis(100), "within the budget");
    let second: Vec<_> =
        bench.model.control().records().into_iter().filter(|record| record.step == 2).collect();
    assert_eq!(second.len(), 2, "both rows are in the step");
    assert_eq!((second[0].start, second[0].tokens), (4, 1));
    assert!(second[1].tokens >= 16 && second[1].tokens < 100, "a part of the prompt: {second:?}");
}

#[test]
fn a_stop_string_across_tokens_ends_the_answer_without_a_trace() {
    let mut bench = say("q", "brown fox and more");
    let ask = Ask { stop: vec!["own fox".into()], ..Ask::new("q", 100) };
    bench.submit(&ask);
    bench.finish();
    assert_eq!(bench.clients[0].text, "br");
    let (finish, usage) = bench.clients[0].done().unwrap();
    assert_eq!(finish, FinishReason::Stop);
    assert_eq!(usage.completion_tokens, 9, "generation ends with the stop string's last token");
}

#[test]
fn withheld_text_comes_when_the_answer_ends_otherwise() {
    let mut bench = say("q", "the ST");
    bench.submit(&Ask { stop: vec!["STOP".into()], ..Ask::new("q", 100) });
    bench.submit(&Ask { stop: vec!["STOP".into()], ..Ask::new("q", 5) });
    bench.finish();
    assert_eq!(bench.clients[0].text, "the ST");
    assert_eq!(bench.clients[1].text, "the S");
    assert_eq!(bench.clients[1].done().unwrap().0, FinishReason::Length);
}

#[test]
fn characters_are_never_split_and_a_cut_one_shows_once() {
    let mut bench = say("q", "é🙂");
    bench.submit(&Ask::new("q", 100));
    bench.submit(&Ask::new("q", 4));
    let rx = bench.clients[0].rx.as_mut().unwrap();
    let mut pieces = Vec::new();
    for _ in 0..12 {
        bench.core.step(None);
        while let Ok(ChatEvent::Text(text)) = rx.try_recv() {
            pieces.push(text);
        }
    }
    assert_eq!(pieces, ["é", "🙂"]);
    bench.clients[1].read();
    assert_eq!(bench.clients[1].text, "é\u{fffd}");
    assert_eq!(bench.clients[1].done().unwrap().0, FinishReason::Length);
}

#[test]
fn a_client_that_goes_away_is_gone_after_one_step() {
    let mut bench = Bench::new(Script::new().repeat("loop", "abc"), |config| {
        config.scheduler.max_rows = 2;
        config.scheduler.max_chunk_tokens = 16;
    });
    let decoding = bench.submit(&Ask::new("loop", 2000));
    bench.step();
    let prefilling = bench.submit(&Ask::new(&"loop".repeat(100), 10));
    let queued = bench.submit(&Ask::new(&"loop".repeat(150), 10));
    bench.step();
    assert_eq!((bench.core.running.len(), bench.core.waiting.len()), (2, 1));
    for (gone, left) in [(queued, 2), (prefilling, 1), (decoding, 0)] {
        bench.clients[gone].rx = None;
        bench.step();
        assert_eq!(bench.live.get(), left);
    }
    assert_eq!(bench.gauges.requests(Outcome::Cancelled), 3);
    let begun = bench.model.control().records().iter().filter(|record| record.start == 0).count();
    assert_eq!(begun, 2, "the queued one never cost a prefill");
    bench.check_empty();
}

/// A bench, and the number of a client whose request has come to the stage.
fn at(stage: &str, overlaps: bool) -> (Bench, usize) {
    let script = Script::new().repeat("loop", "abc").memory(16, 16);
    let script = if overlaps { script.overlaps() } else { script };
    let mut bench = Bench::new(script, |config| {
        config.scheduler.max_rows = if stage == "preempted" { 3 } else { 1 };
        config.scheduler.max_chunk_tokens = 16;
        config.cache.enabled = false;
    });
    let gone = Ask::new("loop", 60).of("batch", Priority::Background);
    let other = Ask::new("loop", 8).of("person", Priority::Interactive);
    let prompt = "loop".repeat(20);
    match stage {
        "waiting for a row" => {
            bench.submit(&Ask::new("loop", 4).of("batch", Priority::Background));
            let waiting = bench.submit(&gone);
            bench.step();
            assert_eq!((bench.core.running.len(), bench.core.waiting.len()), (1, 1));
            return (bench, waiting);
        }
        "prefilling" => {
            bench.submit(&Ask { prompt, ..gone });
            bench.step();
            assert!(!bench.core.running[0].is_decoding());
        }
        "decoding" => {
            bench.submit(&gone);
            (0..5).for_each(|_| drop(bench.step()));
        }
        "with a full channel" => {
            bench.submit(&Ask { slots: 3, ..gone });
            (0..12).for_each(|_| drop(bench.step()));
            assert!(bench.core.running[0].is_parked());
        }
        "with only text left" => {
            bench.submit(&Ask { slots: 3, max_new: 3, ..gone });
            (0..12).for_each(|_| drop(bench.step()));
            assert_eq!(bench.core.ending.len(), 1);
        }
        "paused" => {
            bench.submit(&gone);
            (0..5).for_each(|_| drop(bench.step()));
            bench.submit(&other);
            bench.step();
            assert!(bench.core.waiting[0].sequence.is_some(), "it keeps its memory");
        }
        "preempted" => {
            bench.submit(&Ask::new("loop", 60).of("older", Priority::Normal));
            let preempted = bench.submit(&gone);
            (0..5).for_each(|_| drop(bench.step()));
            bench.submit(&Ask { prompt: "loop".repeat(35), ..other });
            bench.step();
            let row = bench.core.waiting.first().expect("somebody lost its memory");
            assert!(row.terms.client == gone.terms.client && row.sequence.is_none() && row.produced() > 0);
            return (bench, preempted);
        }
        "without an engine" => {
            bench.submit(&gone);
            (0..5).for_each(|_| drop(bench.step()));
            bench.core.lose_engine();
        }
        _ => panic!("no such stage"),
    }
    (bench, 0)
}

#[test]
fn a_cancelled_request_gives_everything_back_within_a_step_wherever_it_is() {
    let stages = [
        "waiting for a row",
        "prefilling",
        "decoding",
        "with a full channel",
        "with only text left",
        "paused",
        "preempted",
        "without an engine",
    ];
    for stage in stages {
        for overlaps in [false, true] {
            let (mut bench, gone) = at(stage, overlaps);
            let live = bench.live.get();
            bench.clients[gone].rx = None;
            bench.core.step(None);
            assert_eq!(bench.live.get(), live - 1, "{stage}");
            assert_eq!(bench.gauges.requests(Outcome::Cancelled), 1, "{stage}");
            if bench.core.engine.is_none() {
                bench.core.attach(bench.model.engine(bench.core.epoch), bench.model.text());
            }
            bench.finish();
            bench.check_empty();
        }
    }
}

#[test]
fn a_row_whose_client_does_not_read_is_parked_alone_and_loses_nothing() {
    let mut bench = Bench::new(Script::new().say("q", "0123456789"), |_| {});
    let slow = bench.submit(&Ask { slots: 4, ..Ask::new("q", 100) });
    let quick = bench.submit(&Ask::new("q", 100));
    for _ in 0..11 {
        bench.step();
        bench.clients[quick].read();
    }
    assert_eq!(bench.clients[quick].text, "0123456789");
    assert_eq!(bench.core.running.len(), 1, "the slow one is parked");
    assert_eq!(bench.gauges.rows_parked.get(), 1);
    assert!(matches!(bench.step(), Progress::Pause(_)), "no spinning while all rows are parked");
    assert_eq!(bench.core.running[0].produced(), 4, "three sent, one kept");
    bench.finish();
    assert_eq!(bench.clients[slow].text, "0123456789");
    assert!(bench.clients[slow].done().is_some());
    bench.check_empty();
}

#[test]
fn a_client_that_never_reads_loses_its_row_after_the_stall_timeout() {
    let mut bench = Bench::new(Script::new().repeat("loop", "abc"), |config| {
        config.scheduler.stall_timeout_s = 60;
    });
    bench.submit(&Ask { slots: 4, ..Ask::new("loop", 1000) });
    for _ in 0..6 {
        bench.step();
    }
    bench.clock.advance(seconds(59));
    bench.step();
    assert_eq!(bench.live.get(), 1);
    bench.clock.advance(seconds(1));
    bench.step();
    bench.clients[0].read();
    assert!(matches!(&bench.clients[0].ends[..], [ChatEvent::Failed(failure)]
            if failure.reason == FailureReason::StreamStalled));
    bench.check_empty();
}

#[test]
fn a_row_that_fails_alone_fails_alone() {
    let script = Script::new().say("good", "fine").fail_rows("poison", EngineError::NotANumber);
    let mut bench = Bench::new(script, |_| {});
    let good = bench.submit(&Ask::new("good", 100));
    let bad = bench.submit(&Ask::new("poison", 100));
    bench.finish();
    assert_eq!(bench.clients[good].text, "fine");
    assert!(matches!(&bench.clients[bad].ends[..], [ChatEvent::Failed(failure)]
            if failure.reason == FailureReason::RowFailed));
    assert_eq!(bench.core.epoch.0, 0, "the engine lives");
    bench.check_empty();
}
