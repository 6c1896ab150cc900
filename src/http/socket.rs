//! Live sessions over a WebSocket: one loop for every protocol that is spoken over it.
//!
//! The loop reads no further while audio waits for room, and tells no faster than its client reads:
//! text under way that was not read in time is left out, nothing else ever is.

use std::collections::VecDeque;
use std::future::pending;
use std::time::Duration;

use actix_web::{HttpRequest, HttpResponse, web};
use actix_ws::{AggregatedMessage, AggregatedMessageStream, CloseCode, CloseReason, Session};
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::Value;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use super::api_error::ApiError;
use super::state::State;
use crate::actors::{SessionReader, SpeechSession};
use crate::types::speech::{AppendError, SessionEnd, SessionNews, SessionSpec, SpeechFailure, SpeechOptions};

/// Between two signs of life; a client that gave none for two of them is gone.
const PING: Duration = Duration::from_secs(20);
/// A client that takes nothing for so long is gone.
const PATIENCE: Duration = Duration::from_secs(40);
/// What is said in a WebSocket's own words.
const MAX_REASON: usize = 120;

/// What a client's message asks for.
pub(super) enum Step {
    /// A session like this, unless there is one.
    Open(Box<SessionSpec>),
    /// Audio.
    Audio(Bytes),
    /// The turn ends.
    Commit,
    /// The turn is forgotten.
    Clear,
    /// From the next utterance on.
    Configure(Box<SpeechOptions>),
    /// No more audio.
    Finish,
    /// Give up.
    Cancel,
    /// Say this.
    Say(Value),
    /// Say this, and that was all.
    Fail(Value, CloseCode),
}

/// A protocol: pure, from messages to steps and from news to messages.
pub(super) trait Dialect {
    /// What is said first.
    fn hello(&mut self) -> Vec<Value>;
    /// A text message.
    fn text(&mut self, text: &str) -> Vec<Step>;
    /// A binary message.
    fn binary(&mut self, bytes: Bytes) -> Vec<Step>;
    /// The session is there.
    fn opened(&mut self, session: &SpeechSession) -> Vec<Value>;
    /// Something happened.
    fn news(&mut self, news: SessionNews) -> Vec<Value>;
    /// Something was refused.
    fn refused(&mut self, error: &ApiError) -> Value;
    /// A session ends with its connection.
    fn ends_with_connection(&self) -> bool;
}

/// Answers a request with a connection, and talks on it, of a session that is there or of one that `first`
/// (or a message) opens.
pub(super) fn talk(
    request: &HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
    dialect: impl Dialect + 'static,
    session: Option<SpeechSession>,
    first: Option<Step>,
    max_message: usize,
) -> Result<HttpResponse, ApiError> {
    let protocols = ["realtime"];
    let (response, socket, messages) = actix_ws::handle_with_protocols(request, payload, &protocols)
        .map_err(|error| {
            let message = format!("a WebSocket handshake is needed here: {error}");
            let status = actix_web::http::StatusCode::BAD_REQUEST;
            ApiError::invalid(status, "websocket_required", message).closing()
        })?;
    // A message may come in pieces; together they are bounded as well.
    let messages =
        messages.max_frame_size(max_message).aggregate_continuations().max_continuation_size(max_message);
    let reader = session.as_ref().map(SpeechSession::reader);
    let steps = first.into_iter().collect();
    let talk = Talk { state, dialect, socket, session, reader, ends: None, steps };
    actix_web::rt::spawn(talk.run(messages));
    Ok(response)
}

struct Talk<D> {
    state: web::Data<State>,
    dialect: D,
    socket: Session,
    session: Option<SpeechSession>,
    reader: Option<SessionReader>,
    /// A session that goes with its connection.
    ends: Option<Ends>,
    /// What the client's messages ask for and was not done yet.
    steps: VecDeque<Step>,
}

/// Cancels a session when its connection goes, however that comes about.
struct Ends(SpeechSession);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Why a talk is over.
enum Over {
    /// Said by us.
    Closed(CloseCode, String),
    /// The client closed, or is gone.
    Gone,
}

impl<D: Dialect> Talk<D> {
    async fn run(mut self, messages: AggregatedMessageStream) {
        let over = self.talk(messages).await;
        drop(self.ends.take());
        if let Over::Closed(code, reason) = over {
            let reason = reason.chars().take(MAX_REASON).collect::<String>();
            let description = (!reason.is_empty()).then_some(reason);
            // The client may be gone already.
            let close = self.socket.close(Some(CloseReason { code, description }));
            let _gone = timeout(PATIENCE, close).await;
        }
    }

    async fn talk(&mut self, mut messages: AggregatedMessageStream) -> Over {
        let hello = self.dialect.hello();
        if self.say(hello).await.is_err() {
            return Over::Gone;
        }
        if let Some(session) = self.session.clone() {
            let words = self.dialect.opened(&session);
            if self.say(words).await.is_err() {
                return Over::Gone;
            }
        }
        let mut ping = interval_at(Instant::now() + PING, PING);
        // A tick that came late because telling took long must not be followed by the next at once.
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = true;
        loop {
            let waiting = match self.work().await {
                Ok(waiting) => waiting,
                Err(over) => return over,
            };
            let session = self.session.clone();
            tokio::select! {
                news = next(&mut self.reader) => {
                    let end = if let SessionNews::End(end) = &news { Some(end.clone()) } else { None };
                    let words = self.dialect.news(news);
                    if self.say(words).await.is_err() {
                        return Over::Gone;
                    }
                    if let Some(end) = end {
                        return closing(&end);
                    }
                }
                () = room(session.as_ref(), waiting) => {}
                message = messages.next(), if waiting.is_none() => {
                    heard = true;
                    match message {
                        Some(Ok(AggregatedMessage::Text(text))) => self.steps.extend(self.dialect.text(&text)),
                        Some(Ok(AggregatedMessage::Binary(bytes))) => self.steps.extend(self.dialect.binary(bytes)),
                        Some(Ok(AggregatedMessage::Ping(bytes))) => {
                            if in_time(self.socket.pong(&bytes)).await.is_err() {
                                return Over::Gone;
                            }
                        }
                        Some(Ok(AggregatedMessage::Pong(_))) => {}
                        Some(Ok(AggregatedMessage::Close(_))) => return Over::Closed(CloseCode::Normal, String::new()),
                        Some(Err(actix_ws::ProtocolError::Overflow)) => {
                            return Over::Closed(CloseCode::Size, "the message is too large".into());
                        }
                        Some(Err(error)) => return Over::Closed(CloseCode::Protocol, error.to_string()),
                        None => return Over::Gone,
                    }
                }
                _ = ping.tick() => {
                    if !heard || in_time(self.socket.ping(b"")).await.is_err() {
                        return Over::Gone;
                    }
                    // While we read no further, a client cannot show that it is there.
                    heard = waiting.is_some();
                    if let Some(session) = session.filter(|_| heard) {
                        session.touch();
                    }
                }
            }
        }
    }

    async fn say(&mut self, words: Vec<Value>) -> Result<(), ()> {
        for word in words {
            in_time(self.socket.text(word.to_string())).await?;
        }
        Ok(())
    }

    /// Does what was asked; how many bytes of audio wait for room.
    async fn work(&mut self) -> Result<Option<usize>, Over> {
        while let Some(step) = self.steps.pop_front() {
            let mut words = Vec::new();
            let done = match (step, &self.session) {
                (Step::Open(spec), None) => {
                    let session = match self.state.handles.open_session(*spec).await {
                        Ok(session) => session,
                        Err(refusal) => {
                            let error = ApiError::from(refusal);
                            let words = vec![self.dialect.refused(&error)];
                            self.say(words).await.map_err(|()| Over::Gone)?;
                            let code = if error.status.is_server_error() || error.retry_after.is_some() {
                                CloseCode::Again
                            } else {
                                CloseCode::Policy
                            };
                            return Err(Over::Closed(code, error.message));
                        }
                    };
                    words = self.dialect.opened(&session);
                    self.ends = self.dialect.ends_with_connection().then(|| Ends(session.clone()));
                    self.reader = Some(session.reader());
                    self.session = Some(session);
                    Ok(())
                }
                (Step::Open(_), Some(_)) => Ok(()),
                (Step::Audio(bytes), Some(session)) => match session.append(None, bytes.clone()) {
                    Err(AppendError::Full) => {
                        let size = bytes.len();
                        self.steps.push_front(Step::Audio(bytes));
                        return Ok(Some(size));
                    }
                    done => done.map(|_| ()),
                },
                (Step::Commit, Some(session)) => session.commit().map(|_| ()),
                (Step::Clear, Some(session)) => session.clear().map(|_| ()),
                (Step::Configure(options), Some(session)) => {
                    session.configure(*options);
                    Ok(())
                }
                (Step::Finish, Some(session)) => {
                    session.finish();
                    Ok(())
                }
                (Step::Cancel, Some(session)) => {
                    session.cancel();
                    Ok(())
                }
                (Step::Cancel | Step::Finish, None) => {
                    return Err(Over::Closed(CloseCode::Normal, String::new()));
                }
                (Step::Say(word), session) => {
                    if let Some(session) = session {
                        session.touch();
                    }
                    words.push(word);
                    Ok(())
                }
                (Step::Fail(word, code), _) => {
                    self.say(vec![word]).await.map_err(|()| Over::Gone)?;
                    return Err(Over::Closed(code, String::new()));
                }
                // A dialect opens a session before it does anything else with it.
                (Step::Audio(_) | Step::Commit | Step::Clear | Step::Configure(_), None) => Ok(()),
            };
            if let Err(error) = done {
                words.push(self.dialect.refused(&error.into()));
            }
            self.say(words).await.map_err(|()| Over::Gone)?;
        }
        Ok(None)
    }
}

/// Sends, unless the client takes nothing for too long.
async fn in_time(sending: impl Future<Output = Result<(), actix_ws::Closed>>) -> Result<(), ()> {
    timeout(PATIENCE, sending).await.map_err(|_| ())?.map_err(|_| ())
}

/// Waits for a session's news; for ever without one.
async fn next(reader: &mut Option<SessionReader>) -> SessionNews {
    match reader {
        Some(reader) => match reader.next().await {
            Some(news) => news,
            None => pending().await,
        },
        None => pending().await,
    }
}

/// Waits for room for audio; for ever where none waits.
async fn room(session: Option<&SpeechSession>, waiting: Option<usize>) {
    match (session, waiting) {
        (Some(session), Some(size)) => session.room(size).await,
        _ => pending().await,
    }
}

fn closing(end: &SessionEnd) -> Over {
    let code = match end {
        SessionEnd::Done(_) | SessionEnd::Cancelled => CloseCode::Normal,
        SessionEnd::Failed(SpeechFailure::Audio(_) | SpeechFailure::Option { .. }) => CloseCode::Policy,
        SessionEnd::Failed(SpeechFailure::ShuttingDown | SpeechFailure::Unavailable { .. }) => {
            CloseCode::Again
        }
        SessionEnd::Failed(_) => CloseCode::Error,
    };
    Over::Closed(code, String::new())
}
