//! Timings, printed and not judged: run with
//! `cargo test --release --no-default-features --features cpu --test cpu speed -- --ignored --nocapture`
//! on a machine that does nothing else.

use std::time::Instant;

use greenroom::config::{Activations, CpuConfig};
use greenroom::model::cpu::attention::Vector;
use greenroom::model::cpu::{CpuKv, CpuOps, PackedWeight, SimdPath};
use greenroom::model::load::TensorType;
use greenroom::model::ops::{
    Act, AttnSpec, KvShape, KvStore, LayerId, Norm, Ops, Rope, StartOps, Step, StepRow,
};
use greenroom::types::{Epoch, SequenceId, TokenId};

use super::Random;
use super::matrix::Matrix;

const LAYERS: usize = 30;
const HIDDEN: usize = 576;
const FFN: usize = 1536;
const VOCAB: usize = 49152;

/// Random weights in the demo model's shapes and types.
struct Model {
    qkv: Vec<PackedWeight>,
    o: Vec<PackedWeight>,
    gate_up: Vec<PackedWeight>,
    down: Vec<PackedWeight>,
    head: PackedWeight,
    norm: Norm<Vector>,
    spec: AttnSpec<Vector>,
}

impl Model {
    fn new(ops: &mut CpuOps) -> Self {
        let mut random = Random(1);
        let mut weight = |kind, rows, cols| {
            let matrix = Matrix::random(&mut random, kind, rows, cols);
            CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()]).unwrap()
        };
        let mut layers = |rows, cols| (0..LAYERS).map(|_| weight(TensorType::Q4_1, rows, cols)).collect();
        let (qkv, o, gate_up, down) =
            (layers(960, HIDDEN), layers(HIDDEN, HIDDEN), layers(2 * FFN, HIDDEN), layers(HIDDEN, FFN));
        let head = weight(TensorType::Q8_0, VOCAB, HIDDEN);
        let inv_freq: Vec<f32> = (0..32).map(|i| 10_000_f32.powf(-(i as f32) / 32.0)).collect();
        let spec = AttnSpec {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            scale: 0.125,
            softcap: None,
            window: None,
            rope: Some(Rope { inv_freq: ops.vector(&inv_freq).unwrap(), dims: 64, scale: 1.0 }),
            q_norm: None,
            k_norm: None,
        };
        let norm = Norm { weight: ops.vector(&[0.1; HIDDEN]).unwrap(), eps: 1e-5 };
        Self { qkv, o, gate_up, down, head, norm, spec }
    }

    fn bytes(&self) -> u64 {
        let layers = [&self.qkv, &self.o, &self.gate_up, &self.down];
        self.head.bytes()
            + layers.iter().flat_map(|weights| weights.iter()).map(PackedWeight::bytes).sum::<u64>()
    }

    /// One step of `len` tokens for each sequence; gives the seconds of attention alone.
    fn step(&self, ops: &mut CpuOps, kv: &mut CpuKv, sequences: &[SequenceId], len: usize) -> f64 {
        let mut rows = vec![];
        let mut positions = vec![];
        for sequence in sequences {
            let start = kv.len(*sequence).unwrap();
            kv.reserve(*sequence, start + len as u32).unwrap();
            rows.push(StepRow { sequence: *sequence, first: positions.len(), len, start });
            positions.extend(start..start + len as u32);
        }
        let tokens = vec![TokenId(17); positions.len()];
        let step = Step { tokens: &tokens, positions: &positions, rows: &rows };
        let mut attention = 0.0;
        let mut x = ops.embed(&self.head, &step).unwrap();
        for layer in 0..LAYERS {
            let qkv = ops.norm_linear(&x, &self.norm, &self.qkv[layer]).unwrap();
            let begin = Instant::now();
            let attended = ops.attend(kv, LayerId(layer), qkv, &self.spec, &step).unwrap();
            attention += begin.elapsed().as_secs_f64();
            x = ops.linear_add(attended, &self.o[layer], x).unwrap();
            let gate_up = ops.norm_linear(&x, &self.norm, &self.gate_up[layer]).unwrap();
            let gated = ops.glu(gate_up, Act::Silu).unwrap();
            x = ops.linear_add(gated, &self.down[layer], x).unwrap();
        }
        let last: Vec<usize> = rows.iter().map(|row| row.first + row.len - 1).collect();
        let logits = ops.head(&x, &self.norm, &self.head, &last).unwrap();
        assert_eq!(logits.data.len(), last.len() * VOCAB);
        for sequence in sequences {
            let len = kv.len(*sequence).unwrap() + len as u32;
            kv.commit(*sequence, len).unwrap();
        }
        attention
    }
}

#[test]
#[ignore = "prints timings; wants a quiet machine and a release build"]
fn speed_of_a_model_like_the_demo() {
    let start = StartOps {
        epoch: Epoch(0),
        kv: KvShape { layers: LAYERS, kv_heads: 3, head_dim: 64 },
        kv_budget_bytes: 2 << 30,
        context: 8192,
    };
    let (mut ops, mut kv) = CpuOps::start(&CpuConfig::default(), &start).unwrap();
    let model = Model::new(&mut ops);
    println!("{}; {:.1} MB of weights", ops.device(), model.bytes() as f64 / 1e6);
    for (rows, context, len, repeats) in
        [(1, 0, 1, 60), (1, 1000, 1, 30), (1, 4000, 1, 20), (4, 100, 1, 20), (8, 100, 1, 20), (1, 0, 512, 2)]
    {
        let sequences: Vec<_> = (0..rows).map(|_| kv.open(None).unwrap()).collect();
        let mut left = context;
        while left > 0 {
            model.step(&mut ops, &mut kv, &sequences, left.min(500));
            left -= left.min(500);
        }
        let mut best = (f64::INFINITY, 0.0);
        for _ in 0..repeats {
            let begin = Instant::now();
            let attention = model.step(&mut ops, &mut kv, &sequences, len);
            let seconds = begin.elapsed().as_secs_f64();
            if seconds < best.0 {
                best = (seconds, attention);
            }
        }
        let tokens = (rows * len) as f64;
        println!(
            "{rows} rows of {len} after {context}: {:.2} ms, {:.0} tokens/s, {:.1} GB/s of weights, attention {:.2} ms",
            best.0 * 1e3,
            tokens / best.0,
            model.bytes() as f64 / best.0 / 1e9,
            best.1 * 1e3,
        );
        sequences.into_iter().for_each(|sequence| kv.close(sequence));
    }
}

#[test]
#[ignore = "prints timings; wants a quiet machine and a release build"]
fn speed_of_products_by_type() {
    let (rows, cols) = (4096, 4096);
    let mut random = Random(3);
    let kinds = [
        TensorType::Q4_1,
        TensorType::Q8_0,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q4K,
        TensorType::Q5K,
        TensorType::Q6K,
    ];
    for kind in kinds {
        let matrix = Matrix::random(&mut random, kind, rows, cols);
        let packed = CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()]).unwrap();
        for activations in [Activations::Int8, Activations::F32] {
            let mut config = CpuConfig::default();
            config.activations = activations;
            let (mut ops, _kv) = super::ops(&config, SimdPath::from_env().unwrap());
            for tokens in [1, 2, 8, 64] {
                let x = random.vector(tokens * cols);
                let mut best = f64::INFINITY;
                for _ in 0..if tokens == 64 { 8 } else { 40 } {
                    let (x, zeros) = (ops.tensor(tokens, &x), ops.tensor(tokens, &vec![0.0; tokens * rows]));
                    let begin = Instant::now();
                    ops.linear_add(x, &packed, zeros).unwrap();
                    best = best.min(begin.elapsed().as_secs_f64());
                }
                println!(
                    "{:>5} {activations:?} {tokens:>2} tokens: {:7.2} ms, {:5.1} GB/s of {:.1} MB, {:6.1} G multiply-adds/s",
                    kind.describe(),
                    best * 1e3,
                    packed.bytes() as f64 / best / 1e9,
                    packed.bytes() as f64 / 1e6,
                    (rows * cols * tokens) as f64 / best / 1e9,
                );
            }
        }
    }
}
