//! The decoder that families are: embedding, blocks, norm, head (its own, or the
//! embedding again).
//!
//! [`StackSpec`] is all that a family has to say; nothing here knows one.

use serde_json::Value;

use crate::model::load::{ModelFiles, TensorTable};
use crate::model::ops::{KvShape, LayerId, LogitShape, Logits, Norm, Ops, Rope, Step};
use crate::types::{EngineError, LoadError};

use super::block::{Block, BlockSpec, LayerSpec, PackedBlock};
use super::hyperparameters::Sizes;
use super::rope::RopeSpec;
use super::{Adopt, Decoder, DecoderFacts, PackedDecoder, declared_type};

/// How tensors are called: what stands before `layers.0` and `norm`, and the head.
const NAMES: &[(&str, &str)] = &[
    ("model", "lm_head"),
    // The text part of a model that was made for more.
    ("language_model.model", "language_model.lm_head"),
    ("model.language_model", "lm_head"),
];

/// What a family says about a model.
#[derive(Clone, Debug)]
pub struct StackSpec {
    /// Widths and heads.
    pub sizes: Sizes,
    /// Of every block.
    pub block: BlockSpec,
    /// One a layer.
    pub layers: Vec<LayerSpec>,
    /// Frequencies, which layers name by index.
    pub ropes: Vec<RopeSpec>,
    /// Multiplies the embedding.
    pub embedding_scale: f32,
    /// What becomes of logits.
    pub logits: LogitShape,
}

impl StackSpec {
    /// Standard blocks that all see everything and share one rope.
    pub fn standard(sizes: Sizes, rope: RopeSpec) -> Self {
        Self {
            block: BlockSpec::standard(&sizes),
            layers: vec![LayerSpec { window: None, rope: Some(0) }; sizes.layers],
            ropes: vec![rope],
            embedding_scale: 1.0,
            logits: LogitShape { scale: 1.0, softcap: None },
            sizes,
        }
    }

    /// Gives each layer its window.
    pub fn with_windows(mut self, windows: &[Option<u32>]) -> Self {
        for (layer, window) in self.layers.iter_mut().zip(windows) {
            layer.window = *window;
        }
        self
    }
}

/// A stack's weights, packed.
struct PackedStack<O: Ops> {
    spec: StackSpec,
    embedding: O::Packed,
    blocks: Vec<PackedBlock<O>>,
    norm: Vec<f32>,
    head: Option<O::Packed>,
}

/// A stack on a backend.
struct Stack<O: Ops> {
    embedding: O::W,
    embedding_scale: f32,
    blocks: Vec<Block<O>>,
    norm: Norm<O::V>,
    /// `None`: the embedding.
    head: Option<O::W>,
    logits: LogitShape,
}

/// Packs a model whose tensors have Hugging Face's usual names.
///
/// # Errors
/// `Tensor` for one that is missing or has another shape; those of [`Ops::pack`].
pub fn pack<O: Ops + 'static>(
    files: &ModelFiles,
    spec: StackSpec,
    config: &O::Config,
) -> Result<PackedDecoder<O>, LoadError> {
    let (tensors, sizes) = (&files.tensors, &spec.sizes);
    let (prefix, head) = names(tensors);
    let facts = facts(&spec);
    let table = |name: &str| tensors.matrix(name, sizes.vocab, sizes.hidden);
    let embedding = O::pack(config, &[table(&format!("{prefix}.embed_tokens.weight"))?])?;
    let head_name = format!("{head}.weight");
    let head = match (sizes.tied, tensors.has(&head_name)) {
        (false, _) => Some(O::pack(config, &[table(&head_name)?])?),
        // Some checkpoints store the tied head once more: checked, then passed over.
        (true, true) => table(&head_name).map(|_| None)?,
        (true, false) => None,
    };
    let block =
        |layer| PackedBlock::pack(tensors, format!("{prefix}.layers.{layer}"), sizes, &spec.block, config);
    let blocks = (0..sizes.layers).map(block).collect::<Result<_, _>>()?;
    let mut norm = tensors.vector(&format!("{prefix}.norm.weight"), sizes.hidden)?;
    norm.iter_mut().for_each(|weight| *weight += spec.block.norm_offset);
    let weights = Box::new(PackedStack::<O> { spec, embedding, blocks, norm, head });
    Ok(PackedDecoder { facts, weights })
}

/// The names that this checkpoint uses; the usual ones where none fit, so that errors name those.
fn names(tensors: &TensorTable) -> (&'static str, &'static str) {
    let fits = |(prefix, _): &&(&str, &str)| tensors.has(&format!("{prefix}.embed_tokens.weight"));
    NAMES.iter().find(fits).copied().unwrap_or(NAMES[0])
}

fn facts(spec: &StackSpec) -> DecoderFacts {
    let sizes = &spec.sizes;
    let kv = KvShape { layers: sizes.layers, kv_heads: sizes.kv_heads, head_dim: sizes.head_dim };
    DecoderFacts { vocab: sizes.vocab as u32, context: sizes.context, kv }
}

/// A number rounded to the type that a checkpoint declares as its own, as the
/// reference computes in that type; itself where none is declared.
pub fn rounded_as_declared(config: &Value, x: f32) -> f32 {
    match declared_type(config) {
        Some("bfloat16") => half::bf16::from_f32(x).to_f32(),
        Some("float16") => half::f16::from_f32(x).to_f32(),
        _ => x,
    }
}

impl<O: Ops + 'static> Adopt<O> for PackedStack<O> {
    fn adopt(self: Box<Self>, ops: &mut O, context: u32) -> Result<Box<dyn Decoder<O>>, EngineError> {
        let spec = &self.spec;
        let mut ropes = Vec::with_capacity(spec.ropes.len());
        for rope in &spec.ropes {
            let inv_freq = rope.frequencies(context);
            ropes.push(Rope { inv_freq: ops.vector(inv_freq)?, dims: 2 * inv_freq.len(), scale: rope.scale });
        }
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (block, layer) in self.blocks.into_iter().zip(&spec.layers) {
            let rope = layer.rope.and_then(|index| ropes.get(index).cloned());
            blocks.push(block.adopt(ops, &spec.sizes, rope, layer.window)?);
        }
        Ok(Box::new(Stack {
            embedding: ops.adopt(self.embedding)?,
            embedding_scale: spec.embedding_scale,
            blocks,
            norm: Norm { weight: ops.vector(&self.norm)?, eps: spec.sizes.eps },
            head: self.head.map(|head| ops.adopt(head)).transpose()?,
            logits: spec.logits,
        }))
    }
}

impl<O: Ops> Decoder<O> for Stack<O> {
    fn forward(&self, ops: &mut O, kv: &mut O::Kv, step: &Step<'_>) -> Result<O::T, EngineError> {
        let mut x = ops.embed(&self.embedding, step)?;
        if self.embedding_scale != 1.0 {
            x = ops.scale(x, self.embedding_scale)?;
        }
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(ops, kv, LayerId(layer), x, step)?;
        }
        Ok(x)
    }

    fn logits(&self, ops: &mut O, hidden: &O::T, rows: &[usize]) -> Result<Logits, EngineError> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let mut logits = ops.head(hidden, &self.norm, head, rows)?;
        if self.logits.scale != 1.0 || self.logits.softcap.is_some() {
            ops.shape_logits(&mut logits, &self.logits);
        }
        Ok(logits)
    }

    fn draw(
        &self,
        ops: &mut O,
        kv: &mut O::Kv,
        hidden: &O::T,
        rows: &[usize],
    ) -> Result<O::Draws, EngineError> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        ops.draw(kv, hidden, (&self.norm, head, &self.logits), rows)
    }
}
