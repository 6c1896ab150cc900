//! Tokenizer: text to ids and ids to bytes.
//!
//! Not a chat template, not a stream: rendering is `template`'s matter, a
//! stream's half characters are [`Detokenizer`]'s.
//!
//! Control tokens (`<|im_end|>` and the like) are never matched by the encoder
//! itself; [`Tokenizer::encode_with_specials`] splits at them first. So ordinary
//! text cannot become a control id by accident. Added tokens that are not
//! control tokens (`<tool_call>`) are matched in every text, as the models'
//! own tokenizers do.

mod build;
mod byte_level;
mod control;
mod detokenizer;
mod pretokenizer;
mod sentencepiece;

use std::borrow::Cow;

use tokenizers::Tokenizer as Library;

use crate::types::{PrepareError, TokenId};
use sentencepiece::SentencePiece;

pub(crate) use build::fallback_byte;
pub use build::{BpeParts, BpeToken, ScoredToken, SentencePieceParts, TokenKind};
pub(crate) use byte_level::char_of as byte_char;
pub(crate) use control::{Controls, looks_like_control};
pub use detokenizer::Detokenizer;
pub use pretokenizer::KNOWN_PRETOKENIZERS;

/// What turns ordinary text into ids.
#[derive(Debug)]
enum Encoder {
    /// Whatever a `tokenizer.json` says, and byte-level BPE.
    Library(Box<Library>),
    /// Merging by score.
    SentencePiece(SentencePiece),
}

impl Encoder {
    /// How many times shorter than a text its tokens' bytes can be; none = any number of times.
    fn shrinks(&self) -> Option<usize> {
        match self {
            // Composing what is written decomposed makes a text at most three times shorter.
            Self::Library(library) => Some(if library.get_normalizer().is_some() { 4 } else { 1 }),
            // U+2581 has three bytes and is read as a space.
            Self::SentencePiece(model) => (!model.drops_text()).then_some(3),
        }
    }

    /// Appends the ids of ordinary text.
    fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PrepareError> {
        match self {
            Self::Library(library) => {
                let encoding = library
                    .encode_fast(text, false)
                    .map_err(|error| PrepareError::Tokenize { message: error.to_string() })?;
                ids.extend(encoding.get_ids().iter().map(|&id| TokenId(id)));
            }
            Self::SentencePiece(model) => model.encode(text, ids),
        }
        Ok(())
    }
}

/// Text to ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    controls: Controls,
    pieces: Pieces,
    bos: Option<TokenId>,
    wants_bos: bool,
    /// Where present, a whole text gets a space before it, unless it begins with one of these.
    first_space: Option<Vec<String>>,
}

/// The bytes that each id stands for, in one allocation.
#[derive(Debug, Default)]
struct Pieces {
    bytes: Vec<u8>,
    /// End of each id's bytes; the start is the end of the one before.
    ends: Vec<u32>,
    control: Vec<bool>,
    /// Bytes of the longest.
    longest: usize,
}

impl Pieces {
    fn push(&mut self, bytes: &[u8], control: bool) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len() as u32);
        self.control.push(control);
        self.longest = self.longest.max(bytes.len());
    }

    fn get(&self, id: TokenId) -> &[u8] {
        let index = id.0 as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.bytes.get(start as usize..end as usize).unwrap_or(&[])
    }
}

impl Tokenizer {
    /// Ids are below this.
    pub fn vocab_size(&self) -> u32 {
        self.pieces.ends.len() as u32
    }

    /// The beginning-of-sequence token, where the model has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Whether a prompt of this model begins with [`Tokenizer::bos`].
    pub fn wants_bos(&self) -> bool {
        self.wants_bos
    }

    /// The id of a control token's exact text.
    pub fn control_id(&self, text: &str) -> Option<TokenId> {
        self.controls.id(text)
    }

    /// Whether the id is a control token: it steers, and gives no text.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.pieces.control.get(id.0 as usize).copied().unwrap_or(false)
    }

    /// The bytes an id stands for, possibly part of a character; empty for an unknown id.
    /// A control token gives its text here.
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.pieces.get(id).to_vec()
    }

    /// Tokens that a text of so many bytes has at the very least.
    pub(crate) fn least_tokens(&self, bytes: usize) -> u32 {
        let Some(shrinks) = self.encoder.shrinks() else { return 0 };
        u32::try_from(bytes / shrinks / self.pieces.longest.max(1)).unwrap_or(u32::MAX)
    }

    /// Encodes ordinary text: text that looks like a control token stays text. No BOS.
    ///
    /// # Errors
    /// `Tokenize` where the encoder fails.
    pub fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, PrepareError> {
        let mut ids = Vec::new();
        self.encode_first(text, &mut ids)?;
        Ok(ids)
    }

    /// Encodes trusted text: the text of a control token becomes its id. No BOS is added.
    ///
    /// # Errors
    /// `Tokenize` where the encoder fails.
    pub fn encode_with_specials(&self, text: &str) -> Result<Vec<TokenId>, PrepareError> {
        self.encode_marked(text, None)
    }

    /// As [`Tokenizer::encode_with_specials`], with `sentinel` deleted from the text between
    /// control tokens after they were found.
    pub(crate) fn encode_marked(
        &self,
        text: &str,
        sentinel: Option<char>,
    ) -> Result<Vec<TokenId>, PrepareError> {
        self.encode_all(text, sentinel, true)
    }

    /// As [`Tokenizer::encode_marked`], for text that stands behind other text.
    pub(crate) fn encode_rest(
        &self,
        text: &str,
        sentinel: Option<char>,
    ) -> Result<Vec<TokenId>, PrepareError> {
        self.encode_all(text, sentinel, false)
    }

    fn encode_all(
        &self,
        text: &str,
        sentinel: Option<char>,
        is_whole: bool,
    ) -> Result<Vec<TokenId>, PrepareError> {
        let mut ids = Vec::new();
        let mut done = 0;
        for found in self.controls.find(text) {
            // Tokens that swallow neighbouring space may overlap the one before.
            let start = found.start.max(done);
            self.encode_between(&text[done..start], sentinel, is_whole && done == 0, &mut ids)?;
            ids.push(found.id);
            done = found.end.max(done);
        }
        self.encode_between(&text[done..], sentinel, is_whole && done == 0, &mut ids)?;
        Ok(ids)
    }

    fn encode_between(
        &self,
        text: &str,
        sentinel: Option<char>,
        is_first: bool,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), PrepareError> {
        let text = match sentinel {
            Some(mark) if text.contains(mark) => Cow::Owned(text.replace(mark, "")),
            _ => Cow::Borrowed(text),
        };
        if is_first { self.encode_first(&text, ids) } else { self.encode_plain(&text, ids) }
    }

    /// Encodes the beginning of a whole text.
    fn encode_first(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PrepareError> {
        if self.puts_space_before(text) {
            return self.encode_plain(&format!(" {text}"), ids);
        }
        self.encode_plain(text, ids)
    }

    /// Whether a whole text that begins so gets a space before it.
    pub(crate) fn puts_space_before(&self, text: &str) -> bool {
        let spared = |unless: &Vec<String>| {
            text.is_empty() || unless.iter().any(|begin| text.starts_with(begin.as_str()))
        };
        self.first_space.as_ref().is_some_and(|unless| !spared(unless))
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PrepareError> {
        if text.is_empty() {
            return Ok(());
        }
        self.encoder.encode(text, ids)
    }

    /// The text of whole ids; bytes that are not UTF-8 become U+FFFD. Control tokens
    /// give their text with `keep_special`, else nothing.
    pub fn decode(&self, ids: &[TokenId], keep_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if keep_special || !self.is_control(id) {
                bytes.extend_from_slice(self.pieces.get(id));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn controls(&self) -> &Controls {
        &self.controls
    }

    /// The bytes an id stands for, see [`Tokenizer::token_bytes`].
    pub(crate) fn piece(&self, id: TokenId) -> &[u8] {
        self.pieces.get(id)
    }

    /// Bytes of text that an id gives in an answer: none for a control token.
    pub(crate) fn text_bytes(&self, id: TokenId) -> &[u8] {
        if self.is_control(id) { &[] } else { self.pieces.get(id) }
    }
}
