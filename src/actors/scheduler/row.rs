//! A request inside the scheduler: tokens, how many of them are computed, and the
//! host's state for turning new ones into text.
//!
//! One rule for everything: a row owes `tokens − computed` tokens. More than one is
//! prefill, one is a decode step; whatever reaches the end of `tokens` samples. A row
//! whose memory is taken away has `computed = 0` and needs no other treatment. Host
//! state is never rebuilt: what was sent is history.

use std::sync::Arc;
use std::time::Duration;

use crate::actors::scheduler::plan::Prefilling;
use crate::actors::scheduler::stop::StopMatcher;
use crate::actors::stream::{EventSink, Sent};
use crate::model::text::TextModel;
use crate::model::tokenizer::Detokenizer;
use crate::types::{
    FinishReason, PreparedPrompt, SamplingParams, SequenceId, Ticket, Timings, TokenId, Usage,
};

/// Tokens that are set aside beyond the prompt when a row may produce many.
const HEADROOM_TOKENS: u32 = 256;
/// Up to so many tokens to produce, all of them are set aside.
const FULLY_RESERVED_TOKENS: u32 = 512;

/// See the module.
pub(crate) struct Row {
    /// Arrival: greater = younger. Names the row inside the scheduler.
    pub(crate) order: u64,
    pub(crate) ticket: Ticket,
    pub(crate) events: EventSink,
    /// Prompt, then output.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: u32,
    /// How many of `tokens` the sequence holds.
    pub(crate) computed: u32,
    pub(crate) sequence: Option<SequenceId>,
    pub(crate) sampling: Arc<SamplingParams>,
    /// Tokens of the prompt that were reused when the row was first admitted.
    pub(crate) cached: Option<u32>,
    pub(crate) passed_over: u32,
    /// Text that the client has no room for; while there is some the row is parked.
    pub(crate) outbox: String,
    pub(crate) stalled_since: Option<Duration>,
    /// Set when nothing more is computed and only text is left to be sent.
    pub(crate) ended: Option<FinishReason>,
    end_tokens: Vec<TokenId>,
    max_new_tokens: u32,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    admitted: Option<Duration>,
    first_token: Option<Duration>,
    last_token: Option<Duration>,
}

/// What a row's client makes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flow {
    /// All text is sent.
    Open,
    /// Text is kept until there is room.
    Parked,
    /// There was no room for too long.
    Stalled,
    /// The client is gone.
    Closed,
}

impl Row {
    pub(crate) fn new(
        order: u64,
        ticket: Ticket,
        prompt: PreparedPrompt,
        events: EventSink,
        text: Arc<TextModel>,
    ) -> Self {
        Self {
            order,
            ticket,
            events,
            prompt_tokens: count(prompt.tokens.len()),
            tokens: prompt.tokens,
            computed: 0,
            sequence: None,
            sampling: prompt.sampling,
            cached: None,
            passed_over: 0,
            outbox: String::new(),
            stalled_since: None,
            ended: None,
            end_tokens: prompt.stop.tokens,
            max_new_tokens: prompt.max_new_tokens,
            detokenizer: Detokenizer::new(text),
            stops: StopMatcher::new(&prompt.stop.strings),
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Tokens in all.
    pub(crate) fn len(&self) -> u32 {
        count(self.tokens.len())
    }

    /// Tokens still to be computed.
    pub(crate) fn owed(&self) -> u32 {
        self.len().saturating_sub(self.computed)
    }

    /// Tokens produced.
    pub(crate) fn produced(&self) -> u32 {
        self.len().saturating_sub(self.prompt_tokens)
    }

    /// The tokens produced.
    pub(crate) fn output(&self) -> &[TokenId] {
        self.tokens.get(self.prompt_tokens as usize..).unwrap_or(&[])
    }

    /// For the plan, if the row owes more than one token.
    pub(crate) fn prefilling(&self) -> Option<Prefilling> {
        let owed = self.owed();
        (owed > 1).then_some(Prefilling { owed, passed_over: self.passed_over })
    }

    /// Whether the client does not keep up.
    pub(crate) fn is_parked(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Tokens for which memory is set aside at admission.
    pub(crate) fn reservation(&self) -> u32 {
        let rest = self.max_new_tokens.saturating_sub(self.produced());
        let beyond = if rest <= FULLY_RESERVED_TOKENS { rest } else { HEADROOM_TOKENS };
        self.len().saturating_add(beyond)
    }

    /// Whether the row may need more memory than was set aside for it.
    pub(crate) fn may_grow(&self) -> bool {
        self.max_new_tokens > FULLY_RESERVED_TOKENS
    }

    /// The row got a sequence that holds `reused` of its tokens. True the first time.
    pub(crate) fn admit(&mut self, sequence: SequenceId, reused: u32, now: Duration) -> bool {
        self.sequence = Some(sequence);
        self.computed = reused;
        self.passed_over = 0;
        let first = self.cached.is_none();
        if first {
            self.cached = Some(reused);
            self.admitted = Some(now);
        }
        first
    }

    /// The row's memory is gone: it owes everything again.
    pub(crate) fn set_back(&mut self) {
        self.sequence = None;
        self.computed = 0;
        self.passed_over = 0;
    }

    /// Takes a new token: history, text, ends. Puts text into the outbox and says
    /// whether the row is finished.
    pub(crate) fn accept(&mut self, token: TokenId, context: u32, now: Duration) -> Option<FinishReason> {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.tokens.push(token);
        if self.end_tokens.contains(&token) {
            return Some(self.end_of_text(FinishReason::Stop));
        }
        let text = self.detokenizer.push(token);
        if self.deliver(&text) {
            return Some(FinishReason::Stop);
        }
        let full = self.produced() >= self.max_new_tokens || self.len() >= context;
        full.then(|| self.end_of_text(FinishReason::Length))
    }

    /// No token follows: releases half characters and withheld text.
    pub(crate) fn end_of_text(&mut self, reason: FinishReason) -> FinishReason {
        let tail = self.detokenizer.finish();
        if self.deliver(&tail) {
            return FinishReason::Stop;
        }
        let held = self.stops.finish();
        self.outbox.push_str(&held);
        reason
    }

    /// Puts what is certainly answer into the outbox; true when a stop string is complete.
    fn deliver(&mut self, text: &str) -> bool {
        let released = self.stops.push(text);
        self.outbox.push_str(&released.text);
        released.stopped
    }

    /// Sends what there is room for, and says how the client keeps up. Never waits.
    pub(crate) fn flush(&mut self, now: Duration, stall_timeout: Duration) -> Flow {
        if self.events.is_closed() {
            return Flow::Closed;
        }
        match self.events.try_text(&mut self.outbox) {
            Sent::Yes => {
                self.stalled_since = None;
                Flow::Open
            }
            Sent::Closed => Flow::Closed,
            Sent::Full => {
                let since = *self.stalled_since.get_or_insert(now);
                let stalled = now.saturating_sub(since) >= stall_timeout;
                if stalled { Flow::Stalled } else { Flow::Parked }
            }
        }
    }

    /// Token counts so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached.unwrap_or(0),
            completion_tokens: self.produced(),
        }
    }

    /// Where the time went, for a row that ends at `now`.
    pub(crate) fn timings(&self, now: Duration) -> Timings {
        let admitted = self.admitted.unwrap_or(now);
        let first = self.first_token.unwrap_or(now).max(admitted);
        let last = self.last_token.unwrap_or(first);
        Timings {
            queued: admitted.saturating_sub(self.ticket.accepted),
            prefill: first.saturating_sub(admitted),
            decode: last.saturating_sub(first),
        }
    }
}

/// Lengths are bounded by the context, a `u32`.
fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
