//! Where weights come from: every format ends in one neutral table of mapped
//! tensors, from which each backend packs its own.
//!
//! Files are untrusted: every count, length and offset is checked against the
//! file before it is used, and nothing is allocated on a file's word alone. No
//! device is known here, and of model families names, the order of rows, and the sizes that folders may
//! leave out.

mod ends;
mod facts;
mod folder;
mod gguf;
mod give_back;
mod mapping;
mod parts;
pub mod table;
pub mod tensor;
pub mod whisper;

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::model::text::TextModel;
use crate::types::LoadError;

pub use gguf::ARCHITECTURES;
pub use give_back::give_memory_back;
pub use parts::PartName;
pub use table::{TensorFacts, TensorTable};
pub use tensor::{AffineShape, Factors, HostTensor, MetaType, RowOrder, TensorType};

/// A model's files, opened and checked.
#[derive(Debug)]
pub struct ModelFiles {
    /// The configuration in Hugging Face's keys, whatever the format.
    pub config: Value,
    /// The weights, mapped; drop it when they are packed.
    pub tensors: TensorTable,
    /// The text side.
    pub text: TextModel,
    /// The file or folder.
    pub path: PathBuf,
}

/// What kind of thing a path is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelKind {
    /// A `.gguf` file.
    Gguf,
    /// A folder with `config.json` and safetensors.
    Folder,
}

/// Recognises what is at a path, cheaply.
///
/// # Errors
/// `NotFound` where nothing usable is, `Io` where the file system says no.
pub fn kind(path: &Path) -> Result<ModelKind, LoadError> {
    let meta = std::fs::metadata(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => LoadError::NotFound {
            message: format!("no model at {}: give a .gguf file or a model folder", path.display()),
        },
        _ => LoadError::Io { path: path.to_owned(), source },
    })?;
    if meta.is_dir() {
        if path.join("config.json").is_file() {
            return Ok(ModelKind::Folder);
        }
        return Err(LoadError::NotFound {
            message: format!("{} holds no config.json: not a model folder", path.display()),
        });
    }
    if path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf")) {
        return Ok(ModelKind::Gguf);
    }
    Err(LoadError::NotFound {
        message: format!("{} is neither a .gguf file nor a model folder", path.display()),
    })
}

/// Opens a `.gguf` file or a Hugging Face folder and checks everything that can be
/// checked without reading the weights themselves.
///
/// # Errors
/// Any [`LoadError`] but `Backend`; never panics on what a file holds.
pub fn open(path: &Path) -> Result<ModelFiles, LoadError> {
    let mut files = match kind(path)? {
        ModelKind::Gguf => gguf::open(path),
        ModelKind::Folder => folder::open(path),
    }?;
    let chat = files.text.chat_facts();
    files.text.facts.extend(chat);
    Ok(files)
}

/// Opens the text side alone: tokenizer, template, ends. Its weights need not be supported, and its
/// `context` and `facts` may be missing.
///
/// # Errors
/// As [`open`], for what concerns text.
pub fn open_text(path: &Path) -> Result<TextModel, LoadError> {
    match kind(path)? {
        ModelKind::Gguf => gguf::open_text(path),
        ModelKind::Folder => folder::open_text(path),
    }
}

/// A model's id in the API: the file's stem (without the number of a part) or the folder's name.
pub fn model_id(path: &Path) -> String {
    let resolved = if path.file_name().is_none() { path.canonicalize().ok() } else { None };
    let path = resolved.as_deref().unwrap_or(path);
    let is_gguf = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
    let name = path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy());
    let stem = name.rsplit_once('.').filter(|_| is_gguf).map_or(&*name, |(stem, _)| stem);
    PartName::parse(&name).filter(|_| is_gguf).map_or(stem, |part| part.stem).to_owned()
}

/// Those of the files that are not there, in words; `None` where all are.
fn missing(files: &[PathBuf]) -> Option<String> {
    const SHOWN: usize = 5;
    let missing: Vec<&PathBuf> = files.iter().filter(|path| !path.is_file()).collect();
    let names: Vec<String> = missing.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
    let more = missing.len().saturating_sub(SHOWN);
    let and = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!missing.is_empty()).then(|| format!("{}{and}", names.join(", ")))
}

/// The format error of a file.
fn malformed(path: &Path, message: impl Into<String>) -> LoadError {
    LoadError::Format { path: path.to_owned(), message: message.into() }
}
