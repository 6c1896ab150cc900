//! The sending end of a request's events.
//!
//! Bounded, and never waited for. One slot is taken when the channel is made and kept
//! for the terminal event, so the end always arrives and never waits. A sink that is
//! dropped without an end says so itself: a receiver always sees exactly one terminal
//! event, whatever happened to the part that owned the sink.

use std::collections::VecDeque;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::types::{ChatEvent, Failure, FailureReason, TokenScores};

/// Events that fit, the terminal one's slot included.
pub(crate) const EVENT_SLOTS: usize = 64;

/// What became of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// They are on their way.
    Yes,
    /// The client does not read: no room now.
    Full,
    /// The client is gone.
    Closed,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct EventSink {
    tx: mpsc::Sender<ChatEvent>,
    end: Option<mpsc::OwnedPermit<ChatEvent>>,
}

/// What waits until the client has room for it, in order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    events: VecDeque<ChatEvent>,
}

impl Outbox {
    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Adds text, possibly none.
    pub(crate) fn text(&mut self, more: String) {
        if !more.is_empty() {
            self.push(ChatEvent::Text(more));
        }
    }

    /// Adds what was read of an answer. Text and thought join to what they follow.
    pub(crate) fn push(&mut self, event: ChatEvent) {
        match (self.events.back_mut(), event) {
            (Some(ChatEvent::Text(text)), ChatEvent::Text(more))
            | (Some(ChatEvent::Reasoning(text)), ChatEvent::Reasoning(more)) => text.push_str(&more),
            (_, event) => self.events.push_back(event),
        }
    }

    /// Adds log-probabilities, possibly none.
    pub(crate) fn scores(&mut self, more: Vec<TokenScores>) {
        match self.events.back_mut() {
            _ if more.is_empty() => {}
            Some(ChatEvent::Scores(scores)) => scores.extend(more),
            _ => self.events.push_back(ChatEvent::Scores(more)),
        }
    }
}

/// A bounded channel whose last slot belongs to the terminal event.
pub(crate) fn channel(slots: usize) -> (EventSink, mpsc::Receiver<ChatEvent>) {
    let (tx, rx) = mpsc::channel(slots.max(2));
    let end = tx.clone().try_reserve_owned().ok();
    (EventSink { tx, end }, rx)
}

impl EventSink {
    /// Whether the client has dropped its end.
    pub(crate) fn is_closed(&self) -> bool {
        self.tx.is_closed()
    }

    /// Sends what waits as far as there is room. Never waits.
    pub(crate) fn try_send(&self, outbox: &mut Outbox) -> Sent {
        while let Some(event) = outbox.events.pop_front() {
            match self.tx.try_send(event) {
                Ok(()) => {}
                Err(TrySendError::Full(event)) => {
                    outbox.events.push_front(event);
                    return Sent::Full;
                }
                Err(TrySendError::Closed(_)) => return Sent::Closed,
            }
        }
        Sent::Yes
    }

    /// Sends the terminal event through its slot and ends the channel.
    pub(crate) fn finish(mut self, event: ChatEvent) {
        debug_assert!(event.is_terminal());
        if let Some(slot) = self.end.take() {
            slot.send(event);
        }
    }
}

impl Drop for EventSink {
    /// Only a push into a queue: it neither waits nor runs anything.
    fn drop(&mut self) {
        if let Some(slot) = self.end.take() {
            slot.send(ChatEvent::Failed(Failure::new(
                FailureReason::ShuttingDown,
                "the server stopped before the answer was finished",
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str) -> Outbox {
        let mut outbox = Outbox::default();
        outbox.text(s.to_owned());
        outbox
    }

    #[test]
    fn the_end_has_a_slot_of_its_own() {
        let (sink, mut rx) = channel(3);
        assert_eq!(sink.try_send(&mut text("a")), Sent::Yes);
        assert_eq!(sink.try_send(&mut text("b")), Sent::Yes);
        let mut third = text("c");
        assert_eq!(sink.try_send(&mut third), Sent::Full);
        assert!(!third.is_empty(), "text that was not sent stays");
        let end = Failure::new(FailureReason::RowFailed, "x");
        sink.finish(ChatEvent::Failed(end.clone()));
        assert_eq!(rx.try_recv(), Ok(ChatEvent::Text("a".into())));
        assert_eq!(rx.try_recv(), Ok(ChatEvent::Text("b".into())));
        assert_eq!(rx.try_recv(), Ok(ChatEvent::Failed(end)));
        assert!(rx.try_recv().is_err());
    }

    #[test]
    fn a_dropped_sink_ends_the_stream_once() {
        let (sink, mut rx) = channel(8);
        drop(sink);
        assert!(rx.try_recv().is_ok_and(|event| event.is_terminal()));
        assert!(rx.try_recv().is_err());
    }

    #[test]
    fn a_dropped_receiver_is_seen() {
        let (sink, rx) = channel(8);
        drop(rx);
        assert!(sink.is_closed());
        assert_eq!(sink.try_send(&mut text("a")), Sent::Closed);
    }
}
