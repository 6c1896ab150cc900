//! Attention: one token of each row after a context, and a chunk of a prompt. Norms and ropes of heads and the writing of keys
//! and values are inside, as they are in a step. Layers take turns, so that caches hold no more than in a step.

use greenroom::model::cpu::attention::Vector;
use greenroom::model::cpu::{CpuKv, CpuOps};
use greenroom::model::ops::{AttnSpec, KvStore, LayerId, Ops, Rope, Step, StepRow};
use greenroom::types::{SequenceId, TokenId};

use super::{Bench, Failed, HEAD_DIM, HEADS, KV_HEADS, LAYERS, Random, Work};

/// Tokens that are written at a time before the measurement.
const CHUNK: usize = 500;
/// Columns of queries, keys and values.
const WIDTH: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

/// Rows after their contexts, and what attends now.
struct Attention {
    spec: AttnSpec<Vector>,
    qkv: Vec<f32>,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    rows: Vec<StepRow>,
    layer: usize,
}

pub(super) fn all(bench: &mut Bench) -> Result<(), Failed> {
    for rows in [1, 8] {
        for context in [100, 1000, 4000] {
            one(bench, &format!("{rows} rows after {context}"), rows, context, 1)?;
        }
    }
    one(bench, "prompt of 512", 1, 0, 512)
}

fn one(bench: &mut Bench, name: &str, rows: usize, context: usize, len: usize) -> Result<(), Failed> {
    let mut opened = vec![];
    bench.measure(
        "attention",
        name,
        |ops, kv| {
            for _ in 0..rows {
                opened.push(filled(ops, kv, context, len)?);
            }
            let attention = now(ops, &opened, context, len)?;
            // Keys and values of two bytes, which all heads of a group share.
            let bytes = 2 * 2 * rows * (context + len) * KV_HEADS * HEAD_DIM;
            let seen: usize = (context + 1..=context + len).sum();
            let work = Work {
                bytes: if len == 1 { bytes as u64 } else { 0 },
                f32: (2 * rows * seen * HEADS * HEAD_DIM) as u64,
                ..Work::default()
            };
            Ok((attention, work))
        },
        |ops, kv, attention| {
            attention.layer = (attention.layer + 1) % LAYERS;
            let step =
                Step { tokens: &attention.tokens, positions: &attention.positions, rows: &attention.rows };
            let qkv = ops.tensor(attention.tokens.len(), &attention.qkv);
            ops.attend(kv, LayerId(attention.layer), qkv, &attention.spec, &step)?;
            Ok(())
        },
    )?;
    opened.into_iter().for_each(|sequence| bench.kv.close(sequence));
    Ok(())
}

fn spec(ops: &mut CpuOps, window: Option<u32>) -> Result<AttnSpec<Vector>, Failed> {
    let inv_freq: Vec<f32> =
        (0..HEAD_DIM / 2).map(|i| 10_000_f32.powf(-2.0 * i as f32 / HEAD_DIM as f32)).collect();
    Ok(AttnSpec {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        softcap: None,
        window,
        rope: Some(Rope { inv_freq: ops.vector(&inv_freq)?, dims: HEAD_DIM, scale: 1.0 }),
        q_norm: None,
        k_norm: None,
    })
}

/// A sequence with `context` tokens in all layers and room for `len` more.
fn filled(ops: &mut CpuOps, kv: &mut CpuKv, context: usize, len: usize) -> Result<SequenceId, Failed> {
    let sequence = kv.open(None)?;
    kv.reserve(sequence, (context + len) as u32)?;
    // Nothing is asked of the past here, and a window spares its reading.
    let spec = spec(ops, Some(1))?;
    let mut random = Random(7 + context as u64);
    for start in (0..context).step_by(CHUNK) {
        let count = CHUNK.min(context - start);
        let tokens = vec![TokenId(17); count];
        let positions: Vec<u32> = (start as u32..(start + count) as u32).collect();
        let rows = [StepRow { sequence, first: 0, len: count, start: start as u32 }];
        let values = random.vector(count * WIDTH);
        for layer in 0..LAYERS {
            let step = Step { tokens: &tokens, positions: &positions, rows: &rows };
            let qkv = ops.tensor(count, &values);
            ops.attend(kv, LayerId(layer), qkv, &spec, &step)?;
        }
        kv.commit(sequence, (start + count) as u32)?;
    }
    Ok(sequence)
}

/// The step that is measured; it is never committed, so it can be done again and again.
fn now(ops: &mut CpuOps, sequences: &[SequenceId], context: usize, len: usize) -> Result<Attention, Failed> {
    let rows: Vec<StepRow> = sequences
        .iter()
        .enumerate()
        .map(|(row, sequence)| StepRow { sequence: *sequence, first: row * len, len, start: context as u32 })
        .collect();
    let count = sequences.len() * len;
    let positions =
        sequences.iter().flat_map(|_| context as u32..(context + len) as u32).collect::<Vec<u32>>();
    Ok(Attention {
        spec: spec(ops, None)?,
        qkv: Random(11).vector(count * WIDTH),
        tokens: vec![TokenId(17); count],
        positions,
        rows,
        layer: 0,
    })
}
