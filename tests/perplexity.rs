//! Perplexity of the demo model over ordinary prose: what rounding activations and
//! keys and values costs, against the exact computation on the same weights.
//!
//! Every position of a window is scored with the window's tokens before it.
#![cfg(feature = "cpu")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints its figures"
)]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use greenroom::config::{Activations, CpuConfig, KvType};
use greenroom::model::cpu::CpuOps;
use greenroom::model::load;
use greenroom::types::TokenId;

/// Tokens of a window; the first of each is given, not scored.
const WINDOW: usize = 512;
/// Largest share by which rounding may change the perplexity over 10,000 tokens.
const WITHIN: f64 = 0.005;

fn tokens() -> Vec<TokenId> {
    let text = std::fs::read_to_string(common::data("perplexity/alice.txt")).expect("the text is there");
    let model = load::open_text(&common::demo_model()).expect("the demo model's tokenizer");
    model.tokenizer.encode_text(&text).expect("encodes")
}

/// Nats that the model did not expect of `token`.
fn surprise(logits: &[f32], token: TokenId) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - top).exp()).sum();
    total.ln() - f64::from(logits[token.0 as usize] - top)
}

/// The surprise at every scored position.
fn surprises(config: &CpuConfig, tokens: &[TokenId]) -> Vec<f64> {
    let mut engine = checkpoints::engine::<CpuOps>(&common::demo_model(), config, WINDOW as u32);
    let mut all = Vec::new();
    for window in tokens.chunks_exact(WINDOW) {
        let sequence = greenroom::model::Engine::open(&mut engine, None).expect("a sequence");
        let logits = checkpoints::feed(&mut engine, sequence, 0, &window[..WINDOW - 1], 128);
        all.extend(logits.iter().zip(&window[1..]).map(|(logits, next)| surprise(logits, *next)));
        greenroom::model::Engine::close(&mut engine, sequence);
    }
    all
}

/// Perplexities with rounding and without.
fn perplexities(tokens: &[TokenId]) -> (f64, f64) {
    let mut exact = CpuConfig::default();
    (exact.activations, exact.kv) = (Activations::F32, KvType::F32);
    let mean = |values: &[f64]| (values.iter().sum::<f64>() / values.len() as f64).exp();
    let (rounded, exact) = (surprises(&CpuConfig::default(), tokens), surprises(&exact, tokens));
    assert_eq!(rounded.len(), tokens.len() / WINDOW * (WINDOW - 1));
    let (rounded_mean, exact_mean) = (mean(&rounded), mean(&exact));
    println!(
        "perplexity over {} tokens: {rounded_mean:.4} rounded, {exact_mean:.4} exact: {:+.3} %",
        rounded.len(),
        100.0 * (rounded_mean / exact_mean - 1.0)
    );
    (rounded_mean, exact_mean)
}

/// Prose that the model was trained on has perplexities in this range; a broken computation has not.
fn hold(tokens: &[TokenId], within: f64) {
    let (rounded, exact) = perplexities(tokens);
    assert!((3.0..100.0).contains(&exact), "{exact} is no perplexity of English prose");
    assert!((rounded / exact - 1.0).abs() <= within, "{rounded} is not within {within} of {exact}");
}

#[test]
fn rounding_hardly_changes_the_perplexity_of_a_page() {
    // Fewer tokens scatter more.
    hold(&tokens()[..WINDOW], 2.0 * WITHIN);
}

#[test]
#[ignore = "a minute or two of computation; `make test-full` runs it"]
fn rounding_changes_the_perplexity_by_less_than_half_a_percent() {
    let tokens = tokens();
    assert!(tokens.len() >= 20 * WINDOW, "only {} tokens", tokens.len());
    hold(&tokens[..20 * WINDOW], WITHIN);
}
