//! The standard pre-norm decoder block: norm, grouped-query attention, residual,
//! norm, gated unit, residual.
//!
//! Five calls into the operators a layer and its attention. Packing checks every
//! tensor's shape.

use crate::model::load::TensorTable;
use crate::model::ops::{Act, AttnSpec, LayerId, Norm, Ops, Rope, Step};
use crate::types::{EngineError, LoadError};

use super::hyperparameters::Sizes;

/// What a family says about its blocks.
#[derive(Clone, Debug)]
pub struct BlockSpec {
    /// Widths and heads.
    pub sizes: Sizes,
    /// Radians a position, `[head_dim / 2]`.
    pub inv_freq: Vec<f32>,
    /// Query and key heads are normed before they are rotated.
    pub head_norms: bool,
}

/// A block's weights, packed.
pub struct PackedBlock<O: Ops> {
    input_norm: Vec<f32>,
    qkv: O::Packed,
    head_norms: Option<(Vec<f32>, Vec<f32>)>,
    output: O::Packed,
    post_norm: Vec<f32>,
    gate_up: O::Packed,
    down: O::Packed,
}

/// A block on a backend.
pub struct Block<O: Ops> {
    input_norm: Norm<O::V>,
    qkv: O::W,
    attention: AttnSpec<O::V>,
    output: O::W,
    post_norm: Norm<O::V>,
    gate_up: O::W,
    down: O::W,
}

impl<O: Ops> PackedBlock<O> {
    /// Packs the block whose tensor names start with `prefix` (`model.layers.0`).
    ///
    /// # Errors
    /// `Tensor` for one that is missing or has another shape; those of [`Ops::pack`].
    pub fn pack(
        tensors: &TensorTable,
        prefix: &str,
        spec: &BlockSpec,
        config: &O::Config,
    ) -> Result<Self, LoadError> {
        let sizes = &spec.sizes;
        let (hidden, wide) = (sizes.hidden, sizes.intermediate);
        let (q_rows, kv_rows) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
        let matrix = |name: &str, rows, cols| tensors.matrix(&format!("{prefix}.{name}.weight"), rows, cols);
        let vector = |name: &str, len| tensors.vector(&format!("{prefix}.{name}.weight"), len);
        let qkv = [
            matrix("self_attn.q_proj", q_rows, hidden)?,
            matrix("self_attn.k_proj", kv_rows, hidden)?,
            matrix("self_attn.v_proj", kv_rows, hidden)?,
        ];
        let gate_up = [matrix("mlp.gate_proj", wide, hidden)?, matrix("mlp.up_proj", wide, hidden)?];
        let head_norms = match spec.head_norms {
            true => Some((
                vector("self_attn.q_norm", sizes.head_dim)?,
                vector("self_attn.k_norm", sizes.head_dim)?,
            )),
            false => None,
        };
        Ok(Self {
            input_norm: vector("input_layernorm", hidden)?,
            qkv: O::pack(config, &qkv)?,
            head_norms,
            output: O::pack(config, &[matrix("self_attn.o_proj", hidden, q_rows)?])?,
            post_norm: vector("post_attention_layernorm", hidden)?,
            gate_up: O::pack(config, &gate_up)?,
            down: O::pack(config, &[matrix("mlp.down_proj", hidden, wide)?])?,
        })
    }

    /// Hands the weights to the backend. `rope` is the stack's, shared by all blocks.
    ///
    /// # Errors
    /// `Device`.
    pub fn adopt(self, ops: &mut O, sizes: &Sizes, rope: &Rope<O::V>) -> Result<Block<O>, EngineError> {
        let eps = sizes.eps;
        let mut norm = |weight: &[f32]| Ok(Norm { weight: ops.vector(weight)?, eps });
        let input_norm = norm(&self.input_norm)?;
        let post_norm = norm(&self.post_norm)?;
        let (q_norm, k_norm) = match &self.head_norms {
            Some((q, k)) => (Some(norm(q)?), Some(norm(k)?)),
            None => (None, None),
        };
        let attention = AttnSpec {
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            scale: 1.0 / (sizes.head_dim as f32).sqrt(),
            window: None,
            rope: Some(rope.clone()),
            q_norm,
            k_norm,
        };
        Ok(Block {
            input_norm,
            qkv: ops.adopt(self.qkv)?,
            attention,
            output: ops.adopt(self.output)?,
            post_norm,
            gate_up: ops.adopt(self.gate_up)?,
            down: ops.adopt(self.down)?,
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
        let qkv = ops.norm_linear(&x, &self.input_norm, &self.qkv)?;
        let attended = ops.attend(kv, layer, qkv, &self.attention, step)?;
        let x = ops.linear_add(attended, &self.output, x)?;
        let gate_up = ops.norm_linear(&x, &self.post_norm, &self.gate_up)?;
        let gated = ops.glu(gate_up, Act::Silu)?;
        ops.linear_add(gated, &self.down, x)
    }
}
