//! Reference implementation of the operators: plain loops over f32, nothing else.
//!
//! The yardstick that the backends are compared with, and the second reading of
//! what each operator means. Not fast, not chosen by any device setting. Every
//! sum runs in ascending order in one chain, so its results do not depend on
//! how a step is cut either.

use crate::model::load::HostTensor;
use crate::model::ops::{Act, AttnSpec, LayerId, Logits, Norm, Ops, Rope, StartOps, Step, StepRow};
use crate::types::{EngineError, LoadError};

pub mod kv;

pub use kv::PlainKv;

/// A row-major f32 matrix: activations `[tokens, width]`, weights `[out, in]`.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Matrix {
    /// Number of rows.
    pub rows: usize,
    /// Width of a row.
    pub cols: usize,
    /// `rows · cols` values.
    pub data: Vec<f32>,
}

impl Matrix {
    /// All zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![0.0; rows * cols] }
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    /// One row, to be written.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }
}

/// The operators as plain loops.
#[derive(Debug, Default)]
pub struct PlainOps {
    weight_bytes: u64,
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0.0f32;
    for (x, y) in a.iter().zip(b) {
        sum += x * y;
    }
    sum
}

fn normed(x: &[f32], norm: &Norm<Vec<f32>>) -> Vec<f32> {
    let mean = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean + norm.eps).sqrt();
    x.iter().zip(&norm.weight).map(|(x, w)| x * scale * w).collect()
}

/// `x · wᵀ` of one token.
fn product(x: &[f32], w: &Matrix, out: &mut [f32]) {
    for (row, value) in out.iter_mut().enumerate() {
        *value = dot(x, w.row(row));
    }
}

fn rotate(head: &mut [f32], rope: &Rope<Vec<f32>>, position: u32) {
    let half = rope.inv_freq.len();
    for (i, frequency) in rope.inv_freq.iter().enumerate() {
        let (sin, cos) = (position as f32 * frequency).sin_cos();
        let (sin, cos) = (sin * rope.scale, cos * rope.scale);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = b * cos + a * sin;
    }
}

/// Norms and rotates the heads in `heads`, in place. A norm as wide as all of them takes them as one.
fn place(heads: &mut [f32], spec: &AttnSpec<Vec<f32>>, norm: Option<&Norm<Vec<f32>>>, position: u32) {
    if let Some(norm) = norm {
        for part in heads.chunks_exact_mut(norm.weight.len()) {
            let values = normed(part, norm);
            part.copy_from_slice(&values);
        }
    }
    for head in heads.chunks_exact_mut(spec.head_dim) {
        if let Some(rope) = &spec.rope {
            rotate(head, rope, position);
        }
    }
}

/// One query head over the keys of positions `first..=last`.
fn attend_head(
    query: &[f32],
    kv: &kv::LayerRows<'_>,
    kv_head: usize,
    span: std::ops::RangeInclusive<usize>,
    spec: &AttnSpec<Vec<f32>>,
    out: &mut [f32],
) {
    let capped = |score: f32| spec.softcap.map_or(score, |cap| cap * (score / cap).tanh());
    let scores: Vec<f32> =
        span.clone().map(|p| capped(dot(query, kv.key(p, kv_head)) * spec.scale)).collect();
    let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0f32;
    out.fill(0.0);
    for (position, score) in span.zip(scores) {
        let weight = (score - best).exp();
        total += weight;
        for (o, v) in out.iter_mut().zip(kv.value(position, kv_head)) {
            *o += weight * v;
        }
    }
    for o in out {
        *o /= total;
    }
}

/// The error function by its Taylor series, which is exact to f32 here: beyond 4 it is 1.
fn error_function(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..100 {
        let n = f64::from(n);
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn activate(x: f32, act: Act) -> f32 {
    match act {
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::GeluTanh => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Act::Gelu => (0.5 * f64::from(x) * (1.0 + error_function(f64::from(x) / 2.0f64.sqrt()))) as f32,
    }
}

impl PlainOps {
    fn attend_row(
        kv: &mut PlainKv,
        layer: LayerId,
        qkv: &mut Matrix,
        spec: &AttnSpec<Vec<f32>>,
        row: &StepRow,
        out: &mut Matrix,
    ) -> Result<(), EngineError> {
        let (q_width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        for token in 0..row.len {
            let position = row.start + token as u32;
            let values = qkv.row_mut(row.first + token);
            place(&mut values[..q_width], spec, spec.q_norm.as_ref(), position);
            place(&mut values[q_width..q_width + kv_width], spec, spec.k_norm.as_ref(), position);
            let (keys, values) = values[q_width..].split_at(kv_width);
            kv.write(row.sequence, layer, position, keys, values)?;
        }
        let rows = kv.layer(row.sequence, layer)?;
        let group = spec.heads / spec.kv_heads;
        for token in 0..row.len {
            let last = row.start as usize + token;
            let first = spec.window.map_or(0, |window| (last + 1).saturating_sub(window as usize));
            for head in 0..spec.heads {
                let at = head * spec.head_dim..(head + 1) * spec.head_dim;
                let query = &qkv.row(row.first + token)[at.clone()];
                let into = &mut out.row_mut(row.first + token)[at];
                attend_head(query, &rows, head / group, first..=last, spec, into);
            }
        }
        Ok(())
    }
}

impl Ops for PlainOps {
    type Config = ();
    type T = Matrix;
    type Draws = ();
    type W = Matrix;
    type V = Vec<f32>;
    type Packed = Matrix;
    type Kv = PlainKv;

    const SURVIVES_PANICS: bool = true;

    fn pack((): &(), parts: &[HostTensor<'_>]) -> Result<Matrix, LoadError> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let mut packed = Matrix { rows: 0, cols, data: Vec::new() };
        for part in parts {
            if part.cols != cols {
                let message = format!("has {} columns beside a matrix with {cols}", part.cols);
                return Err(LoadError::Tensor { name: part.name.into(), message });
            }
            let mut stacked = Matrix::zeros(part.rows, cols);
            for row in 0..part.rows {
                part.dequantize_row(row, stacked.row_mut(row));
            }
            packed.rows += part.rows;
            packed.data.append(&mut stacked.data);
        }
        Ok(packed)
    }

    fn start((): &(), start: &StartOps) -> Result<(Self, PlainKv), EngineError> {
        Ok((Self::default(), PlainKv::new(start)))
    }

    fn adopt(&mut self, packed: Matrix) -> Result<Matrix, EngineError> {
        self.weight_bytes += 4 * packed.data.len() as u64;
        Ok(packed)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        Ok(values.to_vec())
    }

    fn embed(&mut self, table: &Matrix, step: &Step<'_>) -> Result<Matrix, EngineError> {
        let mut out = Matrix::zeros(step.tokens.len(), table.cols);
        for (index, token) in step.tokens.iter().enumerate() {
            out.row_mut(index).copy_from_slice(table.row(token.0 as usize));
        }
        Ok(out)
    }

    fn norm_linear(&mut self, x: &Matrix, norm: &Norm<Vec<f32>>, w: &Matrix) -> Result<Matrix, EngineError> {
        let mut out = Matrix::zeros(x.rows, w.rows);
        for token in 0..x.rows {
            product(&normed(x.row(token), norm), w, out.row_mut(token));
        }
        Ok(out)
    }

    fn linear(&mut self, x: &Matrix, w: &Matrix) -> Result<Matrix, EngineError> {
        let mut out = Matrix::zeros(x.rows, w.rows);
        for token in 0..x.rows {
            product(x.row(token), w, out.row_mut(token));
        }
        Ok(out)
    }

    fn add_bias(&mut self, mut x: Matrix, bias: &Vec<f32>) -> Result<Matrix, EngineError> {
        for token in 0..x.rows {
            x.row_mut(token).iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
        Ok(x)
    }

    fn scale(&mut self, mut x: Matrix, by: f32) -> Result<Matrix, EngineError> {
        x.data.iter_mut().for_each(|x| *x *= by);
        Ok(x)
    }

    fn add_residual(
        &mut self,
        x: Matrix,
        norm: Option<&Norm<Vec<f32>>>,
        by: f32,
        mut residual: Matrix,
    ) -> Result<Matrix, EngineError> {
        for token in 0..x.rows {
            let values = norm.map_or_else(|| x.row(token).to_vec(), |norm| normed(x.row(token), norm));
            for (r, v) in residual.row_mut(token).iter_mut().zip(&values) {
                *r += by * v;
            }
        }
        Ok(residual)
    }

    fn attend(
        &mut self,
        kv: &mut PlainKv,
        layer: LayerId,
        mut qkv: Matrix,
        spec: &AttnSpec<Vec<f32>>,
        step: &Step<'_>,
    ) -> Result<Matrix, EngineError> {
        let mut out = Matrix::zeros(qkv.rows, spec.heads * spec.head_dim);
        for row in step.rows {
            Self::attend_row(kv, layer, &mut qkv, spec, row, &mut out)?;
        }
        Ok(out)
    }

    fn linear_add(&mut self, x: Matrix, w: &Matrix, mut residual: Matrix) -> Result<Matrix, EngineError> {
        let mut values = vec![0.0; w.rows];
        for token in 0..x.rows {
            product(x.row(token), w, &mut values);
            for (r, v) in residual.row_mut(token).iter_mut().zip(&values) {
                *r += v;
            }
        }
        Ok(residual)
    }

    fn glu(&mut self, x: Matrix, act: Act) -> Result<Matrix, EngineError> {
        let half = x.cols / 2;
        let mut out = Matrix::zeros(x.rows, half);
        for token in 0..x.rows {
            let (gate, up) = x.row(token).split_at(half);
            for (o, (g, u)) in out.row_mut(token).iter_mut().zip(gate.iter().zip(up)) {
                *o = activate(*g, act) * u;
            }
        }
        Ok(out)
    }

    fn head(
        &mut self,
        x: &Matrix,
        norm: &Norm<Vec<f32>>,
        w: &Matrix,
        rows: &[usize],
    ) -> Result<Logits, EngineError> {
        let mut data = vec![0.0; rows.len() * w.rows];
        for (row, out) in rows.iter().zip(data.chunks_exact_mut(w.rows.max(1))) {
            product(&normed(x.row(*row), norm), w, out);
        }
        Ok(Logits { vocab: w.rows, data })
    }

    fn numerics_id(&self) -> String {
        "plain-f32-1".into()
    }

    fn device(&self) -> String {
        "CPU, reference loops".into()
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}
