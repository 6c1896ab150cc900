//! Steps that begin before the one before them is collected: when, and what rows that end,
//! pause or fail make of it. That tokens are the same is among the random lives.

use super::bench::{Ask, Bench, alone};
use super::fill::Knows;
use crate::actors::scheduler::core::Progress;
use crate::actors::scheduler::fill::Policy;
use crate::model::fake::{Fault, Script};
use crate::types::{ChatEvent, EngineError, FailureReason, Priority};

fn bench(script: Script) -> Bench {
    Bench::new(script.overlaps(), |config| config.scheduler.max_rows = 4)
}

/// Steps until one is under way when the other is over.
fn get_ahead(bench: &mut Bench) {
    for _ in 0..10 {
        bench.step();
        if bench.core.under_way.is_some() && bench.core.running.iter().all(|row| row.drawing > 0) {
            return;
        }
    }
    panic!("no step was left under way");
}

#[test]
fn plain_rows_run_ahead_and_nothing_is_left_under_way_at_the_end() {
    let mut bench = bench(Script::new());
    let asks = [Ask::new("first", 30), Ask::new("second one", 50)];
    for ask in &asks {
        bench.submit(ask);
    }
    get_ahead(&mut bench);
    bench.finish();
    assert!(bench.core.under_way.is_none());
    for (client, ask) in bench.clients.iter().zip(&asks) {
        let (text, finish, tokens) = alone(ask);
        assert_eq!(client.text, text);
        let (got, usage) = client.done().unwrap();
        assert_eq!((got, usage.completion_tokens), (finish, tokens));
    }
    bench.check_empty();
}

/// What ends by itself costs a step; what ends by its length is known to, and costs none.
#[test]
fn a_row_that_ends_wastes_one_step_at_most() {
    for (say, max_new, wasted) in [("abc", 100, 1), ("abcdefghij", 4, 0)] {
        let mut bench = bench(Script::new().say("p", say));
        bench.submit(&Ask::new("p", max_new));
        bench.finish();
        let steps = bench.model.control().begun();
        let (_, usage) = bench.clients[0].done().unwrap();
        assert_eq!(steps, u64::from(usage.completion_tokens) + wasted, "{say}");
        bench.check_empty();
    }
}

#[test]
fn a_row_that_only_the_host_can_serve_stops_the_running_ahead() {
    let mut bench = bench(Script::new());
    bench.submit(&Ask::new("plain", 200));
    get_ahead(&mut bench);
    bench.next_fill = Some(Knows::new("filled", "no such answer", Policy::Verify));
    let filled = bench.submit(&Ask::new("filled", 20));
    while bench.clients[filled].ends.is_empty() {
        bench.step();
        assert!(bench.core.under_way.is_none());
        bench.clients.iter_mut().for_each(super::bench::Client::read);
    }
    get_ahead(&mut bench);
    bench.finish();
    assert_eq!(bench.clients[0].text, alone(&Ask::new("plain", 200)).0);
    bench.check_empty();
}

#[test]
fn who_waits_for_a_slot_gets_it_in_the_step_after_the_last_token() {
    let mut bench = Bench::new(Script::new().overlaps(), |config| config.scheduler.max_rows = 1);
    bench.submit(&Ask::new("first", 6));
    bench.submit(&Ask::new("second", 6));
    for _ in 0..40 {
        match bench.step() {
            Progress::More => {}
            Progress::Idle => break,
            other => panic!("{other:?} with somebody waiting"),
        }
    }
    bench.finish();
    bench.check_empty();
}

#[test]
fn nothing_is_under_way_while_others_want_the_thread() {
    let mut bench = bench(Script::new());
    bench.submit(&Ask::new("plain", 200));
    get_ahead(&mut bench);
    assert_eq!(bench.core.step(Some(std::time::Duration::from_millis(5))), Progress::More);
    assert!(bench.core.under_way.is_none());
    get_ahead(&mut bench);
    bench.core.settle().unwrap();
    assert!(bench.core.under_way.is_none() && bench.core.running.iter().all(|row| row.ahead == 0));
    bench.finish();
    assert_eq!(bench.clients[0].text, alone(&Ask::new("plain", 200)).0);
}

#[test]
fn a_row_that_is_paused_or_whose_client_goes_takes_nothing_of_the_step_under_way() {
    let mut bench = Bench::new(Script::new().overlaps(), |config| config.scheduler.max_rows = 1);
    let background = Ask::new("in the background", 60).of("batch", Priority::Background);
    let person = Ask::new("a person", 20).of("person", Priority::Interactive);
    bench.submit(&background);
    get_ahead(&mut bench);
    bench.submit(&person);
    bench.step();
    assert_eq!(bench.gauges.pauses.get(), 1);
    get_ahead(&mut bench);
    bench.submit(&person);
    bench.clients[1].rx = None;
    bench.finish();
    assert_eq!(bench.clients[0].text, alone(&background).0);
    assert_eq!(bench.clients[2].text, alone(&person).0);
    bench.check_empty();
}

/// One newcomer takes the place of a row, which takes the place of another one in turn.
#[test]
fn a_row_that_goes_on_in_the_step_in_which_it_was_paused_is_not_taken_for_its_earlier_self() {
    let mut bench = bench(Script::new());
    let asks = [
        Ask::new("the first of many", 80).of("many", Priority::Background),
        Ask::new("the second of many", 80).of("many", Priority::Background),
        Ask::new("somebody", 80).of("somebody", Priority::Normal),
        Ask::new("one of few", 80).of("few", Priority::Background),
        Ask::new("a person", 20).of("person", Priority::Interactive),
    ];
    for ask in &asks[..4] {
        bench.submit(ask);
    }
    get_ahead(&mut bench);
    bench.submit(&asks[4]);
    bench.finish();
    assert!(bench.gauges.pauses.get() >= 2);
    for (client, ask) in bench.clients.iter().zip(&asks) {
        assert!(client.done().is_some(), "{:?}", client.ends);
        assert_eq!(client.text, alone(ask).0);
    }
    bench.check_empty();
}

/// All memory is one row's, and it is not enough: it must not end sooner for what was only tried.
#[test]
fn memory_for_guesses_and_for_steps_ahead_ends_no_answer_early() {
    let repeated = "abc".repeat(100);
    let lengths = [(false, false), (true, false), (false, true)].map(|(overlaps, proposes)| {
        let script = Script::new().repeat("p", "abc").memory(3, 16);
        let script = if overlaps { script.overlaps() } else { script };
        let mut bench = Bench::new(script, |_| {});
        if proposes {
            bench.next_fill = Some(Knows::new("pppp", &repeated, Policy::Verify));
        }
        bench.submit(&Ask::new("pppp", 600));
        bench.finish();
        bench.clients[0].done().unwrap().1.completion_tokens
    });
    assert_eq!(lengths, [45, 45, 45], "48 places, and one token that needs none");
}

#[test]
fn a_step_that_breaks_takes_the_next_one_with_it_and_loses_no_row() {
    let device = EngineError::Device { message: "lost".into() };
    let faults = [
        Fault::Panic("panic".into()),
        Fault::Fail(device),
        Fault::Fail(EngineError::InvalidPlan { message: "no".into() }),
        Fault::FailRow(1, EngineError::NotANumber),
    ];
    for fault in faults {
        for step in 1..12 {
            let mut bench = bench(Script::new().at_step(step, fault.clone()));
            let asks = [Ask::new("first", 30), Ask::new("the second one", 30), Ask::new("third", 30)];
            for ask in &asks[..2] {
                bench.submit(ask);
            }
            (0..4).for_each(|_| drop(bench.step()));
            bench.submit(&asks[2]);
            bench.finish();
            for (client, ask) in bench.clients.iter().zip(&asks) {
                let expected = alone(ask).0;
                match &client.ends[..] {
                    [ChatEvent::Done { .. }] => assert_eq!(client.text, expected, "{fault:?} at {step}"),
                    [ChatEvent::Failed(failure)] => {
                        assert_eq!(failure.reason, FailureReason::RowFailed);
                        assert!(!matches!(fault, Fault::Panic(_)), "{fault:?} at {step}");
                    }
                    other => panic!("{other:?}"),
                }
            }
            bench.check_empty();
        }
    }
}
