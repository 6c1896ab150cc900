//! The int8 product with AVX-VNNI, for processors that have it without AVX-512; bit for bit
//! [`super::portable`]. x86-64 only.
//!
//! `vpdpbusd` adds four unsigned-by-signed products to 32 bits exactly (it is the form without
//! saturation), so sums begin at what the zero point takes off. A stretch of the panel is unpacked once,
//! into the first-level cache; tiles of six tokens by sixteen rows then pass over it, which is what the
//! registers hold. Running sums of the outputs wait in memory between groups.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::weight::{GROUP, PANEL_ROWS, Quantised, Scales};
use super::Int8Panel;
use super::avx2::{eight_halves, eight_scales, eight_words, unpack};

/// Tokens of a tile.
const TOKENS: usize = 6;
/// Groups unpacked at once, at most: half of a first-level cache. Any block's groups divide it.
const STRETCH: usize = 24;
/// The same of few tokens, with which a panel had better stream from memory without a pause.
const FEW_STRETCH: usize = 8;
/// Tokens that are few.
const FEW: usize = 4;

/// 32 columns of sixteen rows, ready to be multiplied.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Group {
    /// Of columns `4c..4c + 4` the `c`-th two vectors, as stored.
    codes: [[__m256i; 2]; 8],
    scale: [__m256; 2],
    /// Of no matter where there is a zero point.
    bias: [__m256; 2],
    /// For the first and the second 16 columns; of no matter where scales have no integer factors for them.
    factors: [[__m256; 2]; 2],
}

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    let q = &panel.format;
    match (q.scales == Scales::Factors16, q.zero.is_none()) {
        (true, _) => stretches::<false, true>(panel, token, tile),
        (false, true) => stretches::<true, false>(panel, token, tile),
        (false, false) => stretches::<false, false>(panel, token, tile),
    }
}

/// `BIAS`: there is no zero point. `SIXTEENS`: with integer factors for each 16 columns.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn stretches<const BIAS: bool, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let q = &panel.format;
    tile.fill([0.0; PANEL_ROWS]);
    let mut unpacked = [const { MaybeUninit::<Group>::uninit() }; STRETCH];
    let blocks = if tile.len() <= FEW { FEW_STRETCH / q.spans } else { STRETCH / q.spans };
    let mut first = 0;
    for stretch in panel.bytes.chunks(blocks * q.block_bytes()) {
        let mut count = 0;
        for block in stretch.chunks_exact(q.block_bytes()) {
            for span in 0..q.spans {
                unpacked[count].write(group::<SIXTEENS>(q, block, span));
                count += 1;
            }
        }
        // SAFETY: the first `count` were written just now.
        let groups = unsafe { std::slice::from_raw_parts(unpacked.as_ptr().cast::<Group>(), count) };
        for (index, sums) in tile.chunks_mut(TOKENS).enumerate() {
            let token = token + TOKENS * index;
            match sums.len() {
                1 => pass::<BIAS, SIXTEENS, 1>(panel, groups, first, token, sums),
                2 => pass::<BIAS, SIXTEENS, 2>(panel, groups, first, token, sums),
                3 => pass::<BIAS, SIXTEENS, 3>(panel, groups, first, token, sums),
                4 => pass::<BIAS, SIXTEENS, 4>(panel, groups, first, token, sums),
                5 => pass::<BIAS, SIXTEENS, 5>(panel, groups, first, token, sums),
                _ => pass::<BIAS, SIXTEENS, TOKENS>(panel, groups, first, token, sums),
            }
        }
        first += count;
    }
}

/// The `span`-th group of a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn group<const SIXTEENS: bool>(q: &Quantised, block: &[u8], span: usize) -> Group {
    let (codes, scales) = block.split_at(q.spans * q.code_bytes());
    let codes = &codes[span * q.code_bytes()..(span + 1) * q.code_bytes()];
    let codes = match q.bits {
        4 => both_halves::<4>(codes),
        5 => both_halves::<5>(codes),
        6 => both_halves::<6>(codes),
        _ => both_halves::<8>(codes),
    };
    if SIXTEENS {
        let scale = [eight_halves(scales, 0), eight_halves(scales, 1)];
        let at = q.factors_at()[0];
        let words = [eight_words(scales, at, 2 * span, 0), eight_words(scales, at, 2 * span, 1)];
        let mut factors = [scale; 2];
        for half in 0..2 {
            for h in 0..2 {
                factors[half][h] = signed_factors(words[h], (2 * span + half) % 4);
            }
        }
        return Group { codes, scale, bias: scale, factors };
    }
    let (low, high) = (eight_scales(q, scales, span, 0), eight_scales(q, scales, span, 1));
    let (scale, bias) = ([low[0], high[0]], [low[1], high[1]]);
    Group { codes, scale, bias, factors: [scale; 2] }
}

/// The codes of a group, one a byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn both_halves<const BITS: u8>(codes: &[u8]) -> [[__m256i; 2]; 8] {
    let mut both = [[_mm256_setzero_si256(); 2]; 8];
    for h in 0..2 {
        let w = unpack::<BITS>(codes, h);
        for c in 0..8 {
            both[c][h] = w[c];
        }
    }
    both
}

/// The `index`-th bytes of words of integer factors, less 128.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn signed_factors(words: __m256i, index: usize) -> __m256 {
    let shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128(8 * index as i32));
    let stored = _mm256_and_si256(shifted, _mm256_set1_epi32(255));
    _mm256_cvtepi32_ps(_mm256_sub_epi32(stored, _mm256_set1_epi32(128)))
}

/// `M` tokens over the groups of a stretch, whose first is the `first`-th of a row.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn pass<const BIAS: bool, const SIXTEENS: bool, const M: usize>(
    panel: &Int8Panel<'_>,
    groups: &[Group],
    first: usize,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let x = panel.x;
    let zero = i32::from(panel.format.zero.unwrap_or(0));
    assert!(tile.len() == M && (token + M - 1) * x.groups() + first + groups.len() <= x.scales.len());
    for (index, group) in groups.iter().enumerate() {
        let at: [usize; M] = std::array::from_fn(|i| (token + i) * x.groups() + first + index);
        let mut offsets = [[0; 2]; M];
        for i in 0..M {
            // SAFETY: the last of these is inside, as asserted; `Int8Panel::new` saw that there are as
            // many sums as scales.
            let (sum, half_sum) =
                unsafe { (*x.sums.get_unchecked(at[i]), *x.half_sums.get_unchecked(at[i])) };
            offsets[i] = match (BIAS, SIXTEENS) {
                (true, _) => [0, 0],
                (_, true) => [-zero * half_sum, -zero * (sum - half_sum)],
                _ => [-zero * sum, 0],
            };
        }
        let dots = dots::<SIXTEENS, M>(group, &x.codes, at, offsets);
        for i in 0..M {
            // SAFETY: as above.
            let (x_scale, x_sum) = unsafe {
                let (scale, sum) = (x.scales.get_unchecked(at[i]), x.scaled_sums.get_unchecked(at[i]));
                (_mm256_set1_ps(*scale), _mm256_set1_ps(*sum))
            };
            let (halves, _) = tile[i].as_chunks_mut::<8>();
            for h in 0..2 {
                let scaled = _mm256_mul_ps(dots[i][h], x_scale);
                // SAFETY: eight places.
                unsafe {
                    let place = halves[h].as_mut_ptr();
                    let mut sums = _mm256_fmadd_ps(scaled, group.scale[h], _mm256_loadu_ps(place));
                    if BIAS {
                        sums = _mm256_fmadd_ps(group.bias[h], x_sum, sums);
                    }
                    _mm256_storeu_ps(place, sums);
                }
            }
        }
    }
}

/// Sums of code products (with factors, where there are some) of one group, the zero point off; `at` is the
/// group's index among each token's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn dots<const SIXTEENS: bool, const M: usize>(
    group: &Group,
    codes: &[i8],
    at: [usize; M],
    offsets: [[i32; 2]; M],
) -> [[__m256; 2]; M] {
    let mut totals = [[_mm256_setzero_ps(); 2]; M];
    let together = if SIXTEENS { 4 } else { 8 };
    for part in 0..8 / together {
        let mut sums = [[_mm256_setzero_si256(); 2]; M];
        for i in 0..M {
            sums[i] = [_mm256_set1_epi32(offsets[i][part]); 2];
        }
        for c in part * together..(part + 1) * together {
            let w = group.codes[c];
            for i in 0..M {
                debug_assert!(GROUP * (at[i] + 1) <= codes.len());
                // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: 32 for each group.
                let x = unsafe { codes.as_ptr().add(GROUP * at[i] + 4 * c).cast::<i32>().read_unaligned() };
                for h in 0..2 {
                    sums[i][h] = _mm256_dpbusd_avx_epi32(sums[i][h], w[h], _mm256_set1_epi32(x));
                }
            }
        }
        for i in 0..M {
            for h in 0..2 {
                let dot = _mm256_cvtepi32_ps(sums[i][h]);
                // Integers below 2^24 all along, so nothing rounds; and a sum of zeros is not negative.
                totals[i][h] =
                    if SIXTEENS { _mm256_fmadd_ps(dot, group.factors[part][h], totals[i][h]) } else { dot };
            }
        }
    }
    totals
}
