//! Sampling: what a request may ask for, and the resolved parameters of a row.

use super::ids::TokenId;

/// Sampling as asked for: `None` means unset, zero is a value.
///
/// Resolved against the operator's defaults and the model's own
/// `generation_config` into [`SamplingParams`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// Softmax temperature, `0.0..=100.0`; 0 = best token.
    pub temperature: Option<f32>,
    /// Keep the `k` most probable tokens; 0 = all.
    pub top_k: Option<u32>,
    /// Keep the smallest set whose probability reaches this, `0.0..=1.0`; 0 = best token.
    pub top_p: Option<f32>,
    /// Drop tokens below this fraction of the best token's probability, `0.0..=1.0`.
    pub min_p: Option<f32>,
    /// Divides (multiplies) positive (negative) logits of tokens already produced; > 0.
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from logits of tokens already produced, `-2.0..=2.0`.
    pub presence_penalty: Option<f32>,
    /// Subtracted per occurrence from logits of tokens already produced, `-2.0..=2.0`.
    pub frequency_penalty: Option<f32>,
    /// How many of the last output tokens the penalties look at; `None` = all.
    pub penalty_window: Option<u32>,
    /// Added to logits, each `-100.0..=100.0`.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Replays a sampled answer.
    pub seed: Option<u64>,
}

/// Fully resolved sampling of one row. Ranges are those of [`SamplingOptions`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 = best token.
    pub temperature: f32,
    /// 0 = all.
    pub top_k: u32,
    /// 1 = all, 0 = best token.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub repetition_penalty: f32,
    /// 0 = off.
    pub presence_penalty: f32,
    /// 0 = off.
    pub frequency_penalty: f32,
    /// `None` = the whole output.
    pub penalty_window: Option<u32>,
    /// Added to logits before everything else.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Keys every draw of the row together with the absolute position.
    pub seed: u64,
}

impl SamplingParams {
    /// The best token at every position, no penalties.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }

    /// Whether every draw is the best token, so that no random number is needed.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 || self.top_p <= 0.0 || self.top_k == 1
    }
}
