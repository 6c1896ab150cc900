//! A matrix (or vector) as it lies in a file: bytes, type, shape, order of rows.
//!
//! The only place that knows block layouts. Backends read rows through
//! [`HostTensor::dequantize_row`] (exact f32) or [`HostTensor::affine_row`]
//! (codes with a scale and a bias a group).

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
