//! One step: plan, make room, submit, commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::actors::scheduler::ahead::UnderWay;
use crate::actors::scheduler::core::{Core, End, panic_message};
use crate::actors::scheduler::fairness::{OUTPUT_SERVICE, PROMPT_SERVICE};
use crate::actors::scheduler::pace::Work;
use crate::actors::scheduler::placement::Lane;
use crate::actors::scheduler::plan::{Decoding, Prefilling, share};
use crate::actors::scheduler::row::{Flow, Row};
use crate::model::sampler::Scores;
use crate::model::{PREVIOUS, PlanRow, RowOutcome, SampleFor, StepHandle, StepOutcome, StepPlan, Want};
use crate::types::{EngineError, Failure, FailureReason, Priority, TokenId};

/// Tokens proposed a row before a step's time is known.
const UNMEASURED_PROPOSALS: usize = 4;

/// A row's part of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) order: u64,
    /// The row's, see [`Row::life`].
    life: u32,
    /// Position of its first token.
    start: u32,
    /// Tokens computed, proposed ones included.
    tokens: u32,
    /// How many of them are proposed.
    proposed: u32,
    /// It reaches the end of the row's tokens, so a new one is drawn.
    samples: bool,
    /// Its one token is what the step before draws.
    follows: bool,
    /// A piece of a prompt, or of what is computed anew.
    prefill: bool,
}

impl Span {
    /// Whether it is this row's, which has not lost its place since it was planned.
    fn is_of(&self, row: &Row) -> bool {
        row.order == self.order && row.life == self.life
    }
}

impl Core {
    /// True if there is more to do at once: something was begun, computed or given up.
    pub(crate) fn compute(&mut self, turn: Option<Duration>) -> Result<bool, EngineError> {
        self.in_step.clear();
        self.close_released();
        self.sweep();
        if self.engine.is_none() {
            return Ok(false);
        }
        self.admit_waiting()?;
        let ahead = self.may_run_ahead(turn);
        if !(ahead && self.has_followers())
            && let Some(step) = self.under_way.take()
        {
            // Who ends with it makes room for others, who are admitted before the next one.
            return self.finish(step);
        }
        let spans = self.plan(turn);
        let spans = self.with_room(spans)?;
        let follows = spans.iter().any(|span| span.follows);
        if !follows && let Some(step) = self.under_way.take() {
            // For lack of memory nothing follows it any more.
            return self.finish(step);
        }
        if spans.is_empty() {
            return Ok(self.memory_short);
        }
        let begun = self.now();
        let handle = match catch_unwind(AssertUnwindSafe(|| self.submit(&spans))) {
            Ok(Ok(handle)) => handle,
            Ok(Err(error)) => {
                self.refused(&spans, error)?;
                return self.finish_wasted();
            }
            Err(payload) => return self.broke(EngineError::Panicked { message: panic_message(&*payload) }),
        };
        let step = UnderWay { handle, spans, begun };
        if !ahead {
            return self.finish(step);
        }
        match self.under_way.replace(step) {
            Some(before) => {
                self.settings.gauges.overlapped_steps.up();
                self.finish(before)
            }
            None => Ok(true),
        }
    }

    /// Tokens for every running row whose client keeps up. Rows that must be alone take turns
    /// with all others together.
    fn plan(&mut self, turn: Option<Duration>) -> Vec<Span> {
        let context = self.model_context();
        let ready = |row: &Row| row.is_ready(context);
        let alone = |row: &Row| row.placement.lane == Lane::Serial || row.suspect_until.is_some();
        let first = self.running.iter().find(|row| ready(row) && alone(row)).map(|row| row.order);
        let others = self.running.iter().any(|row| ready(row) && !alone(row));
        let lone = first.filter(|_| !others || !self.alone_last);
        self.alone_last = lone.is_some();
        match lone {
            Some(order) => {
                // The others wait: as long as between two of their tokens, no longer.
                let limit = others.then_some(self.settings.limits.max_itl);
                let turn = [turn, limit].into_iter().flatten().min();
                self.spans(|row| row.order == order, turn)
            }
            None => self.spans(|row| ready(row) && !alone(row), turn),
        }
    }

    fn spans(&mut self, takes_part: impl Fn(&Row) -> bool, turn: Option<Duration>) -> Vec<Span> {
        let decoding = self.decoding(&takes_part);
        let (now, ageing) = (self.now(), self.settings.ageing);
        let rows = self.running.iter().filter(|row| takes_part(row));
        let prefilling: Vec<Prefilling> = rows.filter_map(|row| row.prefilling(now, ageing)).collect();
        let quiet = decoding.watched && self.pace.wants_quiet();
        let given = match quiet {
            true => vec![0; prefilling.len()],
            false => share(&prefilling, &decoding, &self.settings.limits, &self.pace, turn),
        };
        let mut given = given.into_iter();
        let mut spans = Vec::new();
        let trims = self.engine.as_ref().is_none_or(|engine| engine.info().trims);
        for row in self.running.iter_mut().filter(|row| takes_part(row)) {
            let prefill = !row.is_decoding();
            let tokens = if prefill { given.next().unwrap_or(0) } else { row.owed() };
            // A state that cannot be cut back is kept where the next prompt leaves this one.
            let before_stable = row.reuse.stable.saturating_sub(row.next());
            let cuts = prefill && !trims && before_stable > 0;
            let tokens = if cuts { tokens.min(before_stable) } else { tokens };
            if tokens == 0 {
                row.passed_over = row.passed_over.saturating_add(u32::from(!quiet));
                continue;
            }
            row.passed_over = 0;
            if row.owed() > 1 {
                row.drop_proposed();
            }
            let proposed = u32::try_from(row.proposed.len()).unwrap_or(0);
            let samples = tokens == row.owed();
            spans.push(Span {
                order: row.order,
                life: row.life,
                start: row.next(),
                tokens: tokens + proposed,
                proposed,
                samples,
                follows: row.drawing > 0,
                prefill,
            });
        }
        spans
    }

    /// The decode side of a step, with what is proposed for it.
    fn decoding(&mut self, takes_part: impl Fn(&Row) -> bool) -> Decoding {
        let mut decoding = Decoding::default();
        let mut count = 0;
        for row in self.running.iter().filter(|row| takes_part(row) && row.is_decoding()) {
            decoding.work = decoding.work.with_decode(row.next(), row.owed());
            decoding.watched |= row.terms.priority > Priority::Background;
            count += 1;
        }
        let context = self.model_context();
        let step = self.pace.seconds(decoding.work);
        let able = |row: &&mut Row| row.placement.lookup && row.owed() == 1 && row.produced() > 0;
        for row in self.running.iter_mut().filter(|row| takes_part(row)).filter(able) {
            let worth = if step > 0.0 {
                row.worth(count, step, self.pace.decode_token(row.len()))
            } else {
                UNMEASURED_PROPOSALS
            };
            row.look_up(context, worth);
            let proposed = u32::try_from(row.proposed.len()).unwrap_or(0);
            decoding.work = decoding.work.with_decode(row.len(), proposed);
        }
        decoding
    }

    /// Drops the spans of rows that had to go for lack of memory. Nothing is taken from anybody for
    /// proposals, nor for a row that may end with the step under way.
    fn with_room(&mut self, spans: Vec<Span>) -> Result<Vec<Span>, EngineError> {
        let mut kept = Vec::with_capacity(spans.len());
        for mut span in spans {
            self.in_step.clear();
            self.in_step.push(span.order);
            let end = span.start.saturating_add(span.tokens);
            let mut is_free = self.has_room(span.order, end)?;
            if self.find_running(span.order).is_some_and(|row| row.ahead > 0) {
                // Kept rows are nobody's.
                while !is_free && self.evict() {
                    is_free = self.has_room(span.order, end)?;
                }
                if !is_free {
                    continue;
                }
            }
            if !is_free && span.proposed > 0 {
                if let Some(row) = self.find_running(span.order) {
                    row.drop_proposed();
                }
                span.tokens -= std::mem::take(&mut span.proposed);
            }
            if is_free || self.make_room(span.order, span.start.saturating_add(span.tokens))? {
                kept.push(span);
            }
        }
        self.in_step.clear();
        // Room for one may have been another's.
        kept.retain(|span| self.find_alive(span).is_some());
        Ok(kept)
    }

    fn submit(&mut self, spans: &[Span]) -> Result<StepHandle, EngineError> {
        self.in_step = spans.iter().map(|span| span.order).collect();
        for span in spans {
            if let Some(row) = self.find_running(span.order) {
                row.step_end = span.start + span.tokens;
                if span.proposed > 0 {
                    row.lay_out();
                }
            }
        }
        let Some(engine) = self.engine.as_mut() else {
            return Err(EngineError::InvalidPlan { message: "there is no engine".into() });
        };
        let mut running = self.running.iter();
        // Spans are in the order of the rows.
        let rows: Vec<PlanRow<'_>> = spans
            .iter()
            .filter_map(|span| plan_row(running.find(|row| row.order == span.order)?, *span))
            .collect();
        if rows.len() != spans.len() {
            return Err(EngineError::InvalidPlan { message: "a row is not what was planned".into() });
        }
        let handle = engine.submit(&StepPlan { rows })?;
        for span in spans {
            if let Some(row) = self.find_running(span.order) {
                row.ahead += span.tokens;
                row.drawing += u32::from(span.samples);
            }
        }
        Ok(handle)
    }

    /// The step did not run. A plan that breaks a rule costs its rows, anything else is a break.
    pub(crate) fn refused(&mut self, spans: &[Span], error: EngineError) -> Result<bool, EngineError> {
        if matches!(
            error,
            EngineError::Device { .. } | EngineError::Panicked { .. } | EngineError::NotANumber
        ) {
            return self.broke(error);
        }
        tracing::error!(target: crate::observe::fields::ENGINE, %error, "a step was refused");
        for span in spans {
            if self.find_alive(span).is_some() {
                self.fail_row(span.order, &error);
            }
        }
        self.in_step.clear();
        Ok(true)
    }

    pub(crate) fn measure(&mut self, spans: &[Span], before: Duration) {
        let now = self.now();
        let work = spans.iter().fold(Work::default(), |work, span| {
            let add = if span.prefill { Work::with_prompt } else { Work::with_decode };
            add(work, span.start, span.tokens)
        });
        let took = now.saturating_sub(before);
        self.pace.record(work, took);
        self.settings.gauges.steps.up();
        self.settings.gauges.step_seconds.record(took);
        for span in spans.iter().filter(|span| span.prefill) {
            let Some(row) = self.running.iter().find(|row| span.is_of(row)) else { continue };
            self.accounts.charge(&row.terms.client, u64::from(span.tokens) * PROMPT_SERVICE);
            let attributes = [
                ("startToken", span.start.into()),
                ("tokens", span.tokens.into()),
                ("decodeTokens", work.decode_tokens.into()),
                ("rows", spans.len().into()),
            ];
            row.ticket.trace.span("prefill.chunk", before, now, &attributes);
        }
    }

    pub(crate) fn commit(&mut self, spans: &[Span], outcome: StepOutcome) {
        for (span, outcome) in spans.iter().zip(outcome.rows) {
            let Some(row) = self.find_alive(span) else { continue };
            row.ahead -= span.tokens;
            row.drawing -= u32::from(span.samples);
            match outcome {
                RowOutcome::Advanced if !span.samples => {
                    self.advance(span.order, span.tokens);
                    self.publish_prefix(span.order);
                }
                RowOutcome::Sampled { token, scores } if span.samples && span.proposed == 0 => {
                    self.advance(span.order, span.tokens);
                    if span.prefill {
                        self.publish_prefix(span.order);
                    }
                    self.accept(span.order, &[token], scores);
                }
                RowOutcome::Verified { tokens } if span.proposed > 0 && is_verified(span, &tokens) => {
                    self.verified(span, &tokens);
                }
                RowOutcome::Failed(error) => self.fail_row(span.order, &error),
                RowOutcome::Advanced
                | RowOutcome::Sampled { .. }
                | RowOutcome::Verified { .. }
                | RowOutcome::Logits(_) => {
                    let message = "the outcome is not what the plan wanted".into();
                    self.fail_row(span.order, &EngineError::InvalidPlan { message });
                }
            }
        }
    }

    fn verified(&mut self, span: &Span, tokens: &[TokenId]) {
        let right = tokens.len() - 1;
        let gauges = &self.settings.gauges;
        gauges.proposed_tokens.add(u64::from(span.proposed));
        gauges.proposed_right_tokens.add(right as u64);
        if let Some(row) = self.find_running(span.order) {
            row.proposed.clear();
            row.taken(right);
        }
        self.advance(span.order, u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        self.accept(span.order, tokens, None);
    }

    /// The span's row, unless it lost its place while the step was under way, and this with it.
    fn find_alive(&mut self, span: &Span) -> Option<&mut Row> {
        self.running.iter_mut().find(|row| span.is_of(row))
    }

    fn advance(&mut self, order: u64, tokens: u32) {
        if let Some(row) = self.find_running(order) {
            row.computed += tokens;
        }
    }

    /// Gives new tokens to their row, the first one's scores with them. A panic in host state costs that row alone.
    fn accept(&mut self, order: u64, tokens: &[TokenId], mut scores: Option<Scores>) {
        let now = self.now();
        let stall_timeout = self.settings.stall_timeout;
        let context = self.engine.as_ref().map_or(u32::MAX, |engine| engine.info().context);
        let Some(row) = self.running.iter_mut().find(|row| row.order == order) else { return };
        let before = row.produced();
        let accepted = catch_unwind(AssertUnwindSafe(|| {
            let finish = tokens.iter().find_map(|token| row.accept(*token, scores.take(), context, now));
            let finish = finish.or_else(|| row.accept_known(context, now));
            // What was verified beyond the end of the answer is not part of the row.
            row.computed = row.computed.min(row.len());
            (finish, row.flush(now, stall_timeout))
        }));
        let produced = u64::from(row.produced() - before);
        self.settings.gauges.completion_tokens.add(produced);
        self.accounts.charge(&row.terms.client, produced * OUTPUT_SERVICE);
        let end = match accepted {
            Err(payload) => {
                let message = panic_message(&*payload);
                return self.fail_row(order, &EngineError::Panicked { message });
            }
            Ok((_, Flow::Closed)) => End::Cancelled,
            Ok((Some(finish), _)) => End::Done(finish),
            // Parked rows stay; the sweep decides when they have stalled.
            Ok((None, _)) => return,
        };
        if let Some(row) = self.take_running(order) {
            self.leave(row, end);
        }
    }

    fn fail_row(&mut self, order: u64, error: &EngineError) {
        let Some(row) = self.take_running(order) else { return };
        tracing::warn!(
            target: crate::observe::fields::ENGINE, request_id = %row.ticket.id, %error, "a row failed alone"
        );
        let reason = match error {
            EngineError::KvFull { .. } => FailureReason::OutOfMemory,
            _ => FailureReason::RowFailed,
        };
        // Only messages that are ours: a library's words may name files.
        let message = match error {
            EngineError::NotANumber | EngineError::KvFull { .. } => error.to_string(),
            _ => "this request could not be computed".to_owned(),
        };
        self.leave(row, End::Failed(Failure::new(reason, message)));
    }
}

/// One token at least; no more than were proposed, and the one after them.
fn is_verified(span: &Span, tokens: &[TokenId]) -> bool {
    !tokens.is_empty() && tokens.len() <= span.proposed as usize + 1
}

fn plan_row(row: &Row, span: Span) -> Option<PlanRow<'_>> {
    let sequence = row.sequence?;
    let sample =
        |output| SampleFor { params: &row.sampling, position: row.len(), output, scores: row.scores };
    if span.follows {
        // Rows like this depend on nothing that was produced: see `may_run_ahead`.
        let position = row.len() + row.drawing;
        let want = Want::Sample(SampleFor { position, ..sample(row.output()) });
        return Some(PlanRow { sequence, input: &[PREVIOUS], start: span.start, want });
    }
    if span.proposed > 0 {
        let (input, output) = row.verified_input()?;
        let want = Want::Verify(sample(output));
        return Some(PlanRow { sequence, input, start: span.start, want });
    }
    let start = span.start as usize;
    let input = row.tokens.get(start..start + span.tokens as usize)?;
    let want = if span.samples { Want::Sample(sample(row.output())) } else { Want::Nothing };
    Some(PlanRow { sequence, input, start: span.start, want })
}
