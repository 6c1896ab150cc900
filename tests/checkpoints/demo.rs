//! Real models against their greedy continuations, on any backend.

use std::path::Path;

use greenroom::model::Engine;
use greenroom::model::ops::Ops;
use greenroom::types::TokenId;

use super::{best, engine, feed};
use crate::common;

/// Below this gap, in nats, two best tokens count as equal.
const TIE: f64 = 1e-3;
/// Largest difference of a log-probability without rounding.
const EXACT: f64 = 1e-2;

/// One prompt and what the exact computation says about it.
pub struct Case {
    /// With the template's control tokens.
    pub prompt: Vec<TokenId>,
    /// Greedy continuation.
    pub tokens: Vec<TokenId>,
    /// Distance of the best token from the second, nats, at every position of `tokens`.
    pub gaps: Vec<f64>,
    /// Five best tokens with their log-probabilities at the first positions.
    pub top: Vec<Vec<(TokenId, f64)>>,
}

fn ids(value: &serde_json::Value) -> Vec<TokenId> {
    serde_json::from_value(value.clone()).expect("token ids")
}

/// The demo model's cases.
pub fn cases() -> Vec<Case> {
    cases_of("golden/smollm2.json")
}

/// The cases of a golden file.
pub fn cases_of(golden: &str) -> Vec<Case> {
    let golden = common::json(golden);
    let cases = golden["cases"].as_array().expect("cases");
    let case = |case: &serde_json::Value| Case {
        prompt: ids(&case["prompt_ids"]),
        tokens: ids(&case["f32"]["tokens"]),
        gaps: serde_json::from_value(case["f32"]["gap_top1_top2"].clone()).expect("gaps"),
        top: serde_json::from_value(case["f32"]["top5_first8"].clone()).expect("log-probabilities"),
    };
    cases.iter().map(case).collect()
}

/// Logits at every position of a case's continuation, the reference's tokens being fed.
fn forced<O: Ops + 'static>(path: &Path, config: &O::Config, cases: &[Case]) -> Vec<Vec<Vec<f32>>> {
    let mut engine = engine::<O>(path, config, 256);
    let mut all = Vec::new();
    for case in cases {
        let sequence = engine.open(None).expect("a sequence");
        let (last, before) = case.prompt.split_last().expect("a prompt");
        // Only the positions that are compared give logits.
        engine.reserve(sequence, before.len() as u32).expect("there is room");
        super::advance(&mut engine, sequence, 0, before);
        let mut rest = vec![*last];
        rest.extend_from_slice(&case.tokens[..case.tokens.len() - 1]);
        all.push(feed(&mut engine, sequence, before.len() as u32, &rest, usize::MAX));
        engine.close(sequence);
    }
    all
}

fn logprob(logits: &[f32], token: TokenId) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - top).exp()).sum();
    f64::from(logits[token.0 as usize] - top) - total.ln()
}

/// Without rounding: the tokens of the exact computation but for ties, and its
/// log-probabilities.
pub fn hold_to_the_exact_tokens<O: Ops + 'static>(path: &Path, config: &O::Config, cases: &[Case]) {
    let (mut tokens, mut compared, mut worst) = (0, 0, 0.0f64);
    for (number, (case, logits)) in cases.iter().zip(forced::<O>(path, config, cases)).enumerate() {
        assert_eq!(logits.len(), case.tokens.len());
        for (at, (logits, token)) in logits.iter().zip(&case.tokens).enumerate() {
            let same = best(logits) == *token;
            assert!(same || case.gaps[at] < TIE, "case {number}: {:?} for {token:?} at {at}", best(logits));
            tokens += usize::from(same);
        }
        for (at, top) in case.top.iter().enumerate() {
            for (token, expected) in top {
                worst = worst.max((logprob(&logits[at], *token) - expected).abs());
                compared += 1;
            }
        }
    }
    let positions: usize = cases.iter().map(|case| case.tokens.len()).sum();
    println!(
        "{}: {tokens} of {positions} tokens as exact; {compared} log-probabilities within {worst:.2e}",
        std::any::type_name::<O>()
    );
    assert!(compared > 0 && worst <= EXACT, "a log-probability is off by {worst}");
}

/// With rounding: the best token wherever the exact computation is sure.
pub fn hold_to_the_sure_tokens<O: Ops + 'static>(path: &Path, config: &O::Config, cases: &[Case]) {
    let (mut sure, mut fair, mut all) = (Share::default(), Share::default(), Share::default());
    for (case, logits) in cases.iter().zip(forced::<O>(path, config, cases)) {
        for ((logits, token), gap) in logits.iter().zip(&case.tokens).zip(&case.gaps) {
            let same = best(logits) == *token;
            all.count(same);
            if *gap >= 0.25 {
                fair.count(same);
            }
            if *gap >= 1.0 {
                sure.count(same);
            }
        }
    }
    println!("{}: gap ≥ 1: {sure}, gap ≥ 0.25: {fair}, all: {all}", std::any::type_name::<O>());
    assert_eq!(sure.same, sure.of, "a token differs although the exact computation is sure");
    assert!(100 * fair.same >= 98 * fair.of, "too many tokens differ: {fair}");
}

#[derive(Default)]
struct Share {
    same: usize,
    of: usize,
}

impl Share {
    fn count(&mut self, same: bool) {
        self.same += usize::from(same);
        self.of += 1;
    }
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", self.same, self.of)
    }
}
