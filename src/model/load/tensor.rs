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

/// Shape of a matrix of codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AffineShape {
    /// Bits of a code: 4 or 8.
    pub bits: u8,
    /// Columns that share a scale and a bias.
    pub group: usize,
}

impl HostTensor<'_> {
    fn file_row(&self, row: usize) -> usize {
        match self.order {
            RowOrder::Plain => row,
            RowOrder::RopePairs { head_dim } => {
                let (head, i) = (row / head_dim, row % head_dim);
                head * head_dim + if i < head_dim / 2 { 2 * i } else { 2 * (i - head_dim / 2) + 1 }
            }
        }
    }

    fn bytes_per_row(&self) -> usize {
        match self.kind {
            TensorType::F32 => self.cols * 4,
            TensorType::F16 | TensorType::BF16 => self.cols * 2,
            TensorType::Q4_0 => self.cols / 32 * 18,
            TensorType::Q4_1 => self.cols / 32 * 20,
            TensorType::Q8_0 => self.cols / 32 * 34,
            TensorType::Affine { bits, .. } => self.cols * usize::from(bits) / 8,
        }
    }

    /// One model row's bytes.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let bytes = self.bytes_per_row();
        let row = self.file_row(row);
        &self.data[row * bytes..(row + 1) * bytes]
    }

    /// The shape of codes, where there are codes.
    pub fn affine(&self) -> Option<AffineShape> {
        match self.kind {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => None,
            TensorType::Q4_0 | TensorType::Q4_1 => Some(AffineShape { bits: 4, group: 32 }),
            TensorType::Q8_0 => Some(AffineShape { bits: 8, group: 32 }),
            TensorType::Affine { bits, group, .. } => Some(AffineShape { bits, group: usize::from(group) }),
        }
    }

    /// One row's codes, one a byte, with a scale and a bias a group.
    pub fn affine_row(&self, row: usize, codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        let half = |b: &[u8]| half::f16::from_le_bytes([b[0], b[1]]).to_f32();
        let bytes = self.row_bytes(row);
        if let TensorType::Affine { bits, meta, .. } = self.kind {
            for (i, code) in codes.iter_mut().enumerate() {
                *code = if bits == 4 { bytes[i / 2] >> (4 * (i % 2)) & 15 } else { bytes[i] };
            }
            let at = self.file_row(row) * scales.len();
            let read = |from: &[u8], i: usize| match meta {
                MetaType::F32 => {
                    f32::from_le_bytes([from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]])
                }
                MetaType::F16 => half(&from[2 * i..]),
                MetaType::BF16 => half::bf16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32(),
            };
            for (g, (scale, bias)) in scales.iter_mut().zip(biases).enumerate() {
                *scale = read(self.scales, at + g);
                *bias = read(self.biases, at + g);
            }
            return;
        }
        for (g, codes) in codes.chunks_exact_mut(32).enumerate() {
            let block = &bytes[g * bytes.len() / scales.len()..];
            scales[g] = half(block);
            let nibbles = |from: &[u8], codes: &mut [u8]| {
                for i in 0..16 {
                    codes[i] = from[i] & 15;
                    codes[i + 16] = from[i] >> 4;
                }
            };
            match self.kind {
                TensorType::Q4_0 => {
                    nibbles(&block[2..], codes);
                    biases[g] = -8.0 * scales[g];
                }
                TensorType::Q4_1 => {
                    nibbles(&block[4..], codes);
                    biases[g] = half(&block[2..]);
                }
                _ => {
                    codes.iter_mut().zip(&block[2..]).for_each(|(code, q)| *code = q.wrapping_add(128));
                    biases[g] = -128.0 * scales[g];
                }
            }
        }
    }

    /// One row in f32.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.row_bytes(row);
        let Some(shape) = self.affine() else {
            for (i, x) in out.iter_mut().enumerate() {
                *x = match self.kind {
                    TensorType::F32 => f32::from_le_bytes([
                        bytes[4 * i],
                        bytes[4 * i + 1],
                        bytes[4 * i + 2],
                        bytes[4 * i + 3],
                    ]),
                    TensorType::F16 => half::f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
                    _ => half::bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
                };
            }
            return;
        };
        let groups = self.cols / shape.group;
        let (mut codes, mut scales, mut biases) = (vec![0; self.cols], vec![0.0; groups], vec![0.0; groups]);
        self.affine_row(row, &mut codes, &mut scales, &mut biases);
        for (i, x) in out.iter_mut().enumerate() {
            *x = scales[i / shape.group] * f32::from(codes[i]) + biases[i / shape.group];
        }
    }
}
