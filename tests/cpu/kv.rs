//! The block pool against a naive model: contents, sharing, counts, errors.

use greenroom::config::KvType;
use greenroom::model::cpu::CpuKv;
use greenroom::model::ops::{KvShape, KvStore, LayerId, StartOps};
use greenroom::types::{EngineError, Epoch, SequenceId};
use proptest::prelude::*;

const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 4 };
const WIDTH: usize = 8;

fn pool(blocks: u64, kind: KvType) -> CpuKv {
    let start = StartOps { epoch: Epoch(7), kv: SHAPE, kv_budget_bytes: u64::MAX / 4, context: 1000 };
    let bytes = CpuKv::new(&start, kind).unwrap().layout().bytes() as u64;
    CpuKv::new(&StartOps { kv_budget_bytes: blocks * bytes + 1, ..start }, kind).unwrap()
}

/// Keys and values of a token as numbers that halves hold exactly.
fn token(value: u32, layer: usize) -> (Vec<f32>, Vec<f32>) {
    let base = (value % 800) as f32;
    let key = (0..WIDTH).map(|i| base + 1024.0 * (layer == 1) as u8 as f32 + 32.0 * i as f32).collect();
    let value = (0..WIDTH).map(|i| 32.0 * i as f32 - base - 1024.0 * (layer == 1) as u8 as f32).collect();
    (key, value)
}

fn append(kv: &mut CpuKv, sequence: SequenceId, value: u32) -> Result<(), EngineError> {
    let at = kv.len(sequence)?;
    kv.reserve(sequence, at + 1)?;
    for layer in 0..SHAPE.layers {
        let (key, value) = token(value, layer);
        kv.write_token(sequence, LayerId(layer), at, &key, &value)?;
    }
    kv.commit(sequence, at + 1)
}

fn contents(kv: &CpuKv, sequence: SequenceId, expected: &[u32]) {
    assert_eq!(kv.len(sequence).unwrap() as usize, expected.len());
    for (position, value) in expected.iter().enumerate() {
        for layer in 0..SHAPE.layers {
            let got = kv.read_token(sequence, LayerId(layer), position as u32).unwrap();
            assert_eq!(got, token(*value, layer), "position {position} of {sequence:?}");
        }
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Open,
    Fork {
        from: usize,
        at: f64,
    },
    Append {
        to: usize,
        count: u32,
    },
    Reserve {
        of: usize,
        more: u32,
    },
    /// A step that failed: written, never committed.
    Abandon {
        of: usize,
    },
    Truncate {
        of: usize,
        at: f64,
    },
    Close {
        of: usize,
    },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        1 => Just(Operation::Open),
        3 => (0_usize..8, 0.0..=1.0).prop_map(|(from, at)| Operation::Fork { from, at }),
        6 => (0_usize..8, 1_u32..100).prop_map(|(to, count)| Operation::Append { to, count }),
        1 => (0_usize..8, 1_u32..200).prop_map(|(of, more)| Operation::Reserve { of, more }),
        1 => (0_usize..8).prop_map(|of| Operation::Abandon { of }),
        2 => (0_usize..8, 0.0..=1.0).prop_map(|(of, at)| Operation::Truncate { of, at }),
        1 => (0_usize..8).prop_map(|of| Operation::Close { of }),
    ]
}

/// A sequence and what it should hold.
type Model = Vec<(SequenceId, Vec<u32>)>;

fn apply(kv: &mut CpuKv, model: &mut Model, next: &mut u32, operation: Operation) {
    let pick = |index: usize, model: &Model| (!model.is_empty()).then(|| index % model.len());
    match operation {
        Operation::Open => model.push((kv.open(None).unwrap(), vec![])),
        Operation::Fork { from, at } => {
            let Some(from) = pick(from, model) else { return };
            let (source, tokens) = &model[from];
            let at = (tokens.len() as f64 * at) as usize;
            match kv.open(Some((*source, at as u32))) {
                Ok(fork) => {
                    let tokens = tokens[..at].to_vec();
                    model.push((fork, tokens));
                }
                Err(error) => assert!(matches!(error, EngineError::KvFull { .. }), "{error}"),
            }
        }
        Operation::Append { to, count } => {
            let Some(to) = pick(to, model) else { return };
            for _ in 0..count {
                if model[to].1.len() >= 1000 {
                    return;
                }
                match append(kv, model[to].0, *next) {
                    Ok(()) => model[to].1.push(*next),
                    Err(error) => return assert!(matches!(error, EngineError::KvFull { .. }), "{error}"),
                }
                *next += 1;
            }
        }
        Operation::Reserve { of, more } => {
            let Some(of) = pick(of, model) else { return };
            let tokens = (model[of].1.len() as u32 + more).min(1000);
            let before = kv.blocks().0;
            if let Err(error) = kv.reserve(model[of].0, tokens) {
                assert!(matches!(error, EngineError::KvFull { need, free } if need > free), "{error}");
                assert_eq!(kv.blocks().0, before, "a refused reservation keeps nothing");
            }
        }
        Operation::Abandon { of } => {
            let Some(of) = pick(of, model) else { return };
            let at = model[of].1.len() as u32;
            if at < 1000 && kv.reserve(model[of].0, at + 1).is_ok() {
                let junk = [9.0; WIDTH];
                kv.write_token(model[of].0, LayerId(1), at, &junk, &junk).unwrap();
            }
        }
        Operation::Truncate { of, at } => {
            let Some(of) = pick(of, model) else { return };
            let at = (model[of].1.len() as f64 * at) as usize;
            kv.truncate(model[of].0, at as u32).unwrap();
            model[of].1.truncate(at);
        }
        Operation::Close { of } => {
            let Some(of) = pick(of, model) else { return };
            let (sequence, _) = model.swap_remove(of);
            kv.close(sequence);
            assert_eq!(kv.len(sequence), Err(EngineError::UnknownSequence { sequence }));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sequences_hold_what_was_committed_and_nothing_leaks(
        operations in proptest::collection::vec(operation(), 1..60),
        blocks in 2_u64..24,
        half in any::<bool>(),
    ) {
        let mut kv = pool(blocks, if half { KvType::F16 } else { KvType::F32 });
        let mut model = Model::new();
        let mut next = 0;
        for operation in operations {
            apply(&mut kv, &mut model, &mut next, operation);
            for (sequence, tokens) in &model {
                contents(&kv, *sequence, tokens);
            }
            let (used, capacity) = kv.blocks();
            assert!(used <= capacity && capacity == blocks as usize);
            let stats = kv.stats();
            assert_eq!(stats.used_bytes, used as u64 * kv.layout().bytes() as u64);
        }
        for (sequence, _) in model {
            kv.close(sequence);
        }
        assert_eq!(kv.blocks().0, 0, "every block came back");
    }
}

#[test]
fn a_fork_shares_full_blocks_and_copies_only_the_tail() {
    let mut kv = pool(8, KvType::F16);
    let source = kv.open(None).unwrap();
    for value in 0..200 {
        append(&mut kv, source, value).unwrap();
    }
    assert_eq!(kv.blocks().0, 4);
    let whole = kv.open(Some((source, 192))).unwrap();
    assert_eq!(kv.blocks().0, 4, "three full blocks are shared");
    let tail = kv.open(Some((source, 190))).unwrap();
    assert_eq!(kv.blocks().0, 5, "62 tokens were copied");
    append(&mut kv, tail, 400).unwrap();
    append(&mut kv, whole, 401).unwrap();
    let expected: Vec<u32> = (0..200).collect();
    contents(&kv, source, &expected);
    contents(&kv, tail, &[&expected[..190], &[400]].concat());
    contents(&kv, whole, &[&expected[..192], &[401]].concat());
    assert_eq!(kv.restorable(whole, 1000), Ok(193));
    assert_eq!(kv.restorable(whole, 50), Ok(50));
}

#[test]
fn a_shared_block_is_copied_before_it_is_written() {
    let mut kv = pool(4, KvType::F32);
    let source = kv.open(None).unwrap();
    for value in 0..128 {
        append(&mut kv, source, value).unwrap();
    }
    let fork = kv.open(Some((source, 128))).unwrap();
    kv.truncate(fork, 100).unwrap();
    let (key, value) = token(1, 0);
    let refused = kv.write_token(fork, LayerId(0), 100, &key, &value);
    assert!(matches!(refused, Err(EngineError::InvalidPlan { .. })), "{refused:?}");
    assert_eq!(kv.blocks().0, 2);
    append(&mut kv, fork, 300).unwrap();
    assert_eq!(kv.blocks().0, 3);
    let expected: Vec<u32> = (0..128).collect();
    contents(&kv, source, &expected);
    contents(&kv, fork, &[&expected[..100], &[300]].concat());
}

#[test]
fn refusals_carry_the_bytes_and_change_nothing() {
    let mut kv = pool(2, KvType::F16);
    let block = kv.layout().bytes() as u64;
    assert_eq!(kv.stats().capacity_bytes, 2 * block);
    assert_eq!(kv.stats().bytes_per_token * 64, block);
    let a = kv.open(None).unwrap();
    append(&mut kv, a, 1).unwrap();
    assert_eq!(kv.reserve(a, 64 * 4), Err(EngineError::KvFull { need: 3 * block, free: block }));
    contents(&kv, a, &[1]);
    assert!(matches!(kv.reserve(a, 1001), Err(EngineError::InvalidPlan { .. })));
    assert!(matches!(kv.commit(a, 65), Err(EngineError::InvalidPlan { .. })));
    assert!(matches!(kv.open(Some((a, 2))), Err(EngineError::InvalidPlan { .. })));
    kv.reserve(a, 128).unwrap();
    assert_eq!(kv.open(Some((a, 1))), Err(EngineError::KvFull { need: block, free: 0 }));
    kv.truncate(a, 1).unwrap();
    assert_eq!(kv.blocks().0, 1, "room that was reserved came back");
    let stale = SequenceId { epoch: Epoch(6), number: a.number };
    assert_eq!(kv.reserve(stale, 1), Err(EngineError::StaleEpoch { sequence: stale }));
    kv.close(stale);
    contents(&kv, a, &[1]);
    let unknown = SequenceId { epoch: Epoch(7), number: 99 };
    assert_eq!(kv.truncate(unknown, 0), Err(EngineError::UnknownSequence { sequence: unknown }));
    kv.close(unknown);
}

#[test]
fn a_budget_without_room_for_a_block_is_refused_with_the_setting() {
    let start = StartOps { epoch: Epoch(0), kv: SHAPE, kv_budget_bytes: 100, context: 10 };
    let error = CpuKv::new(&start, KvType::F16).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("engine.kv_memory_mib"), "{error}");
}
