//! Products in f32: weights, dense or codes, are widened in registers and each
//! output is one chain of fused multiply-adds over ascending columns.
//!
//! Written once over [`Simd`]; a lane is a row. The activations stay f32.

use super::super::simd::{Kernel, LANES, Simd};
use super::super::weight::{Format, PANEL_ROWS, Quantised, ScaleType};

/// Most tokens of one pass.
pub(super) const TOKENS: usize = 4;

/// One panel with up to [`TOKENS`] tokens.
pub(super) struct WidenedPanel<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) format: Format,
    pub(super) cols: usize,
    /// The tokens' activations, `[tile.len()][cols]`.
    pub(super) x: &'a [f32],
    pub(super) tile: &'a mut [[f32; PANEL_ROWS]],
}

impl Kernel for WidenedPanel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.x.len() >= self.tile.len() * self.cols, "activations of every token");
        assert_eq!(self.bytes.len(), self.format.panel_bytes(self.cols), "a whole panel");
        match self.tile.len() {
            1 => chains::<S, 1>(s, self.bytes, self.format, self.cols, self.x, self.tile),
            2 => chains::<S, 2>(s, self.bytes, self.format, self.cols, self.x, self.tile),
            3 => chains::<S, 3>(s, self.bytes, self.format, self.cols, self.x, self.tile),
            _ => chains::<S, TOKENS>(s, self.bytes, self.format, self.cols, self.x, self.tile),
        }
    }
}

#[inline(always)]
fn chains<S: Simd, const M: usize>(
    s: S,
    bytes: &[u8],
    format: Format,
    cols: usize,
    x: &[f32],
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let mut sums = [[s.splat(0.0); 2]; M];
    let start = bytes.as_ptr();
    match format {
        Format::Quantised(q) => quantised(s, &q, bytes, cols, x, &mut sums),
        Format::F32 => {
            for col in 0..cols {
                // SAFETY: `run` saw a whole panel: 16 f32 for each column.
                let w = unsafe {
                    let at = start.cast::<f32>().add(col * PANEL_ROWS);
                    [s.load_ptr(at), s.load_ptr(at.add(LANES))]
                };
                join(s, w, x, cols, col, &mut sums);
            }
        }
        Format::F16 => {
            for col in 0..cols {
                // SAFETY: `run` saw a whole panel: 16 halves for each column.
                let w = unsafe {
                    let at = start.cast::<u16>().add(col * PANEL_ROWS);
                    [s.load_f16(at), s.load_f16(at.add(LANES))]
                };
                join(s, w, x, cols, col, &mut sums);
            }
        }
        Format::Bf16 => {
            for col in 0..cols {
                // SAFETY: `run` saw a whole panel: 16 truncated singles for each column.
                let w = unsafe {
                    let at = start.cast::<u16>().add(col * PANEL_ROWS);
                    [s.load_bf16(at), s.load_bf16(at.add(LANES))]
                };
                join(s, w, x, cols, col, &mut sums);
            }
        }
    }
    for (out, sums) in tile.iter_mut().zip(&sums) {
        let (halves, _) = out.as_chunks_mut::<LANES>();
        s.store(sums[0], &mut halves[0]);
        s.store(sums[1], &mut halves[1]);
    }
}

/// One column's step of every chain.
#[inline(always)]
fn join<S: Simd, const M: usize>(
    s: S,
    w: [S::V; 2],
    x: &[f32],
    cols: usize,
    col: usize,
    sums: &mut [[S::V; 2]; M],
) {
    for (i, sums) in sums.iter_mut().enumerate() {
        debug_assert!(i * cols + col < x.len());
        // SAFETY: `run` saw `M` rows of `cols` activations, and `col < cols`.
        let x = s.splat(unsafe { *x.get_unchecked(i * cols + col) });
        sums[0] = s.fma(w[0], x, sums[0]);
        sums[1] = s.fma(w[1], x, sums[1]);
    }
}

#[inline(always)]
fn scales<S: Simd>(s: S, kind: ScaleType, from: *const u8) -> [S::V; 2] {
    // SAFETY: callers point at sixteen scales inside a block.
    unsafe {
        match kind {
            ScaleType::F16 => [s.load_f16(from.cast()), s.load_f16(from.cast::<u16>().add(LANES))],
            ScaleType::F32 => [s.load_ptr(from.cast()), s.load_ptr(from.cast::<f32>().add(LANES))],
        }
    }
}

#[inline(always)]
fn quantised<S: Simd, const M: usize>(
    s: S,
    q: &Quantised,
    bytes: &[u8],
    cols: usize,
    x: &[f32],
    sums: &mut [[S::V; 2]; M],
) {
    let (code_bytes, per_scales) = (q.code_bytes(), PANEL_ROWS * q.scale.bytes());
    let zero = s.splat(f32::from(q.zero.unwrap_or(0)));
    // Of 4-bit codes 16 columns share a pass over a group's bytes: first the low halves, then the high.
    let (passes, mask) = if q.bits == 4 { (2, 15) } else { (1, 255) };
    let chunks = code_bytes / 64;
    let mut col = 0;
    for block in bytes.chunks_exact(q.block_bytes()) {
        let meta = block[q.spans * code_bytes..].as_ptr();
        let scale = scales(s, q.scale, meta);
        // A symmetric block has no biases to read.
        let bias = if q.zero.is_none() { scales(s, q.scale, meta.wrapping_add(per_scales)) } else { scale };
        for span in 0..q.spans {
            for pass in 0..passes {
                for chunk in 0..chunks {
                    let at = block[span * code_bytes + 64 * chunk..][..64].as_ptr();
                    // SAFETY: 64 bytes of codes follow.
                    let codes = unsafe { [s.load_u32(at), s.load_u32(at.add(32))] };
                    for t in 0..4 {
                        let mut w = scale;
                        for h in 0..2 {
                            let code = s.field(codes[h], 8 * t + 4 * pass, mask);
                            w[h] = if q.zero.is_some() {
                                s.mul(s.sub(code, zero), scale[h])
                            } else {
                                s.fma(code, scale[h], bias[h])
                            };
                        }
                        join(s, w, x, cols, col, sums);
                        col += 1;
                    }
                }
            }
        }
    }
}
