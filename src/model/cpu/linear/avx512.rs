//! The int8 product with AVX-512 VNNI; bit for bit [`super::portable`]. x86-64 only.
//!
//! A lane is a row, sixteen at once. `vpdpbusd` adds four unsigned-by-signed
//! products to 32 bits exactly (it is the form without saturation).

use std::arch::x86_64::*;

use super::super::weight::{PANEL_ROWS, ScaleType};
use super::Int8Panel;

/// Products of one panel with `tile.len()` tokens, at most 8, from `token` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    if panel.format.bits == 4 {
        by_tokens::<4>(panel, token, tile);
    } else {
        by_tokens::<8>(panel, token, tile);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn by_tokens<const BITS: u8>(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    let mut done = 0;
    while done < tile.len() {
        let out = &mut tile[done..];
        let at = token + done;
        done += match out.len() {
            1 => pass::<BITS, 1>(panel, at, out),
            2 => pass::<BITS, 2>(panel, at, out),
            3 => pass::<BITS, 3>(panel, at, out),
            4 => pass::<BITS, 4>(panel, at, out),
            5 => pass::<BITS, 5>(panel, at, out),
            6 => pass::<BITS, 6>(panel, at, out),
            7 => pass::<BITS, 7>(panel, at, out),
            _ => pass::<BITS, 8>(panel, at, out),
        };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn pass<const BITS: u8, const M: usize>(
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
        let scale = sixteen_scales(q.scale, scales, 0);
        let bias = if q.zero.is_none() { sixteen_scales(q.scale, scales, 1) } else { _mm512_setzero_ps() };
        for span in 0..q.spans {
            let codes = &block[span * code_bytes..(span + 1) * code_bytes];
            let dots = dots::<BITS, M>(panel, codes, token, group);
            for i in 0..M {
                let at = (token + i) * groups + group;
                let dot = _mm512_sub_epi32(dots[i], _mm512_set1_epi32(zero * x.sums[at]));
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
    let chunks = if BITS == 4 { 4 } else { 8 };
    for chunk in 0..chunks {
        // SAFETY: a group's codes are `chunks` · 64 bytes.
        let w = unsafe { _mm512_loadu_si512(codes.as_ptr().add(64 * chunk).cast()) };
        if BITS == 4 {
            let mask = _mm512_set1_epi8(15);
            let low = _mm512_and_si512(w, mask);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(w), mask);
            for i in 0..M {
                let at = (token + i) * cols + 32 * group + 4 * chunk;
                sums[i] = _mm512_dpbusd_epi32(sums[i], low, four_codes(&panel.x.codes, at));
                sums[i] = _mm512_dpbusd_epi32(sums[i], high, four_codes(&panel.x.codes, at + 16));
            }
        } else {
            for i in 0..M {
                let at = (token + i) * cols + 32 * group + 4 * chunk;
                sums[i] = _mm512_dpbusd_epi32(sums[i], w, four_codes(&panel.x.codes, at));
            }
        }
    }
    sums
}

/// Four activation codes in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn four_codes(codes: &[i8], at: usize) -> __m512i {
    debug_assert!(at + 4 <= codes.len());
    // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: a token's `cols` codes hold this group.
    _mm512_set1_epi32(unsafe { codes.as_ptr().add(at).cast::<i32>().read_unaligned() })
}

/// Sixteen scales (`index` 0) or biases (1) of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_scales(kind: ScaleType, scales: &[u8], index: usize) -> __m512 {
    let bytes = &scales[index * PANEL_ROWS * kind.bytes()..(index + 1) * PANEL_ROWS * kind.bytes()];
    // SAFETY: the slice holds sixteen of them.
    unsafe {
        match kind {
            ScaleType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())),
            ScaleType::F32 => _mm512_loadu_ps(bytes.as_ptr().cast()),
        }
    }
}
