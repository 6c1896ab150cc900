//! The environment of Hugging Face's chat templates, on minijinja.
//!
//! Blocks are trimmed, loops can be left, strings have Python's methods,
//! `tojson` writes as Python does, nothing is HTML-escaped, and an undefined
//! variable prints nothing.

use std::io;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::{MAX_OUTPUT, calendar, json};

/// Digits of a number in a format text.
const MAX_WIDTH_DIGITS: usize = 4;

/// What a template said when it refused a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

/// The environment without templates.
pub(super) fn hugging_face(fuel: u64, recursion: usize) -> Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(fuel));
    environment.set_recursion_limit(recursion);
    environment.set_unknown_method_callback(python_method);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", tojson);
    // As in Python strings are sequences, and undefined values are empty ones, but none is not.
    environment.add_test("sequence", |value: &Value| {
        use ValueKind::{Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Map | String | Undefined)
    });
    environment.add_test("iterable", |value: &Value| match value.kind() {
        ValueKind::Undefined | ValueKind::String => true,
        ValueKind::None => false,
        _ => value.try_iter().is_ok(),
    });
    Ok(environment)
}

/// The function by which templates ask for the date.
pub(super) fn strftime_now(now: SystemTime) -> Value {
    Value::from_function(move |format: &str| calendar::strftime(now, format))
}

/// Python's methods, but for a `format` that pads to a length which no prompt needs: it would
/// be built before it is paid for.
fn python_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let is_wide =
        |text: &str| text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > MAX_WIDTH_DIGITS);
    if method == "format" && value.as_str().is_some_and(is_wide) {
        return Err(Error::new(ErrorKind::InvalidOperation, "format: a width of more than 9999"));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn tojson(state: &State, value: Value, options: Kwargs) -> Result<Value, Error> {
    let style = json::Style {
        indent: options.get::<Option<usize>>("indent")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: separators(&options)?,
    };
    options.assert_all_used()?;
    let text = json::write(&value, &style, MAX_OUTPUT, &mut |fuel| state.consume_fuel(fuel))?;
    Ok(Value::from_safe_string(text))
}

fn separators(options: &Kwargs) -> Result<Option<(String, String)>, Error> {
    let Some(pair) = options.get::<Option<Vec<String>>>("separators")? else { return Ok(None) };
    match <[String; 2]>::try_from(pair) {
        Ok([item, key]) => Ok(Some((item, key))),
        Err(_) => Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two strings")),
    }
}

/// Takes `{% generation %}` and its end out, which only mark what a model is trained on.
/// The tags stay as an always-true condition, so that space is trimmed as before.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let sign = tag.len() - tag.trim_start_matches(['-', '+']).len();
        let space = tag[sign..].len() - tag[sign..].trim_start().len();
        let (lead, word) = tag.split_at(sign + space);
        out.push_str(lead);
        rest = word;
        for (name, instead) in [("generation", "if true"), ("endgeneration", "endif")] {
            if let Some(after) = word.strip_prefix(name)
                && after.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
            {
                out.push_str(instead);
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// A writer that stops at a limit.
pub(super) struct BoundedOutput {
    bytes: Vec<u8>,
    limit: usize,
}

impl BoundedOutput {
    pub fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), limit }
    }

    /// The text, if all went well.
    pub fn into_text(self) -> Result<String, String> {
        String::from_utf8(self.bytes).map_err(|error| error.to_string())
    }
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            return Err(io::Error::other(format!("the template prints more than {} bytes", self.limit)));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
