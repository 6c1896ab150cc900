//! All tensors of a model under Hugging Face's names, mapped, not read.
//!
//! Invariant: a tensor's bytes lie inside its file and have exactly the length
//! that type and shape ask for. Dropping the table unmaps the files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::mapping::Mapping;
use super::tensor::{HostTensor, RowOrder, TensorType};
use crate::types::LoadError;

/// After so many bytes handed out, the pages read so far are let go: a load's peak is then the packed
/// weights and little more, not both forms of the model.
const RELEASE_BYTES: usize = 4 << 20;

/// Bytes of a mapped file.
#[derive(Clone, Debug)]
pub(super) struct Span {
    /// Index of the file in the table.
    pub file: usize,
    /// Inside the file.
    pub bytes: Range<usize>,
}

/// A tensor on its way into the table.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its name in the file.
    pub file_name: String,
    /// Outermost first, in elements.
    pub shape: Vec<usize>,
    pub kind: TensorType,
    pub data: Span,
    /// MLX scales and biases.
    pub meta: Option<(Span, Span)>,
    pub order: RowOrder,
}

#[derive(Debug)]
struct Slot {
    entry: Entry,
    used: AtomicBool,
}

/// What is known of a tensor without reading it.
#[derive(Clone, Copy, Debug)]
pub struct TensorFacts<'a> {
    /// In Hugging Face's terms.
    pub name: &'a str,
    /// Outermost first, in elements.
    pub shape: &'a [usize],
    /// How it is stored.
    pub kind: TensorType,
    /// In the file, scales and biases included.
    pub bytes: u64,
}

/// A model's tensors by name.
#[derive(Debug, Default)]
pub struct TensorTable {
    files: Vec<Mapping>,
    slots: BTreeMap<String, Slot>,
    /// Bytes handed out since pages were last let go.
    handed: AtomicUsize,
}

impl TensorTable {
    pub(super) fn new(files: Vec<Mapping>) -> Self {
        Self { files, slots: BTreeMap::new(), handed: AtomicUsize::new(0) }
    }

    /// Adds a tensor after checking its bytes against type and shape.
    pub(super) fn insert(&mut self, name: String, entry: Entry) -> Result<(), LoadError> {
        let wrong = |message: String| LoadError::Tensor { name: entry.file_name.clone(), message };
        let (rows, cols) = matrix_shape(&entry.shape).ok_or_else(|| {
            wrong(format!("the shape {:?} is not that of a vector or a matrix", entry.shape))
        })?;
        let row = entry.kind.row_bytes(cols).ok_or_else(|| {
            let (kind, block) = (entry.kind.describe(), entry.kind.block());
            wrong(format!("rows of {cols} are not a multiple of {block}, as {kind} needs"))
        })?;
        let size = row.checked_mul(rows);
        let file = self.files.get(entry.data.file).map_or(0, |file| file.bytes().len());
        if entry.data.bytes.end > file || size != Some(entry.data.bytes.len()) {
            return Err(wrong(format!(
                "the shape {:?} needs {size:?} bytes, the file has {} for it",
                entry.shape,
                entry.data.bytes.len()
            )));
        }
        if let (TensorType::Affine { group, meta, .. }, parts) = (entry.kind, &entry.meta) {
            let size = rows * (cols / usize::from(group)) * meta.bytes();
            let fits = |span: &Span| {
                let file = self.files.get(span.file).map_or(0, |file| file.bytes().len());
                span.bytes.len() == size && span.bytes.end <= file
            };
            if !parts.as_ref().is_some_and(|(scales, biases)| fits(scales) && fits(biases)) {
                return Err(wrong(format!("scales and biases of {size} bytes each are needed")));
            }
        }
        if let RowOrder::RopePairs { head_dim } = entry.order
            && (head_dim == 0 || !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim))
        {
            return Err(wrong(format!("{rows} rows are not heads of {head_dim}")));
        }
        if self.slots.contains_key(&name) {
            return Err(wrong("is there twice".into()));
        }
        self.slots.insert(name, Slot { entry, used: AtomicBool::new(false) });
        Ok(())
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.slots.contains_key(name)
    }

    /// A tensor's shape, outermost first, without marking it as consumed.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.slots.get(name).map(|slot| slot.entry.shape.as_slice())
    }

    /// A matrix of `[rows, cols]`; marks it as consumed.
    ///
    /// # Errors
    /// `Tensor` where it is missing or has another shape.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>, LoadError> {
        let slot = self.slot(name)?;
        if slot.entry.shape != [rows, cols] {
            return Err(self.wrong_shape(name, &slot.entry, &[rows, cols]));
        }
        slot.used.store(true, Ordering::Relaxed);
        self.release_read_pages(slot.entry.data.bytes.len());
        Ok(self.host(&slot.entry, rows, cols))
    }

    /// What was handed out before has mostly been packed by now; what has not is only read again.
    fn release_read_pages(&self, next: usize) {
        let before = self.handed.fetch_add(next, Ordering::Relaxed);
        if before >= RELEASE_BYTES {
            self.handed.store(next, Ordering::Relaxed);
            self.files.iter().for_each(Mapping::release);
        }
    }

    /// A vector of plain floats, widened to f32; marks it as consumed.
    ///
    /// # Errors
    /// `Tensor` where it is missing, has another shape or is quantised.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let slot = self.slot(name)?;
        if slot.entry.shape != [len] {
            return Err(self.wrong_shape(name, &slot.entry, &[len]));
        }
        if !slot.entry.kind.is_dense() {
            let kind = slot.entry.kind.describe();
            let message = format!("is {kind}; a vector must be F32, F16 or BF16");
            return Err(LoadError::Tensor { name: slot.entry.file_name.clone(), message });
        }
        slot.used.store(true, Ordering::Relaxed);
        let mut values = vec![0.0; len];
        self.host(&slot.entry, 1, len).dequantize_row(0, &mut values);
        Ok(values)
    }

    /// Names of tensors that were never asked for.
    pub fn unconsumed(&self) -> Vec<String> {
        let unused = |slot: &Slot| !slot.used.load(Ordering::Relaxed);
        self.slots.iter().filter(|(_, slot)| unused(slot)).map(|(name, _)| name.clone()).collect()
    }

    /// All names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.slots.keys().map(String::as_str)
    }

    /// All tensors, in the order of their names.
    pub fn facts(&self) -> impl Iterator<Item = TensorFacts<'_>> {
        self.slots.iter().map(|(name, slot)| {
            let entry = &slot.entry;
            let meta = entry.meta.as_ref().map_or(0, |(a, b)| a.bytes.len() + b.bytes.len());
            let bytes = (entry.data.bytes.len() + meta) as u64;
            TensorFacts { name, shape: &entry.shape, kind: entry.kind, bytes }
        })
    }

    /// Elements of all tensors: the model's parameters.
    pub fn parameters(&self) -> u64 {
        self.slots.values().map(|slot| slot.entry.shape.iter().product::<usize>() as u64).sum()
    }

    /// Names the weights by what is in them: every byte is read. Where the tensors lie in which file
    /// makes no difference.
    pub fn fingerprint(&self, config: &serde_json::Value) -> String {
        use sha2::{Digest, Sha256};
        let mut all = Sha256::new();
        all.update(config.to_string());
        for (name, Slot { entry, .. }) in &self.slots {
            all.update(format!("{name} {:?} {:?} {:?}", entry.shape, entry.kind, entry.order));
            let meta = entry.meta.iter().flat_map(|(scales, biases)| [scales, biases]);
            for span in std::iter::once(&entry.data).chain(meta) {
                all.update(crc32fast::hash(self.bytes(span)).to_le_bytes());
                self.files.get(span.file).inspect(|file| file.release());
            }
        }
        all.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes().len() as u64).sum()
    }

    /// Types of the matrices in words, the most bytes first.
    pub fn weight_types(&self) -> Vec<String> {
        let mut bytes: BTreeMap<String, usize> = BTreeMap::new();
        for slot in self.slots.values().filter(|slot| slot.entry.shape.len() == 2) {
            *bytes.entry(slot.entry.kind.describe()).or_default() += slot.entry.data.bytes.len();
        }
        let mut types: Vec<_> = bytes.into_iter().collect();
        types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        types.into_iter().map(|(kind, _)| kind).collect()
    }

    fn slot(&self, name: &str) -> Result<&Slot, LoadError> {
        self.slots.get(name).ok_or_else(|| LoadError::Tensor {
            name: name.to_owned(),
            message: match self.files.as_slice() {
                [file] => format!("is missing from {}", file.name()),
                files => format!("is missing from all {} files", files.len()),
            },
        })
    }

    fn wrong_shape(&self, name: &str, entry: &Entry, asked: &[usize]) -> LoadError {
        let also = if entry.file_name == name { String::new() } else { format!("`{}` ", entry.file_name) };
        let file = self.files.get(entry.data.file).map(Mapping::name).unwrap_or_default();
        let message = format!(
            "{also}in {file} has the shape {:?} ({}, {} bytes), the configuration asks for {asked:?}",
            entry.shape,
            entry.kind.describe(),
            entry.data.bytes.len(),
        );
        LoadError::Tensor { name: name.to_owned(), message }
    }

    fn host<'a>(&'a self, entry: &'a Entry, rows: usize, cols: usize) -> HostTensor<'a> {
        let (scales, biases) = match &entry.meta {
            Some((scales, biases)) => (self.bytes(scales), self.bytes(biases)),
            None => (&[][..], &[][..]),
        };
        HostTensor {
            name: &entry.file_name,
            rows,
            cols,
            kind: entry.kind,
            data: self.bytes(&entry.data),
            scales,
            biases,
            order: entry.order,
        }
    }

    fn bytes(&self, span: &Span) -> &[u8] {
        self.files.get(span.file).and_then(|file| file.bytes().get(span.bytes.clone())).unwrap_or(&[])
    }
}

fn matrix_shape(shape: &[usize]) -> Option<(usize, usize)> {
    match *shape {
        [cols] if cols > 0 => Some((1, cols)),
        [rows, cols] if rows > 0 && cols > 0 => Some((rows, cols)),
        _ => None,
    }
}
