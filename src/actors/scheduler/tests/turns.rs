//! Who runs when: classes, clients, slots that are taken and given back, deadlines, lanes.

use std::time::Duration;

use super::bench::{Ask, Bench, alone, seconds};
use crate::model::fake::Script;
use crate::types::{ChatEvent, FailureReason, Priority, Refusal};

fn endless(rows: usize) -> Bench {
    Bench::new(Script::new().repeat("loop", "abc"), |config| config.scheduler.max_rows = rows)
}

/// Prompts of the running rows, by client number.
fn running(bench: &Bench) -> Vec<u128> {
    bench.core.running.iter().map(|row| row.ticket.id.0).collect()
}

#[test]
fn an_urgent_request_takes_the_slot_of_one_in_the_background_which_goes_on_later() {
    let mut bench = endless(1);
    let back = Ask::new("loop in the background", 40).of("a", Priority::Background);
    bench.submit(&back);
    (0..5).for_each(|_| drop(bench.step()));
    bench.submit(&Ask::new("loop", 6).of("b", Priority::Interactive));
    bench.step();
    assert_eq!(running(&bench), [1]);
    assert_eq!((bench.gauges.rows_paused.get(), bench.gauges.pauses.get()), (1, 1));
    bench.finish();
    assert_eq!(bench.clients[0].text, "abc".repeat(14)[..40]);
    assert!(bench.clients.iter().all(|client| client.done().is_some()));
    let prefills = bench.model.control().records().iter().filter(|record| record.start == 0).count();
    assert_eq!(prefills, 2, "its memory was kept: nothing was computed twice");
    bench.check_empty();
}

#[test]
fn normal_requests_do_not_lose_their_slot_to_urgent_ones() {
    let mut bench = endless(1);
    bench.submit(&Ask::new("loop", 40).of("a", Priority::Normal));
    bench.step();
    bench.submit(&Ask::new("loop", 5).of("b", Priority::Interactive));
    bench.step();
    assert_eq!(running(&bench), [0]);
    bench.finish();
    bench.check_empty();
}

#[test]
fn a_row_in_the_background_that_has_aged_is_admitted_before_fresh_urgent_ones_and_keeps_its_slot() {
    let mut bench = endless(1);
    bench.submit(&Ask::new("loop", 3).of("a", Priority::Interactive));
    bench.step();
    bench.submit(&Ask::new("loop", 30).of("b", Priority::Background));
    bench.clock.advance(seconds(20));
    bench.submit(&Ask::new("loop", 3).of("a", Priority::Interactive));
    while bench.clients[0].done().is_none() {
        bench.step();
        bench.clients[0].read();
    }
    bench.step();
    assert_eq!(running(&bench), [1], "after two ageings");
    bench.submit(&Ask::new("loop", 3).of("c", Priority::Interactive));
    bench.step();
    assert_eq!(running(&bench), [1]);
    bench.finish();
    bench.check_empty();
}

#[test]
fn one_client_with_many_requests_leaves_a_slot_to_another() {
    let mut bench = endless(4);
    for _ in 0..20 {
        bench.submit(&Ask::new("loop of the agent", 60).of("agent", Priority::Normal));
    }
    bench.step();
    assert_eq!(bench.core.running.len(), 4);
    for _ in 0..2 {
        bench.submit(&Ask::new("loop of the person", 8).of("person", Priority::Normal));
    }
    bench.step();
    let mine = running(&bench).iter().filter(|client| **client >= 20).count();
    assert_eq!(mine, 2, "half of the slots, at once");
    bench.finish();
    assert!(bench.clients.iter().all(|client| client.done().is_some()));
    bench.check_empty();
}

#[test]
fn a_row_whose_client_does_not_read_gives_its_slot_away() {
    let mut bench = endless(1);
    let ask = Ask { slots: 4, ..Ask::new("loop", 20) };
    let slow = bench.submit(&ask);
    (0..8).for_each(|_| drop(bench.step()));
    assert_eq!(bench.gauges.rows_parked.get(), 1);
    let quick = bench.submit(&Ask::new("loop", 5));
    for _ in 0..8 {
        bench.step();
        bench.clients[quick].read();
    }
    assert!(bench.clients[quick].done().is_some());
    bench.finish();
    assert_eq!(bench.clients[slow].text, "abc".repeat(7)[..20]);
    bench.check_empty();
}

#[test]
fn memory_is_taken_from_the_background_and_what_was_computed_is_frozen() {
    let script = Script::new().repeat("loop", "abc").memory(12, 16);
    let mut bench = Bench::new(script, |config| config.scheduler.max_rows = 4);
    bench.submit(&Ask::new("loop, the oldest", 20).of("a", Priority::Normal));
    bench.step();
    bench.submit(&Ask::new(&format!("loop {}", "b".repeat(60)), 40).of("b", Priority::Background));
    (0..4).for_each(|_| drop(bench.step()));
    assert_eq!(running(&bench), [0, 1]);
    bench.submit(&Ask::new(&format!("loop {}", "c".repeat(60)), 20).of("c", Priority::Interactive));
    bench.step();
    assert_eq!(running(&bench), [0, 2], "the background was set back");
    assert_eq!(bench.gauges.preemptions.get(), 1);
    bench.finish();
    for (client, length) in [(0, 20), (1, 40), (2, 20)] {
        assert_eq!(bench.clients[client].text, "abc".repeat(14)[..length]);
    }
    bench.check_empty();
}

#[test]
fn a_big_request_is_overtaken_by_small_ones_a_bounded_number_of_times() {
    let script = Script::new().repeat("loop", "abc").memory(20, 16);
    let mut bench = Bench::new(script, |config| {
        config.scheduler.max_rows = 8;
        config.cache.enabled = false;
    });
    let small = || Ask::new("loop small", 20).of("a", Priority::Normal);
    bench.submit(&small());
    bench.submit(&small());
    bench.step();
    let big = bench.submit(&Ask::new(&format!("loop {}", "x".repeat(280)), 5).of("b", Priority::Normal));
    let mut before = 0;
    while bench.clients[big].done().is_none() {
        before += 1;
        assert!(before < 1000, "it starves");
        bench.submit(&small());
        bench.step();
        bench.clients.iter_mut().for_each(|client| client.read());
    }
    let overtook = (big + 1..bench.clients.len()).filter(|client| bench.clients[*client].done().is_some());
    assert!(overtook.count() <= 32);
    bench.finish();
    bench.check_empty();
}

fn ends_with(bench: &mut Bench, client: usize) -> Option<FailureReason> {
    bench.clients[client].read();
    match bench.clients[client].ends.as_slice() {
        [ChatEvent::Failed(failure)] => Some(failure.reason),
        _ => None,
    }
}

#[test]
fn a_request_whose_time_is_up_ends_where_it_is() {
    let mut bench = endless(1);
    let timed = |seconds| {
        let mut ask = Ask::new("loop", 10_000);
        ask.terms.deadline = Some(Duration::from_secs(seconds));
        ask
    };
    let runs = bench.submit(&timed(30));
    let waits = bench.submit(&timed(20));
    bench.step();
    bench.clock.advance(seconds(20));
    bench.step();
    assert_eq!(ends_with(&mut bench, waits), Some(FailureReason::QueueTimeout));
    assert_eq!(ends_with(&mut bench, runs), None);
    bench.clock.advance(seconds(10));
    bench.step();
    assert_eq!(ends_with(&mut bench, runs), Some(FailureReason::DeadlineExceeded));
    assert!(!bench.clients[runs].text.is_empty(), "what there was came before");
    bench.check_empty();
}

#[test]
fn a_request_that_would_wait_longer_than_it_may_is_told_so_at_once() {
    let mut bench = endless(1);
    for _ in 0..6 {
        bench.submit(&Ask::new("loop", 2));
    }
    // A place every ten seconds.
    for _ in 0..3 {
        bench.clock.advance(seconds(10));
        (0..2).for_each(|_| drop(bench.step()));
    }
    let mut ask = Ask::new("loop", 2);
    ask.terms.deadline = Some(bench.core.now() + seconds(5));
    let Err(Refusal::WouldExpire { wait, retry_after, .. }) = bench.try_submit(&ask) else {
        panic!("it cannot be in time")
    };
    assert!(wait >= seconds(20) && wait <= seconds(40), "{wait:?}");
    assert!(retry_after >= seconds(15), "{retry_after:?}");
    ask.terms.deadline = Some(bench.core.now() + seconds(600));
    assert!(bench.try_submit(&ask).is_ok());
}

#[test]
fn a_model_that_cannot_batch_runs_its_rows_one_at_a_time() {
    let mut bench = Bench::new(Script::new().one_row_a_step(), |_| {});
    let asks: Vec<Ask> = (0..4).map(|number| Ask::new(&format!("question {number}"), 20)).collect();
    for ask in &asks {
        bench.submit(ask);
    }
    bench.finish();
    let records = bench.model.control().records();
    let steps: std::collections::HashSet<u64> = records.iter().map(|record| record.step).collect();
    assert_eq!(steps.len(), records.len(), "one row a step");
    for (client, ask) in bench.clients.iter().zip(&asks) {
        assert_eq!(client.text, alone(ask).0);
    }
    bench.check_empty();
}
