//! A Hugging Face model folder: `config.json`, safetensors, `tokenizer.json`.

pub(super) mod quantization;
pub(super) mod safetensors;
mod text;

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::mapping::Mapping;
use super::table::{Entry, Span, TensorTable};
use super::tensor::{RowOrder, TensorType};
use super::{ModelFiles, facts, malformed, missing};
use crate::model::text::TextModel;
use crate::types::LoadError;
pub(super) use quantization::{AllStored, Quantization};
use safetensors::{Dtype, Stored};

/// Largest vocabulary with merges that is read.
const MAX_TOKENIZER: u64 = 256 << 20;
/// Largest list of a checkpoint's tensors.
const MAX_INDEX: u64 = 64 << 20;
/// Largest of all other files that are read whole: parsed they take many times their bytes.
const MAX_SETTINGS: u64 = 16 << 20;
/// Most files a checkpoint may be split into.
const MAX_SHARDS: usize = 4096;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Keys by which other formats tell the families what no folder says. A folder's are taken out: nobody
/// who wrote them meant ours.
const PRIVATE: [&str; 3] = ["rms_norm_one_is_added", "rope_freq_factors", "rope_dimension_count"];

/// The folder's configuration.
fn configuration(path: &Path) -> Result<Value, LoadError> {
    let mut config = required_json(&path.join("config.json"))?;
    let whole =
        config.as_object_mut().ok_or_else(|| malformed(&path.join("config.json"), "is not an object"))?;
    PRIVATE.iter().for_each(|key| drop(whole.remove(*key)));
    if let Some(text) = whole.get_mut("text_config").and_then(Value::as_object_mut) {
        PRIVATE.iter().for_each(|key| drop(text.remove(*key)));
    }
    Ok(config)
}

/// Opens a folder.
pub(super) fn open(path: &Path) -> Result<ModelFiles, LoadError> {
    let config = configuration(path)?;
    let family = config
        .get("model_type")
        .and_then(Value::as_str)
        .ok_or_else(|| malformed(&path.join("config.json"), "there is no `model_type`"))?
        .to_owned();
    let quantization = Quantization::of(&config, &path.join("config.json"))?;
    let tied = config.get("tie_word_embeddings").and_then(Value::as_bool) == Some(true);
    let mut text = text::text_model(path, &config)?;
    let tensors = table(path, &quantization, tied)?;
    text.facts = facts::facts(&family, "safetensors", &tensors, text.context);
    Ok(ModelFiles { config, tensors, text, path: path.to_owned() })
}

/// The text side alone.
pub(super) fn open_text(path: &Path) -> Result<TextModel, LoadError> {
    text::text_model(path, &configuration(path)?)
}

/// Maps all shards and enters their tensors.
fn table(path: &Path, quantization: &Quantization, tied: bool) -> Result<TensorTable, LoadError> {
    let (shards, indexed) = shards(path)?;
    if let Some(missing) = missing(&shards) {
        let message = format!("of {} files named in {INDEX} these are missing: {missing}", shards.len());
        return Err(LoadError::NotFound { message });
    }
    let (files, stored) = map_files(&shards, |name| !is_dropped(name, tied))?;
    if let Some(missing) = indexed.iter().find(|name| !is_dropped(name, tied) && !stored.contains_key(*name))
    {
        return Err(malformed(&path.join(INDEX), format!("tensor `{missing}` is in none of the files")));
    }
    let mut table = TensorTable::new(files);
    for (name, entry) in entries(&stored, quantization)? {
        table.insert(name, entry)?;
    }
    Ok(table)
}

/// Maps files and lists the tensors in them that are wanted, by name and with the index of their file.
pub(super) fn map_files(
    paths: &[PathBuf],
    is_wanted: impl Fn(&str) -> bool,
) -> Result<(Vec<Mapping>, AllStored), LoadError> {
    let mut files = Vec::with_capacity(paths.len());
    let mut stored = AllStored::new();
    for (number, path) in paths.iter().enumerate() {
        let mapping = Mapping::open(path)?;
        for (name, tensor) in safetensors::parse(mapping.bytes(), path)? {
            if !is_wanted(&name) {
                continue;
            }
            if stored.contains_key(&name) {
                return Err(malformed(path, format!("tensor `{name}` is in two files")));
            }
            stored.insert(name, (number, tensor));
        }
        files.push(mapping);
    }
    Ok((files, stored))
}

/// A tensor's type, its shape in elements, and its scales and biases, where it has any.
pub(super) type Storage = (TensorType, Vec<usize>, Option<(Span, Span)>);

/// How a tensor is stored.
pub(super) fn storage(
    name: &str,
    tensor: &Stored,
    stored: &AllStored,
    quantization: &Quantization,
) -> Result<Storage, LoadError> {
    let dense = |kind| Ok((kind, tensor.shape.clone(), None));
    match tensor.dtype {
        Dtype::F32 => dense(TensorType::F32),
        Dtype::F16 => dense(TensorType::F16),
        Dtype::BF16 => dense(TensorType::BF16),
        Dtype::U32 => {
            let packed = quantization.affine(name, tensor, stored)?;
            Ok((packed.kind, packed.shape, Some((packed.scales, packed.biases))))
        }
        Dtype::Other => Err(LoadError::Unsupported {
            message: format!(
                "tensor `{name}` is {}; supported are F32, F16, BF16 and MLX's affine quantisation",
                tensor.dtype_name
            ),
        }),
    }
}

/// Buffers that are computed anew, and a head that is the embedding's copy.
fn is_dropped(name: &str, tied: bool) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || (tied && name.starts_with("lm_head."))
}

fn entries(stored: &AllStored, quantization: &Quantization) -> Result<Vec<(String, Entry)>, LoadError> {
    let mut entries = Vec::with_capacity(stored.len());
    for (name, (file, tensor)) in stored {
        if quantization::is_part(name, stored) {
            continue;
        }
        let data = Span { file: *file, bytes: tensor.bytes.clone() };
        let (kind, shape, meta) = storage(name, tensor, stored, quantization)?;
        let entry = Entry { file_name: name.clone(), shape, kind, data, meta, order: RowOrder::Plain };
        entries.push((name.clone(), entry));
    }
    Ok(entries)
}

/// The files of the checkpoint, and the tensors that the index promises.
pub(super) fn shards(path: &Path) -> Result<(Vec<PathBuf>, Vec<String>), LoadError> {
    let index_path = path.join(INDEX);
    let Some(index) = optional_json(&index_path)? else {
        let single = path.join(SINGLE);
        if single.is_file() {
            return Ok((vec![single], Vec::new()));
        }
        return Err(LoadError::NotFound {
            message: format!("{} holds neither {SINGLE} nor {INDEX}: there are no weights", path.display()),
        });
    };
    let map = index
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| malformed(&index_path, "there is no `weight_map`"))?;
    let mut names = std::collections::BTreeSet::new();
    for (tensor, file) in map {
        let file = file
            .as_str()
            .filter(|file| Path::new(file).file_name().is_some_and(|name| name == *file))
            .ok_or_else(|| {
                malformed(&index_path, format!("the file of `{tensor}` is not a plain file name"))
            })?;
        names.insert(file);
    }
    if names.is_empty() || names.len() > MAX_SHARDS {
        return Err(malformed(&index_path, format!("names {} files", names.len())));
    }
    Ok((names.into_iter().map(|name| path.join(name)).collect(), map.keys().cloned().collect()))
}

/// Reads a JSON file that must be there.
fn required_json(path: &Path) -> Result<Value, LoadError> {
    optional_json(path)?
        .ok_or_else(|| LoadError::NotFound { message: format!("{} is missing", path.display()) })
}

/// Reads a JSON file that may be there.
pub(super) fn optional_json(path: &Path) -> Result<Option<Value>, LoadError> {
    let Some(bytes) = optional_bytes(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| malformed(path, error.to_string()))
}

/// Reads a file that may be there, within bounds.
pub(super) fn optional_bytes(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), source };
    let size = match std::fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    let most = match path.file_name().and_then(|name| name.to_str()) {
        Some("tokenizer.json") => MAX_TOKENIZER,
        Some(INDEX) => MAX_INDEX,
        _ => MAX_SETTINGS,
    };
    if size > most {
        return Err(malformed(path, format!("has {size} bytes; at most {most} are read")));
    }
    std::fs::read(path).map(Some).map_err(io)
}
