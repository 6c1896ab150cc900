//! [`Simd`] in plain Rust: loops over arrays, which compilers turn into
//! whatever vectors the target has. Nothing specific to a processor.

use super::{LANES, Simd, widen_bf16, widen_f16};

/// Plain Rust; always available.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

impl Simd for Scalar {
    type V = [f32; LANES];
    type U = [u32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        *from
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> Self::V {
        // SAFETY: the caller vouches for 32 readable bytes; the read needs no alignment.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(widen_f16)
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(widen_bf16)
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, to: *mut f32) {
        // SAFETY: the caller vouches for 32 writable bytes; the write needs no alignment.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    fn to_f16(self, v: Self::V) -> [u16; LANES] {
        v.map(|x| half::f16::from_f32(x).to_bits())
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, v: Self::V) -> Self::V {
        v.map(f32::abs)
    }
    #[inline(always)]
    fn zero_below(self, x: Self::V, bound: Self::V, y: Self::V) -> Self::V {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = if x[i] < bound[i] { 0.0 } else { y[i] };
        }
        out
    }
    #[inline(always)]
    fn exp2_integral(self, n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }
    #[inline(always)]
    fn to_i8(self, v: [Self::V; 4]) -> [i8; 4 * LANES] {
        std::array::from_fn(|i| v[i / LANES][i % LANES] as i8)
    }
    #[inline(always)]
    unsafe fn load_u32(self, from: *const u8) -> Self::U {
        // SAFETY: the caller vouches for 32 readable bytes; codes are stored little-endian.
        unsafe { from.cast::<Self::U>().read_unaligned() }.map(u32::from_le)
    }
    #[inline(always)]
    fn field(self, u: Self::U, shift: u32, mask: u32) -> Self::V {
        u.map(|u| ((u >> shift) & mask) as f32)
    }
}
