//! `CpuOps`: our own CPU backend, eager, plain Rust over an arena of f32 buffers.
//!
//! No graph, no BLAS, nothing native. Kernels live in the modules below; this
//! file is the [`Ops`] over them. Invariants: each output is one fixed chain of
//! operations, whatever the number of threads, the tokens that come together or
//! the instruction set; keys and values are read as stored; so a row alone and in
//! a batch, in any chunking, gives the same bits.

#![allow(unsafe_code, reason = "vector instructions, and buffers that threads write at disjoint places")]
#![allow(clippy::needless_range_loop, reason = "kernels index several arrays of lanes and tokens together")]

use std::sync::Arc;

use crate::config::{Activations, CpuConfig, KvType};
use crate::model::load::HostTensor;
use crate::model::ops::{Act, AttnSpec, LayerId, LogitShape, Logits, Norm, Ops, StartOps, Step};
use crate::types::{EngineError, LoadError};

pub mod arena;
pub mod attention;
pub mod kv;
pub mod limits;
pub mod linear;
pub mod math;
pub mod memory;
pub mod pack;
pub mod pool;
pub mod rope;
pub mod simd;
mod speech;
pub mod weight;

pub use arena::Tensor;
pub use kv::CpuKv;
pub use simd::SimdPath;
pub use weight::PackedWeight;

use arena::Arena;
use attention::Vector;
use linear::{Inputs, Int8Rows, Machine, Store};
use math::{AddResidual, Capped, Gated, RmsNorm};
use pool::{ThreadPool, physical_cores};
use rope::RopeTables;
use simd::dispatch;
use weight::Format;

/// Grows with every change of a kernel that changes bits.
const KERNEL_VERSION: u32 = 1;
/// Elements below which rows are prepared on the calling thread alone.
const SPREAD: usize = 1 << 14;

/// The operators on the CPU. One thread owns them; kernels use the process's pool.
#[derive(Debug)]
pub struct CpuOps {
    activations: Activations,
    kv: KvType,
    path: SimdPath,
    pool: Arc<ThreadPool>,
    threads: usize,
    arena: Arena,
    int8: Int8Rows,
    ropes: RopeTables,
    attention: attention::Scratch,
    weight_bytes: u64,
}

impl CpuOps {
    /// Starts with a given instruction set instead of the best one.
    ///
    /// # Errors
    /// `Device` when this processor lacks it, `cpu.threads` is 0, threads cannot be started or the
    /// key-value budget holds no block.
    pub fn with_path(
        config: &CpuConfig,
        start: &StartOps,
        path: SimdPath,
    ) -> Result<(Self, CpuKv), EngineError> {
        if !path.is_supported() {
            return Err(device(format!("this processor cannot run the {} kernels", path.name())));
        }
        let threads = config.threads.unwrap_or_else(physical_cores);
        if threads == 0 {
            return Err(device("cpu.threads is 0: use 1 or more, or leave it unset".into()));
        }
        let pool = ThreadPool::shared(threads);
        let pool = pool.map_err(|error| device(format!("{threads} compute threads: {error}")))?;
        let kv = CpuKv::new(start, config.kv)?;
        let ops = Self {
            activations: config.activations,
            kv: config.kv,
            path,
            pool,
            threads,
            arena: Arena::default(),
            int8: Int8Rows::default(),
            ropes: RopeTables::default(),
            attention: attention::Scratch::default(),
            weight_bytes: 0,
        };
        Ok((ops, kv))
    }

    /// A tensor `[tokens, width]` from the arena, with these values.
    pub fn tensor(&self, tokens: usize, values: &[f32]) -> Tensor {
        let mut tensor = self.arena.take(tokens, values.len() / tokens.max(1));
        let len = tensor.data().len();
        tensor.data_mut().copy_from_slice(&values[..len]);
        tensor
    }

    /// Buffers allocated so far: a steady decode step adds none.
    pub fn allocations(&self) -> u64 {
        self.arena.allocations()
    }

    fn machine(&self) -> Machine<'_> {
        Machine { path: self.path, pool: &self.pool, threads: self.threads }
    }

    /// Multiplies `x`, `[tokens][w.cols]`, rounding it to int8 first where the weight and the mode want it.
    fn multiply(
        &mut self,
        x: &Tensor,
        w: &PackedWeight,
        out: &mut [f32],
        store: Store,
    ) -> Result<(), EngineError> {
        expect(x.width(), w.cols, "columns of a product")?;
        let tokens = x.tokens();
        let quantised = w.parts.iter().any(|part| matches!(part.format, Format::Quantised(_)));
        let rounds = quantised && self.activations == Activations::Int8;
        let mut int8 = std::mem::take(&mut self.int8);
        if rounds {
            int8.resize(tokens, w.cols);
            let (rows, path, x) = (int8.disjoint(), self.path, x.data());
            self.each_token(tokens, w.cols, |token| {
                // SAFETY: each token is claimed by one thread.
                unsafe { rows.row(token) }.round(path, &x[token * w.cols..(token + 1) * w.cols]);
            });
        }
        let inputs = Inputs { tokens, f32: x.data(), int8: rounds.then_some(&int8) };
        linear::product(self.machine(), w, inputs, out, store);
        self.int8 = int8;
        Ok(())
    }

    /// The norm of `count` tokens of `x`: those that `pick` names, in order.
    fn normed(
        &self,
        x: &Tensor,
        norm: &Norm<Vector>,
        count: usize,
        pick: impl Fn(usize) -> usize + Sync,
    ) -> Result<Tensor, EngineError> {
        let width = x.width();
        expect(norm.weight.len(), width, "weights of a norm")?;
        let mut out = self.arena.take(count, width);
        let (rows, path, x) = (DisjointRows::new(out.data_mut(), width), self.path, x.data());
        self.each_token(count, width, |index| {
            // SAFETY: each index is claimed by one thread.
            let out = unsafe { rows.get(index) };
            let x = &x[pick(index) * width..(pick(index) + 1) * width];
            dispatch(path, RmsNorm { x, weight: &norm.weight, eps: norm.eps, out });
        });
        Ok(out)
    }

    /// Calls `body` with each of `0..tokens`, on several threads when there is enough to do.
    fn each_token(&self, tokens: usize, width: usize, body: impl Fn(usize) + Sync) {
        let grain = (SPREAD / width.max(1)).max(tokens.div_ceil(4 * self.threads)).max(1);
        self.pool.run(self.threads, tokens, grain, &|range| range.for_each(&body));
    }
}

fn device(message: String) -> EngineError {
    EngineError::Device { message }
}

fn invalid(message: String) -> EngineError {
    EngineError::InvalidPlan { message }
}

fn expect(got: usize, wanted: usize, what: &str) -> Result<(), EngineError> {
    if got == wanted { Ok(()) } else { Err(invalid(format!("{what}: {got}, expected {wanted}"))) }
}

/// Rows of a buffer that threads write at disjoint places.
struct DisjointRows {
    start: *mut f32,
    width: usize,
    rows: usize,
}

// SAFETY: `get` makes its caller vouch that no row is handed out twice at a time.
unsafe impl Sync for DisjointRows {}

impl DisjointRows {
    fn new(data: &mut [f32], width: usize) -> Self {
        Self { start: data.as_mut_ptr(), width, rows: data.len().checked_div(width).unwrap_or(0) }
    }

    /// # Safety
    /// Nobody else holds this row, and the buffer is alive and otherwise unused.
    #[allow(clippy::mut_from_ref, reason = "that is the point; see Safety")]
    unsafe fn get(&self, row: usize) -> &mut [f32] {
        assert!(row < self.rows || self.width == 0, "a row of the buffer");
        // SAFETY: inside the buffer by the assertion; exclusive by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.width), self.width) }
    }
}

impl Ops for CpuOps {
    type Config = CpuConfig;
    type T = Tensor;
    type Draws = ();
    type W = PackedWeight;
    type V = Vector;
    type Packed = PackedWeight;
    type Kv = CpuKv;

    const SURVIVES_PANICS: bool = true;

    fn pack(config: &CpuConfig, parts: &[HostTensor<'_>]) -> Result<PackedWeight, LoadError> {
        pack::pack(config, parts)
    }

    fn start(config: &CpuConfig, start: &StartOps) -> Result<(Self, CpuKv), EngineError> {
        Self::with_path(config, start, SimdPath::from_env()?)
    }

    fn adopt(&mut self, packed: PackedWeight) -> Result<PackedWeight, EngineError> {
        self.weight_bytes += packed.bytes();
        Ok(packed)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector, EngineError> {
        Ok(values.into())
    }

    fn embed(&mut self, table: &PackedWeight, step: &Step<'_>) -> Result<Tensor, EngineError> {
        let tokens = step.tokens;
        if let Some(token) = tokens.iter().find(|token| token.0 as usize >= table.rows) {
            return Err(invalid(format!("token {token} of a vocabulary of {}", table.rows)));
        }
        let mut out = self.arena.take(tokens.len(), table.cols);
        let rows = DisjointRows::new(out.data_mut(), table.cols);
        self.each_token(tokens.len(), table.cols, |index| {
            // SAFETY: each index is claimed by one thread.
            let out = unsafe { rows.get(index) };
            table.dequantize_row(tokens[index].0 as usize, out);
        });
        Ok(out)
    }

    fn norm_linear(
        &mut self,
        x: &Tensor,
        norm: &Norm<Vector>,
        w: &PackedWeight,
    ) -> Result<Tensor, EngineError> {
        let normed = self.normed(x, norm, x.tokens(), |index| index)?;
        let mut out = self.arena.take(x.tokens(), w.rows);
        self.multiply(&normed, w, out.data_mut(), Store::Set)?;
        Ok(out)
    }

    fn linear(&mut self, x: &Tensor, w: &PackedWeight) -> Result<Tensor, EngineError> {
        let mut out = self.arena.take(x.tokens(), w.rows);
        self.multiply(x, w, out.data_mut(), Store::Set)?;
        Ok(out)
    }

    fn add_bias(&mut self, mut x: Tensor, bias: &Vector) -> Result<Tensor, EngineError> {
        let (tokens, width) = (x.tokens(), x.width());
        expect(bias.len(), width, "elements of a bias")?;
        let rows = DisjointRows::new(x.data_mut(), width);
        self.each_token(tokens, width, |token| {
            // SAFETY: each token is claimed by one thread.
            let x = unsafe { rows.get(token) };
            x.iter_mut().zip(bias.iter()).for_each(|(x, bias)| *x += *bias);
        });
        Ok(x)
    }

    fn scale(&mut self, mut x: Tensor, by: f32) -> Result<Tensor, EngineError> {
        x.data_mut().iter_mut().for_each(|x| *x *= by);
        Ok(x)
    }

    fn add_residual(
        &mut self,
        x: Tensor,
        norm: Option<&Norm<Vector>>,
        by: f32,
        residual: Tensor,
    ) -> Result<Tensor, EngineError> {
        let (mut out, width) = (residual, x.width());
        expect(out.tokens(), x.tokens(), "tokens of a residual")?;
        expect(out.width(), width, "columns of a residual")?;
        expect(norm.map_or(width, |norm| norm.weight.len()), width, "weights of a norm")?;
        let norm = norm.map(|norm| (&norm.weight[..], norm.eps));
        let (rows, path, data) = (DisjointRows::new(out.data_mut(), width), self.path, x.data());
        self.each_token(x.tokens(), width, |token| {
            // SAFETY: each token is claimed by one thread.
            let out = unsafe { rows.get(token) };
            let x = &data[token * width..(token + 1) * width];
            dispatch(path, AddResidual { x, norm, by, out });
        });
        Ok(out)
    }

    fn attend(
        &mut self,
        kv: &mut CpuKv,
        layer: LayerId,
        mut qkv: Tensor,
        spec: &AttnSpec<Vector>,
        step: &Step<'_>,
    ) -> Result<Tensor, EngineError> {
        let tokens = step.tokens.len();
        expect(qkv.tokens(), tokens, "tokens of an attention")?;
        expect(qkv.width(), (spec.heads + 2 * spec.kv_heads) * spec.head_dim, "columns of an attention")?;
        let mut out = self.arena.take(tokens, spec.heads * spec.head_dim);
        let end = step.rows.iter().map(|row| row.start as usize + row.len).max().unwrap_or(0);
        let rope = spec.rope.as_ref().map(|rope| self.ropes.covering(&rope.inv_freq, rope.scale, end));
        let machine = Machine { path: self.path, pool: &self.pool, threads: self.threads };
        let scratch = &mut self.attention;
        let (qkv, data) = (qkv.data_mut(), out.data_mut());
        attention::attend(machine, kv, layer, spec, rope, step, scratch, qkv, data)?;
        Ok(out)
    }

    fn linear_add(&mut self, x: Tensor, w: &PackedWeight, residual: Tensor) -> Result<Tensor, EngineError> {
        let mut out = residual;
        expect(out.tokens(), x.tokens(), "tokens of a residual")?;
        expect(out.width(), w.rows, "columns of a residual")?;
        self.multiply(&x, w, out.data_mut(), Store::Add)?;
        Ok(out)
    }

    fn glu(&mut self, x: Tensor, act: Act) -> Result<Tensor, EngineError> {
        let width = x.width() / 2;
        expect(2 * width, x.width(), "columns of a gated unit")?;
        let mut out = self.arena.take(x.tokens(), width);
        let (rows, path, data) = (DisjointRows::new(out.data_mut(), width), self.path, x.data());
        self.each_token(x.tokens(), width, |token| {
            let (gate, up) = data[2 * token * width..2 * (token + 1) * width].split_at(width);
            // SAFETY: each token is claimed by one thread.
            let out = unsafe { rows.get(token) };
            dispatch(path, Gated { gate, up, out, act });
        });
        Ok(out)
    }

    fn head(
        &mut self,
        x: &Tensor,
        norm: &Norm<Vector>,
        w: &PackedWeight,
        rows: &[usize],
    ) -> Result<Logits, EngineError> {
        if let Some(token) = rows.iter().find(|token| **token >= x.tokens()) {
            return Err(invalid(format!("logits of token {token} of {}", x.tokens())));
        }
        let normed = self.normed(x, norm, rows.len(), |index| rows[index])?;
        let mut data = vec![0.0; rows.len() * w.rows];
        self.multiply(&normed, w, &mut data, Store::Set)?;
        Ok(Logits { vocab: w.rows, data })
    }

    fn shape_logits(&mut self, logits: &mut Logits, shape: &LogitShape) {
        let LogitShape { scale, softcap } = *shape;
        dispatch(self.path, Capped { x: &mut logits.data, scale, softcap });
    }

    fn numerics_id(&self) -> String {
        // Every instruction set gives the same bits, so it is not part of the name.
        let activations = match self.activations {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        };
        let kv = match self.kv {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
        };
        format!("cpu-{KERNEL_VERSION}/activations-{activations}/kv-{kv}")
    }

    fn device(&self) -> String {
        format!("CPU, {} kernels, {} threads", self.path.name(), self.threads)
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}
