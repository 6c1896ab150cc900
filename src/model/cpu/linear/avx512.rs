//! The int8 product with AVX-512 VNNI; bit for bit [`super::portable`]. x86-64 only.
//!
//! A lane is a row, sixteen at once. `vpdpbusd` adds four unsigned-by-signed
//! products to 32 bits exactly (it is the form without saturation).

use std::arch::x86_64::*;

use super::super::weight::{GROUP, PANEL_ROWS, Quantised, Scales};
use super::Int8Panel;

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    match (panel.format.scales, panel.format.bits) {
        (Scales::Factors16, _) => by_tokens::<6, true>(panel, token, tile),
        (_, 4) => by_tokens::<4, false>(panel, token, tile),
        (_, 5) => by_tokens::<5, false>(panel, token, tile),
        (_, 6) => by_tokens::<6, false>(panel, token, tile),
        _ => by_tokens::<8, false>(panel, token, tile),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn by_tokens<const BITS: u8, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let mut done = 0;
    while done < tile.len() {
        let out = &mut tile[done..];
        let at = token + done;
        done += match out.len() {
            1 => pass::<BITS, SIXTEENS, 1>(panel, at, out),
            2 => pass::<BITS, SIXTEENS, 2>(panel, at, out),
            3 => pass::<BITS, SIXTEENS, 3>(panel, at, out),
            4 => pass::<BITS, SIXTEENS, 4>(panel, at, out),
            5 => pass::<BITS, SIXTEENS, 5>(panel, at, out),
            6 => pass::<BITS, SIXTEENS, 6>(panel, at, out),
            7 => pass::<BITS, SIXTEENS, 7>(panel, at, out),
            _ => pass::<BITS, SIXTEENS, 8>(panel, at, out),
        };
    }
}

/// `SIXTEENS`: with integer factors for each 16 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn pass<const BITS: u8, const SIXTEENS: bool, const M: usize>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) -> usize {
    let q = &panel.format;
    let x = panel.x;
    let groups = x.groups();
    let (code_bytes, block_bytes) = (q.code_bytes(), q.block_bytes());
    let zero = i32::from(q.zero.unwrap_or(0));
    let mut sums = [_mm512_setzero_ps(); M];
    let mut group = 0;
    for block in panel.bytes.chunks_exact(block_bytes) {
        let scales = &block[q.spans * code_bytes..];
        for span in 0..q.spans {
            let codes = &block[span * code_bytes..(span + 1) * code_bytes];
            let [scale, bias] =
                if SIXTEENS { [sixteen_halves(scales, 0); 2] } else { sixteen_scales(q, scales, span) };
            let dots = if SIXTEENS {
                factored_dots::<BITS, M>(panel, codes, factors(q, scales, span), token, group)
            } else {
                dots::<BITS, M>(panel, codes, token, group)
            };
            for i in 0..M {
                let at = (token + i) * groups + group;
                let offset = if SIXTEENS { 0 } else { zero * x.sums[at] };
                let dot = _mm512_sub_epi32(dots[i], _mm512_set1_epi32(offset));
                let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x.scales[at]));
                sums[i] = _mm512_fmadd_ps(scaled, scale, sums[i]);
                if q.zero.is_none() {
                    sums[i] = _mm512_fmadd_ps(bias, _mm512_set1_ps(x.scaled_sums[at]), sums[i]);
                }
            }
            group += 1;
        }
    }
    for (out, sum) in tile.iter_mut().zip(&sums) {
        // SAFETY: a tile's row is sixteen f32.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
    }
    M
}

/// Codes of columns `4c..4c + 4` of sixteen rows, as stored.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unpack<const BITS: u8>(codes: &[u8], c: usize) -> __m512i {
    // SAFETY: a group's codes are 64 · BITS bytes, and `chunk < BITS`.
    let load = |chunk: usize| unsafe {
        debug_assert!(64 * chunk + 64 <= codes.len());
        _mm512_loadu_si512(codes.as_ptr().add(64 * chunk).cast())
    };
    if BITS == 8 {
        return load(c);
    }
    let shift = |v: __m512i, by: usize| _mm512_srl_epi16(v, _mm_cvtsi32_si128(by as i32));
    let nibble = _mm512_and_si512(shift(load(c % 4), 4 * (c / 4)), _mm512_set1_epi8(15));
    let upper = |plane: __m512i, by: usize, mask: i8| {
        _mm512_slli_epi16::<4>(_mm512_and_si512(shift(plane, by), _mm512_set1_epi8(mask)))
    };
    match BITS {
        5 => _mm512_or_si512(nibble, upper(load(4), c, 1)),
        6 => _mm512_or_si512(nibble, upper(load(4 + c / 4), 2 * (c % 4), 3)),
        _ => nibble,
    }
}

/// Sums of code products of one group, codes as stored.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn dots<const BITS: u8, const M: usize>(
    panel: &Int8Panel<'_>,
    codes: &[u8],
    token: usize,
    group: usize,
) -> [__m512i; M] {
    let cols = panel.x.cols;
    let mut sums = [_mm512_setzero_si512(); M];
    for c in 0..8 {
        let w = unpack::<BITS>(codes, c);
        for i in 0..M {
            let at = (token + i) * cols + GROUP * group + 4 * c;
            sums[i] = _mm512_dpbusd_epi32(sums[i], w, four_codes(&panel.x.codes, at));
        }
    }
    sums
}

/// Sums of factor · (code − zero) · activation of one group: a factor for each 16 columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn factored_dots<const BITS: u8, const M: usize>(
    panel: &Int8Panel<'_>,
    codes: &[u8],
    factors: [__m512i; 2],
    token: usize,
    group: usize,
) -> [__m512i; M] {
    let x = panel.x;
    let zero = i32::from(panel.format.zero.unwrap_or(0));
    let mut totals = [_mm512_setzero_si512(); M];
    for half in 0..2 {
        let mut sums = [_mm512_setzero_si512(); M];
        for c in 4 * half..4 * half + 4 {
            let w = unpack::<BITS>(codes, c);
            for i in 0..M {
                let at = (token + i) * x.cols + GROUP * group + 4 * c;
                sums[i] = _mm512_dpbusd_epi32(sums[i], w, four_codes(&x.codes, at));
            }
        }
        for i in 0..M {
            let at = (token + i) * x.groups() + group;
            let sum = if half == 0 { x.half_sums[at] } else { x.sums[at] - x.half_sums[at] };
            let dot = _mm512_sub_epi32(sums[i], _mm512_set1_epi32(zero * sum));
            totals[i] = _mm512_add_epi32(totals[i], _mm512_mullo_epi32(dot, factors[half]));
        }
    }
    totals
}

/// Four activation codes in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn four_codes(codes: &[i8], at: usize) -> __m512i {
    debug_assert!(at + 4 <= codes.len());
    // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: a token's `cols` codes hold this group.
    _mm512_set1_epi32(unsafe { codes.as_ptr().add(at).cast::<i32>().read_unaligned() })
}

/// Scales and biases of sixteen rows for the `span`-th 32 columns of a block; biases are of no matter
/// where there are none.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_scales(q: &Quantised, scales: &[u8], span: usize) -> [__m512; 2] {
    let has_bias = q.zero.is_none();
    match q.scales {
        Scales::F16 => {
            let scale = sixteen_halves(scales, 0);
            [scale, if has_bias { sixteen_halves(scales, 1) } else { scale }]
        }
        Scales::F32 => {
            let scale = sixteen_singles(scales, 0);
            [scale, if has_bias { sixteen_singles(scales, 1) } else { scale }]
        }
        Scales::Factors32 | Scales::Factors16 => {
            let [factors, mins] = q.factors_at();
            let integers = |at| _mm512_cvtepi32_ps(sixteen_integers(scales, at, span));
            let scale = _mm512_mul_ps(sixteen_halves(scales, 0), integers(factors));
            if !has_bias {
                return [scale, scale];
            }
            let min = _mm512_mul_ps(sixteen_halves(scales, 1), integers(mins));
            let sign = _mm512_set1_epi32(i32::MIN);
            [scale, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(min), sign))]
        }
    }
}

/// The signed factors of sixteen rows for the two halves of the `span`-th 32 columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn factors(q: &Quantised, scales: &[u8], span: usize) -> [__m512i; 2] {
    let [at, _] = q.factors_at();
    let plus_128 = _mm512_set1_epi32(128);
    [2 * span, 2 * span + 1].map(|group| _mm512_sub_epi32(sixteen_integers(scales, at, group), plus_128))
}

/// The `index`-th sixteen halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_halves(scales: &[u8], index: usize) -> __m512 {
    let bytes = &scales[32 * index..32 * index + 32];
    // SAFETY: the slice holds sixteen of them.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())) }
}

/// The `index`-th sixteen singles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_singles(scales: &[u8], index: usize) -> __m512 {
    let bytes = &scales[64 * index..64 * index + 64];
    // SAFETY: the slice holds sixteen of them.
    unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) }
}

/// The integer factors of a group in sixteen rows, unsigned; `at` is where the integers begin.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_integers(scales: &[u8], at: usize, group: usize) -> __m512i {
    let bytes = &scales[at + 64 * (group / 4)..][..64];
    // SAFETY: the slice holds sixteen words.
    let words = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    let shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128(8 * (group as i32 % 4)));
    _mm512_and_si512(shifted, _mm512_set1_epi32(255))
}
