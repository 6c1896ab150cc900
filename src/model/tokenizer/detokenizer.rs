//! Ids to text one at a time, for a stream.
//!
//! Invariant: the pieces of any split of an id sequence join to the text of the
//! whole, and no piece holds half a character.

use std::sync::Arc;

use crate::model::sampler::Scores;
use crate::model::text::TextModel;
use crate::types::{ScoredToken, TokenId, TokenScores};

/// An incremental decoder of one answer. Control tokens give no text, unless a reader wants it.
#[derive(Debug)]
pub struct Detokenizer {
    text: Arc<TextModel>,
    /// Bytes that may still become a character: at most three between calls.
    pending: Vec<u8>,
    /// Control tokens that say something to the answer's reader give their text.
    spells: bool,
}

impl Detokenizer {
    /// Starts an answer.
    pub fn new(text: Arc<TextModel>) -> Self {
        Self { text, pending: Vec::new(), spells: false }
    }

    /// Starts an answer whose text is read by an [`OutputParser`](crate::model::output::OutputParser): control
    /// tokens that are markers to it give their text.
    pub fn with_markers(text: Arc<TextModel>) -> Self {
        Self { spells: true, ..Self::new(text) }
    }

    /// Takes the next id and gives the text that is certain now, possibly none.
    /// Bytes that can never become a character give U+FFFD.
    pub fn push(&mut self, token: TokenId) -> String {
        let tokenizer = &self.text.tokenizer;
        let bytes = match self.spells && self.text.answer_form().spells(token) {
            true => tokenizer.piece(token),
            false => tokenizer.text_bytes(token),
        };
        self.pending.extend_from_slice(bytes);
        let complete = self.pending.len() - incomplete_tail(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..complete]).into_owned();
        self.pending.drain(..complete);
        text
    }

    /// Bytes that wait for the rest of their character.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Scores of a token with what the tokens spell.
    pub fn spelled(&self, token: TokenId, scores: Scores) -> TokenScores {
        let bytes = |token| self.text.tokenizer.token_bytes(token);
        let of = |(token, logprob)| ScoredToken { token, bytes: bytes(token), logprob };
        TokenScores { chosen: of((token, scores.drawn)), top: scores.top.into_iter().map(of).collect() }
    }

    /// Ends the answer: an incomplete character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// How many bytes at the end are the valid beginning of an unfinished character.
fn incomplete_tail(bytes: &[u8]) -> usize {
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(_) => return 0,
            Err(error) => match error.error_len() {
                None => return rest.len() - error.valid_up_to(),
                Some(bad) => rest = &rest[error.valid_up_to() + bad..],
            },
        }
    }
}
