//! A request inside the scheduler: tokens, how many of them are computed, and the
//! host's state for turning new ones into text.
//!
//! One rule for everything: a row owes `tokens − computed` tokens. More than one is
//! prefill, one is a decode step; whatever reaches the end of `tokens` samples. A row
//! whose memory is taken away has `computed = 0` and needs no other treatment. Host
//! state is never rebuilt: what was sent is history.

use std::sync::Arc;
use std::time::Duration;

use crate::actors::messages::Admit;
use crate::actors::scheduler::fairness::{Candidate, level};
use crate::actors::scheduler::fill::{Fill, MAX_SPAN, Policy, clamped};
use crate::actors::scheduler::lookup::PromptLookup;
use crate::actors::scheduler::placement::{HEADROOM_TOKENS, Placement};
use crate::actors::scheduler::plan::Prefilling;
use crate::actors::scheduler::read::AnswerReader;
use crate::actors::scheduler::reuse::Reuse;
use crate::actors::scheduler::scores::Scoring;
use crate::actors::scheduler::stop::StopMatcher;
use crate::actors::stream::{EventSink, Outbox, Sent};
use crate::model::sampler::Scores;
use crate::model::text::TextModel;
use crate::model::tokenizer::Detokenizer;
use crate::types::{
    ChatEvent, FinishReason, Priority, SamplingParams, SequenceId, Terms, Ticket, Timings, TokenId, Usage,
};

/// Up to so many tokens to produce, all of them are set aside.
const FULLY_RESERVED_TOKENS: u32 = 512;

/// See the module.
pub(crate) struct Row {
    /// Arrival: greater = younger. Names the row inside the scheduler.
    pub(crate) order: u64,
    pub(crate) ticket: Ticket,
    pub(crate) terms: Terms,
    pub(crate) placement: Placement,
    pub(crate) reuse: Reuse,
    pub(crate) events: EventSink,
    /// Prompt, then output.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: u32,
    /// How many of `tokens` the sequence holds.
    pub(crate) computed: u32,
    /// For how many tokens memory is set aside.
    pub(crate) held: u32,
    /// How many more are being computed in steps under way.
    pub(crate) ahead: u32,
    /// Tokens being drawn in steps under way.
    pub(crate) drawing: u32,
    /// What was planned in an earlier life is void: its memory or its place was lost since.
    pub(crate) life: u32,
    pub(crate) sequence: Option<SequenceId>,
    pub(crate) sampling: Arc<SamplingParams>,
    /// Tokens of the prompt that were reused when the row was first admitted.
    pub(crate) cached: Option<u32>,
    pub(crate) passed_over: u32,
    /// Its class with the age that it had when it began to run.
    pub(crate) level: Priority,
    /// The class of the most urgent row that waits for what it computes.
    pub(crate) raised: Option<Priority>,
    /// Younger ones that were admitted because they needed less memory.
    pub(crate) overtaken: u32,
    /// Steps that broke with this row in them.
    pub(crate) crashes: u8,
    /// Steps are taken alone until so many tokens are computed: one with this row in it broke.
    pub(crate) suspect_until: Option<u32>,
    /// Tokens that it holds after the step under way, or the last one.
    pub(crate) step_end: u32,
    /// It is among its client's running rows.
    pub(crate) counted: bool,
    /// When it was put into the queue first.
    pub(crate) enqueued: Duration,
    /// Tokens proposed to follow, to be verified in the next step.
    pub(crate) proposed: Vec<TokenId>,
    /// Output and proposed tokens in one piece, for the engine; only while a step is planned.
    verifying: Vec<TokenId>,
    fill: Option<Box<dyn Fill>>,
    /// When it was put into the queue; `None` while it runs.
    waiting_since: Option<Duration>,
    /// Earlier stretches in the queue.
    waited: Duration,
    /// What the client has no room for; while there is something the row is parked.
    pub(crate) outbox: Outbox,
    pub(crate) stalled_since: Option<Duration>,
    /// Set when nothing more is computed and only text is left to be sent.
    pub(crate) ended: Option<FinishReason>,
    end_tokens: Vec<TokenId>,
    max_new_tokens: u32,
    detokenizer: Detokenizer,
    /// `None`: the answer is text as it stands.
    reader: Option<Box<AnswerReader>>,
    reasoning_tokens: u32,
    stops: StopMatcher,
    /// Log-probabilities wanted, see [`crate::types::ChatRequest::scores`].
    pub(crate) scores: Option<u8>,
    scoring: Scoring,
    /// The stop string that ended it.
    pub(crate) stop_string: Option<String>,
    /// Bytes of text produced.
    written: usize,
    /// Of these, those that a stop string cut off.
    dropped: usize,
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
        admit: Admit,
        placement: Placement,
        text: Arc<TextModel>,
        now: Duration,
    ) -> Self {
        let Admit { ticket, terms, prompt, fill, events } = admit;
        let reads = prompt.read.is_some();
        let looked_up = || placement.lookup.then(|| Box::<PromptLookup>::default() as Box<dyn Fill>);
        Self {
            order,
            ticket,
            level: terms.priority,
            terms,
            fill: fill.filter(|_| placement.fill).or_else(looked_up),
            placement,
            reuse: Reuse::of(&prompt),
            raised: None,
            events,
            overtaken: 0,
            crashes: 0,
            suspect_until: None,
            step_end: 0,
            counted: false,
            enqueued: now,
            proposed: Vec::new(),
            verifying: Vec::new(),
            waiting_since: Some(now),
            waited: Duration::ZERO,
            prompt_tokens: count(prompt.tokens.len()),
            tokens: prompt.tokens,
            computed: 0,
            held: 0,
            ahead: 0,
            drawing: 0,
            life: 0,
            sequence: None,
            sampling: prompt.sampling,
            cached: None,
            passed_over: 0,
            outbox: Outbox::default(),
            stalled_since: None,
            ended: None,
            end_tokens: prompt.stop.tokens,
            max_new_tokens: prompt.max_new_tokens,
            reader: prompt.read.map(|read| Box::new(AnswerReader::new(&text, &read))),
            detokenizer: if reads { Detokenizer::with_markers(text) } else { Detokenizer::new(text) },
            reasoning_tokens: 0,
            stops: StopMatcher::new(&prompt.stop.strings),
            scores: prompt.scores,
            scoring: Scoring::default(),
            stop_string: None,
            written: 0,
            dropped: 0,
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Tokens in all.
    pub(crate) fn len(&self) -> u32 {
        count(self.tokens.len())
    }

    /// Tokens still to be computed, with those being drawn and without those under way.
    pub(crate) fn owed(&self) -> u32 {
        self.len().saturating_add(self.drawing).saturating_sub(self.next())
    }

    /// Position of the next token to be computed.
    pub(crate) fn next(&self) -> u32 {
        self.computed.saturating_add(self.ahead)
    }

    /// Whether what is being drawn leaves room for more, for all that can be known.
    fn goes_on(&self, context: u32) -> bool {
        self.drawing == 0
            || (self.produced() + self.drawing < self.max_new_tokens && self.len() + self.drawing < context)
    }

    /// Whether a step can take it on.
    pub(crate) fn is_ready(&self, context: u32) -> bool {
        !self.is_parked() && self.owed() > 0 && self.goes_on(context)
    }

    /// Nothing of what is under way will come.
    pub(crate) fn forget_ahead(&mut self) {
        (self.ahead, self.drawing) = (0, 0);
        self.life = self.life.wrapping_add(1);
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
    pub(crate) fn prefilling(&self, now: Duration, ageing: Duration) -> Option<Prefilling> {
        let age = now.saturating_sub(self.enqueued);
        let (owed, start) = (self.owed(), self.next());
        (!self.is_decoding()).then_some(Prefilling {
            owed,
            start,
            level: level(self.terms.priority, age, ageing).max(self.raised.unwrap_or(Priority::Background)),
            passed_over: self.passed_over,
        })
    }

    /// Whether it owes what it last produced, and nothing older: one token, or a run of known ones.
    pub(crate) fn is_decoding(&self) -> bool {
        let owed = self.owed();
        owed == 1 || (owed > 0 && owed <= self.produced() && owed as usize <= MAX_SPAN + 1)
    }

    /// Time spent in the queue.
    pub(crate) fn waited(&self, now: Duration) -> Duration {
        let stretch = self.waiting_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        self.waited.saturating_add(stretch)
    }

    /// For the choice of the next row.
    pub(crate) fn candidate(&self, now: Duration) -> Candidate<'_> {
        Candidate {
            order: self.order,
            priority: self.terms.priority,
            waited: self.waited(now),
            owed: self.owed(),
            client: &self.terms.client,
        }
    }

    /// It runs from now on, in the class that its age has brought it to.
    pub(crate) fn start(&mut self, now: Duration, ageing: Duration) {
        self.waited = self.waited(now);
        self.waiting_since = None;
        self.level = level(self.terms.priority, self.waited, ageing);
    }

    /// It waits from now on.
    pub(crate) fn wait(&mut self, now: Duration) {
        self.waiting_since = Some(now);
        self.overtaken = 0;
        self.passed_over = 0;
    }

    /// Has tokens looked up that may follow, at most `most` of them.
    pub(crate) fn look_up(&mut self, context: u32, most: usize) {
        let most = most.min(self.room_to_propose(context));
        if !self.placement.lookup || !self.proposed.is_empty() || most == 0 {
            return;
        }
        let Some(fill) = self.fill.as_mut() else { return };
        let Some(proposal) = fill.propose(&self.tokens, most) else { return };
        match clamped(proposal, &self.end_tokens, most) {
            Some(proposal) => self.proposed = proposal.tokens,
            None => fill.commit(0),
        }
    }

    /// Tokens worth proposing; see [`Fill::worth`].
    pub(crate) fn worth(&self, rows: usize, step: f64, token: f64) -> usize {
        self.fill.as_ref().map_or(0, |fill| fill.worth(rows, step, token))
    }

    /// Proposals beyond these could not be kept.
    fn room_to_propose(&self, context: u32) -> usize {
        let rest = self.max_new_tokens.saturating_sub(self.produced() + 1);
        rest.min(context.saturating_sub(self.len() + 1)) as usize
    }

    /// Its proposals are of no use: it has to compute something else first.
    pub(crate) fn drop_proposed(&mut self) {
        if !self.proposed.is_empty() {
            self.proposed.clear();
            self.taken(0);
        }
    }

    /// So many of the proposed tokens were right.
    pub(crate) fn taken(&mut self, count: usize) {
        if let Some(fill) = self.fill.as_mut() {
            fill.commit(count);
        }
    }

    /// Lays output and proposals side by side for [`Self::verified_input`].
    pub(crate) fn lay_out(&mut self) {
        self.verifying.clear();
        let output = self.tokens.get(self.prompt_tokens as usize..).unwrap_or(&[]);
        self.verifying.extend_from_slice(output);
        self.verifying.extend_from_slice(&self.proposed);
    }

    /// The last token with the proposals, and the output with the proposals.
    pub(crate) fn verified_input(&self) -> Option<(&[TokenId], &[TokenId])> {
        let start = self.verifying.len().checked_sub(self.proposed.len() + 1)?;
        Some((self.verifying.get(start..)?, &self.verifying))
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

    /// The row got a sequence with room for `held` tokens that has `reused` of its own. True the first time.
    pub(crate) fn admit(&mut self, sequence: SequenceId, reused: u32, held: u32, now: Duration) -> bool {
        self.sequence = Some(sequence);
        self.computed = reused;
        self.held = held;
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
        self.reuse.forget_state();
        (self.computed, self.held) = (0, 0);
        self.forget_ahead();
        self.drop_proposed();
    }

    /// Takes a new token: history, text, ends. Puts text into the outbox and says
    /// whether the row is finished.
    pub(crate) fn accept(
        &mut self,
        token: TokenId,
        scores: Option<Scores>,
        context: u32,
        now: Duration,
    ) -> Option<FinishReason> {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.tokens.push(token);
        if self.end_tokens.contains(&token) {
            return Some(self.end_of_text(FinishReason::Stop));
        }
        if let Some(scores) = scores {
            let at = self.written + self.detokenizer.pending();
            self.scoring.push(at, self.detokenizer.spelled(token, scores));
        }
        let text = self.detokenizer.push(token);
        if self.deliver(&text) {
            return Some(FinishReason::Stop);
        }
        let full = self.produced() >= self.max_new_tokens || self.len() >= context;
        full.then(|| self.end_of_text(FinishReason::Length))
    }

    /// Takes the tokens that are known to follow the last one, if any are.
    pub(crate) fn accept_known(&mut self, context: u32, now: Duration) -> Option<FinishReason> {
        if !self.placement.fill {
            return None;
        }
        let most = self.room_to_propose(context);
        let fill = self.fill.as_mut()?;
        let proposal = fill.propose(&self.tokens, most)?;
        let Some(proposal) = clamped(proposal, &self.end_tokens, most) else {
            fill.commit(0);
            return None;
        };
        if proposal.policy == Policy::Verify {
            self.proposed = proposal.tokens;
            return None;
        }
        self.taken(proposal.tokens.len());
        // Within the room there was, so only a stop string can end the answer here.
        proposal.tokens.into_iter().find_map(|token| self.accept(token, None, context, now))
    }

    /// No token follows: releases half characters and withheld text.
    pub(crate) fn end_of_text(&mut self, reason: FinishReason) -> FinishReason {
        let tail = self.detokenizer.finish();
        if self.deliver(&tail) {
            return FinishReason::Stop;
        }
        let rest = self.reader.take().map(|reader| reader.finish()).unwrap_or_default();
        let mut out = Vec::new();
        if self.cut(rest, &mut out) {
            self.send(out);
            return FinishReason::Stop;
        }
        let scores = self.scoring.finish();
        self.outbox.scores(scores);
        out.into_iter().for_each(|event| self.outbox.push(event));
        let held = self.stops.finish();
        self.outbox.text(held);
        reason
    }

    /// Puts what is certainly answer into the outbox; true when a stop string is complete.
    fn deliver(&mut self, text: &str) -> bool {
        self.written += text.len();
        let events = match &mut self.reader {
            Some(reader) => reader.push(text),
            None if text.is_empty() => Vec::new(),
            None => vec![ChatEvent::Text(text.to_owned())],
        };
        let mut out = Vec::new();
        let stopped = self.cut(events, &mut out);
        self.reasoning_tokens += u32::from(matches!(out.last(), Some(ChatEvent::Reasoning(_))));
        self.send(out);
        stopped
    }

    /// What of these events is certainly answer; true when a stop string is complete, in the text alone.
    fn cut(&mut self, events: Vec<ChatEvent>, out: &mut Vec<ChatEvent>) -> bool {
        for event in events {
            let ChatEvent::Text(text) = event else {
                // Text and what is not text are not one: what was withheld is no stop string.
                out.extend(Some(self.stops.finish()).filter(|held| !held.is_empty()).map(ChatEvent::Text));
                out.push(event);
                continue;
            };
            let released = self.stops.push(&text);
            self.dropped += released.dropped;
            out.extend(Some(released.text).filter(|text| !text.is_empty()).map(ChatEvent::Text));
            self.stop_string = released.stopped;
            if self.stop_string.is_some() {
                return true;
            }
        }
        false
    }

    /// Puts events into the outbox, before them the scores of the tokens that begin in them.
    fn send(&mut self, events: Vec<ChatEvent>) {
        let held = self.stops.held() + self.reader.as_ref().map_or(0, |reader| reader.held());
        let scores = self.scoring.release_to(self.written.saturating_sub(held + self.dropped));
        self.outbox.scores(scores);
        events.into_iter().for_each(|event| self.outbox.push(event));
    }

    /// Sends what there is room for, and says how the client keeps up. Never waits.
    pub(crate) fn flush(&mut self, now: Duration, stall_timeout: Duration) -> Flow {
        if self.events.is_closed() {
            return Flow::Closed;
        }
        match self.events.try_send(&mut self.outbox) {
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

    /// When it ran first.
    pub(crate) fn admitted(&self) -> Option<Duration> {
        self.admitted
    }

    /// Token counts so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached.unwrap_or(0),
            ssd_cached_tokens: self.disk_tokens(self.cached.unwrap_or(0)),
            created_tokens: if self.placement.prompt_cache {
                self.prompt_tokens.saturating_sub(self.cached.unwrap_or(0))
            } else {
                0
            },
            stripped_lines: self.reuse.stripped,
            completion_tokens: self.produced(),
            reasoning_tokens: self.reasoning_tokens,
        }
    }

    /// Records what is known only at the end.
    pub(crate) fn trace_end(&self, outcome: &'static str, now: Duration) {
        let trace = &self.ticket.trace;
        if let Some(admitted) = self.admitted {
            let first = self.first_token.unwrap_or(now);
            let cached = self.cached.unwrap_or(0);
            let spent = first.saturating_sub(admitted).as_millis() as u64;
            let attributes = [
                ("promptTokens", self.prompt_tokens.into()),
                ("cachedTokens", cached.into()),
                ("spentMs", spent.into()),
            ];
            trace.span("prefill.total", admitted, first, &attributes);
            if self.first_token.is_some() {
                trace.span("decode.total", first, now, &[("tokens", self.produced().into())]);
            }
        }
        trace.finish(outcome, now);
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
