//! The int8 product with NEON's `sdot`; bit for bit [`super::portable`]. AArch64 only.
//!
//! A lane is a row, four to a vector. `sdot` adds four signed products to 32 bits exactly. Codes of 4, 5
//! and 6 bits are small enough to be signed as they are; those of 8 bits are multiplied as code − 128,
//! which the sums of activations mend. `sdot` is `asm!`, because its intrinsic is not stable yet.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::simd::widen_four;
use super::super::weight::{GROUP, PANEL_ROWS, Quantised, Scales};
use super::Int8Panel;

/// Rows of a vector.
const ROWS: usize = 4;
/// Vectors for the rows of a panel.
const QUARTERS: usize = PANEL_ROWS / ROWS;

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    match (panel.format.scales, panel.format.bits) {
        (Scales::Factors16, _) => by_tokens::<6, true>(panel, token, tile),
        (_, 4) => by_tokens::<4, false>(panel, token, tile),
        (_, 5) => by_tokens::<5, false>(panel, token, tile),
        (_, 6) => by_tokens::<6, false>(panel, token, tile),
        _ => by_tokens::<8, false>(panel, token, tile),
    }
}

#[target_feature(enable = "neon,dotprod")]
fn by_tokens<const BITS: u8, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let mut at = token;
    for tile in tile.chunks_mut(4) {
        match tile.len() {
            1 => pass::<BITS, SIXTEENS, 1>(panel, at, tile),
            2 => pass::<BITS, SIXTEENS, 2>(panel, at, tile),
            3 => pass::<BITS, SIXTEENS, 3>(panel, at, tile),
            _ => pass::<BITS, SIXTEENS, 4>(panel, at, tile),
        }
        at += tile.len();
    }
}

/// `M` tokens. `SIXTEENS`: with integer factors for each 16 columns.
#[target_feature(enable = "neon,dotprod")]
fn pass<const BITS: u8, const SIXTEENS: bool, const M: usize>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let (q, x) = (&panel.format, panel.x);
    let (code_bytes, groups) = (q.code_bytes(), x.groups());
    let mut sums = [[vdupq_n_f32(0.0); QUARTERS]; M];
    let mut group = 0;
    for block in panel.bytes.chunks_exact(q.block_bytes()) {
        let (codes, scales) = block.split_at(q.spans * code_bytes);
        for (span, codes) in codes.chunks_exact(code_bytes).enumerate() {
            let dots = if SIXTEENS {
                factored_dots::<BITS, M>(panel, codes, (scales, span), token, group)
            } else {
                whole_dots::<BITS, M>(panel, codes, token, group)
            };
            for quarter in 0..QUARTERS {
                let [scale, bias] = if SIXTEENS {
                    [four_halves(scales, quarter); 2]
                } else {
                    four_scales(q, scales, span, quarter)
                };
                for i in 0..M {
                    let at = (token + i) * groups + group;
                    let scaled = vmulq_n_f32(vcvtq_f32_s32(dots[i][quarter]), x.scales[at]);
                    let mut sum = vfmaq_f32(sums[i][quarter], scaled, scale);
                    if q.zero.is_none() {
                        sum = vfmaq_n_f32(sum, bias, x.scaled_sums[at]);
                    }
                    sums[i][quarter] = sum;
                }
            }
            group += 1;
        }
    }
    for (out, sums) in tile.iter_mut().zip(&sums) {
        for (out, sum) in out.chunks_exact_mut(ROWS).zip(sums) {
            // SAFETY: four places.
            unsafe { vst1q_f32(out.as_mut_ptr(), *sum) };
        }
    }
}

/// Sums of (code − zero) · activation of one group.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn whole_dots<const BITS: u8, const M: usize>(
    panel: &Int8Panel<'_>,
    codes: &[u8],
    token: usize,
    group: usize,
) -> [[int32x4_t; QUARTERS]; M] {
    let x = panel.x;
    let mut sums = [[vdupq_n_s32(0); QUARTERS]; M];
    for i in 0..M {
        let shift = offset::<BITS>(&panel.format) * x.sums[(token + i) * x.groups() + group];
        sums[i] = [vdupq_n_s32(shift); QUARTERS];
    }
    let sums = add_dots::<BITS, 0, M>(sums, panel, codes, token, group);
    add_dots::<BITS, 1, M>(sums, panel, codes, token, group)
}

/// Sums of factor · (code − zero) · activation of one group, a factor for each 16 columns; `at` is the
/// block's scales and the group's place in the block.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn factored_dots<const BITS: u8, const M: usize>(
    panel: &Int8Panel<'_>,
    codes: &[u8],
    at: (&[u8], usize),
    token: usize,
    group: usize,
) -> [[int32x4_t; QUARTERS]; M] {
    let x = panel.x;
    let (scales, span) = at;
    let [first, _] = panel.format.factors_at();
    let mut totals = [[vdupq_n_s32(0); QUARTERS]; M];
    let halves = [
        add_dots::<BITS, 0, M>(totals, panel, codes, token, group),
        add_dots::<BITS, 1, M>(totals, panel, codes, token, group),
    ];
    for (half, sums) in halves.iter().enumerate() {
        for quarter in 0..QUARTERS {
            let integers = four_integers(scales, first, 2 * span + half, quarter);
            let factor = vsubq_s32(integers, vdupq_n_s32(128));
            for i in 0..M {
                let at = (token + i) * x.groups() + group;
                let sum = if half == 0 { x.half_sums[at] } else { x.sums[at] - x.half_sums[at] };
                let dot = vaddq_s32(sums[i][quarter], vdupq_n_s32(offset::<BITS>(&panel.format) * sum));
                totals[i][quarter] = vmlaq_s32(totals[i][quarter], dot, factor);
            }
        }
    }
    totals
}

/// What a code as multiplied is larger than the code minus its zero point, negative.
#[inline]
fn offset<const BITS: u8>(q: &Quantised) -> i32 {
    let zero = i32::from(q.zero.unwrap_or(0));
    if BITS == 8 { 128 - zero } else { -zero }
}

/// To `sums`, those of code products of 16 columns, a group's `HALF`; codes as [`unpack`] gives them.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_dots<const BITS: u8, const HALF: usize, const M: usize>(
    mut sums: [[int32x4_t; QUARTERS]; M],
    panel: &Int8Panel<'_>,
    codes: &[u8],
    token: usize,
    group: usize,
) -> [[int32x4_t; QUARTERS]; M] {
    let x = panel.x;
    for c in 4 * HALF..4 * HALF + 4 {
        let mut w = [vdupq_n_s8(0); QUARTERS];
        for quarter in 0..QUARTERS {
            w[quarter] = unpack::<BITS>(codes, c, quarter);
        }
        for i in 0..M {
            let x = four_codes(&x.codes, (token + i) * x.cols + GROUP * group + 4 * c);
            for quarter in 0..QUARTERS {
                sums[i][quarter] = sdot(sums[i][quarter], w[quarter], x);
            }
        }
    }
    sums
}

/// To each lane, the sum of its four products.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: an instruction of the enabled features between registers.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Codes of columns `4c..4c + 4` of four rows: as stored, or minus 128 for 8 bits.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn unpack<const BITS: u8>(codes: &[u8], c: usize, quarter: usize) -> int8x16_t {
    // SAFETY: a group's codes are 64 · BITS bytes, `chunk < BITS` and `quarter < 4`: sixteen bytes follow.
    let load = |chunk: usize| unsafe {
        debug_assert!(64 * chunk + 64 <= codes.len());
        vld1q_u8(codes.as_ptr().add(64 * chunk + 16 * quarter))
    };
    if BITS == 8 {
        return vreinterpretq_s8_u8(veorq_u8(load(c), vdupq_n_u8(0x80)));
    }
    let nibbles = load(c % 4);
    let low = if c < 4 { vandq_u8(nibbles, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(nibbles) };
    // The upper bits, shifted to the fifth place: by a negative number is to the right.
    let upper = |plane: uint8x16_t, place: usize, mask: u8| {
        vandq_u8(vshlq_u8(plane, vdupq_n_s8(4 - place as i8)), vdupq_n_u8(mask))
    };
    vreinterpretq_s8_u8(match BITS {
        5 => vorrq_u8(low, upper(load(4), c, 0x10)),
        6 => vorrq_u8(low, upper(load(4 + c / 4), 2 * (c % 4), 0x30)),
        _ => low,
    })
}

/// Four activation codes in every lane.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn four_codes(codes: &[i8], at: usize) -> int8x16_t {
    debug_assert!(at + 4 <= codes.len());
    // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: a token's `cols` codes hold this group.
    let four = unsafe { codes.as_ptr().add(at).cast::<i32>().read_unaligned() };
    vreinterpretq_s8_s32(vdupq_n_s32(four))
}

/// Scales and biases of four rows for the `span`-th 32 columns of a block; biases are of no matter where
/// there are none.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn four_scales(q: &Quantised, scales: &[u8], span: usize, quarter: usize) -> [float32x4_t; 2] {
    let has_bias = q.zero.is_none();
    match q.scales {
        Scales::F16 => {
            let scale = four_halves(scales, quarter);
            [scale, if has_bias { four_halves(scales, QUARTERS + quarter) } else { scale }]
        }
        Scales::F32 => {
            let scale = four_singles(scales, quarter);
            [scale, if has_bias { four_singles(scales, QUARTERS + quarter) } else { scale }]
        }
        Scales::Factors32 | Scales::Factors16 => {
            let [factors, mins] = q.factors_at();
            let integers = |at| vcvtq_f32_s32(four_integers(scales, at, span, quarter));
            let scale = vmulq_f32(four_halves(scales, quarter), integers(factors));
            if !has_bias {
                return [scale, scale];
            }
            [scale, vnegq_f32(vmulq_f32(four_halves(scales, QUARTERS + quarter), integers(mins)))]
        }
    }
}

/// The `index`-th four halves.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn four_halves(scales: &[u8], index: usize) -> float32x4_t {
    let bytes = &scales[8 * index..8 * index + 8];
    // SAFETY: the slice holds four of them; bytes have any alignment.
    widen_four(vreinterpret_u16_u8(unsafe { vld1_u8(bytes.as_ptr()) }))
}

/// The `index`-th four singles.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn four_singles(scales: &[u8], index: usize) -> float32x4_t {
    let bytes = &scales[16 * index..16 * index + 16];
    // SAFETY: the slice holds four of them; bytes have any alignment.
    vreinterpretq_f32_u8(unsafe { vld1q_u8(bytes.as_ptr()) })
}

/// The integer factors of a group in four rows, unsigned; `at` is where the integers begin.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn four_integers(scales: &[u8], at: usize, group: usize, quarter: usize) -> int32x4_t {
    let bytes = &scales[at + 64 * (group / 4) + 16 * quarter..][..16];
    // SAFETY: the slice holds four words; bytes have any alignment.
    let words = vreinterpretq_u32_u8(unsafe { vld1q_u8(bytes.as_ptr()) });
    let right = vdupq_n_s32(-8 * (group as i32 % 4));
    vreinterpretq_s32_u32(vandq_u32(vshlq_u32(words, right), vdupq_n_u32(255)))
}
