//! Tokenizer, template, ends and defaults from GGUF's metadata.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value as Json};

use super::super::{ends, malformed, model_id};
use super::reader::{Metadata, Value};
use crate::model::template::ChatTemplate;
use crate::model::text::TextModel;
use crate::model::tokenizer::{
    BpeParts, BpeToken, ScoredToken, SentencePieceParts, TokenKind, Tokenizer, fallback_byte,
    looks_like_control,
};
use crate::types::{LoadError, SamplingOptions, TokenId};

const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ENDS: &[&str] = &[EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TEMPLATE: &str = "tokenizer.chat_template";
const TOOLS_TEMPLATE: &str = "tokenizer.chat_template.tool_use";

/// Vocabulary kinds that are understood.
const KINDS: &str = "gpt2 (byte-level BPE), llama (SentencePiece, merged by score)";

/// The text side; `context` and `facts` are filled in by the caller.
pub(super) fn text_model(metadata: &Metadata<'_>, vocab: usize, path: &Path) -> Result<TextModel, LoadError> {
    let listed = Listed::read(metadata, vocab, path)?;
    let special = special_texts(metadata, &listed, path)?;
    let tokenizer = tokenizer(metadata, &listed, path)?;
    let compile = |source: &str| {
        ChatTemplate::load(source.to_owned(), special.clone()).map_err(|message| malformed(path, message))
    };
    let plain = template_source(metadata)?.map(compile).transpose()?;
    let tools = metadata.optional_text(TOOLS_TEMPLATE)?.map(compile).transpose()?;
    let template = match (plain, tools) {
        (Some(plain), Some(tools)) => Some(plain.with_tools_template(tools)),
        (plain, tools) => plain.or(tools),
    };
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
        answers: OnceLock::new(),
    })
}

/// The vocabulary's lists, of one length.
struct Listed<'m> {
    texts: &'m [&'m str],
    kinds: Option<&'m [i64]>,
    /// Beginning and ends of sequences: they steer whatever their type says.
    declared: Vec<TokenId>,
}

impl<'m> Listed<'m> {
    fn read(metadata: &'m Metadata<'_>, vocab: usize, path: &Path) -> Result<Self, LoadError> {
        let texts = metadata.texts(TOKENS)?.ok_or_else(|| missing(path, TOKENS))?;
        if texts.len() != vocab {
            let message =
                format!("{} tokens in the vocabulary, {vocab} rows in token_embd.weight", texts.len());
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
        Ok(Self { texts, kinds, declared })
    }

    /// Texts and kinds by id.
    fn tokens(&self) -> impl Iterator<Item = (&'m str, TokenKind)> {
        self.texts.iter().enumerate().map(|(id, text)| (*text, self.kind(id, text)))
    }

    fn kind(&self, id: usize, text: &str) -> TokenKind {
        let is_declared = || self.declared.iter().any(|declared| declared.0 as usize == id);
        let steers = || looks_like_control(text) || (text.chars().count() > 1 && is_declared());
        match self.kinds.and_then(|kinds| kinds.get(id)) {
            Some(2) => TokenKind::Unknown,
            Some(3) => TokenKind::Control,
            // Some converters type role markers and ends as the user's own tokens, or as none.
            Some(1 | 4) | None if steers() => TokenKind::Control,
            Some(4) => TokenKind::UserDefined,
            Some(5) => TokenKind::Unused,
            Some(6) => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }
}

fn missing(path: &Path, key: &str) -> LoadError {
    malformed(path, format!("metadata `{key}` is missing"))
}

fn tokenizer(metadata: &Metadata<'_>, listed: &Listed<'_>, path: &Path) -> Result<Tokenizer, LoadError> {
    match metadata.text("tokenizer.ggml.model")? {
        "gpt2" => Tokenizer::from_bpe(bpe_parts(metadata, listed, path)?, path),
        "llama" => Tokenizer::from_sentencepiece(sentencepiece_parts(metadata, listed, path)?, path),
        other => Err(LoadError::Unsupported {
            message: format!(
                "vocabulary kind `{other}` (tokenizer.ggml.model) in {}; known: {KINDS}",
                path.display()
            ),
        }),
    }
}

fn sentencepiece_parts(
    metadata: &Metadata<'_>,
    listed: &Listed<'_>,
    path: &Path,
) -> Result<SentencePieceParts, LoadError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";
    let scores = metadata.floats(SCORES)?.ok_or_else(|| missing(path, SCORES))?;
    if scores.len() != listed.texts.len() {
        let message = format!("{} tokens but {} scores", listed.texts.len(), scores.len());
        return Err(malformed(path, message));
    }
    if metadata.get(CHARSMAP).is_some() {
        return Err(LoadError::Unsupported {
            message: format!(
                "the vocabulary in {} normalizes text by a table of its own (`{CHARSMAP}`)",
                path.display()
            ),
        });
    }
    let unknown = token(metadata, UNKNOWN, listed.texts.len(), path)?.map(|id| id.0 as usize);
    let tokens = listed.tokens().zip(scores).enumerate();
    let tokens = tokens.map(|(id, ((text, kind), &score))| {
        let kind = match kind {
            // Without types bytes are known by their form.
            TokenKind::Normal if listed.kinds.is_none() && fallback_byte(text).is_some() => TokenKind::Byte,
            _ if Some(id) == unknown => TokenKind::Unknown,
            kind => kind,
        };
        ScoredToken { text: text.to_owned(), kind, score }
    });
    Ok(SentencePieceParts {
        tokens: tokens.collect(),
        add_space_prefix: metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
        remove_extra_whitespaces: metadata.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
        controls_strip_right: is_phi3(metadata)?,
        bos: token(metadata, BOS, listed.texts.len(), path)?,
        add_bos: metadata.flag("tokenizer.ggml.add_bos_token")?,
    })
}

/// Whether the model is a Phi-3, by its architecture or its name.
fn is_phi3(metadata: &Metadata<'_>) -> Result<bool, LoadError> {
    let name = metadata.optional_text("general.name")?.unwrap_or_default().to_lowercase();
    Ok(metadata.optional_text("general.architecture")? == Some("phi3")
        || ["phi-3", "phi3"].iter().any(|part| name.contains(part)))
}

fn bpe_parts(metadata: &Metadata<'_>, listed: &Listed<'_>, path: &Path) -> Result<BpeParts, LoadError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = metadata.texts(MERGES)?.ok_or_else(|| missing(path, MERGES))?;
    let merges = merges
        .iter()
        .map(|merge| {
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| malformed(path, format!("the merge `{merge}` is not two tokens")))?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<_, LoadError>>()?;
    let pre = metadata.optional_text("tokenizer.ggml.pre")?;
    if pre.is_none() {
        tracing::warn!(file = %path.display(), "`tokenizer.ggml.pre` is missing: text is split as by `default`, which may not be the model's way");
    }
    let tokens = listed.tokens().map(|(text, kind)| BpeToken { text: text.to_owned(), kind });
    Ok(BpeParts {
        tokens: tokens.collect(),
        merges,
        pre: pre.unwrap_or("default").to_owned(),
        bos: token(metadata, BOS, listed.texts.len(), path)?,
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
    listed: &Listed<'_>,
    path: &Path,
) -> Result<Map<String, Json>, LoadError> {
    let mut special = Map::new();
    for (name, key) in [
        ("bos_token", BOS),
        ("eos_token", EOS),
        ("unk_token", UNKNOWN),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        if let Some(id) = token(metadata, key, listed.texts.len(), path)?
            && let Some(text) = listed.texts.get(id.0 as usize)
        {
            special.insert(name.into(), (*text).into());
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
