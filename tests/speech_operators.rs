//! The operators of speech models against plain loops on random shapes, for every backend, and what is
//! MLX's own: lazy work is done when it is settled, rows that read one memory are one attention.
#![cfg(any(feature = "cpu", feature = "mlx"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use greenroom::model::ops::speech::{LayerNorm, RecallSpec, SpeechOps};
use greenroom::model::ops::{Act, KvShape, StartOps};
use greenroom::types::{EngineError, Epoch};

/// Pseudo-random numbers that are the same on every machine.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize
    }

    fn upto(&mut self, most: usize) -> usize {
        1 + self.next() % most
    }

    /// In −1..1.
    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.next() % 20_001) as f32 / 10_000.0 - 1.0).collect()
    }
}

fn start<O: SpeechOps>(config: &O::Config) -> O {
    let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 16 };
    let start = StartOps { epoch: Epoch(1), kv, kv_budget_bytes: 1 << 20, context: 64 };
    O::start(config, &start).unwrap().0
}

/// Calls a check with each backend that is compiled, in its exact numbers.
macro_rules! for_each_backend {
    ($check:ident) => {{
        #[cfg(feature = "cpu")]
        $check::<greenroom::model::cpu::CpuOps>(&mut start(&exact_cpu()));
        #[cfg(feature = "mlx")]
        $check::<greenroom::model::mlx::MlxOps>(&mut start(&mlx_cpu()));
    }};
}

#[cfg(feature = "cpu")]
fn exact_cpu() -> greenroom::config::CpuConfig {
    let mut config = greenroom::config::CpuConfig::default();
    config.kv = greenroom::config::KvType::F32;
    config
}

#[cfg(feature = "mlx")]
fn mlx_cpu() -> greenroom::model::mlx::MlxConfig {
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxType};
    MlxConfig::for_device(MlxDevice::Cpu, MlxType::F16)
}

#[track_caller]
fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    let largest = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-4, "{what}: largest difference {largest}");
}

fn is_refused<T>(result: Result<T, EngineError>) -> bool {
    matches!(result, Err(EngineError::InvalidPlan { .. }))
}

fn check_rows<O: SpeechOps>(ops: &mut O) {
    let mut numbers = Numbers(1);
    for _ in 0..20 {
        let (tokens, width) = (numbers.upto(40), numbers.upto(30));
        let values = numbers.floats(tokens * width);
        let x = ops.upload(tokens, &values).unwrap();
        assert_eq!(ops.download(&x).unwrap(), values);
        let from = numbers.next() % tokens;
        let to = from + numbers.upto(tokens - from);
        let part = ops.slice(&x, from..to).unwrap();
        assert_eq!(ops.download(&part).unwrap(), values[from * width..to * width]);
        let joined = ops.join(vec![part, x]).unwrap();
        assert_eq!(ops.download(&joined).unwrap(), [&values[from * width..to * width], &values[..]].concat());
        let x = ops.upload(tokens, &values).unwrap();
        assert!(is_refused(ops.slice(&x, from..tokens + 1)));
        assert!(is_refused(ops.slice(&x, from..from)));
    }
    assert!(is_refused(ops.upload(0, &[])));
    assert!(is_refused(ops.upload(2, &[1.0, 2.0, 3.0])));
    let (narrow, wide) = (ops.upload(1, &[1.0]).unwrap(), ops.upload(1, &[1.0, 2.0]).unwrap());
    assert!(is_refused(ops.join(vec![narrow, wide])));
}

#[test]
fn rows_come_back_as_they_went() {
    for_each_backend!(check_rows);
}

fn check_windows<O: SpeechOps>(ops: &mut O) {
    let mut numbers = Numbers(2);
    for round in 0..40 {
        let (have, width) = (numbers.upto(30), numbers.upto(9));
        let values = numbers.floats(have * width);
        let x = ops.upload(have, &values).unwrap();
        let stride = 1 + round % 2;
        // Also where the last taps, or all of them, see nothing.
        let from = numbers.next() % (have + 3);
        let rows = from..from + numbers.upto(have);
        let mut expected = Vec::new();
        for row in rows.clone() {
            for tap in 0..3 {
                let at = (stride * row + tap).checked_sub(1).filter(|at| *at < have);
                match at {
                    Some(at) => expected.extend_from_slice(&values[at * width..(at + 1) * width]),
                    None => expected.resize(expected.len() + width, 0.0),
                }
            }
        }
        let windows = ops.windows(&x, rows.clone(), stride).unwrap();
        assert_eq!(ops.download(&windows).unwrap(), expected, "{rows:?} of {have} by {stride}");
    }
}

#[test]
fn a_convolution_sees_three_rows_and_zeros_outside() {
    for_each_backend!(check_windows);
}

/// By Abramowitz and Stegun 7.1.26, in f64: good to 1.5e-7.
fn erf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let poly = ((((1.061_405_429 * t - 1.453_152_027) * t) + 1.421_413_741) * t - 0.284_496_736) * t;
    let y = 1.0 - (poly + 0.254_829_592) * t * (-x * x).exp();
    y.copysign(x)
}

fn check_elements<O: SpeechOps>(ops: &mut O) {
    let mut numbers = Numbers(3);
    for _ in 0..10 {
        let (tokens, width) = (numbers.upto(20), 1 + numbers.upto(200));
        let values: Vec<f32> = numbers.floats(tokens * width).iter().map(|x| 3.0 * x + 1.0).collect();
        let (weight, bias) = (numbers.floats(width), numbers.floats(width));
        let norm =
            LayerNorm { weight: ops.vector(&weight).unwrap(), bias: ops.vector(&bias).unwrap(), eps: 1e-5 };
        let mut expected = Vec::new();
        for row in values.chunks_exact(width) {
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
            let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (variance + 1e-5).sqrt();
            let with = row.iter().zip(&weight).zip(&bias);
            expected.extend(
                with.map(|((x, w), b)| {
                    ((f64::from(*x) - mean) * scale * f64::from(*w) + f64::from(*b)) as f32
                }),
            );
        }
        let x = ops.upload(tokens, &values).unwrap();
        let normed = ops.layer_norm(&x, &norm).unwrap();
        assert_close(&ops.download(&normed).unwrap(), &expected, "layer norm");

        let gelu = |x: f32| 0.5 * f64::from(x) * (1.0 + erf(f64::from(x) / 2f64.sqrt()));
        let expected: Vec<f32> =
            values.iter().zip(bias.iter().cycle()).map(|(x, b)| gelu(x + b) as f32).collect();
        let acted = ops.bias_act(x, &norm.bias, Act::Gelu).unwrap();
        assert_close(&ops.download(&acted).unwrap(), &expected, "exact GELU of a biased sum");
    }
}

#[test]
fn norms_and_gelu_are_the_formulas() {
    for_each_backend!(check_elements);
}

/// Scaled scores of one head, and what attention makes of them.
fn attend(query: &[f32], keys_values: &[f32], spec: &RecallSpec, head: usize) -> (Vec<f32>, Vec<f32>) {
    let (d, width) = (spec.head_dim, spec.heads * spec.head_dim);
    let query = &query[head * d..(head + 1) * d];
    let rows = || keys_values.chunks_exact(2 * width);
    let scores: Vec<f64> = rows()
        .map(|row| {
            let key = &row[head * d..(head + 1) * d];
            query.iter().zip(key).map(|(a, b)| f64::from(a * b)).sum::<f64>() * f64::from(spec.scale)
        })
        .collect();
    let most = scores.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
    let mut mixed = vec![0.0; d];
    for (row, score) in rows().zip(&scores) {
        let value = &row[width + head * d..width + (head + 1) * d];
        let share = (score - most).exp() / sum;
        mixed.iter_mut().zip(value).for_each(|(out, v)| *out += share * f64::from(*v));
    }
    (scores.iter().map(|x| *x as f32).collect(), mixed.iter().map(|x| *x as f32).collect())
}

/// A memory filled in uneven pieces, and what it was filled with.
fn filled<O: SpeechOps>(
    ops: &mut O,
    numbers: &mut Numbers,
    positions: usize,
    spec: &RecallSpec,
) -> (O::Memory, Vec<f32>) {
    let width = 2 * spec.heads * spec.head_dim;
    let mut memory = ops.memory(positions, spec).unwrap();
    let mut all = Vec::new();
    let mut first = 0;
    while first < positions {
        let tokens = numbers.upto(positions - first);
        let piece = numbers.floats(tokens * width);
        let rows = ops.upload(tokens, &piece).unwrap();
        ops.remember(&mut memory, first, &rows).unwrap();
        ops.settle(&[], Some(&memory)).unwrap();
        all.extend(piece);
        first += tokens;
    }
    (memory, all)
}

fn check_attention<O: SpeechOps>(ops: &mut O) {
    let mut numbers = Numbers(4);
    for _ in 0..12 {
        let spec = RecallSpec { heads: numbers.upto(4), head_dim: 8 * numbers.upto(8), scale: 0.2 + 0.1 };
        let width = spec.heads * spec.head_dim;
        let sizes = [numbers.upto(150), numbers.upto(150)];
        let (one, one_values) = filled(ops, &mut numbers, sizes[0], &spec);
        let (two, two_values) = filled(ops, &mut numbers, sizes[1], &spec);
        assert!(ops.memory_bytes(&one) >= (2 * sizes[0] * width * 4) as u64);
        // Neighbours that share a memory, one that has its own, one that comes back to the first.
        let rows = [(numbers.upto(3), &one, &one_values), (1, &one, &one_values)];
        let more = [(numbers.upto(5), &two, &two_values), (1, &one, &one_values)];
        let rows: Vec<_> = rows.into_iter().chain(more).collect();
        let tokens: usize = rows.iter().map(|(tokens, ..)| tokens).sum();
        let values = numbers.floats(tokens * width);
        let queries = ops.upload(tokens, &values).unwrap();
        let mut at = 0;
        let (mut expected, mut expected_scores) = (Vec::new(), Vec::new());
        // Heads out of order, and one of them twice.
        let heads = [spec.heads - 1, 0, spec.heads - 1];
        for (count, _, keys_values) in &rows {
            let mut scores = vec![Vec::new(); heads.len()];
            for query in values[at * width..(at + count) * width].chunks_exact(width) {
                for head in 0..spec.heads {
                    expected.extend(attend(query, keys_values, &spec, head).1);
                }
                for (scores, head) in scores.iter_mut().zip(heads) {
                    scores.extend(attend(query, keys_values, &spec, head).0);
                }
            }
            expected_scores.push((at..at + count, scores.concat()));
            at += count;
        }
        let read: Vec<_> = rows.iter().map(|(tokens, memory, _)| (*tokens, *memory)).collect();
        let mixed = ops.recall(&queries, &spec, &read).unwrap();
        assert_close(&ops.download(&mixed).unwrap(), &expected, "recall");
        for ((_, memory, _), (range, expected)) in rows.iter().zip(expected_scores) {
            let scores = ops.scores(&queries, range, &spec, memory, &heads).unwrap();
            assert_close(&scores, &expected, "scores");
        }
        assert!(is_refused(ops.recall(&queries, &spec, &read[..3])), "rows that do not cover the queries");
        assert!(is_refused(ops.scores(&queries, 0..tokens + 1, &spec, &one, &heads)));
        assert!(is_refused(ops.scores(&queries, 0..1, &spec, &one, &[spec.heads])));
        let other = RecallSpec { heads: spec.heads + 1, ..spec };
        assert!(is_refused(ops.recall(&queries, &other, &read)));
    }
}

#[test]
fn rows_recall_their_memories_whole() {
    for_each_backend!(check_attention);
}

fn check_bounds<O: SpeechOps>(ops: &mut O) {
    let spec = RecallSpec { heads: 2, head_dim: 8, scale: 1.0 };
    let mut memory = ops.memory(5, &spec).unwrap();
    let rows =
        |ops: &mut O, tokens: usize, width: usize| ops.upload(tokens, &vec![0.5; tokens * width]).unwrap();
    let too_many = rows(ops, 6, 32);
    assert!(is_refused(ops.remember(&mut memory, 0, &too_many)));
    let too_wide = rows(ops, 5, 33);
    assert!(is_refused(ops.remember(&mut memory, 0, &too_wide)));
    let some = rows(ops, 3, 32);
    ops.remember(&mut memory, 0, &some).unwrap();
    assert!(is_refused(ops.remember(&mut memory, 3, &some)), "the end is beyond the last position");
}

#[test]
fn what_does_not_fit_a_memory_is_refused() {
    for_each_backend!(check_bounds);
}

#[cfg(feature = "mlx")]
mod mlx {
    use super::*;
    use greenroom::model::mlx::MlxOps;
    use greenroom::model::mlx::native::graph_operations;

    const SPEC: RecallSpec = RecallSpec { heads: 2, head_dim: 16, scale: 0.25 };

    fn operations(x: &mlx_rs::Array) -> usize {
        graph_operations(std::slice::from_ref(x)).unwrap()
    }

    #[test]
    fn settled_work_is_done() {
        let ops: &mut MlxOps = &mut start(&mlx_cpu());
        let mut numbers = Numbers(5);
        let x = ops.upload(6, &numbers.floats(6 * 64)).unwrap();
        let x = ops.windows(&x, 0..6, 1).unwrap();
        let y = ops.windows(&x, 0..3, 2).unwrap();
        assert!(operations(&x) > 0 && operations(&y) > 0);
        ops.settle(&[&x, &y], None).unwrap();
        assert_eq!((operations(&x), operations(&y)), (0, 0));
        // A memory: what is left of a recall's graph is the recall.
        let queries = ops.upload(1, &numbers.floats(32)).unwrap();
        let fill = |ops: &mut MlxOps, numbers: &mut Numbers| {
            let mut memory = ops.memory(6, &SPEC).unwrap();
            for first in [0, 2, 4] {
                let piece = ops.upload(2, &numbers.floats(2 * 64)).unwrap();
                ops.remember(&mut memory, first, &piece).unwrap();
            }
            memory
        };
        let lazy = fill(ops, &mut numbers);
        let settled = fill(ops, &mut numbers);
        ops.settle(&[], Some(&settled)).unwrap();
        let of = |ops: &mut MlxOps, memory| operations(&ops.recall(&queries, &SPEC, &[(1, memory)]).unwrap());
        assert!(of(ops, &settled) < of(ops, &lazy), "{} of {}", of(ops, &settled), of(ops, &lazy));
    }

    #[test]
    fn beams_of_a_window_cost_no_more_operations_than_one() {
        let ops: &mut MlxOps = &mut start(&mlx_cpu());
        let mut numbers = Numbers(6);
        let (memory, _) = filled(ops, &mut numbers, 20, &SPEC);
        let queries = ops.upload(5, &numbers.floats(5 * 32)).unwrap();
        let beams = ops.recall(&queries, &SPEC, &[(1, &memory); 5]).unwrap();
        let one = ops.upload(1, &numbers.floats(32)).unwrap();
        let one = ops.recall(&one, &SPEC, &[(1, &memory)]).unwrap();
        assert_eq!(operations(&beams), operations(&one));
    }

    #[test]
    fn a_memory_is_read_when_it_is_full_and_filled_in_order() {
        let ops: &mut MlxOps = &mut start(&mlx_cpu());
        let mut memory = ops.memory(4, &SPEC).unwrap();
        let piece = ops.upload(2, &[0.5; 128]).unwrap();
        let queries = ops.upload(1, &[0.5; 32]).unwrap();
        assert!(is_refused(ops.remember(&mut memory, 2, &piece)));
        ops.remember(&mut memory, 0, &piece).unwrap();
        assert!(is_refused(ops.recall(&queries, &SPEC, &[(1, &memory)])));
        assert!(is_refused(ops.scores(&queries, 0..1, &SPEC, &memory, &[0])));
        ops.remember(&mut memory, 2, &piece).unwrap();
        assert!(is_refused(ops.remember(&mut memory, 4, &piece)));
        ops.recall(&queries, &SPEC, &[(1, &memory)]).unwrap();
    }
}
