//! SentencePiece's BPE by score: neighbours merge to the best-scored piece there is.
//!
//! Not the library's BPE: that one merges by a list of pairs, which these vocabularies do not hold,
//! and a list made from the scores decides ties otherwise.
//!
//! Spaces become U+2581. Characters without a piece become bytes, or the unknown token. The
//! vocabulary is untrusted: any scores, doubles and gaps give some ids, and a text of n bytes costs
//! O(n log n) whatever they are.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use aho_corasick::{AhoCorasick, MatchKind};

use crate::types::TokenId;

/// What stands for a space in pieces.
pub(super) const BAR: char = '\u{2581}';
/// Longest piece that text is merged to, bytes: looking one up costs its length.
pub(super) const MAX_PIECE: usize = 1024;
/// "No neighbour".
const NONE: u32 = u32::MAX;

/// What the encoder is made from.
#[derive(Debug, Default)]
pub(super) struct Vocabulary {
    /// Pieces that text may become: text, id, score, and whether it is only a step to larger ones.
    pub pieces: HashMap<Box<str>, Piece>,
    /// Matched before anything else, spaces as U+2581.
    pub user_defined: Vec<(String, u32)>,
    /// Ids of the bytes that have one.
    pub bytes: HashMap<u8, u32>,
    /// For what is neither a piece nor bytes.
    pub unknown: Option<u32>,
    /// Begin every text with a space.
    pub add_space_prefix: bool,
    /// Take runs of spaces as one, and none at the ends.
    pub remove_extra_whitespaces: bool,
}

/// An entry of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub id: u32,
    pub score: f32,
    /// Never an id of its own: taken apart again where it is left over.
    pub unused: bool,
}

/// The encoder.
#[derive(Debug)]
pub(super) struct SentencePiece {
    vocabulary: Vocabulary,
    user_defined: Option<AhoCorasick>,
    longest: usize,
}

impl SentencePiece {
    /// Checks that every text can be encoded.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Self, String> {
        if vocabulary.unknown.is_none() && vocabulary.bytes.len() < 256 {
            return Err("there is neither an unknown token nor one for every byte".into());
        }
        vocabulary.pieces.retain(|text, _| !text.is_empty() && text.len() <= MAX_PIECE);
        vocabulary.user_defined.retain(|(text, _)| !text.is_empty());
        let longest = vocabulary.pieces.keys().map(|text| text.len()).max().unwrap_or(0);
        let user_defined = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(vocabulary.user_defined.iter().map(|(text, _)| text))
            .map_err(|error| error.to_string())?;
        let user_defined = (!vocabulary.user_defined.is_empty()).then_some(user_defined);
        Ok(Self { vocabulary, user_defined, longest })
    }

    /// Whether a text may have far fewer tokens than its bytes suggest.
    pub fn drops_text(&self) -> bool {
        self.vocabulary.remove_extra_whitespaces
    }

    /// Appends the ids of a text that begins a prompt or follows a control token.
    pub fn encode(&self, text: &str, ids: &mut Vec<TokenId>) {
        let text =
            if self.vocabulary.remove_extra_whitespaces { squeezed(text) } else { Cow::Borrowed(text) };
        let text = text.replace(' ', BAR.encode_utf8(&mut [0; 4]));
        let mut done = 0;
        for found in self.user_defined.iter().flat_map(|automaton| automaton.find_iter(&text)) {
            self.fragment(&text[done..found.start()], ids);
            if let Some((_, id)) = self.vocabulary.user_defined.get(found.pattern().as_usize()) {
                ids.push(TokenId(*id));
            }
            done = found.end();
        }
        self.fragment(&text[done..], ids);
    }

    /// Text without user-defined tokens.
    fn fragment(&self, text: &str, ids: &mut Vec<TokenId>) {
        if text.is_empty() {
            return;
        }
        if self.vocabulary.add_space_prefix {
            let prefixed = format!("{BAR}{text}");
            Merging::new(self, &prefixed).run(ids);
        } else {
            Merging::new(self, text).run(ids);
        }
    }

    fn piece(&self, text: &str) -> Option<&Piece> {
        if text.len() > self.longest { None } else { self.vocabulary.pieces.get(text) }
    }

    /// A character without a piece.
    fn fall_back(&self, text: &str, ids: &mut Vec<TokenId>) {
        let bytes: Option<Vec<u32>> =
            text.bytes().map(|byte| self.vocabulary.bytes.get(&byte).copied()).collect();
        match bytes {
            Some(bytes) => ids.extend(bytes.into_iter().map(TokenId)),
            None => ids.extend(self.vocabulary.unknown.map(TokenId)),
        }
    }
}

/// Runs of spaces as one, none at the ends.
fn squeezed(text: &str) -> Cow<'_, str> {
    let words: Vec<&str> = text.split(' ').filter(|word| !word.is_empty()).collect();
    Cow::Owned(words.join(" "))
}

/// Bytes `start..end` of the text; empty once it has become part of its left neighbour.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    end: usize,
    before: u32,
    after: u32,
}

/// Two neighbours that may merge. `end` tells whether they still are what they were.
struct Pair {
    score: f32,
    left: u32,
    right: u32,
    end: usize,
}

impl Ord for Pair {
    /// The best score first, of equal ones the leftmost.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// One text while it is merged.
struct Merging<'a> {
    model: &'a SentencePiece,
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
    /// How unused pieces were put together: where the second part begins, by start and end.
    seams: HashMap<(usize, usize), usize>,
}

impl<'a> Merging<'a> {
    fn new(model: &'a SentencePiece, text: &'a str) -> Self {
        let count = text.chars().count() as u32;
        let symbols = text
            .char_indices()
            .zip(0u32..)
            .map(|((start, c), index)| Symbol {
                start,
                end: start + c.len_utf8(),
                before: index.checked_sub(1).unwrap_or(NONE),
                after: if index + 1 < count { index + 1 } else { NONE },
            })
            .collect();
        Self { model, text, symbols, queue: BinaryHeap::new(), seams: HashMap::new() }
    }

    fn symbol(&self, index: u32) -> Option<Symbol> {
        self.symbols.get(index as usize).copied()
    }

    /// Enters a pair of neighbours, if there is a piece for it.
    fn offer(&mut self, left: u32, right: u32) {
        let (Some(a), Some(b)) = (self.symbol(left), self.symbol(right)) else { return };
        let Some(piece) = self.model.piece(&self.text[a.start..b.end]) else { return };
        if piece.unused {
            self.seams.insert((a.start, b.end), b.start);
        }
        self.queue.push(Pair { score: piece.score, left, right, end: b.end });
    }

    fn run(mut self, ids: &mut Vec<TokenId>) {
        for right in 1..self.symbols.len() as u32 {
            self.offer(right - 1, right);
        }
        while let Some(pair) = self.queue.pop() {
            self.merge(&pair);
        }
        let mut next = 0;
        while let Some(symbol) = self.symbol(next) {
            self.emit(symbol.start, symbol.end, ids);
            next = symbol.after;
        }
    }

    fn merge(&mut self, pair: &Pair) {
        let (Some(left), Some(right)) = (self.symbol(pair.left), self.symbol(pair.right)) else { return };
        // Either has merged otherwise since.
        let is_stale = left.after != pair.right || right.start == right.end || right.end != pair.end;
        if is_stale || left.start == left.end {
            return;
        }
        if let Some(symbol) = self.symbols.get_mut(pair.left as usize) {
            (symbol.end, symbol.after) = (right.end, right.after);
        }
        if let Some(symbol) = self.symbols.get_mut(pair.right as usize) {
            (symbol.start, symbol.after) = (symbol.end, NONE);
        }
        if let Some(symbol) = self.symbols.get_mut(right.after as usize) {
            symbol.before = pair.left;
        }
        self.offer(left.before, pair.left);
        self.offer(pair.left, right.after);
    }

    /// The id of a finished symbol. Unused pieces are taken apart at their seams.
    fn emit(&self, start: usize, end: usize, ids: &mut Vec<TokenId>) {
        let mut waiting = vec![(start, end)];
        while let Some((start, end)) = waiting.pop() {
            let text = &self.text[start..end];
            match (self.model.piece(text), self.seams.get(&(start, end))) {
                (Some(piece), _) if !piece.unused => ids.push(TokenId(piece.id)),
                (Some(_), Some(&seam)) => waiting.extend([(seam, end), (start, seam)]),
                _ => self.model.fall_back(text, ids),
            }
        }
    }
}
