//! Reads a JSON object field by field, with the path of what is wrong.
//!
//! `null` is the same as absent. A field that was read is known; what is left
//! over at the end is reported, not refused: clients send more than any server
//! knows.

use std::fmt::Display;

use serde_json::{Map, Value};

use super::api_error::ApiError;
use crate::types::Range;

/// An object whose fields are taken out one by one.
pub struct Fields {
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The object at `path` (empty for the body itself).
    ///
    /// # Errors
    /// `invalid_type` when it is none.
    pub fn new(path: impl Into<String>, value: Value) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other if path.is_empty() => Err(ApiError::field(
                "body",
                "invalid_type",
                format!("must be an object, not {}", kind(&other)),
            )),
            other => Err(wrong_type(&path, "an object", &other)),
        }
    }

    /// The path of a field of this object.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Takes a field as it is; `None` when absent or null.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        // shift_remove keeps the order of what is left, for the report.
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field as it is, where null says something else than absence.
    pub fn value_or_null(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name)
    }

    /// Takes a string.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// Takes a string that must be there.
    ///
    /// # Errors
    /// `missing_required_parameter`, `invalid_type`.
    pub fn required_string(&mut self, name: &str) -> Result<String, ApiError> {
        self.string(name)?.ok_or_else(|| self.missing(name, "a string"))
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_type(&self.path(name), "true or false", &other)),
        }
    }

    /// Takes an array.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong_type(&self.path(name), "an array", &other)),
        }
    }

    /// Takes an object.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong_type(&self.path(name), "an object", &other)),
        }
    }

    /// Takes an object as fields.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn nested(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let path = self.path(name);
        self.value(name).map(|value| Fields::new(path, value)).transpose()
    }

    /// Takes a whole number within a range.
    ///
    /// # Errors
    /// `invalid_type`, `invalid_value`.
    pub fn integer(&mut self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        let path = self.path(name);
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = whole(&value).ok_or_else(|| wrong_type(&path, "a whole number", &value))?;
        if number < i128::from(low) || number > i128::from(high) {
            return Err(out_of_range(&path, number, low, high));
        }
        i64::try_from(number).map(Some).map_err(|_| out_of_range(&path, number, low, high))
    }

    /// Takes a count of at least `low`.
    ///
    /// # Errors
    /// `invalid_type`, `invalid_value`.
    pub fn count(&mut self, name: &str, low: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i64::from(low), i64::from(u32::MAX))?;
        // The range was checked, so nothing is cut off.
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    /// Takes a number within a range.
    ///
    /// # Errors
    /// `invalid_type`, `invalid_value`.
    pub fn number(&mut self, name: &str, range: Range) -> Result<Option<f32>, ApiError> {
        let path = self.path(name);
        let Some(value) = self.value(name) else { return Ok(None) };
        number(&path, &value, range).map(Some)
    }

    /// Refuses a field whose presence asks for something that is not supported.
    ///
    /// # Errors
    /// `unsupported_parameter`, unless `harmless` says that the value asks for nothing.
    pub fn unsupported(
        &mut self,
        name: &str,
        hint: &str,
        harmless: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.value(name) {
            Some(value) if !harmless(&value) => {
                Err(ApiError::field(&self.path(name), "unsupported_parameter", hint))
            }
            _ => Ok(()),
        }
    }

    /// The error for a field that must be there.
    pub fn missing(&self, name: &str, what: &str) -> ApiError {
        missing(&self.path(name), what)
    }

    /// The fields that nobody took, nulls left out.
    pub fn rest(self) -> impl Iterator<Item = (String, Value)> {
        self.map.into_iter().filter(|(_, value)| !value.is_null())
    }

    /// Paths of the fields that nobody took, nulls left out.
    pub fn unknown(self, into: &mut Vec<String>) {
        let prefix = if self.path.is_empty() { String::new() } else { format!("{}.", self.path) };
        into.extend(self.map.iter().filter(|(_, v)| !v.is_null()).map(|(name, _)| format!("{prefix}{name}")));
    }
}

/// A borrowed object, for what is checked and handed on as it is.
pub struct View<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> View<'a> {
    /// The object at `path`.
    ///
    /// # Errors
    /// `invalid_type` when it is none.
    pub fn new(path: String, value: &'a Value) -> Result<Self, ApiError> {
        match value.as_object() {
            Some(map) => Ok(Self { path, map }),
            None => Err(wrong_type(&path, "an object", value)),
        }
    }

    /// The path of a field of this object.
    pub fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    /// A field as it is; `None` when absent or null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A string.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| wrong_type(&self.path(name), "a string", value))
    }

    /// An object.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn nested(&self, name: &str) -> Result<Option<View<'a>>, ApiError> {
        self.value(name).map(|value| View::new(self.path(name), value)).transpose()
    }

    /// The error for a field that must be there.
    pub fn missing(&self, name: &str, what: &str) -> ApiError {
        missing(&self.path(name), what)
    }
}

/// A number within a range.
///
/// # Errors
/// `invalid_type`, `invalid_value`.
pub fn number(path: &str, value: &Value, range: Range) -> Result<f32, ApiError> {
    let number = value.as_f64().ok_or_else(|| wrong_type(path, "a number", value))?;
    if !(range.low..=range.high).contains(&number) {
        return Err(out_of_range(path, number, range.low, range.high));
    }
    // Settings of sampling: single precision is what the sampler computes in.
    #[allow(clippy::cast_possible_truncation, reason = "in range, precision is not needed")]
    let single = number as f32;
    Ok(single)
}

/// The error for a value of the wrong type.
pub fn wrong_type(path: &str, want: &str, value: &Value) -> ApiError {
    ApiError::field(path, "invalid_type", format!("must be {want}, not {}", kind(value)))
}

fn missing(path: &str, what: &str) -> ApiError {
    ApiError::field(path, "missing_required_parameter", format!("is required and must be {what}"))
}

fn out_of_range(path: &str, value: impl Display, low: impl Display, high: impl Display) -> ApiError {
    ApiError::field(path, "invalid_value", format!("{value} is not within {low} to {high}"))
}

/// A whole number, also one written as `5.0`.
fn whole(value: &Value) -> Option<i128> {
    let number = value.as_number()?;
    if let Some(number) = number.as_i64() {
        return Some(i128::from(number));
    }
    if let Some(number) = number.as_u64() {
        return Some(i128::from(number));
    }
    let float = number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < 9.0e15)?;
    #[allow(clippy::cast_possible_truncation, reason = "whole and below 2^53")]
    let whole = float as i128;
    Some(whole)
}

/// The name of a JSON value's type.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
