//! The int8 product with AVX2; bit for bit [`super::portable`]. x86-64 only.
//!
//! 4-bit codes: eight unsigned-by-signed products of pairs are summed in 16 bits, which cannot overflow:
//! 8 · 2 · 15 · 127 = 30,480. 8-bit codes are made signed and multiplied as `|w| · (x with w's sign)`: one
//! pair is at most 2 · 128 · 127 = 32,512, then widened at once.

use std::arch::x86_64::*;

use super::super::weight::{PANEL_ROWS, ScaleType};
use super::Int8Panel;

/// Products of one panel with `tile.len()` tokens, at most 8, from `token` on.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    if panel.format.bits == 4 {
        by_tokens::<4>(panel, token, tile);
    } else {
        by_tokens::<8>(panel, token, tile);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn by_tokens<const BITS: u8>(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    let mut done = 0;
    while done < tile.len() {
        let out = &mut tile[done..];
        let at = token + done;
        // Few tokens: both halves of the panel in one pass, as it streams from memory. More: half by
        // half, so that sums stay in registers.
        done += match out.len() {
            1 => passes::<BITS, 1, 2>(panel, at, out),
            2 => passes::<BITS, 2, 2>(panel, at, out),
            3 => passes::<BITS, 3, 1>(panel, at, out),
            4 => passes::<BITS, 4, 1>(panel, at, out),
            5 => passes::<BITS, 5, 1>(panel, at, out),
            6 => passes::<BITS, 6, 1>(panel, at, out),
            7 => passes::<BITS, 7, 1>(panel, at, out),
            _ => passes::<BITS, 8, 1>(panel, at, out),
        };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn passes<const BITS: u8, const M: usize, const H: usize>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) -> usize {
    let mut half = 0;
    while half < 2 {
        let sums = pass::<BITS, M, H>(panel, token, half);
        for (out, sums) in tile.iter_mut().zip(&sums) {
            for (h, sum) in sums.iter().enumerate() {
                // SAFETY: `half + h < 2`, so eight of the sixteen places follow.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * (half + h)), *sum) };
            }
        }
        half += H;
    }
    M
}

/// `M` tokens by `H` halves (eight rows each) from half `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pass<const BITS: u8, const M: usize, const H: usize>(
    panel: &Int8Panel<'_>,
    token: usize,
    first: usize,
) -> [[__m256; H]; M] {
    let q = &panel.format;
    let x = panel.x;
    let groups = x.groups();
    let (code_bytes, block_bytes) = (q.code_bytes(), q.block_bytes());
    let zero = i32::from(q.zero.unwrap_or(0));
    // 8-bit codes are multiplied as code − 128.
    let offset = if BITS == 4 { -zero } else { 128 - zero };
    debug_assert_eq!(panel.bytes.len(), groups / q.spans * block_bytes);
    debug_assert!(x.scales.len() >= (token + M) * groups);
    let mut sums = [[_mm256_setzero_ps(); H]; M];
    let mut group = 0;
    for block in panel.bytes.chunks_exact(block_bytes) {
        let scales = &block[q.spans * code_bytes..];
        let mut scale = [_mm256_setzero_ps(); H];
        let mut bias = [_mm256_setzero_ps(); H];
        for h in 0..H {
            scale[h] = eight_scales(q.scale, scales, first + h);
            if q.zero.is_none() {
                bias[h] = eight_scales(q.scale, scales, 2 + first + h);
            }
        }
        for span in 0..q.spans {
            let codes = &block[span * code_bytes..(span + 1) * code_bytes];
            let dots = dots::<BITS, M, H>(panel, codes, token, group, first);
            for i in 0..M {
                let at = (token + i) * groups + group;
                let shift = _mm256_set1_epi32(offset * x.sums[at]);
                let x_scale = _mm256_set1_ps(x.scales[at]);
                for h in 0..H {
                    let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dots[i][h], shift));
                    sums[i][h] = _mm256_fmadd_ps(_mm256_mul_ps(dot, x_scale), scale[h], sums[i][h]);
                }
                if q.zero.is_none() {
                    let x_sum = _mm256_set1_ps(x.scaled_sums[at]);
                    for h in 0..H {
                        sums[i][h] = _mm256_fmadd_ps(bias[h], x_sum, sums[i][h]);
                    }
                }
            }
            group += 1;
        }
    }
    sums
}

/// Sums of code products of one group: codes as stored (4 bits) or minus 128 (8 bits).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<const BITS: u8, const M: usize, const H: usize>(
    panel: &Int8Panel<'_>,
    codes: &[u8],
    token: usize,
    group: usize,
    first: usize,
) -> [[__m256i; H]; M] {
    let cols = panel.x.cols;
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_si256(); H]; M];
    let chunks = if BITS == 4 { 4 } else { 8 };
    for chunk in 0..chunks {
        for h in 0..H {
            // SAFETY: a group's codes are `chunks` · 64 bytes and `first + h < 2`: 32 bytes follow.
            let w = unsafe { _mm256_loadu_si256(codes.as_ptr().add(64 * chunk + 32 * (first + h)).cast()) };
            if BITS == 4 {
                let mask = _mm256_set1_epi8(15);
                let low = _mm256_and_si256(w, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(w), mask);
                for i in 0..M {
                    let at = (token + i) * cols + 32 * group + 4 * chunk;
                    let a = _mm256_maddubs_epi16(low, four_codes(&panel.x.codes, at));
                    let b = _mm256_maddubs_epi16(high, four_codes(&panel.x.codes, at + 16));
                    sums[i][h] = _mm256_add_epi16(sums[i][h], _mm256_add_epi16(a, b));
                }
            } else {
                let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                let magnitude = _mm256_abs_epi8(w);
                for i in 0..M {
                    let at = (token + i) * cols + 32 * group + 4 * chunk;
                    let x = _mm256_sign_epi8(four_codes(&panel.x.codes, at), w);
                    let pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, x), ones);
                    sums[i][h] = _mm256_add_epi32(sums[i][h], pairs);
                }
            }
        }
    }
    if BITS == 4 {
        for sums in &mut sums {
            for sum in sums {
                *sum = _mm256_madd_epi16(*sum, ones);
            }
        }
    }
    sums
}

/// Four activation codes in every lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn four_codes(codes: &[i8], at: usize) -> __m256i {
    debug_assert!(at + 4 <= codes.len());
    // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: a token's `cols` codes hold this group.
    _mm256_set1_epi32(unsafe { codes.as_ptr().add(at).cast::<i32>().read_unaligned() })
}

/// Eight scales, the `index`-th eight of a block's scales and biases.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_scales(kind: ScaleType, scales: &[u8], index: usize) -> __m256 {
    let bytes = &scales[index * 8 * kind.bytes()..(index + 1) * 8 * kind.bytes()];
    // SAFETY: the slice holds eight of them.
    unsafe {
        match kind {
            ScaleType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())),
            ScaleType::F32 => _mm256_loadu_ps(bytes.as_ptr().cast()),
        }
    }
}
