//! A decoder block: attention and a gated unit, each added to the residual
//! stream, with norms before them, after them, or both.
//!
//! What differs between families is data here ([`BlockSpec`], [`LayerSpec`]); five to
//! seven calls into the operators a layer. Packing checks every tensor's shape.

use crate::model::load::TensorTable;
use crate::model::ops::{Act, AttnSpec, LayerId, Norm, Ops, Rope, Step};
use crate::types::{EngineError, LoadError};

use super::hyperparameters::Sizes;

/// Where a block has its norms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Norms {
    /// Of the input of attention and of the gated unit.
    Before,
    /// Of the input and of the output of both.
    BeforeAndAfter,
    /// Of the output of both.
    After,
}

/// Which queries and keys are normed before they are rotated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadNorms {
    /// None.
    None,
    /// Each head by itself, with weights `[head_dim]`.
    Each,
    /// All heads as one, with weights `[heads · head_dim]`.
    Whole,
}

/// What a family says about all its blocks. [`Self::standard`] is the usual; families
/// change what they have differently.
#[derive(Clone, Debug)]
pub struct BlockSpec {
    /// Norms of the residual stream.
    pub norms: Norms,
    /// Norms of queries and keys.
    pub head_norms: HeadNorms,
    /// Added to every norm's weights, where a checkpoint stores them less this.
    pub norm_offset: f32,
    /// Queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The attention's output has a bias.
    pub output_bias: bool,
    /// The three products of the gated unit have biases.
    pub mlp_bias: bool,
    /// One tensor holds queries, keys and values, one holds gate and up.
    pub fused: bool,
    /// Of the gated unit.
    pub act: Act,
    /// Multiplies attention's scores.
    pub scale: f32,
    /// A scaled score `s` becomes `cap · tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Multiplies what is added to the residual stream.
    pub residual_scale: f32,
}

impl BlockSpec {
    /// Norms before, SiLU, no biases, scores over the root of the head's width.
    pub fn standard(sizes: &Sizes) -> Self {
        Self {
            norms: Norms::Before,
            head_norms: HeadNorms::None,
            norm_offset: 0.0,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            fused: false,
            act: Act::Silu,
            scale: 1.0 / (sizes.head_dim as f32).sqrt(),
            softcap: None,
            residual_scale: 1.0,
        }
    }
}

/// What one layer has for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerSpec {
    /// Sees only the last so many positions, itself included.
    pub window: Option<u32>,
    /// Index of its frequencies in the stack's list; `None`: no rotation.
    pub rope: Option<usize>,
}

/// A packed product with its bias.
struct PackedLinear<O: Ops> {
    w: O::Packed,
    bias: Option<Vec<f32>>,
}

impl<O: Ops> PackedLinear<O> {
    fn adopt(self, ops: &mut O) -> Result<Linear<O>, EngineError> {
        let bias = self.bias.map(|bias| ops.vector(&bias)).transpose()?;
        Ok(Linear { w: ops.adopt(self.w)?, bias })
    }
}

/// A product with its bias on a backend.
struct Linear<O: Ops> {
    w: O::W,
    bias: Option<O::V>,
}

impl<O: Ops> Linear<O> {
    /// `norm(x) · wᵀ + bias`; without a norm of x itself.
    fn forward(&self, ops: &mut O, x: &O::T, norm: Option<&Norm<O::V>>) -> Result<O::T, EngineError> {
        let out = match norm {
            Some(norm) => ops.norm_linear(x, norm, &self.w)?,
            None => ops.linear(x, &self.w)?,
        };
        match &self.bias {
            Some(bias) => ops.add_bias(out, bias),
            None => Ok(out),
        }
    }
}

/// A block's weights, packed.
pub struct PackedBlock<O: Ops> {
    spec: BlockSpec,
    /// Before attention, after it, before the gated unit, after it.
    norms: [Option<Vec<f32>>; 4],
    head_norms: Option<(Vec<f32>, Vec<f32>)>,
    qkv: PackedLinear<O>,
    output: PackedLinear<O>,
    gate_up: PackedLinear<O>,
    down: PackedLinear<O>,
}

/// A block on a backend.
pub struct Block<O: Ops> {
    norms: [Option<Norm<O::V>>; 4],
    attention: AttnSpec<O::V>,
    qkv: Linear<O>,
    output: Linear<O>,
    gate_up: Linear<O>,
    down: Linear<O>,
    act: Act,
    residual_scale: f32,
}

/// Names and rows of matrices that are stacked.
type Parts<'a> = &'a [(&'a str, usize)];

/// Reads and packs one block's tensors.
struct Packer<'a, O: Ops> {
    tensors: &'a TensorTable,
    /// `model.layers.0`.
    prefix: String,
    norm_offset: f32,
    config: &'a O::Config,
}

impl<O: Ops> Packer<'_, O> {
    /// Matrices `(name, rows)` of equal width, stacked, with their biases.
    fn linear(&self, parts: Parts<'_>, cols: usize, biased: bool) -> Result<PackedLinear<O>, LoadError> {
        let prefix = &self.prefix;
        let matrices = parts
            .iter()
            .map(|(name, rows)| self.tensors.matrix(&format!("{prefix}.{name}.weight"), *rows, cols))
            .collect::<Result<Vec<_>, _>>()?;
        let biases = parts.iter().filter(|_| biased);
        let biases = biases
            .map(|(name, rows)| self.tensors.vector(&format!("{prefix}.{name}.bias"), *rows))
            .collect::<Result<Vec<_>, _>>()?;
        let bias = biased.then(|| biases.concat());
        Ok(PackedLinear { w: O::pack(self.config, &matrices)?, bias })
    }

    fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let mut weights = self.tensors.vector(&format!("{}.{name}.weight", self.prefix), len)?;
        weights.iter_mut().for_each(|weight| *weight += self.norm_offset);
        Ok(weights)
    }

    fn norms(&self, kind: Norms, hidden: usize) -> Result<[Option<Vec<f32>>; 4], LoadError> {
        // The name of the second differs in what it norms: the unit's input, or attention's output.
        let norm = |name| self.norm(name, hidden).map(Some);
        let (input, attended) = ("input_layernorm", "post_attention_layernorm");
        let (before, after) = ("pre_feedforward_layernorm", "post_feedforward_layernorm");
        Ok(match kind {
            Norms::Before => [norm(input)?, None, norm(attended)?, None],
            Norms::BeforeAndAfter => [norm(input)?, norm(attended)?, norm(before)?, norm(after)?],
            Norms::After => [None, norm(attended)?, None, norm(after)?],
        })
    }
}

impl<O: Ops> PackedBlock<O> {
    /// Packs the block whose tensor names start with `prefix` (`model.layers.0`).
    ///
    /// # Errors
    /// `Tensor` for one that is missing or has another shape; those of [`Ops::pack`].
    pub fn pack(
        tensors: &TensorTable,
        prefix: String,
        sizes: &Sizes,
        spec: &BlockSpec,
        config: &O::Config,
    ) -> Result<Self, LoadError> {
        let (hidden, wide) = (sizes.hidden, sizes.intermediate);
        let (q, kv) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
        let packer = Packer::<O> { tensors, prefix, norm_offset: spec.norm_offset, config };
        let (qkv, gate_up): (Parts<'_>, Parts<'_>) = match spec.fused {
            true => (&[("self_attn.qkv_proj", q + 2 * kv)], &[("mlp.gate_up_proj", 2 * wide)]),
            false => (
                &[("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
                &[("mlp.gate_proj", wide), ("mlp.up_proj", wide)],
            ),
        };
        let head_norms = match spec.head_norms {
            HeadNorms::None => None,
            HeadNorms::Each => Some((sizes.head_dim, sizes.head_dim)),
            HeadNorms::Whole => Some((q, kv)),
        };
        Ok(Self {
            norms: packer.norms(spec.norms, hidden)?,
            head_norms: head_norms
                .map(|(q, k)| {
                    Ok::<_, LoadError>((
                        packer.norm("self_attn.q_norm", q)?,
                        packer.norm("self_attn.k_norm", k)?,
                    ))
                })
                .transpose()?,
            qkv: packer.linear(qkv, hidden, spec.qkv_bias)?,
            output: packer.linear(&[("self_attn.o_proj", hidden)], q, spec.output_bias)?,
            gate_up: packer.linear(gate_up, hidden, spec.mlp_bias)?,
            down: packer.linear(&[("mlp.down_proj", hidden)], wide, spec.mlp_bias)?,
            spec: spec.clone(),
        })
    }

    /// Hands the weights to the backend.
    ///
    /// # Errors
    /// `Device`.
    pub fn adopt(
        self,
        ops: &mut O,
        sizes: &Sizes,
        rope: Option<Rope<O::V>>,
        window: Option<u32>,
    ) -> Result<Block<O>, EngineError> {
        let mut norm = |weight: &Vec<f32>| Ok(Norm { weight: ops.vector(weight)?, eps: sizes.eps });
        let [a, b, c, d] = &self.norms;
        let mut optional = |weight: &Option<Vec<f32>>| weight.as_ref().map(&mut norm).transpose();
        let norms = [optional(a)?, optional(b)?, optional(c)?, optional(d)?];
        let (q_norm, k_norm) = match &self.head_norms {
            Some((q, k)) => (Some(norm(q)?), Some(norm(k)?)),
            None => (None, None),
        };
        let attention = AttnSpec {
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            scale: self.spec.scale,
            softcap: self.spec.softcap,
            window,
            rope,
            q_norm,
            k_norm,
        };
        Ok(Block {
            norms,
            attention,
            qkv: self.qkv.adopt(ops)?,
            output: self.output.adopt(ops)?,
            gate_up: self.gate_up.adopt(ops)?,
            down: self.down.adopt(ops)?,
            act: self.spec.act,
            residual_scale: self.spec.residual_scale,
        })
    }
}

impl<O: Ops> Block<O> {
    /// The residual stream `[tokens, hidden]` after this block.
    ///
    /// # Errors
    /// Those of the operators.
    pub fn forward(
        &self,
        ops: &mut O,
        kv: &mut O::Kv,
        layer: LayerId,
        x: O::T,
        step: &Step<'_>,
    ) -> Result<O::T, EngineError> {
        let [before_attention, after_attention, before_unit, after_unit] = &self.norms;
        let qkv = self.qkv.forward(ops, &x, before_attention.as_ref())?;
        let attended = ops.attend(kv, layer, qkv, &self.attention, step)?;
        let x = self.join(ops, attended, &self.output, after_attention.as_ref(), x)?;
        let gate_up = self.gate_up.forward(ops, &x, before_unit.as_ref())?;
        let gated = ops.glu(gate_up, self.act)?;
        self.join(ops, gated, &self.down, after_unit.as_ref(), x)
    }

    /// `residual + scale · norm(x · wᵀ + bias)`, in one operator where that is all of it.
    fn join(
        &self,
        ops: &mut O,
        x: O::T,
        linear: &Linear<O>,
        norm: Option<&Norm<O::V>>,
        residual: O::T,
    ) -> Result<O::T, EngineError> {
        if norm.is_none() && linear.bias.is_none() && self.residual_scale == 1.0 {
            return ops.linear_add(x, &linear.w, residual);
        }
        let out = linear.forward(ops, &x, None)?;
        ops.add_residual(out, norm, self.residual_scale, residual)
    }
}
