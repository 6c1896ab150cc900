//! JSON as it comes: where a value ends, what a string says, how a text is written.

/// Deepest nesting followed.
const MAX_DEPTH: usize = 512;

/// How far a value was followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scan {
    /// All of the text belongs to it, and more may come.
    More,
    /// It ends after so many bytes.
    End(usize),
    /// This byte cannot be.
    Broken(usize),
}

/// Finds the end of a JSON value in text that comes in pieces.
///
/// Follows strings and brackets and takes anything between them that could stand in JSON: it finds an
/// end and does not judge the value, because a model's slips are the client's to see.
#[derive(Debug, Default)]
pub(super) struct JsonScanner {
    /// The brackets that are to come.
    closers: Vec<u8>,
    in_string: bool,
    escaped: bool,
    /// A number or a word has begun.
    in_scalar: bool,
}

impl JsonScanner {
    /// Follows the value through more text, which begins with it or goes on with it.
    pub fn scan(&mut self, text: &str) -> Scan {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                if self.string_ends(byte) && self.closers.is_empty() {
                    return Scan::End(at + 1);
                }
                continue;
            }
            match byte {
                b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t'
                    if self.in_scalar && self.closers.is_empty() =>
                {
                    return Scan::End(at);
                }
                b'"' => self.in_string = true,
                b'{' | b'[' if self.closers.len() == MAX_DEPTH => return Scan::Broken(at),
                b'{' => self.closers.push(b'}'),
                b'[' => self.closers.push(b']'),
                b'}' | b']' => match self.closers.pop() {
                    Some(closer) if closer == byte && self.closers.is_empty() => return Scan::End(at + 1),
                    Some(closer) if closer == byte => {}
                    _ => return Scan::Broken(at),
                },
                b',' | b':' if self.closers.is_empty() => return Scan::Broken(at),
                b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' => {}
                b'+' | b'-' | b'.' => self.in_scalar = true,
                byte if byte.is_ascii_alphanumeric() => self.in_scalar = true,
                _ => return Scan::Broken(at),
            }
        }
        Scan::More
    }

    /// Whether a string that this byte stands in ends with it.
    fn string_ends(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
        !self.in_string
    }
}

/// Decodes what stands between a JSON string's quotes, piece by piece.
#[derive(Debug, Default)]
pub(super) struct StringDecoder {
    /// An escape that is not whole: `\`, or `\u` with digits; a first half of a pair before it.
    escape: String,
}

impl StringDecoder {
    /// The text of a piece. Escapes that mean nothing stay as they are.
    pub fn push(&mut self, piece: &str) -> String {
        let mut text = String::new();
        for char in piece.chars() {
            if self.escape.is_empty() && char != '\\' {
                text.push(char);
                continue;
            }
            self.escape.push(char);
            if self.is_whole() {
                text.push_str(&self.finish());
            }
        }
        text
    }

    /// What an escape at the end says.
    pub fn finish(&mut self) -> String {
        let escape = std::mem::take(&mut self.escape);
        serde_json::from_str(&format!("\"{escape}\"")).unwrap_or(escape)
    }

    /// Whether the escape needs no more characters.
    fn is_whole(&self) -> bool {
        match self.escape.as_bytes() {
            [b'\\'] => false,
            // The first half of a pair waits for the other.
            [b'\\', b'u', b'd' | b'D', b'8'..=b'9' | b'a' | b'b' | b'A' | b'B', rest @ ..] => rest.len() >= 8,
            [b'\\', b'u', digits @ ..] => digits.len() >= 4,
            _ => true,
        }
    }
}

/// A text as JSON writes it, without the quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted.get(1..quoted.len().saturating_sub(1)).unwrap_or_default().to_owned()
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Whether a text is one JSON value.
pub(super) fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ends_at_the_same_place_in_any_pieces() {
        let value = "{\"a\": [1, {\"b\": \"}]\\\"\\\\\"}], \"é\": null}";
        let text = format!("{value}, tail");
        for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let mut scanner = JsonScanner::default();
            let end = match scanner.scan(&text[..cut]) {
                Scan::More => match scanner.scan(&text[cut..]) {
                    Scan::End(end) => cut + end,
                    other => panic!("{other:?}"),
                },
                Scan::End(end) => end,
                other => panic!("{other:?}"),
            };
            assert_eq!(end, value.len(), "cut at {cut}");
        }
        assert_eq!(JsonScanner::default().scan("-1.5e3]"), Scan::End(6));
        assert_eq!(JsonScanner::default().scan("{\"a\": 1]"), Scan::Broken(7));
        assert_eq!(JsonScanner::default().scan("{\"a\": <"), Scan::Broken(6));
        assert_eq!(JsonScanner::default().scan("true"), Scan::More);
    }

    #[test]
    fn a_string_is_decoded_in_any_pieces() {
        let raw = r#"{\"a\":\"é\u00e9\ud83d\ude00\n\\"#;
        for cut in (0..=raw.len()).filter(|cut| raw.is_char_boundary(*cut)) {
            let mut decoder = StringDecoder::default();
            let text = decoder.push(&raw[..cut]) + &decoder.push(&raw[cut..]) + &decoder.finish();
            assert_eq!(text, "{\"a\":\"éé😀\n\\", "cut at {cut}");
        }
        let mut decoder = StringDecoder::default();
        assert_eq!(decoder.push(r"\x\ud83dabcdef") + &decoder.finish(), r"\x\ud83dabcdef");
    }
}
