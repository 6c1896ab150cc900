//! The int8 product with integer factors for each 16 columns (6-bit codes); bit for bit
//! [`super::super::portable`].
//!
//! A group's products are summed in pairs of chunks in 16 bits (2 · 2 · 63 · 127 = 32,004), then
//! multiplied by the factors and added in 32 bits: at most 32 · 63 · 127 · 128 = 32,772,096. The zero
//! point comes off as the factors times the activations' sums. All of it is exact.

use std::arch::x86_64::*;

use super::super::super::weight::{GROUP, PANEL_ROWS};
use super::super::Int8Panel;
use super::{eight_halves, eight_words, put, tiled, unpack};

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    match tile {
        [] => {}
        [out] => one(panel, token, out),
        tile => tiled::product::<6>(panel, token, tile),
    }
}

/// One token with both halves of the panel; sums stay in registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn one(panel: &Int8Panel<'_>, token: usize, out: &mut [f32; PANEL_ROWS]) {
    let (q, x) = (&panel.format, panel.x);
    let (code_bytes, factors) = (q.code_bytes(), q.factors_at()[0]);
    let zero = _mm256_set1_epi32(i32::from(q.zero.unwrap_or(0)));
    let mut sums = [_mm256_setzero_ps(); 2];
    let mut at = token * x.groups();
    for block in panel.bytes.chunks_exact(q.block_bytes()) {
        let (codes, scales) = block.split_at(q.spans * code_bytes);
        let scale = [eight_halves(scales, 0), eight_halves(scales, 1)];
        for (span, codes) in codes.chunks_exact(code_bytes).enumerate() {
            let (first, second) = (x.half_sums[at], x.sums[at] - x.half_sums[at]);
            let pair = _mm256_set1_epi32((first & 0xffff) | (second << 16));
            debug_assert!(GROUP * (at + 1) <= x.codes.len());
            for h in 0..2 {
                let factors = Factors::new(eight_words(scales, factors, 2 * span, h), span);
                let w = unpack::<6>(codes, h);
                let offset = _mm256_mullo_epi32(_mm256_madd_epi16(pair, factors.both), zero);
                // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: 32 for each group.
                let dot = unsafe { dot(&w, x.codes.as_ptr().add(GROUP * at), &factors) };
                let dot = _mm256_cvtepi32_ps(_mm256_sub_epi32(dot, offset));
                let scaled = _mm256_mul_ps(dot, _mm256_set1_ps(x.scales[at]));
                sums[h] = _mm256_fmadd_ps(scaled, scale[h], sums[h]);
            }
            at += 1;
        }
    }
    put(&sums, out);
}

/// Factors of eight rows for the two halves of a group, as pairs of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    /// Of the first 16 columns, twice.
    pub(super) first: __m256i,
    /// Of the second 16 columns, twice.
    pub(super) second: __m256i,
    /// The first's low, the second's high.
    pub(super) both: __m256i,
}

impl Factors {
    /// From the words that hold them, of the `span`-th group of 32.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn new(words: __m256i, span: usize) -> Self {
        let shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128(16 * (span as i32 % 2)));
        let low = _mm256_set1_epi32(255);
        let (first, second) =
            (_mm256_and_si256(shifted, low), _mm256_and_si256(_mm256_srli_epi32::<8>(shifted), low));
        // Stored plus 128; taken off in both 16-bit places at once.
        let signed = |a: __m256i, b: __m256i| {
            _mm256_sub_epi16(_mm256_or_si256(a, _mm256_slli_epi32::<16>(b)), _mm256_set1_epi16(128))
        };
        Self { first: signed(first, first), second: signed(second, second), both: signed(first, second) }
    }
}

/// Sums of factor · code · activation of eight rows with one token's 32 codes.
///
/// # Safety
/// 32 codes are readable at `x`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot(w: &[__m256i; 8], x: *const i8, factors: &Factors) -> __m256i {
    // SAFETY: the caller vouches for 32 codes, `c < 8`.
    let product = |c: usize| unsafe {
        _mm256_maddubs_epi16(w[c], _mm256_set1_epi32(x.cast::<i32>().add(c).read_unaligned()))
    };
    let pair = |c: usize| _mm256_add_epi16(product(c), product(c + 1));
    let first = _mm256_add_epi32(
        _mm256_madd_epi16(pair(0), factors.first),
        _mm256_madd_epi16(pair(2), factors.first),
    );
    let second = _mm256_add_epi32(
        _mm256_madd_epi16(pair(4), factors.second),
        _mm256_madd_epi16(pair(6), factors.second),
    );
    _mm256_add_epi32(first, second)
}
