//! What happens when a step breaks: nobody is lost who can be saved.
//!
//! A panic on an engine that survives panics costs nothing: what was not committed is not there.
//! After any other failure the engine is rebuilt, and every row is computed anew from its tokens;
//! host state is never rebuilt, so clients see a pause and no more. Either way the rows of the
//! broken step are **suspects**: each is computed alone until it is past the place where the step
//! broke. A suspect that breaks a step alone is to blame and ends with an error; so one poisonous
//! prompt costs neither its neighbours nor the restart budget.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::actors::scheduler::core::{Core, End};
use crate::actors::scheduler::row::Row;
use crate::observe::fields;
use crate::types::{EngineError, Epoch, Failure, FailureReason};

/// So many broken steps without a good one in between, and an engine that says it survives
/// panics is not believed any more.
const MAX_SURVIVED: u32 = 16;
/// So many rows blamed without a good step in between, and the engine is to blame itself.
const MAX_BLAMED: u32 = 3;

/// Broken steps since the last good one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CrashState {
    broken: u32,
    blamed: u32,
}

/// Whose fault a lost engine was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// The engine's, as far as one can tell.
    Engine,
    /// A row's, which has ended for it.
    Row,
}

impl Core {
    /// The step's rows broke it. Goes on with the same engine if that can be, else the error
    /// says that it is lost.
    pub(crate) fn broke(&mut self, error: EngineError) -> Result<bool, EngineError> {
        self.forget_under_way();
        let survives = self.engine.as_ref().is_some_and(|engine| engine.info().survives_panics);
        let panicked = matches!(error, EngineError::Panicked { .. });
        if !panicked || !survives || self.crash.broken >= MAX_SURVIVED {
            return Err(error);
        }
        tracing::error!(
            target: fields::ENGINE,
            model = %self.settings.model,
            step = self.settings.gauges.steps.get(),
            rows = self.in_step.len(),
            %error,
            "a step panicked; its rows are tried again one by one"
        );
        self.suspect();
        Ok(true)
    }

    /// The engine cannot be trusted any more: it goes, finished rows are forgotten, and all others
    /// begin anew from their tokens.
    pub(crate) fn lose_engine(&mut self) -> Fault {
        let engine = self.engine.take();
        self.under_way = None;
        // A broken engine may panic again on its way out.
        let _lost = catch_unwind(AssertUnwindSafe(move || drop(engine)));
        self.tree.borrow_mut().forget_all();
        self.sessions.borrow_mut().forget_all();
        self.disk.forget_sequences();
        self.epoch = Epoch(self.epoch.0 + 1);
        let fault = self.suspect();
        let now = self.now();
        let mut back = std::mem::take(&mut self.running);
        for row in &mut back {
            self.uncount(row);
            row.wait(now);
            row.ticket.trace.mark("replayed", now, &[("tokens", row.len().into())]);
        }
        self.settings.gauges.replays.add(back.len() as u64);
        self.waiting.append(&mut back);
        self.waiting.iter_mut().for_each(Row::set_back);
        self.waiting.sort_by_key(|row| row.order);
        // A panic may have cost rows on their way out.
        self.accounts.recount(self.waiting.iter().chain(&self.ending).map(|row| &row.terms.client));
        self.publish();
        fault
    }

    /// Makes suspects of the rows of the broken step, or ends the one that is to blame.
    fn suspect(&mut self) -> Fault {
        self.crash.broken += 1;
        let hit = std::mem::take(&mut self.in_step);
        let alone = hit.len() == 1;
        let mut guilty = None;
        for row in self.running.iter_mut().chain(&mut self.waiting) {
            if !hit.contains(&row.order) {
                continue;
            }
            row.crashes = row.crashes.saturating_add(1);
            row.suspect_until = Some(row.suspect_until.unwrap_or(0).max(row.step_end));
            row.drop_proposed();
            if alone && row.crashes > 1 {
                guilty = Some(row.order);
            }
        }
        let Some(order) = guilty else { return Fault::Engine };
        if let Some(mut row) = self.take_running(order).or_else(|| self.take_waiting(order)) {
            tracing::error!(
                target: fields::ENGINE, request_id = %row.ticket.id,
                "this request breaks every step that it is in, also alone, and is given up"
            );
            self.discard(&mut row);
            self.conclude(row, End::Failed(given_up()));
        }
        self.crash.blamed += 1;
        if self.crash.blamed > MAX_BLAMED { Fault::Engine } else { Fault::Row }
    }

    /// A step was good: its rows are cleared as far as they came.
    pub(crate) fn step_was_good(&mut self) {
        self.crash = CrashState::default();
        let in_step = std::mem::take(&mut self.in_step);
        for row in self.running.iter_mut().filter(|row| in_step.contains(&row.order)) {
            if row.suspect_until.is_some_and(|until| row.computed >= until) {
                row.suspect_until = None;
                row.crashes = 0;
            }
        }
    }
}

fn given_up() -> Failure {
    Failure::new(
        FailureReason::RowFailed,
        "this request broke the engine twice, the second time alone, and was given up",
    )
}
