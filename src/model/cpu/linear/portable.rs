//! The int8 product in plain Rust: the definition that the vector paths match
//! bit for bit. No intrinsics.
//!
//! For each group of 32 columns the sum of code products is an exact integer;
//! it is scaled by the activations' scale and joined to the output's chain by a
//! fused multiply-add with the weights' scale, then, where weights have a bias,
//! another with it.

use super::super::simd::widen_f16;
use super::super::weight::{PANEL_ROWS, ScaleType};
use super::Int8Panel;

/// Products of one panel with `tile.len()` tokens from `token` on.
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    let q = &panel.format;
    let groups = panel.x.groups();
    tile.fill([0.0; PANEL_ROWS]);
    for (b, block) in panel.bytes.chunks_exact(q.block_bytes()).enumerate() {
        let (codes, scales) = block.split_at(q.spans * q.code_bytes());
        for (span, codes) in codes.chunks_exact(q.code_bytes()).enumerate() {
            let group = b * q.spans + span;
            for (i, out) in tile.iter_mut().enumerate() {
                let (x, at) = (panel.x, (token + i) * groups + group);
                let activations = &x.codes[at * 32..at * 32 + 32];
                let dots = if q.bits == 4 { dot4(codes, activations) } else { dot8(codes, activations) };
                let offset = i32::from(q.zero.unwrap_or(0)) * x.sums[at];
                for (lane, out) in out.iter_mut().enumerate() {
                    let scaled = (dots[lane] - offset) as f32 * x.scales[at];
                    *out = scaled.mul_add(read(q.scale, scales, lane), *out);
                    if q.zero.is_none() {
                        *out = read(q.scale, scales, PANEL_ROWS + lane).mul_add(x.scaled_sums[at], *out);
                    }
                }
            }
        }
    }
}

fn read(kind: ScaleType, scales: &[u8], index: usize) -> f32 {
    match kind {
        ScaleType::F16 => widen_f16(u16::from_le_bytes([scales[2 * index], scales[2 * index + 1]])),
        ScaleType::F32 => {
            let at = 4 * index;
            f32::from_le_bytes([scales[at], scales[at + 1], scales[at + 2], scales[at + 3]])
        }
    }
}

fn dot4(codes: &[u8], x: &[i8]) -> [i32; PANEL_ROWS] {
    let mut dots = [0; PANEL_ROWS];
    for (chunk, codes) in codes.chunks_exact(4 * PANEL_ROWS).enumerate() {
        let (low, high) = (&x[4 * chunk..4 * chunk + 4], &x[16 + 4 * chunk..20 + 4 * chunk]);
        for (dot, quad) in dots.iter_mut().zip(codes.chunks_exact(4)) {
            for t in 0..4 {
                *dot += i32::from(quad[t] & 15) * i32::from(low[t]);
                *dot += i32::from(quad[t] >> 4) * i32::from(high[t]);
            }
        }
    }
    dots
}

fn dot8(codes: &[u8], x: &[i8]) -> [i32; PANEL_ROWS] {
    let mut dots = [0; PANEL_ROWS];
    for (codes, x) in codes.chunks_exact(4 * PANEL_ROWS).zip(x.chunks_exact(4)) {
        for (dot, quad) in dots.iter_mut().zip(codes.chunks_exact(4)) {
            for t in 0..4 {
                *dot += i32::from(quad[t]) * i32::from(x[t]);
            }
        }
    }
    dots
}
