//! What a live session is asked to be, as JSON or as a query: a pure translator.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::api_error::ApiError;
use super::fields::Fields;
use super::speech_request::read_form;
use crate::types::Range;
use crate::types::speech::{LiveInput, PcmEncoding, PcmFormat, SessionSpec, Task, VadOptions};

/// Fields that mean the same as in a form for a file.
const SHARED: [&str; 17] = [
    "model",
    "language",
    "languages",
    "prompt",
    "hotwords",
    "keywords",
    "vocabulary",
    "response_format",
    "temperature",
    "timestamp_granularities",
    "beam_size",
    "best_of",
    "condition_on_previous_text",
    "no_speech_threshold",
    "word_timestamps",
    "without_timestamps",
    "seed",
];
/// Fields of a query that belong into `input`.
const INPUT: [&str; 3] = ["encoding", "sample_rate", "channels"];
/// Fields of a query that are no text; what is shared with forms is read from text anyway.
const TYPED: [&str; 6] =
    ["partials", "manual_turns", "max_duration_s", "idle_timeout_s", "sample_rate", "channels"];
const ENCODINGS: &str = "pcm_s16le, pcm_f32le, mulaw, alaw or container";

/// A session that is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionCall {
    /// For the service.
    pub spec: SessionSpec,
    /// Fields that nobody knows, for a warning.
    pub unknown: Vec<String>,
}

/// Reads a session's JSON.
///
/// # Errors
/// 400 that names the field and what would be right.
pub fn read_session(body: Value) -> Result<SessionCall, ApiError> {
    let mut fields = Fields::new("", body)?;
    let task = match fields.string("task")?.as_deref() {
        None | Some("transcribe") => Task::Transcribe,
        Some("translate") => Task::Translate,
        Some(_) => return Err(ApiError::field("task", "invalid_value", "must be transcribe or translate")),
    };
    let form: Vec<_> = SHARED
        .into_iter()
        .filter_map(|name| {
            let text = match fields.value(name)? {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Some((name.to_owned(), text))
        })
        .collect();
    let call = read_form(&form, task)?;
    let mut spec = SessionSpec {
        options: call.options,
        model: call.model,
        format: call.format,
        partials: fields.boolean("partials")?.unwrap_or(true),
        manual_turns: fields.boolean("manual_turns")?.unwrap_or(false),
        max_duration: seconds(&mut fields, "max_duration_s", 86_400)?,
        idle: seconds(&mut fields, "idle_timeout_s", 3600)?,
        ..SessionSpec::default()
    };
    spec.options.vad = Some(VadOptions::LIVE);
    let mut unknown = Vec::new();
    if let Some(mut vad) = fields.nested("vad")? {
        spec.options.vad = Some(read_vad(&mut vad, VadOptions::LIVE)?);
        vad.unknown(&mut unknown);
    }
    if let Some(mut input) = fields.nested("input")? {
        spec.input = read_input(&mut input)?;
        input.unknown(&mut unknown);
    }
    fields.unknown(&mut unknown);
    Ok(SessionCall { spec, unknown })
}

/// Reads the same from a query: members of `input` stand for themselves.
///
/// # Errors
/// As [`read_session`].
pub fn read_query(pairs: &[(String, String)]) -> Result<SessionCall, ApiError> {
    let (mut body, mut input) = (Map::new(), Map::new());
    for (name, text) in pairs {
        let value = match TYPED.contains(&name.as_str()) {
            true => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone())),
            false => Value::String(text.clone()),
        };
        let to = if INPUT.contains(&name.as_str()) { &mut input } else { &mut body };
        to.insert(name.clone(), value);
    }
    if !input.is_empty() {
        body.insert("input".into(), input.into());
    }
    read_session(body.into())
}

fn seconds(fields: &mut Fields, name: &str, most: i64) -> Result<Option<Duration>, ApiError> {
    let seconds = fields.integer(name, 1, most)?;
    Ok(seconds.map(|seconds| Duration::from_secs(seconds.unsigned_abs())))
}

/// How speech is told from silence, in OpenAI's words and some more.
///
/// # Errors
/// As [`read_session`].
pub fn read_vad(fields: &mut Fields, usual: VadOptions) -> Result<VadOptions, ApiError> {
    let mut vad = usual;
    if let Some(threshold) = fields.number("threshold", Range { low: 0.01, high: 0.99 })? {
        vad.threshold = threshold;
    }
    let mut ms = |name: &str, low: i64, most: i64| -> Result<Option<u32>, ApiError> {
        Ok(fields.integer(name, low, most)?.and_then(|ms| u32::try_from(ms).ok()))
    };
    vad.pad_ms = ms("prefix_padding_ms", 0, 2000)?.unwrap_or(vad.pad_ms);
    vad.min_silence_ms = ms("silence_duration_ms", 64, 10_000)?.unwrap_or(vad.min_silence_ms);
    vad.min_speech_ms = ms("min_speech_ms", 0, 2000)?.unwrap_or(vad.min_speech_ms);
    Ok(vad)
}

fn read_input(fields: &mut Fields) -> Result<LiveInput, ApiError> {
    let encoding = fields.string("encoding")?;
    let path = fields.path("encoding");
    let (encoding, usual) = match encoding.as_deref() {
        None | Some("pcm_s16le" | "pcm16") => (PcmEncoding::S16, 16_000),
        Some("pcm_f32le") => (PcmEncoding::F32, 16_000),
        Some("mulaw" | "pcmu") => (PcmEncoding::MuLaw, 8000),
        Some("alaw" | "pcma") => (PcmEncoding::ALaw, 8000),
        Some("container") => {
            for name in ["sample_rate", "channels"] {
                fields.unsupported(name, "the file itself says it", |_| false)?;
            }
            return Ok(LiveInput::Container);
        }
        Some(_) => {
            return Err(ApiError::field(&path, "unsupported_value", format!("must be {ENCODINGS}")));
        }
    };
    let rate = fields.integer("sample_rate", 4000, 384_000)?.and_then(|rate| u32::try_from(rate).ok());
    let channels = fields.integer("channels", 1, 8)?.and_then(|count| u16::try_from(count).ok());
    Ok(LiveInput::Pcm(PcmFormat { encoding, rate: rate.unwrap_or(usual), channels: channels.unwrap_or(1) }))
}

/// What is said of the input, as it was understood.
pub fn input_body(input: LiveInput) -> Value {
    match input {
        LiveInput::Container => json!({"encoding": "container"}),
        LiveInput::Pcm(format) => {
            let encoding = match format.encoding {
                PcmEncoding::S16 => "pcm_s16le",
                PcmEncoding::F32 => "pcm_f32le",
                PcmEncoding::MuLaw => "mulaw",
                PcmEncoding::ALaw => "alaw",
            };
            json!({"encoding": encoding, "sample_rate": format.rate, "channels": format.channels})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_query_say_the_same() {
        let body = json!({
            "language": "de", "partials": false, "temperature": 0.2, "idle_timeout_s": 5, "prompt": "1e5 [x]",
            "input": {"encoding": "pcm_f32le", "sample_rate": 48000},
        });
        let query = [
            ("language", "de"),
            ("partials", "false"),
            ("temperature", "0.2"),
            ("prompt", "1e5 [x]"),
            ("idle_timeout_s", "5"),
            ("encoding", "pcm_f32le"),
            ("sample_rate", "48000"),
        ];
        let query: Vec<_> = query.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let call = read_session(body).unwrap();
        assert_eq!(read_query(&query).unwrap(), call);
        assert_eq!(call.spec.options.language, Some("de"));
        assert_eq!(call.spec.idle, Some(Duration::from_secs(5)));
        let format = PcmFormat { encoding: PcmEncoding::F32, rate: 48_000, channels: 1 };
        assert_eq!(call.spec.input, LiveInput::Pcm(format));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, param) in [
            (json!({"input": {"encoding": "flac"}}), "input.encoding"),
            (json!({"input": {"encoding": "container", "sample_rate": 8000}}), "input.sample_rate"),
            (json!({"input": {"channels": 9}}), "input.channels"),
            (json!({"vad": {"threshold": 2}}), "vad.threshold"),
            (json!({"vad": {"silence_duration_ms": 0}}), "vad.silence_duration_ms"),
            (json!({"idle_timeout_s": 0}), "idle_timeout_s"),
            (json!({"language": "klingon"}), "language"),
            (json!({"task": "sing"}), "task"),
            (json!({"prompt": "x".repeat(20_000)}), "prompt"),
            (json!({"partials": "maybe"}), "partials"),
        ] {
            let error = read_session(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
        let call = read_session(json!({"colour": 1, "vad": {"shape": 2}})).unwrap();
        assert_eq!(call.unknown, ["vad.shape", "colour"]);
    }
}
