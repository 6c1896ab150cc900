//! A packed weight: what lies where, and one row of it in f32.
//!
//! Sixteen rows form a panel, interleaved so that a lane is a row. A weight may
//! stack parts of different formats by rows (q·k·v, gate·up); each part's rows
//! are padded to whole panels with zeros. How parts come to be is [`super::pack`]'s
//! matter, how they are multiplied [`super::linear`]'s.
//!
//! Panel of a quantised part: blocks of `spans` · 32 columns that share a scale; a block is, for each 32
//! columns, the codes, then 16 scales, then (where not symmetric) 16 biases.
//! * 4 bits: 4 chunks of 64 bytes; byte `4r + t` of chunk `j` holds row `r`: column `4j + t` low, `16 + 4j + t` high.
//! * 8 bits: 8 chunks of 64 bytes; byte `4r + t` of chunk `j` is row `r`, column `4j + t`, unsigned.
//!
//! Panel of a dense part: for each column 16 elements as stored, little-endian.

use super::memory::ZeroedBytes;
use super::simd::{widen_bf16, widen_f16};

/// Rows of a panel.
pub const PANEL_ROWS: usize = 16;
/// Columns whose activations share a scale, and the least that weights' codes come in.
pub const GROUP: usize = 32;

/// Type of scales and biases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScaleType {
    /// IEEE half: every value was exactly representable.
    F16,
    /// IEEE single.
    F32,
}

impl ScaleType {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Codes with a scale, and a zero point or a bias, a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quantised {
    /// 4 or 8.
    pub bits: u8,
    /// Groups of 32 columns that share a scale: 1, 2 or 4.
    pub spans: usize,
    /// Type of scales and biases.
    pub scale: ScaleType,
    /// `Some(z)`: the value is `scale · (code − z)`. `None`: `scale · code + bias`.
    pub zero: Option<u8>,
}

impl Quantised {
    /// Bytes of the codes of 32 columns of a panel.
    pub fn code_bytes(&self) -> usize {
        PANEL_ROWS * GROUP * usize::from(self.bits) / 8
    }

    /// Bytes of a block: codes, scales, biases.
    pub fn block_bytes(&self) -> usize {
        let rows_of_scales = if self.zero.is_some() { 1 } else { 2 };
        self.spans * self.code_bytes() + rows_of_scales * PANEL_ROWS * self.scale.bytes()
    }

    /// Columns of a block.
    pub fn block_cols(&self) -> usize {
        self.spans * GROUP
    }
}

/// How a part's elements are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Codes with scales.
    Quantised(Quantised),
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Truncated single.
    Bf16,
}

impl Format {
    /// Bytes of a panel `cols` wide.
    pub fn panel_bytes(&self, cols: usize) -> usize {
        match self {
            Self::Quantised(q) => cols / q.block_cols() * q.block_bytes(),
            Self::F32 => cols * PANEL_ROWS * 4,
            Self::F16 | Self::Bf16 => cols * PANEL_ROWS * 2,
        }
    }
}

/// Some rows of a weight in one format.
#[derive(Debug)]
pub struct Part {
    /// Index of its first row in the weight.
    pub first_row: usize,
    /// Rows, padding not counted.
    pub rows: usize,
    /// Storage.
    pub format: Format,
    pub(super) data: ZeroedBytes,
    pub(super) panel_bytes: usize,
}

impl Part {
    /// Panels, the padded last one included.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// One panel's bytes.
    #[inline]
    pub fn panel(&self, panel: usize) -> &[u8] {
        &self.data.as_slice()[panel * self.panel_bytes..(panel + 1) * self.panel_bytes]
    }

    fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane) = (self.panel(row / PANEL_ROWS), row % PANEL_ROWS);
        let half = |index: usize| {
            let at = 2 * (index * PANEL_ROWS + lane);
            u16::from_le_bytes([panel[at], panel[at + 1]])
        };
        match self.format {
            Format::Quantised(q) => dequantize_lane(&q, panel, lane, out),
            Format::F32 => {
                for (col, x) in out.iter_mut().enumerate() {
                    *x = read_f32(panel, col * PANEL_ROWS + lane);
                }
            }
            Format::F16 => out.iter_mut().enumerate().for_each(|(col, x)| *x = widen_f16(half(col))),
            Format::Bf16 => out.iter_mut().enumerate().for_each(|(col, x)| *x = widen_bf16(half(col))),
        }
    }
}

fn read_f32(bytes: &[u8], index: usize) -> f32 {
    let at = 4 * index;
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn read_scale(kind: ScaleType, bytes: &[u8], index: usize) -> f32 {
    match kind {
        ScaleType::F16 => widen_f16(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])),
        ScaleType::F32 => read_f32(bytes, index),
    }
}

fn dequantize_lane(q: &Quantised, panel: &[u8], lane: usize, out: &mut [f32]) {
    let blocks = panel.chunks_exact(q.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(q.block_cols())) {
        let scales = &block[q.spans * q.code_bytes()..];
        let scale = read_scale(q.scale, scales, lane);
        for (col, x) in out.iter_mut().enumerate() {
            let codes = &block[col / GROUP * q.code_bytes()..];
            let col = col % GROUP;
            let code = match q.bits {
                4 => {
                    let byte = codes[col % 16 / 4 * 64 + lane * 4 + col % 4];
                    if col < 16 { byte & 15 } else { byte >> 4 }
                }
                _ => codes[col / 4 * 64 + lane * 4 + col % 4],
            };
            *x = match q.zero {
                Some(zero) => (f32::from(code) - f32::from(zero)) * scale,
                None => f32::from(code).mul_add(scale, read_scale(q.scale, scales, PANEL_ROWS + lane)),
            };
        }
    }
}

/// A weight ready for products: the loader's `Packed` and the compute thread's `W` alike.
#[derive(Debug)]
pub struct PackedWeight {
    /// Output features, all parts.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Stacked by rows, without gaps.
    pub parts: Vec<Part>,
}

impl PackedWeight {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.data.len() as u64).sum()
    }

    /// Panels of all parts.
    pub fn panels(&self) -> usize {
        self.parts.iter().map(Part::panels).sum()
    }

    /// One row in f32, exact where the scales are; `false` beyond the last row.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> bool {
        let part = self.parts.iter().find(|part| (part.first_row..part.first_row + part.rows).contains(&row));
        let Some(part) = part else { return false };
        part.dequantize_row(row - part.first_row, out);
        true
    }
}
