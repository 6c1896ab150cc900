//! The operators of speech models as nodes of MLX's graph.
//!
//! A memory is filled in pieces and laid out for attention once, when the last piece has come. Nobody
//! writes it after that, so any number of rows read it at a time and nothing of it is ever copied.

use std::ops::Range;

use mlx_rs::fast::{ScaledDotProductAttentionMask, layer_norm, scaled_dot_product_attention};
use mlx_rs::ops::indexing::{IntoStrideBy, TryIndexOp, take_axis};
use mlx_rs::ops::{add, concatenate, matmul, pad, reshape, transpose_axes, zeros_dtype};
use mlx_rs::{Array, Dtype};

use super::ops::{MlxOps, MlxVector, activated};
use super::{MlxDevice, device_error, dim};
use crate::model::ops::Act;
use crate::model::ops::speech::{LayerNorm, RecallSpec, SpeechOps};
use crate::types::EngineError;

/// Encoder positions of a tile on MLX's CPU device, some tens of milliseconds of work. Metal takes all
/// positions at once: a stage of a layer is a piece.
const CPU_TILE: usize = 64;

/// Keys and values of one layer.
#[derive(Debug)]
pub struct MlxMemory {
    positions: usize,
    heads: usize,
    head_dim: usize,
    filled: usize,
    stored: Stored,
}

#[derive(Debug)]
enum Stored {
    /// As they came, `[tokens, 2 · heads · head_dim]` each.
    Pieces(Vec<Array>),
    /// Keys and values of all positions, `[1, heads, positions, head_dim]` each.
    Whole([Array; 2]),
}

fn invalid(message: String) -> EngineError {
    EngineError::InvalidPlan { message }
}

/// Rows and columns.
fn sides(x: &Array) -> Result<(usize, usize), EngineError> {
    match x.shape() {
        // MLX has no negative sizes.
        [rows, cols] => Ok((*rows as usize, *cols as usize)),
        other => Err(invalid(format!("rows are wanted, this has the shape {other:?}"))),
    }
}

fn rows_of(x: &Array, rows: &Range<usize>) -> Result<Array, EngineError> {
    if rows.end > sides(x)?.0 || rows.is_empty() {
        return Err(invalid(format!("rows {rows:?} of {:?}", x.shape())));
    }
    x.try_index(dim(rows.start)?..dim(rows.end)?).map_err(device_error)
}

/// Values of a lazy array in f32, row-major.
fn values(x: &Array) -> Result<Vec<f32>, EngineError> {
    let x = x.as_dtype(Dtype::Float32).and_then(|x| x.contiguous()).map_err(device_error)?;
    x.eval().map_err(device_error)?;
    let values = x.try_as_slice::<f32>();
    Ok(values.map_err(|error| EngineError::Device { message: error.to_string() })?.to_vec())
}

impl MlxMemory {
    fn fits(&self, spec: &RecallSpec) -> bool {
        self.heads == spec.heads && self.head_dim == spec.head_dim
    }

    fn write(&mut self, first: usize, piece: &Array) -> Result<(), EngineError> {
        let (tokens, width) = sides(piece)?;
        let (positions, filled) = (self.positions, self.filled);
        let Stored::Pieces(pieces) = &mut self.stored else {
            return Err(invalid(format!("a memory of {positions} positions is full")));
        };
        if first != filled || tokens > positions - filled || width != 2 * self.heads * self.head_dim {
            return Err(invalid(format!(
                "{tokens} rows of {width} at {first} do not fit a memory with {filled} of {positions} positions"
            )));
        }
        pieces.push(piece.clone());
        self.filled += tokens;
        if self.filled == positions {
            let both = self.lay_out()?;
            self.stored = Stored::Whole(both);
        }
        Ok(())
    }

    /// Keys and values as attention reads them, in a buffer that holds nothing else.
    fn lay_out(&self) -> Result<[Array; 2], EngineError> {
        let Stored::Pieces(pieces) = &self.stored else {
            return Err(invalid("a memory is laid out once".into()));
        };
        let shape = [dim(self.positions)?, 2, dim(self.heads)?, dim(self.head_dim)?];
        let all = concatenate(pieces, 0).and_then(|all| reshape(&all, &shape)).map_err(device_error)?;
        let all = transpose_axes(&all, &[1, 2, 0, 3]).and_then(|all| all.contiguous());
        let all = all.map_err(device_error)?;
        let side = |at: i32| all.try_index(at..at + 1).map_err(device_error);
        Ok([side(0)?, side(1)?])
    }

    fn whole(&self) -> Result<&[Array; 2], EngineError> {
        match &self.stored {
            Stored::Whole(both) => Ok(both),
            Stored::Pieces(_) => {
                Err(invalid(format!("a memory is read with {} of {} positions", self.filled, self.positions)))
            }
        }
    }

    fn arrays(&self) -> &[Array] {
        match &self.stored {
            Stored::Pieces(pieces) => pieces,
            Stored::Whole(both) => both,
        }
    }

    /// `[tokens, heads · head_dim]`, each seeing all of it, to the same shape.
    fn attend(&self, queries: &Array, tokens: usize, scale: f32) -> Result<Array, EngineError> {
        let [keys, values] = self.whole()?;
        let (tokens, heads, head_dim) = (dim(tokens)?, dim(self.heads)?, dim(self.head_dim)?);
        let split = reshape(queries, &[1, tokens, heads, head_dim])
            .and_then(|split| transpose_axes(&split, &[0, 2, 1, 3]));
        let none = None::<ScaledDotProductAttentionMask<'_>>;
        split
            .and_then(|queries| scaled_dot_product_attention(&queries, keys, values, scale, none, None))
            .and_then(|mixed| transpose_axes(&mixed, &[0, 2, 1, 3]))
            .and_then(|mixed| reshape(&mixed, &[tokens, heads * head_dim]))
            .map_err(device_error)
    }
}

impl SpeechOps for MlxOps {
    type Memory = MlxMemory;

    fn tile(&self, _: usize) -> usize {
        match self.config.device {
            MlxDevice::Cpu => CPU_TILE,
            MlxDevice::Gpu => usize::MAX,
        }
    }

    fn upload(&mut self, tokens: usize, values: &[f32]) -> Result<Array, EngineError> {
        if tokens == 0 || values.is_empty() || !values.len().is_multiple_of(tokens) {
            return Err(invalid(format!("{} values for {tokens} tokens", values.len())));
        }
        let shape = [dim(tokens)?, dim(values.len() / tokens)?];
        let values = Array::from_slice(values, &shape);
        values.as_dtype(self.config.activations.dtype()).map_err(device_error)
    }

    fn download(&mut self, x: &Array) -> Result<Vec<f32>, EngineError> {
        values(x)
    }

    fn settle(&mut self, x: &[&Array], memory: Option<&MlxMemory>) -> Result<(), EngineError> {
        let memory = memory.map_or(&[][..], MlxMemory::arrays);
        mlx_rs::transforms::eval(x.iter().copied().chain(memory)).map_err(device_error)
    }

    fn join(&mut self, mut parts: Vec<Array>) -> Result<Array, EngineError> {
        let widths = parts.iter().map(|part| Ok(sides(part)?.1)).collect::<Result<Vec<_>, EngineError>>()?;
        if parts.is_empty() || widths.iter().any(|width| *width != widths[0]) {
            return Err(invalid(format!("rows of {widths:?} columns are joined")));
        }
        match parts.len() {
            1 => Ok(parts.swap_remove(0)),
            _ => concatenate(&parts, 0).map_err(device_error),
        }
    }

    fn slice(&mut self, x: &Array, rows: Range<usize>) -> Result<Array, EngineError> {
        rows_of(x, &rows)
    }

    fn windows(&mut self, x: &Array, rows: Range<usize>, stride: usize) -> Result<Array, EngineError> {
        let (have, width) = sides(x)?;
        if rows.is_empty() || stride == 0 {
            return Err(invalid(format!("windows {rows:?} by {stride}")));
        }
        // From what the first output's first tap sees to what the last one's last tap sees.
        let first = dim(rows.start.saturating_mul(stride))? - 1;
        let last = dim((rows.end - 1).saturating_mul(stride).saturating_add(2))? - 1;
        let (have, stride) = (dim(have)?, dim(stride)?);
        let (from, to) = (first.max(0), (last + 1).min(have));
        if from >= to {
            let shape = [dim(rows.len())?, dim(3 * width)?];
            return zeros_dtype(&shape, x.dtype()).map_err(device_error);
        }
        let mut seen = x.try_index(from..to).map_err(device_error)?;
        if from > first || to <= last {
            seen = pad(&seen, &[(from - first, last + 1 - to), (0, 0)], None, None).map_err(device_error)?;
        }
        let reach = last - first - 1;
        // Of every `stride`-th row one is taken, the same number for each tap.
        let tap = |tap: i32| seen.try_index((tap..tap + reach).stride_by(stride)).map_err(device_error);
        concatenate(&[tap(0)?, tap(1)?, tap(2)?], 1).map_err(device_error)
    }

    fn layer_norm(&mut self, x: &Array, norm: &LayerNorm<MlxVector>) -> Result<Array, EngineError> {
        layer_norm(x, &norm.weight.values, &norm.bias.values, norm.eps).map_err(device_error)
    }

    fn bias_act(&mut self, x: Array, bias: &MlxVector, act: Act) -> Result<Array, EngineError> {
        add(&x, &bias.values).and_then(|x| activated(&x, act)).map_err(device_error)
    }

    fn memory(&mut self, positions: usize, spec: &RecallSpec) -> Result<MlxMemory, EngineError> {
        if positions == 0 || spec.heads == 0 || spec.head_dim == 0 {
            return Err(invalid(format!("a memory of {positions} positions for {spec:?}")));
        }
        let (heads, head_dim) = (spec.heads, spec.head_dim);
        Ok(MlxMemory { positions, heads, head_dim, filled: 0, stored: Stored::Pieces(Vec::new()) })
    }

    fn remember(
        &mut self,
        memory: &mut MlxMemory,
        first: usize,
        keys_values: &Array,
    ) -> Result<(), EngineError> {
        memory.write(first, keys_values)
    }

    fn recall(
        &mut self,
        queries: &Array,
        spec: &RecallSpec,
        rows: &[(usize, &MlxMemory)],
    ) -> Result<Array, EngineError> {
        let tokens: usize = rows.iter().map(|(tokens, _)| tokens).sum();
        let fits = rows.iter().all(|(tokens, memory)| *tokens > 0 && memory.fits(spec));
        if rows.is_empty() || !fits || sides(queries)? != (tokens, spec.heads * spec.head_dim) {
            return Err(invalid(format!("queries of {:?} do not fit {spec:?}", queries.shape())));
        }
        // Queries do not see each other, so neighbours that read one memory (beams, candidates) are one
        // longer row.
        let mut groups: Vec<(usize, &MlxMemory)> = Vec::new();
        for (tokens, memory) in rows.iter().copied() {
            match groups.last_mut() {
                Some((count, last)) if std::ptr::eq(*last, memory) => *count += tokens,
                _ => groups.push((tokens, memory)),
            }
        }
        if let [(tokens, memory)] = groups[..] {
            return memory.attend(queries, tokens, spec.scale);
        }
        let (mut first, mut mixed) = (0, Vec::with_capacity(groups.len()));
        for (tokens, memory) in groups {
            mixed.push(memory.attend(&rows_of(queries, &(first..first + tokens))?, tokens, spec.scale)?);
            first += tokens;
        }
        concatenate(&mixed, 0).map_err(device_error)
    }

    fn scores(
        &mut self,
        queries: &Array,
        rows: Range<usize>,
        spec: &RecallSpec,
        memory: &MlxMemory,
        heads: &[usize],
    ) -> Result<Vec<f32>, EngineError> {
        let width = sides(queries)?.1;
        if !memory.fits(spec) || width != spec.heads * spec.head_dim || heads.iter().any(|h| *h >= spec.heads)
        {
            return Err(invalid(format!("queries of {width} and heads {heads:?} do not fit {spec:?}")));
        }
        let [keys, _] = memory.whole()?;
        if heads.is_empty() {
            return Ok(Vec::new());
        }
        let picked = heads.iter().map(|head| dim(*head)).collect::<Result<Vec<_>, _>>()?;
        let picked = Array::from_slice(&picked, &[dim(heads.len())?]);
        let split = [dim(rows.len())?, dim(spec.heads)?, dim(spec.head_dim)?];
        let wide = |x: Array| x.as_dtype(Dtype::Float32);
        let queries = reshape(rows_of(queries, &rows)?, &split)
            .and_then(|queries| transpose_axes(&queries, &[1, 0, 2]))
            .and_then(|queries| take_axis(&queries, &picked, 0))
            .and_then(wide)
            .and_then(|queries| queries.multiply(Array::from_f32(spec.scale)));
        // The matrix product as it stands: what attention fuses gives no scores away.
        let keys = keys
            .try_index(0)
            .and_then(|keys| take_axis(&keys, &picked, 0))
            .and_then(wide)
            .and_then(|keys| transpose_axes(&keys, &[0, 2, 1]));
        values(&queries.and_then(|queries| matmul(&queries, keys?)).map_err(device_error)?)
    }

    fn memory_bytes(&self, memory: &MlxMemory) -> u64 {
        memory.arrays().iter().map(|array| array.nbytes() as u64).sum()
    }
}
