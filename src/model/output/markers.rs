//! Finds markers in text that may end in the middle of one.

/// How a text begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Begins {
    /// With the marker of this number.
    With(usize),
    /// It is too short to tell.
    Open,
    /// With none.
    No,
}

/// Where the first marker of a text is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// At this byte, the marker of this number.
    At(usize, usize),
    /// Nowhere; from this byte on one may be beginning.
    Open(usize),
}

/// Whether a text begins with one of the markers: the longest that fits, and only once no longer one
/// can come of it.
pub(super) fn begins(text: &str, markers: &[&str]) -> Begins {
    let mut found: Option<usize> = None;
    for (number, marker) in markers.iter().enumerate() {
        if marker.len() > text.len() && marker.starts_with(text) {
            return Begins::Open;
        }
        if text.starts_with(marker) && found.is_none_or(|best| markers[best].len() < marker.len()) {
            found = Some(number);
        }
    }
    found.map_or(Begins::No, Begins::With)
}

/// Looks for the first of the markers.
pub(super) fn find(text: &str, markers: &[&str]) -> Found {
    for (at, byte) in text.bytes().enumerate() {
        // A byte that begins a marker begins a character too.
        if !markers.iter().any(|marker| marker.as_bytes().first() == Some(&byte)) {
            continue;
        }
        match begins(&text[at..], markers) {
            Begins::With(number) => return Found::At(at, number),
            Begins::Open => return Found::Open(at),
            Begins::No => {}
        }
    }
    Found::Open(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_found_whole_or_as_a_beginning_at_the_end() {
        let markers = ["<tool_call>", "<|x|>"];
        assert_eq!(find("a < b <|x|> <tool_call>", &markers), Found::At(6, 1));
        assert_eq!(find("é<tool_", &markers), Found::Open(2));
        assert_eq!(find("é<tool-", &markers), Found::Open(8));
        assert_eq!(begins("", &markers), Begins::Open);
        assert_eq!(begins("<t", &markers), Begins::Open);
        assert_eq!(begins("<ta", &markers), Begins::No);
        assert_eq!(begins("<|x|>y", &markers), Begins::With(1));
    }

    #[test]
    fn a_marker_that_begins_with_another_comes_first() {
        for markers in [["[", "[THINK]"], ["[THINK]", "["]] {
            let number = |marker| markers.iter().position(|known| *known == marker).map(Begins::With);
            assert_eq!(begins("[", &markers), Begins::Open);
            assert_eq!(Some(begins("[T]", &markers)), number("["));
            assert_eq!(Some(begins("[THINK] [", &markers)), number("[THINK]"));
        }
    }
}
