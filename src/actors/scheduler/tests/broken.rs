//! Steps that break: who is to blame, who is saved.

use proptest::prelude::*;

use super::bench::{Ask, Bench, alone};
use crate::model::fake::{Fault, Script};
use crate::types::{ChatEvent, EngineError, FailureReason};

fn device() -> Fault {
    Fault::Fail(EngineError::Device { message: "lost".into() })
}

fn panic() -> Fault {
    Fault::Panic("index out of range".into())
}

#[test]
fn a_broken_step_costs_nobody_an_answer() {
    for (fault, lives) in [(panic(), 0), (device(), 1)] {
        let script = Script::new().at_step(20, fault);
        let mut bench = Bench::new(script, |config| config.scheduler.max_rows = 3);
        let asks: Vec<Ask> = (0..6).map(|number| Ask::new(&format!("{number} asks"), 40)).collect();
        for ask in &asks {
            bench.submit(ask);
        }
        bench.finish();
        for (client, ask) in bench.clients.iter().zip(&asks) {
            assert!(client.done().is_some());
            assert_eq!(client.text, alone(ask).0);
        }
        assert_eq!(bench.core.epoch.0, lives);
        bench.check_empty();
    }
}

#[test]
fn a_poisonous_prompt_is_found_by_trying_rows_alone_and_costs_nobody_else() {
    for fault in [panic(), device()] {
        let mut bench = Bench::new(Script::new().poison("poison", fault), |_| {});
        let asks: Vec<Ask> = (0..5).map(|number| Ask::new(&format!("{number} asks for this"), 40)).collect();
        for ask in &asks {
            bench.submit(ask);
        }
        (0..3).for_each(|_| drop(bench.step()));
        let bad = bench.submit(&Ask::new("this is poison", 40));
        bench.finish();
        assert!(matches!(&bench.clients[bad].ends[..], [ChatEvent::Failed(failure)]
                if failure.reason == FailureReason::RowFailed));
        for (client, ask) in bench.clients.iter().zip(&asks) {
            assert_eq!(client.text, alone(ask).0);
            assert!(client.done().is_some());
        }
        bench.check_empty();
    }
}

#[test]
fn poison_that_comes_late_in_a_long_prompt_is_found_where_it_is() {
    let mut bench = Bench::new(Script::new().poison("poison", panic()), |config| {
        config.scheduler.max_chunk_tokens = 16;
    });
    let other = Ask::new("a stream beside it", 200);
    bench.submit(&other);
    let bad = bench.submit(&Ask::new(&format!("{} poison {}", "x".repeat(100), "y".repeat(100)), 5));
    bench.finish();
    assert!(matches!(&bench.clients[bad].ends[..], [ChatEvent::Failed(_)]));
    assert_eq!(bench.clients[0].text, alone(&other).0);
    bench.check_empty();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// Every 50 steps something breaks, for a thousand requests over all cases.
    #[test]
    fn whatever_breaks_all_get_an_answer_or_a_clear_error(
        kinds in prop::collection::vec(0usize..4, 40),
        offset in 1u64..50,
        survives in any::<bool>(),
    ) {
        let faults = [
            panic(), device(),
            Fault::FailRow(0, EngineError::KvFull { need: 1, free: 0 }),
            Fault::FailRow(0, EngineError::NotANumber),
        ];
        let script = kinds.iter().zip(0u64..).fold(Script::new(), |script, (kind, number)| {
            script.at_step(offset + 50 * number, faults[*kind].clone())
        });
        let script = if survives { script } else { script.dies_of_panics() };
        let mut bench = Bench::new(script, |config| config.scheduler.max_rows = 8);
        let asks: Vec<Ask> = (0..42).map(|number| Ask::new(&format!("{number} asks"), 60)).collect();
        for ask in &asks {
            bench.submit(ask);
        }
        bench.finish();
        let mut failed = 0;
        for (client, ask) in bench.clients.iter().zip(&asks) {
            prop_assert_eq!(client.ends.len(), 1);
            match client.done() {
                Some(_) => prop_assert_eq!(&client.text, &alone(ask).0),
                None => failed += 1,
            }
        }
        let row_faults = kinds.iter().filter(|kind| **kind >= 2).count();
        prop_assert!(failed <= row_faults, "only rows that failed themselves: {} of {}", failed, row_faults);
        bench.check_empty();
    }
}
