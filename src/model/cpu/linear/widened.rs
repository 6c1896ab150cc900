//! Products in f32: weights, dense or codes, are widened in registers and each
//! output is one chain of fused multiply-adds over ascending columns.
//!
//! Written once over [`Simd`]; a lane is a row. The activations stay f32.

use super::super::simd::{Kernel, LANES, Simd};
use super::super::weight::{Format, GROUP, PANEL_ROWS, Quantised, Scales};

/// Most tokens of one pass.
pub(super) const TOKENS: usize = 6;

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
        // Fewer tokens than the most are computed with copies of the last: a step with so few waits for memory,
        // and one body of twelve sums is one that the compiler keeps in registers.
        match self.tile.len() {
            0 => {}
            1 => chains::<S, 1>(s, self.bytes, self.format, self.cols, self.x, self.tile),
            _ => chains::<S, TOKENS>(s, self.bytes, self.format, self.cols, self.x, self.tile),
        }
    }
}

/// The activations of each token that is computed, and where its row begins.
struct Rows<'a, const M: usize> {
    x: &'a [f32],
    rows: [usize; M],
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
    let mut rows = [0; M];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = i.min(tile.len() - 1) * cols;
    }
    let x = Rows { x, rows };
    let mut sums = [[s.splat(0.0); 2]; M];
    let start = bytes.as_ptr();
    match format {
        Format::Quantised(q) => quantised(s, &q, bytes, &x, &mut sums),
        Format::F32 => {
            for col in 0..cols {
                // SAFETY: `run` saw a whole panel: 16 f32 for each column.
                let w = unsafe {
                    let at = start.cast::<f32>().add(col * PANEL_ROWS);
                    [s.load_ptr(at), s.load_ptr(at.add(LANES))]
                };
                join(s, w, &x, col, &mut sums);
            }
        }
        Format::F16 => {
            for col in 0..cols {
                // SAFETY: `run` saw a whole panel: 16 halves for each column.
                let w = unsafe {
                    let at = start.cast::<u16>().add(col * PANEL_ROWS);
                    [s.load_f16(at), s.load_f16(at.add(LANES))]
                };
                join(s, w, &x, col, &mut sums);
            }
        }
        Format::Bf16 => {
            for col in 0..cols {
                // SAFETY: `run` saw a whole panel: 16 truncated singles for each column.
                let w = unsafe {
                    let at = start.cast::<u16>().add(col * PANEL_ROWS);
                    [s.load_bf16(at), s.load_bf16(at.add(LANES))]
                };
                join(s, w, &x, col, &mut sums);
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
fn join<S: Simd, const M: usize>(s: S, w: [S::V; 2], x: &Rows<'_, M>, col: usize, sums: &mut [[S::V; 2]; M]) {
    for i in 0..M {
        debug_assert!(x.rows[i] + col < x.x.len());
        // SAFETY: `run` saw the activations of every token, whose rows these are, and `col` is one of a row.
        let x = s.splat(unsafe { *x.x.get_unchecked(x.rows[i] + col) });
        sums[i] = [s.fma(w[0], x, sums[i][0]), s.fma(w[1], x, sums[i][1])];
    }
}

#[inline(always)]
fn quantised<S: Simd, const M: usize>(
    s: S,
    q: &Quantised,
    bytes: &[u8],
    x: &Rows<'_, M>,
    sums: &mut [[S::V; 2]; M],
) {
    let code_bytes = q.code_bytes();
    let zero = s.splat(f32::from(q.zero.unwrap_or(0)));
    let mut col = 0;
    for block in bytes.chunks_exact(q.block_bytes()) {
        let (codes, meta) = block.split_at(q.spans * code_bytes);
        for (span, codes) in codes.chunks_exact(code_bytes).enumerate() {
            let codes = q.unpack(codes);
            let mut scales = group_scales(s, q, meta, 2 * span);
            for (chunk, codes) in codes.as_chunks::<64>().0.iter().enumerate() {
                if q.scales == Scales::Factors16 && chunk == GROUP / 8 {
                    scales = group_scales(s, q, meta, 2 * span + 1);
                }
                let [scale, bias] = scales;
                // SAFETY: a chunk is 64 bytes.
                let codes = unsafe { [s.load_u32(codes.as_ptr()), s.load_u32(codes.as_ptr().add(32))] };
                for t in 0..4 {
                    let mut w = scale;
                    for h in 0..2 {
                        let code = s.field(codes[h], 8 * t, 255);
                        w[h] = if q.zero.is_some() {
                            s.mul(s.sub(code, zero), scale[h])
                        } else {
                            s.fma(code, scale[h], bias[h])
                        };
                    }
                    join(s, w, x, col, sums);
                    col += 1;
                }
            }
        }
    }
}

/// Scales and biases of sixteen rows for the `half`-th 16 columns of a block; biases are of no
/// matter where there are none.
#[inline(always)]
fn group_scales<S: Simd>(s: S, q: &Quantised, meta: &[u8], half: usize) -> [[S::V; 2]; 2] {
    let has_bias = q.zero.is_none();
    match q.scales {
        Scales::F16 => {
            let scale = halves(s, meta, 0);
            [scale, if has_bias { halves(s, meta, 1) } else { scale }]
        }
        Scales::F32 => {
            let scale = singles(s, meta, 0);
            [scale, if has_bias { singles(s, meta, 1) } else { scale }]
        }
        Scales::Factors32 => {
            let [scales, mins] = q.factors_at();
            let scale = product(s, halves(s, meta, 0), integers(s, meta, scales, half / 2));
            let bias = if has_bias {
                let min = product(s, halves(s, meta, 1), integers(s, meta, mins, half / 2));
                [s.sub(s.splat(0.0), min[0]), s.sub(s.splat(0.0), min[1])]
            } else {
                scale
            };
            [scale, bias]
        }
        Scales::Factors16 => {
            let [a, b] = integers(s, meta, q.factors_at()[0], half);
            let signed = [s.sub(a, s.splat(128.0)), s.sub(b, s.splat(128.0))];
            let scale = product(s, halves(s, meta, 0), signed);
            [scale, scale]
        }
    }
}

#[inline(always)]
fn product<S: Simd>(s: S, a: [S::V; 2], b: [S::V; 2]) -> [S::V; 2] {
    [s.mul(a[0], b[0]), s.mul(a[1], b[1])]
}

/// The `index`-th sixteen halves.
#[inline(always)]
fn halves<S: Simd>(s: S, meta: &[u8], index: usize) -> [S::V; 2] {
    let from = meta[32 * index..][..32].as_ptr().cast::<u16>();
    // SAFETY: sixteen halves follow, as the slice shows.
    unsafe { [s.load_f16(from), s.load_f16(from.add(LANES))] }
}

/// The `index`-th sixteen singles.
#[inline(always)]
fn singles<S: Simd>(s: S, meta: &[u8], index: usize) -> [S::V; 2] {
    let from = meta[64 * index..][..64].as_ptr().cast::<f32>();
    // SAFETY: sixteen singles follow, as the slice shows.
    unsafe { [s.load_ptr(from), s.load_ptr(from.add(LANES))] }
}

/// The integer factors of a group, unsigned.
#[inline(always)]
fn integers<S: Simd>(s: S, meta: &[u8], at: usize, group: usize) -> [S::V; 2] {
    let from = meta[at + 64 * (group / 4)..][..64].as_ptr();
    // SAFETY: 64 bytes follow, as the slice shows.
    let words = unsafe { [s.load_u32(from), s.load_u32(from.add(32))] };
    let shift = 8 * (group as u32 % 4);
    [s.field(words[0], shift, 255), s.field(words[1], shift, 255)]
}
