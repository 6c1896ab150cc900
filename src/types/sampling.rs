//! Sampling: what a request may ask for, and the resolved parameters of a row.

use std::fmt;

use super::error::PrepareError;
use super::ids::TokenId;

/// What a sampling value may be, both ends included. One place for every way into the process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// Lowest.
    pub low: f64,
    /// Highest.
    pub high: f64,
}

impl Range {
    /// Of [`SamplingOptions::temperature`].
    pub const TEMPERATURE: Self = Self { low: 0.0, high: 100.0 };
    /// Of [`SamplingOptions::top_p`] and [`SamplingOptions::min_p`].
    pub const PROBABILITY: Self = Self { low: 0.0, high: 1.0 };
    /// Of [`SamplingOptions::repetition_penalty`]: logits must stay finite when divided by it.
    pub const REPETITION: Self = Self { low: 0.01, high: 100.0 };
    /// Of [`SamplingOptions::presence_penalty`] and [`SamplingOptions::frequency_penalty`].
    pub const PENALTY: Self = Self { low: -2.0, high: 2.0 };
    /// Of a token's bias.
    pub const BIAS: Self = Self { low: -100.0, high: 100.0 };

    /// Whether a value lies within; NaN does not. Ends are compared in the value's own precision.
    pub fn holds(self, value: f32) -> bool {
        value >= self.low as f32 && value <= self.high as f32
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.low, self.high)
    }
}

/// Sampling as asked for: `None` means unset, zero is a value.
///
/// Resolved against the operator's defaults and the model's own
/// `generation_config` into [`SamplingParams`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// Softmax temperature, [`Range::TEMPERATURE`]; 0 = best token.
    pub temperature: Option<f32>,
    /// Keep the `k` most probable tokens; 0 = all.
    pub top_k: Option<u32>,
    /// Keep the smallest set whose probability reaches this, [`Range::PROBABILITY`]; 0 = best token.
    pub top_p: Option<f32>,
    /// Drop tokens below this fraction of the best token's probability, [`Range::PROBABILITY`].
    pub min_p: Option<f32>,
    /// Divides (multiplies) positive (negative) logits of tokens already produced, [`Range::REPETITION`].
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from logits of tokens already produced, [`Range::PENALTY`].
    pub presence_penalty: Option<f32>,
    /// Subtracted per occurrence from logits of tokens already produced, [`Range::PENALTY`].
    pub frequency_penalty: Option<f32>,
    /// How many of the last output tokens the penalties look at, at least 1; `None` = all.
    pub penalty_window: Option<u32>,
    /// Added to logits, each [`Range::BIAS`].
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Replays a sampled answer.
    pub seed: Option<u64>,
}

impl SamplingOptions {
    /// Checks every range.
    ///
    /// # Errors
    /// `Field`: the first value that is out of its range.
    pub fn check(&self) -> Result<(), PrepareError> {
        let single = [
            ("temperature", self.temperature, Range::TEMPERATURE),
            ("top_p", self.top_p, Range::PROBABILITY),
            ("min_p", self.min_p, Range::PROBABILITY),
            ("repetition_penalty", self.repetition_penalty, Range::REPETITION),
            ("presence_penalty", self.presence_penalty, Range::PENALTY),
            ("frequency_penalty", self.frequency_penalty, Range::PENALTY),
        ];
        let wrong = |field: String, value: f32, range: Range| PrepareError::Field {
            field,
            message: format!("{value} is not within {range}"),
        };
        for (name, value, range) in single {
            if let Some(value) = value.filter(|value| !range.holds(*value)) {
                return Err(wrong(name.to_owned(), value, range));
            }
        }
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, bias)| !Range::BIAS.holds(*bias)) {
            return Err(wrong(format!("logit_bias.{token}"), *bias, Range::BIAS));
        }
        if self.penalty_window == Some(0) {
            let message = "0 is not at least 1".to_owned();
            return Err(PrepareError::Field { field: "penalty_window".to_owned(), message });
        }
        Ok(())
    }
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
