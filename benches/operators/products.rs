//! `x · wᵀ` by type of the weight and by tokens, the rounding of `x` to int8 included; the logits' product.

use greenroom::config::CpuConfig;
use greenroom::model::cpu::{CpuOps, PackedWeight, Tensor};
use greenroom::model::load::{MetaType, TensorType};
use greenroom::model::ops::{Norm, Ops};

use super::matrix::Matrix;
use super::{Bench, Failed, Random, Work};

const ROWS: usize = 2048;
const COLS: usize = 2048;
/// Bytes of all weights that take turns: more than caches hold.
const TURNS: u64 = 96 << 20;
const TOKENS: [usize; 6] = [1, 2, 4, 8, 64, 512];

const KINDS: [TensorType; 10] = [
    TensorType::Q4_1,
    TensorType::Affine { bits: 4, group: 64, meta: MetaType::F16 },
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
    TensorType::F32,
    TensorType::BF16,
    TensorType::F16,
];

/// Weights that take turns, and what they are multiplied with.
struct Product {
    weights: Vec<PackedWeight>,
    next: usize,
    x: Tensor,
}

fn product(ops: &mut CpuOps, kind: TensorType, tokens: usize) -> Result<(Product, Work), Failed> {
    let mut random = Random(3);
    let matrix = Matrix::random(&mut random, kind, ROWS, COLS);
    let pack = || CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()]);
    let mut weights = vec![pack()?];
    let bytes = weights[0].bytes();
    for _ in 1..TURNS.div_ceil(bytes) {
        weights.push(pack()?);
    }
    let products = (ROWS * COLS * tokens) as u64;
    let work = match matrix.is_dense() {
        true => Work { bytes, f32: products, ..Work::default() },
        false => Work { bytes, int8: products, ..Work::default() },
    };
    let x = ops.tensor(tokens, &random.vector(tokens * COLS));
    Ok((Product { weights, next: 0, x }, work))
}

pub(super) fn all(bench: &mut Bench) -> Result<(), Failed> {
    for kind in KINDS {
        for tokens in TOKENS {
            let group = format!("products/{}", kind.describe());
            bench.measure(
                &group,
                &format!("{tokens} tokens"),
                |ops, _| product(ops, kind, tokens),
                |ops, _, product| {
                    product.next = (product.next + 1) % product.weights.len();
                    ops.linear(&product.x, &product.weights[product.next])?;
                    Ok(())
                },
            )?;
        }
    }
    for rows in [1, 8] {
        head(bench, rows)?;
    }
    Ok(())
}

/// The demo model's logits, of so many rows.
fn head(bench: &mut Bench, rows: usize) -> Result<(), Failed> {
    const VOCAB: usize = 49_152;
    const WIDTH: usize = 576;
    bench.measure(
        "head",
        &format!("{rows} rows"),
        |ops, _| {
            let mut random = Random(5);
            let matrix = Matrix::random(&mut random, TensorType::Q8_0, VOCAB, WIDTH);
            let weight = CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()])?;
            let norm = Norm { weight: ops.vector(&[0.1; WIDTH])?, eps: 1e-5 };
            let x = ops.tensor(rows, &random.vector(rows * WIDTH));
            let work = Work { bytes: weight.bytes(), int8: (VOCAB * WIDTH * rows) as u64, ..Work::default() };
            let last: Vec<usize> = (0..rows).collect();
            Ok(((weight, norm, x, last), work))
        },
        |ops, _, (weight, norm, x, last)| {
            ops.head(x, norm, weight, last)?;
            Ok(())
        },
    )
}
