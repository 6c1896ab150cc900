//! Random lives: whatever happens, every request ends once, memory is bounded, and no
//! token is lost, doubled or out of order.

use proptest::prelude::*;

use super::bench::{Ask, Bench, alone, seconds};
use crate::model::fake::{Fault, Script};
use crate::types::{ChatEvent, EngineError, FailureReason, FinishReason, PrepareError, Priority, Refusal};

#[derive(Clone, Debug)]
enum Op {
    Submit(Ask),
    Steps(usize),
    Cancel(prop::sample::Index),
    Read(prop::sample::Index),
    Wait(u64),
    Clear,
}

fn ask() -> impl Strategy<Value = Ask> {
    let prompt = ("[ab]", 1usize..80, "[cd]{0,12}").prop_map(|(a, count, tail)| a.repeat(count) + &tail);
    let stop = prop::collection::vec("[a-z]{1,2}", 0..2);
    (prompt, prop_oneof![1u32..60, 600u32..700], stop, 2usize..8, 0u8..3, 0usize..3).prop_map(
        |(prompt, max_new, stop, slots, client, class)| {
            let ask = Ask { stop, slots, ..Ask::new(&prompt, max_new) };
            ask.of(&client.to_string(), Priority::ALL[class])
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => ask().prop_map(Op::Submit),
        4 => (1usize..12).prop_map(Op::Steps),
        1 => any::<prop::sample::Index>().prop_map(Op::Cancel),
        2 => any::<prop::sample::Index>().prop_map(Op::Read),
        1 => (1u64..40).prop_map(Op::Wait),
        1 => Just(Op::Clear),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::Panic("panic".into())),
        Just(Fault::PanicTwice("panic".into())),
        Just(Fault::Fail(EngineError::Device { message: "lost".into() })),
        Just(Fault::Fail(EngineError::InvalidPlan { message: "no".into() })),
        Just(Fault::FailRow(0, EngineError::NotANumber)),
        Just(Fault::FailRow(1, EngineError::KvFull { need: 1, free: 0 })),
    ]
}

fn script(faults: Vec<(u64, Fault)>, blocks: u32) -> Script {
    let script = Script::new().memory(blocks, 16);
    faults.into_iter().fold(script, |script, (step, fault)| script.at_step(step, fault))
}

fn apply(bench: &mut Bench, op: Op, asks: &mut Vec<Ask>) {
    let count = bench.clients.len();
    match op {
        Op::Submit(ask) => match bench.try_submit(&ask) {
            Ok(_) => asks.push(ask),
            Err(refusal) => assert!(matches!(
                refusal,
                Refusal::Prepare(PrepareError::MemoryExceeded { prompt, most, .. }) if prompt > most
            )),
        },
        Op::Steps(steps) => (0..steps).for_each(|_| {
            bench.step();
        }),
        Op::Cancel(which) if count > 0 => bench.clients[which.index(count)].rx = None,
        Op::Read(which) if count > 0 => bench.clients[which.index(count)].read(),
        Op::Wait(time) => bench.clock.advance(seconds(time)),
        Op::Clear => bench.core.tree.borrow_mut().release_all(),
        Op::Cancel(_) | Op::Read(_) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn every_request_ends_once_and_no_token_is_lost_or_doubled(
        ops in prop::collection::vec(op(), 1..40),
        faults in prop::collection::vec((1u64..80, fault()), 0..4),
        blocks in 3u32..60,
        rows in 1usize..6,
        chunk in 1u32..40,
        cached in any::<bool>(),
        overlaps in any::<bool>(),
    ) {
        let calm = faults.is_empty();
        let script = script(faults, blocks);
        let script = if overlaps { script.overlaps() } else { script };
        let mut bench = Bench::new(script, |config| {
            config.scheduler.max_rows = rows;
            config.scheduler.max_chunk_tokens = chunk;
            config.scheduler.stall_timeout_s = 60;
            config.cache.enabled = cached;
            config.cache.memory_mib = Some(1);
        });
        let mut asks = Vec::new();
        for op in ops {
            apply(&mut bench, op, &mut asks);
        }
        bench.finish();
        for (client, ask) in bench.clients.iter().zip(&asks) {
            let (expected, finish, tokens) = alone(ask);
            if client.rx.is_none() {
                prop_assert!(expected.starts_with(&client.text));
                continue;
            }
            prop_assert_eq!(client.ends.len(), 1, "exactly one end");
            match &client.ends[0] {
                ChatEvent::Done { finish: got, usage, .. } => {
                    prop_assert!(usage.cached_tokens < usage.prompt_tokens);
                    if usage.completion_tokens == tokens {
                        prop_assert_eq!(&client.text, &expected);
                        prop_assert_eq!(*got, finish);
                    } else {
                        // Alone and too big for all memory: cut short, and said so.
                        prop_assert_eq!(*got, FinishReason::Length);
                        prop_assert!(expected.starts_with(&client.text));
                    }
                }
                ChatEvent::Failed(failure) => {
                    let stalled = failure.reason == FailureReason::StreamStalled;
                    prop_assert!(stalled || !calm, "nothing went wrong, but: {failure:?}");
                    prop_assert!(expected.starts_with(&client.text));
                }
                _ => unreachable!("no end"),
            }
        }
        prop_assert_eq!(bench.core.accounts.len(), 0);
        bench.check_empty();
    }
}
