//! A matrix (or vector) as it lies in a file: bytes, type, shape, order of rows.
//!
//! With [`blocks`] the only place that knows layouts. Backends read rows through
//! [`HostTensor::dequantize_row`] (exact f32) or [`HostTensor::affine_row`]
//! (codes with a scale and a bias a group).

mod blocks;

use half::{bf16, f16};

pub use blocks::Factors;

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
    /// GGUF: groups of 32, `d · (q − 16)`.
    Q5_0,
    /// GGUF: groups of 32, `d · q + m`, q of 5 bits.
    Q5_1,
    /// GGUF: groups of 32, `d · q`, q signed 8 bits.
    Q8_0,
    /// GGUF `Q4_K`: blocks of 256, groups of 32, `d · scale · q − dmin · min`.
    Q4K,
    /// GGUF `Q5_K`: likewise, q of 5 bits.
    Q5K,
    /// GGUF `Q6_K`: blocks of 256, groups of 16, `d · scale · (q − 32)`.
    Q6K,
    /// MLX affine: `scale · q + bias`, codes in consecutive bits from the lowest up, scales and biases apart.
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
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
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
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
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Affine { bits, group, .. } => usize::from(bits) * usize::from(group) / 8,
        }
    }

    /// Bits of an element's code, or of the element where it is a plain float.
    pub fn code_bits(self) -> u8 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::BF16 => 16,
            Self::Q4_0 | Self::Q4_1 | Self::Q4K => 4,
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 5,
            Self::Q6K => 6,
            Self::Q8_0 => 8,
            Self::Affine { bits, .. } => bits,
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

    /// The code whose value is 0, where a value is `scale · (code − zero)`; `None` where groups have
    /// a bias of their own, and for plain floats.
    pub fn zero_point(self) -> Option<u8> {
        match self {
            Self::Q4_0 => Some(8),
            Self::Q5_0 => Some(16),
            Self::Q6K => Some(32),
            Self::Q8_0 => Some(128),
            _ => None,
        }
    }

    /// Whether scales are products of two stored factors ([`Factors`]), which a half cannot hold.
    pub fn has_factors(self) -> bool {
        matches!(self, Self::Q4K | Self::Q5K | Self::Q6K)
    }

    /// The type in words, for people.
    pub fn describe(self) -> String {
        match self {
            Self::F32 => "F32".into(),
            Self::F16 => "F16".into(),
            Self::BF16 => "BF16".into(),
            Self::Q4_0 => "Q4_0".into(),
            Self::Q4_1 => "Q4_1".into(),
            Self::Q5_0 => "Q5_0".into(),
            Self::Q5_1 => "Q5_1".into(),
            Self::Q8_0 => "Q8_0".into(),
            Self::Q4K => "Q4_K".into(),
            Self::Q5K => "Q5_K".into(),
            Self::Q6K => "Q6_K".into(),
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
    /// Of a code: 2, 3, 4, 5, 6 or 8; codes are unsigned.
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
            TensorType::Affine { bits, group, meta } => {
                let group = usize::from(group);
                let (scales, biases) = self.meta_rows(row, group, meta);
                let mut codes = [0; blocks::LARGEST];
                let stored = bytes.chunks_exact(self.kind.block_bytes()).zip(out.chunks_exact_mut(group));
                for (g, (bytes, out)) in stored.enumerate() {
                    unpack(bytes, bits, &mut codes[..group]);
                    let (scale, bias) = (meta_at(scales, g, meta), meta_at(biases, g, meta));
                    out.iter_mut().zip(&codes).for_each(|(out, code)| *out = scale * f32::from(*code) + bias);
                }
            }
            _ => self.dequantize_blocks(row, out),
        }
    }

    fn dequantize_blocks(&self, row: usize, out: &mut [f32]) {
        let Some(AffineShape { group, .. }) = self.affine() else { return };
        let (mut codes, len) = ([0; blocks::LARGEST], self.kind.block());
        for (block, out) in self.blocks(row).zip(out.chunks_exact_mut(len)) {
            blocks::codes(self.kind, block, &mut codes[..len]);
            blocks::groups(self.kind, block, |g, scale, bias| {
                let span = g * group..(g + 1) * group;
                for (out, code) in out[span.clone()].iter_mut().zip(&codes[span]) {
                    *out = match self.kind.zero_point() {
                        Some(zero) => (f32::from(*code) - f32::from(zero)) * scale,
                        None => f32::from(*code) * scale + bias,
                    };
                }
            });
        }
    }

    /// What the tensor is in affine terms; `None` for plain floats.
    pub fn affine(&self) -> Option<AffineShape> {
        let (bits, group) = match self.kind {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => return None,
            TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4K => (4, 32),
            TensorType::Q5_0 | TensorType::Q5_1 | TensorType::Q5K => (5, 32),
            TensorType::Q6K => (6, 16),
            TensorType::Q8_0 => (8, 32),
            TensorType::Affine { bits, group, .. } => (bits, usize::from(group)),
        };
        Some(AffineShape { bits, group })
    }

    /// A row of the model as codes, one a byte (`[cols]`), with f32 scales and biases
    /// (`[cols / group]` each), exactly. Does nothing for plain floats.
    pub fn affine_row(&self, row: usize, codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        self.codes_row(row, codes);
        self.scales_row(row, scales, biases);
    }

    /// The scales and biases of a row of the model (`[cols / group]` each), exactly in f32. Does
    /// nothing for plain floats.
    pub fn scales_row(&self, row: usize, scales: &mut [f32], biases: &mut [f32]) {
        let Some(AffineShape { group, .. }) = self.affine() else { return };
        if let TensorType::Affine { meta, .. } = self.kind {
            let (file_scales, file_biases) = self.meta_rows(row, group, meta);
            for (g, (scale, bias)) in scales.iter_mut().zip(biases).enumerate() {
                (*scale, *bias) = (meta_at(file_scales, g, meta), meta_at(file_biases, g, meta));
            }
            return;
        }
        let per_block = self.kind.block() / group;
        let groups = scales.chunks_exact_mut(per_block).zip(biases.chunks_exact_mut(per_block));
        for (block, (scales, biases)) in self.blocks(row).zip(groups) {
            blocks::groups(self.kind, block, |g, scale, bias| (scales[g], biases[g]) = (scale, bias));
        }
    }

    /// The codes of a row of the model, one a byte (`[cols]`). Does nothing for plain floats.
    pub fn codes_row(&self, row: usize, codes: &mut [u8]) {
        if let TensorType::Affine { bits, .. } = self.kind {
            unpack(self.row_bytes(row), bits, codes);
            return;
        }
        for (block, codes) in self.blocks(row).zip(codes.chunks_exact_mut(self.kind.block())) {
            blocks::codes(self.kind, block, codes);
        }
    }

    /// The stored scales of a row of the model, block after block; nothing for types without
    /// [`Factors`].
    pub fn factors_row(&self, row: usize) -> impl Iterator<Item = Factors> {
        self.blocks(row).filter_map(|block| blocks::factors(self.kind, block))
    }

    fn blocks(&self, row: usize) -> std::slice::ChunksExact<'a, u8> {
        self.row_bytes(row).chunks_exact(self.kind.block_bytes())
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

/// Codes in consecutive bits from the lowest up: eight are `bits` whole bytes.
fn unpack(bytes: &[u8], bits: u8, codes: &mut [u8]) {
    let mask = (1u64 << bits) - 1;
    for (bytes, codes) in bytes.chunks_exact(usize::from(bits).max(1)).zip(codes.chunks_exact_mut(8)) {
        let word = bytes.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
        for (at, code) in codes.iter_mut().enumerate() {
            *code = (word >> (at * usize::from(bits)) & mask) as u8;
        }
    }
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
