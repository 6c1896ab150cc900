//! Whisper's encoder and decoder over the operators, for all backends.
//!
//! Pre-norm blocks with biases (none on keys), exact GELU, scores scaled by `1 / √64`. The encoder is
//! computed in pieces that the caller may stop between: a stage of a layer, for one tile of positions.

use crate::model::load::whisper::{WhisperFiles, WhisperTensors};
use crate::model::ops::speech::{LayerNorm, RecallSpec, SpeechOps};
use crate::model::ops::{Act, AttnSpec, LayerId, Step};
use crate::types::{EngineError, LoadError, TokenId};

use super::{WINDOW_FRAMES, WhisperDims};

const EPS: f32 = 1e-5;

/// A weight with its bias.
pub struct Linear<W, V> {
    w: W,
    bias: V,
}

/// Norm and feed-forward part of a block.
struct FeedForward<W, V> {
    norm: LayerNorm<V>,
    up: Linear<W, V>,
    down: Linear<W, V>,
}

struct EncoderBlock<W, V> {
    norm: LayerNorm<V>,
    query: Linear<W, V>,
    keys_values: Linear<W, V>,
    out: Linear<W, V>,
    ffn: FeedForward<W, V>,
}

struct DecoderBlock<W, V> {
    norm: LayerNorm<V>,
    qkv: Linear<W, V>,
    out: Linear<W, V>,
    cross_norm: LayerNorm<V>,
    cross_query: Linear<W, V>,
    cross_keys_values: Linear<W, V>,
    cross_out: Linear<W, V>,
    ffn: FeedForward<W, V>,
}

/// All weights; `W` and `V` are packed ones between threads, or a backend's own.
struct Weights<W, V> {
    conv1: Linear<W, V>,
    conv2: Linear<W, V>,
    encoder: Vec<EncoderBlock<W, V>>,
    encoder_norm: LayerNorm<V>,
    tokens: W,
    positions: W,
    decoder: Vec<DecoderBlock<W, V>>,
    decoder_norm: LayerNorm<V>,
}

/// A model packed for a backend, between the two threads.
pub struct PackedWhisper<O: SpeechOps> {
    weights: Weights<O::Packed, Vec<f32>>,
    /// Sizes.
    pub dims: WhisperDims,
    /// See [`WhisperFiles::alignment_heads`].
    pub alignment_heads: Vec<(usize, usize)>,
}

/// Packs a model's tensors. Loader thread.
struct Packer<'a, O: SpeechOps> {
    config: &'a O::Config,
    tensors: &'a WhisperTensors,
    width: usize,
}

impl<O: SpeechOps> Packer<'_, O> {
    fn norm(&self, name: &str) -> Result<LayerNorm<Vec<f32>>, LoadError> {
        Ok(LayerNorm {
            weight: self.tensors.vector(&format!("{name}.weight"), self.width)?,
            bias: self.tensors.vector(&format!("{name}.bias"), self.width)?,
            eps: EPS,
        })
    }

    /// Matrices of `[rows, cols]` each, one below the other; a bias that is missing is zeros.
    fn linear(
        &self,
        names: &[String],
        rows: usize,
        cols: usize,
    ) -> Result<Linear<O::Packed, Vec<f32>>, LoadError> {
        let mut bias = Vec::with_capacity(rows * names.len());
        let mut parts = Vec::with_capacity(names.len());
        for name in names {
            parts.push(self.tensors.matrix(&format!("{name}.weight"), rows, cols)?);
            let of = format!("{name}.bias");
            match self.tensors.has(&of) {
                true => bias.extend(self.tensors.vector(&of, rows)?),
                false => bias.resize(bias.len() + rows, 0.0),
            }
        }
        Ok(Linear { w: O::pack(self.config, &parts)?, bias })
    }

    fn square(&self, prefix: &str, names: &[&str]) -> Result<Linear<O::Packed, Vec<f32>>, LoadError> {
        let names: Vec<String> = names.iter().map(|name| format!("{prefix}.{name}")).collect();
        self.linear(&names, self.width, self.width)
    }

    fn ffn(&self, block: &str, inner: usize) -> Result<FeedForward<O::Packed, Vec<f32>>, LoadError> {
        Ok(FeedForward {
            norm: self.norm(&format!("{block}.mlp_ln"))?,
            up: self.linear(&[format!("{block}.mlp1")], inner, self.width)?,
            down: self.linear(&[format!("{block}.mlp2")], self.width, inner)?,
        })
    }
}

/// Packs a model for a backend.
///
/// # Errors
/// `Tensor` where one is missing or has the wrong shape; what [`crate::model::ops::Ops::pack`] says.
pub fn pack<O: SpeechOps>(files: &WhisperFiles, config: &O::Config) -> Result<PackedWhisper<O>, LoadError> {
    let dims = files.dims;
    let packer = Packer::<O> { config, tensors: &files.tensors, width: dims.width };
    let encoder_block = |layer: usize| {
        let block = format!("encoder.blocks.{layer}");
        let attention = format!("{block}.attn");
        Ok(EncoderBlock {
            norm: packer.norm(&format!("{block}.attn_ln"))?,
            query: packer.square(&attention, &["query"])?,
            keys_values: packer.square(&attention, &["key", "value"])?,
            out: packer.square(&attention, &["out"])?,
            ffn: packer.ffn(&block, dims.feed_forward)?,
        })
    };
    let decoder_block = |layer: usize| {
        let block = format!("decoder.blocks.{layer}");
        let (attention, cross) = (format!("{block}.attn"), format!("{block}.cross_attn"));
        Ok(DecoderBlock {
            norm: packer.norm(&format!("{block}.attn_ln"))?,
            qkv: packer.square(&attention, &["query", "key", "value"])?,
            out: packer.square(&attention, &["out"])?,
            cross_norm: packer.norm(&format!("{block}.cross_attn_ln"))?,
            cross_query: packer.square(&cross, &["query"])?,
            cross_keys_values: packer.square(&cross, &["key", "value"])?,
            cross_out: packer.square(&cross, &["out"])?,
            ffn: packer.ffn(&block, dims.feed_forward)?,
        })
    };
    let table = |name: &str, rows: usize| O::pack(config, &[files.tensors.matrix(name, rows, dims.width)?]);
    let weights = Weights {
        conv1: packer.linear(&["encoder.conv1".into()], dims.width, 3 * dims.mels)?,
        conv2: packer.linear(&["encoder.conv2".into()], dims.width, 3 * dims.width)?,
        encoder: (0..dims.encoder_layers).map(encoder_block).collect::<Result<_, LoadError>>()?,
        encoder_norm: packer.norm("encoder.ln_post")?,
        tokens: table("decoder.token_embedding.weight", dims.vocabulary)?,
        positions: table("decoder.positional_embedding", dims.text_context)?,
        decoder: (0..dims.decoder_layers).map(decoder_block).collect::<Result<_, LoadError>>()?,
        decoder_norm: packer.norm("decoder.ln")?,
    };
    Ok(PackedWhisper { weights, dims, alignment_heads: files.alignment_heads.clone() })
}

/// Takes packed weights over.
struct Adopter<'a, O: SpeechOps>(&'a mut O);

type Taken<T> = Result<T, EngineError>;

impl<O: SpeechOps> Adopter<'_, O> {
    fn norm(&mut self, norm: LayerNorm<Vec<f32>>) -> Taken<LayerNorm<O::V>> {
        let (weight, bias) = (self.0.vector(&norm.weight)?, self.0.vector(&norm.bias)?);
        Ok(LayerNorm { weight, bias, eps: norm.eps })
    }

    fn linear(&mut self, linear: Linear<O::Packed, Vec<f32>>) -> Taken<Linear<O::W, O::V>> {
        Ok(Linear { w: self.0.adopt(linear.w)?, bias: self.0.vector(&linear.bias)? })
    }

    fn ffn(&mut self, ffn: FeedForward<O::Packed, Vec<f32>>) -> Taken<FeedForward<O::W, O::V>> {
        Ok(FeedForward { norm: self.norm(ffn.norm)?, up: self.linear(ffn.up)?, down: self.linear(ffn.down)? })
    }

    fn encoder(&mut self, block: EncoderBlock<O::Packed, Vec<f32>>) -> Taken<EncoderBlock<O::W, O::V>> {
        Ok(EncoderBlock {
            norm: self.norm(block.norm)?,
            query: self.linear(block.query)?,
            keys_values: self.linear(block.keys_values)?,
            out: self.linear(block.out)?,
            ffn: self.ffn(block.ffn)?,
        })
    }

    fn decoder(&mut self, block: DecoderBlock<O::Packed, Vec<f32>>) -> Taken<DecoderBlock<O::W, O::V>> {
        Ok(DecoderBlock {
            norm: self.norm(block.norm)?,
            qkv: self.linear(block.qkv)?,
            out: self.linear(block.out)?,
            cross_norm: self.norm(block.cross_norm)?,
            cross_query: self.linear(block.cross_query)?,
            cross_keys_values: self.linear(block.cross_keys_values)?,
            cross_out: self.linear(block.cross_out)?,
            ffn: self.ffn(block.ffn)?,
        })
    }
}

/// A model on the compute thread.
pub struct Whisper<O: SpeechOps> {
    weights: Weights<O::W, O::V>,
    dims: WhisperDims,
    spec: RecallSpec,
    attention: AttnSpec<O::V>,
    sinusoids: Vec<f32>,
    /// Alignment heads of each decoder layer, and where they are among all.
    aligned: Vec<Vec<(usize, usize)>>,
    alignment_heads: usize,
}

/// Where the encoder is: the next piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Conv1,
    Conv2,
    /// Queries, keys and values.
    Project(usize),
    /// Attention and feed-forward.
    Attend(usize),
    Norm,
    /// Keys and values for a decoder layer.
    Cross(usize),
    Done,
}

/// A window under way.
pub struct Encoding<O: SpeechOps> {
    mel: Vec<f32>,
    /// The same for the first convolution, from its first tile on.
    features: Option<O::T>,
    stage: Stage,
    tile: usize,
    /// What the first convolution gave so far; later all of it.
    frames: Vec<O::T>,
    x: Vec<Option<O::T>>,
    queries: Vec<Option<O::T>>,
    memory: Option<O::Memory>,
    cross: Vec<O::Memory>,
}

impl<O: SpeechOps> Encoding<O> {
    /// Of `[3000][mels]` log-mel frames.
    pub fn new(mel: Vec<f32>) -> Self {
        Self {
            mel,
            features: None,
            stage: Stage::Conv1,
            tile: 0,
            frames: Vec::new(),
            x: Vec::new(),
            queries: Vec::new(),
            memory: None,
            cross: Vec::new(),
        }
    }

    /// The decoder's memories, once all is done.
    pub fn finish(self) -> Option<Vec<O::Memory>> {
        (self.stage == Stage::Done).then_some(self.cross)
    }
}

fn lost(what: &str) -> EngineError {
    EngineError::InvalidPlan { message: format!("the encoder lost its {what}") }
}

/// Rows `t` of `[sin(t · s), cos(t · s)]`, `s_i = exp(−i · ln 10000 / (width / 2 − 1))`.
fn sinusoids(positions: usize, width: usize) -> Vec<f32> {
    let half = width / 2;
    let step = 10_000_f64.ln() / (half.max(2) - 1) as f64;
    let mut out = Vec::with_capacity(positions * width);
    for position in 0..positions {
        let angles = (0..half).map(|i| position as f64 * f64::from((-(i as f64) * step).exp() as f32));
        out.extend(angles.clone().map(|angle| angle.sin() as f32));
        out.extend(angles.map(|angle| angle.cos() as f32));
    }
    out
}

/// Rows of a decoder step as the model needs them: consecutive tokens, what they hear, whether scores are wanted.
pub struct Heard<'a, O: SpeechOps> {
    /// Tokens of the row.
    pub tokens: usize,
    /// Of each decoder layer.
    pub memory: &'a [O::Memory],
    /// Scores of the alignment heads are wanted.
    pub scores: bool,
}

impl<O: SpeechOps> Whisper<O> {
    /// Takes the weights over.
    ///
    /// # Errors
    /// `Device`.
    pub fn adopt(ops: &mut O, packed: PackedWhisper<O>) -> Result<Self, EngineError> {
        let PackedWhisper { weights, dims, alignment_heads } = packed;
        let mut adopter = Adopter(ops);
        let head_dim = dims.width / dims.heads;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let weights = Weights {
            conv1: adopter.linear(weights.conv1)?,
            conv2: adopter.linear(weights.conv2)?,
            encoder: weights.encoder.into_iter().map(|b| adopter.encoder(b)).collect::<Result<_, _>>()?,
            encoder_norm: adopter.norm(weights.encoder_norm)?,
            tokens: adopter.0.adopt(weights.tokens)?,
            positions: adopter.0.adopt(weights.positions)?,
            decoder: weights.decoder.into_iter().map(|b| adopter.decoder(b)).collect::<Result<_, _>>()?,
            decoder_norm: adopter.norm(weights.decoder_norm)?,
        };
        let mut aligned = vec![Vec::new(); dims.decoder_layers];
        for (index, (layer, head)) in alignment_heads.iter().enumerate() {
            if let Some(layer) = aligned.get_mut(*layer) {
                layer.push((*head, index));
            }
        }
        Ok(Self {
            weights,
            dims,
            spec: RecallSpec { heads: dims.heads, head_dim, scale },
            attention: AttnSpec {
                heads: dims.heads,
                kv_heads: dims.heads,
                head_dim,
                scale,
                softcap: None,
                window: None,
                rope: None,
                q_norm: None,
                k_norm: None,
            },
            sinusoids: sinusoids(dims.audio_context, dims.width),
            aligned,
            alignment_heads: alignment_heads.len(),
        })
    }

    /// Sizes.
    pub fn dims(&self) -> WhisperDims {
        self.dims
    }

    /// How many alignment heads there are.
    pub fn alignment_heads(&self) -> usize {
        self.alignment_heads
    }

    /// Computes the next piece of a window; true when that was the last.
    ///
    /// # Errors
    /// `Device`.
    pub fn encode_piece(&self, ops: &mut O, encoding: &mut Encoding<O>) -> Result<bool, EngineError> {
        let positions = self.dims.audio_context;
        let size = ops.tile(self.dims.width).clamp(1, positions);
        let tiles = positions.div_ceil(size);
        let tile = encoding.tile;
        let rows = tile * size..positions.min((tile + 1) * size);
        match encoding.stage {
            Stage::Conv1 => self.conv1(ops, encoding, 2 * rows.start..2 * rows.end)?,
            Stage::Conv2 => {
                let frames = encoding.frames.first().ok_or_else(|| lost("frames"))?;
                let windows = ops.windows(frames, rows.clone(), 2)?;
                let x = ops.linear(&windows, &self.weights.conv2.w)?;
                let x = ops.bias_act(x, &self.weights.conv2.bias, Act::Gelu)?;
                let places = rows.start * self.dims.width..rows.end * self.dims.width;
                let places = ops.upload(rows.len(), &self.sinusoids[places])?;
                let x = ops.add_residual(x, None, 1.0, places)?;
                ops.settle(&[&x], None)?;
                encoding.x.push(Some(x));
            }
            Stage::Project(layer) => self.project(ops, encoding, layer, rows.start)?,
            Stage::Attend(layer) => self.attend(ops, encoding, layer, rows.len())?,
            Stage::Norm => {
                let x = encoding.x.get(tile).and_then(Option::as_ref).ok_or_else(|| lost("tile"))?;
                let x = ops.layer_norm(x, &self.weights.encoder_norm)?;
                ops.settle(&[&x], None)?;
                encoding.x[tile] = Some(x);
            }
            Stage::Cross(layer) => {
                if tile == 0 {
                    encoding.cross.push(ops.memory(positions, &self.spec)?);
                }
                let x = encoding.x.get(tile).and_then(Option::as_ref).ok_or_else(|| lost("tile"))?;
                let linear = &self.weights.decoder[layer].cross_keys_values;
                let both = ops.linear(x, &linear.w)?;
                let both = ops.add_bias(both, &linear.bias)?;
                let memory = encoding.cross.last_mut().ok_or_else(|| lost("memory"))?;
                ops.remember(memory, rows.start, &both)?;
                ops.settle(&[], Some(memory))?;
            }
            Stage::Done => return Ok(true),
        }
        encoding.tile += 1;
        if encoding.tile == tiles {
            encoding.tile = 0;
            self.next_stage(ops, encoding)?;
        }
        Ok(encoding.stage == Stage::Done)
    }

    fn next_stage(&self, ops: &mut O, encoding: &mut Encoding<O>) -> Result<(), EngineError> {
        encoding.stage = match encoding.stage {
            Stage::Conv1 => {
                let parts = std::mem::take(&mut encoding.frames);
                encoding.frames.push(ops.join(parts)?);
                encoding.features = None;
                Stage::Conv2
            }
            Stage::Conv2 => {
                encoding.frames.clear();
                Stage::Project(0)
            }
            Stage::Project(layer) => Stage::Attend(layer),
            Stage::Attend(layer) if layer + 1 < self.weights.encoder.len() => Stage::Project(layer + 1),
            Stage::Attend(_) => Stage::Norm,
            Stage::Norm => Stage::Cross(0),
            Stage::Cross(layer) if layer + 1 < self.weights.decoder.len() => Stage::Cross(layer + 1),
            Stage::Cross(_) | Stage::Done => {
                encoding.x.clear();
                encoding.memory = None;
                Stage::Done
            }
        };
        Ok(())
    }

    fn conv1(
        &self,
        ops: &mut O,
        encoding: &mut Encoding<O>,
        rows: std::ops::Range<usize>,
    ) -> Result<(), EngineError> {
        if encoding.tile == 0 {
            encoding.features = Some(ops.upload(WINDOW_FRAMES, &std::mem::take(&mut encoding.mel))?);
        }
        let features = encoding.features.as_ref().ok_or_else(|| lost("features"))?;
        let windows = ops.windows(features, rows, 1)?;
        let x = ops.linear(&windows, &self.weights.conv1.w)?;
        let x = ops.bias_act(x, &self.weights.conv1.bias, Act::Gelu)?;
        ops.settle(&[&x], None)?;
        encoding.frames.push(x);
        Ok(())
    }

    fn project(
        &self,
        ops: &mut O,
        encoding: &mut Encoding<O>,
        layer: usize,
        first: usize,
    ) -> Result<(), EngineError> {
        let block = &self.weights.encoder[layer];
        if encoding.tile == 0 {
            encoding.memory = Some(ops.memory(self.dims.audio_context, &self.spec)?);
            encoding.queries.clear();
        }
        let x = encoding.x.get(encoding.tile).and_then(Option::as_ref).ok_or_else(|| lost("tile"))?;
        let normed = ops.layer_norm(x, &block.norm)?;
        let queries = ops.linear(&normed, &block.query.w)?;
        let queries = ops.add_bias(queries, &block.query.bias)?;
        let both = ops.linear(&normed, &block.keys_values.w)?;
        let both = ops.add_bias(both, &block.keys_values.bias)?;
        let memory = encoding.memory.as_mut().ok_or_else(|| lost("memory"))?;
        ops.remember(memory, first, &both)?;
        ops.settle(&[&queries], Some(memory))?;
        encoding.queries.push(Some(queries));
        Ok(())
    }

    fn attend(
        &self,
        ops: &mut O,
        encoding: &mut Encoding<O>,
        layer: usize,
        count: usize,
    ) -> Result<(), EngineError> {
        let block = &self.weights.encoder[layer];
        let tile = encoding.tile;
        let queries = encoding.queries.get_mut(tile).and_then(Option::take).ok_or_else(|| lost("queries"))?;
        let x = encoding.x.get_mut(tile).and_then(Option::take).ok_or_else(|| lost("tile"))?;
        let memory = encoding.memory.as_ref().ok_or_else(|| lost("memory"))?;
        let mixed = ops.recall(&queries, &self.spec, &[(count, memory)])?;
        let x = add(ops, mixed, &block.out, x)?;
        let x = feed_forward(ops, &block.ffn, x)?;
        ops.settle(&[&x], None)?;
        encoding.x[tile] = Some(x);
        Ok(())
    }

    /// The decoder for packed rows: hidden states after the last norm, `[tokens, width]`, and the scores
    /// of each row that wants them.
    ///
    /// # Errors
    /// `Device`; what [`crate::model::ops::Ops::attend`] says.
    pub fn decode(
        &self,
        ops: &mut O,
        kv: &mut O::Kv,
        step: &Step<'_>,
        heard: &[Heard<'_, O>],
    ) -> Result<(O::T, Vec<Vec<f32>>), EngineError> {
        let places: Vec<TokenId> = step.positions.iter().map(|at| TokenId(*at)).collect();
        let x = ops.embed(&self.weights.tokens, step)?;
        let at = Step { tokens: &places, positions: step.positions, rows: step.rows };
        let places = ops.embed(&self.weights.positions, &at)?;
        let mut x = ops.add_residual(places, None, 1.0, x)?;
        let mut scores: Vec<Vec<Vec<f32>>> = vec![vec![Vec::new(); self.alignment_heads]; heard.len()];
        for (layer, block) in self.weights.decoder.iter().enumerate() {
            let normed = ops.layer_norm(&x, &block.norm)?;
            let qkv = ops.linear(&normed, &block.qkv.w)?;
            let qkv = ops.add_bias(qkv, &block.qkv.bias)?;
            let mixed = ops.attend(kv, LayerId(layer), qkv, &self.attention, step)?;
            x = add(ops, mixed, &block.out, x)?;
            let normed = ops.layer_norm(&x, &block.cross_norm)?;
            let queries = ops.linear(&normed, &block.cross_query.w)?;
            let queries = ops.add_bias(queries, &block.cross_query.bias)?;
            let mut rows = Vec::with_capacity(heard.len());
            let mut first = 0;
            for (row, heard) in heard.iter().enumerate() {
                let memory = heard.memory.get(layer).ok_or_else(|| lost("memory"))?;
                rows.push((heard.tokens, memory));
                if heard.scores && !self.aligned[layer].is_empty() {
                    let heads: Vec<usize> = self.aligned[layer].iter().map(|(head, _)| *head).collect();
                    let all =
                        ops.scores(&queries, first..first + heard.tokens, &self.spec, memory, &heads)?;
                    let one = all.len() / heads.len();
                    for ((_, index), one) in self.aligned[layer].iter().zip(all.chunks_exact(one.max(1))) {
                        scores[row][*index] = one.to_vec();
                    }
                }
                first += heard.tokens;
            }
            let mixed = ops.recall(&queries, &self.spec, &rows)?;
            x = add(ops, mixed, &block.cross_out, x)?;
            x = feed_forward(ops, &block.ffn, x)?;
        }
        let x = ops.layer_norm(&x, &self.weights.decoder_norm)?;
        Ok((x, scores.into_iter().map(|heads| heads.concat()).collect()))
    }

    /// Logits of hidden states: `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// `Device`.
    pub fn logits(&self, ops: &mut O, hidden: &O::T) -> Result<O::T, EngineError> {
        ops.linear(hidden, &self.weights.tokens)
    }
}

/// `x · wᵀ + bias + residual`.
fn add<O: SpeechOps>(
    ops: &mut O,
    x: O::T,
    linear: &Linear<O::W, O::V>,
    residual: O::T,
) -> Result<O::T, EngineError> {
    let out = ops.linear_add(x, &linear.w, residual)?;
    ops.add_bias(out, &linear.bias)
}

fn feed_forward<O: SpeechOps>(
    ops: &mut O,
    ffn: &FeedForward<O::W, O::V>,
    x: O::T,
) -> Result<O::T, EngineError> {
    let normed = ops.layer_norm(&x, &ffn.norm)?;
    let inner = ops.linear(&normed, &ffn.up.w)?;
    let inner = ops.bias_act(inner, &ffn.up.bias, Act::Gelu)?;
    add(ops, inner, &ffn.down, x)
}
