//! What is known of a model without loading it: for `models` and `inspect`.
//!
//! Opens a model as a load would, which maps its files and reads headers and the text
//! side, but never the weights; so what is said to be supported here is what a load takes.
//! A model that is refused is described as far as it goes, with the reason.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::config::Config;
use crate::model::families;
use crate::model::load::{self, ModelFiles, ModelKind};
use crate::model::source::fit::{self, Estimate};
use crate::types::LoadError;

/// Deepest folder looked at for a folder's size.
const MAX_DEPTH: usize = 4;

/// A model as far as its headers tell. Serialises to what `--json` prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// File or folder.
    pub path: PathBuf,
    /// `GGUF` or `safetensors`; `None` where it is neither.
    pub format: Option<&'static str>,
    /// `model_type` in Hugging Face's terms.
    pub family: Option<String>,
    /// Bytes on disk.
    pub file_bytes: u64,
    /// Why it cannot be loaded; `None` where it can.
    pub problem: Option<String>,
    /// All that only a supported model tells.
    pub details: Option<Details>,
}

/// What an opened model tells.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Details {
    /// Elements of all tensors.
    pub parameters: u64,
    /// The model's own limit in tokens.
    pub context: u32,
    /// Sizes of the configuration, by Hugging Face's keys.
    pub sizes: BTreeMap<String, u64>,
    /// Type of most of the weights.
    pub quantisation: String,
    /// Tensors and bytes of each storage type.
    pub types: BTreeMap<String, (usize, u64)>,
    /// All tensors, in the order of their names.
    pub tensors: Vec<Tensor>,
    /// The chat template's source; `None` for a base model.
    pub template: Option<String>,
    /// Tokens in the vocabulary.
    pub vocabulary: u32,
    /// Beginning-of-text token, by number and text.
    pub bos: Option<(u32, String)>,
    /// Tokens that end a turn, by number and text.
    pub ends: Vec<(u32, String)>,
    /// All control tokens, by number and text.
    pub special: Vec<(u32, String)>,
    /// Needed memory, for the settings' backend and context.
    pub memory: Memory,
}

/// A tensor.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Tensor {
    /// In Hugging Face's terms.
    pub name: String,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub kind: String,
    /// In the file.
    pub bytes: u64,
}

/// Memory that a load would need, bytes.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
pub struct Memory {
    /// Weights as packed.
    pub weights: u64,
    /// Keys and values of one token.
    pub kv_per_token: u64,
    /// Keys and values of one row of the context.
    pub kv: u64,
    /// For computing.
    pub scratch: u64,
    /// All of it.
    pub total: u64,
    /// What may be used.
    pub limit: Option<u64>,
    /// Whether it fits.
    pub fits: bool,
    /// The longest context that fits.
    pub fitting_context: Option<u64>,
}

impl From<Estimate> for Memory {
    fn from(estimate: Estimate) -> Self {
        Self {
            weights: estimate.weights,
            kv_per_token: estimate.kv_per_token,
            kv: estimate.kv,
            scratch: estimate.scratch,
            total: estimate.total(),
            limit: estimate.limit,
            fits: estimate.fits(),
            fitting_context: estimate.fitting_context(),
        }
    }
}

/// Describes what is at a path. Never fails: what is wrong is part of the answer.
pub fn inspect(path: &Path, config: &Config) -> Inspection {
    let format = load::kind(path).ok().map(|kind| match kind {
        ModelKind::Gguf => "GGUF",
        ModelKind::Folder => "safetensors",
    });
    let mut inspection = Inspection {
        path: path.to_owned(),
        format,
        family: None,
        file_bytes: bytes_of(path, 0),
        problem: None,
        details: None,
    };
    if load::whisper::is_whisper(path) {
        if path.join("model.bin").is_file() {
            inspection.format = Some("CTranslate2");
        }
        inspection.family = Some("whisper".into());
        return inspection;
    }
    match load::open(path) {
        Ok(files) => {
            let family = files.config.get("model_type").and_then(|family| family.as_str());
            inspection.family = family.map(String::from);
            inspection.file_bytes = inspection.file_bytes.max(files.tensors.file_bytes());
            if !families::KNOWN.iter().any(|(known, _)| Some(*known) == family) {
                inspection.problem = Some(families::unknown(family).to_string());
            }
            match details(&files, config) {
                Ok(details) => inspection.details = Some(details),
                Err(error) => inspection.problem = Some(error.to_string()),
            }
        }
        Err(error) => {
            inspection.family = declared_family(path);
            inspection.problem = Some(error.to_string());
        }
    }
    inspection
}

fn details(files: &ModelFiles, config: &Config) -> Result<Details, LoadError> {
    let tokenizer = &files.text.tokenizer;
    let named = |id: crate::types::TokenId| (id.0, tokenizer.decode(&[id], true));
    let mut types: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    let tensors: Vec<Tensor> = files
        .tensors
        .facts()
        .map(|tensor| {
            let kind = tensor.kind.describe();
            let sum = types.entry(kind.clone()).or_default();
            *sum = (sum.0 + 1, sum.1.saturating_add(tensor.bytes));
            Tensor { name: tensor.name.to_owned(), shape: tensor.shape.to_vec(), kind, bytes: tensor.bytes }
        })
        .collect();
    let most = types.iter().max_by_key(|(_, (_, bytes))| *bytes);
    let keys = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "sliding_window",
    ];
    let sizes = keys.iter().filter_map(|key| Some(((*key).to_owned(), files.config.get(*key)?.as_u64()?)));
    Ok(Details {
        parameters: files.tensors.parameters(),
        context: files.text.context,
        sizes: sizes.collect(),
        quantisation: most.map_or_else(String::new, |(kind, _)| kind.clone()),
        template: files.text.template.as_ref().map(|template| template.source.clone()),
        vocabulary: tokenizer.vocab_size(),
        bos: tokenizer.bos().map(named),
        ends: files.text.end_tokens.iter().copied().map(named).collect(),
        special: (0..tokenizer.vocab_size())
            .map(crate::types::TokenId)
            .filter(|id| tokenizer.is_control(*id))
            .map(named)
            .collect(),
        memory: fit::estimate(files, config)?.into(),
        types,
        tensors,
    })
}

/// What a folder says of itself, however broken the rest is.
fn declared_family(path: &Path) -> Option<String> {
    let config = path.join("config.json");
    let meta = std::fs::metadata(&config).ok().filter(|meta| meta.is_file() && meta.len() < 64 << 20)?;
    let text = (meta.len() > 0).then(|| std::fs::read(&config).ok()).flatten()?;
    let config: serde_json::Value = serde_json::from_slice(&text).ok()?;
    config.get("model_type")?.as_str().map(String::from)
}

fn bytes_of(path: &Path, depth: usize) -> u64 {
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() && depth < MAX_DEPTH => {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| bytes_of(&entry.path(), depth + 1)).fold(0, u64::saturating_add)
        }
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    }
}
