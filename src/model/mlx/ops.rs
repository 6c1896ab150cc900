//! The operators as nodes of MLX's graph.
//!
//! Few nodes a layer: a node costs microseconds before any arithmetic. The budget is held
//! by a test that counts the graph's operations.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;

use mlx_rs::fast::{ScaledDotProductAttentionMask, rms_norm, rope, scaled_dot_product_attention};
use mlx_rs::ops::indexing::{TryIndexOp, take_axis};
use mlx_rs::ops::{
    add, concatenate, erf, expand_dims, matmul, multiply, reshape, select, sigmoid, softmax_axis,
    split_equal, tanh, transpose_axes,
};
use mlx_rs::{Array, Dtype};

use super::kv::MlxKv;
use super::native::{StreamLease, version};
use super::weight::{MlxPacked, MlxWeight};
use super::{MlxConfig, MlxDevice, device_error, dim};
use crate::model::load::HostTensor;
use crate::model::ops::{Act, AttnSpec, LayerId, Logits, Norm, Ops, StartOps, Step, StepRow};
use crate::types::{EngineError, LoadError};

/// A small vector on the device, as it is and inverted: MLX's rope wants periods where the
/// seam has frequencies.
#[derive(Clone, Debug)]
pub struct MlxVector {
    values: Array,
    inverted: Array,
}

/// MLX as a backend. Lives on one thread, whose default stream it owns.
pub struct MlxOps {
    config: MlxConfig,
    weight_bytes: u64,
    /// Of this step: layers with one window share theirs.
    masks: HashMap<MaskShape, Array>,
    /// Shared with the key-value store: given back when both are gone.
    stream: Rc<StreamLease>,
}

impl MlxOps {
    fn heads_of(
        &self,
        x: &Array,
        spec: &AttnSpec<MlxVector>,
        row: &StepRow,
    ) -> Result<(Array, Array, Array), EngineError> {
        let (heads, kv_heads) = (dim(spec.heads)?, dim(spec.kv_heads)?);
        let all = heads + 2 * kv_heads;
        let whole = |norm: &Option<Norm<MlxVector>>, heads: usize| {
            norm.as_ref().is_some_and(|norm| heads > 1 && norm.weight.values.size() == heads * spec.head_dim)
        };
        if whole(&spec.q_norm, spec.heads) || whole(&spec.k_norm, spec.kv_heads) {
            return self.heads_normed_as_one(x, spec, row);
        }
        // [tokens, heads · d] → [1, heads, tokens, d]
        let x = reshape(x, &[1, dim(row.len)?, all, dim(spec.head_dim)?])
            .and_then(|x| transpose_axes(x, &[0, 2, 1, 3]))
            .map_err(device_error)?;
        let cut = |x: &Array, from: i32, to: i32| x.try_index((.., from..to)).map_err(device_error);
        let values = cut(&x, heads + kv_heads, all)?;
        if spec.q_norm.is_none() && spec.k_norm.is_none() {
            let both = self.rotate(cut(&x, 0, heads + kv_heads)?, spec, row)?;
            return Ok((cut(&both, 0, heads)?, cut(&both, heads, heads + kv_heads)?, values));
        }
        let normed = |x: Array, norm: &Option<Norm<MlxVector>>| match norm {
            Some(norm) => rms_norm(&x, Some(&norm.weight.values), norm.eps).map_err(device_error),
            None => Ok(x),
        };
        let queries = self.rotate(normed(cut(&x, 0, heads)?, &spec.q_norm)?, spec, row)?;
        let keys = self.rotate(normed(cut(&x, heads, heads + kv_heads)?, &spec.k_norm)?, spec, row)?;
        Ok((queries, keys, values))
    }

    /// As [`Self::heads_of`], where each norm takes all heads as one.
    fn heads_normed_as_one(
        &self,
        x: &Array,
        spec: &AttnSpec<MlxVector>,
        row: &StepRow,
    ) -> Result<(Array, Array, Array), EngineError> {
        let (q, kv) = (dim(spec.heads * spec.head_dim)?, dim(spec.kv_heads * spec.head_dim)?);
        let part = |from: i32, to: i32, norm: &Option<Norm<MlxVector>>| {
            let part = x.try_index((.., from..to)).map_err(device_error)?;
            let part = match norm {
                Some(norm) => rms_norm(&part, Some(&norm.weight.values), norm.eps).map_err(device_error)?,
                None => part,
            };
            reshape(&part, &[1, dim(row.len)?, -1, dim(spec.head_dim)?])
                .and_then(|part| transpose_axes(part, &[0, 2, 1, 3]))
                .map_err(device_error)
        };
        let queries = self.rotate(part(0, q, &spec.q_norm)?, spec, row)?;
        let keys = self.rotate(part(q, q + kv, &spec.k_norm)?, spec, row)?;
        Ok((queries, keys, part(q + kv, q + 2 * kv, &None)?))
    }

    fn rotate(&self, x: Array, spec: &AttnSpec<MlxVector>, row: &StepRow) -> Result<Array, EngineError> {
        let Some(r) = &spec.rope else { return Ok(x) };
        let start = dim(row.start as usize)?;
        let x = if r.scale == 1.0 {
            x
        } else {
            // Rotation is linear: scaling before it is scaling after it.
            let factors: Vec<f32> =
                (0..spec.head_dim).map(|i| if i < r.dims { r.scale } else { 1.0 }).collect();
            let factors = Array::from_slice(&factors, &[dim(spec.head_dim)?]);
            factors.as_dtype(x.dtype()).and_then(|factors| multiply(&x, &factors)).map_err(device_error)?
        };
        rope(&x, dim(r.dims)?, false, None, 1.0, start, &r.inv_freq.inverted).map_err(device_error)
    }

    fn attend_row(
        &mut self,
        kv: &mut MlxKv,
        layer: LayerId,
        x: &Array,
        spec: &AttnSpec<MlxVector>,
        row: &StepRow,
    ) -> Result<Array, EngineError> {
        let (queries, keys, values) = self.heads_of(x, spec, row)?;
        let len = u32::try_from(row.len).unwrap_or(u32::MAX);
        let end = row.start.saturating_add(len);
        // The oldest position that the row's first token still sees.
        let first = spec.window.map_or(0, |window| (row.start + 1).saturating_sub(window));
        let (keys, values) = kv.append(row.sequence, layer, row.start, (&keys, &values), first..end)?;
        let windowed = spec.window.is_some_and(|window| end - first > window);
        let out = if let Some(cap) = spec.softcap {
            capped_attention(&queries, &keys, &values, spec, cap, self.mask_of(row, first, spec.window)?)
        } else if windowed {
            let mask = self.mask_of(row, first, spec.window)?;
            scaled_dot_product_attention(&queries, &keys, &values, spec.scale, mask, None)
        } else if row.len == 1 {
            let none = None::<ScaledDotProductAttentionMask<'_>>;
            scaled_dot_product_attention(&queries, &keys, &values, spec.scale, none, None)
        } else {
            let causal = ScaledDotProductAttentionMask::Causal;
            scaled_dot_product_attention(&queries, &keys, &values, spec.scale, causal, None)
        };
        let width = dim(spec.heads * spec.head_dim)?;
        out.and_then(|out| transpose_axes(out, &[0, 2, 1, 3]))
            .and_then(|out| reshape(out, &[dim(row.len).unwrap_or(-1), width]))
            .map_err(device_error)
    }

    /// The row's mask, made by the step's first layer that needs it.
    fn mask_of(&mut self, row: &StepRow, first: u32, window: Option<u32>) -> Result<&Array, EngineError> {
        let len = u32::try_from(row.len).unwrap_or(u32::MAX);
        let shape = MaskShape { start: row.start, len, first, window: window.unwrap_or(u32::MAX) };
        Ok(match self.masks.entry(shape) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => place.insert(shape.mask()?),
        })
    }
}

/// All that a mask depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct MaskShape {
    start: u32,
    len: u32,
    /// The oldest visible position.
    first: u32,
    window: u32,
}

impl MaskShape {
    /// `[tokens, visible]`, true where a query may look.
    fn mask(self) -> Result<Array, EngineError> {
        let (from, end) = (self.start, self.start + self.len);
        let sees = |query: u32, key: u32| key <= query && query - key < self.window;
        let mask: Vec<bool> =
            (from..end).flat_map(|query| (self.first..end).map(move |key| sees(query, key))).collect();
        Ok(Array::from_slice(&mask, &[dim(self.len as usize)?, dim((end - self.first) as usize)?]))
    }
}

/// Attention whose scores are bent to `cap`: MLX's own has no place for that. Query heads of a
/// key head form an axis of their own, so that keys and values are not repeated.
fn capped_attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    spec: &AttnSpec<MlxVector>,
    cap: f32,
    mask: &Array,
) -> mlx_rs::error::Result<Array> {
    let &[_, heads, tokens, width] = queries.shape() else {
        return Err("queries are four-dimensional".into());
    };
    let kv_heads = keys.shape().get(1).copied().unwrap_or(1);
    let scalar = |value: f32| Array::from_f32(value).as_dtype(queries.dtype());
    let scaled = multiply(queries, &scalar(spec.scale / cap)?)?;
    let grouped = reshape(&scaled, &[1, kv_heads, heads / kv_heads, tokens, width])?;
    let (keys, values) = (expand_dims(keys, 2)?, expand_dims(values, 2)?);
    let scores = matmul(&grouped, transpose_axes(&keys, &[0, 1, 2, 4, 3])?)?;
    let bent = multiply(&tanh(&scores)?, &scalar(cap)?)?;
    let masked = select(mask, &bent, &scalar(f32::NEG_INFINITY)?)?;
    let weights = softmax_axis(&masked, -1, true)?;
    reshape(&matmul(&weights, &values)?, &[1, heads, tokens, width])
}

/// GELU's tanh approximation: `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
fn gelu_tanh(x: &Array) -> mlx_rs::error::Result<Array> {
    let scalar = |value: f32| Array::from_f32(value).as_dtype(x.dtype());
    let cube = multiply(&multiply(x, x)?, x)?;
    let inner = add(x, &multiply(&cube, &scalar(0.044_715)?)?)?;
    let gate = tanh(&multiply(&inner, &scalar((2.0 / std::f32::consts::PI).sqrt())?)?)?;
    multiply(&multiply(x, &scalar(0.5)?)?, &add(&gate, &scalar(1.0)?)?)
}

/// GELU by the error function: `x/2 · (1 + erf(x/√2))`.
fn gelu(x: &Array) -> mlx_rs::error::Result<Array> {
    let scalar = |value: f32| Array::from_f32(value).as_dtype(x.dtype());
    let bent = erf(&multiply(x, &scalar(std::f32::consts::FRAC_1_SQRT_2)?)?)?;
    multiply(&multiply(x, &scalar(0.5)?)?, &add(&bent, &scalar(1.0)?)?)
}

impl Ops for MlxOps {
    type Config = MlxConfig;
    type T = Array;
    type W = MlxWeight;
    type V = MlxVector;
    type Packed = MlxPacked;
    type Kv = MlxKv;

    const SURVIVES_PANICS: bool = false;

    fn pack(config: &MlxConfig, parts: &[HostTensor<'_>]) -> Result<MlxPacked, LoadError> {
        MlxPacked::pack(config, parts)
    }

    fn start(config: &MlxConfig, start: &StartOps) -> Result<(Self, MlxKv), EngineError> {
        let stream = StreamLease::take(config.device)?;
        let kv = MlxKv::new(start, config.activations, Rc::clone(&stream));
        Ok((Self { config: *config, weight_bytes: 0, masks: HashMap::new(), stream }, kv))
    }

    fn adopt(&mut self, packed: MlxPacked) -> Result<MlxWeight, EngineError> {
        let weight = packed.adopt()?;
        self.weight_bytes += weight.bytes();
        Ok(weight)
    }

    fn vector(&mut self, values: &[f32]) -> Result<MlxVector, EngineError> {
        let shape = [dim(values.len())?];
        let inverted: Vec<f32> = values.iter().map(|value| 1.0 / value).collect();
        Ok(MlxVector {
            values: Array::from_slice(values, &shape)
                .as_dtype(self.config.activations.dtype())
                .map_err(device_error)?,
            inverted: Array::from_slice(&inverted, &shape),
        })
    }

    fn embed(&mut self, table: &MlxWeight, step: &Step<'_>) -> Result<Array, EngineError> {
        self.masks.clear();
        let ids: Vec<u32> = step.tokens.iter().map(|token| token.0).collect();
        table.rows(&Array::from_slice(&ids, &[dim(ids.len())?]))
    }

    fn norm_linear(
        &mut self,
        x: &Array,
        norm: &Norm<MlxVector>,
        w: &MlxWeight,
    ) -> Result<Array, EngineError> {
        let x = rms_norm(x, Some(&norm.weight.values), norm.eps).map_err(device_error)?;
        w.product(&x)
    }

    fn linear(&mut self, x: &Array, w: &MlxWeight) -> Result<Array, EngineError> {
        w.product(x)
    }

    fn add_bias(&mut self, x: Array, bias: &MlxVector) -> Result<Array, EngineError> {
        add(&x, &bias.values).map_err(device_error)
    }

    fn scale(&mut self, x: Array, by: f32) -> Result<Array, EngineError> {
        let by = Array::from_f32(by).as_dtype(x.dtype());
        by.and_then(|by| multiply(&x, &by)).map_err(device_error)
    }

    fn add_residual(
        &mut self,
        x: Array,
        norm: Option<&Norm<MlxVector>>,
        by: f32,
        residual: Array,
    ) -> Result<Array, EngineError> {
        let x = match norm {
            Some(norm) => rms_norm(&x, Some(&norm.weight.values), norm.eps).map_err(device_error)?,
            None => x,
        };
        let x = if by == 1.0 { x } else { self.scale(x, by)? };
        add(&residual, &x).map_err(device_error)
    }

    fn attend(
        &mut self,
        kv: &mut MlxKv,
        layer: LayerId,
        qkv: Array,
        spec: &AttnSpec<MlxVector>,
        step: &Step<'_>,
    ) -> Result<Array, EngineError> {
        if let [row] = step.rows {
            return self.attend_row(kv, layer, &qkv, spec, row);
        }
        let mut outputs = Vec::with_capacity(step.rows.len());
        for row in step.rows {
            let range = dim(row.first)?..dim(row.first + row.len)?;
            let x = qkv.try_index(range).map_err(device_error)?;
            outputs.push(self.attend_row(kv, layer, &x, spec, row)?);
        }
        concatenate(&outputs, 0).map_err(device_error)
    }

    fn linear_add(&mut self, x: Array, w: &MlxWeight, residual: Array) -> Result<Array, EngineError> {
        add(&w.product(&x)?, &residual).map_err(device_error)
    }

    fn glu(&mut self, x: Array, act: Act) -> Result<Array, EngineError> {
        // Not `nn::silu`: it goes through MLX's compile, which runs a C++ compiler on the CPU device.
        let halves = split_equal(&x, 2, 1).map_err(device_error)?;
        let [gate, up] = halves.as_slice() else {
            return Err(EngineError::Device { message: "MLX split two halves into something else".into() });
        };
        let gated = match act {
            Act::Silu => sigmoid(gate).and_then(|s| multiply(gate, &s)),
            Act::GeluTanh => gelu_tanh(gate),
            Act::Gelu => gelu(gate),
        };
        gated.and_then(|gated| multiply(&gated, up)).map_err(device_error)
    }

    fn head(
        &mut self,
        x: &Array,
        norm: &Norm<MlxVector>,
        w: &MlxWeight,
        rows: &[usize],
    ) -> Result<Logits, EngineError> {
        let indices: Vec<u32> = rows.iter().map(|row| u32::try_from(*row).unwrap_or(u32::MAX)).collect();
        if indices.is_empty() {
            // Nothing else computes a step without logits before the store's commit; a
            // device error must come from the step.
            x.eval().map_err(device_error)?;
            return Ok(Logits::default());
        }
        let picked =
            take_axis(x, Array::from_slice(&indices, &[dim(indices.len())?]), 0).map_err(device_error)?;
        let logits = self
            .norm_linear(&picked, norm, w)?
            .as_dtype(Dtype::Float32)
            .and_then(|logits| logits.contiguous())
            .map_err(device_error)?;
        logits.eval().map_err(device_error)?;
        let data = logits
            .try_as_slice::<f32>()
            .map_err(|error| EngineError::Device { message: format!("logits: {error}") })?
            .to_vec();
        Ok(Logits { vocab: data.len() / rows.len(), data })
    }

    fn numerics_id(&self) -> String {
        let MlxConfig { activations, dequantize, .. } = self.config;
        format!("mlx-{}-{:?}-{activations:?}-{dequantize}", version(), self.stream.device()).to_lowercase()
    }

    fn device(&self) -> String {
        match self.config.device {
            MlxDevice::Cpu => format!("MLX {} on its CPU device", version()),
            MlxDevice::Gpu => format!("MLX {} on Metal", version()),
        }
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}
