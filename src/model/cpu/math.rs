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

/// `tanh(x)`, off by at most 2e-7; ±1 far out, NaN stays NaN.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let doubled = exp(s, s.add(x, x));
    s.sub(one, s.div(s.splat(2.0), s.add(doubled, one)))
}

/// The error function by Abramowitz and Stegun's 7.1.26, off by at most 5e-7.
#[inline(always)]
fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let size = s.abs(x);
    let t = s.div(one, s.fma(s.splat(0.327_591_1), size, one));
    let mut p = s.splat(1.061_405_4);
    for coefficient in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        p = s.fma(p, t, s.splat(coefficient));
    }
    let tail = s.mul(s.mul(p, t), exp(s, s.sub(s.splat(0.0), s.mul(x, x))));
    let value = s.sub(one, tail);
    // Zero where x is below 0, twice the value elsewhere, less the value: its sign.
    s.sub(s.zero_below(x, s.splat(0.0), s.add(value, value)), value)
}

/// Scales one run of logits and caps them, in place: `cap · tanh(x · scale / cap)`.
pub struct Capped<'a> {
    /// The logits.
    pub x: &'a mut [f32],
    /// Multiplies them.
    pub scale: f32,
    /// Where they are bent to.
    pub softcap: Option<f32>,
}

impl Kernel for Capped<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        let shape = |x: S::V| {
            let scaled = s.mul(x, scale);
            self.softcap.map_or(scaled, |cap| softcapped(s, scaled, cap))
        };
        let (chunks, tail) = self.x.as_chunks_mut::<LANES>();
        for chunk in chunks {
            s.store(shape(s.load(chunk)), chunk);
        }
        for x in tail {
            let mut lanes = [0.0; LANES];
            s.store(shape(s.splat(*x)), &mut lanes);
            *x = lanes[0];
        }
    }
}

/// `cap · tanh(x / cap)`.
#[inline(always)]
pub fn softcapped<S: Simd>(s: S, x: S::V, cap: f32) -> S::V {
    s.mul(s.splat(cap), tanh(s, s.div(x, s.splat(cap))))
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

/// A residual of one row: `out += by · norm(x)`.
pub struct AddResidual<'a> {
    /// The row.
    pub x: &'a [f32],
    /// The norm's weight and eps, where there is one.
    pub norm: Option<(&'a [f32], f32)>,
    /// Multiplies what is added.
    pub by: f32,
    /// As long as the row.
    pub out: &'a mut [f32],
}

impl Kernel for AddResidual<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let by = self.by;
        match self.norm {
            Some((weight, eps)) => {
                let inverse = inverse_rms(s, self.x, eps);
                for ((out, x), weight) in self.out.iter_mut().zip(self.x).zip(weight) {
                    *out += *x * inverse * *weight * by;
                }
            }
            None => self.out.iter_mut().zip(self.x).for_each(|(out, x)| *out += *x * by),
        }
    }
}

/// Layer norm of one row: `out = (x − mean) / sqrt(variance + eps) · weight + bias`.
pub struct LayerNormed<'a> {
    /// The row.
    pub x: &'a [f32],
    /// As long as the row.
    pub weight: &'a [f32],
    /// As long as the row.
    pub bias: &'a [f32],
    /// Added to the variance.
    pub eps: f32,
    /// As long as the row.
    pub out: &'a mut [f32],
}

/// `Σ (x − mean)^power`, power 1 or 2; sixteen partial sums, then a fixed tree.
#[inline(always)]
fn centred_sum<S: Simd>(s: S, x: &[f32], mean: f32, squared: bool) -> f32 {
    let (pairs, tail) = x.as_chunks::<{ 2 * LANES }>();
    let (mut even, mut odd) = (s.splat(0.0), s.splat(0.0));
    let centre = s.splat(mean);
    for pair in pairs {
        let (halves, _) = pair.as_chunks::<LANES>();
        let (a, b) = (s.sub(s.load(&halves[0]), centre), s.sub(s.load(&halves[1]), centre));
        (even, odd) = match squared {
            true => (s.fma(a, a, even), s.fma(b, b, odd)),
            false => (s.add(even, a), s.add(odd, b)),
        };
    }
    let mut lanes = [0.0; LANES];
    s.store(s.add(even, odd), &mut lanes);
    let mut sum = tree_sum(lanes);
    for x in tail {
        let x = *x - mean;
        sum = if squared { x.mul_add(x, sum) } else { sum + x };
    }
    sum
}

impl Kernel for LayerNormed<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.x.len() as f32;
        let mean = centred_sum(s, self.x, 0.0, false) / count;
        let variance = centred_sum(s, self.x, mean, true) / count;
        let inverse = 1.0 / (variance + self.eps).sqrt();
        let rest = self.weight.iter().zip(self.bias);
        for ((out, x), (weight, bias)) in self.out.iter_mut().zip(self.x).zip(rest) {
            *out = (*x - mean) * inverse * *weight + *bias;
        }
    }
}

/// One row in place: `x = act(x + bias)`.
pub struct BiasAct<'a> {
    /// The row.
    pub x: &'a mut [f32],
    /// As long as the row.
    pub bias: &'a [f32],
    /// The activation.
    pub act: Act,
}

impl Kernel for BiasAct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (xs, tail) = self.x.as_chunks_mut::<LANES>();
        let (biases, bias_tail) = self.bias.as_chunks::<LANES>();
        for (x, bias) in xs.iter_mut().zip(biases) {
            s.store(activate(s, self.act, s.add(s.load(x), s.load(bias))), x);
        }
        for (x, bias) in tail.iter_mut().zip(bias_tail) {
            let mut lanes = [0.0; LANES];
            s.store(activate(s, self.act, s.splat(*x + *bias)), &mut lanes);
            *x = lanes[0];
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

/// Two activations are `x · sigmoid(u)`: `u = x`, or `u = 2·sqrt(2/π)·(x + 0.044715·x³)`.
#[inline(always)]
fn activate<S: Simd>(s: S, act: Act, x: S::V) -> S::V {
    let u = match act {
        Act::Gelu => {
            let bent = erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2)));
            return s.mul(s.mul(x, s.splat(0.5)), s.add(s.splat(1.0), bent));
        }
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
