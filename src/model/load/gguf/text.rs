//! Tokenizer, template, ends and defaults from GGUF's metadata.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::super::{ends, malformed, model_id};
use super::reader::{Metadata, Value};
use crate::model::template::ChatTemplate;
use crate::model::text::TextModel;
use crate::model::tokenizer::{BpeParts, BpeToken, TokenKind, Tokenizer, looks_like_control};
use crate::types::{LoadError, SamplingOptions, TokenId};

const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ENDS: &[&str] = &[EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
const TEMPLATE: &str = "tokenizer.chat_template";

/// The text side; `context` and `facts` are filled in by the caller.
pub(super) fn text_model(metadata: &Metadata<'_>, vocab: usize, path: &Path) -> Result<TextModel, LoadError> {
    let parts = parts(metadata, vocab, path)?;
    let special = special_texts(metadata, &parts, path)?;
    let tokenizer = Tokenizer::from_bpe(parts, path)?;
    let template = template_source(metadata)?
        .map(|source| ChatTemplate::compile(source.to_owned(), special))
        .transpose()
        .map_err(|message| malformed(path, format!("the chat template does not compile: {message}")))?;
    let mut declared = Vec::new();
    for key in ENDS {
        declared.extend(token(metadata, key, vocab, path)?);
    }
    Ok(TextModel {
        name: model_id(path),
        end_tokens: ends::end_tokens(&tokenizer, declared),
        tokenizer,
        template,
        context: 0,
        defaults: defaults(metadata)?,
        facts: Vec::new(),
    })
}

fn parts(metadata: &Metadata<'_>, vocab: usize, path: &Path) -> Result<BpeParts, LoadError> {
    match metadata.text("tokenizer.ggml.model")? {
        "gpt2" => {}
        "llama" => {
            return Err(LoadError::Unsupported {
                message: format!(
                    "the SentencePiece vocabulary in {}; byte-level BPE (gpt2) is supported",
                    path.display()
                ),
            });
        }
        other => {
            return Err(LoadError::Unsupported {
                message: format!("vocabulary kind `{other}` in {}; known: gpt2", path.display()),
            });
        }
    }
    let missing = |key: &str| malformed(path, format!("metadata `{key}` is missing"));
    let texts = metadata.texts("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
    if texts.len() != vocab {
        let message = format!("{} tokens in the vocabulary, {vocab} rows in token_embd.weight", texts.len());
        return Err(malformed(path, message));
    }
    let kinds = metadata.numbers("tokenizer.ggml.token_type")?;
    if let Some(kinds) = kinds
        && kinds.len() != texts.len()
    {
        return Err(malformed(path, format!("{} tokens but {} token types", texts.len(), kinds.len())));
    }
    let mut declared = Vec::new();
    for key in ENDS.iter().chain([&BOS]) {
        declared.extend(token(metadata, key, vocab, path)?);
    }
    let steers = |id: usize, text: &str| {
        let is_declared = || declared.iter().any(|declared| declared.0 as usize == id);
        looks_like_control(text) || (text.chars().count() > 1 && is_declared())
    };
    let tokens = texts
        .iter()
        .enumerate()
        .map(|(id, text)| {
            let kind = match kinds.and_then(|kinds| kinds.get(id)) {
                // Unknown tokens steer nothing, but a text must not become them either.
                Some(2 | 3) => TokenKind::Control,
                // Some converters type role markers and ends as the user's own tokens, or as none.
                Some(1 | 4) | None if steers(id, text) => TokenKind::Control,
                Some(4) => TokenKind::UserDefined,
                Some(5) => TokenKind::Unused,
                _ => TokenKind::Normal,
            };
            BpeToken { text: (*text).to_owned(), kind }
        })
        .collect();
    let merges = metadata.texts("tokenizer.ggml.merges")?.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
    let merges = merges
        .iter()
        .map(|merge| {
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| malformed(path, format!("the merge `{merge}` is not two tokens")))?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<_, LoadError>>()?;
    Ok(BpeParts {
        tokens,
        merges,
        pre: metadata.optional_text("tokenizer.ggml.pre")?.unwrap_or("default").to_owned(),
        bos: token(metadata, BOS, vocab, path)?,
        add_bos: metadata.flag("tokenizer.ggml.add_bos_token")?,
    })
}

fn token(
    metadata: &Metadata<'_>,
    key: &str,
    vocab: usize,
    path: &Path,
) -> Result<Option<TokenId>, LoadError> {
    match metadata.number(key)? {
        None => Ok(None),
        Some(id) if id < vocab as u64 => Ok(Some(TokenId(id as u32))),
        // -1 as u32: some converters write it for "none".
        Some(id) if id == u64::from(u32::MAX) => Ok(None),
        Some(id) => Err(malformed(path, format!("`{key}` is {id}, the vocabulary has {vocab} tokens"))),
    }
}

/// The template's variables for special tokens.
fn special_texts(
    metadata: &Metadata<'_>,
    parts: &BpeParts,
    path: &Path,
) -> Result<Map<String, Json>, LoadError> {
    let mut special = Map::new();
    for (name, key) in [
        ("bos_token", BOS),
        ("eos_token", EOS),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        if let Some(id) = token(metadata, key, parts.tokens.len(), path)?
            && let Some(token) = parts.tokens.get(id.0 as usize)
        {
            special.insert(name.into(), token.text.clone().into());
        }
    }
    Ok(special)
}

fn template_source<'a>(metadata: &Metadata<'a>) -> Result<Option<&'a str>, LoadError> {
    match metadata.optional_text(TEMPLATE)? {
        Some(source) => Ok(Some(source)),
        // Files with several templates name them; the plain one is the one without a purpose.
        None => metadata.optional_text("tokenizer.chat_template.default"),
    }
}

fn defaults(metadata: &Metadata<'_>) -> Result<SamplingOptions, LoadError> {
    let mut generation = Map::new();
    for (theirs, ours) in [
        ("temp", "temperature"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ] {
        if let Some(value) = metadata.float(&format!("general.sampling.{theirs}"))? {
            generation.insert(ours.into(), value.into());
        }
    }
    if let Some(Value::Int(k)) = metadata.get("general.sampling.top_k")
        && let Ok(k) = u32::try_from(*k)
    {
        generation.insert("top_k".into(), k.into());
    }
    Ok(ends::defaults(&Json::Object(generation)))
}
