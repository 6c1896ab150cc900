//! The text tokens of a speech model: `tokenizer.json`, or the list of a vocabulary.

use std::path::Path;

use super::super::{folder, malformed};
use crate::model::tokenizer::{BpeParts, BpeToken, TokenKind, Tokenizer};
use crate::types::LoadError;

/// Text tokens: GPT-2's, and those of the multilingual models. What follows them is special.
const ENGLISH: usize = 50_256;
const MULTILINGUAL: usize = 50_257;

/// The tokenizer of a folder.
pub(super) fn tokenizer(folder: &Path, vocabulary: usize) -> Result<Tokenizer, LoadError> {
    let json = folder.join("tokenizer.json");
    if let Some(bytes) = folder::optional_bytes(&json)? {
        return Tokenizer::from_json(&bytes, None, None, None, &json);
    }
    let text = if vocabulary > 51_864 { MULTILINGUAL } else { ENGLISH };
    for name in ["vocabulary.json", "vocabulary.txt"] {
        let path = folder.join(name);
        let Some(bytes) = folder::optional_bytes(&path)? else { continue };
        let words: Vec<String> = if name.ends_with(".json") {
            serde_json::from_slice(&bytes).map_err(|error| malformed(&path, error.to_string()))?
        } else {
            let lines = String::from_utf8(bytes).map_err(|_| malformed(&path, "is no UTF-8"))?;
            lines.lines().map(str::to_owned).collect()
        };
        if words.len() < text {
            return Err(malformed(&path, format!("has {} tokens, {text} are needed", words.len())));
        }
        return from_ranks(&words[..text], &path);
    }
    // MLX's converter writes none; models with as many tokens share theirs.
    let (owner, alike) = match vocabulary {
        ..=51_864 => ("openai/whisper-tiny.en", "English models"),
        51_865 => ("openai/whisper-tiny", "multilingual models up to large-v2"),
        _ => ("openai/whisper-large-v3", "large-v3 and turbo models"),
    };
    let message = format!(
        "{0} has weights but no vocabulary: put tokenizer.json of https://huggingface.co/{owner} into {0} (all \
         {alike} have the same; vocabulary.json or vocabulary.txt of a CTranslate2 model does as well)",
        folder.display()
    );
    Err(LoadError::NotFound { message })
}

/// Byte-level BPE by ranks alone: a token's merge joins the two that its letters come to with all
/// merges before it.
fn from_ranks(words: &[String], path: &Path) -> Result<Tokenizer, LoadError> {
    let ranks: std::collections::HashMap<&str, usize> =
        words.iter().enumerate().map(|(rank, word)| (word.as_str(), rank)).collect();
    let mut merges = Vec::new();
    for (rank, word) in words.iter().enumerate() {
        let mut parts: Vec<&str> = word.split("").filter(|part| !part.is_empty()).collect();
        let mut ends: Vec<usize> = parts
            .iter()
            .scan(0, |at, part| {
                *at += part.len();
                Some(*at)
            })
            .collect();
        while parts.len() > 2 {
            let start = |index: usize| ends[index] - parts[index].len();
            let joined = (0..parts.len() - 1).filter_map(|at| {
                let rank = ranks.get(&word[start(at)..ends[at + 1]]).filter(|found| **found < rank)?;
                Some((*rank, at))
            });
            let Some((_, at)) = joined.min() else { break };
            parts[at] = &word[start(at)..ends[at + 1]];
            ends[at] = ends[at + 1];
            parts.remove(at + 1);
            ends.remove(at + 1);
        }
        if let [left, right] = parts[..] {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    let tokens = words.iter().map(|text| BpeToken { text: text.clone(), kind: TokenKind::Normal }).collect();
    Tokenizer::from_bpe(
        BpeParts { tokens, merges, pre: "gpt-2".into(), bos: None, add_bos: Some(false) },
        path,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_vocabulary_is_asked_of_a_model_with_as_many_tokens() {
        let folder = tempfile::tempdir().unwrap();
        for (tokens, owner) in [
            (51_864, "huggingface.co/openai/whisper-tiny.en "),
            (51_865, "huggingface.co/openai/whisper-tiny "),
            (51_866, "huggingface.co/openai/whisper-large-v3 "),
        ] {
            let message = tokenizer(folder.path(), tokens).err().unwrap().to_string();
            assert!(message.contains(owner) && message.contains("tokenizer.json"), "{message}");
        }
    }
}
