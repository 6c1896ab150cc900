//! The operators of speech models on the CPU.

use std::ops::Range;

use super::attention::whole::{self, CpuMemory};
use super::math::{BiasAct, LayerNormed};
use super::simd::dispatch;
use super::{CpuOps, DisjointRows, Tensor, device, expect, invalid};
use crate::model::ops::Act;
use crate::model::ops::speech::{LayerNorm, RecallSpec, SpeechOps};
use crate::types::EngineError;

use super::attention::Vector;

/// Encoder positions that make a tile, for narrow and for wide models: some milliseconds of work.
const TILE: usize = 192;
const WIDE_TILE: usize = 64;
/// From this width on a tile is small.
const WIDE: usize = 768;

impl SpeechOps for CpuOps {
    type Memory = CpuMemory;

    fn tile(&self, width: usize) -> usize {
        if width < WIDE { TILE } else { WIDE_TILE }
    }

    fn upload(&mut self, tokens: usize, values: &[f32]) -> Result<Tensor, EngineError> {
        if tokens == 0 || !values.len().is_multiple_of(tokens) {
            return Err(invalid(format!("{} values for {tokens} tokens", values.len())));
        }
        Ok(self.tensor(tokens, values))
    }

    fn download(&mut self, x: &Tensor) -> Result<Vec<f32>, EngineError> {
        Ok(x.data().to_vec())
    }

    fn settle(&mut self, _: &[&Tensor], _: Option<&CpuMemory>) -> Result<(), EngineError> {
        Ok(())
    }

    fn join(&mut self, parts: Vec<Tensor>) -> Result<Tensor, EngineError> {
        let width = parts.first().map_or(0, Tensor::width);
        let mut out = self.arena.take(parts.iter().map(Tensor::tokens).sum(), width);
        let mut rest = out.data_mut();
        for part in &parts {
            expect(part.width(), width, "columns of joined rows")?;
            let (here, after) = rest.split_at_mut(part.data().len());
            here.copy_from_slice(part.data());
            rest = after;
        }
        Ok(out)
    }

    fn slice(&mut self, x: &Tensor, rows: Range<usize>) -> Result<Tensor, EngineError> {
        if rows.end > x.tokens() || rows.is_empty() {
            return Err(invalid(format!("rows {rows:?} of {}", x.tokens())));
        }
        let width = x.width();
        Ok(self.tensor(rows.len(), &x.data()[rows.start * width..rows.end * width]))
    }

    fn windows(&mut self, x: &Tensor, rows: Range<usize>, stride: usize) -> Result<Tensor, EngineError> {
        let (width, have) = (x.width(), x.tokens());
        let mut out = self.arena.take(rows.len(), 3 * width);
        for (row, out) in rows.zip(out.data_mut().chunks_exact_mut((3 * width).max(1))) {
            for (tap, out) in out.chunks_exact_mut(width).enumerate() {
                match (stride * row + tap).checked_sub(1).filter(|at| *at < have) {
                    Some(at) => out.copy_from_slice(x.row(at)),
                    None => out.fill(0.0),
                }
            }
        }
        Ok(out)
    }

    fn layer_norm(&mut self, x: &Tensor, norm: &LayerNorm<Vector>) -> Result<Tensor, EngineError> {
        let width = x.width();
        expect(norm.weight.len(), width, "weights of a norm")?;
        expect(norm.bias.len(), width, "biases of a norm")?;
        let mut out = self.arena.take(x.tokens(), width);
        let (rows, path, data) = (DisjointRows::new(out.data_mut(), width), self.path, x.data());
        self.each_token(x.tokens(), width, |token| {
            // SAFETY: each token is claimed by one thread.
            let out = unsafe { rows.get(token) };
            let x = &data[token * width..(token + 1) * width];
            dispatch(path, LayerNormed { x, weight: &norm.weight, bias: &norm.bias, eps: norm.eps, out });
        });
        Ok(out)
    }

    fn bias_act(&mut self, mut x: Tensor, bias: &Vector, act: Act) -> Result<Tensor, EngineError> {
        let (tokens, width) = (x.tokens(), x.width());
        expect(bias.len(), width, "elements of a bias")?;
        let (rows, path) = (DisjointRows::new(x.data_mut(), width), self.path);
        self.each_token(tokens, width, |token| {
            // SAFETY: each token is claimed by one thread.
            let x = unsafe { rows.get(token) };
            dispatch(path, BiasAct { x, bias, act });
        });
        Ok(x)
    }

    fn memory(&mut self, positions: usize, spec: &RecallSpec) -> Result<CpuMemory, EngineError> {
        let memory = CpuMemory::new(positions, spec, self.kv);
        memory.ok_or_else(|| device(format!("no memory for keys and values of {positions} positions")))
    }

    fn remember(
        &mut self,
        memory: &mut CpuMemory,
        first: usize,
        keys_values: &Tensor,
    ) -> Result<(), EngineError> {
        if memory.write(self.machine(), first, keys_values.tokens(), keys_values.data()) {
            return Ok(());
        }
        let (tokens, width) = (keys_values.tokens(), keys_values.width());
        Err(invalid(format!("{tokens} rows of {width} at {first} do not fit a memory")))
    }

    fn recall(
        &mut self,
        queries: &Tensor,
        spec: &RecallSpec,
        rows: &[(usize, &CpuMemory)],
    ) -> Result<Tensor, EngineError> {
        let mut out = self.arena.take(queries.tokens(), queries.width());
        match whole::recall(self.machine(), spec, rows, queries.data(), out.data_mut()) {
            true => Ok(out),
            false => Err(invalid(format!("{} queries do not fit {spec:?}", queries.tokens()))),
        }
    }

    fn scores(
        &mut self,
        queries: &Tensor,
        rows: Range<usize>,
        spec: &RecallSpec,
        memory: &CpuMemory,
        heads: &[usize],
    ) -> Result<Vec<f32>, EngineError> {
        expect(queries.width(), spec.heads * spec.head_dim, "columns of queries")?;
        let width = queries.width();
        let picked = queries.data().get(rows.start * width..rows.end * width);
        let picked = picked.ok_or_else(|| invalid(format!("rows {rows:?} of {}", queries.tokens())))?;
        let mut out = Vec::with_capacity(heads.len() * rows.len() * memory.positions());
        let fit = heads.iter().all(|head| whole::scores(self.path, spec, memory, *head, picked, &mut out));
        if fit { Ok(out) } else { Err(invalid(format!("heads {heads:?} do not fit {spec:?}"))) }
    }

    fn memory_bytes(&self, memory: &CpuMemory) -> u64 {
        memory.bytes()
    }
}
