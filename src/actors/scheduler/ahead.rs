//! Steps under way: collected at once, or only after the next one is submitted.
//!
//! On a device that computes while the host does something else, the next step begins before the
//! tokens of this one are known: it goes on from what the device draws. A row that ends, fails, or
//! loses its place or its memory meanwhile has begun another life ([`Row::life`]): its part of what
//! is under way is wasted, and never committed.
//!
//! That holds only while all is plain: every token drawn by the device, no row that may have
//! proposals, nobody suspected, nobody else on the thread. Otherwise each step is collected before
//! the next one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::actors::scheduler::core::{Core, panic_message};
use crate::actors::scheduler::placement::Lane;
use crate::actors::scheduler::row::Row;
use crate::actors::scheduler::step::Span;
use crate::model::{Engine, StepHandle, StepOutcome};
use crate::types::EngineError;

/// A step that is submitted and not collected.
#[derive(Debug)]
pub(crate) struct UnderWay {
    pub(crate) handle: StepHandle,
    pub(crate) spans: Vec<Span>,
    /// When it was submitted.
    pub(crate) begun: Duration,
}

impl Core {
    /// Whether the next step may begin before the one under way is collected.
    pub(crate) fn may_run_ahead(&self, turn: Option<Duration>) -> bool {
        let Some(engine) = self.engine.as_ref().filter(|engine| engine.info().pipelined) else {
            return false;
        };
        // Others' time is measured: it must not be this step's.
        turn.is_none() && !self.running.is_empty() && self.running.iter().all(|row| is_plain(row, &**engine))
    }

    /// Whether a row can go on from what the step under way draws.
    pub(crate) fn has_followers(&self) -> bool {
        let context = self.model_context();
        self.running.iter().any(|row| row.drawing > 0 && row.is_ready(context))
    }

    /// Waits for a step, and gives its rows what it computed.
    pub(crate) fn finish(&mut self, step: UnderWay) -> Result<bool, EngineError> {
        let UnderWay { handle, spans, begun } = step;
        self.in_step = spans.iter().map(|span| span.order).collect();
        let outcome = match catch_unwind(AssertUnwindSafe(|| self.collect(handle, spans.len()))) {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                let refused = self.refused(&spans, error);
                self.forget_under_way();
                return refused;
            }
            Err(payload) => return self.broke(EngineError::Panicked { message: panic_message(&*payload) }),
        };
        // The device was busy with the one before until then.
        self.measure(&spans, begun.max(self.collected));
        self.collected = self.now();
        self.commit(&spans, outcome);
        self.step_was_good();
        self.finish_wasted()
    }

    /// Waits for the step under way if nobody has a part in it any more.
    pub(crate) fn finish_wasted(&mut self) -> Result<bool, EngineError> {
        let is_wasted = self.running.iter().all(|row| row.ahead == 0);
        match self.under_way.take_if(|_| is_wasted) {
            Some(wasted) => self.finish(wasted),
            None => Ok(true),
        }
    }

    /// Collects the step under way, so that the engine is free for something else.
    ///
    /// # Errors
    /// The engine is lost.
    pub(crate) fn settle(&mut self) -> Result<(), EngineError> {
        let Some(step) = self.under_way.take() else { return Ok(()) };
        match catch_unwind(AssertUnwindSafe(|| self.finish(step))) {
            Ok(finished) => finished.map(drop),
            Err(payload) => Err(EngineError::Panicked { message: panic_message(&*payload) }),
        }
    }

    /// What is under way is worth nothing: nothing of it will be collected.
    pub(crate) fn forget_under_way(&mut self) {
        self.under_way = None;
        self.running.iter_mut().for_each(Row::forget_ahead);
    }

    fn collect(&mut self, handle: StepHandle, rows: usize) -> Result<StepOutcome, EngineError> {
        let Some(engine) = self.engine.as_mut() else {
            return Err(EngineError::InvalidPlan { message: "there is no engine".into() });
        };
        let outcome = engine.collect(handle)?;
        if outcome.rows.len() != rows {
            let message = format!("{} outcomes for {rows} rows", outcome.rows.len());
            return Err(EngineError::Device { message });
        }
        Ok(outcome)
    }
}

/// Whether the device alone can go on with the row.
fn is_plain(row: &Row, engine: &dyn Engine) -> bool {
    row.placement.lane == Lane::Batched
        && !row.placement.fill
        && !row.placement.lookup
        && row.suspect_until.is_none()
        && row.scores.is_none()
        && engine.can_pipeline(&row.sampling)
}
