//! JSON as Python's `json.dumps` writes it, for `tojson`.
//!
//! A few shared lists can be nested into a text beyond any memory, so the text is bounded
//! and paid for while it grows, not when it is done.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Deeper values are refused.
const MAX_DEPTH: usize = 128;
/// Most spaces that a level is indented by.
const MAX_INDENT: usize = 64;
/// Fuel that a value costs: walking one is slower than copying text.
const VALUE_FUEL: u64 = 8;
/// Bytes that one unit of fuel pays for.
const BYTES_PER_FUEL: usize = 64;

/// The options of `json.dumps` that templates use.
#[derive(Debug, Default)]
pub(super) struct Style {
    /// Spaces a level; none = one line.
    pub indent: Option<usize>,
    /// Escape everything beyond ASCII. Noncharacters stay: they may be marks that are taken
    /// out of the prompt again.
    pub ensure_ascii: bool,
    /// Keys in order of their text.
    pub sort_keys: bool,
    /// Between items, and between key and value.
    pub separators: Option<(String, String)>,
}

/// Writes a value of at most `limit` bytes; `pay` is asked for fuel as the text grows:
/// eight for every value and one for every 64 bytes. Undefined and functions are refused as in Python.
pub(super) fn write(
    value: &Value,
    style: &Style,
    limit: usize,
    pay: &mut dyn FnMut(u64) -> Result<(), Error>,
) -> Result<String, Error> {
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        // With an indent Python leaves no space at the line's end.
        None => (if style.indent.is_some() { "," } else { ", " }, ": "),
    };
    let mut writer = Writer { out: String::new(), paid: 0, limit, pay, style, item, key };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a> {
    out: String,
    /// Bytes of `out` that are paid for.
    paid: usize,
    limit: usize,
    pay: &'a mut dyn FnMut(u64) -> Result<(), Error>,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
}

impl Writer<'_> {
    /// Appends text, if it still fits.
    fn put(&mut self, text: &str) -> Result<(), Error> {
        if text.len() > self.limit - self.out.len() {
            return Err(refused(format!("tojson: more than {} bytes", self.limit)));
        }
        self.out.push_str(text);
        let owed = (self.out.len() - self.paid) / BYTES_PER_FUEL;
        if owed > 0 {
            self.paid += owed * BYTES_PER_FUEL;
            (self.pay)(owed as u64)?;
        }
        Ok(())
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused(format!("tojson: nested deeper than {MAX_DEPTH}")));
        }
        (self.pay)(VALUE_FUEL)?;
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.items(value.try_iter()?, ("[", "]"), depth, |writer, item| {
                    writer.value(&item, depth + 1)
                })
            }
            ValueKind::Map => self.map(value, depth),
            kind => match scalar(value) {
                Some(text) => self.put(&text),
                None => Err(refused(format!("tojson: {kind} is not JSON serializable"))),
            },
        }
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let keys = value.try_iter()?;
        if !self.style.sort_keys {
            return self.items(keys, ("{", "}"), depth, |writer, key| {
                let text = key_text(&key)?;
                writer.entry(&text, &value.get_item(&key)?, depth)
            });
        }
        let mut sorted = keys.map(|key| Ok((key_text(&key)?, key))).collect::<Result<Vec<_>, Error>>()?;
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        self.items(sorted.into_iter(), ("{", "}"), depth, |writer, (text, key)| {
            writer.entry(&text, &value.get_item(&key)?, depth)
        })
    }

    fn entry(&mut self, key: &str, value: &Value, depth: usize) -> Result<(), Error> {
        self.string(key)?;
        self.put(self.key)?;
        self.value(value, depth + 1)
    }

    fn items<T>(
        &mut self,
        items: impl Iterator<Item = T>,
        (open, close): (&str, &str),
        depth: usize,
        mut each: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.put(open)?;
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                self.put(self.item)?;
            }
            is_empty = false;
            self.line(depth + 1)?;
            each(self, item)?;
        }
        if !is_empty {
            self.line(depth)?;
        }
        self.put(close)
    }

    fn line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = self.style.indent else { return Ok(()) };
        self.put("\n")?;
        for _ in 0..depth {
            self.put(&SPACES[..indent.min(MAX_INDENT)])?;
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.put("\"")?;
        let mut done = 0;
        let mut escape = String::new();
        for (at, c) in text.char_indices() {
            escape.clear();
            match c {
                '"' => escape.push_str("\\\""),
                '\\' => escape.push_str("\\\\"),
                '\n' => escape.push_str("\\n"),
                '\r' => escape.push_str("\\r"),
                '\t' => escape.push_str("\\t"),
                '\u{8}' => escape.push_str("\\b"),
                '\u{c}' => escape.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.style.ensure_ascii && is_escaped(c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(escape, "\\u{unit:04x}");
                    }
                }
                _ => continue,
            }
            self.put(&text[done..at])?;
            self.put(&escape)?;
            done = at + c.len_utf8();
        }
        self.put(&text[done..])?;
        self.put("\"")
    }
}

/// One level's indentation at most.
const SPACES: &str = match std::str::from_utf8(&[b' '; MAX_INDENT]) {
    Ok(spaces) => spaces,
    Err(_) => "",
};

fn refused(message: String) -> Error {
    Error::new(ErrorKind::BadSerialization, message)
}

/// Whether `ensure_ascii` escapes the character.
fn is_escaped(c: char) -> bool {
    !c.is_ascii() && !('\u{fdd0}'..='\u{fdef}').contains(&c)
}

/// The text of a key. As in Python, lists and maps are none.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => scalar(key).ok_or_else(|| {
            refused(format!("tojson: keys are text, numbers, booleans or none, not {}", key.kind()))
        }),
    }
}

fn scalar(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("null".into()),
        ValueKind::Bool => Some(if value.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number if value.is_integer() => Some(value.to_string()),
        ValueKind::Number => Some(float_text(f64::try_from(value.clone()).unwrap_or(f64::NAN))),
        _ => None,
    }
}

/// A float as Python's `repr` gives it: shortest digits, an exponent below 1e-4 and from 1e16 on.
fn float_text(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}
