//! What touches each value once: norms, gated units, embedding, and the choice of a token.

use std::sync::Arc;

use greenroom::config::CpuConfig;
use greenroom::model::SampleFor;
use greenroom::model::cpu::CpuOps;
use greenroom::model::load::TensorType;
use greenroom::model::ops::{Act, Norm, Ops, Step};
use greenroom::model::sampler::Sampler;
use greenroom::types::{SamplingParams, TokenId};

use super::matrix::Matrix;
use super::{Bench, Failed, Random, Work};

/// Width of the demo model, of its gated unit, and its vocabulary.
const WIDTH: usize = 576;
const GATED: usize = 1536;
const VOCAB: usize = 49_152;

pub(super) fn all(bench: &mut Bench) -> Result<(), Failed> {
    for tokens in [1, 512] {
        norm(bench, tokens)?;
        glu(bench, tokens)?;
        embed(bench, tokens)?;
    }
    sample(bench, "greedy", 0.0, 0)?;
    sample(bench, "top-k 40", 0.8, 40)
}

/// f32 values in and out, in bytes.
fn bytes(values: usize) -> Work {
    Work { bytes: 4 * values as u64, ..Work::default() }
}

/// A norm, added to the residual stream. Both inputs are copied into the arena in each call, which is part of the figure.
fn norm(bench: &mut Bench, tokens: usize) -> Result<(), Failed> {
    bench.measure(
        "norm and add",
        &format!("{tokens} tokens"),
        |ops, _| {
            let norm = Norm { weight: ops.vector(&[0.1; WIDTH])?, eps: 1e-5 };
            Ok(((norm, Random(13).vector(tokens * WIDTH)), bytes(3 * tokens * WIDTH)))
        },
        |ops, _, (norm, values)| {
            let (x, residual) = (ops.tensor(tokens, values), ops.tensor(tokens, values));
            ops.add_residual(x, Some(norm), 1.0, residual)?;
            Ok(())
        },
    )
}

fn glu(bench: &mut Bench, tokens: usize) -> Result<(), Failed> {
    bench.measure(
        "gated unit",
        &format!("{tokens} tokens"),
        |_, _| Ok((Random(13).vector(2 * tokens * GATED), bytes(3 * tokens * GATED))),
        |ops, _, values| {
            let x = ops.tensor(tokens, values);
            ops.glu(x, Act::Silu)?;
            Ok(())
        },
    )
}

fn embed(bench: &mut Bench, tokens: usize) -> Result<(), Failed> {
    bench.measure(
        "embedding",
        &format!("{tokens} tokens"),
        |_, _| {
            let matrix = Matrix::random(&mut Random(17), TensorType::Q8_0, VOCAB, WIDTH);
            let table = CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()])?;
            let ids: Vec<TokenId> = (0..tokens).map(|i| TokenId((i * 97 % VOCAB) as u32)).collect();
            Ok(((table, ids), bytes(tokens * WIDTH)))
        },
        |ops, _, (table, ids)| {
            ops.embed(table, &Step { tokens: ids, positions: &[], rows: &[] })?;
            Ok(())
        },
    )
}

fn sample(bench: &mut Bench, name: &str, temperature: f32, top_k: u32) -> Result<(), Failed> {
    bench.measure(
        "choice of a token",
        name,
        |_, _| {
            let params = Arc::new(SamplingParams { temperature, top_k, ..SamplingParams::greedy() });
            Ok(((Sampler::default(), Random(19).vector(VOCAB), params), bytes(VOCAB)))
        },
        |_, _, (sampler, logits, params)| {
            let wanted = SampleFor { position: 1, params, output: &[], scores: None };
            std::hint::black_box(sampler.draw(logits, &wanted)?);
            Ok(())
        },
    )
}
