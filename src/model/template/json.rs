//! JSON as Python's `json.dumps` writes it, for `tojson`.

use std::fmt::Write;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Deeper values are refused.
const MAX_DEPTH: usize = 128;

/// The options of `json.dumps` that templates use.
#[derive(Debug, Default)]
pub(super) struct Style {
    /// Spaces a level; none = one line.
    pub indent: Option<usize>,
    /// Escape everything beyond ASCII.
    pub ensure_ascii: bool,
    /// Keys in order of their text.
    pub sort_keys: bool,
    /// Between items, and between key and value.
    pub separators: Option<(String, String)>,
}

/// Writes a value; undefined and functions are refused as in Python.
pub(super) fn write(value: &Value, style: &Style) -> Result<String, String> {
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        // With an indent Python leaves no space at the line's end.
        None => (if style.indent.is_some() { "," } else { ", " }, ": "),
    };
    let mut writer = Writer { out: String::new(), style, item, key };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a> {
    out: String,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("tojson: nested deeper than {MAX_DEPTH}"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.out, "{value}");
            }
            ValueKind::Number => self.float(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter().map_err(|error| error.to_string())?.collect();
                self.items(&items, ('[', ']'), depth, |writer, item| writer.value(item, depth + 1))?;
            }
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(format!("tojson: {kind} is not JSON serializable")),
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), String> {
        let mut entries = Vec::new();
        for key in value.try_iter().map_err(|error| error.to_string())? {
            let item = value.get_item(&key).map_err(|error| error.to_string())?;
            let text = match key.kind() {
                ValueKind::None => "null".to_owned(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
                _ => key.to_string(),
            };
            entries.push((text, item));
        }
        if self.style.sort_keys {
            entries.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.items(&entries, ('{', '}'), depth, |writer, (key, item)| {
            writer.string(key);
            writer.out.push_str(writer.key);
            writer.value(item, depth + 1)
        })
    }

    fn items<T>(
        &mut self,
        items: &[T],
        (open, close): (char, char),
        depth: usize,
        mut each: impl FnMut(&mut Self, &T) -> Result<(), String>,
    ) -> Result<(), String> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(self.item);
            }
            self.line(depth + 1);
            each(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn float(&mut self, value: &Value) {
        let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
        self.out.push_str(&float_text(number));
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.style.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
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
