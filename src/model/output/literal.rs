//! Values that are nearly JSON, turned into JSON as they come: Python's literals, and Gemma's, whose
//! keys are bare and whose strings stand between markers.
//!
//! `(1, 'it', None)` becomes `[1, "it", null]`. Space is written anew; what is neither a number nor a
//! known word becomes a string.

use super::json::{escaped, is_json, quoted};
use super::markers::{Begins, begins};

/// Deepest nesting followed.
const MAX_DEPTH: usize = 512;
/// Longest number or word, bytes.
const MAX_WORD: usize = 1024;

/// How strings are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Quotes {
    /// What stands on both sides of a string.
    pub marks: &'static [&'static str],
    /// Whether a backslash says something in it.
    pub escapes: bool,
}

/// Python's.
pub(super) const PYTHON: Quotes = Quotes { marks: &["\"", "'"], escapes: true };

/// How far a value was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// So many bytes are used; more is needed.
    More(usize),
    /// The value ended after so many bytes.
    End(usize),
    /// It cannot be read from this byte on.
    Broken(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// A value may begin, or a list end.
    Value,
    /// A value has ended.
    After,
    /// Within a string that ends with the mark of this number.
    String(usize),
    /// Within a string, after a backslash.
    Escape,
    /// Within a number or a word.
    Word,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Container {
    List,
    /// A list between these brackets: `(…)`.
    Tuple,
    /// Before a colon.
    Key,
    /// After it.
    Entry,
}

/// Reads one value.
#[derive(Debug)]
pub(super) struct LiteralReader {
    quotes: Quotes,
    place: Place,
    containers: Vec<Container>,
    /// A comma was read and not written: it may be the last.
    comma: bool,
    /// The word, or the escape, so far.
    held: String,
    /// The mark that the string began with.
    mark: usize,
}

impl LiteralReader {
    /// A reader at the beginning of a value.
    pub fn new(quotes: Quotes) -> Self {
        let (place, containers) = (Place::Value, Vec::new());
        Self { quotes, place, containers, comma: false, held: String::new(), mark: 0 }
    }

    /// Reads on and adds JSON to `out`. What is not used has to be given again, with more.
    pub fn push(&mut self, text: &str, out: &mut String) -> Progress {
        let mut at = 0;
        while let Some(char) = text[at..].chars().next() {
            let read = match self.place {
                Place::String(mark) => self.string(&text[at..], mark, out),
                Place::Escape => self.escape(char, out),
                Place::Word => self.word(char, out),
                Place::Value | Place::After => self.between(&text[at..], char, out),
            };
            match read {
                Progress::More(0) => return Progress::More(at),
                Progress::More(bytes) => at += bytes,
                Progress::End(bytes) => return Progress::End(at + bytes),
                Progress::Broken(_) => return Progress::Broken(at),
            }
            if self.place == Place::After && self.containers.is_empty() {
                return Progress::End(at);
            }
        }
        Progress::More(at)
    }

    /// The text ends: writes a word that had no end, and what was held of a string. Whether `rest`,
    /// which was not used, was that.
    pub fn finish(&mut self, rest: &str, out: &mut String) -> bool {
        if self.place == Place::Word {
            self.end_word(out);
        }
        let in_string = matches!(self.place, Place::String(_));
        if in_string {
            out.push_str(&escaped(rest));
        }
        in_string
    }

    fn between(&mut self, rest: &str, char: char, out: &mut String) -> Progress {
        if char.is_whitespace() {
            return Progress::More(char.len_utf8());
        }
        if self.place == Place::After {
            return self.after(char, out);
        }
        match char {
            '{' => self.open(Container::Key, '{', out),
            '[' => self.open(Container::List, '[', out),
            '(' => self.open(Container::Tuple, '[', out),
            '}' | ']' | ')' => self.close(char, out),
            ',' | ':' => Progress::Broken(0),
            _ => match begins(rest, self.quotes.marks) {
                Begins::With(mark) => {
                    self.separate(out);
                    out.push('"');
                    self.mark = mark;
                    self.place = Place::String(mark);
                    Progress::More(self.quotes.marks[mark].len())
                }
                Begins::Open => Progress::More(0),
                Begins::No => {
                    self.separate(out);
                    self.place = Place::Word;
                    self.word(char, out)
                }
            },
        }
    }

    /// What may follow a value within a container.
    fn after(&mut self, char: char, out: &mut String) -> Progress {
        match (char, self.containers.last_mut()) {
            ('}' | ']' | ')', _) => return self.close(char, out),
            (':', Some(container @ Container::Key)) => {
                *container = Container::Entry;
                out.push_str(": ");
            }
            (',', Some(container @ Container::Entry)) => {
                *container = Container::Key;
                self.comma = true;
            }
            (',', Some(Container::List | Container::Tuple)) => self.comma = true,
            _ => return Progress::Broken(0),
        }
        self.place = Place::Value;
        Progress::More(1)
    }

    fn open(&mut self, container: Container, bracket: char, out: &mut String) -> Progress {
        if self.containers.len() == MAX_DEPTH || self.is_key() {
            return Progress::Broken(0);
        }
        self.separate(out);
        out.push(bracket);
        self.containers.push(container);
        Progress::More(1)
    }

    fn close(&mut self, bracket: char, out: &mut String) -> Progress {
        let ended = self.place == Place::After;
        let closer = match (self.containers.last(), bracket) {
            (Some(Container::List), ']') | (Some(Container::Tuple), ')') => ']',
            (Some(Container::Entry), '}') if ended => '}',
            (Some(Container::Key), '}') if !ended => '}',
            _ => return Progress::Broken(0),
        };
        self.containers.pop();
        out.push(closer);
        self.place = Place::After;
        Progress::More(1)
    }

    /// Writes the comma that is due.
    fn separate(&mut self, out: &mut String) {
        if std::mem::take(&mut self.comma) {
            out.push_str(", ");
        }
    }

    fn is_key(&self) -> bool {
        self.containers.last() == Some(&Container::Key)
    }

    fn string(&mut self, rest: &str, mark: usize, out: &mut String) -> Progress {
        let mark = self.quotes.marks[mark];
        match begins(rest, &[mark]) {
            Begins::With(_) => {
                out.push('"');
                self.place = Place::After;
                return Progress::More(mark.len());
            }
            Begins::Open => return Progress::More(0),
            Begins::No => {}
        }
        if self.quotes.escapes && rest.starts_with('\\') {
            self.place = Place::Escape;
            return Progress::More(1);
        }
        // All up to the next character that can mean something.
        let first = mark.chars().next();
        let is_special = |char: char| Some(char) == first || (self.quotes.escapes && char == '\\');
        let plain =
            rest.char_indices().skip(1).find(|(_, char)| is_special(*char)).map_or(rest.len(), |(at, _)| at);
        out.push_str(&escaped(&rest[..plain]));
        Progress::More(plain)
    }

    /// Takes one character of an escape.
    fn escape(&mut self, char: char, out: &mut String) -> Progress {
        self.held.push(char);
        let length = match self.held.chars().next() {
            Some('x') => 3,
            Some('u') => 5,
            Some('U') => 9,
            _ => 1,
        };
        let is_wrong = self.held.len() > 1 && !char.is_ascii_hexdigit();
        if is_wrong || self.held.len() >= length {
            out.push_str(&python_escape(&std::mem::take(&mut self.held)));
            self.place = Place::String(self.mark);
        }
        Progress::More(char.len_utf8())
    }

    fn word(&mut self, char: char, out: &mut String) -> Progress {
        let ends = matches!(char, ',' | ']' | '}' | ')' | '\n') || (char == ':' && self.is_key());
        if ends {
            self.end_word(out);
            // Within a container what ended it is read next; else it is not the value's.
            return if self.containers.is_empty() { Progress::End(0) } else { self.after_word(char, out) };
        }
        self.held.push(char);
        if self.held.len() > MAX_WORD { Progress::Broken(0) } else { Progress::More(char.len_utf8()) }
    }

    fn after_word(&mut self, char: char, out: &mut String) -> Progress {
        if char == '\n' { Progress::More(1) } else { self.after(char, out) }
    }

    fn end_word(&mut self, out: &mut String) {
        let word = std::mem::take(&mut self.held);
        let word = word.trim();
        match word {
            _ if self.is_key() => out.push_str(&quoted(word)),
            "True" => out.push_str("true"),
            "False" => out.push_str("false"),
            "None" => out.push_str("null"),
            _ if is_json(word) => out.push_str(word),
            _ => out.push_str(&quoted(word)),
        }
        self.place = Place::After;
    }
}

/// What an escape (without its backslash) is in a JSON string.
fn python_escape(escape: &str) -> String {
    let (kind, digits) = escape.split_at(escape.chars().next().map_or(0, char::len_utf8));
    let code = u32::from_str_radix(digits, 16).ok();
    match (kind, code) {
        ("n" | "r" | "t" | "b" | "f" | "\\" | "\"", _) => format!("\\{kind}"),
        ("'", _) => "'".into(),
        ("a", _) => "\\u0007".into(),
        ("v", _) => "\\u000b".into(),
        ("0", _) => "\\u0000".into(),
        ("\n", _) => String::new(),
        // Halves of pairs too: JSON writes them the same way.
        ("x" | "u", Some(code)) => format!("\\u{code:04x}"),
        ("U", Some(code)) => {
            escaped(&char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER).to_string())
        }
        // Unknown ones mean themselves.
        _ => escaped(&format!("\\{escape}")),
    }
}

/// A whole value as JSON, if it can be read.
pub(super) fn to_json(text: &str, quotes: Quotes) -> Option<String> {
    let mut reader = LiteralReader::new(quotes);
    let mut out = String::new();
    let progress = reader.push(text, &mut out);
    let used = match progress {
        Progress::More(used) | Progress::End(used) => used,
        Progress::Broken(_) => return None,
    };
    reader.finish("", &mut out);
    (text[used..].trim().is_empty() && is_json(&out)).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEMMA: Quotes = Quotes { marks: &["<|\"|>"], escapes: false };

    /// A value and what it becomes, read whole and in two pieces cut anywhere.
    fn reads(text: &str, quotes: Quotes, expected: &str) {
        for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let mut reader = LiteralReader::new(quotes);
            let mut out = String::new();
            let used = match reader.push(&text[..cut], &mut out) {
                Progress::More(used) => used,
                Progress::End(used) => {
                    assert_eq!(&text[used..cut], "", "{text} ends early");
                    used
                }
                Progress::Broken(at) => panic!("{text} breaks at {at}"),
            };
            if used < text.len() {
                let progress = reader.push(&text[used..], &mut out);
                assert!(!matches!(progress, Progress::Broken(_)), "{text}: {progress:?}");
            }
            reader.finish("", &mut out);
            assert_eq!(out, expected, "{text} cut at {cut}");
        }
        assert_eq!(to_json(text, quotes).as_deref(), Some(expected));
    }

    #[test]
    fn python_becomes_json() {
        reads(
            "{'a': [1, -2.5, True,], \"b\": (None, 'it')}",
            PYTHON,
            "{\"a\": [1, -2.5, true], \"b\": [null, \"it\"]}",
        );
        reads(r#"'é "q" \' \n \x41 \u00e9 \d \\'"#, PYTHON, r#""é \"q\" ' \n \u0041 \u00e9 \\d \\""#);
        reads("{1: {}, 'k' : []}", PYTHON, "{\"1\": {}, \"k\": []}");
        reads(r"['\n', None]", PYTHON, r#"["\n", null]"#);
        reads("[[1,], (2,),]", PYTHON, "[[1], [2]]");
        reads("[one two, 10:30]", PYTHON, "[\"one two\", \"10:30\"]");
    }

    #[test]
    fn gemma_becomes_json() {
        reads(
            "{city:<|\"|>Zü \"r\"\n\\<|\"|>,n:3,deep:{after:None,flag:true,<|\"|>k<|\"|>:[<|\"|>x<|\"|>]}}",
            GEMMA,
            "{\"city\": \"Zü \\\"r\\\"\\n\\\\\", \"n\": 3, \"deep\": {\"after\": null, \"flag\": true, \"k\": [\"x\"]}}",
        );
    }

    #[test]
    fn what_is_no_value_breaks() {
        for text in ["{'a': 1]", "'a' 'b'", "{'a', 'b'}", "{'a': }", "[,]", "]"] {
            assert_eq!(to_json(text, PYTHON), None, "{text}");
        }
    }

    #[test]
    fn a_value_ends_before_what_is_not_its_own() {
        let mut out = String::new();
        assert_eq!(LiteralReader::new(PYTHON).push("12, b=3", &mut out), Progress::End(2));
        assert_eq!(LiteralReader::new(PYTHON).push("'x', b=3", &mut out), Progress::End(3));
        assert_eq!(LiteralReader::new(PYTHON).push("[1])", &mut out), Progress::End(3));
        assert_eq!(out, "12\"x\"[1]");
    }
}
