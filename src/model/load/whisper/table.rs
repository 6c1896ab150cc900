//! A speech model's tensors by MLX's names.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::folder::{self, AllStored, Quantization, quantization};
use super::super::mapping::Mapping;
use super::super::table::Span;
use super::super::{HostTensor, RowOrder, TensorType};
use super::{convolution, names};
use crate::types::LoadError;

/// Where a tensor's bytes are.
#[derive(Debug)]
pub(super) enum Data {
    /// In a mapped file.
    Mapped(usize, Range<usize>),
    /// Put in another order, or widened.
    Owned(Vec<u8>),
}

/// One tensor.
#[derive(Debug)]
pub(super) struct Tensor {
    pub shape: Vec<usize>,
    pub kind: TensorType,
    pub data: Data,
    /// MLX scales and biases.
    pub meta: Option<(Data, Data)>,
}

/// All tensors, mapped.
#[derive(Debug, Default)]
pub struct WhisperTensors {
    files: Vec<Mapping>,
    tensors: BTreeMap<String, Tensor>,
    heads: Option<usize>,
    alignment: Option<Vec<(usize, usize)>>,
}

impl WhisperTensors {
    pub(super) fn new(files: Vec<Mapping>) -> Self {
        Self { files, ..Self::default() }
    }

    /// From a checkpoint in a folder, by either layout's names.
    pub(super) fn from_stored(
        files: Vec<Mapping>,
        stored: &AllStored,
        quantization: &Quantization,
    ) -> Result<Self, LoadError> {
        let mut table = Self::new(files);
        for (name, (file, tensor)) in stored {
            if name == "alignment_heads" {
                let Some(file) = table.files.get(*file) else { continue };
                let bytes = file.bytes().get(tensor.bytes.clone()).unwrap_or(&[]);
                let size = bytes.len() / tensor.shape.iter().product::<usize>().max(1);
                table.alignment = alignment(bytes, size);
                continue;
            }
            if quantization::is_part(name, stored) {
                continue;
            }
            let Some(to) = names::from_folder(name) else { continue };
            let (kind, shape, meta) = folder::storage(name, tensor, stored, quantization)?;
            if let Some((scales, biases)) = meta {
                let mapped = |span: Span| Data::Mapped(span.file, span.bytes);
                let meta = Some((mapped(scales), mapped(biases)));
                let data = Data::Mapped(*file, tensor.bytes.clone());
                table.insert(to, Tensor { shape, kind, data, meta })?;
                continue;
            }
            table.insert_dense(to, &shape, kind, *file, tensor.bytes.clone())?;
        }
        Ok(table)
    }

    /// A float tensor of a file; convolutions become matrices.
    pub(super) fn insert_dense(
        &mut self,
        name: String,
        shape: &[usize],
        kind: TensorType,
        file: usize,
        range: Range<usize>,
    ) -> Result<(), LoadError> {
        let data = Data::Mapped(file, range);
        if name.starts_with("encoder.conv") && name.ends_with(".weight") && shape.len() == 3 {
            let path = self.files.get(file).map(Mapping::name).unwrap_or_default();
            let (shape, bytes) =
                convolution(&name, shape, kind.block_bytes(), self.bytes(&data), path.as_ref())?;
            return self.insert(name, Tensor { shape, kind, data: Data::Owned(bytes), meta: None });
        }
        self.insert(name, Tensor { shape: shape.to_vec(), kind, data, meta: None })
    }

    /// Adds a tensor after checking its bytes against type and shape.
    pub(super) fn insert(&mut self, name: String, tensor: Tensor) -> Result<(), LoadError> {
        let cols = tensor.shape.last().copied().unwrap_or(0);
        let rows = tensor.shape.iter().rev().skip(1).try_fold(1usize, |rows, n| rows.checked_mul(*n));
        let row = tensor.kind.row_bytes(cols).filter(|row| *row > 0);
        let needed = row.zip(rows).and_then(|(row, rows)| row.checked_mul(rows));
        let have = self.bytes(&tensor.data).len();
        let mut fits = needed == Some(have) && !tensor.shape.is_empty() && tensor.shape.len() <= 2;
        if let TensorType::Affine { group, meta, .. } = tensor.kind {
            let size =
                rows.and_then(|rows| rows.checked_mul(cols / usize::from(group))).map(|n| n * meta.bytes());
            fits &= tensor.meta.as_ref().is_some_and(|(scales, biases)| {
                Some(self.bytes(scales).len()) == size && Some(self.bytes(biases).len()) == size
            });
        }
        if !fits {
            let message = format!("the shape {:?} does not fit its {have} bytes", tensor.shape);
            return Err(LoadError::Tensor { name, message });
        }
        if self.tensors.contains_key(&name) {
            return Err(LoadError::Tensor { name, message: "is there twice".into() });
        }
        self.tensors.insert(name, tensor);
        Ok(())
    }

    pub(super) fn file_bytes_of(&self, file: usize, range: Range<usize>) -> &[u8] {
        self.files.get(file).and_then(|file| file.bytes().get(range)).unwrap_or(&[])
    }

    fn bytes<'a>(&'a self, data: &'a Data) -> &'a [u8] {
        match data {
            Data::Mapped(file, range) => self.file_bytes_of(*file, range.clone()),
            Data::Owned(bytes) => bytes,
        }
    }

    pub(super) fn set_heads(&mut self, heads: usize) {
        self.heads = Some(heads);
    }

    /// Heads as the file says, where it does.
    pub(super) fn heads(&self) -> Option<usize> {
        self.heads
    }

    /// Alignment heads as the file has them.
    pub(super) fn alignment(&self) -> Option<&[(usize, usize)]> {
        self.alignment.as_deref()
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(super) fn wrong(&self, name: &str, message: &str) -> LoadError {
        LoadError::Tensor { name: name.to_owned(), message: message.to_owned() }
    }

    fn tensor(&self, name: &str) -> Result<&Tensor, LoadError> {
        self.tensors.get(name).ok_or_else(|| self.wrong(name, "is missing"))
    }

    /// A tensor's shape, outermost first.
    pub(super) fn shape(&self, name: &str) -> Result<&[usize], LoadError> {
        self.tensor(name).map(|tensor| tensor.shape.as_slice())
    }

    /// A matrix of `[rows, cols]`.
    ///
    /// # Errors
    /// `Tensor` where it is missing or has another shape.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>, LoadError> {
        let (name, tensor) =
            self.tensors.get_key_value(name).ok_or_else(|| self.wrong(name, "is missing"))?;
        if tensor.shape != [rows, cols] {
            let message = format!("has the shape {:?}, [{rows}, {cols}] is needed", tensor.shape);
            return Err(self.wrong(name, &message));
        }
        let (scales, biases) = match &tensor.meta {
            Some((scales, biases)) => (self.bytes(scales), self.bytes(biases)),
            None => (&[][..], &[][..]),
        };
        let (kind, data) = (tensor.kind, self.bytes(&tensor.data));
        Ok(HostTensor { name, rows, cols, kind, data, scales, biases, order: RowOrder::Plain })
    }

    /// A vector of floats, widened to f32.
    ///
    /// # Errors
    /// `Tensor` where it is missing, has another shape or is quantised.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(name)?;
        if tensor.shape != [len] || !tensor.kind.is_dense() {
            let message = format!("has the shape {:?}, [{len}] of floats is needed", tensor.shape);
            return Err(self.wrong(name, &message));
        }
        Ok(super::widen(self.bytes(&tensor.data), tensor.kind))
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        let size = |tensor: &Tensor| {
            let meta = tensor.meta.as_ref().map_or(0, |(a, b)| self.bytes(a).len() + self.bytes(b).len());
            (self.bytes(&tensor.data).len() + meta) as u64
        };
        self.tensors.values().map(size).sum()
    }
}

/// Pairs of little-endian integers of so many bytes.
fn alignment(bytes: &[u8], size: usize) -> Option<Vec<(usize, usize)>> {
    if !matches!(size, 1 | 2 | 4 | 8) {
        return None;
    }
    let read = |bytes: &[u8]| {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        usize::try_from(u64::from_le_bytes(wide)).ok()
    };
    let pairs = bytes.chunks_exact(2 * size);
    pairs.map(|pair| Some((read(&pair[..size])?, read(&pair[size..])?))).collect()
}
