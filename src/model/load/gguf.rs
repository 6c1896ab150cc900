//! GGUF: one file with configuration, vocabulary, template and weights, or that split into parts.
//!
//! Turns all of it into Hugging Face's names, keys and order of rows, so that a
//! family reads one shape whatever the file was.

mod config;
mod names;
mod reader;
mod shards;
mod text;

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::mapping::Mapping;
use super::table::{Entry, Span, TensorTable};
use super::tensor::{HostTensor, RowOrder, TensorType};
use super::{ModelFiles, facts, malformed};
use crate::model::text::TextModel;
use crate::types::LoadError;
use reader::{Header, TensorInfo};

/// Values of `general.architecture` that are understood. Not derived from `families::KNOWN`: an
/// architecture belongs here only when the order of its rows (see [`INTERLEAVED`]) was looked up, for a
/// wrong one gives wrong text instead of an error.
pub const ARCHITECTURES: &[&str] =
    &["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "smollm3", "olmo2"];
/// Architectures whose converters interleave the halves of each query and key head.
const INTERLEAVED: &[&str] = &["llama", "granite", "smollm3"];

/// Factors by which rotary frequencies are divided: of Llama 3's kind, and for long and short contexts.
const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];
const EMBEDDING: &str = "token_embd.weight";

/// Opens a file.
pub(super) fn open(path: &Path) -> Result<ModelFiles, LoadError> {
    let files = shards::open(path)?;
    let header = shards::parse(&files)?;
    let metadata = &header.metadata;
    let architecture = metadata.text("general.architecture")?;
    if !ARCHITECTURES.contains(&architecture) {
        let known = ARCHITECTURES.join(", ");
        return Err(LoadError::Unsupported {
            message: format!("architecture `{architecture}` in {}; known: {known}", path.display()),
        });
    }
    let vocab = embedding_rows(&header, path)?;
    let [all, long, short] = ROPE_FACTORS;
    let read = rope_factors_of(architecture);
    let factors = |name| match read.contains(&name) {
        true => rope_factors(&header, &files, name),
        false => Ok(None),
    };
    let factors = config::RopeFactors { all: factors(all)?, long: factors(long)?, short: factors(short)? };
    let (config, head_dim) = config::hugging_face(metadata, architecture, &header.tensors, vocab, factors)?;
    let mut text = text::text_model(metadata, vocab, path)?;
    text.context = config.get("max_position_embeddings").and_then(Value::as_u64).unwrap_or(0) as u32;

    let entries: Vec<(String, Entry)> = header
        .tensors
        .iter()
        .filter(|info| !read.contains(&info.name))
        .map(|info| entry(info, architecture, head_dim))
        .collect::<Result<_, _>>()?;
    let family = architecture.to_owned();
    let mut tensors = TensorTable::new(files.into_iter().map(|(_, mapping)| mapping).collect());
    for (name, entry) in entries {
        tensors.insert(name, entry)?;
    }
    text.facts = facts::facts(&family, "GGUF", &tensors, text.context);
    Ok(ModelFiles { config, tensors, text, path: path.to_owned() })
}

/// The text side alone, of any architecture; its context is unknown.
pub(super) fn open_text(path: &Path) -> Result<TextModel, LoadError> {
    let files = shards::open(path)?;
    let header = shards::parse(&files)?;
    text::text_model(&header.metadata, embedding_rows(&header, path)?, path)
}

fn entry(info: &TensorInfo<'_>, architecture: &str, head_dim: usize) -> Result<(String, Entry), LoadError> {
    let name = names::hugging_face(info.name, architecture);
    let is_rotated = name.ends_with(".q_proj.weight") || name.ends_with(".k_proj.weight");
    let order = match is_rotated && INTERLEAVED.contains(&architecture) {
        true => RowOrder::RopePairs { head_dim },
        false => RowOrder::Plain,
    };
    let entry = Entry {
        file_name: info.name.to_owned(),
        shape: info.shape.clone(),
        kind: info.kind()?,
        data: Span { file: info.file, bytes: info.bytes.clone() },
        meta: None,
        order,
    };
    Ok((name, entry))
}

fn embedding_rows(header: &Header<'_>, path: &Path) -> Result<usize, LoadError> {
    let table = header
        .tensor(EMBEDDING)
        .ok_or_else(|| malformed(path, format!("there is no tensor `{EMBEDDING}`")))?;
    match table.shape[..] {
        [rows, _] => Ok(rows),
        _ => Err(LoadError::Tensor { name: EMBEDDING.into(), message: "is not a matrix".into() }),
    }
}

/// Those of the factors that an architecture reads. Others stay in the table, where a tensor that
/// nobody reads is refused.
fn rope_factors_of(architecture: &str) -> &'static [&'static str] {
    match architecture {
        // Its kinds of layers rotate by frequencies of their own.
        "gemma3" => &[],
        "phi3" => &ROPE_FACTORS[1..],
        _ => &ROPE_FACTORS[..1],
    }
}

fn rope_factors(
    header: &Header<'_>,
    files: &[(PathBuf, Mapping)],
    name: &'static str,
) -> Result<Option<Vec<f32>>, LoadError> {
    let Some(info) = header.tensor(name) else { return Ok(None) };
    let wrong = |message: &str| LoadError::Tensor { name: name.into(), message: message.into() };
    let (&[len], TensorType::F32) = (&info.shape[..], info.kind()?) else {
        return Err(wrong("is not a vector of F32"));
    };
    let tensor = HostTensor {
        name,
        rows: 1,
        cols: len,
        kind: TensorType::F32,
        data: files.get(info.file).and_then(|(_, file)| file.bytes().get(info.bytes.clone())).unwrap_or(&[]),
        scales: &[],
        biases: &[],
        order: RowOrder::Plain,
    };
    let mut factors = vec![0.0; len];
    tensor.dequantize_row(0, &mut factors);
    if factors.iter().any(|factor| !factor.is_finite() || *factor <= 0.0) {
        return Err(wrong("holds a factor that is not a positive number"));
    }
    Ok(Some(factors))
}
