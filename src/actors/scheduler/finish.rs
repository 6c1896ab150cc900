//! How rows leave: memory, last text, counts, the log line, the ticket, the end.

use std::time::Duration;

use crate::actors::scheduler::core::{Core, End};
use crate::actors::scheduler::row::{Flow, Row};
use crate::observe::{Outcome, fields};
use crate::types::{ChatEvent, FinishReason, Timings, Usage};

impl Core {
    /// A row that is in no list any more gives its memory back and ends, at once or when
    /// its last text is sent. Its sequence is kept before the client hears of the end, so
    /// that the client's next turn finds it.
    pub(crate) fn leave(&mut self, mut row: Row, end: End) {
        self.uncount(&mut row);
        self.deposit(&mut row, &end);
        if let End::Done(finish) = end {
            match row.flush(self.now(), self.settings.stall_timeout) {
                Flow::Closed => return self.conclude(row, End::Cancelled),
                Flow::Parked | Flow::Stalled => {
                    row.ended = Some(finish);
                    self.ending.push(row);
                    return;
                }
                Flow::Open => {}
            }
        } else if matches!(end, End::Failed(_)) {
            let _last_words = row.flush(self.now(), self.settings.stall_timeout);
        }
        self.conclude(row, end);
    }

    /// Counts, logs, gives the ticket back and sends the terminal event, in this order:
    /// whoever has seen the end sees the place free.
    pub(crate) fn conclude(&mut self, mut row: Row, end: End) {
        let now = self.now();
        self.uncount(&mut row);
        self.accounts.leave(&row.terms.client);
        if row.admitted().is_some() {
            self.rate.ended(now, !self.waiting.is_empty());
        }
        let (usage, timings) = (row.usage(), row.timings(now));
        let gauges = &self.settings.gauges;
        let outcome = match &end {
            End::Done(FinishReason::Stop) => Outcome::Stop,
            End::Done(FinishReason::Length) => Outcome::Length,
            End::Cancelled => Outcome::Cancelled,
            End::Failed(_) => Outcome::Failed,
        };
        gauges.ended(outcome);
        if matches!(end, End::Done(_)) {
            gauges.request_took(now.saturating_sub(row.ticket.accepted));
        }
        row.trace_end(outcome.as_str(), now);
        self.log(&row, &end, outcome, usage, timings);
        self.publish();
        let Row { ticket, events, stop_string, .. } = row;
        drop(ticket);
        match end {
            End::Done(finish) => events.finish(ChatEvent::Done { finish, stop_string, usage, timings }),
            End::Failed(failure) => events.finish(ChatEvent::Failed(failure)),
            // Nobody listens.
            End::Cancelled => {}
        }
    }

    fn log(&self, row: &Row, end: &End, outcome: Outcome, usage: Usage, timings: Timings) {
        let reason = match end {
            End::Failed(failure) => Some(failure.reason),
            _ => None,
        };
        tracing::info!(
            target: fields::REQUEST,
            request_id = %row.ticket.id,
            client_request_id = row.ticket.trace.client_id(),
            model = %self.settings.model,
            outcome = outcome.as_str(),
            reason = reason.map(tracing::field::debug),
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            completion_tokens = usage.completion_tokens,
            queued_ms = milliseconds(timings.queued),
            prefill_ms = milliseconds(timings.prefill),
            decode_ms = milliseconds(timings.decode),
            tokens_per_s = tokens_per_second(usage, timings),
            "chat"
        );
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The first token belongs to the prefill. One decimal; 0 when there is nothing to divide.
fn tokens_per_second(usage: Usage, timings: Timings) -> f64 {
    let seconds = timings.decode.as_secs_f64();
    if seconds <= 0.0 {
        return 0.0;
    }
    (f64::from(usage.completion_tokens.saturating_sub(1)) / seconds * 10.0).round() / 10.0
}
