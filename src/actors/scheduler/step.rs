//! One step: plan, make room, submit and collect, commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::actors::scheduler::core::{Core, End};
use crate::actors::scheduler::plan::{Prefilling, share};
use crate::actors::scheduler::row::{Flow, Row};
use crate::model::{PlanRow, RowOutcome, SampleFor, StepOutcome, StepPlan, Want};
use crate::types::{EngineError, Failure, FailureReason, TokenId};

/// A row's part of a step.
#[derive(Clone, Copy, Debug)]
struct Span {
    order: u64,
    tokens: u32,
    /// It reaches the end of the row's tokens, so a new one is drawn.
    samples: bool,
}

impl Core {
    /// True if the engine computed something.
    pub(crate) fn compute(&mut self) -> Result<bool, EngineError> {
        self.in_step.clear();
        self.close_released();
        self.sweep();
        if self.engine.is_none() {
            return Ok(false);
        }
        self.admit_waiting()?;
        let spans = self.plan();
        let spans = self.with_room(spans)?;
        if spans.is_empty() {
            return Ok(false);
        }
        let before = self.now();
        let outcome = match self.run(&spans) {
            Ok(outcome) => outcome,
            Err(error) => return self.refused(&spans, error),
        };
        self.measure(&spans, self.now().saturating_sub(before));
        self.commit(&spans, outcome);
        self.in_step.clear();
        Ok(true)
    }

    /// Tokens for every running row whose client keeps up.
    fn plan(&mut self) -> Vec<Span> {
        let ready = |row: &&Row| !row.is_parked() && row.owed() > 0;
        let prefilling: Vec<Prefilling> =
            self.running.iter().filter(ready).filter_map(Row::prefilling).collect();
        let decoding = self.running.iter().filter(ready).count() - prefilling.len();
        let mut given = share(&prefilling, decoding, self.settings.limits, &self.pace).into_iter();
        let mut spans = Vec::new();
        for row in self.running.iter_mut().filter(|row| ready(&&**row)) {
            let tokens = if row.owed() > 1 { given.next().unwrap_or(0) } else { 1 };
            row.passed_over = if tokens == 0 { row.passed_over.saturating_add(1) } else { 0 };
            if tokens > 0 {
                spans.push(Span { order: row.order, tokens, samples: tokens == row.owed() });
            }
        }
        spans
    }

    /// Drops the spans of rows that had to go for lack of memory.
    fn with_room(&mut self, spans: Vec<Span>) -> Result<Vec<Span>, EngineError> {
        for span in &spans {
            let Some(row) = self.running.iter().find(|row| row.order == span.order) else { continue };
            let needed = row.computed.saturating_add(span.tokens);
            self.in_step = vec![span.order];
            self.make_room(span.order, needed)?;
        }
        self.in_step.clear();
        Ok(spans.into_iter().filter(|span| self.running.iter().any(|row| row.order == span.order)).collect())
    }

    fn run(&mut self, spans: &[Span]) -> Result<StepOutcome, EngineError> {
        self.in_step = spans.iter().map(|span| span.order).collect();
        let Some(engine) = self.engine.as_mut() else {
            return Err(EngineError::InvalidPlan { message: "there is no engine".into() });
        };
        let running = &self.running;
        let rows: Vec<PlanRow<'_>> = spans
            .iter()
            .filter_map(|span| plan_row(running.iter().find(|row| row.order == span.order)?, *span))
            .collect();
        let count = rows.len();
        let handle = engine.submit(&StepPlan { rows })?;
        let outcome = engine.collect(handle)?;
        if outcome.rows.len() != count || count != spans.len() {
            let message = format!("{} outcomes for {} rows", outcome.rows.len(), spans.len());
            return Err(EngineError::Device { message });
        }
        Ok(outcome)
    }

    /// The step did not run. A plan that breaks a rule costs its rows, anything else the engine.
    fn refused(&mut self, spans: &[Span], error: EngineError) -> Result<bool, EngineError> {
        if matches!(
            error,
            EngineError::Device { .. } | EngineError::Panicked { .. } | EngineError::NotANumber
        ) {
            return Err(error);
        }
        tracing::error!(target: crate::observe::fields::ENGINE, %error, "a step was refused");
        for span in spans {
            self.fail_row(span.order, &error);
        }
        self.in_step.clear();
        Ok(true)
    }

    fn measure(&mut self, spans: &[Span], took: Duration) {
        let decoding = |span: &&Span| span.tokens == 1 && span.samples;
        let decode_rows = spans.iter().filter(decoding).count();
        let prefill_tokens = spans.iter().filter(|span| !decoding(span)).map(|span| span.tokens).sum();
        self.pace.record(decode_rows, prefill_tokens, took);
        self.settings.gauges.steps.up();
        self.settings.gauges.step_seconds.record(took);
    }

    fn commit(&mut self, spans: &[Span], outcome: StepOutcome) {
        for (span, outcome) in spans.iter().zip(outcome.rows) {
            match outcome {
                RowOutcome::Advanced if !span.samples => self.advance(span),
                RowOutcome::Sampled { token, .. } if span.samples => {
                    self.advance(span);
                    self.accept(span.order, token);
                }
                RowOutcome::Failed(error) => self.fail_row(span.order, &error),
                RowOutcome::Advanced | RowOutcome::Sampled { .. } | RowOutcome::Logits(_) => {
                    let message = "the outcome is not what the plan wanted".into();
                    self.fail_row(span.order, &EngineError::InvalidPlan { message });
                }
            }
        }
    }

    fn advance(&mut self, span: &Span) {
        if let Some(row) = self.running.iter_mut().find(|row| row.order == span.order) {
            row.computed += span.tokens;
        }
    }

    /// Gives a new token to its row. A panic in host state costs that row alone.
    fn accept(&mut self, order: u64, token: TokenId) {
        let now = self.now();
        let stall_timeout = self.settings.stall_timeout;
        let context = self.engine.as_ref().map_or(u32::MAX, |engine| engine.info().context);
        let Some(row) = self.running.iter_mut().find(|row| row.order == order) else { return };
        let accepted = catch_unwind(AssertUnwindSafe(|| {
            let finish = row.accept(token, context, now);
            (finish, row.flush(now, stall_timeout))
        }));
        self.settings.gauges.completion_tokens.up();
        let end = match accepted {
            Err(payload) => {
                let message = super::core::panic_message(&*payload);
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

fn plan_row(row: &Row, span: Span) -> Option<PlanRow<'_>> {
    let start = row.computed as usize;
    let input = row.tokens.get(start..start + span.tokens as usize)?;
    let want = if span.samples {
        Want::Sample(SampleFor {
            params: &row.sampling,
            position: row.len(),
            output: row.output(),
            logprob: false,
        })
    } else {
        Want::Nothing
    };
    Some(PlanRow { sequence: row.sequence?, input, start: row.computed, want })
}
