//! The decoder that most families are: embedding, standard blocks, norm, head
//! (its own, or the embedding again).

use crate::model::load::ModelFiles;
use crate::model::ops::{KvShape, LayerId, Logits, Norm, Ops, Rope, Step};
use crate::types::{EngineError, LoadError};

use super::block::{Block, BlockSpec, PackedBlock};
use super::{Adopt, Decoder, DecoderFacts, PackedDecoder};

/// A stack's weights, packed.
struct PackedStack<O: Ops> {
    spec: BlockSpec,
    embedding: O::Packed,
    blocks: Vec<PackedBlock<O>>,
    norm: Vec<f32>,
    head: Option<O::Packed>,
}

/// A stack on a backend.
struct Stack<O: Ops> {
    embedding: O::W,
    blocks: Vec<Block<O>>,
    norm: Norm<O::V>,
    /// `None`: the embedding.
    head: Option<O::W>,
}

/// Packs a model whose tensors have Hugging Face's usual names.
///
/// # Errors
/// `Tensor` for one that is missing or has another shape; those of [`Ops::pack`].
pub fn pack<O: Ops + 'static>(
    files: &ModelFiles,
    spec: BlockSpec,
    config: &O::Config,
) -> Result<PackedDecoder<O>, LoadError> {
    let (tensors, sizes) = (&files.tensors, &spec.sizes);
    let facts = facts(&spec);
    let table = |name: &str| tensors.matrix(name, sizes.vocab, sizes.hidden);
    let embedding = O::pack(config, &[table("model.embed_tokens.weight")?])?;
    let head = match (sizes.tied, tensors.has("lm_head.weight")) {
        (false, _) => Some(O::pack(config, &[table("lm_head.weight")?])?),
        // Some checkpoints store the tied head once more: checked, then passed over.
        (true, true) => table("lm_head.weight").map(|_| None)?,
        (true, false) => None,
    };
    let blocks = (0..sizes.layers)
        .map(|layer| PackedBlock::pack(tensors, &format!("model.layers.{layer}"), &spec, config))
        .collect::<Result<_, _>>()?;
    let norm = tensors.vector("model.norm.weight", sizes.hidden)?;
    let weights = Box::new(PackedStack::<O> { spec, embedding, blocks, norm, head });
    Ok(PackedDecoder { facts, weights })
}

fn facts(spec: &BlockSpec) -> DecoderFacts {
    let sizes = &spec.sizes;
    let kv = KvShape { layers: sizes.layers, kv_heads: sizes.kv_heads, head_dim: sizes.head_dim };
    DecoderFacts { vocab: sizes.vocab as u32, context: sizes.context, kv }
}

impl<O: Ops + 'static> Adopt<O> for PackedStack<O> {
    fn adopt(self: Box<Self>, ops: &mut O) -> Result<Box<dyn Decoder<O>>, EngineError> {
        let sizes = &self.spec.sizes;
        let rope = Rope { inv_freq: ops.vector(&self.spec.inv_freq)?, dims: 2 * self.spec.inv_freq.len() };
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in self.blocks {
            blocks.push(block.adopt(ops, sizes, &rope)?);
        }
        Ok(Box::new(Stack {
            embedding: ops.adopt(self.embedding)?,
            blocks,
            norm: Norm { weight: ops.vector(&self.norm)?, eps: sizes.eps },
            head: self.head.map(|head| ops.adopt(head)).transpose()?,
        }))
    }
}

impl<O: Ops> Decoder<O> for Stack<O> {
    fn forward(&self, ops: &mut O, kv: &mut O::Kv, step: &Step<'_>) -> Result<O::T, EngineError> {
        let mut x = ops.embed(&self.embedding, step)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(ops, kv, LayerId(layer), x, step)?;
        }
        Ok(x)
    }

    fn logits(&self, ops: &mut O, hidden: &O::T, rows: &[usize]) -> Result<Logits, EngineError> {
        ops.head(hidden, &self.norm, self.head.as_ref().unwrap_or(&self.embedding), rows)
    }
}
