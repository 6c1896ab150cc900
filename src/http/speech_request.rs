//! The form fields of `/v1/audio/transcriptions` and `/translations`: a pure translator.

use actix_web::http::StatusCode;
use serde_json::Value;

use super::api_error::ApiError;
use crate::types::speech::{Format, SpeechOptions, Task, VadOptions, language_code};

/// What a form asks for, its file apart.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct SpeechCall {
    /// For the recogniser.
    pub options: SpeechOptions,
    /// How the answer is written.
    pub format: Format,
    /// As events.
    pub stream: bool,
    /// Log-probabilities of tokens.
    pub logprobs: bool,
    /// Which model.
    pub model: Option<String>,
    /// Fields that nobody knows, for a warning.
    pub unknown: Vec<String>,
}

/// Fields of OpenAI's API that are known and not served.
const REFUSED: [&str; 2] = ["known_speaker_names", "known_speaker_references"];

/// Reads a form's text fields, in order.
///
/// # Errors
/// 400 that names the field and what would be right.
pub fn read_form(fields: &[(String, String)], task: Task) -> Result<SpeechCall, ApiError> {
    let mut call = SpeechCall::default();
    call.options.task = task;
    let mut vad = call.options.vad;
    let (mut chunking, mut granularities) = (Vec::new(), None::<Vec<String>>);
    for (name, value) in fields {
        let value = value.trim();
        let (base, inner) = split(name);
        match base {
            "model" => call.model = Some(value.to_owned()),
            "language" if task == Task::Translate => {
                return Err(ApiError::field(
                    "language",
                    "unsupported_parameter",
                    "a translation finds it out",
                ));
            }
            "language" => call.options.language = language(value, "language")?,
            "languages" => {
                let codes = list(value).into_iter().map(|name| language(&name, "languages"));
                call.options.languages.extend(codes.collect::<Result<Vec<_>, _>>()?.into_iter().flatten());
            }
            "prompt" => {
                check_text(name, value)?;
                call.options.prompt = value.to_owned();
            }
            "hotwords" | "keywords" | "vocabulary" => {
                check_text(name, value)?;
                let words = &mut call.options.hotwords;
                if !words.is_empty() {
                    words.push_str(", ");
                }
                words.push_str(&list(value).join(", "));
            }
            "response_format" => call.format = format(value)?,
            "temperature" => call.options.temperature = Some(number(name, value, 0.0, 1.0)?),
            "timestamp_granularities" => {
                granularities.get_or_insert_default().extend(list(value));
            }
            "include" => {
                for item in list(value) {
                    match item.as_str() {
                        "logprobs" => call.logprobs = true,
                        other => {
                            let message = format!("`{other}` is not known; `logprobs` is");
                            return Err(ApiError::field("include", "invalid_value", message));
                        }
                    }
                }
            }
            "stream" => call.stream = boolean(name, value)?,
            "chunking_strategy" => chunking.push((inner.map(str::to_owned), value.to_owned())),
            "vad" | "vad_filter" => vad = boolean(name, value)?.then_some(VadOptions::FILE),
            "vad_threshold" => edit(&mut vad).threshold = number(name, value, 0.01, 0.99)? as f32,
            "vad_min_speech_ms" => edit(&mut vad).min_speech_ms = number(name, value, 0.0, 60_000.0)? as u32,
            "vad_min_silence_ms" => {
                edit(&mut vad).min_silence_ms = number(name, value, 0.0, 60_000.0)? as u32
            }
            "vad_pad_ms" => edit(&mut vad).pad_ms = number(name, value, 0.0, 10_000.0)? as u32,
            "beam_size" => call.options.beam_size = count(name, value, 1, 16)? as usize,
            "batch_size" => call.options.batch_size = count(name, value, 1, 16)? as usize,
            "best_of" => call.options.best_of = count(name, value, 1, 16)? as usize,
            "condition_on_previous_text" => call.options.condition_on_previous_text = boolean(name, value)?,
            "no_speech_threshold" => call.options.no_speech_threshold = number(name, value, 0.0, 1.0)?,
            "hallucination_silence_threshold" => {
                call.options.hallucination_silence_s = Some(number(name, value, 0.5, 30.0)?);
            }
            "word_timestamps" => call.options.words |= boolean(name, value)?,
            "without_timestamps" => call.options.timestamps = !boolean(name, value)?,
            "seed" => call.options.seed = count(name, value, 0, u64::MAX)?,
            "file" => {
                return Err(ApiError::field("file", "invalid_value", "must be a file, not a text field"));
            }
            other if REFUSED.contains(&other) => {
                let message = "this server does not tell speakers apart";
                return Err(ApiError::field(other, "unsupported_parameter", message));
            }
            other => call.unknown.push(other.chars().take(100).collect()),
        }
    }
    call.options.vad = vad;
    apply_chunking(&mut call.options, &chunking)?;
    if let Some(granularities) = granularities {
        apply_granularities(&mut call, &granularities)?;
    }
    check(&call)?;
    Ok(call)
}

/// Longest text that a model is told, bytes: many times of what it can use.
const MAX_TEXT: usize = 16 * 1024;

/// Refuses a text that only costs time.
///
/// # Errors
/// 400 that names the field.
pub fn check_text(path: &str, text: &str) -> Result<(), ApiError> {
    if text.len() <= MAX_TEXT {
        return Ok(());
    }
    Err(ApiError::field(
        path,
        "invalid_value",
        format!("is over {MAX_TEXT} bytes; a model uses the last 223 tokens"),
    ))
}

/// A name without `[]`, and what stands between the brackets.
fn split(name: &str) -> (&str, Option<&str>) {
    match name.split_once('[') {
        Some((base, inner)) => (base, inner.strip_suffix(']').filter(|inner| !inner.is_empty())),
        None => (name, None),
    }
}

fn edit(vad: &mut Option<VadOptions>) -> &mut VadOptions {
    vad.get_or_insert(VadOptions::FILE)
}

/// A JSON list of strings, or one value.
fn list(value: &str) -> Vec<String> {
    match serde_json::from_str::<Value>(value) {
        Ok(Value::Array(items)) => {
            items.iter().map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned)).collect()
        }
        _ if value.is_empty() => Vec::new(),
        _ => vec![value.to_owned()],
    }
}

fn language(value: &str, field: &str) -> Result<Option<&'static str>, ApiError> {
    if value.is_empty() || value.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    let shown: String = value.chars().take(40).collect();
    let unknown = || {
        let message =
            format!("`{shown}` is not a language that Whisper knows; give a code such as en, de or ja");
        ApiError::field(field, "unsupported_language", message)
    };
    language_code(value).map(Some).ok_or_else(unknown)
}

fn format(value: &str) -> Result<Format, ApiError> {
    Ok(match value {
        "" | "json" => Format::Json,
        "text" => Format::Text,
        "srt" => Format::Srt,
        "vtt" => Format::Vtt,
        "verbose_json" => Format::VerboseJson,
        other => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("`{shown}` is not supported; use json, text, srt, vtt or verbose_json");
            return Err(ApiError::field("response_format", "unsupported_value", message));
        }
    })
}

fn number(name: &str, value: &str, low: f64, high: f64) -> Result<f64, ApiError> {
    let parsed = value.parse::<f64>().ok().filter(|number| (low..=high).contains(number));
    parsed.ok_or_else(|| {
        ApiError::field(name, "invalid_value", format!("must be a number from {low} to {high}"))
    })
}

fn count(name: &str, value: &str, low: u64, high: u64) -> Result<u64, ApiError> {
    let parsed = value.parse::<u64>().ok().filter(|number| (low..=high).contains(number));
    parsed.ok_or_else(|| {
        ApiError::field(name, "invalid_value", format!("must be a whole number from {low} to {high}"))
    })
}

fn boolean(name: &str, value: &str) -> Result<bool, ApiError> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" | "" => Ok(false),
        _ => Err(ApiError::field(name, "invalid_value", "must be true or false")),
    }
}

/// `auto`, or an object (or its members as fields of their own) that says how speech is told from silence.
fn apply_chunking(options: &mut SpeechOptions, parts: &[(Option<String>, String)]) -> Result<(), ApiError> {
    let wrong = |message: &str| ApiError::field("chunking_strategy", "invalid_value", message);
    for (member, value) in parts {
        let members: Vec<(String, Value)> = match member {
            Some(member) => {
                let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.clone()));
                vec![(member.clone(), value)]
            }
            None if value == "auto" || value.is_empty() => {
                edit(&mut options.vad);
                continue;
            }
            None => match serde_json::from_str::<Value>(value) {
                Ok(Value::Object(object)) => object.into_iter().collect(),
                _ => return Err(wrong("must be `auto` or an object of type server_vad")),
            },
        };
        for (member, value) in members {
            let vad = edit(&mut options.vad);
            let number = value.as_f64().filter(|number| (0.0..=60_000.0).contains(number));
            let number = number.ok_or_else(|| wrong(&format!("{member} must be a number from 0 to 60000")));
            match member.as_str() {
                "type" if value == "server_vad" => {}
                "type" => return Err(wrong("type must be server_vad")),
                "threshold" => vad.threshold = number? as f32,
                "prefix_padding_ms" => vad.pad_ms = number? as u32,
                "silence_duration_ms" => vad.min_silence_ms = number? as u32,
                _ => return Err(wrong("has type, threshold, prefix_padding_ms and silence_duration_ms")),
            }
        }
    }
    Ok(())
}

fn apply_granularities(call: &mut SpeechCall, granularities: &[String]) -> Result<(), ApiError> {
    let wrong = |message: String| ApiError::field("timestamp_granularities", "invalid_value", message);
    for granularity in granularities {
        match granularity.as_str() {
            "segment" => {}
            "word" if call.format == Format::VerboseJson => call.options.words = true,
            "word" => return Err(wrong("`word` needs response_format verbose_json".into())),
            other => {
                let shown: String = other.chars().take(40).collect();
                return Err(wrong(format!("`{shown}` is not known; use word or segment")));
            }
        }
    }
    Ok(())
}

/// What goes together.
fn check(call: &SpeechCall) -> Result<(), ApiError> {
    if call.stream && !matches!(call.format, Format::Json | Format::Text | Format::VerboseJson) {
        let message = "a stream is of json, text or verbose_json";
        return Err(ApiError::field("response_format", "unsupported_value", message));
    }
    if call.logprobs && call.format != Format::Json {
        return Err(ApiError::field("include", "invalid_value", "`logprobs` needs response_format json"));
    }
    if call.options.beam_size > 1 && call.options.temperature.is_some_and(|temperature| temperature > 0.0) {
        return Err(ApiError::field(
            "beam_size",
            "invalid_value",
            "beams are searched at temperature 0 only",
        ));
    }
    Ok(())
}

/// The upload is over the limit.
pub fn too_large(limit: usize) -> ApiError {
    let message = format!("file: is over the limit of {} MiB (speech.max_file_mib)", limit >> 20);
    let mut error = ApiError::invalid(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message).closing();
    error.param = Some("file".into());
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &[(&str, &str)]) -> Result<SpeechCall, ApiError> {
        let fields: Vec<_> = fields.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        read_form(&fields, Task::Transcribe)
    }

    #[test]
    fn every_spelling_of_granularities_is_taken() {
        for fields in [
            &[("response_format", "verbose_json"), ("timestamp_granularities[]", "word")][..],
            &[("timestamp_granularities", "[\"word\",\"segment\"]"), ("response_format", "verbose_json")],
            &[
                ("timestamp_granularities", "segment"),
                ("timestamp_granularities", "word"),
                ("response_format", "verbose_json"),
            ],
        ] {
            assert!(read(fields).unwrap().options.words, "{fields:?}");
        }
        assert!(
            !read(&[("response_format", "verbose_json"), ("timestamp_granularities[]", "[]")])
                .unwrap()
                .options
                .words
        );
    }

    #[test]
    fn chunking_comes_as_a_word_an_object_or_fields() {
        assert_eq!(read(&[("chunking_strategy", "auto")]).unwrap().options.vad, Some(VadOptions::FILE));
        for fields in [
            &[("chunking_strategy", "{\"type\":\"server_vad\",\"threshold\":0.3}")][..],
            &[("chunking_strategy[type]", "server_vad"), ("chunking_strategy[threshold]", "0.3")],
        ] {
            assert_eq!(read(fields).unwrap().options.vad.unwrap().threshold, 0.3, "{fields:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (fields, param, code) in [
            (&[("response_format", "xml")][..], "response_format", "unsupported_value"),
            (&[("temperature", "2")], "temperature", "invalid_value"),
            (&[("temperature", "NaN")], "temperature", "invalid_value"),
            (&[("language", "klingon")], "language", "unsupported_language"),
            (&[("timestamp_granularities[]", "word")], "timestamp_granularities", "invalid_value"),
            (&[("stream", "true"), ("response_format", "srt")], "response_format", "unsupported_value"),
            (&[("beam_size", "99")], "beam_size", "invalid_value"),
            (&[("best_of", "1.5")], "best_of", "invalid_value"),
            (&[("seed", "18446744073709551616")], "seed", "invalid_value"),
            (&[("include[]", "cats")], "include", "invalid_value"),
            (&[("known_speaker_names[]", "Ann")], "known_speaker_names", "unsupported_parameter"),
            (&[("chunking_strategy", "{\"type\":\"other\"}")], "chunking_strategy", "invalid_value"),
        ] {
            let error = read(fields).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(param), code), "{fields:?}");
        }
        assert_eq!(read(&[("colour", "blue")]).unwrap().unknown, ["colour"]);
    }
}
