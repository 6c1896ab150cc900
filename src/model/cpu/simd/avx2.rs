//! [`Simd`] with AVX2, FMA and F16C. x86-64 only.
//!
//! Invariant: an [`Avx2`] exists only inside [`run`], whose caller has seen the
//! three features; so every method may use their instructions.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2 {
    _proof: (),
}

/// Compiles a kernel for AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2 { _proof: () })
}

impl Simd for Avx2 {
    type V = __m256;
    type U = __m256i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m256 {
        // SAFETY: `self` proves AVX2; the array is 32 readable bytes.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> __m256 {
        // SAFETY: `self` proves AVX2; the caller vouches for 32 readable bytes.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m256 {
        // SAFETY: `self` proves F16C; the caller vouches for 16 readable bytes.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m256 {
        // SAFETY: `self` proves AVX2; the caller vouches for 16 readable bytes.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    fn store(self, v: __m256, to: &mut [f32; LANES]) {
        // SAFETY: `self` proves AVX2; the array is 32 writable bytes.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, v: __m256, to: *mut f32) {
        // SAFETY: `self` proves AVX2; the caller vouches for 32 writable bytes.
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    fn to_f16(self, v: __m256) -> [u16; LANES] {
        let mut out = [0; LANES];
        // SAFETY: `self` proves F16C; the array is 16 writable bytes.
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
            _mm_storeu_si128(out.as_mut_ptr().cast(), halves);
        }
        out
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves FMA.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(self, v: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), v) }
    }
    #[inline(always)]
    fn zero_below(self, x: __m256, bound: __m256, y: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, bound), y) }
    }
    #[inline(always)]
    fn exp2_integral(self, n: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    fn to_i8(self, v: [__m256; 4]) -> [i8; 4 * LANES] {
        let mut out = [0; 4 * LANES];
        // SAFETY: `self` proves AVX2; the array is 32 writable bytes.
        unsafe {
            let (a, b) = (_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            let (c, d) = (_mm256_cvtps_epi32(v[2]), _mm256_cvtps_epi32(v[3]));
            // Packing works within halves of 128 bits: words of four bytes come out as a0 b0 c0 d0 a1 b1 c1 d1.
            let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_permutevar8x32_epi32(packed, order));
        }
        out
    }
    #[inline(always)]
    fn top(self, v: __m256) -> f32 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn total(self, v: __m256) -> f32 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn load_u32(self, from: *const u8) -> __m256i {
        // SAFETY: `self` proves AVX2; the caller vouches for 32 readable bytes.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    fn prefetch(self, line: *const u8) {
        // SAFETY: a hint, which no address makes fail.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
    #[inline(always)]
    fn field(self, u: __m256i, shift: u32, mask: u32) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let shifted = _mm256_srl_epi32(u, _mm_cvtsi32_si128(shift as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask as i32)))
        }
    }
}
