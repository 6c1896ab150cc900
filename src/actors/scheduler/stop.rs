//! Stop strings: cut exactly, never leaked, independent of how text is split.
//!
//! The rule, for a whole text: the answer ends where the first stop string is complete
//! (the longest one if several are complete there), and everything from that stop
//! string's first character on is dropped. Until then the longest tail that may still
//! become a stop string is withheld.

/// Finds stop strings in text that arrives in pieces.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    strings: Vec<String>,
    held: String,
}

/// What a piece of text released.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Released {
    /// Text that is certainly part of the answer.
    pub(crate) text: String,
    /// The stop string that is complete: nothing follows.
    pub(crate) stopped: Option<String>,
    /// Bytes that were cut off with it.
    pub(crate) dropped: usize,
}

impl StopMatcher {
    /// A matcher for these strings; empty ones are ignored.
    pub(crate) fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|string| !string.is_empty()).cloned().collect();
        Self { strings, held: String::new() }
    }

    /// Takes more text.
    pub(crate) fn push(&mut self, text: &str) -> Released {
        if self.strings.is_empty() {
            return Released { text: text.to_owned(), stopped: None, dropped: 0 };
        }
        self.held.push_str(text);
        if let Some((cut, stop)) = self.first_match() {
            let stopped = Some(stop.to_owned());
            let mut text = std::mem::take(&mut self.held);
            let dropped = text.len() - cut;
            text.truncate(cut);
            return Released { text, stopped, dropped };
        }
        let keep = self.held.len() - self.longest_open_tail();
        let tail = self.held.split_off(keep);
        Released { text: std::mem::replace(&mut self.held, tail), stopped: None, dropped: 0 }
    }

    /// Bytes that are withheld.
    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    /// The text ended without a stop string: releases what was withheld.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that is complete first, and where it begins; the longest among equals.
    fn first_match(&self) -> Option<(usize, &str)> {
        self.strings
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, stop)))
            .min()
            .map(|(_, start, stop)| (start, stop.as_str()))
    }

    /// Bytes at the end of the held text that a stop string begins with.
    fn longest_open_tail(&self) -> usize {
        self.strings.iter().map(|stop| open_tail(&self.held, stop)).max().unwrap_or(0)
    }
}

/// The longest proper prefix of `stop`, in bytes, with which `text` ends.
fn open_tail(text: &str, stop: &str) -> usize {
    (1..stop.len())
        .rev()
        .filter(|length| stop.is_char_boundary(*length))
        .find(|length| text.as_bytes().ends_with(&stop.as_bytes()[..*length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule of the module, read literally off the whole text.
    fn naive(text: &str, stops: &[String]) -> (String, bool) {
        for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
            let head = &text[..end];
            let longest = stops.iter().filter(|stop| head.ends_with(stop.as_str())).map(String::len).max();
            if let Some(length) = longest {
                return (text[..end - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    fn run(pieces: &[&str], stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut out = Vec::new();
        for piece in pieces {
            let released = matcher.push(piece);
            out.push(released.text);
            if released.stopped.is_some() {
                return (out, true);
            }
        }
        out.push(matcher.finish());
        (out, false)
    }

    #[test]
    fn a_stop_string_across_pieces_never_shows_its_first_half() {
        let (out, stopped) = run(&["br", "own", " fox", "x"], &["own fox"]);
        assert_eq!((out, stopped), (vec!["br".into(), String::new(), String::new()], true));
    }

    #[test]
    fn text_that_only_began_like_a_stop_string_is_released() {
        assert_eq!(run(&["?\n"], &["\n"]), (vec!["?".into()], true));
        let (out, stopped) = run(&["ab", "ac"], &["abab"]);
        assert_eq!((out.concat(), stopped), ("abac".into(), false));
        let (out, stopped) = run(&["end ST"], &["STOP"]);
        assert_eq!((out, stopped), (vec!["end ".into(), "ST".into()], false));
    }

    #[test]
    fn overlapping_stop_strings_cut_at_the_one_complete_first() {
        assert_eq!(run(&["abcd"], &["abcd", "bc"]), (vec!["a".into()], true));
        assert_eq!(run(&["xabc"], &["bc", "abc"]), (vec!["x".into()], true));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_split_gives_what_the_rule_says(
            text in "[abé]{0,14}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(chars.len() + 1)).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> =
                cuts.windows(2).map(|pair| chars[pair[0]..pair[1]].iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stop_refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (out, stopped) = run(&pieces, &stop_refs);
            prop_assert_eq!((out.concat(), stopped), naive(&text, &stops));
        }
    }
}
