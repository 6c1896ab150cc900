//! The operators as nodes of MLX's graph.
//!
//! Few nodes a layer: a node costs microseconds before any arithmetic. The budget is held
//! by a test that counts the graph's operations.

use std::rc::Rc;

use mlx_rs::fast::rms_norm;
use mlx_rs::ops::indexing::take_axis;
use mlx_rs::ops::{add, erf, multiply, sigmoid, split_equal, tanh};
use mlx_rs::{Array, Dtype};

use super::attention::StepParts;
use super::draws::MlxDraws;
use super::kv::MlxKv;
use super::native::{StreamLease, version};
use super::weight::{MlxPacked, MlxWeight};
use super::{MlxConfig, MlxDevice, device_error, dim};
use crate::model::load::HostTensor;
use crate::model::ops::{Act, AttnSpec, LayerId, LogitShape, Logits, Norm, Ops, Placed, StartOps, Step};
use crate::types::{EngineError, LoadError, TokenId};

/// A small vector on the device, as it is and inverted: MLX's rope wants periods where the
/// seam has frequencies.
#[derive(Clone, Debug)]
pub struct MlxVector {
    pub(super) values: Array,
    pub(super) inverted: Array,
}

/// After so many overlapping steps that copied slabs, steps do not overlap any more: a copy costs
/// time that overlapping was to save, and memory that nobody counts.
const MOST_COPYING_OVERLAPS: u32 = 4;

/// MLX as a backend. Lives on one thread, whose default stream it owns.
pub struct MlxOps {
    pub(super) config: MlxConfig,
    weight_bytes: u64,
    /// How the step's rows go through attention.
    parts: StepParts,
    /// Token ids of this step that only the device knows, until they are looked up.
    ids: Option<Array>,
    /// This step began before the one before it was collected.
    overlap: bool,
    /// Such steps that copied slabs.
    copying_overlaps: u32,
    /// Shared with the key-value store: given back when both are gone.
    stream: Rc<StreamLease>,
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

/// `act(x)`, element by element.
pub(super) fn activated(x: &Array, act: Act) -> mlx_rs::error::Result<Array> {
    match act {
        // Not `nn::silu`: it goes through MLX's compile, which runs a C++ compiler on the CPU device.
        Act::Silu => multiply(x, &sigmoid(x)?),
        Act::GeluTanh => gelu_tanh(x),
        Act::Gelu => gelu(x),
    }
}

impl MlxOps {
    /// Logits of packed indices as a node of the graph, f32.
    fn logits(
        &mut self,
        x: &Array,
        norm: &Norm<MlxVector>,
        w: &MlxWeight,
        rows: &[usize],
    ) -> Result<Array, EngineError> {
        let indices: Vec<u32> = rows.iter().map(|row| u32::try_from(*row).unwrap_or(u32::MAX)).collect();
        let picked =
            take_axis(x, Array::from_slice(&indices, &[dim(indices.len())?]), 0).map_err(device_error)?;
        self.norm_linear(&picked, norm, w)?.as_dtype(Dtype::Float32).map_err(device_error)
    }
}

impl Ops for MlxOps {
    type Config = MlxConfig;
    type T = Array;
    type Draws = MlxDraws;
    type W = MlxWeight;
    type V = MlxVector;
    type Packed = MlxPacked;
    type Kv = MlxKv;

    const SURVIVES_PANICS: bool = false;
    const OVERLAPS: bool = true;

    fn pack(config: &MlxConfig, parts: &[HostTensor<'_>]) -> Result<MlxPacked, LoadError> {
        MlxPacked::pack(config, parts)
    }

    fn start(config: &MlxConfig, start: &StartOps) -> Result<(Self, MlxKv), EngineError> {
        let stream = StreamLease::take(config.device)?;
        let kv = MlxKv::new(start, config.activations, Rc::clone(&stream));
        Ok((
            Self {
                config: *config,
                weight_bytes: 0,
                parts: StepParts::default(),
                ids: None,
                overlap: false,
                copying_overlaps: 0,
                stream,
            },
            kv,
        ))
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
        if let Some(ids) = self.ids.take() {
            return table.rows(&ids);
        }
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
        if layer.0 == 0 {
            self.parts = StepParts::plan(kv, step)?;
        }
        self.parts.attend(kv, layer, &qkv, spec)
    }

    fn linear_add(&mut self, x: Array, w: &MlxWeight, residual: Array) -> Result<Array, EngineError> {
        add(&w.product(&x)?, &residual).map_err(device_error)
    }

    fn glu(&mut self, x: Array, act: Act) -> Result<Array, EngineError> {
        let halves = split_equal(&x, 2, 1).map_err(device_error)?;
        let [gate, up] = halves.as_slice() else {
            return Err(EngineError::Device { message: "MLX split two halves into something else".into() });
        };
        activated(gate, act).and_then(|gated| multiply(&gated, up)).map_err(device_error)
    }

    fn head(
        &mut self,
        x: &Array,
        norm: &Norm<MlxVector>,
        w: &MlxWeight,
        rows: &[usize],
    ) -> Result<Logits, EngineError> {
        if rows.is_empty() {
            // Nothing else computes a step without logits before the store's commit; a
            // device error must come from the step.
            x.eval().map_err(device_error)?;
            return Ok(Logits::default());
        }
        let logits = self.logits(x, norm, w, rows)?.contiguous().map_err(device_error)?;
        logits.eval().map_err(device_error)?;
        let data = logits
            .try_as_slice::<f32>()
            .map_err(|error| EngineError::Device { message: format!("logits: {error}") })?
            .to_vec();
        Ok(Logits { vocab: data.len() / rows.len(), data })
    }

    fn begin(&mut self, step: &Step<'_>, drawn: Option<Placed<'_, MlxDraws>>) -> Result<(), EngineError> {
        self.overlap = drawn.is_some();
        self.ids = match drawn {
            Some((draws, from)) => draws.feed(step, from)?,
            None => None,
        };
        Ok(())
    }

    fn draw(
        &mut self,
        kv: &mut MlxKv,
        hidden: &Array,
        (norm, w, shape): (&Norm<MlxVector>, &MlxWeight, &LogitShape),
        rows: &[usize],
    ) -> Result<MlxDraws, EngineError> {
        let draws = match rows.is_empty() {
            true => MlxDraws::nothing(hidden),
            false => MlxDraws::best(&self.logits(hidden, norm, w, rows)?, shape)?,
        };
        draws.start()?;
        let before = kv.copies().slab_copies;
        kv.settle(false)?;
        if self.overlap && kv.copies().slab_copies > before {
            self.copying_overlaps += 1;
        }
        Ok(draws)
    }

    fn drawn(&mut self, draws: &MlxDraws) -> Result<Vec<Option<TokenId>>, EngineError> {
        draws.wait()
    }

    fn overlap_pays(&self) -> bool {
        self.copying_overlaps < MOST_COPYING_OVERLAPS
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
