//! A response's body: events become bytes as they come, comments fill silence.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use tokio::time::{Instant, Sleep};

use super::choices::Total;
use super::{Choices, Writer};
use crate::http::recorder::Recorder;
use crate::observe::Outcome;
use crate::types::{ChatEvent, FinishReason};

/// Events that wait are written together, up to about so many bytes.
const TOGETHER: usize = 8 * 1024;

struct Body<W> {
    writer: W,
    choices: Choices,
    heartbeat: Duration,
    recorder: Recorder,
    /// Set again only when it fires: an event costs a look at the clock and no timer.
    timer: Pin<Box<Sleep>>,
    heard: Instant,
    total: Total,
    begun: bool,
    ended: bool,
}

impl<W: Writer> Body<W> {
    async fn next(&mut self) -> Bytes {
        if !self.begun {
            self.begun = true;
            let mut out = Vec::new();
            self.writer.begin(&mut out);
            if !out.is_empty() {
                self.recorder.written();
                return out.into();
            }
        }
        let event = loop {
            tokio::select! {
                biased;
                event = self.choices.next() => break event,
                () = &mut self.timer => {
                    let now = Instant::now();
                    let silent = now.saturating_duration_since(self.heard) >= self.heartbeat;
                    let from = if silent { now } else { self.heard };
                    self.heard = from;
                    self.timer.as_mut().reset(from + self.heartbeat);
                    if silent {
                        return Bytes::from_static(self.writer.heartbeat());
                    }
                }
            }
        };
        self.heard = Instant::now();
        let mut out = Vec::new();
        let mut event = event;
        while let Some((choice, happened)) = event {
            self.write(&mut out, choice, happened);
            if self.ended || out.len() >= TOGETHER {
                break;
            }
            event = self.choices.try_next();
        }
        out.into()
    }

    fn write(&mut self, out: &mut Vec<u8>, choice: usize, event: ChatEvent) {
        match event {
            ChatEvent::Done { finish, stop_string, usage, timings } => {
                self.writer.finish(out, choice, finish, stop_string.as_deref());
                self.total.add(choice, usage, timings);
                if self.choices.is_over() {
                    self.ended = true;
                    self.writer.end(out, self.total.usage);
                    self.recorder.closed(match finish {
                        FinishReason::Length => Outcome::Length,
                        FinishReason::Stop => Outcome::Stop,
                    });
                }
            }
            ChatEvent::Failed(failure) => {
                self.ended = true;
                self.writer.fail(out, failure);
                self.recorder.closed(Outcome::Failed);
            }
            piece => {
                self.writer.piece(out, choice, piece);
                self.recorder.written();
            }
        }
    }
}

/// The response's body. Dropping it drops the choices, which cancels the request.
pub fn body(
    writer: impl Writer,
    choices: Choices,
    heartbeat: Duration,
    recorder: Recorder,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let (timer, heard) = (Box::pin(tokio::time::sleep(heartbeat)), Instant::now());
    let (total, begun, ended) = (Total::default(), false, false);
    let body = Body { writer, choices, heartbeat, recorder, timer, heard, total, begun, ended };
    stream::unfold(body, |mut body| async move {
        if body.ended {
            return None;
        }
        let bytes = body.next().await;
        Some((Ok(bytes), body))
    })
}
