//! Warm equals cold: state that was kept, copied out, taken in by another engine, forked anywhere
//! or cut back gives what computing it anew gives. Bit for bit on the CPU, whatever the chunks.
#![cfg(any(feature = "cpu", feature = "mlx"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use std::ops::Range;
use std::path::{Path, PathBuf};

use checkpoints::{engine, feed};
use greenroom::cache::ssd::pieces;
use greenroom::model::Engine;
use greenroom::model::ops::Ops;
use greenroom::types::{EngineError, SequenceId, TokenId};

const CHUNKS: [usize; 3] = [1, 64, 512];
const LENGTH: u32 = 300;
const LENGTHS: [u32; 7] = [1, 63, 64, 65, 100, 255, 299];

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama")
}

fn tokens(count: u32) -> Vec<TokenId> {
    (0..count).map(|at| TokenId((at * at + 7 * at + 3) % 250)).collect()
}

type Pieces = Vec<(Range<u32>, Vec<u8>)>;

fn export(engine: &mut dyn Engine, sequence: SequenceId, range: Range<u32>) -> Pieces {
    pieces(&range).map(|piece| (piece.clone(), engine.export(sequence, piece).unwrap())).collect()
}

fn import(engine: &mut dyn Engine, from: Option<(SequenceId, u32)>, all: &Pieces) -> SequenceId {
    let sequence = engine.open(from).unwrap();
    engine.reserve(sequence, LENGTH + 64).unwrap();
    for (range, bytes) in all {
        engine.import(sequence, range.clone(), bytes).unwrap();
    }
    sequence
}

fn bits(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.iter().flatten().map(|logit| logit.to_bits()).collect()
}

/// Logits of `all[from..]` on top of what the sequence holds.
fn rest(
    engine: &mut dyn Engine,
    sequence: SequenceId,
    all: &[TokenId],
    from: u32,
    chunk: usize,
) -> Vec<Vec<f32>> {
    feed(engine, sequence, from, &all[from as usize..], chunk)
}

fn far(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// What every way to a prefix must give; `same` compares with the cold run from there on.
fn every_way_is_the_same<O: Ops + 'static>(
    path: &Path,
    config: &O::Config,
    lengths: &[u32],
    same: impl Fn(&[Vec<f32>], &[Vec<f32>]),
) {
    let all = tokens(LENGTH);
    let mut first = engine::<O>(path, config, 2048);
    let cold_sequence = first.open(None).unwrap();
    let cold = feed(&mut first, cold_sequence, 0, &all, 512);
    let whole = export(&mut first, cold_sequence, 0..LENGTH);
    // A prefix of another conversation, which parts from this one inside a block.
    let mut other = all.clone();
    other.truncate(100);
    other.extend(tokens(80).iter().map(|token| TokenId(token.0 / 2)));
    let mut second = engine::<O>(path, config, 2048);
    for &at in lengths {
        for chunk in CHUNKS {
            let expected = &cold[at as usize..];
            // From memory.
            let fork = first.open(Some((cold_sequence, at))).unwrap();
            same(&rest(&mut first, fork, &all, at, chunk), expected);
            first.close(fork);
            // From bytes, in another engine: all of them and cut back, or just as many as are needed.
            let restored = import(&mut second, None, &whole);
            second.truncate(restored, at).unwrap();
            same(&rest(&mut second, restored, &all, at, chunk), expected);
            second.close(restored);
            let part = export(&mut first, cold_sequence, 0..at);
            let restored = import(&mut second, None, &part);
            same(&rest(&mut second, restored, &all, at, chunk), expected);
            second.close(restored);
        }
    }
    // Half from memory, half from bytes, behind another conversation's tail that was cut off.
    let parted = second.open(None).unwrap();
    feed(&mut second, parted, 0, &other, 64);
    let tail = export(&mut first, cold_sequence, 100..LENGTH - 10);
    let joined = import(&mut second, Some((parted, 100)), &tail);
    same(&rest(&mut second, joined, &all, LENGTH - 10, 64), &cold[LENGTH as usize - 10..]);
    assert_eq!(export(&mut second, joined, 100..LENGTH - 10), tail, "bytes come back as they went in");
    // What others read is not touched by all this.
    assert_eq!(export(&mut first, cold_sequence, 0..LENGTH), whole);
}

#[cfg(feature = "cpu")]
#[test]
fn on_the_cpu_to_the_last_bit() {
    use greenroom::config::{CpuConfig, KvType};
    for kv in [KvType::F16, KvType::F32] {
        let mut config = CpuConfig::default();
        config.kv = kv;
        every_way_is_the_same::<greenroom::model::cpu::CpuOps>(&tiny(), &config, &LENGTHS, |warm, cold| {
            assert_eq!(bits(warm), bits(cold));
        });
    }
}

#[cfg(feature = "cpu")]
#[test]
fn the_demo_model_to_the_last_bit() {
    let config = greenroom::config::CpuConfig::default();
    let model = common::demo_model();
    every_way_is_the_same::<greenroom::model::cpu::CpuOps>(&model, &config, &[100, 255], |warm, cold| {
        assert_eq!(bits(warm), bits(cold));
    });
}

#[cfg(feature = "mlx")]
#[test]
fn on_mlx_within_its_tolerance() {
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};
    let config = MlxConfig::for_device(MlxDevice::Cpu, MlxType::F32);
    every_way_is_the_same::<MlxOps>(&tiny(), &config, &LENGTHS, |warm, cold| {
        let far = far(warm, cold);
        assert!(far < checkpoints::TOLERANCE, "{far}");
    });
    for half in [MlxType::F16, MlxType::BF16] {
        let config = MlxConfig { activations: half, ..config };
        let mut first = engine::<MlxOps>(&tiny(), &config, 2048);
        let sequence = first.open(None).unwrap();
        let all = tokens(90);
        feed(&mut first, sequence, 0, &all, 64);
        let bytes = export(&mut first, sequence, 0..90);
        let mut second = engine::<MlxOps>(&tiny(), &config, 2048);
        let restored = import(&mut second, None, &bytes);
        assert_eq!(export(&mut second, restored, 0..90), bytes, "{half:?}");
    }
}

#[cfg(feature = "cpu")]
#[test]
fn the_plain_store_keeps_to_the_same_rules() {
    every_way_is_the_same::<greenroom::model::plain::PlainOps>(
        &tiny(),
        &Default::default(),
        &LENGTHS,
        |warm, cold| {
            assert_eq!(bits(warm), bits(cold));
        },
    );
}

#[cfg(feature = "cpu")]
#[test]
fn bytes_that_do_not_fit_are_refused_and_change_nothing() {
    use greenroom::config::CpuConfig;
    let mut engine = engine::<greenroom::model::cpu::CpuOps>(&tiny(), &CpuConfig::default(), 2048);
    let sequence = engine.open(None).unwrap();
    let all = tokens(100);
    let cold = feed(&mut engine, sequence, 0, &all, 64);
    let piece = engine.export(sequence, 0..64).unwrap();
    let invalid =
        |result: Result<(), EngineError>| assert!(matches!(result, Err(EngineError::InvalidPlan { .. })));
    for range in [0..65, 60..70, 5..5, 64..101] {
        invalid(engine.export(sequence, range).map(drop));
    }
    let target = engine.open(None).unwrap();
    invalid(engine.import(target, 0..64, &piece));
    engine.reserve(target, 128).unwrap();
    invalid(engine.import(target, 0..64, &piece[1..]));
    invalid(engine.import(target, 0..63, &piece));
    invalid(engine.import(target, 64..128, &piece));
    invalid(engine.import(target, 0..65, &piece));
    engine.import(target, 0..64, &piece).unwrap();
    assert_eq!(bits(&rest(&mut engine, target, &all, 64, 64)), bits(&cold[64..]));
    engine.close(target);
    assert!(matches!(engine.export(target, 0..64), Err(EngineError::UnknownSequence { .. })));
}
