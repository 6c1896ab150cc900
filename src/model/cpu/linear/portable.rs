//! The int8 product in plain Rust: the definition that the vector paths match
//! bit for bit. No intrinsics.
//!
//! For each group of 32 columns the sum of code products is an exact integer;
//! it is scaled by the activations' scale and joined to the output's chain by a
//! fused multiply-add with the weights' scale, then, where weights have a bias,
//! another with it. Where scales have integer factors for each 16 columns these
//! are part of the integer: at most 32 · 32 · 127 · 128 = 16,646,144, so below
//! 2^24 and exact in f32 too.

use super::super::weight::{Codes, GROUP, PANEL_ROWS, Quantised, Scales};
use super::Int8Panel;

/// Products of one panel with `tile.len()` tokens from `token` on.
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    let q = &panel.format;
    tile.fill([0.0; PANEL_ROWS]);
    for (b, block) in panel.bytes.chunks_exact(q.block_bytes()).enumerate() {
        let (codes, scales) = block.split_at(q.spans * q.code_bytes());
        for (span, codes) in codes.chunks_exact(q.code_bytes()).enumerate() {
            let codes = q.unpack(codes);
            let group = b * q.spans + span;
            if q.scales == Scales::Factors16 {
                join_sixteens(panel, &codes, scales, (span, group), token, tile);
            } else {
                join(panel, &codes, scales, (span, group), token, tile);
            }
        }
    }
}

/// A group's step of every chain; `at` is its index in the block and in the row.
fn join(
    panel: &Int8Panel<'_>,
    codes: &Codes,
    scales: &[u8],
    at: (usize, usize),
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let (q, x) = (&panel.format, panel.x);
    let scales: [_; PANEL_ROWS] = std::array::from_fn(|lane| q.scale(scales, lane, at.0 * GROUP));
    for (i, out) in tile.iter_mut().enumerate() {
        let at = (token + i) * x.groups() + at.1;
        let dots = dots(codes, &x.codes[at * GROUP..(at + 1) * GROUP]);
        let offset = i32::from(q.zero.unwrap_or(0)) * x.sums[at];
        for (lane, out) in out.iter_mut().enumerate() {
            let (scale, bias) = scales[lane];
            *out = ((dots[lane] - offset) as f32 * x.scales[at]).mul_add(scale, *out);
            if q.zero.is_none() {
                *out = bias.mul_add(x.scaled_sums[at], *out);
            }
        }
    }
}

/// The same with integer factors for each 16 columns.
fn join_sixteens(
    panel: &Int8Panel<'_>,
    codes: &Codes,
    scales: &[u8],
    at: (usize, usize),
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let (q, x) = (&panel.format, panel.x);
    let zero = i32::from(q.zero.unwrap_or(0));
    let factor = |lane, half| i32::from(q.signed_factor(scales, lane, 2 * at.0 + half));
    let factors: [_; PANEL_ROWS] = std::array::from_fn(|lane| [factor(lane, 0), factor(lane, 1)]);
    let (first, second) = codes.split_at(codes.len() / 2);
    for (i, out) in tile.iter_mut().enumerate() {
        let at = (token + i) * x.groups() + at.1;
        let (low, high) = x.codes[at * GROUP..(at + 1) * GROUP].split_at(GROUP / 2);
        let (first, second) = (dots(first, low), dots(second, high));
        let offsets = [zero * x.half_sums[at], zero * (x.sums[at] - x.half_sums[at])];
        for (lane, out) in out.iter_mut().enumerate() {
            let [a, b] = factors[lane];
            let dot = a * (first[lane] - offsets[0]) + b * (second[lane] - offsets[1]);
            *out = (dot as f32 * x.scales[at]).mul_add(Quantised::block_scale(scales, lane), *out);
        }
    }
}

/// Sums of code products of all rows with as many activations as there are columns of codes.
fn dots(codes: &[u8], x: &[i8]) -> [i32; PANEL_ROWS] {
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
