//! A parameter's value between tags, turned into JSON as its schema says.
//!
//! Where a text is wanted it is one, whatever it looks like, and streams. Everything else is held
//! until its end, because only then it is known what it is.

use super::super::json::{escaped, is_json, quoted};
use super::super::literal::{PYTHON, to_json};
use super::super::tools::Types;

/// Words for null.
const NULLS: [&str; 2] = ["null", "None"];
/// What is longer is no word, whatever space is around it, bytes.
const MAX_WORD: usize = 64;

/// One value on its way.
#[derive(Debug)]
pub(super) struct Value {
    types: Types,
    /// A line break on each side belongs to the tags.
    is_framed: bool,
    /// It is certain that it is a text, whose beginning is out.
    is_text: bool,
    /// What is held: all of it, or the line break at a text's end.
    held: String,
}

impl Value {
    /// A value that takes these types.
    pub fn new(types: Types, is_framed: bool) -> Self {
        Self { types, is_framed, is_text: false, held: String::new() }
    }

    /// Bytes held.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Takes more of it and gives JSON.
    pub fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        let mut out = String::new();
        if !self.is_text && self.is_surely_text() {
            self.is_text = true;
            if self.is_framed && self.held.starts_with('\n') {
                self.held.remove(0);
            }
            out.push('"');
        }
        if self.is_text {
            let keep = usize::from(self.is_framed && self.held.ends_with('\n'));
            let tail = self.held.split_off(self.held.len() - keep);
            out.push_str(&escaped(&self.held));
            self.held = tail;
        }
        out
    }

    /// The value ends here.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if self.is_text {
            return "\"".into();
        }
        let mut raw = held.as_str();
        if self.is_framed {
            raw = raw.strip_prefix('\n').unwrap_or(raw);
            raw = raw.strip_suffix('\n').unwrap_or(raw);
        }
        convert(raw, self.types)
    }

    /// The answer ends within it: what was held.
    pub fn cut(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if self.is_text { escaped(&held) } else { held }
    }

    /// Whether nothing but a text can come of what is held.
    fn is_surely_text(&self) -> bool {
        // A line break alone may be both the first and the last.
        if !self.types.string || self.held.is_empty() || self.held == "\n" {
            return false;
        }
        let word = self.held.trim();
        !self.types.null || self.held.len() > MAX_WORD || !NULLS.iter().any(|null| null.starts_with(word))
    }
}

/// A whole value as JSON.
fn convert(raw: &str, types: Types) -> String {
    let word = raw.trim();
    if types.takes_null() && NULLS.contains(&word) {
        return "null".into();
    }
    if types.string {
        return quoted(raw);
    }
    match word {
        "True" | "true" if types.takes_boolean() => "true".into(),
        "False" | "false" if types.takes_boolean() => "false".into(),
        _ if is_json(word) => word.to_owned(),
        _ if word.starts_with(['{', '[', '(']) => to_json(word, PYTHON).unwrap_or_else(|| quoted(raw)),
        _ => quoted(raw),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: Types = Types { string: false, null: false, boolean: false, other: false };
    const OTHER: Types = Types { other: true, ..UNKNOWN };
    const NULLABLE: Types = Types { null: true, ..Types::STRING };

    /// The JSON of a value that comes in two pieces, cut anywhere.
    fn reads(raw: &str, types: Types, expected: &str) {
        for cut in (0..=raw.len()).filter(|cut| raw.is_char_boundary(*cut)) {
            let mut value = Value::new(types, true);
            let json = value.push(&raw[..cut]) + &value.push(&raw[cut..]) + &value.finish();
            assert_eq!(json, expected, "{raw:?} cut at {cut}");
        }
    }

    #[test]
    fn a_text_stays_one_whatever_it_looks_like() {
        for raw in ["12", "true", "null", "{\"a\": 1}", ""] {
            reads(&format!("\n{raw}\n"), Types::STRING, &quoted(raw));
        }
        reads("\n\n a \n\n", Types::STRING, "\"\\n a \\n\"");
        reads("a \"b\"\\ é", Types::STRING, "\"a \\\"b\\\"\\\\ é\"");
        reads("\n", Types::STRING, "\"\"");
        reads("null", NULLABLE, "null");
        reads("nullify", NULLABLE, "\"nullify\"");
        reads("12", NULLABLE, "\"12\"");
    }

    #[test]
    fn other_values_become_what_they_are() {
        for (raw, json) in
            [("\n3\n", "3"), ("[1, 2]", "[1, 2]"), ("{'a': True}", "{\"a\": true}"), ("x y", "\"x y\"")]
        {
            reads(raw, OTHER, json);
            reads(raw, UNKNOWN, json);
        }
        reads("False", UNKNOWN, "false");
        reads("None", UNKNOWN, "null");
        reads("007", OTHER, "\"007\"");
    }
}
