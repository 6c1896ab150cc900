//! Puts the settings together: file < environment < command line.
//!
//! Works key by key, so that each problem names the place its value came from:
//! file and line, variable, or flag. Collects all problems. Reads nothing but
//! what it is given, so tests need neither files nor variables.

use std::collections::BTreeMap;
use std::fmt;

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::{Config, Problem};

/// Prefix of the variables that are settings; sections are separated by two underscores.
const ENV_PREFIX: &str = "GREENROOM__";

/// Problems of a configuration, each with the place it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// One line each, as `greenroom.toml:12: http.port: …`.
    pub problems: Vec<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("\n"))
    }
}

impl std::error::Error for ConfigError {}

/// Collects the sources of a configuration; later ones win, key by key.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Value and place of each dotted key.
    values: BTreeMap<String, (Value, String)>,
    problems: Vec<String>,
}

impl Sources {
    /// No source: the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file's text; `name` is how problems call it.
    pub fn file(mut self, name: &str, text: &str) -> Self {
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            self.problems.push(format!("{name}:{line}: {}", error.message()));
        }
        let mut found = Vec::new();
        leaves(table.get_ref(), "", &mut found);
        for (key, start, value) in found {
            let place = format!("{name}:{}", line_of(text, start));
            match value {
                Some(value) => self.take(key, vec![value], place),
                None => self.problems.push(format!("{place}: {key}: this value is not supported")),
            }
        }
        self
    }

    /// Adds environment variables; others than `GREENROOM__…` are ignored.
    ///
    /// A value is read as TOML where that fits the setting, else as a plain
    /// string, else as a list separated by commas.
    pub fn environment(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        for (name, text) in variables {
            let Some(rest) = name.strip_prefix(ENV_PREFIX) else { continue };
            let key = rest.to_ascii_lowercase().replace("__", ".");
            let list = text.split(',').map(str::trim).filter(|part| !part.is_empty());
            let list = Value::Array(list.map(|part| Value::String(part.to_owned())).collect());
            let mut readings = Vec::new();
            if let Ok(mut table) = toml::from_str::<Table>(&format!("value = {text}"))
                && let Some(value) = table.remove("value")
            {
                readings.push(value);
            }
            readings.push(Value::String(text));
            readings.push(list);
            self.take(key, readings, format!("environment variable {name}"));
        }
        self
    }

    /// Adds one setting from the command line.
    pub fn flag(mut self, flag: &str, key: &str, value: impl Into<Value>) -> Self {
        self.take(key.to_owned(), vec![value.into()], format!("flag {flag}"));
        self
    }

    /// Puts everything together and checks it.
    ///
    /// # Errors
    /// Every problem of every source.
    pub fn resolve(self) -> Result<Config, ConfigError> {
        let mut problems = self.problems;
        let mut root = Table::new();
        for (key, (value, _)) in &self.values {
            insert(&mut root, key, value.clone());
        }
        let config = match Config::deserialize_table(root) {
            Ok(config) => config,
            Err(message) => {
                problems.push(message);
                return Err(ConfigError { problems });
            }
        };
        if let Err(found) = config.validate() {
            problems.extend(found.into_iter().map(|problem| self.values.placed(&problem)));
        }
        if problems.is_empty() { Ok(config) } else { Err(ConfigError { problems }) }
    }

    /// Keeps the first reading that fits the setting; none: a problem that quotes the first.
    fn take(&mut self, key: String, readings: Vec<Value>, place: String) {
        let mut first = None;
        for value in readings {
            let mut root = Table::new();
            insert(&mut root, &key, value.clone());
            match Config::deserialize_table(root) {
                Ok(_) => {
                    self.values.insert(key, (value, place));
                    return;
                }
                Err(message) => {
                    first.get_or_insert(message);
                }
            }
        }
        let message = first.unwrap_or_default();
        self.problems.push(format!("{place}: {key}: {message}"));
    }
}

/// Finds the place of a problem's value.
trait Placed {
    fn placed(&self, problem: &Problem) -> String;
}

impl Placed for BTreeMap<String, (Value, String)> {
    fn placed(&self, problem: &Problem) -> String {
        match self.get(&problem.key) {
            Some((_, place)) => format!("{place}: {problem}"),
            None => problem.to_string(),
        }
    }
}

impl Config {
    fn deserialize_table(table: Table) -> Result<Self, String> {
        // The message's last line alone: what comes before quotes a document that nobody wrote.
        table.try_into().map_err(|error: toml::de::Error| error.message().trim().to_owned())
    }
}

/// The line, from 1, of a byte offset.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// Every leaf of a document, in dotted form, with the offset of its key. Arrays are leaves.
fn leaves(table: &DeTable<'_>, prefix: &str, out: &mut Vec<(String, usize, Option<Value>)>) {
    for (key, value) in table {
        let dotted = match prefix {
            "" => key.get_ref().to_string(),
            prefix => format!("{prefix}.{}", key.get_ref()),
        };
        match value.get_ref() {
            // A table on the first level is a section; deeper ones there are none, so they are wrong values.
            DeValue::Table(inner) if prefix.is_empty() => leaves(inner, &dotted, out),
            _ => out.push((dotted, key.span().start, owned(value))),
        }
    }
}

/// A parsed value as a plain one; `None` for numbers out of range.
fn owned(value: &Spanned<DeValue<'_>>) -> Option<Value> {
    Some(match value.get_ref() {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(number) => {
            let digits = number.as_str().replace('_', "");
            Value::Integer(i64::from_str_radix(&digits, number.radix()).ok()?)
        }
        DeValue::Float(number) => Value::Float(number.as_str().replace('_', "").parse().ok()?),
        DeValue::Boolean(flag) => Value::Boolean(*flag),
        DeValue::Datetime(time) => Value::Datetime(*time),
        DeValue::Array(items) => Value::Array(items.iter().map(owned).collect::<Option<_>>()?),
        DeValue::Table(items) => {
            let pairs = items.iter().map(|(key, item)| Some((key.get_ref().to_string(), owned(item)?)));
            Value::Table(pairs.collect::<Option<_>>()?)
        }
    })
}

/// Sets a dotted key.
fn insert(root: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            root.insert(key.to_owned(), value);
        }
        Some((section, rest)) => {
            let entry = root.entry(section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = entry {
                insert(inner, rest, value);
            }
        }
    }
}
