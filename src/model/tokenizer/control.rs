//! Control tokens in text: finding the template's own, and breaking those that
//! a request's strings pretend to be.
//!
//! A request's string is made harmless before rendering by a sentinel character
//! inside every occurrence of a control token's text. It is deleted again after
//! the rendered text was split at the real ones, so the model reads exactly what
//! was sent. Tokens of a single character cannot be broken and are never matched.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};

use crate::types::TokenId;

/// What role markers are drawn with: `<|im_start|>`, and DeepSeek's full-width form.
const BARS: [char; 2] = ['|', '\u{ff5c}'];

/// Bytes of the longest control or added token accepted: all beginnings and ends of each are kept.
pub(super) const MAX_CONTROL: usize = 256;

/// A control token and how it treats its neighbourhood.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    /// Exact text, at least two characters.
    pub text: String,
    /// Its id.
    pub id: TokenId,
    /// Swallows the space before it.
    pub lstrip: bool,
    /// Swallows the space after it.
    pub rstrip: bool,
    /// Only matched where no letter, digit or underscore touches it.
    pub single_word: bool,
}

/// A control token found in a text: bytes `start..end` belong to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub start: usize,
    pub end: usize,
    pub id: TokenId,
}

/// All control tokens of a vocabulary.
#[derive(Debug)]
pub(crate) struct Controls {
    tokens: Vec<Control>,
    by_text: HashMap<String, TokenId>,
    /// Leftmost, longest: how the models' own tokenizers split.
    split: Option<AhoCorasick>,
    /// Every occurrence, overlapping ones too: what must be broken.
    all: Option<AhoCorasick>,
    /// Bars that the texts have before their last character. After each of them in a request's
    /// string comes a sentinel, so that a template which deletes something from the string cannot
    /// put a token together either. Other characters are too common to be treated so: templates
    /// look for `</think>` and its like.
    bars: Vec<char>,
    /// All texts, one after another.
    joined: String,
    /// Proper beginnings of the texts.
    beginnings: HashSet<String>,
    /// Proper ends of the texts, of two characters or more: a last character alone, often ">",
    /// is left be, since what a template puts before it would have to be nearly a whole token.
    rests: HashSet<String>,
    /// Bytes of the longest text.
    longest: usize,
}

impl Controls {
    /// Indexes the tokens; those of fewer than two characters are left out.
    pub fn new(mut tokens: Vec<Control>) -> Result<Self, String> {
        tokens.retain(|token| token.text.chars().count() >= 2);
        let build = |kind| {
            AhoCorasick::builder()
                .match_kind(kind)
                .build(tokens.iter().map(|token| &token.text))
                .map(|automaton| (!tokens.is_empty()).then_some(automaton))
                .map_err(|error| error.to_string())
        };
        let split = build(MatchKind::LeftmostLongest)?;
        let all = build(MatchKind::Standard)?;
        let has_bar = |bar: &char| {
            tokens.iter().any(|token| token.text.char_indices().rev().skip(1).any(|(_, c)| c == *bar))
        };
        let bars = BARS.into_iter().filter(has_bar).collect();
        let joined = tokens.iter().flat_map(|token| [token.text.as_str(), "\0"]).collect();
        let by_text = tokens.iter().map(|token| (token.text.clone(), token.id)).collect();
        let cuts =
            || tokens.iter().flat_map(|token| boundaries(&token.text).map(|cut| token.text.split_at(cut)));
        let beginnings =
            cuts().map(|(front, _)| front.to_owned()).filter(|front| !front.is_empty()).collect();
        let rests = cuts()
            .filter(|(front, rest)| !front.is_empty() && first_char_len(rest) < rest.len())
            .map(|(_, rest)| rest.to_owned())
            .collect();
        let longest = tokens.iter().map(|token| token.text.len()).max().unwrap_or(0);
        Ok(Self { tokens, by_text, split, all, bars, joined, beginnings, rests, longest })
    }

    /// The id of a control token's exact text.
    pub fn id(&self, text: &str) -> Option<TokenId> {
        self.by_text.get(text).copied()
    }

    /// Control tokens in a trusted text, from left to right.
    pub fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Found> + 'a {
        self.split.iter().flat_map(move |automaton| {
            automaton.find_iter(text).filter_map(move |found| {
                let token = self.tokens.get(found.pattern().as_usize())?;
                let (before, after) = (&text[..found.start()], &text[found.end()..]);
                if token.single_word && (before.ends_with(is_word) || after.starts_with(is_word)) {
                    return None;
                }
                let start = if token.lstrip { before.trim_end().len() } else { found.start() };
                let end = if token.rstrip { text.len() - after.trim_start().len() } else { found.end() };
                Some(Found { start, end, id: token.id })
            })
        })
    }

    /// Whether [`Controls::break_in`] would change the text.
    pub fn must_break(&self, text: &str) -> bool {
        !self.breaks(text).is_empty()
    }

    /// Puts `sentinel` into every occurrence of a control token's text, and into what could
    /// become one together with the text that a template puts before or after it.
    pub fn break_in<'t>(&self, text: &'t str, sentinel: char) -> Cow<'t, str> {
        let breaks = self.breaks(text);
        if breaks.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut broken = String::with_capacity(text.len() + breaks.len() * sentinel.len_utf8());
        let mut done = 0;
        for at in breaks {
            broken.push_str(&text[done..at]);
            broken.push(sentinel);
            done = at;
        }
        broken.push_str(&text[done..]);
        Cow::Owned(broken)
    }

    /// Byte positions, at character boundaries, where a sentinel belongs.
    fn breaks(&self, text: &str) -> BTreeSet<usize> {
        let Some(all) = &self.all else { return BTreeSet::new() };
        let after_first = |at: usize| at + first_char_len(&text[at..]);
        let mut breaks: BTreeSet<usize> =
            all.find_overlapping_iter(text).map(|found| after_first(found.start())).collect();
        breaks.extend(text.match_indices(self.bars.as_slice()).map(|(at, bar)| at + bar.len()));
        // Templates trim: what counts as the text's ends is what is left then.
        let ended = text.trim_end();
        let skipped = text.len() - text.trim_start().len();
        // The beginning of a token at the text's end …
        for at in boundaries(ended).rev().take_while(|at| ended.len() - at < self.longest) {
            if self.beginnings.contains(&ended[at..]) {
                breaks.insert(after_first(at));
            }
        }
        // … the rest of one at its beginning …
        let begun = &text[skipped..];
        for at in boundaries(begun).skip(1).chain([begun.len()]).take_while(|at| *at < self.longest) {
            if self.rests.contains(&begun[..at]) {
                breaks.insert(after_first(skipped));
            }
        }
        // … or one's middle as a whole. Words are left be: they are keys that templates look up.
        let whole = text.trim();
        let is_key = whole.chars().all(is_word_or_dash);
        if !is_key && whole.len() < self.longest && self.joined.contains(whole) {
            breaks.insert(after_first(skipped));
        }
        breaks
    }
}

/// Whether a token that its file does not call special steers nevertheless: role markers and
/// ends of turns have these forms.
pub(crate) fn looks_like_control(text: &str) -> bool {
    let between = |open: &str, close: &str| {
        let inner = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
        inner.is_some_and(|inner| !inner.is_empty() && !inner.contains(char::is_whitespace))
    };
    BARS.into_iter().any(|bar| between(&format!("<{bar}"), &format!("{bar}>")))
        || matches!(text, "<end_of_turn>" | "<turn|>")
}

/// Byte positions at which a character begins.
fn boundaries(text: &str) -> impl DoubleEndedIterator<Item = usize> {
    text.char_indices().map(|(at, _)| at)
}

fn first_char_len(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

fn is_word_or_dash(c: char) -> bool {
    is_word(c) || c == '-'
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
