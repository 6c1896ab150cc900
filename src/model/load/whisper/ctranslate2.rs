//! CTranslate2's `model.bin`, version 4 to 6: names, shapes and bytes one after the other.
//!
//! Eight-bit weights (`NAME` with `NAME_scale`, value = code / scale, a scale a row) are widened to halves.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use half::f16;

use super::super::mapping::Mapping;
use super::super::{TensorType, malformed};
use super::table::{Data, Tensor, WhisperTensors};
use super::{convolution, names};
use crate::types::LoadError;

const SPEC: &str = "WhisperSpec";
const VERSIONS: std::ops::RangeInclusive<u32> = 4..=6;
/// Most variables and aliases that are believed: a 32-layer model has some 1,300.
const MOST: u32 = 65_536;

/// A variable as the file has it.
struct Variable {
    shape: Vec<usize>,
    kind: u8,
    bytes: Range<usize>,
}

/// Reads from the file's bytes, in order.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn string(&mut self) -> Option<&'a str> {
        let len = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        let text = self.take(usize::from(len))?;
        std::str::from_utf8(text.strip_suffix(&[0]).unwrap_or(text)).ok()
    }

    fn variable(&mut self) -> Option<(&'a str, Variable)> {
        let name = self.string()?;
        let rank = *self.take(1)?.first()?;
        let shape: Option<Vec<usize>> = (0..rank).map(|_| usize::try_from(self.u32()?).ok()).collect();
        let kind = *self.take(1)?.first()?;
        let len = usize::try_from(self.u32()?).ok()?;
        let start = self.at;
        self.take(len)?;
        Some((name, Variable { shape: shape?, kind, bytes: start..start + len }))
    }
}

/// Whether this file is a Whisper model.
pub(super) fn is_whisper(path: &Path) -> bool {
    let mut head = [0; 64];
    let read = std::fs::File::open(path).and_then(|mut file| std::io::Read::read(&mut file, &mut head));
    let mut cursor = Cursor { bytes: &head[..read.unwrap_or(0)], at: 4 };
    cursor.string() == Some(SPEC)
}

/// Opens the file.
pub(super) fn open(path: &Path) -> Result<WhisperTensors, LoadError> {
    let mapping = Mapping::open(path)?;
    let variables = parse(mapping.bytes(), path)?;
    let mut table = WhisperTensors::new(vec![mapping]);
    if let Some(heads) = variables.get("encoder/num_heads")
        && let [low, high, ..] = table.file_bytes_of(0, heads.bytes.clone())
    {
        let heads = usize::from(u16::from_le_bytes([*low, *high]));
        table.set_heads(heads);
    }
    for (name, variable) in &variables {
        let to = names::from_ctranslate2(name);
        if to.is_empty() {
            continue;
        }
        let scale = variables.get(&format!("{name}_scale"));
        enter(&mut table, name, variable, scale, to, path)?;
    }
    Ok(table)
}

/// All variables by name. Aliases name what is there already: nothing that is needed.
fn parse(bytes: &[u8], path: &Path) -> Result<BTreeMap<String, Variable>, LoadError> {
    let mut cursor = Cursor { bytes, at: 0 };
    let cut = |cursor: &Cursor<'_>| malformed(path, format!("is cut short or damaged at byte {}", cursor.at));
    let version = cursor.u32().ok_or_else(|| cut(&cursor))?;
    if !VERSIONS.contains(&version) {
        let message = format!("CTranslate2's format of version {version}: {VERSIONS:?} are supported");
        return Err(LoadError::Unsupported { message });
    }
    let spec = cursor.string().ok_or_else(|| cut(&cursor))?;
    if spec != SPEC {
        let message = format!("a CTranslate2 model of kind {spec}; {SPEC} is supported");
        return Err(LoadError::Unsupported { message });
    }
    let _revision = cursor.u32().ok_or_else(|| cut(&cursor))?;
    let count = cursor.u32().filter(|count| *count <= MOST).ok_or_else(|| cut(&cursor))?;
    let mut variables = BTreeMap::new();
    for _ in 0..count {
        let (name, variable) = cursor.variable().ok_or_else(|| cut(&cursor))?;
        if variables.insert(name.to_owned(), variable).is_some() {
            return Err(malformed(path, format!("variable `{name}` is there twice")));
        }
    }
    let aliases = cursor.u32().filter(|count| *count <= MOST).ok_or_else(|| cut(&cursor))?;
    for _ in 0..aliases {
        cursor.string().and_then(|_| cursor.string()).ok_or_else(|| cut(&cursor))?;
    }
    Ok(variables)
}

/// Enters a variable's rows under their names.
fn enter(
    table: &mut WhisperTensors,
    name: &str,
    variable: &Variable,
    scale: Option<&Variable>,
    to: Vec<String>,
    path: &Path,
) -> Result<(), LoadError> {
    let kind = match variable.kind {
        0 => TensorType::F32,
        4 => TensorType::F16,
        5 => TensorType::BF16,
        1 | 2 => return enter_codes(table, name, variable, scale, to, path),
        other => {
            let message =
                format!("variable `{name}` of type {other}: f32, f16, bf16, int8 and int16 are supported");
            return Err(LoadError::Unsupported { message });
        }
    };
    let (rows, shape) = split(name, variable, to.len(), path)?;
    let range = &variable.bytes;
    let part = rows.checked_mul(range.len() / variable.shape.first().copied().unwrap_or(1).max(1));
    let part = part.filter(|part| part * to.len() == range.len());
    let part = part
        .ok_or_else(|| malformed(path, format!("`{name}`: {:?} in {} bytes", variable.shape, range.len())))?;
    for (index, to) in to.into_iter().enumerate() {
        if to.ends_with("key.bias") {
            continue;
        }
        let start = range.start + index * part;
        table.insert_dense(to, &shape, kind, 0, start..start + part)?;
    }
    Ok(())
}

/// Rows of each of `parts` equal pieces, and their shape.
fn split(
    name: &str,
    variable: &Variable,
    parts: usize,
    path: &Path,
) -> Result<(usize, Vec<usize>), LoadError> {
    let rows = variable.shape.first().copied().filter(|rows| *rows > 0 && rows.is_multiple_of(parts));
    let Some(rows) = rows else {
        return Err(malformed(path, format!("`{name}` of shape {:?} is not {parts} parts", variable.shape)));
    };
    let mut shape = variable.shape.clone();
    shape[0] = rows / parts;
    Ok((rows / parts, shape))
}

/// Integer codes with a scale a row (8 bits) or one in all (16 bits), as halves.
fn enter_codes(
    table: &mut WhisperTensors,
    name: &str,
    variable: &Variable,
    scale: Option<&Variable>,
    to: Vec<String>,
    path: &Path,
) -> Result<(), LoadError> {
    let wrong = |what: &str| malformed(path, format!("`{name}` of shape {:?}: {what}", variable.shape));
    let scale =
        scale.filter(|scale| scale.kind == 0).ok_or_else(|| wrong("there is no scale for its codes"))?;
    let scales = super::widen(table.file_bytes_of(0, scale.bytes.clone()), TensorType::F32);
    let (rows, shape) = split(name, variable, to.len(), path)?;
    let width = usize::from(variable.kind);
    let codes = table.file_bytes_of(0, variable.bytes.clone());
    let cols =
        variable.shape[1..].iter().try_fold(1usize, |cols, n| cols.checked_mul(*n)).filter(|cols| *cols > 0);
    let fits =
        cols.and_then(|cols| cols.checked_mul(variable.shape[0])?.checked_mul(width)) == Some(codes.len());
    let Some(cols) = cols.filter(|_| fits && (scales.len() == variable.shape[0] || scales.len() == 1)) else {
        return Err(wrong("codes and scales do not fit"));
    };
    let mut halves = Vec::with_capacity(codes.len() / width * 2);
    for (row, codes) in codes.chunks_exact(cols * width).enumerate() {
        let scale = if scales.len() == 1 { scales[0] } else { scales[row] };
        for code in codes.chunks_exact(width) {
            let code = match *code {
                [low, high] => f32::from(i16::from_le_bytes([low, high])),
                [byte, ..] => f32::from(byte.cast_signed()),
                [] => 0.0,
            };
            halves.extend_from_slice(&f16::from_f32(code / scale).to_le_bytes());
        }
    }
    for (to, bytes) in to.into_iter().zip(halves.chunks_exact(rows * cols * 2)) {
        let is_convolution = to.starts_with("encoder.conv");
        let (shape, bytes) = match is_convolution {
            true => convolution(&to, &shape, 2, bytes, path)?,
            false => (shape.clone(), bytes.to_vec()),
        };
        table.insert(to, Tensor { shape, kind: TensorType::F16, data: Data::Owned(bytes), meta: None })?;
    }
    Ok(())
}
