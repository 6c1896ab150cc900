//! Whisper speech models, from the formats that they come in: Hugging Face folders, MLX folders
//! (safetensors or npz, quantised as well) and CTranslate2's `model.bin`.
//!
//! All of them end in one table by MLX's names (`encoder.blocks.0.attn.query.weight`), convolutions
//! as matrices `[out, 3 · in]` whose columns are `tap · in + channel`. Files are untrusted.

mod alignment;
mod ctranslate2;
mod names;
mod npz;
mod table;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::folder::{self, Quantization, safetensors};
use super::malformed;
use crate::model::tokenizer::Tokenizer;
use crate::types::LoadError;

pub use table::WhisperTensors;

/// Widest and deepest model that is believed: twice the largest there is.
const MOST_WIDTH: usize = 4096;
const MOST_LAYERS: usize = 128;
/// Width of a head in every published model.
const HEAD: usize = 64;

/// A model's sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WhisperDims {
    /// Mel bins: 80 or 128.
    pub mels: usize,
    /// Width of encoder and decoder.
    pub width: usize,
    /// Attention heads of either.
    pub heads: usize,
    /// Encoder layers.
    pub encoder_layers: usize,
    /// Decoder layers.
    pub decoder_layers: usize,
    /// Width of the feed-forward parts.
    pub feed_forward: usize,
    /// Encoder positions of a window: 1500.
    pub audio_context: usize,
    /// Decoder positions: 448.
    pub text_context: usize,
    /// Tokens.
    pub vocabulary: usize,
}

/// A model's files, opened and checked.
#[derive(Debug)]
pub struct WhisperFiles {
    /// Sizes, found in the tensors.
    pub dims: WhisperDims,
    /// The weights, mapped; drop it when they are packed.
    pub tensors: WhisperTensors,
    /// Byte-level BPE of the text tokens.
    pub tokenizer: Tokenizer,
    /// Decoder layer and head of each cross-attention head that follows the audio's time.
    pub alignment_heads: Vec<(usize, usize)>,
    /// In words, for people: the format of the weights.
    pub format: &'static str,
    /// The folder.
    pub path: PathBuf,
}

/// Whether a folder (or a `model.bin`) is a speech model; cheap, and false for what cannot be read.
pub fn is_whisper(path: &Path) -> bool {
    let folder = folder_of(path);
    if ctranslate2::is_whisper(&folder.join("model.bin")) {
        return true;
    }
    let Ok(Some(config)) = folder::optional_json(&folder.join("config.json")) else { return false };
    config.get("model_type").and_then(Value::as_str) == Some("whisper")
        || (config.get("n_mels").is_some() && config.get("n_audio_ctx").is_some())
}

/// The folder, where the path is its `model.bin`.
fn folder_of(path: &Path) -> PathBuf {
    let is_file = path.file_name().is_some_and(|name| name == "model.bin");
    path.parent().filter(|_| is_file).unwrap_or(path).to_owned()
}

/// Opens a speech model.
///
/// # Errors
/// Any [`LoadError`] but `Backend`; never panics on what a file holds.
pub fn open(path: &Path) -> Result<WhisperFiles, LoadError> {
    let folder = folder_of(path);
    let config = folder::optional_json(&folder.join("config.json"))?.unwrap_or(Value::Null);
    let (tensors, format) = if folder.join("model.bin").is_file() {
        (ctranslate2::open(&folder.join("model.bin"))?, "CTranslate2")
    } else if let Some(npz) =
        ["weights.npz", "model.npz"].iter().map(|name| folder.join(name)).find(|p| p.is_file())
    {
        (npz::open(&npz, &Quantization::of(&config, &folder.join("config.json"))?)?, "MLX npz")
    } else {
        open_safetensors(&folder, &config)?
    };
    let dims = dims(&tensors, &config)?;
    let tokenizer = text::tokenizer(&folder, dims.vocabulary)?;
    let generation = folder::optional_json(&folder.join("generation_config.json"))?.unwrap_or(Value::Null);
    let alignment_heads = alignment::heads(&dims, &tensors, &[&generation, &config]);
    Ok(WhisperFiles { dims, tensors, tokenizer, alignment_heads, format, path: folder })
}

fn open_safetensors(folder: &Path, config: &Value) -> Result<(WhisperTensors, &'static str), LoadError> {
    let single = folder.join("weights.safetensors");
    let shards = if single.is_file() { vec![single] } else { folder::shards(folder)?.0 };
    if let Some(missing) = super::missing(&shards) {
        return Err(LoadError::NotFound { message: format!("these files are missing: {missing}") });
    }
    let quantization = Quantization::of(config, &folder.join("config.json"))?;
    let (files, stored) = folder::map_files(&shards, |_| true)?;
    let is_mlx = stored.keys().any(|name| name.starts_with("encoder.blocks."));
    let tensors = WhisperTensors::from_stored(files, &stored, &quantization)?;
    Ok((tensors, if is_mlx { "MLX safetensors" } else { "safetensors" }))
}

/// Sizes by the tensors' shapes; of the configuration only the heads.
fn dims(tensors: &WhisperTensors, config: &Value) -> Result<WhisperDims, LoadError> {
    let shape = |name: &str| tensors.shape(name);
    let [width, taps] = shape("encoder.conv1.weight")?[..] else {
        return Err(tensors.wrong("encoder.conv1.weight", "is no convolution"));
    };
    let layers = |part: &str| {
        (0..MOST_LAYERS)
            .take_while(|layer| tensors.has(&format!("{part}.blocks.{layer}.attn.query.weight")))
            .count()
    };
    let (encoder_layers, decoder_layers) = (layers("encoder"), layers("decoder"));
    if encoder_layers == 0 || decoder_layers == 0 || width == 0 || width > MOST_WIDTH {
        return Err(tensors.wrong(
            "encoder.blocks",
            &format!("{encoder_layers} encoder and {decoder_layers} decoder layers of width {width}"),
        ));
    }
    let [vocabulary, _] = shape("decoder.token_embedding.weight")?[..] else {
        return Err(tensors.wrong("decoder.token_embedding.weight", "is no matrix"));
    };
    let [text_context, _] = shape("decoder.positional_embedding")?[..] else {
        return Err(tensors.wrong("decoder.positional_embedding", "is no matrix"));
    };
    let [feed_forward, _] = shape("encoder.blocks.0.mlp1.weight")?[..] else {
        return Err(tensors.wrong("encoder.blocks.0.mlp1.weight", "is no matrix"));
    };
    let heads = ["encoder_attention_heads", "n_audio_head"].iter().find_map(|key| config.get(*key)?.as_u64());
    let heads =
        tensors.heads().or(heads.and_then(|heads| usize::try_from(heads).ok())).unwrap_or(width / HEAD);
    let dims = WhisperDims {
        mels: taps / 3,
        width,
        heads,
        encoder_layers,
        decoder_layers,
        feed_forward,
        audio_context: 1500,
        text_context,
        vocabulary,
    };
    let known = [80, 128].contains(&dims.mels) || cfg!(test);
    if !known
        || heads == 0
        || !width.is_multiple_of(heads)
        || vocabulary < 51_864
        || !(16..=448).contains(&text_context)
    {
        let message = format!("this is no Whisper model that is known: {dims:?}");
        return Err(LoadError::Unsupported { message });
    }
    Ok(dims)
}

/// All tensors of a safetensors file in memory, in f32; `None` where one is not of floats.
pub(crate) fn floats_of(file: &[u8], path: &Path) -> Option<BTreeMap<String, Vec<f32>>> {
    let tensors = safetensors::parse(file, path).ok()?;
    let (stored, plain) = (BTreeMap::new(), Quantization::default());
    let floats = tensors.into_iter().map(|(name, tensor)| {
        let (kind, _, _) = folder::storage(&name, &tensor, &stored, &plain).ok()?;
        let values = widen(file.get(tensor.bytes)?, kind);
        Some((name, values))
    });
    floats.collect()
}

/// A float tensor's bytes in f32.
fn widen(bytes: &[u8], kind: super::TensorType) -> Vec<f32> {
    let host = super::HostTensor {
        name: "",
        rows: 1,
        cols: bytes.len() / kind.block_bytes(),
        kind,
        data: bytes,
        scales: &[],
        biases: &[],
        order: super::RowOrder::Plain,
    };
    let mut values = vec![0.0; host.cols];
    host.dequantize_row(0, &mut values);
    values
}

/// A convolution's kernels `[out, in, 3]` (or already `[out, 3, in]`) as a matrix `[out, 3 · in]`.
fn convolution(
    name: &str,
    shape: &[usize],
    element: usize,
    bytes: &[u8],
    path: &Path,
) -> Result<(Vec<usize>, Vec<u8>), LoadError> {
    let [out, a, b] = *shape else {
        return Err(malformed(path, format!("`{name}` of shape {shape:?} is no convolution")));
    };
    let cols = a
        .checked_mul(b)
        .filter(|cols| Some(bytes.len()) == cols.checked_mul(out).and_then(|n| n.checked_mul(element)));
    let Some(cols) = cols else {
        return Err(malformed(path, format!("`{name}` of shape {shape:?} has {} bytes", bytes.len())));
    };
    if a == 3 {
        return Ok((vec![out, cols], bytes.to_vec()));
    }
    if b != 3 {
        return Err(malformed(path, format!("`{name}` of shape {shape:?} has no kernel of 3")));
    }
    let mut turned = Vec::with_capacity(bytes.len());
    for kernel in bytes.chunks_exact(cols * element) {
        for tap in 0..3 {
            for channel in 0..a {
                let at = (channel * 3 + tap) * element;
                turned.extend_from_slice(&kernel[at..at + element]);
            }
        }
    }
    Ok((vec![out, cols], turned))
}
