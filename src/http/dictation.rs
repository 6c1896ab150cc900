//! `GET /v1/audio/sessions/{id}/ws` and `/v1/audio/stream`: our own words over a WebSocket. Binary
//! messages are audio, text messages are JSON.

use actix_web::{HttpRequest, HttpResponse, web};
use actix_ws::CloseCode;
use bytes::Bytes;
use serde_json::{Value, json};

use super::api_error::ApiError;
use super::session_request::{read_query, read_session};
use super::socket::{Dialect, Step, talk};
use super::speech_sessions::{MAX_CHUNK, Teller, find, session_body};
use super::state::State;
use crate::actors::SpeechSession;
use crate::types::speech::{SessionNews, SessionSpec};

/// A connection to a session that is there.
pub(super) async fn attach(
    id: web::Path<String>,
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let session = find(&id, &state)?;
    let dialect = Dictation { state: state.clone(), asked: None, teller: None };
    talk(&request, payload, state, dialect, Some(session), None, MAX_CHUNK)
}

/// A connection that makes its session: as the query says, or, without one, as a first message of type
/// `config` says.
pub(super) async fn stream(
    request: HttpRequest,
    query: web::Query<Vec<(String, String)>>,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let call = read_query(&query)?;
    if let Some(name) = call.unknown.first() {
        return Err(ApiError::field(name, "unknown_parameter", "is not known here"));
    }
    let (asked, first) = match query.is_empty() {
        true => (Some(call.spec), None),
        false => (None, Some(Step::Open(Box::new(call.spec)))),
    };
    let dialect = Dictation { state: state.clone(), asked, teller: None };
    talk(&request, payload, state, dialect, None, first, MAX_CHUNK)
}

struct Dictation {
    state: web::Data<State>,
    /// What a session is to be, until there is one.
    asked: Option<SessionSpec>,
    teller: Option<Teller>,
}

impl Dictation {
    /// With a session before everything else.
    fn with_session(&mut self, step: Step) -> Vec<Step> {
        let open = self.asked.take().map(|spec| Step::Open(Box::new(spec)));
        open.into_iter().chain([step]).collect()
    }

    fn wrong(&mut self, field: &str, message: &str) -> Vec<Step> {
        let error = ApiError::field(field, "invalid_value", message);
        vec![Step::Say(self.refused(&error))]
    }
}

impl Dialect for Dictation {
    fn hello(&mut self) -> Vec<Value> {
        Vec::new()
    }

    fn text(&mut self, text: &str) -> Vec<Step> {
        let Ok(Value::Object(mut message)) = serde_json::from_str::<Value>(text) else {
            return self.wrong("message", "a text message must be a JSON object with a `type`");
        };
        let kind = message.shift_remove("type");
        match kind.as_ref().and_then(Value::as_str) {
            Some("config") if self.asked.is_some() => match read_session(message.into()) {
                Ok(call) => {
                    self.asked = None;
                    let warning = call.unknown.first().map(|name| {
                        let error = ApiError::field(name, "unknown_parameter", "is not known here");
                        Step::Fail(self.refused(&error), CloseCode::Policy)
                    });
                    vec![warning.unwrap_or(Step::Open(Box::new(call.spec)))]
                }
                Err(error) => vec![Step::Fail(self.refused(&error), CloseCode::Policy)],
            },
            Some("config") => self.wrong("type", "`config` must come before any audio, and once"),
            Some("commit") => self.with_session(Step::Commit),
            Some("clear") => self.with_session(Step::Clear),
            Some("finish") => self.with_session(Step::Finish),
            Some("cancel") => vec![Step::Cancel],
            Some("ping") => vec![Step::Say(json!({"type": "pong"}))],
            _ => self.wrong("type", "must be config, commit, clear, finish, cancel or ping"),
        }
    }

    fn binary(&mut self, bytes: Bytes) -> Vec<Step> {
        if bytes.is_empty() { Vec::new() } else { self.with_session(Step::Audio(bytes)) }
    }

    fn opened(&mut self, session: &SpeechSession) -> Vec<Value> {
        self.teller = Some(Teller::new(session));
        vec![json!({"type": "session.created", "session": session_body(session, &self.state)})]
    }

    fn news(&mut self, news: SessionNews) -> Vec<Value> {
        let told = self.teller.as_mut().map(|teller| teller.tell(news));
        told.into_iter().flatten().map(|(_, body)| body).collect()
    }

    fn refused(&mut self, error: &ApiError) -> Value {
        json!({"type": "error", "error": error.body().error})
    }

    /// Another connection may go on with it.
    fn ends_with_connection(&self) -> bool {
        false
    }
}
