//! A matrix (or vector) as it lies in a file: bytes, type, shape, order of rows.
//!
//! The only place that knows block layouts. Backends read rows through
//! [`HostTensor::dequantize_row`] (exact f32) or [`HostTensor::affine_row`]
//! (codes with a scale and a bias a group).

use half::{bf16, f16};

/// How elements are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TensorType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Truncated single.
    BF16,
    /// GGUF: groups of 32, `d · (q − 8)`.
    Q4_0,
    /// GGUF: groups of 32, `d · q + m`.
    Q4_1,
    /// GGUF: groups of 32, `d · q`, q signed 8 bits.
    Q8_0,
    /// MLX affine: `scale · q + bias`, codes packed little-endian in u32, scales and biases apart.
    Affine {
        /// 4 or 8.
        bits: u8,
        /// 32, 64 or 128.
        group: u16,
        /// Type of scales and biases.
        meta: MetaType,
    },
}

impl TensorType {
    /// Elements that are stored together: a row is a multiple of this.
    pub fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Affine { group, .. } => usize::from(group),
        }
    }

    /// Bytes of a block in the main data; scales and biases that lie apart are not counted.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
            Self::Affine { bits, group, .. } => usize::from(bits) * usize::from(group) / 8,
        }
    }

    /// Bytes of a row of `cols` elements, or `None` where they are no whole blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let block = self.block();
        cols.is_multiple_of(block).then(|| (cols / block).checked_mul(self.block_bytes())).flatten()
    }

    /// Whether elements are plain floats.
    pub fn is_dense(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// The type in words, for people.
    pub fn describe(self) -> String {
        match self {
            Self::F32 => "F32".into(),
            Self::F16 => "F16".into(),
            Self::BF16 => "BF16".into(),
            Self::Q4_0 => "Q4_0".into(),
            Self::Q4_1 => "Q4_1".into(),
            Self::Q8_0 => "Q8_0".into(),
            Self::Affine { bits, group, .. } => format!("MLX {bits}-bit, groups of {group}"),
        }
    }
}

/// Type of an MLX-quantised tensor's scales and biases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetaType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Truncated single.
    BF16,
}

impl MetaType {
    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }
}

/// Order in which file rows become model rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowOrder {
    /// As stored.
    Plain,
    /// Rows of each head are stored for neighbouring rope pairs (llama's GGUF files):
    /// model row `h·d + i` (first half) is file row `h·d + 2i`, and `h·d + d/2 + i` is `h·d + 2i + 1`.
    RopePairs {
        /// Width of a head, even, divides the rows.
        head_dim: usize,
    },
}

/// What a quantised tensor is in affine terms: `w = scale · code + bias`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AffineShape {
    /// Of a code: 4 or 8; codes are unsigned.
    pub bits: u8,
    /// Elements that share a scale and a bias; divides the columns.
    pub group: usize,
}

/// A tensor inside mapped file bytes. Lengths were checked against the file.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    /// Its name in the file, for errors.
    pub name: &'a str,
    /// Output features (vectors: 1).
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Storage.
    pub kind: TensorType,
    /// The elements or blocks, all rows, row-major.
    pub data: &'a [u8],
    /// MLX scales, `[rows][cols / group]`; else empty.
    pub scales: &'a [u8],
    /// MLX biases, likewise.
    pub biases: &'a [u8],
    /// Order of rows.
    pub order: RowOrder,
}

impl<'a> HostTensor<'a> {
    /// The row in the file that holds a row of the model.
    pub fn file_row(&self, row: usize) -> usize {
        match self.order {
            RowOrder::Plain => row,
            RowOrder::RopePairs { head_dim } => {
                let (head, within, half) = (row / head_dim, row % head_dim, head_dim / 2);
                let pair = if within < half { 2 * within } else { 2 * (within - half) + 1 };
                head * head_dim + pair
            }
        }
    }

    /// The stored bytes of a row of the model; empty for a row that is not there.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        self.kind.row_bytes(self.cols).map_or(&[], |bytes| self.slice(self.data, row, bytes))
    }

    /// A row of the model as f32, exactly; `out` has [`HostTensor::cols`] elements.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.row_bytes(row);
        match self.kind {
            TensorType::F32 => widen(bytes, out, f32::from_le_bytes),
            TensorType::F16 => widen(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            TensorType::BF16 => widen(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            TensorType::Q4_0 => blocks(bytes, out, 18, |block, out| {
                let d = half_at(block, 0);
                nibbles(&block[2..], |i, q| out[i] = d * (f32::from(q) - 8.0));
            }),
            TensorType::Q4_1 => blocks(bytes, out, 20, |block, out| {
                let (d, m) = (half_at(block, 0), half_at(block, 2));
                nibbles(&block[4..], |i, q| out[i] = d * f32::from(q) + m);
            }),
            TensorType::Q8_0 => blocks(bytes, out, 34, |block, out| {
                let d = half_at(block, 0);
                for (out, &q) in out.iter_mut().zip(&block[2..]) {
                    *out = d * f32::from(q as i8);
                }
            }),
            TensorType::Affine { bits, group, meta } => {
                let (scales, biases) = self.meta_rows(row, usize::from(group), meta);
                for (at, out) in out.iter_mut().enumerate() {
                    let g = at / usize::from(group);
                    *out = meta_at(scales, g, meta) * f32::from(code_at(bytes, at, bits))
                        + meta_at(biases, g, meta);
                }
            }
        }
    }

    /// What the tensor is in affine terms; `None` for plain floats.
    pub fn affine(&self) -> Option<AffineShape> {
        match self.kind {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => None,
            TensorType::Q4_0 | TensorType::Q4_1 => Some(AffineShape { bits: 4, group: 32 }),
            TensorType::Q8_0 => Some(AffineShape { bits: 8, group: 32 }),
            TensorType::Affine { bits, group, .. } => Some(AffineShape { bits, group: usize::from(group) }),
        }
    }

    /// A row of the model as codes, one a byte (`[cols]`), with f32 scales and biases
    /// (`[cols / group]` each), exactly. Does nothing for plain floats.
    pub fn affine_row(&self, row: usize, codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        let bytes = self.row_bytes(row);
        let block_bytes = self.kind.block_bytes();
        let groups = codes.chunks_exact_mut(self.kind.block()).zip(scales).zip(biases);
        match self.kind {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => {}
            TensorType::Q4_0 => {
                for (block, ((codes, scale), bias)) in bytes.chunks_exact(block_bytes).zip(groups) {
                    *scale = half_at(block, 0);
                    *bias = -8.0 * *scale;
                    nibbles(&block[2..], |i, q| codes[i] = q);
                }
            }
            TensorType::Q4_1 => {
                for (block, ((codes, scale), bias)) in bytes.chunks_exact(block_bytes).zip(groups) {
                    (*scale, *bias) = (half_at(block, 0), half_at(block, 2));
                    nibbles(&block[4..], |i, q| codes[i] = q);
                }
            }
            TensorType::Q8_0 => {
                for (block, ((codes, scale), bias)) in bytes.chunks_exact(block_bytes).zip(groups) {
                    *scale = half_at(block, 0);
                    *bias = -128.0 * *scale;
                    for (code, &q) in codes.iter_mut().zip(&block[2..]) {
                        // The sign bit flipped is the signed value plus 128.
                        *code = q ^ 0x80;
                    }
                }
            }
            TensorType::Affine { bits, group, meta } => {
                let (file_scales, file_biases) = self.meta_rows(row, usize::from(group), meta);
                for (g, ((codes, scale), bias)) in groups.enumerate() {
                    (*scale, *bias) = (meta_at(file_scales, g, meta), meta_at(file_biases, g, meta));
                    for (i, code) in codes.iter_mut().enumerate() {
                        *code = code_at(bytes, g * usize::from(group) + i, bits);
                    }
                }
            }
        }
    }

    fn meta_rows(&self, row: usize, group: usize, meta: MetaType) -> (&'a [u8], &'a [u8]) {
        let bytes = self.cols / group * meta.bytes();
        (self.slice(self.scales, row, bytes), self.slice(self.biases, row, bytes))
    }

    fn slice(&self, data: &'a [u8], row: usize, bytes: usize) -> &'a [u8] {
        if row >= self.rows {
            return &[];
        }
        let start = self.file_row(row) * bytes;
        data.get(start..start + bytes).unwrap_or(&[])
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (out, chunk) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = value(*chunk);
    }
}

fn blocks(bytes: &[u8], out: &mut [f32], block_bytes: usize, mut each: impl FnMut(&[u8], &mut [f32])) {
    for (block, out) in bytes.chunks_exact(block_bytes).zip(out.chunks_exact_mut(32)) {
        each(block, out);
    }
}

/// The 32 codes of 16 bytes: low nibbles first, then high ones.
fn nibbles(bytes: &[u8], mut each: impl FnMut(usize, u8)) {
    for (i, &byte) in bytes.iter().take(16).enumerate() {
        each(i, byte & 15);
        each(i + 16, byte >> 4);
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    match bytes.get(at..at + 2) {
        Some(&[low, high]) => f16::from_le_bytes([low, high]).to_f32(),
        _ => f32::NAN,
    }
}

/// Codes lie from the low bits up in little-endian words, so a byte holds the next ones.
fn code_at(bytes: &[u8], at: usize, bits: u8) -> u8 {
    if bits == 8 {
        return bytes.get(at).copied().unwrap_or(0);
    }
    let byte = bytes.get(at / 2).copied().unwrap_or(0);
    if at.is_multiple_of(2) { byte & 15 } else { byte >> 4 }
}

fn meta_at(bytes: &[u8], at: usize, meta: MetaType) -> f32 {
    let size = meta.bytes();
    match (meta, bytes.get(at * size..(at + 1) * size)) {
        (MetaType::F32, Some(&[a, b, c, d])) => f32::from_le_bytes([a, b, c, d]),
        (MetaType::F16, Some(&[a, b])) => f16::from_le_bytes([a, b]).to_f32(),
        (MetaType::BF16, Some(&[a, b])) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}
