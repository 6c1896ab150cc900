//! Drawing a token from one row's logits, on the host.
//!
//! Order: bias, penalties, temperature, top-k, top-p (over what top-k left), min-p,
//! then the inverse of the cumulative distribution over the kept tokens in
//! ascending id order, at **one** uniform number that depends on nothing but the
//! seed and the absolute position of the token ([`uniform`]). So a draw neither
//! depends on the row's neighbours nor on how often the row was restarted, and a
//! device that draws the same way agrees with the host. Ties go to the lowest id.
//!
//! Not here: random state, clocks, batches. The vocabulary is never sorted;
//! filters look at a bound first and order only what can pass it.

use crate::model::SampleFor;
use crate::types::{EngineError, SamplingParams, TokenId};

mod keep;
mod score;
mod weigh;

pub use score::Scores;

/// A drawn token.
#[derive(Clone, PartialEq, Debug)]
pub struct Drawn {
    /// Which.
    pub token: TokenId,
    /// Where they were wanted.
    pub scores: Option<Scores>,
}

/// The uniform number of a draw, in `[0, 1)`, a multiple of 2⁻⁵³.
///
/// With `mix` the finaliser of SplitMix64,
/// `mix(z) = { z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^ z >> 31 }`,
/// and `γ = 0x9E3779B97F4A7C15` (all arithmetic modulo 2⁶⁴), it is
/// `mix(mix(seed + γ) + (position + 1) · γ) >> 11`, divided by 2⁵³.
pub fn uniform(seed: u64, position: u32) -> f64 {
    const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    let key = mix(seed.wrapping_add(GAMMA));
    let hash = mix(key.wrapping_add(GAMMA.wrapping_mul(u64::from(position) + 1)));
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Draws tokens; holds scratch memory only, so one serves all rows.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after bias and penalties, where there are any.
    changed: Vec<f32>,
    /// Occurrences a token id; all zero between draws.
    counts: Vec<u32>,
}

impl Sampler {
    /// Draws the next token of a row from its logits `[vocab]`.
    ///
    /// # Errors
    /// `NotANumber` for a NaN or +∞ among the logits, and when no logit is finite.
    pub fn draw(&mut self, logits: &[f32], wanted: &SampleFor<'_>) -> Result<Drawn, EngineError> {
        let params = wanted.params.as_ref();
        let best = weigh::best(logits)?;
        let modified = if changes_logits(params, wanted.output) {
            self.change(logits, params, wanted.output);
            self.changed.as_slice()
        } else {
            logits
        };
        // A bias is finite and penalties keep finite values finite or take them to
        // ±∞ at worst (an absurd penalty on a huge logit): refused like any infinity.
        let top = if std::ptr::eq(modified, logits) { best } else { weigh::best(modified)? };
        let token = if params.is_greedy() || params.temperature.is_nan() {
            top.id
        } else {
            pick(modified, top.logit, params, uniform(params.seed, wanted.position))
        };
        let scores = wanted.scores.map(|count| score::scores(logits, best, token, count));
        Ok(Drawn { token: TokenId(token), scores })
    }

    /// Fills `changed` with the logits after bias and penalties.
    fn change(&mut self, logits: &[f32], params: &SamplingParams, output: &[TokenId]) {
        self.changed.clear();
        self.changed.extend_from_slice(logits);
        for (token, bias) in &params.logit_bias {
            if let Some(logit) = self.changed.get_mut(token.0 as usize) {
                *logit += bias;
            }
        }
        let seen = window(output, params.penalty_window);
        self.counts.resize(logits.len(), 0);
        for token in seen {
            if let Some(count) = self.counts.get_mut(token.0 as usize) {
                *count += 1;
            }
        }
        for token in seen {
            let index = token.0 as usize;
            // Taking the count makes the first occurrence penalise and the others pass.
            let count = self.counts.get_mut(index).map_or(0, std::mem::take);
            if let (Some(logit), true) = (self.changed.get_mut(index), count > 0) {
                *logit = penalised(*logit, count, params);
            }
        }
    }
}

fn changes_logits(params: &SamplingParams, output: &[TokenId]) -> bool {
    let penalties =
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
    !params.logit_bias.is_empty() || (penalties && !output.is_empty())
}

/// The last `size` tokens of the output, or all.
fn window(output: &[TokenId], size: Option<u32>) -> &[TokenId] {
    let first = size.map_or(0, |size| output.len().saturating_sub(size as usize));
    &output[first..]
}

fn penalised(logit: f32, count: u32, params: &SamplingParams) -> f32 {
    let repeated =
        if logit > 0.0 { logit / params.repetition_penalty } else { logit * params.repetition_penalty };
    repeated - params.presence_penalty - params.frequency_penalty * count as f32
}

/// The kept token at which the cumulative weight passes `uniform · total`.
fn pick(logits: &[f32], top: f32, params: &SamplingParams, uniform: f64) -> u32 {
    let temperature = params.temperature;
    match keep::kept(logits, top, params) {
        Some(kept) => {
            let of = |id: u32| weigh::weight(logits[id as usize], top, temperature);
            let total: f64 = kept.iter().map(|id| of(*id)).sum();
            walk(kept.iter().map(|id| (*id, of(*id))), uniform * total)
        }
        None => {
            let total = weigh::total(logits, top, temperature);
            walk(weigh::weights(logits, top, temperature), uniform * total)
        }
    }
}

/// First id whose cumulative weight exceeds `target`; rounding at the very end
/// gives the last id with any weight.
fn walk(weights: impl Iterator<Item = (u32, f64)>, target: f64) -> u32 {
    let (mut sum, mut last) = (0.0f64, 0u32);
    for (id, weight) in weights {
        if weight > 0.0 {
            last = id;
            sum += weight;
            if sum > target {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests;
