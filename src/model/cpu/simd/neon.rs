//! [`Simd`] with NEON: two vectors of four lanes. AArch64 only, where NEON is always there.
//!
//! Conversions of halves are `asm!`: their intrinsics need a type that is not stable yet. No products of
//! int8 here, those are [`super::super::linear`]'s.
//!
//! Invariant: a [`Neon`] exists only inside [`run`], whose caller has seen the feature; so every method may
//! use its instructions.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, LANES, Simd};

/// Proof of NEON.
#[derive(Clone, Copy, Debug)]
pub struct Neon {
    _proof: (),
}

/// Compiles a kernel for NEON.
#[target_feature(enable = "neon")]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon { _proof: () })
}

/// Four IEEE halves, widened (exact).
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::model::cpu) fn widen_four(halves: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: an instruction of NEON between registers.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    wide
}

/// Four singles rounded to IEEE halves, ties to even.
#[inline]
#[target_feature(enable = "neon")]
fn narrow_four(wide: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: an instruction of NEON between registers.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {wide:v}.4s",
            halves = lateout(vreg) halves,
            wide = in(vreg) wide,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    halves
}

impl Simd for Neon {
    type V = float32x4x2_t;
    type U = uint32x4x2_t;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        let four = unsafe { vdupq_n_f32(x) };
        float32x4x2_t(four, four)
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> float32x4x2_t {
        // SAFETY: `self` proves NEON; the array is 32 readable bytes.
        unsafe { self.load_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> float32x4x2_t {
        // SAFETY: `self` proves NEON; the caller vouches for 32 readable bytes.
        unsafe { float32x4x2_t(vld1q_f32(from), vld1q_f32(from.add(4))) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> float32x4x2_t {
        // SAFETY: `self` proves NEON; the caller vouches for 16 readable bytes.
        unsafe { float32x4x2_t(widen_four(vld1_u16(from)), widen_four(vld1_u16(from.add(4)))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> float32x4x2_t {
        // SAFETY: `self` proves NEON; the caller vouches for 16 readable bytes.
        unsafe {
            let widen = |four| vreinterpretq_f32_u32(vshll_n_u16::<16>(four));
            float32x4x2_t(widen(vld1_u16(from)), widen(vld1_u16(from.add(4))))
        }
    }
    #[inline(always)]
    fn store(self, v: float32x4x2_t, to: &mut [f32; LANES]) {
        // SAFETY: `self` proves NEON; the array is 32 writable bytes.
        unsafe { self.store_ptr(v, to.as_mut_ptr()) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, v: float32x4x2_t, to: *mut f32) {
        // SAFETY: `self` proves NEON; the caller vouches for 32 writable bytes.
        unsafe {
            vst1q_f32(to, v.0);
            vst1q_f32(to.add(4), v.1);
        }
    }
    #[inline(always)]
    fn to_f16(self, v: float32x4x2_t) -> [u16; LANES] {
        let mut out = [0; LANES];
        // SAFETY: `self` proves NEON; the array is 16 writable bytes.
        unsafe { vst1q_u16(out.as_mut_ptr(), vcombine_u16(narrow_four(v.0), narrow_four(v.1))) };
        out
    }
    #[inline(always)]
    fn add(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe { float32x4x2_t(vaddq_f32(a.0, b.0), vaddq_f32(a.1, b.1)) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe { float32x4x2_t(vsubq_f32(a.0, b.0), vsubq_f32(a.1, b.1)) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe { float32x4x2_t(vmulq_f32(a.0, b.0), vmulq_f32(a.1, b.1)) }
    }
    #[inline(always)]
    fn div(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe { float32x4x2_t(vdivq_f32(a.0, b.0), vdivq_f32(a.1, b.1)) }
    }
    #[inline(always)]
    fn fma(self, a: float32x4x2_t, b: float32x4x2_t, c: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe { float32x4x2_t(vfmaq_f32(c.0, a.0, b.0), vfmaq_f32(c.1, a.1, b.1)) }
    }
    // NEON's own maximum and minimum of a number and NaN are NaN, so they are selected by comparisons.
    #[inline(always)]
    fn max(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe {
            let larger = |a, b| vbslq_f32(vcgtq_f32(a, b), a, b);
            float32x4x2_t(larger(a.0, b.0), larger(a.1, b.1))
        }
    }
    #[inline(always)]
    fn min(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe {
            let smaller = |a, b| vbslq_f32(vcltq_f32(a, b), a, b);
            float32x4x2_t(smaller(a.0, b.0), smaller(a.1, b.1))
        }
    }
    #[inline(always)]
    fn abs(self, v: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe { float32x4x2_t(vabsq_f32(v.0), vabsq_f32(v.1)) }
    }
    #[inline(always)]
    fn zero_below(self, x: float32x4x2_t, bound: float32x4x2_t, y: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe {
            let keep = |x, bound, y| vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, bound));
            let (low, high) = (keep(x.0, bound.0, y.0), keep(x.1, bound.1, y.1));
            float32x4x2_t(vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high))
        }
    }
    #[inline(always)]
    fn exp2_integral(self, n: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe {
            let power = |n| {
                let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
            };
            float32x4x2_t(power(n.0), power(n.1))
        }
    }
    #[inline(always)]
    fn to_i8(self, v: [float32x4x2_t; 4]) -> [i8; 4 * LANES] {
        let mut out = [0; 4 * LANES];
        let (chunks, _) = out.as_chunks_mut::<LANES>();
        for (v, chunk) in v.into_iter().zip(chunks) {
            // SAFETY: `self` proves NEON; a chunk is 8 writable bytes.
            unsafe {
                let four = |v| vqmovn_s32(vcvtq_s32_f32(v));
                vst1_s8(chunk.as_mut_ptr(), vqmovn_s16(vcombine_s16(four(v.0), four(v.1))));
            }
        }
        out
    }
    #[inline(always)]
    fn top(self, v: float32x4x2_t) -> f32 {
        // SAFETY: `self` proves NEON.
        unsafe { vmaxvq_f32(vmaxq_f32(v.0, v.1)) }
    }
    #[inline(always)]
    fn total(self, v: float32x4x2_t) -> f32 {
        // SAFETY: `self` proves NEON.
        unsafe { vaddvq_f32(vaddq_f32(v.0, v.1)) }
    }
    #[inline(always)]
    unsafe fn load_u32(self, from: *const u8) -> uint32x4x2_t {
        // SAFETY: `self` proves NEON; the caller vouches for 32 readable bytes. Bytes have any alignment.
        unsafe {
            let four = |at| vreinterpretq_u32_u8(vld1q_u8(from.add(at)));
            uint32x4x2_t(four(0), four(16))
        }
    }
    #[inline(always)]
    fn prefetch(self, line: *const u8) {
        // SAFETY: a hint, which no address makes fail.
        unsafe {
            asm!("prfm pldl1keep, [{line}]", line = in(reg) line, options(readonly, nostack, preserves_flags));
        }
    }
    #[inline(always)]
    fn field(self, u: uint32x4x2_t, shift: u32, mask: u32) -> float32x4x2_t {
        // SAFETY: `self` proves NEON.
        unsafe {
            // A shift to the left by a negative number is one to the right.
            let (right, mask) = (vdupq_n_s32(-(shift as i32)), vdupq_n_u32(mask));
            let part = |u| vcvtq_f32_u32(vandq_u32(vshlq_u32(u, right), mask));
            float32x4x2_t(part(u.0), part(u.1))
        }
    }
}
