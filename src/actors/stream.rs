//! The sending end of a request's events.
//!
//! Bounded, and never waited for. One slot is taken when the channel is made and kept
//! for the terminal event, so the end always arrives and never waits. A sink that is
//! dropped without an end says so itself: a receiver always sees exactly one terminal
//! event, whatever happened to the part that owned the sink.

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::types::{ChatEvent, Failure, FailureReason};

/// Events that fit, the terminal one's slot included.
pub(crate) const EVENT_SLOTS: usize = 64;

/// What became of a piece of text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// It is on its way.
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

    /// Sends text if there is room; empties `text` only then. Never waits.
    pub(crate) fn try_text(&self, text: &mut String) -> Sent {
        if text.is_empty() {
            return Sent::Yes;
        }
        match self.tx.try_reserve() {
            Ok(slot) => {
                slot.send(ChatEvent::Text(std::mem::take(text)));
                Sent::Yes
            }
            Err(TrySendError::Full(())) => Sent::Full,
            Err(TrySendError::Closed(())) => Sent::Closed,
        }
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

    fn text(s: &str) -> String {
        s.to_owned()
    }

    #[test]
    fn the_end_has_a_slot_of_its_own() {
        let (sink, mut rx) = channel(3);
        assert_eq!(sink.try_text(&mut text("a")), Sent::Yes);
        assert_eq!(sink.try_text(&mut text("b")), Sent::Yes);
        let mut third = text("c");
        assert_eq!(sink.try_text(&mut third), Sent::Full);
        assert_eq!(third, "c", "text that was not sent stays");
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
        assert_eq!(sink.try_text(&mut text("a")), Sent::Closed);
    }
}
