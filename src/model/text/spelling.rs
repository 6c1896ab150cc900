//! Prompts as text beside the ids that spell it: what a list of ids stands for, whether a
//! prompt begins with that, and where in its ids a place of its text is.

use super::{Rendered, TextModel};
use crate::types::{PrepareError, TokenId};

/// A prompt's text without marks and without the token that begins a sequence, as ids spell it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spelled {
    /// Its bytes are those of the ids.
    pub text: String,
    /// Where control tokens stand in it.
    controls: Vec<(usize, TokenId)>,
    /// Bytes that encoding puts before it.
    added: usize,
    /// Bytes of the rendered text that are not in it.
    skipped: usize,
}

impl TextModel {
    /// How the prompt will be spelled.
    pub fn spell(&self, rendered: &Rendered) -> Spelled {
        let mut text = rendered.text();
        let mut controls = Vec::new();
        let (mut marks, mut seen) = (0, 0);
        for found in self.tokenizer.controls().find(&rendered.text) {
            if let Some(mark) = rendered.sentinel {
                marks += rendered.text[seen..found.start.max(seen)].matches(mark).count() * mark.len_utf8();
                seen = found.start.max(seen);
            }
            controls.push((found.start - marks, found.id));
        }
        let begins =
            controls.first().filter(|(at, id)| *at == 0 && Some(*id) == self.tokenizer.bos()).copied();
        let skipped = begins.map_or(0, |(_, id)| self.tokenizer.piece(id).len());
        let starts_plain = controls.first().is_none_or(|(at, _)| *at > 0);
        let added = usize::from(starts_plain && self.tokenizer.puts_space_before(&text));
        if begins.is_some() {
            controls.remove(0);
            text.drain(..skipped);
        }
        if added > 0 {
            text.insert(0, ' ');
        }
        controls.iter_mut().for_each(|(at, _)| *at = *at + added - skipped);
        Spelled { text, controls, added, skipped }
    }

    /// The text of ids, without the token that begins a sequence.
    pub fn text_of(&self, ids: &[TokenId]) -> Vec<u8> {
        let ids = self.without_bos(ids);
        ids.iter().flat_map(|id| self.tokenizer.piece(*id)).copied().collect()
    }

    /// The prompt's ids, beginning with `known`, if these spell its beginning: the same text, the
    /// same control tokens at the same places, and nothing that would be encoded otherwise because
    /// of what stands before it. `None` where they do not.
    ///
    /// # Errors
    /// `Tokenize` where the encoder fails.
    pub fn encode_behind(
        &self,
        known: &[TokenId],
        spelled: &Spelled,
        rendered: &Rendered,
    ) -> Result<Option<Vec<TokenId>>, PrepareError> {
        let bos = self.tokenizer.bos();
        let begins = bos.is_some() && (spelled.skipped > 0 || self.tokenizer.wants_bos());
        if begins != (bos.is_some() && known.first().copied() == bos) {
            return Ok(None);
        }
        let Some(length) = self.spells_beginning(known, spelled) else { return Ok(None) };
        let after_control = known.last().is_some_and(|id| self.tokenizer.is_control(*id));
        let before_control = spelled.controls.iter().any(|(at, _)| *at == length);
        if !after_control && !before_control {
            return Ok(None);
        }
        let rest = rendered.behind(length + spelled.skipped - spelled.added);
        let mut ids = known.to_vec();
        ids.extend(self.tokenizer.encode_rest(rest, rendered.sentinel)?);
        Ok(Some(ids))
    }

    /// Bytes of the prompt that the ids spell.
    fn spells_beginning(&self, ids: &[TokenId], spelled: &Spelled) -> Option<usize> {
        let (mut at, text) = (0, spelled.text.as_bytes());
        let mut controls = spelled.controls.iter();
        for id in self.without_bos(ids) {
            let piece = self.tokenizer.piece(*id);
            if !text.get(at..)?.starts_with(piece) {
                return None;
            }
            if self.tokenizer.is_control(*id) && controls.next() != Some(&(at, *id)) {
                return None;
            }
            at += piece.len();
        }
        // One that is text here must not be a control token there.
        let clear = controls.next().is_none_or(|(next, _)| *next >= at);
        (clear && at > 0 && at < text.len() && spelled.text.is_char_boundary(at)).then_some(at)
    }

    fn without_bos<'a>(&self, ids: &'a [TokenId]) -> &'a [TokenId] {
        match ids.first() {
            Some(first) if Some(*first) == self.tokenizer.bos() => &ids[1..],
            _ => ids,
        }
    }

    /// How many of the ids lie within the first `bytes` bytes of the text that they spell.
    pub fn tokens_within(&self, ids: &[TokenId], bytes: usize) -> u32 {
        let rest = self.without_bos(ids);
        let begun = (ids.len() - rest.len()) as u32;
        let mut end = 0;
        let within = rest.iter().take_while(|id| {
            end += self.tokenizer.piece(**id).len();
            end <= bytes
        });
        begun + within.count() as u32
    }
}

impl Rendered {
    /// The marked text behind the first `bytes` bytes of the text without marks.
    fn behind(&self, bytes: usize) -> &str {
        let Some(mark) = self.sentinel else { return self.text.get(bytes..).unwrap_or("") };
        let mut plain = 0;
        let at = self.text.char_indices().find(|(_, c)| {
            let is_there = plain >= bytes;
            plain += if *c == mark { 0 } else { c.len_utf8() };
            is_there
        });
        at.map_or("", |(at, _)| &self.text[at..])
    }
}
