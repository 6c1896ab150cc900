//! Makes a [`Tokenizer`] from a GGUF file's vocabulary or from `tokenizer.json`.
//!
//! Both are untrusted. The encoder's library may panic on what it does not
//! expect while it is built, so building is fenced.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Library};

use super::control::{Control, Controls, MAX_CONTROL, looks_like_control};
use super::pretokenizer::{self, Rules};
use super::sentencepiece::{BAR, MAX_PIECE, Piece, SentencePiece, Vocabulary};
use super::{Encoder, Pieces, Tokenizer, byte_level};
use crate::types::{LoadError, TokenId};

/// Highest id accepted: a bound on what a hostile file can make us allocate.
const MAX_VOCAB: u32 = 4 << 20;
/// Phi-3's tokens that leave the white space after them alone.
const UNSTRIPPED: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// What kind of token an entry of a vocabulary is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenKind {
    /// Text.
    Normal,
    /// Steers; never made from ordinary text, gives no text.
    Control,
    /// Matched as a whole before anything else, but text.
    UserDefined,
    /// Never produced, never matched.
    Unused,
    /// Stands for text that has no token; only in SentencePiece vocabularies. Otherwise as `Control`.
    Unknown,
    /// One byte, written `<0xNN>`; only in SentencePiece vocabularies.
    Byte,
}

/// An entry of a byte-level vocabulary.
#[derive(Clone, Debug)]
pub struct BpeToken {
    /// Normal tokens in the byte alphabet, others as they are.
    pub text: String,
    /// Its kind.
    pub kind: TokenKind,
}

/// A byte-level BPE vocabulary as GGUF files hold it.
#[derive(Clone, Debug)]
pub struct BpeParts {
    /// By id.
    pub tokens: Vec<BpeToken>,
    /// By rank: two tokens each.
    pub merges: Vec<(String, String)>,
    /// Name of the pre-tokenizer.
    pub pre: String,
    /// Beginning of sequence.
    pub bos: Option<TokenId>,
    /// Whether prompts begin with it; `None` = as usual for the pre-tokenizer.
    pub add_bos: Option<bool>,
}

/// An entry of a SentencePiece vocabulary.
#[derive(Clone, Debug)]
pub struct ScoredToken {
    /// With U+2581 for a space, `<0xNN>` for a byte.
    pub text: String,
    /// Its kind.
    pub kind: TokenKind,
    /// Of two possible merges the better score goes first.
    pub score: f32,
}

/// A SentencePiece vocabulary (merging by score) as GGUF files hold it.
#[derive(Clone, Debug)]
pub struct SentencePieceParts {
    /// By id.
    pub tokens: Vec<ScoredToken>,
    /// Begin every text with a space: prompts, and what follows a special token.
    pub add_space_prefix: bool,
    /// Take runs of spaces as one.
    pub remove_extra_whitespaces: bool,
    /// Control tokens swallow white space after them, but for `<unk>`, `<s>` and `<|endoftext|>`:
    /// Phi-3's do, and its files do not say it.
    pub controls_strip_right: bool,
    /// Beginning of sequence.
    pub bos: Option<TokenId>,
    /// Whether prompts begin with it; `None` = they do.
    pub add_bos: Option<bool>,
}

impl Tokenizer {
    /// Builds the tokenizer of a SentencePiece vocabulary. `path` is for errors.
    ///
    /// # Errors
    /// `Format` for a vocabulary that cannot encode every text.
    pub fn from_sentencepiece(parts: SentencePieceParts, path: &Path) -> Result<Self, LoadError> {
        let mut pieces = Pieces::default();
        let mut controls = Vec::new();
        let mut vocabulary = Vocabulary {
            add_space_prefix: parts.add_space_prefix,
            remove_extra_whitespaces: parts.remove_extra_whitespaces,
            ..Vocabulary::default()
        };
        for (id, token) in (0u32..).zip(parts.tokens) {
            let is_control = matches!(token.kind, TokenKind::Control | TokenKind::Unknown);
            if is_control || token.kind == TokenKind::UserDefined {
                check_length(id, &token.text, path)?;
            }
            let byte = (token.kind == TokenKind::Byte).then(|| fallback_byte(&token.text)).flatten();
            match byte {
                Some(byte) => pieces.push(&[byte], false),
                None if is_control => pieces.push(token.text.as_bytes(), true),
                None => pieces.push(token.text.replace(BAR, " ").as_bytes(), false),
            }
            enter(&mut vocabulary, id, &token, byte, path)?;
            if is_control {
                let rstrip = parts.controls_strip_right && !UNSTRIPPED.contains(&token.text.as_str());
                controls.push(Control { rstrip, ..Control::plain(&token.text, TokenId(id)) });
            }
        }
        let encoder = SentencePiece::new(vocabulary).map_err(|message| format_error(path, message))?;
        let controls = Controls::new(controls).map_err(|message| format_error(path, message))?;
        let wants_bos = parts.bos.is_some() && parts.add_bos.unwrap_or(true);
        Ok(Self {
            encoder: Encoder::SentencePiece(encoder),
            controls,
            pieces,
            bos: parts.bos,
            wants_bos,
            first_space: None,
        })
    }

    /// Builds the tokenizer of a byte-level BPE vocabulary. `path` is for errors.
    ///
    /// # Errors
    /// `Unsupported` for an unknown pre-tokenizer, `Format` for a vocabulary that makes no sense.
    pub fn from_bpe(parts: BpeParts, path: &Path) -> Result<Self, LoadError> {
        let rules = pretokenizer::rules(&parts.pre, path)?;
        let wants_bos = parts.bos.is_some() && parts.add_bos.unwrap_or(rules.bos_by_default);
        let mut pieces = Pieces::default();
        let mut controls = Vec::new();
        let mut added = Vec::new();
        let mut vocab = Vocab::default();
        for (index, token) in parts.tokens.iter().enumerate() {
            let id = index as u32;
            let control = matches!(token.kind, TokenKind::Control | TokenKind::Unknown);
            if control || token.kind == TokenKind::UserDefined {
                check_length(id, &token.text, path)?;
            }
            let bytes = match token.kind {
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => byte_level::decode(&token.text),
                TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => None,
            };
            pieces.push(bytes.as_deref().unwrap_or(token.text.as_bytes()), control);
            // The first of two equal texts wins: ids of the second are never produced.
            vocab.entry(token.text.clone()).or_insert(id);
            if control {
                controls.push(Control::plain(&token.text, TokenId(id)));
            }
            if control || token.kind == TokenKind::UserDefined {
                added.push(AddedToken::from(token.text.clone(), control).normalized(false));
            }
        }
        let merges = parts.merges;
        let encoder = fenced(path, || bpe_encoder(vocab, merges, rules, &added))?;
        let controls = Controls::new(controls).map_err(|message| format_error(path, message))?;
        Ok(Self {
            encoder: Encoder::Library(Box::new(encoder)),
            controls,
            pieces,
            bos: parts.bos,
            wants_bos,
            first_space: None,
        })
    }

    /// Builds the tokenizer of a `tokenizer.json`. `bos` and `eos` are these tokens' texts, `add_bos`
    /// what the folder says about it; `None` = ask the file's post-processor.
    ///
    /// # Errors
    /// `Format` for a file that makes no sense, `Unsupported` for a decoder that is neither
    /// byte-level nor with byte fallback.
    pub fn from_json(
        json: &[u8],
        bos: Option<&str>,
        eos: Option<&str>,
        add_bos: Option<bool>,
        path: &Path,
    ) -> Result<Self, LoadError> {
        let mut document: Value =
            serde_json::from_slice(json).map_err(|error| format_error(path, error.to_string()))?;
        let alphabet = Alphabet::of(&document, path)?;
        check_added(&document, path)?;
        let has_first = take_first_prefix(&mut document, path)?;
        let marked = mark_controls(&mut document, &[bos, eos]);
        let mut encoder = if marked || has_first {
            let json =
                serde_json::to_vec(&document).map_err(|error| format_error(path, error.to_string()))?;
            fenced(path, || Library::from_bytes(&json))?
        } else {
            fenced(path, || Library::from_bytes(json))?
        };
        // Truncation and padding are for training batches, not for prompts.
        encoder.with_padding(None);
        encoder.with_truncation(None).map_err(|error| format_error(path, error.to_string()))?;

        let added = encoder.get_added_tokens_decoder();
        let by_id: HashMap<u32, String> =
            encoder.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        let size = by_id.keys().max().map_or(0, |&id| id.saturating_add(1));
        if size == 0 || size > MAX_VOCAB {
            return Err(format_error(
                path,
                format!("{size} token ids; between 1 and {MAX_VOCAB} are accepted"),
            ));
        }
        let mut pieces = Pieces::default();
        let mut controls = Vec::new();
        for id in 0..size {
            match (added.get(&id), by_id.get(&id)) {
                (Some(token), _) => {
                    // Runs of spaces are added tokens in some vocabularies.
                    let text = match alphabet {
                        Alphabet::ByteFallback if !token.special => token.content.replace(BAR, " "),
                        _ => token.content.clone(),
                    };
                    pieces.push(text.as_bytes(), token.special);
                    if token.special {
                        controls.push(Control {
                            text: token.content.clone(),
                            id: TokenId(id),
                            lstrip: token.lstrip,
                            rstrip: token.rstrip,
                            single_word: token.single_word,
                        });
                    }
                }
                (None, Some(text)) => pieces.push(&alphabet.bytes(text), false),
                (None, None) => pieces.push(&[], false),
            }
        }
        // A space that is there is not doubled, and added tokens are apart from the text after them.
        let first_space = has_first.then(|| {
            let added = added.values().map(|token| token.content.clone()).filter(|text| !text.is_empty());
            [" ".to_owned(), BAR.to_string()].into_iter().chain(added).collect()
        });
        let bos = bos.and_then(|text| encoder.token_to_id(text)).map(TokenId);
        let wants_bos = match (bos, add_bos) {
            (None, _) => false,
            (Some(_), Some(add)) => add,
            (Some(bos), None) => {
                encoder.encode("a", true).is_ok_and(|ids| ids.get_ids().first() == Some(&bos.0))
            }
        };
        encoder.set_encode_special_tokens(true);
        let controls = Controls::new(controls).map_err(|message| format_error(path, message))?;
        Ok(Self {
            encoder: Encoder::Library(Box::new(encoder)),
            controls,
            pieces,
            bos,
            wants_bos,
            first_space,
        })
    }
}

fn check_length(id: u32, text: &str, path: &Path) -> Result<(), LoadError> {
    if text.len() <= MAX_CONTROL {
        return Ok(());
    }
    let message =
        format!("the special or added token {id} has {} bytes; {MAX_CONTROL} are the most", text.len());
    Err(format_error(path, message))
}

fn check_added(document: &Value, path: &Path) -> Result<(), LoadError> {
    for token in document.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let id =
            token.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok()).unwrap_or(u32::MAX);
        check_length(id, token.get("content").and_then(Value::as_str).unwrap_or_default(), path)?;
    }
    Ok(())
}

/// Rewrites `Metaspace` steps that put a space before the first piece of a text: the encoder sees
/// what is between control tokens as texts of their own, each of which would be the first. Whether
/// there were any. The space is put there before normalizing, so what else normalizing may do to
/// it is refused.
fn take_first_prefix(document: &mut Value, path: &Path) -> Result<bool, LoadError> {
    let keeps_space = keeps_space(document.get("normalizer").unwrap_or(&Value::Null));
    let Some(step) = document.get_mut("pre_tokenizer") else { return Ok(false) };
    let is_first = |step: &Value| {
        step.get("type").and_then(Value::as_str) == Some("Metaspace")
            && step.get("prepend_scheme").and_then(Value::as_str) == Some("first")
    };
    let mut found = false;
    let mut rewrite = |step: &mut Value| {
        if is_first(step) {
            step["prepend_scheme"] = "never".into();
            found = true;
        }
    };
    match step.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        Some(steps) => steps.iter_mut().for_each(rewrite),
        None => rewrite(step),
    }
    if found && !keeps_space {
        return Err(LoadError::Unsupported {
            message: format!(
                "the pre-tokenizer in {}: Metaspace with `prepend_scheme` \"first\" after a normalizer that may change spaces",
                path.display()
            ),
        });
    }
    Ok(found)
}

/// Whether a normalizer leaves a space at a text's beginning a space, or makes it a U+2581.
fn keeps_space(normalizer: &Value) -> bool {
    match normalizer.get("type").and_then(Value::as_str) {
        None => normalizer.is_null(),
        Some("NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents") => true,
        Some("Replace") => {
            normalizer.get("pattern") == Some(&serde_json::json!({"String": " "}))
                && normalizer.get("content").and_then(Value::as_str) == Some("\u{2581}")
        }
        Some("Sequence") => normalizer
            .get("normalizers")
            .and_then(Value::as_array)
            .is_some_and(|steps| steps.iter().all(keeps_space)),
        Some(_) => false,
    }
}

/// Makes added tokens special that steer although the file does not say so; whether there were any.
fn mark_controls(document: &mut Value, declared: &[Option<&str>]) -> bool {
    let mut marked = false;
    for token in document.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
        let text = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let is_declared = text.chars().count() > 1 && declared.contains(&Some(text));
        let steers = looks_like_control(text) || is_declared;
        if steers && token.get("special").and_then(Value::as_bool) == Some(false) {
            token["special"] = Value::Bool(true);
            marked = true;
        }
    }
    marked
}

/// Enters a token of a SentencePiece vocabulary where text can become it. The first of two equal
/// texts wins: ids of the second are never produced.
fn enter(
    vocabulary: &mut Vocabulary,
    id: u32,
    token: &ScoredToken,
    byte: Option<u8>,
    path: &Path,
) -> Result<(), LoadError> {
    match token.kind {
        TokenKind::Control => {}
        TokenKind::Unknown => vocabulary.unknown = vocabulary.unknown.or(Some(id)),
        TokenKind::UserDefined => vocabulary.user_defined.push((token.text.replace(' ', "\u{2581}"), id)),
        TokenKind::Byte => {
            let byte = byte.ok_or_else(|| {
                format_error(path, format!("token {id} is said to be a byte; `{}` is none", token.text))
            })?;
            vocabulary.bytes.entry(byte).or_insert(id);
        }
        TokenKind::Normal | TokenKind::Unused => {
            let unused = token.kind == TokenKind::Unused;
            if !unused && token.text.len() > MAX_PIECE {
                let message = format!("token {id} has {} bytes; {MAX_PIECE} are the most", token.text.len());
                return Err(format_error(path, message));
            }
            // What is not a number is no reason to merge early.
            let score = if token.score.is_nan() { f32::NEG_INFINITY } else { token.score };
            let piece = Piece { id, score, unused };
            vocabulary.pieces.entry(token.text.as_str().into()).or_insert(piece);
        }
    }
    Ok(())
}

impl Control {
    fn plain(text: &str, id: TokenId) -> Self {
        Self { text: text.to_owned(), id, lstrip: false, rstrip: false, single_word: false }
    }
}

/// How a `tokenizer.json` writes bytes in its tokens.
#[derive(Clone, Copy)]
enum Alphabet {
    /// One printable character a byte.
    ByteLevel,
    /// U+2581 for a space, `<0xNN>` for a byte.
    ByteFallback,
}

impl Alphabet {
    fn of(document: &Value, path: &Path) -> Result<Self, LoadError> {
        let decoder = document.get("decoder").unwrap_or(&Value::Null);
        let has = |name: &str| {
            let is = |step: &Value| step.get("type").and_then(Value::as_str) == Some(name);
            is(decoder) || decoder.get("decoders").and_then(Value::as_array).is_some_and(|s| s.iter().any(is))
        };
        if has("ByteLevel") {
            Ok(Self::ByteLevel)
        } else if has("ByteFallback") {
            Ok(Self::ByteFallback)
        } else {
            Err(LoadError::Unsupported {
                message: format!(
                    "the decoder in {}; known are byte-level ones and ones with byte fallback",
                    path.display()
                ),
            })
        }
    }

    fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => byte_level::decode(token).unwrap_or_else(|| token.as_bytes().to_vec()),
            Self::ByteFallback => match fallback_byte(token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
        }
    }
}

/// The byte that a token `<0xNN>` stands for.
pub(crate) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

fn bpe_encoder(
    vocab: Vocab,
    merges: Merges,
    rules: Rules,
    added: &[AddedToken],
) -> tokenizers::Result<Library> {
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(rules.ignore_merges).build()?;
    let mut encoder = Library::new(model);
    encoder.with_normalizer(rules.normalizer);
    encoder.with_pre_tokenizer(Some(rules.pre_tokenizer));
    encoder.with_decoder(Some(ByteLevel::default()));
    let (special, plain): (Vec<_>, Vec<_>) = added.iter().cloned().partition(|token| token.special);
    encoder.add_special_tokens(&special);
    encoder.add_tokens(&plain);
    encoder.set_encode_special_tokens(true);
    Ok(encoder)
}

/// Runs a step of building and turns an error or a panic into a `LoadError`.
fn fenced<T>(path: &Path, build: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, LoadError> {
    match catch_unwind(AssertUnwindSafe(build)) {
        Ok(Ok(built)) => Ok(built),
        Ok(Err(error)) => Err(format_error(path, format!("tokenizer: {error}"))),
        Err(_) => Err(format_error(path, "tokenizer: the vocabulary contradicts itself".into())),
    }
}

fn format_error(path: &Path, message: String) -> LoadError {
    LoadError::Format { path: path.to_owned(), message }
}
