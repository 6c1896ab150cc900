//! `GET /v1/realtime?intent=transcription`: OpenAI's realtime transcription over a WebSocket, in both of
//! its shapes (`session.update`, and the older `transcription_session.update`).
//!
//! A turn is an item. Its text grows with `….delta` events while it is spoken, and `….completed` brings
//! the whole, heard once more.

use std::collections::HashMap;
use std::time::Duration;

use actix_web::{HttpRequest, HttpResponse, web};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};

use super::api_error::ApiError;
use super::fields::Fields;
use super::identity::Identity;
use super::session_request::read_vad;
use super::socket::{Dialect, Step, talk};
use super::speech_request::check_text;
use super::state::State;
use crate::actors::SpeechSession;
use crate::types::Refusal;
use crate::types::speech::{
    LiveInput, PcmEncoding, PcmFormat, SessionEnd, SessionEvent, SessionNews, SessionSpec, VadOptions,
    language_code,
};

/// Largest message: 15 MiB of audio, in base64, and some words.
const MAX_MESSAGE: usize = 21 << 20;
/// OpenAI's usual pause that ends a turn is shorter than ours.
const VAD: VadOptions = VadOptions { min_silence_ms: 500, ..VadOptions::LIVE };
/// Shorter audio cannot be committed, seconds.
const LEAST_COMMIT_S: f64 = 0.1;

/// Opens the connection; the session comes with its first audio.
pub(super) async fn realtime(
    request: HttpRequest,
    query: web::Query<Vec<(String, String)>>,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let find = |name: &str| query.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    if let Some(intent) = find("intent").filter(|intent| intent != "transcription") {
        let shown: String = intent.chars().take(40).collect();
        let message = format!("`{shown}` is not served here; `transcription` is");
        return Err(ApiError::field("intent", "unsupported_value", message));
    }
    let beta = request.headers().get("openai-beta").is_some_and(|beta| beta.as_bytes() == b"realtime=v1");
    let served = state.handles.speech_model().ok_or_else(Refusal::no_speech_model)?;
    // OpenAI's clients name a model of the other kind of session here.
    let id = Identity::of(&request, &state).id;
    let dialect = Realtime::new(served, format!("sess_{id}"), beta);
    talk(&request, payload, state, dialect, None, None, MAX_MESSAGE)
}

/// A turn under way.
#[derive(Default)]
struct Item {
    id: String,
    /// Finished utterances.
    text: String,
    /// Committed text of the present utterance that was told, bytes.
    told: usize,
    has_text: bool,
    /// Of speech.
    seconds: f64,
    spoken_since: f64,
}

struct Realtime {
    served: String,
    beta: bool,
    spec: SessionSpec,
    /// As the client said them, for the echo.
    transcription: Value,
    turn_detection: Value,
    /// Audio has come: some things cannot be changed any more.
    is_open: bool,
    /// Seconds of audio since the latest commit.
    uncommitted: f64,
    events: u64,
    session_id: String,
    items: HashMap<usize, Item>,
    turns: HashMap<usize, usize>,
    previous: Option<String>,
}

impl Realtime {
    fn new(served: &str, session_id: String, beta: bool) -> Self {
        let mut spec = SessionSpec {
            input: pcm(PcmEncoding::S16, 24_000),
            // As long as the connection lasts.
            idle: Some(Duration::from_secs(86_400)),
            ..SessionSpec::default()
        };
        spec.options.vad = Some(VAD);
        Self {
            served: served.to_owned(),
            beta,
            spec,
            transcription: json!({"model": served}),
            turn_detection: vad_body(VAD),
            is_open: false,
            uncommitted: 0.0,
            events: 0,
            session_id,
            items: HashMap::new(),
            turns: HashMap::new(),
            previous: None,
        }
    }

    fn event(&mut self, kind: &str, mut body: Value) -> Value {
        self.events += 1;
        body["type"] = kind.into();
        body["event_id"] = format!("event_{}", self.events).into();
        body
    }

    fn format_body(&self) -> Value {
        match self.spec.input {
            LiveInput::Pcm(PcmFormat { encoding: PcmEncoding::MuLaw, .. }) => json!({"type": "audio/pcmu"}),
            LiveInput::Pcm(PcmFormat { encoding: PcmEncoding::ALaw, .. }) => json!({"type": "audio/pcma"}),
            LiveInput::Pcm(format) => json!({"type": "audio/pcm", "rate": format.rate}),
            LiveInput::Container => Value::Null,
        }
    }

    /// The session as it is understood.
    fn session_body(&self) -> Value {
        if self.beta {
            let format = match self.spec.input {
                LiveInput::Pcm(PcmFormat { encoding: PcmEncoding::MuLaw, .. }) => "g711_ulaw",
                LiveInput::Pcm(PcmFormat { encoding: PcmEncoding::ALaw, .. }) => "g711_alaw",
                _ => "pcm16",
            };
            return json!({
                "id": self.session_id, "object": "realtime.transcription_session", "input_audio_format": format,
                "input_audio_transcription": self.transcription, "turn_detection": self.turn_detection,
                "input_audio_noise_reduction": null, "include": null,
            });
        }
        json!({
            "id": self.session_id, "object": "realtime.transcription_session", "type": "transcription",
            "include": null,
            "audio": {"input": {
                "format": self.format_body(), "transcription": self.transcription, "noise_reduction": null,
                "turn_detection": self.turn_detection,
            }},
        })
    }

    fn error(&mut self, error: &ApiError, event_id: Option<&Value>) -> Value {
        let mut detail = json!(error.body().error);
        detail["event_id"] = event_id.cloned().unwrap_or_default();
        self.event("error", json!({"error": detail}))
    }

    /// Takes a session's JSON in; all of it or nothing.
    fn update(&mut self, session: Value, older: bool) -> Result<(), ApiError> {
        let mut fields = Fields::new("session", session)?;
        let (mut spec, mut transcription) = (self.spec.clone(), self.transcription.clone());
        let mut turn_detection = self.turn_detection.clone();
        match fields.string("type")?.as_deref() {
            None | Some("transcription") => {}
            Some(_) => {
                let message = "must be transcription: this server does not speak";
                return Err(ApiError::field("session.type", "unsupported_value", message));
            }
        }
        fields.unsupported("include", "log-probabilities are not told here", |include| {
            include.as_array().is_some_and(Vec::is_empty)
        })?;
        let mut input = match older {
            true => Some(fields),
            false => match fields.nested("audio")? {
                Some(mut audio) => audio.nested("input")?,
                None => None,
            },
        };
        if let Some(input) = &mut input {
            let names = match older {
                true => ["input_audio_format", "input_audio_transcription"],
                false => ["format", "transcription"],
            };
            if let Some(input) = read_format(input, names[0])? {
                if self.is_open && input != spec.input {
                    let message = "cannot be changed after audio was sent";
                    return Err(ApiError::field("session.audio.input.format", "invalid_value", message));
                }
                spec.input = input;
            }
            if let Some(mut wanted) = input.nested(names[1])? {
                let path = wanted.path("language");
                let language = wanted.string("language")?.filter(|language| !language.is_empty());
                spec.options.language = match &language {
                    Some(language) => Some(language_code(language).ok_or_else(|| {
                        ApiError::field(&path, "unsupported_language", "give a code such as en, de or ja")
                    })?),
                    None => None,
                };
                let prompt = wanted.string("prompt")?.unwrap_or_default();
                check_text(&wanted.path("prompt"), &prompt)?;
                spec.model = wanted.string("model")?.or(spec.model);
                transcription = json!({"model": self.served, "language": language, "prompt": prompt});
                spec.options.prompt = prompt;
            }
            if let Some(wanted) = input.value_or_null("turn_detection") {
                let (vad, manual, body) = read_turns(wanted)?;
                if self.is_open && body != turn_detection {
                    let message = "cannot be changed after audio was sent";
                    return Err(ApiError::field(
                        "session.audio.input.turn_detection",
                        "invalid_value",
                        message,
                    ));
                }
                (spec.options.vad, spec.manual_turns, turn_detection) = (Some(vad), manual, body);
            }
        }
        (self.spec, self.transcription, self.turn_detection) = (spec, transcription, turn_detection);
        Ok(())
    }

    fn append(&mut self, audio: Option<&Value>) -> Result<Vec<Step>, ApiError> {
        let text = audio.and_then(Value::as_str);
        let text = text.ok_or_else(|| ApiError::field("audio", "invalid_type", "must be base64 text"))?;
        let bytes = STANDARD
            .decode(text)
            .map_err(|error| ApiError::field("audio", "invalid_value", format!("is no base64: {error}")))?;
        if let LiveInput::Pcm(format) = self.spec.input {
            self.uncommitted += bytes.len() as f64 / format.bytes_per_second() as f64;
        }
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let mut steps = Vec::new();
        if !self.is_open {
            self.is_open = true;
            steps.push(Step::Open(Box::new(self.spec.clone())));
        }
        steps.push(Step::Audio(bytes.into()));
        Ok(steps)
    }

    /// The item of a turn, made when it is first spoken of.
    fn item(&mut self, turn: usize) -> &mut Item {
        let session = self.session_id.trim_start_matches("sess_");
        let id = format!("item_{}_{turn}", session.get(..12).unwrap_or(session));
        self.items.entry(turn).or_insert_with(|| Item { id, ..Item::default() })
    }

    /// What an utterance's committed text has grown by.
    fn grow(&mut self, utterance: usize, committed: &str, is_over: bool) -> Option<Value> {
        let turn = *self.turns.get(&utterance)?;
        let item = self.item(turn);
        let grown = committed.get(item.told..).unwrap_or_default();
        let space = if item.told == 0 && item.has_text { " " } else { "" };
        let delta = format!("{space}{grown}");
        item.told = if is_over { 0 } else { committed.len() };
        item.has_text |= !grown.is_empty();
        let id = item.id.clone();
        (!grown.is_empty()).then(|| {
            let body = json!({"item_id": id, "content_index": 0, "delta": delta});
            self.event("conversation.item.input_audio_transcription.delta", body)
        })
    }

    fn happened(&mut self, event: &SessionEvent) -> Vec<Value> {
        let ms = |seconds: f64| (seconds * 1000.0).round() as u64;
        match event {
            SessionEvent::SpeechStarted { utterance, turn, start } => {
                self.turns.insert(*utterance, *turn);
                let is_new = !self.items.contains_key(turn);
                let item = self.item(*turn);
                item.spoken_since = *start;
                let id = item.id.clone();
                if !is_new || self.spec.manual_turns {
                    return Vec::new();
                }
                let body = json!({"audio_start_ms": ms(*start), "item_id": id});
                vec![self.event("input_audio_buffer.speech_started", body)]
            }
            SessionEvent::SpeechStopped { utterance, end } => {
                if let Some(turn) = self.turns.get(utterance).copied() {
                    let item = self.item(turn);
                    item.seconds += end - item.spoken_since;
                }
                Vec::new()
            }
            SessionEvent::TurnEnded { turn, end } => {
                let spoke = self.items.contains_key(turn);
                if !self.spec.manual_turns {
                    self.uncommitted = 0.0;
                }
                let id = self.item(*turn).id.clone();
                let previous = self.previous.replace(id.clone());
                let mut out = Vec::new();
                if spoke && !self.spec.manual_turns {
                    let body = json!({"audio_end_ms": ms(*end), "item_id": id});
                    out.push(self.event("input_audio_buffer.speech_stopped", body));
                }
                let body = json!({"item_id": id, "previous_item_id": previous});
                out.push(self.event("input_audio_buffer.committed", body));
                let item = json!({
                    "id": id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
                    "content": [{"type": "input_audio", "transcript": null}],
                });
                let body = json!({"item": item, "previous_item_id": previous});
                if self.beta {
                    out.push(self.event("conversation.item.created", body));
                } else {
                    out.push(self.event("conversation.item.added", body.clone()));
                    out.push(self.event("conversation.item.done", body));
                }
                out
            }
            SessionEvent::Committed { utterance, text, .. } => {
                self.grow(*utterance, text, true).into_iter().collect()
            }
            SessionEvent::Final { utterance, text, .. } => {
                if let Some(turn) = self.turns.remove(utterance) {
                    let item = self.item(turn);
                    let space = if item.text.is_empty() || text.is_empty() { "" } else { " " };
                    item.text.push_str(space);
                    item.text.push_str(text);
                }
                Vec::new()
            }
            SessionEvent::TurnFinal { turn } => {
                let Some(item) = self.items.remove(turn) else { return Vec::new() };
                let body = json!({
                    "item_id": item.id, "content_index": 0, "transcript": item.text,
                    "usage": {"type": "duration", "seconds": item.seconds},
                });
                vec![self.event("conversation.item.input_audio_transcription.completed", body)]
            }
            SessionEvent::Cleared { turn } => {
                self.items.remove(turn);
                self.turns.retain(|_, of| of != turn);
                vec![self.event("input_audio_buffer.cleared", json!({}))]
            }
        }
    }
}

fn pcm(encoding: PcmEncoding, rate: u32) -> LiveInput {
    LiveInput::Pcm(PcmFormat { encoding, rate, channels: 1 })
}

fn vad_body(vad: VadOptions) -> Value {
    json!({
        "type": "server_vad", "threshold": (f64::from(vad.threshold) * 1e4).round() / 1e4,
        "prefix_padding_ms": vad.pad_ms, "silence_duration_ms": vad.min_silence_ms,
    })
}

/// `pcm16` and its like, or an object with a type.
fn read_format(fields: &mut Fields, name: &str) -> Result<Option<LiveInput>, ApiError> {
    let path = fields.path(name);
    let (kind, rate) = match fields.value(name) {
        None => return Ok(None),
        Some(Value::String(kind)) => (kind, None),
        Some(other) => {
            let mut format = Fields::new(path.clone(), other)?;
            (format.required_string("type")?, format.integer("rate", 8000, 48_000)?)
        }
    };
    let rate = rate.and_then(|rate| u32::try_from(rate).ok());
    match kind.as_str() {
        "audio/pcm" | "pcm16" => Ok(Some(pcm(PcmEncoding::S16, rate.unwrap_or(24_000)))),
        "audio/pcmu" | "g711_ulaw" => Ok(Some(pcm(PcmEncoding::MuLaw, 8000))),
        "audio/pcma" | "g711_alaw" => Ok(Some(pcm(PcmEncoding::ALaw, 8000))),
        _ => Err(ApiError::field(&path, "unsupported_value", "must be audio/pcm, audio/pcmu or audio/pcma")),
    }
}

/// How turns end: by silence, or (`null`) by the client.
fn read_turns(wanted: Value) -> Result<(VadOptions, bool, Value), ApiError> {
    if wanted.is_null() {
        return Ok((VAD, true, Value::Null));
    }
    let mut fields = Fields::new("session.audio.input.turn_detection", wanted)?;
    let path = fields.path("type");
    let vad = match fields.string("type")?.as_deref() {
        None | Some("server_vad") => read_vad(&mut fields, VAD)?,
        // Nobody knows here what was meant, only how patient to be.
        Some("semantic_vad") => {
            let min_silence_ms = match fields.string("eagerness")?.as_deref() {
                Some("low") => 1500,
                Some("high") => 400,
                _ => 800,
            };
            VadOptions { min_silence_ms, ..VAD }
        }
        Some(_) => {
            return Err(ApiError::field(&path, "unsupported_value", "must be server_vad or semantic_vad"));
        }
    };
    Ok((vad, false, vad_body(vad)))
}

impl Dialect for Realtime {
    fn hello(&mut self) -> Vec<Value> {
        let session = self.session_body();
        let kind = if self.beta { "transcription_session.created" } else { "session.created" };
        vec![self.event(kind, json!({"session": session}))]
    }

    fn text(&mut self, text: &str) -> Vec<Step> {
        let message = serde_json::from_str::<Value>(text).ok().filter(Value::is_object);
        let Some(mut message) = message else {
            let error = ApiError::field("message", "invalid_json", "must be a JSON object with a `type`");
            return vec![Step::Say(self.error(&error, None))];
        };
        let kind = message["type"].as_str().unwrap_or_default().to_owned();
        let done = match kind.as_str() {
            "session.update" | "transcription_session.update" => {
                let older = kind.starts_with("transcription");
                self.update(message["session"].take(), older).map(|()| {
                    let session = self.session_body();
                    let body = json!({"session": session});
                    let said = self
                        .event(if older { "transcription_session.updated" } else { "session.updated" }, body);
                    let change = self.is_open.then(|| Step::Configure(Box::new(self.spec.options.clone())));
                    change.into_iter().chain([Step::Say(said)]).collect()
                })
            }
            "input_audio_buffer.append" => self.append(message.get("audio")),
            "input_audio_buffer.commit" if self.uncommitted < LEAST_COMMIT_S => {
                let message = format!(
                    "the buffer holds {:.0} ms of audio; at least 100 ms are needed",
                    self.uncommitted * 1000.0
                );
                let code = "input_audio_buffer_commit_empty";
                Err(ApiError::invalid(actix_web::http::StatusCode::BAD_REQUEST, code, message))
            }
            "input_audio_buffer.commit" => {
                self.uncommitted = 0.0;
                Ok(vec![Step::Commit])
            }
            "input_audio_buffer.clear" => {
                // Less than a tenth of a second is not worth forgetting.
                let some = std::mem::take(&mut self.uncommitted) >= LEAST_COMMIT_S;
                if self.is_open && some {
                    Ok(vec![Step::Clear])
                } else {
                    Ok(vec![Step::Say(self.event("input_audio_buffer.cleared", json!({})))])
                }
            }
            other => {
                let shown: String = other.chars().take(60).collect();
                let message = format!("`{shown}` is no event of a transcription session");
                Err(ApiError::field("type", "unknown_event", message))
            }
        };
        done.unwrap_or_else(|error| vec![Step::Say(self.error(&error, message.get("event_id")))])
    }

    fn binary(&mut self, _: Bytes) -> Vec<Step> {
        let message = "binary messages are not understood here; send input_audio_buffer.append";
        let error = ApiError::field("message", "invalid_type", message);
        vec![Step::Say(self.error(&error, None))]
    }

    fn opened(&mut self, _: &SpeechSession) -> Vec<Value> {
        Vec::new()
    }

    fn news(&mut self, news: SessionNews) -> Vec<Value> {
        match news {
            SessionNews::Partial(partial) => {
                self.grow(partial.utterance, &partial.committed, false).into_iter().collect()
            }
            SessionNews::Event(event) => self.happened(&event),
            SessionNews::End(SessionEnd::Failed(failure)) => {
                let error = ApiError::from(failure);
                let mut open: Vec<String> = self.items.drain().map(|(_, item)| item.id).collect();
                open.sort();
                let failed = open.into_iter().map(|id| {
                    let body = json!({"item_id": id, "content_index": 0, "error": error.body().error});
                    self.event("conversation.item.input_audio_transcription.failed", body)
                });
                let mut out: Vec<Value> = failed.collect();
                out.push(self.error(&error, None));
                out
            }
            SessionNews::End(_) => Vec::new(),
        }
    }

    fn refused(&mut self, error: &ApiError) -> Value {
        self.error(error, None)
    }

    fn ends_with_connection(&self) -> bool {
        true
    }
}
