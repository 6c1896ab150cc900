//! Which tokens end a turn, and the author's sampling defaults.

use serde_json::Value;

use crate::model::tokenizer::Tokenizer;
use crate::types::{SamplingOptions, TokenId};

/// Texts that end a turn in the templates of common models, where they are control tokens.
const END_TEXTS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end▁of▁sentence|>",
];

/// The declared ends and the well-known ones of the vocabulary, each once, in order.
pub(super) fn end_tokens(tokenizer: &Tokenizer, declared: impl IntoIterator<Item = TokenId>) -> Vec<TokenId> {
    let mut ends: Vec<TokenId> = Vec::new();
    // Where answers end with <|return|>, <|end|> only separates their messages.
    let in_channels = tokenizer.control_id("<|return|>").is_some();
    let known = END_TEXTS
        .iter()
        .filter(|text| !(in_channels && **text == "<|end|>"))
        .filter_map(|text| tokenizer.control_id(text));
    for id in declared.into_iter().chain(known) {
        if id.0 < tokenizer.vocab_size() && !ends.contains(&id) {
            ends.push(id);
        }
    }
    ends
}

/// Sampling defaults of a `generation_config.json`. What is out of range is ignored.
pub(super) fn defaults(generation: &Value) -> SamplingOptions {
    let float = |key: &str, low: f64, high: f64| {
        let value = generation.get(key)?.as_f64()?;
        (low..=high).contains(&value).then_some(value as f32)
    };
    let mut options = SamplingOptions {
        repetition_penalty: float("repetition_penalty", 1e-3, 100.0),
        ..SamplingOptions::default()
    };
    if generation.get("do_sample").and_then(Value::as_bool) == Some(false) {
        options.temperature = Some(0.0);
        return options;
    }
    options.temperature = float("temperature", 0.0, 100.0);
    options.top_k = generation.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok());
    options.top_p = float("top_p", 0.0, 1.0);
    options.min_p = float("min_p", 0.0, 1.0);
    options
}

/// One id or a list of them.
pub(super) fn ids(value: Option<&Value>) -> Vec<TokenId> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId);
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}
