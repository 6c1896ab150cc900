//! Weights for MLX: packed as bytes on the loader thread, handed to MLX without a copy.
//!
//! Matrices that are stacked (q·k·v, gate·up) become one array where their formats agree,
//! else one part a format whose products are concatenated.
//!
//! Codes of 2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128 go to MLX's quantised product as they
//! are. Scales and biases take the activations' type, but those of GGUF's K types stay f32 whatever the
//! activations: products of a half and a 6-bit integer that no half holds. Such a part's product is then
//! computed in f32 and cast back. Q6_K has groups of 16, which MLX's product lacks, and is widened to the
//! activations' type: exact in f32, rounded as any half-precision weight in the half types.

use half::{bf16, f16};
use mlx_rs::Array;
use mlx_rs::ops::{concatenate, dequantize, matmul, quantized_matmul, transpose_axes};

use super::native::array_from_vec;
use super::{MlxConfig, MlxType, device_error, dim};
use crate::model::load::HostTensor;
use crate::types::{EngineError, LoadError};

/// Numbers of one of the activation types.
#[derive(Debug)]
enum Numbers {
    F32(Vec<f32>),
    Half(Vec<u16>, MlxType),
}

impl Numbers {
    fn with_capacity(kind: MlxType, capacity: usize) -> Self {
        match kind {
            MlxType::F32 => Self::F32(Vec::with_capacity(capacity)),
            half => Self::Half(Vec::with_capacity(capacity), half),
        }
    }

    fn kind(&self) -> MlxType {
        match self {
            Self::F32(_) => MlxType::F32,
            Self::Half(_, kind) => *kind,
        }
    }

    fn extend(&mut self, values: &[f32]) {
        match self {
            Self::F32(numbers) => numbers.extend_from_slice(values),
            Self::Half(bits, MlxType::BF16) => {
                bits.extend(values.iter().map(|value| bf16::from_f32(*value).to_bits()));
            }
            Self::Half(bits, _) => bits.extend(values.iter().map(|value| f16::from_f32(*value).to_bits())),
        }
    }

    fn into_array(self, rows: usize, cols: usize) -> Result<Array, EngineError> {
        let shape = [dim(rows)?, dim(cols)?];
        match self {
            Self::F32(numbers) => array_from_vec(numbers, &shape, MlxType::F32.dtype()),
            Self::Half(bits, kind) => array_from_vec(bits, &shape, kind.dtype()),
        }
    }
}

#[derive(Debug)]
enum PackedPart {
    Dense { rows: usize, numbers: Numbers },
    Affine { rows: usize, bits: u8, group: usize, codes: Vec<u32>, scales: Numbers, biases: Numbers },
}

/// A weight on its way to the compute thread.
#[derive(Debug)]
pub struct MlxPacked {
    cols: usize,
    kind: MlxType,
    parts: Vec<PackedPart>,
}

impl MlxPacked {
    /// Packs matrices of equal width, stacked by rows.
    ///
    /// # Errors
    /// `Tensor` when there is nothing to pack, or widths differ.
    pub fn pack(config: &MlxConfig, tensors: &[HostTensor<'_>]) -> Result<Self, LoadError> {
        let Some(first) = tensors.first() else {
            return Err(LoadError::Tensor { name: String::new(), message: "nothing to pack".into() });
        };
        let mut packed = Self { cols: first.cols, kind: config.activations, parts: Vec::new() };
        for tensor in tensors {
            if tensor.cols != packed.cols {
                let message = format!("{} columns where {} were expected", tensor.cols, packed.cols);
                return Err(LoadError::Tensor { name: tensor.name.to_owned(), message });
            }
            match tensor.affine() {
                Some(shape) if !config.dequantize && matches!(shape.group, 32 | 64 | 128) => {
                    packed.push_affine(tensor, shape.bits, shape.group);
                }
                _ => packed.push_dense(tensor),
            }
        }
        Ok(packed)
    }

    fn push_dense(&mut self, tensor: &HostTensor<'_>) {
        if !matches!(self.parts.last(), Some(PackedPart::Dense { .. })) {
            let numbers = Numbers::with_capacity(self.kind, tensor.rows * tensor.cols);
            self.parts.push(PackedPart::Dense { rows: 0, numbers });
        }
        let Some(PackedPart::Dense { rows, numbers }) = self.parts.last_mut() else { return };
        let mut row = vec![0f32; tensor.cols];
        for index in 0..tensor.rows {
            tensor.dequantize_row(index, &mut row);
            numbers.extend(&row);
        }
        *rows += tensor.rows;
    }

    fn push_affine(&mut self, tensor: &HostTensor<'_>, bits: u8, group: usize) {
        let meta = if tensor.kind.has_factors() { MlxType::F32 } else { self.kind };
        let same = |part: &PackedPart| match part {
            PackedPart::Affine { bits: b, group: g, scales, .. } => {
                (*b, *g, scales.kind()) == (bits, group, meta)
            }
            PackedPart::Dense { .. } => false,
        };
        if !self.parts.last().is_some_and(same) {
            let groups = tensor.rows * (tensor.cols / group);
            self.parts.push(PackedPart::Affine {
                rows: 0,
                bits,
                group,
                codes: Vec::with_capacity(tensor.rows * tensor.cols * usize::from(bits) / 32),
                scales: Numbers::with_capacity(meta, groups),
                biases: Numbers::with_capacity(meta, groups),
            });
        }
        let Some(PackedPart::Affine { rows, codes, scales, biases, .. }) = self.parts.last_mut() else {
            return;
        };
        let groups = tensor.cols / group;
        let (mut row, mut scale, mut bias) = (vec![0u8; tensor.cols], vec![0f32; groups], vec![0f32; groups]);
        for index in 0..tensor.rows {
            tensor.affine_row(index, &mut row, &mut scale, &mut bias);
            pack_codes(&row, bits, codes);
            scales.extend(&scale);
            biases.extend(&bias);
        }
        *rows += tensor.rows;
    }

    /// Hands the buffers to MLX.
    ///
    /// # Errors
    /// `Device`.
    pub fn adopt(self) -> Result<MlxWeight, EngineError> {
        let cols = self.cols;
        let parts = self.parts.into_iter().map(|part| part.adopt(cols)).collect::<Result<_, _>>()?;
        Ok(MlxWeight { parts, kind: self.kind })
    }
}

/// Codes in consecutive bits from the lowest up, as MLX has them; 32 codes are `bits` whole words.
fn pack_codes(row: &[u8], bits: u8, words: &mut Vec<u32>) {
    for codes in row.chunks_exact(32) {
        let (mut pending, mut filled) = (0u64, 0);
        for code in codes {
            pending |= u64::from(*code) << filled;
            filled += bits;
            if filled >= 32 {
                words.push(pending as u32);
                pending >>= 32;
                filled -= 32;
            }
        }
    }
}

impl PackedPart {
    fn adopt(self, cols: usize) -> Result<Part, EngineError> {
        match self {
            Self::Dense { rows, numbers } => Ok(Part::Dense(numbers.into_array(rows, cols)?)),
            Self::Affine { rows, bits, group, codes, scales, biases } => Ok(Part::Affine {
                codes: array_from_vec(
                    codes,
                    &[dim(rows)?, dim(cols * usize::from(bits) / 32)?],
                    mlx_rs::Dtype::Uint32,
                )?,
                scales: scales.into_array(rows, cols / group)?,
                biases: biases.into_array(rows, cols / group)?,
                bits: i32::from(bits),
                group: dim(group)?,
            }),
        }
    }
}

#[derive(Debug)]
enum Part {
    Dense(Array),
    Affine { codes: Array, scales: Array, biases: Array, bits: i32, group: i32 },
}

/// A weight on the device: `[rows, cols]`, possibly in several parts.
#[derive(Debug)]
pub struct MlxWeight {
    parts: Vec<Part>,
    kind: MlxType,
}

impl MlxWeight {
    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let bytes: usize = self
            .parts
            .iter()
            .map(|part| match part {
                Part::Dense(array) => array.nbytes(),
                Part::Affine { codes, scales, biases, .. } => {
                    codes.nbytes() + scales.nbytes() + biases.nbytes()
                }
            })
            .sum();
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// `x · wᵀ`: `[tokens, cols] → [tokens, rows]`.
    ///
    /// # Errors
    /// `Device`.
    pub fn product(&self, x: &Array) -> Result<Array, EngineError> {
        let mut outputs = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let output = match part {
                Part::Dense(w) => matmul(x, transpose_axes(w, &[1, 0]).map_err(device_error)?),
                Part::Affine { codes, scales, biases, bits, group } => {
                    quantized_matmul(x, codes, scales, biases, true, *group, *bits)
                }
            }
            .map_err(device_error)?;
            // Scales wider than the activations widen the product.
            let kind = self.kind.dtype();
            outputs.push(match output.dtype() == kind {
                true => output,
                false => output.as_dtype(kind).map_err(device_error)?,
            });
        }
        match outputs.pop() {
            Some(only) if outputs.is_empty() => Ok(only),
            Some(last) => {
                outputs.push(last);
                concatenate(&outputs, 1).map_err(device_error)
            }
            None => Err(EngineError::InvalidPlan { message: "a weight without rows".into() }),
        }
    }

    /// Rows of the table, widened: `[indices, cols]`. Only a table in one part can be looked up.
    ///
    /// # Errors
    /// `Device`; `InvalidPlan` for a table in parts.
    pub fn rows(&self, indices: &Array) -> Result<Array, EngineError> {
        use mlx_rs::ops::indexing::take_axis;
        let take = |array: &Array| take_axis(array, indices, 0).map_err(device_error);
        match self.parts.as_slice() {
            [Part::Dense(table)] => take(table),
            [Part::Affine { codes, scales, biases, bits, group }] => {
                let (codes, scales, biases) = (take(codes)?, take(scales)?, take(biases)?);
                dequantize(&codes, &scales, &biases, *group, *bits)
                    .and_then(|rows| rows.as_dtype(self.kind.dtype()))
                    .map_err(device_error)
            }
            _ => Err(EngineError::InvalidPlan { message: "an embedding table in several formats".into() }),
        }
    }
}
