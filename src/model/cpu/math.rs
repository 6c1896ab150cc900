//! Elementwise arithmetic: our own `exp`, norms, gated units.
//!
//! Everything is written once over [`Simd`], in a fixed order, so that results
//! depend neither on the path nor on how many tokens come together. No library
//! function of the system is called per element.

use super::simd::{Kernel, LANES, Simd, tree_sum};
use crate::model::ops::Act;

/// Adding and subtracting this rounds |x| < 2^22 to an integer, ties to even.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Smallest argument of [`exp`] with a normal result; below it the result is 0.
const EXP_MIN: f32 = -87.0;
/// Largest argument of [`exp`] that is told apart.
const EXP_MAX: f32 = 88.0;

/// `e^x`, about 1 ulp; 0 below −87, `e^88` above 88, NaN stays NaN.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Constants first: then `max` and `min` let a NaN in `x` through.
    let clamped = s.min(s.splat(EXP_MAX), s.max(s.splat(EXP_MIN), x));
    let round = s.splat(ROUND);
    let n = s.sub(s.fma(clamped, s.splat(std::f32::consts::LOG2_E), round), round);
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    p = s.fma(p, r, s.splat(1.398_2e-3));
    p = s.fma(p, r, s.splat(8.333_452e-3));
    p = s.fma(p, r, s.splat(4.166_579_6e-2));
    p = s.fma(p, r, s.splat(0.166_666_65));
    p = s.fma(p, r, s.splat(0.5));
    let y = s.add(s.fma(s.mul(r, r), p, r), s.splat(1.0));
    s.zero_below(x, s.splat(EXP_MIN), s.mul(y, s.exp2_integral(n)))
}

/// `e^x` of one number, the same bits as a lane of [`exp`].
#[inline(always)]
pub fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    s.store(exp(s, s.splat(x)), &mut lanes);
    lanes[0]
}

/// Root-mean-square norm of one row: `out = x / sqrt(mean(x²) + eps) · weight`.
pub struct RmsNorm<'a> {
    /// The row.
    pub x: &'a [f32],
    /// As long as the row.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// As long as the row.
    pub out: &'a mut [f32],
}

/// `1 / sqrt(mean(x²) + eps)`; sixteen partial sums, then a fixed tree.
#[inline(always)]
fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let (pairs, tail) = x.as_chunks::<{ 2 * LANES }>();
    let (mut even, mut odd) = (s.splat(0.0), s.splat(0.0));
    for pair in pairs {
        let (halves, _) = pair.as_chunks::<LANES>();
        let (a, b) = (s.load(&halves[0]), s.load(&halves[1]));
        even = s.fma(a, a, even);
        odd = s.fma(b, b, odd);
    }
    let mut lanes = [0.0; LANES];
    s.store(s.add(even, odd), &mut lanes);
    let mut sum = tree_sum(lanes);
    for x in tail {
        sum = x.mul_add(*x, sum);
    }
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let inverse = inverse_rms(s, self.x, self.eps);
        for ((out, x), weight) in self.out.iter_mut().zip(self.x).zip(self.weight) {
            *out = *x * inverse * *weight;
        }
    }
}

/// [`RmsNorm`] in place.
pub struct RmsNormInPlace<'a> {
    /// The row, overwritten.
    pub x: &'a mut [f32],
    /// As long as the row.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

impl Kernel for RmsNormInPlace<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let inverse = inverse_rms(s, self.x, self.eps);
        for (x, weight) in self.x.iter_mut().zip(self.weight) {
            *x = *x * inverse * *weight;
        }
    }
}

/// A gated unit of one row: `out = act(gate) · up`.
pub struct Gated<'a> {
    /// First half.
    pub gate: &'a [f32],
    /// Second half.
    pub up: &'a [f32],
    /// As long as a half.
    pub out: &'a mut [f32],
    /// The activation.
    pub act: Act,
}

/// Both activations are `x · sigmoid(u)`: `u = x`, or `u = 2·sqrt(2/π)·(x + 0.044715·x³)`.
#[inline(always)]
fn activate<S: Simd>(s: S, act: Act, x: S::V) -> S::V {
    let u = match act {
        Act::Silu => x,
        Act::GeluTanh => {
            let cubic = s.mul(s.mul(x, x), s.mul(x, s.splat(0.044_715)));
            s.mul(s.splat(1.595_769), s.add(x, cubic))
        }
    };
    let denominator = s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), u)));
    s.div(x, denominator)
}

impl Kernel for Gated<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gates, gate_tail) = self.gate.as_chunks::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        let (outs, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            s.store(s.mul(activate(s, self.act, s.load(gate)), s.load(up)), out);
        }
        for ((gate, up), out) in gate_tail.iter().zip(up_tail).zip(out_tail) {
            let mut lanes = [0.0; LANES];
            s.store(s.mul(activate(s, self.act, s.splat(*gate)), s.splat(*up)), &mut lanes);
            *out = lanes[0];
        }
    }
}
