//! The MLX backend on MLX's CPU device: each operator against plain loops on random
//! shapes, key-value forks, the budget of graph nodes, streams over many lives.
#![cfg(feature = "mlx")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use greenroom::model::load::{HostTensor, MetaType, RowOrder, TensorType};
use greenroom::model::mlx::native::graph_operations;
use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};
use greenroom::model::ops::{
    Act, AttnSpec, KvShape, KvStore, LayerId, Norm, Ops, Rope, StartOps, Step, StepRow,
};
use greenroom::model::plain::{Matrix, PlainOps};
use greenroom::types::{EngineError, Epoch, SequenceId, TokenId};

/// Pseudo-random numbers that are the same on every machine.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// In −1..1.
    fn unit(&mut self) -> f32 {
        (self.next() % 20_001) as f32 / 10_000.0 - 1.0
    }

    fn upto(&mut self, most: usize) -> usize {
        1 + (self.next() as usize) % most
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }
}

/// A tensor's bytes, owned, so that it can be lent as a [`HostTensor`].
struct Owned {
    rows: usize,
    cols: usize,
    kind: TensorType,
    data: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Owned {
    fn dense(numbers: &mut Numbers, rows: usize, cols: usize) -> Self {
        let data = numbers.floats(rows * cols).iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { rows, cols, kind: TensorType::F32, data, scales: Vec::new(), biases: Vec::new() }
    }

    /// GGUF blocks of 32: f16 scale (and minimum), then random codes.
    fn blocks(numbers: &mut Numbers, kind: TensorType, rows: usize, cols: usize) -> Self {
        let (halves, codes) = match kind {
            TensorType::Q4_0 => (1, 16),
            TensorType::Q4_1 => (2, 16),
            TensorType::Q8_0 => (1, 32),
            other => panic!("{other:?} has no blocks"),
        };
        let mut data = Vec::new();
        for _ in 0..rows * cols / 32 {
            for _ in 0..halves {
                data.extend(half::f16::from_f32(0.02 * numbers.unit()).to_le_bytes());
            }
            data.extend((0..codes).map(|_| numbers.next() as u8));
        }
        Self { rows, cols, kind, data, scales: Vec::new(), biases: Vec::new() }
    }

    fn affine(numbers: &mut Numbers, bits: u8, group: u16, rows: usize, cols: usize) -> Self {
        let data = (0..rows * cols * usize::from(bits) / 8).map(|_| numbers.next() as u8).collect();
        let groups = rows * cols / usize::from(group);
        let mut meta = |scale: f32| -> Vec<u8> {
            (0..groups).flat_map(|_| half::bf16::from_f32(scale * numbers.unit()).to_le_bytes()).collect()
        };
        let (scales, biases) = (meta(0.02), meta(0.2));
        let kind = TensorType::Affine { bits, group, meta: MetaType::BF16 };
        Self { rows, cols, kind, data, scales, biases }
    }

    fn lend(&self) -> HostTensor<'_> {
        HostTensor {
            name: "w",
            rows: self.rows,
            cols: self.cols,
            kind: self.kind,
            data: &self.data,
            scales: &self.scales,
            biases: &self.biases,
            order: RowOrder::Plain,
        }
    }
}

const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 2, head_dim: 8 };

fn begin(shape: KvShape, budget: u64) -> StartOps {
    StartOps { epoch: Epoch(1), kv: shape, kv_budget_bytes: budget, context: 4096 }
}

fn config(dequantize: bool) -> MlxConfig {
    MlxConfig { device: MlxDevice::Cpu, activations: MlxType::F32, dequantize }
}

fn mlx(dequantize: bool) -> (MlxOps, <MlxOps as Ops>::Kv) {
    MlxOps::start(&config(dequantize), &begin(SHAPE, u64::MAX)).unwrap()
}

fn plain() -> (PlainOps, <PlainOps as Ops>::Kv) {
    PlainOps::start(&Default::default(), &begin(SHAPE, u64::MAX)).unwrap()
}

fn array(values: &[f32], cols: usize) -> mlx_rs::Array {
    mlx_rs::Array::from_slice(values, &[(values.len() / cols) as i32, cols as i32])
}

fn matrix(values: &[f32], cols: usize) -> Matrix {
    Matrix { rows: values.len() / cols, cols, data: values.to_vec() }
}

#[track_caller]
fn assert_close(ours: &mlx_rs::Array, expected: &[f32], what: &str) {
    let ours = ours.contiguous().unwrap();
    let ours = ours.try_as_slice::<f32>().unwrap();
    assert_eq!(ours.len(), expected.len(), "{what}: lengths");
    let largest = ours.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-4, "{what}: largest difference {largest}");
}

/// Weights of every kind, stacked as families stack them: one format, and mixed.
fn weights(numbers: &mut Numbers, cols: usize) -> Vec<(&'static str, Vec<Owned>)> {
    let mut rows = || numbers.upto(40);
    let sizes: Vec<usize> = (0..9).map(|_| rows()).collect();
    vec![
        ("f32", vec![Owned::dense(numbers, sizes[0], cols), Owned::dense(numbers, sizes[1], cols)]),
        ("q4_0", vec![Owned::blocks(numbers, TensorType::Q4_0, sizes[2], cols)]),
        (
            "q4_1",
            vec![
                Owned::blocks(numbers, TensorType::Q4_1, sizes[3], cols),
                Owned::blocks(numbers, TensorType::Q4_1, sizes[4], cols),
            ],
        ),
        ("q8_0", vec![Owned::blocks(numbers, TensorType::Q8_0, sizes[5], cols)]),
        ("affine 4 by 64", vec![Owned::affine(numbers, 4, 64, sizes[6], cols)]),
        ("affine 8 by 32", vec![Owned::affine(numbers, 8, 32, sizes[7], cols)]),
        (
            "mixed",
            vec![
                Owned::blocks(numbers, TensorType::Q4_1, sizes[0], cols),
                Owned::blocks(numbers, TensorType::Q8_0, sizes[1], cols),
                Owned::dense(numbers, sizes[8], cols),
            ],
        ),
    ]
}

#[test]
fn products_equal_plain_loops() {
    let mut numbers = Numbers(1);
    for round in 0..4 {
        let (cols, tokens) = (64 * numbers.upto(3), numbers.upto(7));
        for dequantize in [true, false] {
            let (mut ours, _) = mlx(dequantize);
            let (mut theirs, _) = plain();
            let x = numbers.floats(tokens * cols);
            let norm = numbers.floats(cols);
            let our_norm = Norm { weight: ours.vector(&norm).unwrap(), eps: 1e-5 };
            let their_norm = Norm { weight: theirs.vector(&norm).unwrap(), eps: 1e-5 };
            for (kind, parts) in weights(&mut numbers, cols) {
                let what = format!("round {round}, {kind}, {tokens} × {cols}, dequantize {dequantize}");
                let lent: Vec<_> = parts.iter().map(Owned::lend).collect();
                let w = ours.adopt(MlxOps::pack(&config(dequantize), &lent).unwrap()).unwrap();
                let v = theirs.adopt(PlainOps::pack(&Default::default(), &lent).unwrap()).unwrap();
                let rows: usize = parts.iter().map(|part| part.rows).sum();
                let expected = theirs.norm_linear(&matrix(&x, cols), &their_norm, &v).unwrap();
                assert_close(
                    &ours.norm_linear(&array(&x, cols), &our_norm, &w).unwrap(),
                    &expected.data,
                    &what,
                );
                let residual = numbers.floats(tokens * rows);
                let expected = theirs.linear_add(matrix(&x, cols), &v, matrix(&residual, rows)).unwrap();
                let sum = ours.linear_add(array(&x, cols), &w, array(&residual, rows)).unwrap();
                assert_close(&sum, &expected.data, &what);
                let wanted = [tokens - 1, 0];
                let expected = theirs.head(&matrix(&x, cols), &their_norm, &v, &wanted).unwrap();
                let logits = ours.head(&array(&x, cols), &our_norm, &w, &wanted).unwrap();
                assert_eq!(logits.vocab, rows);
                assert_close(&array(&logits.data, rows), &expected.data, &what);
            }
        }
    }
}

#[test]
fn embeddings_and_gates_equal_plain_loops() {
    let mut numbers = Numbers(2);
    let tokens: Vec<TokenId> = [3, 0, 3, 15].map(TokenId).to_vec();
    let positions = [0, 1, 2, 3];
    let sequence = SequenceId { epoch: Epoch(1), number: 0 };
    let rows = [StepRow { sequence, first: 0, len: 4, start: 0 }];
    let step = Step { tokens: &tokens, positions: &positions, rows: &rows };
    for dequantize in [true, false] {
        let (mut ours, _) = mlx(dequantize);
        let (mut theirs, _) = plain();
        for table in [
            Owned::dense(&mut numbers, 16, 64),
            Owned::blocks(&mut numbers, TensorType::Q8_0, 16, 64),
            Owned::affine(&mut numbers, 4, 64, 16, 64),
        ] {
            let w = ours.adopt(MlxOps::pack(&config(dequantize), &[table.lend()]).unwrap()).unwrap();
            let v = theirs.adopt(PlainOps::pack(&Default::default(), &[table.lend()]).unwrap()).unwrap();
            let expected = theirs.embed(&v, &step).unwrap();
            assert_close(&ours.embed(&w, &step).unwrap(), &expected.data, "embedding");
        }
        for act in [Act::Silu, Act::GeluTanh, Act::Gelu] {
            let x: Vec<f32> = numbers.floats(5 * 48).iter().map(|value| 6.0 * value).collect();
            let expected = theirs.glu(matrix(&x, 48), act).unwrap();
            assert_close(&ours.glu(array(&x, 48), act).unwrap(), &expected.data, "gate");
        }
    }
}

#[test]
fn what_stands_between_products_equals_plain_loops() {
    let mut numbers = Numbers(7);
    let (mut ours, _) = mlx(true);
    let (mut theirs, _) = plain();
    let (x, residual) = (numbers.floats(5 * 24), numbers.floats(5 * 24));
    let (norm, bias) = (numbers.floats(24), numbers.floats(24));
    let our_norm = Norm { weight: ours.vector(&norm).unwrap(), eps: 1e-5 };
    let their_norm = Norm { weight: theirs.vector(&norm).unwrap(), eps: 1e-5 };
    for (normed, by) in [(false, 1.0), (false, 0.3), (true, 1.0), (true, 0.3)] {
        let norm = normed.then_some(&their_norm);
        let expected = theirs.add_residual(matrix(&x, 24), norm, by, matrix(&residual, 24)).unwrap();
        let norm = normed.then_some(&our_norm);
        let sum = ours.add_residual(array(&x, 24), norm, by, array(&residual, 24)).unwrap();
        assert_close(&sum, &expected.data, &format!("residual, normed {normed}, by {by}"));
    }
    let expected = theirs.scale(matrix(&x, 24), 25.25).unwrap();
    assert_close(&ours.scale(array(&x, 24), 25.25).unwrap(), &expected.data, "scale");
    let (ours_bias, theirs_bias) = (ours.vector(&bias).unwrap(), theirs.vector(&bias).unwrap());
    let expected = theirs.add_bias(matrix(&x, 24), &theirs_bias).unwrap();
    assert_close(&ours.add_bias(array(&x, 24), &ours_bias).unwrap(), &expected.data, "bias");
    let tensor = Owned::dense(&mut numbers, 10, 24);
    let w = ours.adopt(MlxOps::pack(&config(true), &[tensor.lend()]).unwrap()).unwrap();
    let v = theirs.adopt(PlainOps::pack(&Default::default(), &[tensor.lend()]).unwrap()).unwrap();
    let expected = theirs.linear(&matrix(&x, 24), &v).unwrap();
    assert_close(&ours.linear(&array(&x, 24), &w).unwrap(), &expected.data, "product");
}

fn attention<O: Ops>(ops: &mut O, options: Options) -> AttnSpec<O::V> {
    let inv_freq: Vec<f32> = (0..options.rotated / 2).map(|i| 0.5f32.powi(i as i32)).collect();
    let head_norm = |ops: &mut O, heads: usize| {
        let width = SHAPE.head_dim * if options.whole { heads } else { 1 };
        let norm: Vec<f32> = (0..width).map(|i| 0.5 + (i % 11) as f32 / 8.0).collect();
        options.norms.then(|| Norm { weight: ops.vector(&norm).unwrap(), eps: 1e-6 })
    };
    AttnSpec {
        heads: 4,
        kv_heads: SHAPE.kv_heads,
        head_dim: SHAPE.head_dim,
        scale: 0.35,
        softcap: options.softcap,
        window: options.window,
        q_norm: head_norm(ops, 4),
        k_norm: head_norm(ops, SHAPE.kv_heads),
        rope: (options.rotated > 0).then(|| Rope {
            inv_freq: ops.vector(&inv_freq).unwrap(),
            dims: options.rotated,
            scale: options.scale,
        }),
    }
}

#[derive(Clone, Copy, Debug)]
struct Options {
    window: Option<u32>,
    rotated: usize,
    /// Of what is rotated.
    scale: f32,
    norms: bool,
    /// Norms take all heads as one.
    whole: bool,
    softcap: Option<f32>,
}

const USUAL: Options =
    Options { window: None, rotated: 8, scale: 1.0, norms: false, whole: false, softcap: None };

/// Feeds two sequences in ragged steps to both backends and compares every output.
fn compare_attention(options: Options, numbers: &mut Numbers) {
    let (mut ours, mut our_kv) = mlx(true);
    let (mut theirs, mut their_kv) = plain();
    let our_spec = attention(&mut ours, options);
    let their_spec = attention(&mut theirs, options);
    let open = [our_kv.open(None).unwrap(), our_kv.open(None).unwrap()];
    assert_eq!(open, [their_kv.open(None).unwrap(), their_kv.open(None).unwrap()]);
    let width = (our_spec.heads + 2 * our_spec.kv_heads) * our_spec.head_dim;
    let mut lengths = [0u32; 2];
    for lens in [[7usize, 1], [1, 5], [1, 1], [30, 1], [3, 300], [1, 1]] {
        let (mut rows, mut positions) = (Vec::new(), Vec::new());
        for (at, len) in lens.into_iter().enumerate() {
            rows.push(StepRow { sequence: open[at], first: positions.len(), len, start: lengths[at] });
            positions.extend(lengths[at]..lengths[at] + len as u32);
            lengths[at] += len as u32;
            our_kv.reserve(open[at], lengths[at]).unwrap();
            their_kv.reserve(open[at], lengths[at]).unwrap();
        }
        let tokens = vec![TokenId(0); positions.len()];
        let step = Step { tokens: &tokens, positions: &positions, rows: &rows };
        let qkv = numbers.floats(tokens.len() * width);
        let expected =
            theirs.attend(&mut their_kv, LayerId(0), matrix(&qkv, width), &their_spec, &step).unwrap();
        let out = ours.attend(&mut our_kv, LayerId(0), array(&qkv, width), &our_spec, &step).unwrap();
        assert_close(&out, &expected.data, &format!("{options:?} {lens:?}"));
        for (at, sequence) in open.into_iter().enumerate() {
            our_kv.commit(sequence, lengths[at]).unwrap();
            their_kv.commit(sequence, lengths[at]).unwrap();
        }
    }
}

#[test]
fn attention_equals_plain_loops() {
    let mut numbers = Numbers(3);
    for window in [None, Some(1), Some(4), Some(64)] {
        for (rotated, norms) in [(8, false), (8, true), (4, false), (0, true), (0, false)] {
            compare_attention(Options { window, rotated, norms, ..USUAL }, &mut numbers);
        }
        for (rotated, softcap) in [(8, None), (4, Some(0.5)), (0, Some(2.0))] {
            let options = Options { window, rotated, scale: 1.5, norms: true, whole: true, softcap };
            compare_attention(options, &mut numbers);
            compare_attention(Options { norms: false, whole: false, ..options }, &mut numbers);
        }
    }
}

/// One sequence's attention over `qkv`, appended at `start`.
fn append(
    ops: &mut MlxOps,
    kv: &mut <MlxOps as Ops>::Kv,
    id: SequenceId,
    start: u32,
    qkv: &[f32],
) -> Vec<f32> {
    let spec = attention(ops, USUAL);
    let width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim;
    let len = qkv.len() / width;
    let end = start + len as u32;
    kv.reserve(id, end).unwrap();
    let positions: Vec<u32> = (start..end).collect();
    let tokens = vec![TokenId(0); len];
    let rows = [StepRow { sequence: id, first: 0, len, start }];
    let step = Step { tokens: &tokens, positions: &positions, rows: &rows };
    let out = ops.attend(kv, LayerId(0), array(qkv, width), &spec, &step).unwrap();
    let values = out.contiguous().unwrap().try_as_slice::<f32>().unwrap().to_vec();
    kv.commit(id, end).unwrap();
    values
}

#[test]
fn a_fork_shares_its_prefix_and_nothing_else() {
    let mut numbers = Numbers(4);
    let (mut ops, mut kv) = mlx(true);
    let width = 8 * 8;
    let prefix = numbers.floats(20 * width);
    let (left, right) = (numbers.floats(3 * width), numbers.floats(3 * width));
    let original = kv.open(None).unwrap();
    append(&mut ops, &mut kv, original, 0, &prefix);
    let fork = kv.open(Some((original, 12))).unwrap();
    assert_eq!(kv.len(fork).unwrap(), 12);
    let on_fork = append(&mut ops, &mut kv, fork, 12, &right);
    let on_original = append(&mut ops, &mut kv, original, 20, &left);
    let cold = kv.open(None).unwrap();
    append(&mut ops, &mut kv, cold, 0, &prefix[..12 * width]);
    assert_eq!(append(&mut ops, &mut kv, cold, 12, &right), on_fork);
    kv.truncate(cold, 0).unwrap();
    append(&mut ops, &mut kv, cold, 0, &prefix);
    assert_eq!(append(&mut ops, &mut kv, cold, 20, &left), on_original);
}

#[test]
fn two_engines_of_a_thread_share_its_stream_and_outlive_each_other() {
    let mut numbers = Numbers(6);
    let (mut first, mut first_kv) = mlx(true);
    let (mut second, mut second_kv) = mlx(true);
    let width = 8 * 8;
    let qkv = numbers.floats(5 * width);
    let id = second_kv.open(None).unwrap();
    let expected = append(&mut second, &mut second_kv, id, 0, &qkv);
    drop((second_kv, second));
    // Another thread takes a stream while the first engine goes on.
    let other = std::thread::spawn(move || {
        let (mut ops, mut kv) = mlx(true);
        let id = kv.open(None).unwrap();
        append(&mut ops, &mut kv, id, 0, &qkv)
    });
    let id = first_kv.open(None).unwrap();
    let again = Numbers(6).floats(5 * width);
    assert_eq!(append(&mut first, &mut first_kv, id, 0, &again), expected);
    assert_eq!(other.join().unwrap(), expected);
}

#[test]
fn memory_is_counted_and_bounded() {
    let per_token = 2 * 2 * 8 * 4;
    let start = begin(SHAPE, 3 * 256 * per_token);
    let (_ops, mut kv) = MlxOps::start(&config(true), &start).unwrap();
    assert_eq!(kv.stats().bytes_per_token, per_token);
    let first = kv.open(None).unwrap();
    kv.reserve(first, 300).unwrap();
    assert_eq!(kv.stats().used_bytes, 384 * per_token);
    let second = kv.open(None).unwrap();
    kv.reserve(second, 256).unwrap();
    let third = kv.open(None).unwrap();
    let refused = kv.reserve(third, 200);
    assert_eq!(refused, Err(EngineError::KvFull { need: 256 * per_token, free: 128 * per_token }));
    assert!(matches!(kv.reserve(first, 5000), Err(EngineError::InvalidPlan { .. })));
    kv.truncate(first, 0).unwrap();
    assert_eq!(kv.stats().used_bytes, 256 * per_token, "a shortened row gives its memory back");
    kv.reserve(first, 300).unwrap();
    kv.close(second);
    kv.reserve(third, 200).unwrap();
    kv.close(first);
    kv.close(third);
    assert_eq!(kv.stats().used_bytes, 0);
    assert!(matches!(kv.len(third), Err(EngineError::UnknownSequence { .. })));
    let stale = SequenceId { epoch: Epoch(0), number: 0 };
    assert!(matches!(kv.len(stale), Err(EngineError::StaleEpoch { .. })));
}

#[test]
fn a_layer_stays_within_its_budget_of_graph_nodes() {
    let mut numbers = Numbers(5);
    let (mut ops, mut kv) = mlx(true);
    let spec = attention(&mut ops, USUAL);
    let norm = Norm { weight: ops.vector(&numbers.floats(32)).unwrap(), eps: 1e-5 };
    let mut weight = |ops: &mut MlxOps, rows, cols| {
        let tensor = Owned::dense(&mut numbers, rows, cols);
        ops.adopt(MlxOps::pack(&config(true), &[tensor.lend()]).unwrap()).unwrap()
    };
    let qkv = weight(&mut ops, 64, 32);
    let output = weight(&mut ops, 32, 32);
    let gate_up = weight(&mut ops, 128, 32);
    let down = weight(&mut ops, 32, 64);
    let id = kv.open(None).unwrap();
    kv.reserve(id, 8).unwrap();
    let rows = [StepRow { sequence: id, first: 0, len: 1, start: 0 }];
    let step = Step { tokens: &[TokenId(0)], positions: &[0], rows: &rows };
    let x = array(&[0.5; 32], 32);
    x.eval().unwrap();
    let mut layer = |ops: &mut MlxOps| {
        let heads = ops.norm_linear(&x, &norm, &qkv).unwrap();
        let attended = ops.attend(&mut kv, LayerId(0), heads, &spec, &step).unwrap();
        let x = ops.linear_add(attended, &output, x.clone()).unwrap();
        let wide = ops.norm_linear(&x, &norm, &gate_up).unwrap();
        let gated = ops.glu(wide, Act::Silu).unwrap();
        let out = ops.linear_add(gated, &down, x).unwrap();
        let nodes = graph_operations(std::slice::from_ref(&out)).unwrap();
        out.eval().unwrap();
        nodes
    };
    layer(&mut ops);
    let nodes = layer(&mut ops);
    println!("{nodes} graph nodes a layer for one decoding row");
    // On the CPU device MLX composes norm, rope and attention from parts, which Metal runs as
    // one node each: this count is the upper end.
    assert!((20..=90).contains(&nodes), "{nodes} nodes");
}

/// Threads of this process, where the system tells.
fn threads() -> Option<usize> {
    std::fs::read_dir("/proc/self/task").ok().map(Iterator::count)
}

#[test]
fn many_lives_share_one_stream() {
    let live = || {
        std::thread::spawn(|| {
            let (mut ops, mut kv) = mlx(true);
            let id = kv.open(None).unwrap();
            append(&mut ops, &mut kv, id, 0, &[0.25; 64 * 3]);
        })
        .join()
        .unwrap();
    };
    live();
    let Some(before) = threads() else { return };
    for _ in 0..10 {
        live();
    }
    let after = threads().unwrap();
    // Other tests of this file start and end threads meanwhile, none of them eight.
    assert!(after <= before + 8, "{before} threads became {after}");
}
