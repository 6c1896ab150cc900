//! The container: header, metadata, tensor infos. Every number in it is untrusted.
//!
//! Values borrow from the mapped file. A count is believed only as far as the
//! bytes that are left could hold so many of the thing counted.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use super::super::malformed;
use super::super::tensor::TensorType;
use crate::types::LoadError;

/// Arrays nested deeper are refused.
const MAX_NESTING: usize = 4;
/// Longest array kept: far beyond any vocabulary.
const MAX_ARRAY: u64 = 8 << 20;
/// Lists that are kept.
const READ_LISTS: [&str; 5] = [
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.chat_templates",
];
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const SUPPORTED_TYPES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K";

/// A metadata value.
#[derive(Debug, PartialEq)]
pub(super) enum Value<'a> {
    /// Any integer or boolean.
    Int(i128),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<&'a str>),
    /// An array of something that nobody asks for.
    Other,
}

/// Metadata by key.
#[derive(Debug)]
pub(super) struct Metadata<'a> {
    values: HashMap<&'a str, Value<'a>>,
    path: &'a Path,
}

/// Where a tensor is and what it claims to be; the range is inside the file.
#[derive(Debug)]
pub(super) struct TensorInfo<'a> {
    pub name: &'a str,
    /// Outermost first.
    pub shape: Vec<usize>,
    pub bytes: Range<usize>,
    /// Which of the model's files.
    pub file: usize,
    type_id: u32,
}

/// Everything before the data.
#[derive(Debug)]
pub(super) struct Header<'a> {
    pub metadata: Metadata<'a>,
    pub tensors: Vec<TensorInfo<'a>>,
}

impl<'a> Header<'a> {
    /// Parses and checks everything that is before the data, and that the data is all there;
    /// `file` is the index of the file among the model's.
    pub fn parse(bytes: &'a [u8], path: &'a Path, file: usize) -> Result<Self, LoadError> {
        let mut cursor = Cursor { bytes, at: 0, path };
        if cursor.take(4)? != b"GGUF" {
            return Err(malformed(path, "does not begin with `GGUF`: not a GGUF file"));
        }
        match cursor.u32()? {
            2 | 3 => {}
            version if version.swap_bytes() == 3 => {
                return Err(malformed(path, "is a big-endian GGUF file; little-endian is needed"));
            }
            version => return Err(malformed(path, format!("GGUF version {version}; 2 and 3 are known"))),
        }
        // The smallest tensor info and the smallest key-value pair.
        let tensor_count = cursor.count(8 + 4 + 8 + 4 + 8, "tensors")?;
        let value_count = cursor.count(8 + 4 + 1, "metadata values")?;
        let metadata = Metadata::parse(&mut cursor, value_count)?;
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(RawInfo::parse(&mut cursor)?);
        }
        let alignment = match metadata.number("general.alignment")? {
            None => DEFAULT_ALIGNMENT,
            Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 20 => alignment,
            Some(other) => return Err(malformed(path, format!("general.alignment is {other}"))),
        };
        let data = (cursor.at as u64).next_multiple_of(alignment);
        let mut seen = std::collections::HashSet::new();
        let tensors = tensors
            .into_iter()
            .map(|raw| {
                if !seen.insert(raw.name) {
                    return Err(raw.wrong("is there twice"));
                }
                raw.locate(data, alignment, bytes.len() as u64, path).map(|info| TensorInfo { file, ..info })
            })
            .collect::<Result<Vec<_>, _>>()?;
        check_apart(&tensors, data as usize)?;
        Ok(Self { metadata, tensors })
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo<'a>> {
        self.tensors.iter().find(|info| info.name == name)
    }
}

/// No byte belongs to two tensors.
fn check_apart(tensors: &[TensorInfo<'_>], data: usize) -> Result<(), LoadError> {
    let mut sorted: Vec<&TensorInfo<'_>> = tensors.iter().collect();
    sorted.sort_by_key(|info| info.bytes.start);
    for pair in sorted.windows(2) {
        if let [first, second] = pair
            && second.bytes.start < first.bytes.end
        {
            let (start, end) = (second.bytes.start - data, first.bytes.end - data);
            let message = format!("begins before `{}` ends: at {start}, not at {end} or later", first.name);
            return Err(LoadError::Tensor { name: second.name.to_owned(), message });
        }
    }
    Ok(())
}

struct RawInfo<'a> {
    name: &'a str,
    /// Innermost first, as in the file.
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

impl<'a> RawInfo<'a> {
    fn parse(cursor: &mut Cursor<'a>) -> Result<Self, LoadError> {
        let name = cursor.text()?;
        let count = cursor.u32()?;
        if count == 0 || count > MAX_DIMENSIONS {
            let message = format!("has {count} dimensions; 1 to {MAX_DIMENSIONS} are possible");
            return Err(LoadError::Tensor { name: name.to_owned(), message });
        }
        let dims = (0..count).map(|_| cursor.u64()).collect::<Result<_, _>>()?;
        Ok(Self { name, dims, type_id: cursor.u32()?, offset: cursor.u64()? })
    }

    fn wrong(&self, message: impl Into<String>) -> LoadError {
        LoadError::Tensor { name: self.name.to_owned(), message: message.into() }
    }

    fn locate(self, data: u64, alignment: u64, file: u64, path: &Path) -> Result<TensorInfo<'a>, LoadError> {
        let kind = tensor_type(self.type_id, self.name)?;
        let mut shape = Vec::with_capacity(self.dims.len());
        for &dim in self.dims.iter().rev() {
            match usize::try_from(dim) {
                Ok(dim) if dim > 0 => shape.push(dim),
                _ => return Err(self.wrong(format!("has a dimension of {dim}"))),
            }
        }
        let (cols, outer) = match shape.split_last() {
            Some((&cols, outer)) => (cols, outer),
            None => return Err(self.wrong("has no dimensions")),
        };
        let row = kind.row_bytes(cols).ok_or_else(|| {
            self.wrong(format!(
                "rows of {cols} are no whole blocks of {} ({})",
                kind.block(),
                kind.describe()
            ))
        })?;
        let size = outer
            .iter()
            .try_fold(row, |size, &dim| size.checked_mul(dim))
            .ok_or_else(|| self.wrong(format!("has the impossible shape {shape:?}")))?;
        if !self.offset.is_multiple_of(alignment) {
            return Err(self.wrong(format!("begins at {}, not a multiple of {alignment}", self.offset)));
        }
        let start = data.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(size as u64));
        match (start, end) {
            (Some(start), Some(end)) if end <= file => Ok(TensorInfo {
                name: self.name,
                shape,
                bytes: start as usize..end as usize,
                file: 0,
                type_id: self.type_id,
            }),
            _ => Err(malformed(
                path,
                format!(
                    "is cut short: tensor `{}` ends at byte {}, the file has {file}{}",
                    self.name,
                    end.map_or_else(|| "2^64 or later".into(), |end| end.to_string()),
                    end.map_or_else(String::new, |end| format!(
                        ": at least {} bytes are missing",
                        end - file
                    )),
                ),
            )),
        }
    }
}

impl TensorInfo<'_> {
    /// How its elements are stored.
    pub fn kind(&self) -> Result<TensorType, LoadError> {
        tensor_type(self.type_id, self.name)
    }
}

fn tensor_type(id: u32, name: &str) -> Result<TensorType, LoadError> {
    let known = match id {
        0 => return Ok(TensorType::F32),
        1 => return Ok(TensorType::F16),
        2 => return Ok(TensorType::Q4_0),
        3 => return Ok(TensorType::Q4_1),
        6 => return Ok(TensorType::Q5_0),
        7 => return Ok(TensorType::Q5_1),
        8 => return Ok(TensorType::Q8_0),
        12 => return Ok(TensorType::Q4K),
        13 => return Ok(TensorType::Q5K),
        14 => return Ok(TensorType::Q6K),
        30 => return Ok(TensorType::BF16),
        4 | 5 => "Q4_2 or Q4_3, long withdrawn",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31..=33 => "a rearranged Q4_0, long withdrawn",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36..=38 => "a rearranged IQ4_NL, long withdrawn",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => "of an unknown type",
    };
    Err(LoadError::Unsupported {
        message: format!("tensor `{name}` is {known} (type {id}); supported are {SUPPORTED_TYPES}"),
    })
}

impl<'a> Metadata<'a> {
    fn parse(cursor: &mut Cursor<'a>, count: u64) -> Result<Self, LoadError> {
        let mut values = HashMap::new();
        for _ in 0..count {
            let key = cursor.text()?;
            let kind = cursor.u32()?;
            let value = cursor.value(kind, key, 0)?;
            if values.insert(key, value).is_some() {
                return Err(malformed(cursor.path, format!("the key `{key}` is there twice")));
            }
        }
        Ok(Self { values, path: cursor.path })
    }

    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.values.get(key)
    }

    fn wrong(&self, key: &str, what: &str) -> LoadError {
        malformed(self.path, format!("metadata `{key}` is not {what}"))
    }

    /// A text that must be there.
    pub fn text(&self, key: &str) -> Result<&'a str, LoadError> {
        self.optional_text(key)?.ok_or_else(|| malformed(self.path, format!("metadata `{key}` is missing")))
    }

    /// A text that may be there.
    pub fn optional_text(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    /// A whole number that may be there.
    pub fn number(&self, key: &str) -> Result<Option<u64>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Int(number)) => {
                u64::try_from(*number).map(Some).map_err(|_| self.wrong(key, "a number from 0 on"))
            }
            Some(_) => Err(self.wrong(key, "one whole number")),
        }
    }

    /// A whole number that must be there.
    pub fn required(&self, key: &str) -> Result<u64, LoadError> {
        self.number(key)?.ok_or_else(|| malformed(self.path, format!("metadata `{key}` is missing")))
    }

    /// A finite float that may be there.
    pub fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) if value.is_finite() => Ok(Some(*value)),
            Some(Value::Int(value)) => Ok(Some(*value as f64)),
            Some(_) => Err(self.wrong(key, "a finite number")),
        }
    }

    /// A truth value that may be there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A list of texts that may be there.
    pub fn texts(&self, key: &str) -> Result<Option<&[&'a str]>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Texts(texts)) => Ok(Some(texts)),
            Some(_) => Err(self.wrong(key, "a list of texts")),
        }
    }

    /// A list of floats that may be there.
    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Floats(numbers)) => Ok(Some(numbers)),
            Some(_) => Err(self.wrong(key, "a list of floats")),
        }
    }

    /// A list of whole numbers that may be there.
    pub fn numbers(&self, key: &str) -> Result<Option<&[i64]>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Ints(numbers)) => Ok(Some(numbers)),
            Some(_) => Err(self.wrong(key, "a list of whole numbers")),
        }
    }
}

/// Whether a list is asked for by anybody; others are passed over and not kept.
fn is_read(key: &str) -> bool {
    READ_LISTS.contains(&key)
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: u64) -> Result<&'a [u8], LoadError> {
        let taken = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .and_then(|end| self.bytes.get(self.at..end));
        match taken {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(malformed(
                self.path,
                format!("is cut short: {len} bytes asked for at {}, {} are left", self.at, self.left()),
            )),
        }
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LoadError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, LoadError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, LoadError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, each: u64, of: &str) -> Result<u64, LoadError> {
        let count = self.u64()?;
        if count > self.left() / each {
            return Err(malformed(
                self.path,
                format!("claims {count} {of}; {} bytes cannot hold them", self.left()),
            ));
        }
        Ok(count)
    }

    fn text(&mut self) -> Result<&'a str, LoadError> {
        let len = self.u64()?;
        let at = self.at;
        std::str::from_utf8(self.take(len)?)
            .map_err(|_| malformed(self.path, format!("the text at byte {at} is not UTF-8")))
    }

    fn value(&mut self, kind: u32, key: &str, depth: usize) -> Result<Value<'a>, LoadError> {
        Ok(match kind {
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => Value::Bool(self.array::<1>()? != [0]),
            8 => Value::Text(self.text()?),
            9 => return self.list(key, depth, is_read(key)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => Value::Int(self.int(kind, key)?),
        })
    }

    fn int(&mut self, kind: u32, key: &str) -> Result<i128, LoadError> {
        Ok(match kind {
            0 => i128::from(u8::from_le_bytes(self.array()?)),
            1 => i128::from(i8::from_le_bytes(self.array()?)),
            2 => i128::from(u16::from_le_bytes(self.array()?)),
            3 => i128::from(i16::from_le_bytes(self.array()?)),
            4 => i128::from(u32::from_le_bytes(self.array()?)),
            5 => i128::from(i32::from_le_bytes(self.array()?)),
            10 => i128::from(u64::from_le_bytes(self.array()?)),
            11 => i128::from(i64::from_le_bytes(self.array()?)),
            other => {
                return Err(malformed(self.path, format!("metadata `{key}` has the unknown type {other}")));
            }
        })
    }

    fn skipped(&mut self, bytes: u64) -> Result<Value<'a>, LoadError> {
        self.take(bytes)?;
        Ok(Value::Other)
    }

    fn list(&mut self, key: &str, depth: usize, is_kept: bool) -> Result<Value<'a>, LoadError> {
        if depth >= MAX_NESTING {
            return Err(malformed(self.path, format!("metadata `{key}` is nested too deeply")));
        }
        let kind = self.u32()?;
        let smallest = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            other => {
                return Err(malformed(self.path, format!("metadata `{key}` holds the unknown type {other}")));
            }
        };
        let count = self.count(smallest, "list items")?;
        if count > MAX_ARRAY {
            return Err(malformed(
                self.path,
                format!("metadata `{key}` has {count} items; {MAX_ARRAY} are the most"),
            ));
        }
        Ok(match kind {
            9 => {
                for _ in 0..count {
                    self.list(key, depth + 1, false)?;
                }
                Value::Other
            }
            7 | 12 => self.skipped(count * smallest)?,
            _ if kind != 8 && !is_kept => self.skipped(count * smallest)?,
            8 if !is_kept => {
                for _ in 0..count {
                    self.text()?;
                }
                Value::Other
            }
            8 => Value::Texts((0..count).map(|_| self.text()).collect::<Result<_, _>>()?),
            6 => Value::Floats(
                (0..count).map(|_| self.array().map(f32::from_le_bytes)).collect::<Result<_, _>>()?,
            ),
            _ => Value::Ints(
                // Numbers beyond 63 bits are in no list that is read.
                (0..count).map(|_| self.int(kind, key).map(|n| n as i64)).collect::<Result<_, _>>()?,
            ),
        })
    }
}
