//! GGUF's quantised blocks: where codes, scales and minimums lie in the bytes.
//!
//! Every function takes one whole block and does nothing for a type without
//! blocks. No rows, no files: [`super::HostTensor`] has those.

use half::f16;

use super::TensorType;

/// Elements of the largest block.
pub(super) const LARGEST: usize = 256;

/// Scales of a block of a K type, as stored: a group's scale is `d · scales[g]`, its bias
/// `−dmin · mins[g]`. In f32 both products are exact; in f16 they are not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Factors {
    /// IEEE half, little-endian.
    pub d: [u8; 2],
    /// IEEE half, little-endian; 0 where there are no minimums.
    pub dmin: [u8; 2],
    /// One a group: unsigned for groups of 32 (the first 8), signed two's complement for groups of 16.
    pub scales: [u8; 16],
    /// One a group of 32, unsigned; 0 where there are no minimums.
    pub mins: [u8; 16],
}

/// A block's codes, unsigned, one a byte and in order.
pub(super) fn codes(kind: TensorType, block: &[u8], out: &mut [u8]) {
    match kind {
        TensorType::Q4_0 => nibbles(&block[2..18], out),
        TensorType::Q4_1 => nibbles(&block[4..20], out),
        TensorType::Q5_0 => {
            nibbles(&block[6..22], out);
            fifth_bits(&block[2..6], out);
        }
        TensorType::Q5_1 => {
            nibbles(&block[8..24], out);
            fifth_bits(&block[4..8], out);
        }
        TensorType::Q8_0 => {
            // The sign bit flipped is the signed value plus 128.
            out.iter_mut().zip(&block[2..34]).for_each(|(code, q)| *code = q ^ 0x80);
        }
        TensorType::Q4K => halves_of_64(&block[16..144], out),
        TensorType::Q5K => {
            halves_of_64(&block[48..176], out);
            for (at, code) in out.iter_mut().enumerate() {
                *code |= (block[16 + at % 32] >> (at / 32) & 1) << 4;
            }
        }
        TensorType::Q6K => six_bits(block, out),
        TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::Affine { .. } => {}
    }
}

/// Calls `each` with the index, scale and bias of each of a block's groups, exact in f32.
pub(super) fn groups(kind: TensorType, block: &[u8], mut each: impl FnMut(usize, f32, f32)) {
    let d = half_at(block, 0);
    match kind {
        TensorType::Q4_0 => each(0, d, -8.0 * d),
        TensorType::Q5_0 => each(0, d, -16.0 * d),
        TensorType::Q8_0 => each(0, d, -128.0 * d),
        TensorType::Q4_1 | TensorType::Q5_1 => each(0, d, half_at(block, 2)),
        TensorType::Q4K | TensorType::Q5K => {
            if let Some(factors) = factors(kind, block) {
                let (d, dmin) = (half_at(&factors.d, 0), half_at(&factors.dmin, 0));
                for g in 0..8 {
                    each(g, d * f32::from(factors.scales[g]), -(dmin * f32::from(factors.mins[g])));
                }
            }
        }
        TensorType::Q6K => {
            if let Some(factors) = factors(kind, block) {
                let d = half_at(&factors.d, 0);
                for (g, &scale) in factors.scales.iter().enumerate() {
                    let scale = d * f32::from(scale as i8);
                    each(g, scale, -32.0 * scale);
                }
            }
        }
        TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::Affine { .. } => {}
    }
}

/// The scales of a block of a K type; `None` for other types.
pub(super) fn factors(kind: TensorType, block: &[u8]) -> Option<Factors> {
    let mut factors = Factors { d: [0; 2], dmin: [0; 2], scales: [0; 16], mins: [0; 16] };
    match kind {
        TensorType::Q4K | TensorType::Q5K => {
            factors.d.copy_from_slice(&block[0..2]);
            factors.dmin.copy_from_slice(&block[2..4]);
            // Six bits each: four scales, four minimums, then the low nibbles of four of each, whose
            // upper two bits are in the top of the first eight bytes.
            let packed = &block[4..16];
            for g in 0..4 {
                factors.scales[g] = packed[g] & 63;
                factors.mins[g] = packed[4 + g] & 63;
                factors.scales[4 + g] = (packed[8 + g] & 15) | (packed[g] >> 6) << 4;
                factors.mins[4 + g] = (packed[8 + g] >> 4) | (packed[4 + g] >> 6) << 4;
            }
            Some(factors)
        }
        TensorType::Q6K => {
            factors.scales.copy_from_slice(&block[192..208]);
            factors.d.copy_from_slice(&block[208..210]);
            Some(factors)
        }
        _ => None,
    }
}

/// 32 codes of 16 bytes: low nibbles first, then high ones.
fn nibbles(bytes: &[u8], out: &mut [u8]) {
    for (i, &byte) in bytes.iter().enumerate() {
        out[i] = byte & 15;
        out[i + 16] = byte >> 4;
    }
}

/// A bit each for 32 codes, from the lowest up.
fn fifth_bits(bits: &[u8], out: &mut [u8]) {
    for (i, code) in out.iter_mut().enumerate() {
        *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// Runs of 64 codes in 32 bytes: 32 low nibbles, then 32 high ones.
fn halves_of_64(bytes: &[u8], out: &mut [u8]) {
    for (bytes, out) in bytes.chunks_exact(32).zip(out.chunks_exact_mut(64)) {
        for (i, &byte) in bytes.iter().enumerate() {
            out[i] = byte & 15;
            out[i + 32] = byte >> 4;
        }
    }
}

/// Two runs of 128: low nibbles in 64 bytes (elements 0 to 63 low, 64 to 127 high), upper pairs
/// of bits in 32 bytes (a pair for each of the four runs of 32, from the lowest up).
fn six_bits(block: &[u8], out: &mut [u8]) {
    let (low, rest) = block.split_at(128);
    let runs = low.chunks_exact(64).zip(rest[..64].chunks_exact(32)).zip(out.chunks_exact_mut(128));
    for ((low, high), out) in runs {
        for (i, code) in out.iter_mut().enumerate() {
            let nibble = if i < 64 { low[i] & 15 } else { low[i - 64] >> 4 };
            *code = nibble | (high[i % 32] >> (2 * (i / 32)) & 3) << 4;
        }
    }
}

/// The half at an offset, widened.
pub(super) fn half_at(bytes: &[u8], at: usize) -> f32 {
    match bytes.get(at..at + 2) {
        Some(&[low, high]) => f16::from_le_bytes([low, high]).to_f32(),
        _ => f32::NAN,
    }
}
