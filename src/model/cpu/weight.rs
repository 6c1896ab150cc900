//! A packed weight: what lies where, and one row of it in f32.
//!
//! Sixteen rows form a panel, interleaved so that a lane is a row. A weight may
//! stack parts of different formats by rows (q·k·v, gate·up); each part's rows
//! are padded to whole panels with zeros. How parts come to be is [`super::pack`]'s
//! matter, how they are multiplied [`super::linear`]'s.
//!
//! Panel of a quantised part: blocks of `spans` · 32 columns; a block is, for each 32 columns, the codes,
//! then the scales of all of it. Codes of 32 columns, `c` being column / 4 and `t` column mod 4:
//! * 4 bits: 4 chunks of 64 bytes; byte `4r + t` of chunk `j` holds row `r`: `c = j` low, `c = j + 4` high.
//! * 5 bits: those nibbles, then 64 bytes with the fifth bits: bit `c` of byte `4r + t`.
//! * 6 bits: those nibbles, then 2 · 64 bytes with the upper pairs of bits: pair `c mod 4` of byte
//!   `4r + t` of chunk `c / 4`.
//! * 8 bits: 8 chunks of 64 bytes; byte `4r + t` of chunk `c` is row `r`, unsigned.
//!
//! Scales of a block, by [`Scales`]:
//! * F16, F32: 16 scales, then (where not symmetric) 16 biases.
//! * Factors: 16 halves `d`, then (where not symmetric) 16 halves `dmin`, then the integers of the groups,
//!   then (where not symmetric) those of the minimums. Integers are interleaved as codes are: byte `4r + t`
//!   of the `j`-th 64 bytes is row `r`, group `4j + t`.
//!
//! Panel of a dense part: for each column 16 elements as stored, little-endian.

use super::memory::ZeroedBytes;
use super::simd::{widen_bf16, widen_f16};

/// Rows of a panel.
pub const PANEL_ROWS: usize = 16;
/// Columns whose activations share a scale, and the least that weights' codes come in.
pub const GROUP: usize = 32;

/// Form of scales and biases. All of them are exact: no value was rounded to fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scales {
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// A half a block times an unsigned integer for each 32 columns; a bias is minus the like product.
    Factors32,
    /// A half a block times a signed integer (stored plus 128) for each 16 columns; no biases.
    Factors16,
}

/// Codes of 32 columns: byte `64c + 4r + t` is row `r`, column `4c + t`.
pub(super) type Codes = [u8; PANEL_ROWS * GROUP];

/// Codes with a scale, and a zero point or a bias, a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quantised {
    /// 4, 5, 6 or 8.
    pub bits: u8,
    /// Groups of 32 columns in a block: 1, 2, 4 or 8.
    pub spans: usize,
    /// Form of scales and biases.
    pub scales: Scales,
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
        self.spans * self.code_bytes() + self.kinds_of_scales() * self.scale_bytes()
    }

    /// Columns of a block.
    pub fn block_cols(&self) -> usize {
        self.spans * GROUP
    }

    /// Bytes of a block's scales without the biases.
    fn scale_bytes(&self) -> usize {
        match self.scales {
            Scales::F16 => PANEL_ROWS * 2,
            Scales::F32 => PANEL_ROWS * 4,
            Scales::Factors32 | Scales::Factors16 => PANEL_ROWS * 2 + self.factor_bytes(),
        }
    }

    /// Bytes of a block's integer factors, those of the minimums not counted.
    fn factor_bytes(&self) -> usize {
        match self.scales {
            Scales::F16 | Scales::F32 => 0,
            Scales::Factors32 => self.spans * PANEL_ROWS,
            Scales::Factors16 => 2 * self.spans * PANEL_ROWS,
        }
    }

    /// Offset of the integer factors in a block's scales, and of those of the minimums.
    pub(super) fn factors_at(&self) -> [usize; 2] {
        let first = self.kinds_of_scales() * PANEL_ROWS * 2;
        [first, first + self.factor_bytes()]
    }

    /// Scales alone, or scales and biases.
    fn kinds_of_scales(&self) -> usize {
        if self.zero.is_some() { 1 } else { 2 }
    }

    /// All codes of 32 columns, one a byte. Inlined, to be compiled for its caller's instruction set.
    #[inline(always)]
    pub(super) fn unpack(&self, codes: &[u8]) -> Codes {
        let mut out = [0; PANEL_ROWS * GROUP];
        if self.bits == 8 {
            out.copy_from_slice(codes);
            return out;
        }
        let (nibbles, planes) = codes.split_at(256);
        let (low, high) = out.split_at_mut(256);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
            (*low, *high) = (byte & 15, byte >> 4);
        }
        for (chunk, out) in out.chunks_exact_mut(64).enumerate() {
            match self.bits {
                5 => out.iter_mut().zip(planes).for_each(|(code, plane)| *code |= (plane >> chunk & 1) << 4),
                6 => {
                    let plane = &planes[64 * (chunk / 4)..];
                    let pair = |plane: u8| (plane >> (2 * (chunk % 4)) & 3) << 4;
                    out.iter_mut().zip(plane).for_each(|(code, plane)| *code |= pair(*plane));
                }
                _ => {}
            }
        }
        out
    }

    /// One code of a row, from the codes of 32 columns.
    pub(super) fn code(&self, codes: &[u8], lane: usize, col: usize) -> u8 {
        let (chunk, at) = (col / 4, 4 * lane + col % 4);
        if self.bits == 8 {
            return codes[64 * chunk + at];
        }
        let byte = codes[64 * (chunk % 4) + at];
        let nibble = if chunk < 4 { byte & 15 } else { byte >> 4 };
        match self.bits {
            5 => nibble | (codes[256 + at] >> chunk & 1) << 4,
            6 => nibble | (codes[256 + 64 * (chunk / 4) + at] >> (2 * (chunk % 4)) & 3) << 4,
            _ => nibble,
        }
    }

    /// Scale and bias of a row for a column, from its block's scales; the bias is 0 where there is none.
    pub(super) fn scale(&self, scales: &[u8], lane: usize, col: usize) -> (f32, f32) {
        let has_bias = self.zero.is_none();
        match self.scales {
            Scales::F16 | Scales::F32 => {
                let read = |index| {
                    if self.scales == Scales::F16 { read_f16(scales, index) } else { read_f32(scales, index) }
                };
                (read(lane), if has_bias { read(PANEL_ROWS + lane) } else { 0.0 })
            }
            Scales::Factors32 => {
                let factor =
                    |part: usize| f32::from(scales[self.factors_at()[part] + factor_at(lane, col / GROUP)]);
                let bias = if has_bias { -(read_f16(scales, PANEL_ROWS + lane) * factor(1)) } else { 0.0 };
                (read_f16(scales, lane) * factor(0), bias)
            }
            Scales::Factors16 => {
                (read_f16(scales, lane) * f32::from(self.signed_factor(scales, lane, col / 16)), 0.0)
            }
        }
    }

    /// The half of a row that a block's integer factors multiply.
    pub(super) fn block_scale(scales: &[u8], lane: usize) -> f32 {
        read_f16(scales, lane)
    }

    /// The signed integer factor of a row's group of 16 columns.
    pub(super) fn signed_factor(&self, scales: &[u8], lane: usize, group: usize) -> i16 {
        i16::from(scales[self.factors_at()[0] + factor_at(lane, group)]) - 128
    }
}

/// Where a row's integer factor of a group is among the integer factors.
pub(super) fn factor_at(lane: usize, group: usize) -> usize {
    64 * (group / 4) + 4 * lane + group % 4
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

fn read_f16(bytes: &[u8], index: usize) -> f32 {
    widen_f16(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]))
}

fn dequantize_lane(q: &Quantised, panel: &[u8], lane: usize, out: &mut [f32]) {
    let blocks = panel.chunks_exact(q.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(q.block_cols())) {
        let (codes, scales) = block.split_at(q.spans * q.code_bytes());
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let (scale, bias) = q.scale(scales, lane, 16 * group);
            let codes = &codes[group / 2 * q.code_bytes()..];
            for (i, x) in out.iter_mut().enumerate() {
                let code = f32::from(q.code(codes, lane, group % 2 * 16 + i));
                *x = match q.zero {
                    Some(zero) => (code - f32::from(zero)) * scale,
                    None => code.mul_add(scale, bias),
                };
            }
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
