//! Attention: against a plain softmax, and bit for bit across chunk sizes,
//! batches, threads and paths.

use greenroom::config::{CpuConfig, KvType};
use greenroom::model::cpu::attention::Vector;
use greenroom::model::cpu::{CpuKv, CpuOps, SimdPath};
use greenroom::model::ops::{AttnSpec, KvShape, KvStore, LayerId, Norm, Ops, Rope, Step, StepRow};
use greenroom::types::{EngineError, SequenceId, TokenId};
use half::f16;
use proptest::prelude::*;
use proptest::sample::select;

use super::{Random, bits, paths, start};

/// One attention layer and a row's inputs.
#[derive(Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<u32>,
    rotated: usize,
    rope_scale: f32,
    normed: bool,
    /// Norms take all heads as one.
    whole: bool,
    softcap: Option<f32>,
    kv: KvType,
}

const PLAIN: Case = Case {
    heads: 6,
    kv_heads: 2,
    head_dim: 16,
    window: None,
    rotated: 16,
    rope_scale: 1.0,
    normed: false,
    whole: false,
    softcap: None,
    kv: KvType::F16,
};

impl Case {
    fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn spec(&self, ops: &mut CpuOps) -> AttnSpec<Vector> {
        let mut random = Random(99);
        let inv_freq: Vec<f32> = (0..self.rotated / 2).map(|i| 0.3_f32.powi(i as i32)).collect();
        let mut norm = |heads: usize| {
            let width = self.head_dim * if self.whole { heads } else { 1 };
            Norm { weight: ops.vector(&random.vector(width)).unwrap(), eps: 1e-6 }
        };
        let (q_norm, k_norm) = (norm(self.heads), norm(self.kv_heads));
        AttnSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            softcap: self.softcap,
            window: self.window,
            rope: (self.rotated > 0).then(|| Rope {
                inv_freq: ops.vector(&inv_freq).unwrap(),
                dims: self.rotated,
                scale: self.rope_scale,
            }),
            q_norm: self.normed.then_some(q_norm),
            k_norm: self.normed.then_some(k_norm),
        }
    }

    fn ops(&self, path: SimdPath, threads: usize) -> (CpuOps, CpuKv) {
        let mut config = CpuConfig::default();
        config.kv = self.kv;
        config.threads = Some(threads);
        let shape = KvShape { layers: 2, kv_heads: self.kv_heads, head_dim: self.head_dim };
        CpuOps::with_path(&config, &start(shape, 64), path).unwrap()
    }
}

/// What a row still has to compute.
struct Work<'a> {
    sequence: SequenceId,
    inputs: &'a [f32],
    outputs: Vec<f32>,
}

/// Runs one step: the next `sizes[i]` tokens of each row.
fn step(
    ops: &mut CpuOps,
    kv: &mut CpuKv,
    case: &Case,
    spec: &AttnSpec<Vector>,
    work: &mut [Work<'_>],
    sizes: &[usize],
) {
    let width = case.width();
    let (mut rows, mut positions, mut packed) = (vec![], vec![], vec![]);
    for (work, size) in work.iter().zip(sizes) {
        let at = kv.len(work.sequence).unwrap();
        kv.reserve(work.sequence, at + *size as u32).unwrap();
        if *size > 0 {
            rows.push(StepRow { sequence: work.sequence, first: positions.len(), len: *size, start: at });
        }
        positions.extend(at..at + *size as u32);
        packed.extend_from_slice(&work.inputs[at as usize * width..(at as usize + size) * width]);
    }
    let tokens = vec![TokenId(0); positions.len()];
    let qkv = ops.tensor(tokens.len(), &packed);
    let plan = Step { tokens: &tokens, positions: &positions, rows: &rows };
    let out = ops.attend(kv, LayerId(1), qkv, spec, &plan).unwrap();
    let mut done = 0;
    for (work, size) in work.iter_mut().zip(sizes) {
        let at = kv.len(work.sequence).unwrap();
        kv.commit(work.sequence, at + *size as u32).unwrap();
        let width = out.width();
        work.outputs.extend_from_slice(&out.data()[done * width..(done + size) * width]);
        done += size;
    }
}

/// One row in chunks of `chunk`.
fn alone(case: &Case, path: SimdPath, threads: usize, inputs: &[f32], chunk: usize) -> Vec<f32> {
    let (mut ops, mut kv) = case.ops(path, threads);
    let spec = case.spec(&mut ops);
    let sequence = kv.open(None).unwrap();
    let mut work = [Work { sequence, inputs, outputs: vec![] }];
    let mut left = inputs.len() / case.width();
    while left > 0 {
        let size = chunk.min(left);
        step(&mut ops, &mut kv, case, &spec, &mut work, &[size]);
        left -= size;
    }
    let [work] = work;
    work.outputs
}

fn rotate(head: &mut [f64], inv_freq: &[f32], scale: f32, position: usize) {
    let n = inv_freq.len();
    for i in 0..n {
        let (sin, cos) = f64::from(position as f32 * inv_freq[i]).sin_cos();
        let (sin, cos) = (sin * f64::from(scale), cos * f64::from(scale));
        let (x, y) = (head[i], head[i + n]);
        head[i] = x * cos - y * sin;
        head[i + n] = y * cos + x * sin;
    }
}

/// The same in f64 by the textbook: all scores, one softmax.
fn plain(case: &Case, inputs: &[f32]) -> Vec<f64> {
    let (mut ops, _kv) = case.ops(SimdPath::Portable, 1);
    let spec = case.spec(&mut ops);
    let (d, tokens) = (case.head_dim, inputs.len() / case.width());
    let round = |x: f64| match case.kv {
        KvType::F16 => f16::from_f32(x as f32).to_f64(),
        KvType::F32 => x,
    };
    let turned: Vec<Vec<f64>> = inputs
        .chunks(case.width())
        .enumerate()
        .map(|(position, row)| {
            let mut row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
            let (queries, keys) = row.split_at_mut(case.heads * d);
            for (part, norm) in [(queries, &spec.q_norm), (&mut keys[..case.kv_heads * d], &spec.k_norm)] {
                let Some(norm) = norm else { continue };
                for part in part.chunks_mut(norm.weight.len()) {
                    let mean = part.iter().map(|x| x * x).sum::<f64>() / part.len() as f64;
                    let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
                    part.iter_mut().zip(norm.weight.iter()).for_each(|(x, w)| *x *= scale * f64::from(*w));
                }
            }
            for head in row.chunks_mut(d).take(case.heads + case.kv_heads) {
                if let Some(rope) = &spec.rope {
                    rotate(head, &rope.inv_freq, rope.scale, position);
                }
            }
            row[case.heads * d..].iter_mut().for_each(|x| *x = round(*x));
            row
        })
        .collect();
    let mut out = vec![];
    for position in 0..tokens {
        let first = case.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        for head in 0..case.heads {
            let key_at = (case.heads + head / (case.heads / case.kv_heads)) * d;
            let value_at = key_at + case.kv_heads * d;
            let query = &turned[position][head * d..(head + 1) * d];
            let score = |key: &Vec<f64>| {
                let score = query.iter().zip(&key[key_at..]).map(|(q, k)| q * k).sum::<f64>();
                let score = score * f64::from(spec.scale);
                spec.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let scores: Vec<f64> = turned[first..=position].iter().map(score).collect();
            let max = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..d {
                let seen = turned[first..=position].iter().zip(&weights);
                out.push(seen.map(|(row, weight)| row[value_at + i] * weight).sum::<f64>() / sum);
            }
        }
    }
    out
}

#[test]
fn attention_matches_the_textbook_on_every_path() {
    let mut random = Random(17);
    let cases = [
        (Case { ..PLAIN }, 700),
        (Case { kv: KvType::F32, normed: true, ..PLAIN }, 130),
        (Case { heads: 3, kv_heads: 3, head_dim: 8, rotated: 4, ..PLAIN }, 70),
        (Case { heads: 8, kv_heads: 1, head_dim: 20, rotated: 20, window: Some(50), ..PLAIN }, 600),
        (Case { heads: 2, kv_heads: 1, head_dim: 64, rotated: 0, window: Some(1), ..PLAIN }, 65),
        (Case { heads: 4, kv_heads: 2, head_dim: 6, rotated: 6, window: Some(513), ..PLAIN }, 1100),
        (Case { softcap: Some(3.0), window: Some(90), rope_scale: 1.2, rotated: 12, ..PLAIN }, 300),
        (Case { softcap: Some(0.5), normed: true, whole: true, kv: KvType::F32, ..PLAIN }, 130),
        // Widths of heads that families have.
        (Case { head_dim: 64, rotated: 64, ..PLAIN }, 130),
        (Case { heads: 4, head_dim: 80, rotated: 80, window: Some(70), ..PLAIN }, 150),
        (Case { heads: 4, head_dim: 96, rotated: 72, ..PLAIN }, 130),
        (Case { heads: 4, head_dim: 128, rotated: 128, ..PLAIN }, 130),
        (Case { heads: 2, kv_heads: 1, head_dim: 256, rotated: 256, window: Some(65), ..PLAIN }, 140),
    ];
    for (case, tokens) in cases {
        let inputs: Vec<f32> = random.vector(tokens * case.width()).iter().map(|x| 3.0 * x).collect();
        let want = plain(&case, &inputs);
        let mut first: Option<Vec<u32>> = None;
        for path in paths() {
            let got = alone(&case, path, 2, &inputs, 256);
            assert_eq!(got.len(), want.len());
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                // Keys rounded to halves after f32 arithmetic may fall to the other side of a tie.
                assert!(error < 4e-3, "{} heads, value {index}: {got} {want}", case.heads);
            }
            let mean = got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).sum::<f64>()
                / want.len() as f64;
            assert!(mean < 2e-5, "{mean}");
            let got = bits(&got);
            assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{path:?}");
        }
    }
}

#[test]
fn chunks_and_threads_do_not_change_a_bit() {
    let mut random = Random(23);
    let fast = SimdPath::choose(None).unwrap();
    for (window, softcap, kv) in [
        (None, None, KvType::F16),
        (Some(100), None, KvType::F16),
        (Some(700), Some(2.0), KvType::F16),
        (None, None, KvType::F32),
    ] {
        let case = Case { window, softcap, kv, ..PLAIN };
        let inputs = random.vector(1100 * case.width());
        let whole = bits(&alone(&case, fast, 1, &inputs, 512));
        for (threads, chunk) in [(2, 1), (2, 7), (3, 64), (2, 512), (4, 1100)] {
            let chunked = alone(&case, fast, threads, &inputs, chunk);
            assert_eq!(bits(&chunked), whole, "chunks of {chunk}, window {window:?}");
        }
    }
}

/// Contexts that are cut among threads are merged from the very bits of their spans, the sign of zero included.
#[test]
fn a_context_cut_by_spans_gives_the_bits_of_one_that_is_not() {
    let case = Case { heads: 1, kv_heads: 1, rotated: 0, ..PLAIN };
    let token = |key: f32, value: f32| [1.0, key, value].into_iter().flat_map(|x| [x; 16]);
    // The last key alone counts, in a span after the first.
    let inputs: Vec<f32> = (0..576).flat_map(|_| token(-50.0, -1.0)).chain(token(0.0, -0.0)).collect();
    let mut random = Random(41);
    let other = random.vector(1100 * case.width());
    for path in paths() {
        for inputs in [&inputs, &other] {
            let whole = alone(&case, path, 1, inputs, 600);
            for (threads, chunk) in [(2, 600), (3, 600), (2, 100), (4, 1)] {
                let cut = alone(&case, path, threads, inputs, chunk);
                // Without the numbers: there are thousands.
                assert!(bits(&whole) == bits(&cut), "{threads} threads, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn a_row_in_a_mixed_batch_gives_the_bits_of_the_row_alone() {
    let mut random = Random(29);
    let lengths = [1, 600, 65, 64, 300, 129, 33, 520];
    for path in paths() {
        let case = Case { window: None, ..PLAIN };
        let inputs: Vec<Vec<f32>> = lengths.iter().map(|len| random.vector(len * case.width())).collect();
        let (mut ops, mut kv) = case.ops(path, 2);
        let spec = case.spec(&mut ops);
        let mut work: Vec<Work<'_>> = inputs
            .iter()
            .map(|inputs| Work { sequence: kv.open(None).unwrap(), inputs, outputs: vec![] })
            .collect();
        loop {
            let left: Vec<usize> = work
                .iter()
                .zip(&lengths)
                .map(|(work, len)| len - kv.len(work.sequence).unwrap() as usize)
                .collect();
            if left.iter().all(|left| *left == 0) {
                break;
            }
            let sizes: Vec<usize> =
                left.iter().map(|left| (*left).min([1, 7, 64, 200][random.below(4)])).collect();
            step(&mut ops, &mut kv, &case, &spec, &mut work, &sizes);
        }
        for (work, inputs) in work.iter().zip(&inputs) {
            let expected = alone(&case, path, 1, inputs, 512);
            assert_eq!(bits(&work.outputs), bits(&expected), "{} tokens", inputs.len() / case.width());
        }
    }
}

#[test]
fn a_fork_gives_the_bits_of_a_row_that_computed_its_prefix() {
    let mut random = Random(37);
    let case = Case { ..PLAIN };
    let path = SimdPath::choose(None).unwrap();
    let inputs = random.vector(200 * case.width());
    let expected = alone(&case, path, 1, &inputs, 512);
    for at in [1, 63, 64, 100, 128, 199] {
        let (mut ops, mut kv) = case.ops(path, 2);
        let spec = case.spec(&mut ops);
        let sequence = kv.open(None).unwrap();
        let mut work = [Work { sequence, inputs: &inputs, outputs: vec![] }];
        step(&mut ops, &mut kv, &case, &spec, &mut work, &[200]);
        let fork = kv.open(Some((sequence, at))).unwrap();
        kv.close(sequence);
        let mut work = [Work { sequence: fork, inputs: &inputs, outputs: vec![] }];
        step(&mut ops, &mut kv, &case, &spec, &mut work, &[200 - at as usize]);
        let width = case.heads * case.head_dim;
        assert_eq!(bits(&work[0].outputs), bits(&expected[at as usize * width..]), "forked at {at}");
    }
}

#[test]
fn what_lies_in_unused_slots_is_never_seen() {
    // Fill blocks with values that would poison any sum, give them back, and compute in them.
    let mut random = Random(43);
    let case = Case { ..PLAIN };
    let path = SimdPath::choose(None).unwrap();
    let inputs = random.vector(90 * case.width());
    let expected = alone(&case, path, 1, &inputs, 512);
    let (mut ops, mut kv) = case.ops(path, 2);
    let spec = case.spec(&mut ops);
    let poison = kv.open(None).unwrap();
    kv.reserve(poison, 128).unwrap();
    let bad = vec![f32::NAN; case.kv_heads * case.head_dim];
    for position in 0..128 {
        kv.write_token(poison, LayerId(1), position, &bad, &bad).unwrap();
    }
    kv.close(poison);
    let sequence = kv.open(None).unwrap();
    let mut work = [Work { sequence, inputs: &inputs, outputs: vec![] }];
    step(&mut ops, &mut kv, &case, &spec, &mut work, &[50]);
    step(&mut ops, &mut kv, &case, &spec, &mut work, &[40]);
    assert_eq!(bits(&work[0].outputs), bits(&expected));
}

#[test]
fn plans_that_break_a_rule_are_refused() {
    let case = Case { ..PLAIN };
    let (mut ops, mut kv) = case.ops(SimdPath::Portable, 1);
    let spec = case.spec(&mut ops);
    let sequence = kv.open(None).unwrap();
    kv.reserve(sequence, 64).unwrap();
    let mut refused = |rows: &[StepRow], tokens: usize, layer: usize| {
        let ids = vec![TokenId(0); tokens];
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let qkv = ops.tensor(tokens, &vec![0.5; tokens * case.width()]);
        let plan = Step { tokens: &ids, positions: &positions, rows };
        ops.attend(&mut kv, LayerId(layer), qkv, &spec, &plan).map(|_| ()).unwrap_err()
    };
    let row = StepRow { sequence, first: 0, len: 1, start: 0 };
    let invalid = |error: EngineError| assert!(matches!(error, EngineError::InvalidPlan { .. }), "{error}");
    invalid(refused(&[StepRow { len: 65, ..row }], 65, 0));
    invalid(refused(&[StepRow { start: 1, ..row }], 1, 0));
    invalid(refused(&[row, StepRow { first: 1, ..row }], 2, 0));
    invalid(refused(&[row], 2, 0));
    invalid(refused(&[row], 1, 2));
    invalid(refused(&[StepRow { len: 0, ..row }], 0, 0));
    let gone = SequenceId { number: 77, ..sequence };
    assert_eq!(
        refused(&[StepRow { sequence: gone, ..row }], 1, 0),
        EngineError::UnknownSequence { sequence: gone }
    );
}

#[test]
fn a_steady_step_allocates_no_buffer() {
    let case = Case { ..PLAIN };
    let (mut ops, mut kv) = case.ops(SimdPath::choose(None).unwrap(), 2);
    let spec = case.spec(&mut ops);
    let mut random = Random(47);
    let inputs = random.vector(40 * case.width());
    let sequence = kv.open(None).unwrap();
    let mut work = [Work { sequence, inputs: &inputs, outputs: vec![] }];
    step(&mut ops, &mut kv, &case, &spec, &mut work, &[1]);
    let before = ops.allocations();
    assert!(before > 0);
    for _ in 0..30 {
        step(&mut ops, &mut kv, &case, &spec, &mut work, &[1]);
    }
    assert_eq!(ops.allocations(), before);
}

/// Any shape of layer: whatever families may have.
fn cases() -> impl Strategy<Value = Case> {
    let heads = (1..=4_usize, 1..=3_usize, select(vec![6_usize, 8, 16, 20, 64, 96, 128]));
    let window = prop_oneof![Just(None), (1..=200_u32).prop_map(Some)];
    let softcap = prop_oneof![3 => Just(None), 1 => Just(Some(2.0_f32))];
    let kv = select(vec![KvType::F16, KvType::F32]);
    (heads, window, softcap, kv, any::<[bool; 3]>()).prop_map(
        |((group, kv_heads, head_dim), window, softcap, kv, [turned, normed, whole])| Case {
            heads: group * kv_heads,
            kv_heads,
            head_dim,
            window,
            rotated: if turned { head_dim } else { 0 },
            rope_scale: 1.0,
            normed,
            whole,
            softcap,
            kv,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, failure_persistence: None, ..ProptestConfig::default() })]

    /// A row, a fork of it and a stranger, in steps of any sizes, on any number of threads.
    #[test]
    fn any_layer_gives_the_textbook_and_the_same_bits_in_any_company(
        case in cases(),
        tokens in prop_oneof![2..=20_usize, 60..=140_usize],
        seed in 1..u64::MAX,
    ) {
        let mut random = Random(seed);
        let inputs = random.vector(tokens * case.width());
        let expected = alone(&case, SimdPath::Portable, 1, &inputs, tokens);
        let mut worst = 0.0_f64;
        for (got, want) in expected.iter().zip(plain(&case, &inputs)) {
            worst = worst.max((f64::from(*got) - want).abs());
        }
        prop_assert!(worst < 4e-3, "off by {}", worst);
        let width = case.heads * case.head_dim;
        for path in paths() {
            let threads = [1, 2, 3, 7][random.below(4)];
            let (mut ops, mut kv) = case.ops(path, threads);
            let spec = case.spec(&mut ops);
            let first = kv.open(None).unwrap();
            let at = 1 + random.below(tokens - 1);
            let mut work = vec![Work { sequence: first, inputs: &inputs, outputs: vec![] }];
            step(&mut ops, &mut kv, &case, &spec, &mut work, &[at]);
            let fork = kv.open(Some((first, at as u32))).unwrap();
            let other = random.vector(tokens * case.width());
            work.push(Work { sequence: fork, inputs: &inputs, outputs: vec![] });
            work.push(Work { sequence: kv.open(None).unwrap(), inputs: &other, outputs: vec![] });
            let mut left = [tokens - at, tokens - at, tokens];
            while left.iter().any(|left| *left > 0) {
                let sizes = left.map(|left| left.min([0, 1, 5, 64, 65, 150][random.below(6)]));
                if sizes.iter().sum::<usize>() == 0 {
                    continue;
                }
                step(&mut ops, &mut kv, &case, &spec, &mut work, &sizes);
                left.iter_mut().zip(sizes).for_each(|(left, size)| *left -= size);
            }
            prop_assert_eq!(bits(&work[0].outputs), bits(&expected), "{:?}, {} threads", path, threads);
            let shared = bits(&expected[at * width..]);
            prop_assert_eq!(bits(&work[1].outputs), shared, "{:?}, forked at {}", path, at);
            let other = bits(&alone(&case, SimdPath::Portable, 1, &other, tokens));
            prop_assert_eq!(bits(&work[2].outputs), other, "{:?}, beside others", path);
        }
    }
}
