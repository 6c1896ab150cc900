//! Unnormalised probabilities: `exp((logit − best) / temperature)`.
//!
//! Own exponential: plain multiplications and additions in a fixed order, so the
//! compiler vectorises it and every machine gets the same bits; relative error
//! below 2·10⁻⁷.

use crate::types::EngineError;

/// The best token: highest logit, lowest id among equals.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Best {
    /// Its id.
    pub id: u32,
    /// Its logit, finite.
    pub logit: f32,
}

/// Finds the best token and refuses NaN, +∞, and rows without a finite logit.
pub(super) fn best(logits: &[f32]) -> Result<Best, EngineError> {
    let top = maximum(logits);
    // A sum is NaN as soon as one of its terms is; comparisons alone would skip over it.
    if !top.is_finite() || has_nan(logits) {
        return Err(EngineError::NotANumber);
    }
    let id = logits.iter().position(|logit| *logit == top).ok_or(EngineError::NotANumber)?;
    Ok(Best { id: id as u32, logit: top })
}

/// The highest value; NaN is passed over.
pub(super) fn maximum(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

fn has_nan(values: &[f32]) -> bool {
    values.chunks(1024).any(|chunk| chunk.iter().fold(false, |nan, value| nan | value.is_nan()))
}

/// `eˣ` for `x ≤ 0`, zero from −87 down (and for −∞): `2ⁿ · p(r)` with `x = n · ln 2 + r`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³: adding it rounds to an integer
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.987_569_2e-4f32;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5.0e-1;
    let value = (p * r) * r + r + 1.0;
    let scale = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x > -87.0 { value * scale } else { 0.0 }
}

/// One token's weight, in `0..=1`.
pub(super) fn weight(logit: f32, top: f32, temperature: f32) -> f64 {
    f64::from(exp((logit - top) / temperature))
}

/// All weights with their ids, ascending.
pub(super) fn weights(logits: &[f32], top: f32, temperature: f32) -> impl Iterator<Item = (u32, f64)> {
    logits.iter().enumerate().map(move |(id, logit)| (id as u32, weight(*logit, top, temperature)))
}

/// Sum of all weights, in one fixed order.
pub(super) fn total(logits: &[f32], top: f32, temperature: f32) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0.0f64; LANES];
    for chunk in logits.chunks(LANES) {
        let mut values = [0.0f32; LANES];
        for (value, logit) in values.iter_mut().zip(chunk) {
            *value = exp((logit - top) / temperature);
        }
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += f64::from(value);
        }
    }
    lanes.iter().sum()
}
