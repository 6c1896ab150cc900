//! Log-probabilities in OpenAI's two shapes.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::types::{ScoredToken, TokenScores};

/// What stands for minus infinity, which JSON does not have.
const NEVER: f32 = -9999.0;

/// Of a chat's choice, whole or a chunk's.
#[derive(Debug, Serialize)]
pub struct ChatScores {
    content: Vec<ChatToken>,
    /// Always null.
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct Entry {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    entry: Entry,
    top_logprobs: Vec<Entry>,
}

/// Of a text completion's choice, whole or a chunk's: lists with an entry for each token.
#[derive(Debug, Serialize)]
pub struct TextScores {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Characters of the answer before each token.
    text_offset: Vec<usize>,
}

/// In a chat's shape.
pub fn chat_scores(scores: &[TokenScores]) -> ChatScores {
    let content = scores.iter().map(|scores| ChatToken {
        entry: entry(&scores.chosen),
        top_logprobs: scores.top.iter().map(entry).collect(),
    });
    ChatScores { content: content.collect(), refusal: None }
}

/// In a text completion's shape; the answer has so many characters before these tokens.
pub fn text_scores(scores: &[TokenScores], mut offset: usize) -> TextScores {
    let mut out = TextScores {
        tokens: Vec::new(),
        token_logprobs: Vec::new(),
        top_logprobs: Vec::new(),
        text_offset: Vec::new(),
    };
    for TokenScores { chosen, top } in scores {
        let token = name(chosen);
        out.text_offset.push(offset);
        offset += String::from_utf8_lossy(&chosen.bytes).chars().count();
        out.token_logprobs.push(finite(chosen.logprob));
        let mut best: BTreeMap<String, f32> =
            top.iter().map(|token| (name(token), finite(token.logprob))).collect();
        // The one that was drawn is told in any case.
        best.entry(token.clone()).or_insert(finite(chosen.logprob));
        out.top_logprobs.push(best);
        out.tokens.push(token);
    }
    out
}

fn entry(token: &ScoredToken) -> Entry {
    let lossy = String::from_utf8_lossy(&token.bytes).into_owned();
    Entry { token: lossy, logprob: finite(token.logprob), bytes: token.bytes.clone() }
}

/// A token's text; of part of a character its bytes, as OpenAI writes them.
fn name(token: &ScoredToken) -> String {
    match std::str::from_utf8(&token.bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let bytes: String = token.bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{bytes}")
        }
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(NEVER)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::types::TokenId;

    fn token(bytes: &[u8], logprob: f32) -> ScoredToken {
        ScoredToken { token: TokenId(0), bytes: bytes.to_vec(), logprob }
    }

    fn scores() -> Vec<TokenScores> {
        let second = token("é".as_bytes(), -0.5);
        vec![
            TokenScores { chosen: token(b"\xf0\x9f", f32::NEG_INFINITY), top: vec![token(b"a", -0.25)] },
            TokenScores { chosen: second.clone(), top: vec![second] },
        ]
    }

    #[test]
    fn a_chat_has_bytes_and_no_infinity() {
        let body = serde_json::to_value(chat_scores(&scores())).unwrap();
        let first = json!({
            "token": "\u{fffd}", "logprob": -9999.0, "bytes": [240, 159],
            "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
        });
        assert_eq!((&body["content"][0], &body["refusal"]), (&first, &Value::Null));
    }

    #[test]
    fn a_text_has_lists_of_one_length() {
        let body = serde_json::to_value(text_scores(&scores(), 7)).unwrap();
        let expected = json!({
            "tokens": ["bytes:\\xf0\\x9f", "é"],
            "token_logprobs": [-9999.0, -0.5],
            "top_logprobs": [{"a": -0.25, "bytes:\\xf0\\x9f": -9999.0}, {"é": -0.5}],
            "text_offset": [7, 8],
        });
        assert_eq!(body, expected);
    }
}
