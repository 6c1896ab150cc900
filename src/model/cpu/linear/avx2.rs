//! The int8 product with AVX2; bit for bit [`super::portable`]. x86-64 only.
//!
//! Unsigned-by-signed products of pairs are summed in 16 bits as far as that cannot overflow: all eight of
//! a group with 4-bit codes (8 · 2 · 15 · 127 = 30,480), four with 5 bits (4 · 2 · 31 · 127 = 31,496), two
//! with 6 bits (2 · 2 · 63 · 127 = 32,004). 8-bit codes of one token are made signed and multiplied as
//! `|w| · (x with w's sign)`: one pair is at most 2 · 128 · 127 = 32,512, then widened at once. For more
//! tokens they are two times 4 bits.

use std::arch::x86_64::*;

use super::super::weight::{GROUP, PANEL_ROWS, Quantised, Scales};
use super::Int8Panel;

mod sixteens;
mod tiled;

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    match (panel.format.scales, panel.format.bits) {
        (Scales::Factors16, _) => sixteens::product(panel, token, tile),
        (_, 4) => by_tokens::<4>(panel, token, tile),
        (_, 5) => by_tokens::<5>(panel, token, tile),
        (_, 6) => by_tokens::<6>(panel, token, tile),
        _ => by_tokens::<8>(panel, token, tile),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn by_tokens<const BITS: u8>(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    match tile {
        [] => {}
        [out] => one::<BITS>(panel, token, out),
        tile => tiled::product::<BITS>(panel, token, tile),
    }
}

/// One token: the panel streams from memory, and sums stay in registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn one<const BITS: u8>(panel: &Int8Panel<'_>, token: usize, out: &mut [f32; PANEL_ROWS]) {
    let (q, x) = (&panel.format, panel.x);
    let (code_bytes, block_bytes) = (q.code_bytes(), q.block_bytes());
    let zero = i32::from(q.zero.unwrap_or(0));
    // 8-bit codes are multiplied as code − 128.
    let offset = if BITS == 8 { 128 - zero } else { -zero };
    let mut sums = [_mm256_setzero_ps(); 2];
    let mut at = token * x.groups();
    for block in panel.bytes.chunks_exact(block_bytes) {
        let (codes, scales) = block.split_at(q.spans * code_bytes);
        for (span, codes) in codes.chunks_exact(code_bytes).enumerate() {
            let shift = _mm256_set1_epi32(offset * x.sums[at]);
            let x_scale = _mm256_set1_ps(x.scales[at]);
            let x_sum = _mm256_set1_ps(x.scaled_sums[at]);
            debug_assert!(GROUP * (at + 1) <= x.codes.len());
            for h in 0..2 {
                let [scale, bias] = eight_scales(q, scales, span, h);
                let w = unpack::<BITS>(codes, h);
                // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: 32 for each group.
                let dot = unsafe { dot::<BITS>(&w, x.codes.as_ptr().add(GROUP * at)) };
                let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dot, shift));
                sums[h] = _mm256_fmadd_ps(_mm256_mul_ps(dot, x_scale), scale, sums[h]);
                if q.zero.is_none() {
                    sums[h] = _mm256_fmadd_ps(bias, x_sum, sums[h]);
                }
            }
            at += 1;
        }
    }
    put(&sums, out);
}

/// Stores the sums of sixteen rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn put(sums: &[__m256; 2], out: &mut [f32; PANEL_ROWS]) {
    for (h, sum) in sums.iter().enumerate() {
        // SAFETY: `h < 2`, so eight of the sixteen places follow.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * h), *sum) };
    }
}

/// Codes of eight rows and 32 columns: columns `4c..4c + 4` in the `c`-th.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack<const BITS: u8>(codes: &[u8], half: usize) -> [__m256i; 8] {
    // SAFETY: a group's codes are 64 · BITS bytes, `chunk < BITS` and `half < 2`: 32 bytes follow.
    let load = |chunk: usize| unsafe {
        debug_assert!(64 * chunk + 64 <= codes.len());
        _mm256_loadu_si256(codes.as_ptr().add(64 * chunk + 32 * half).cast())
    };
    let mut w = [_mm256_setzero_si256(); 8];
    if BITS == 8 {
        for chunk in 0..8 {
            w[chunk] = load(chunk);
        }
        return w;
    }
    let mask = _mm256_set1_epi8(15);
    for chunk in 0..4 {
        let bytes = load(chunk);
        w[chunk] = _mm256_and_si256(bytes, mask);
        w[chunk + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
    }
    // The upper bits are shifted to the fifth place; what crosses into a neighbouring byte is masked off.
    if BITS == 5 {
        let plane = load(4);
        let at_fifth = |plane: __m256i| _mm256_and_si256(plane, _mm256_set1_epi8(0x10));
        w[0] = _mm256_or_si256(w[0], at_fifth(_mm256_slli_epi16::<4>(plane)));
        w[1] = _mm256_or_si256(w[1], at_fifth(_mm256_slli_epi16::<3>(plane)));
        w[2] = _mm256_or_si256(w[2], at_fifth(_mm256_slli_epi16::<2>(plane)));
        w[3] = _mm256_or_si256(w[3], at_fifth(_mm256_slli_epi16::<1>(plane)));
        w[4] = _mm256_or_si256(w[4], at_fifth(plane));
        w[5] = _mm256_or_si256(w[5], at_fifth(_mm256_srli_epi16::<1>(plane)));
        w[6] = _mm256_or_si256(w[6], at_fifth(_mm256_srli_epi16::<2>(plane)));
        w[7] = _mm256_or_si256(w[7], at_fifth(_mm256_srli_epi16::<3>(plane)));
    }
    if BITS == 6 {
        for part in 0..2 {
            let plane = load(4 + part);
            let at_fifth = |plane: __m256i| _mm256_and_si256(plane, _mm256_set1_epi8(0x30));
            let w = &mut w[4 * part..4 * part + 4];
            w[0] = _mm256_or_si256(w[0], at_fifth(_mm256_slli_epi16::<4>(plane)));
            w[1] = _mm256_or_si256(w[1], at_fifth(_mm256_slli_epi16::<2>(plane)));
            w[2] = _mm256_or_si256(w[2], at_fifth(plane));
            w[3] = _mm256_or_si256(w[3], at_fifth(_mm256_srli_epi16::<2>(plane)));
        }
    }
    w
}

/// Sums of code products of eight rows with one token's 32 codes; of 8-bit codes minus 128.
///
/// # Safety
/// 32 codes are readable at `x`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<const BITS: u8>(w: &[__m256i; 8], x: *const i8) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    let mut products = [_mm256_setzero_si256(); 8];
    for c in 0..8 {
        // SAFETY: the caller vouches for 32 codes.
        let x = _mm256_set1_epi32(unsafe { x.cast::<i32>().add(c).read_unaligned() });
        products[c] = if BITS == 8 {
            let w = _mm256_xor_si256(w[c], _mm256_set1_epi8(-128));
            _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), ones)
        } else {
            _mm256_maddubs_epi16(w[c], x)
        };
    }
    // Integer sums are exact in any order; a tree is the shortest wait.
    let [a, b, c, d, e, f, g, h] = products;
    if BITS == 8 {
        let left = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
        let right = _mm256_add_epi32(_mm256_add_epi32(e, f), _mm256_add_epi32(g, h));
        return _mm256_add_epi32(left, right);
    }
    let pairs =
        [_mm256_add_epi16(a, b), _mm256_add_epi16(c, d), _mm256_add_epi16(e, f), _mm256_add_epi16(g, h)];
    let widen = |sum: __m256i| _mm256_madd_epi16(sum, ones);
    if BITS == 6 {
        let left = _mm256_add_epi32(widen(pairs[0]), widen(pairs[1]));
        return _mm256_add_epi32(left, _mm256_add_epi32(widen(pairs[2]), widen(pairs[3])));
    }
    let (left, right) = (_mm256_add_epi16(pairs[0], pairs[1]), _mm256_add_epi16(pairs[2], pairs[3]));
    if BITS == 5 {
        return _mm256_add_epi32(widen(left), widen(right));
    }
    widen(_mm256_add_epi16(left, right))
}

/// Wishes that a cache line, which need not be readable, be near soon.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unused_unsafe, reason = "the intrinsic is unsafe in the oldest compiler that we support")]
pub(super) fn prefetch(line: *const u8) {
    // SAFETY: a hint, which reads nothing and faults nowhere.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

/// Four activation codes in every lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn four_codes(codes: &[i8], at: usize) -> __m256i {
    debug_assert!(at + 4 <= codes.len());
    // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: a token's `cols` codes hold this group.
    _mm256_set1_epi32(unsafe { codes.as_ptr().add(at).cast::<i32>().read_unaligned() })
}

/// Scales and biases of eight rows for the `span`-th 32 columns of a block; biases are of no matter
/// where there are none.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn eight_scales(q: &Quantised, scales: &[u8], span: usize, half: usize) -> [__m256; 2] {
    let has_bias = q.zero.is_none();
    match q.scales {
        Scales::F16 => {
            let scale = eight_halves(scales, half);
            [scale, if has_bias { eight_halves(scales, 2 + half) } else { scale }]
        }
        Scales::F32 => {
            let scale = eight_singles(scales, half);
            [scale, if has_bias { eight_singles(scales, 2 + half) } else { scale }]
        }
        Scales::Factors32 | Scales::Factors16 => {
            let [factors, mins] = q.factors_at();
            let scale =
                _mm256_mul_ps(eight_halves(scales, half), eight_integers(scales, factors, span, half));
            if !has_bias {
                return [scale, scale];
            }
            let min = _mm256_mul_ps(eight_halves(scales, 2 + half), eight_integers(scales, mins, span, half));
            [scale, _mm256_xor_ps(min, _mm256_set1_ps(-0.0))]
        }
    }
}

/// The `index`-th eight halves.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn eight_halves(scales: &[u8], index: usize) -> __m256 {
    let bytes = &scales[16 * index..16 * index + 16];
    // SAFETY: the slice holds eight of them.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// The `index`-th eight singles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_singles(scales: &[u8], index: usize) -> __m256 {
    let bytes = &scales[32 * index..32 * index + 32];
    // SAFETY: the slice holds eight of them.
    unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) }
}

/// The integer factors of a group in eight rows, unsigned; `at` is where the integers begin.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_integers(scales: &[u8], at: usize, group: usize, half: usize) -> __m256 {
    let words = eight_words(scales, at, group, half);
    let shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128(8 * (group as i32 % 4)));
    _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(255)))
}

/// The words of eight rows that hold a group's integer factors and those of its three neighbours.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn eight_words(scales: &[u8], at: usize, group: usize, half: usize) -> __m256i {
    let bytes = &scales[at + 64 * (group / 4) + 32 * half..][..32];
    // SAFETY: the slice holds eight words.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}
