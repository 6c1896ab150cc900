//! The int8 product of two and more tokens with AVX2; bit for bit [`super::super::portable`].
//!
//! A stretch of the panel is unpacked once, to bytes and single-precision scales in the first-level cache.
//! Then tiles of four tokens by sixteen rows pass over it: eight vectors of 16-bit sums, which is what the
//! registers hold beside the operands. Running sums of the outputs wait in memory between groups.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::super::weight::{GROUP, PANEL_ROWS, Quantised, Scales};
use super::super::Int8Panel;
use super::sixteens::Factors;
use super::{eight_halves, eight_scales, eight_words, four_codes, prefetch, unpack};

/// Tokens of a tile.
const TOKENS: usize = 4;
/// Groups unpacked at once, at most: with codes of up to six bits half of a first-level cache is touched.
const STRETCH: usize = 24;

/// 32 columns of sixteen rows, ready to be multiplied.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Group {
    /// Of columns `4c..4c + 4` the `c`-th two vectors; of 8 bits the lower four.
    codes: [[__m256i; 2]; 8],
    /// The upper four of 8 bits; not set elsewhere.
    upper: [MaybeUninit<[__m256i; 2]>; 8],
    scale: [__m256; 2],
    /// Set where there is no zero point.
    bias: [__m256; 2],
    /// Set where scales have integer factors for 16 columns.
    factors: [MaybeUninit<Factors>; 2],
}

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product<const BITS: u8>(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    let q = &panel.format;
    match (q.scales == Scales::Factors16, q.zero.is_none()) {
        (true, _) => stretches::<BITS, false, true>(panel, token, tile),
        (false, true) => stretches::<BITS, true, false>(panel, token, tile),
        (false, false) => stretches::<BITS, false, false>(panel, token, tile),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn stretches<const BITS: u8, const BIAS: bool, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let q = &panel.format;
    tile.fill([0.0; PANEL_ROWS]);
    let mut unpacked = [const { MaybeUninit::<Group>::uninit() }; STRETCH];
    let blocks = STRETCH / q.spans;
    let mut first = 0;
    for stretch in panel.bytes.chunks(blocks * q.block_bytes()) {
        let mut count = 0;
        for block in stretch.chunks_exact(q.block_bytes()) {
            for span in 0..q.spans {
                unpacked[count].write(group::<BITS, SIXTEENS>(q, block, span));
                count += 1;
            }
        }
        // SAFETY: the first `count` were written just now.
        let groups = unsafe { std::slice::from_raw_parts(unpacked.as_ptr().cast::<Group>(), count) };
        let mut next =
            Some(Next { start: stretch.as_ptr().wrapping_add(stretch.len()), share: stretch.len() / count });
        for (index, sums) in tile.chunks_mut(TOKENS).enumerate() {
            let token = token + TOKENS * index;
            let next = next.take();
            match sums.len() {
                1 => pass::<BITS, BIAS, SIXTEENS, 1>(panel, groups, first, token, sums, next),
                2 => pass::<BITS, BIAS, SIXTEENS, 2>(panel, groups, first, token, sums, next),
                3 => pass::<BITS, BIAS, SIXTEENS, 3>(panel, groups, first, token, sums, next),
                _ => pass::<BITS, BIAS, SIXTEENS, TOKENS>(panel, groups, first, token, sums, next),
            }
        }
        first += count;
    }
}

/// What lies behind the stretch at hand, which need not be readable: the first tile wishes it near meanwhile, so
/// that memory and multipliers work at the same time.
#[derive(Clone, Copy)]
struct Next {
    start: *const u8,
    /// Bytes for each group that is computed.
    share: usize,
}

impl Next {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn wish(self, group: usize) {
        for line in (self.share * group..self.share * (group + 1)).step_by(64) {
            prefetch(self.start.wrapping_add(line));
        }
    }
}

/// The `span`-th group of a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group<const BITS: u8, const SIXTEENS: bool>(q: &Quantised, block: &[u8], span: usize) -> Group {
    let (codes, scales) = block.split_at(q.spans * q.code_bytes());
    let codes = &codes[span * q.code_bytes()..(span + 1) * q.code_bytes()];
    let mut upper = [MaybeUninit::uninit(); 8];
    let halves = [unpack::<BITS>(codes, 0), unpack::<BITS>(codes, 1)];
    let mut codes = [[_mm256_setzero_si256(); 2]; 8];
    for c in 0..8 {
        codes[c] = [halves[0][c], halves[1][c]];
        if BITS == 8 {
            let mask = _mm256_set1_epi8(15);
            let [a, b] = codes[c];
            codes[c] = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            let (a, b) = (_mm256_srli_epi16::<4>(a), _mm256_srli_epi16::<4>(b));
            upper[c].write([_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]);
        }
    }
    if SIXTEENS {
        let scale = [eight_halves(scales, 0), eight_halves(scales, 1)];
        let at = q.factors_at()[0];
        let factors = |half| MaybeUninit::new(Factors::new(eight_words(scales, at, 2 * span, half), span));
        return Group { codes, upper, scale, bias: scale, factors: [factors(0), factors(1)] };
    }
    let (low, high) = (eight_scales(q, scales, span, 0), eight_scales(q, scales, span, 1));
    let factors = [MaybeUninit::uninit(); 2];
    Group { codes, upper, scale: [low[0], high[0]], bias: [low[1], high[1]], factors }
}

/// `M` tokens over the groups of a stretch, whose first is the `first`-th of a row.
#[target_feature(enable = "avx2,fma,f16c")]
fn pass<const BITS: u8, const BIAS: bool, const SIXTEENS: bool, const M: usize>(
    panel: &Int8Panel<'_>,
    groups: &[Group],
    first: usize,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
    next: Option<Next>,
) {
    let x = panel.x;
    let zero = i32::from(panel.format.zero.unwrap_or(0));
    let offset = _mm256_set1_epi32(-zero);
    let zeros = _mm256_set1_epi16(zero as i16);
    assert!(tile.len() == M && (token + M - 1) * x.groups() + first + groups.len() <= x.scales.len());
    for (index, group) in groups.iter().enumerate() {
        if let Some(next) = next {
            next.wish(index);
        }
        let at = |i: usize| (token + i) * x.groups() + first + index;
        let dots = dots::<BITS, SIXTEENS, M>(group, &x.codes, std::array::from_fn(|i| GROUP * at(i)));
        for i in 0..M {
            // SAFETY: the last of these is inside, as asserted; `Int8Panel::new` saw that there are as
            // many sums as scales.
            let (sum, half_sum, x_scale, x_sum) = unsafe {
                let at = at(i);
                (
                    *x.sums.get_unchecked(at),
                    *x.half_sums.get_unchecked(at),
                    _mm256_set1_ps(*x.scales.get_unchecked(at)),
                    _mm256_set1_ps(*x.scaled_sums.get_unchecked(at)),
                )
            };
            let (halves, _) = tile[i].as_chunks_mut::<8>();
            for h in 0..2 {
                let dots = if SIXTEENS {
                    // SAFETY: `group` sets them for such scales.
                    let factors = unsafe { group.factors[h].assume_init_ref() };
                    let pair = _mm256_set1_epi32((half_sum & 0xffff) | ((sum - half_sum) << 16));
                    let both = _mm256_mullo_epi16(factors.both, zeros);
                    _mm256_sub_epi32(dots[i][h], _mm256_madd_epi16(pair, both))
                } else if BIAS {
                    dots[i][h]
                } else {
                    _mm256_add_epi32(dots[i][h], _mm256_mullo_epi32(_mm256_set1_epi32(sum), offset))
                };
                let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), x_scale);
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

/// Sums of code products (with factors, where there are some) of one group; `at` is where each token's
/// codes of it begin.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<const BITS: u8, const SIXTEENS: bool, const M: usize>(
    group: &Group,
    codes: &[i8],
    at: [usize; M],
) -> [[__m256i; 2]; M] {
    // Chunks whose products 16 bits hold the sum of; see the parent. 8 bits are two times four.
    let together = match BITS {
        4 | 8 => 8,
        5 => 4,
        _ => 2,
    };
    let mut sums = [[_mm256_setzero_si256(); 2]; M];
    for from in (0..8).step_by(together) {
        let pairs = pairs(&group.codes, from, together, codes, at);
        for i in 0..M {
            for h in 0..2 {
                let by = if SIXTEENS {
                    // SAFETY: `group` sets them for such scales.
                    let factors = unsafe { group.factors[h].assume_init_ref() };
                    if from < 4 { factors.first } else { factors.second }
                } else {
                    _mm256_set1_epi16(1)
                };
                let wide = _mm256_madd_epi16(pairs[i][h], by);
                sums[i][h] = if from == 0 { wide } else { _mm256_add_epi32(sums[i][h], wide) };
            }
        }
    }
    if BITS == 8 {
        // SAFETY: `group` sets all of them for 8 bits.
        let upper = unsafe { &*group.upper.as_ptr().cast::<[[__m256i; 2]; 8]>() };
        let pairs = pairs(upper, 0, 8, codes, at);
        for i in 0..M {
            for h in 0..2 {
                let wide = _mm256_madd_epi16(pairs[i][h], _mm256_set1_epi16(16));
                sums[i][h] = _mm256_add_epi32(sums[i][h], wide);
            }
        }
    }
    sums
}

/// Sums in 16 bits of code products of `count` chunks from the `from`-th on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs<const M: usize>(
    w: &[[__m256i; 2]; 8],
    from: usize,
    count: usize,
    codes: &[i8],
    at: [usize; M],
) -> [[__m256i; 2]; M] {
    let mut pairs = [[_mm256_setzero_si256(); 2]; M];
    for c in from..from + count {
        let w = w[c];
        for i in 0..M {
            let x = four_codes(codes, at[i] + 4 * c);
            for h in 0..2 {
                let product = _mm256_maddubs_epi16(w[h], x);
                pairs[i][h] = if c == from { product } else { _mm256_add_epi16(pairs[i][h], product) };
                keep_order(&mut pairs[i][h]);
            }
        }
    }
    pairs
}

/// Nothing, at this very place of the program: the compiler would else compute one half for all chunks
/// before the other, and have to put aside the activations meanwhile.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn keep_order(sum: &mut __m256i) {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) * sum, options(nomem, nostack, preserves_flags)) };
}
