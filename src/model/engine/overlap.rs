//! Steps that draw on the device: started without waiting, collected later, at most two
//! under way, the second with tokens that only the device knows yet.
//!
//! Nothing here decides when that is allowed (see [`super`]); what holds: a row is committed
//! only if its sequence is where the row began, and nobody closed or truncated it meanwhile.

use super::{DecoderEngine, PackedStep, Pending, PendingRow};
use crate::model::ops::{KvStore, Ops};
use crate::model::{PREVIOUS, RowOutcome, StepHandle, StepOutcome, StepPlan, Want};
use crate::types::{EngineError, SequenceId};

impl<O: Ops> DecoderEngine<O> {
    /// The sequence's row in the step under way.
    pub(super) fn under_way(&self, sequence: SequenceId) -> Option<&PendingRow> {
        let rows = self.pending.iter().flat_map(|pending| &pending.rows);
        rows.rev().find(|row| row.sequence == sequence && !row.is_void)
    }

    /// Whatever is under way for the sequence is not to be committed.
    pub(super) fn void(&mut self, sequence: SequenceId) {
        let rows = self.pending.iter_mut().flat_map(|pending| &mut pending.rows);
        rows.filter(|row| row.sequence == sequence).for_each(|row| row.is_void = true);
    }

    /// Starts a step whose tokens the device draws.
    pub(super) fn start(
        &mut self,
        plan: &StepPlan<'_>,
        packed: &PackedStep,
    ) -> Result<StepHandle, EngineError> {
        let known = |row: &&crate::model::ops::StepRow| packed.tokens.get(row.first) == Some(&PREVIOUS);
        let from: Vec<(usize, usize)> = packed
            .rows
            .iter()
            .filter(known)
            .filter_map(|row| Some((row.first, self.under_way(row.sequence)?.draw?)))
            .collect();
        if self.pending.len() > usize::from(!from.is_empty()) {
            let message = format!("{} steps are under way already", self.pending.len());
            return Err(EngineError::InvalidPlan { message });
        }
        let draws = match self.launch(packed, &from) {
            Ok(draws) => draws,
            Err(error) => {
                if matches!(error, EngineError::Device { .. }) {
                    self.pending.clear();
                }
                return Err(error);
            }
        };
        let mut drawn = 0..;
        let rows = plan.rows.iter().map(|row| PendingRow {
            sequence: row.sequence,
            start: row.start,
            end: row.start + row.input.len() as u32,
            outcome: RowOutcome::Advanced,
            draw: matches!(row.want, Want::Sample(_)).then(|| drawn.next()).flatten(),
            is_void: false,
        });
        let rows = rows.collect();
        Ok(self.push(rows, Some(draws)))
    }

    fn launch(&mut self, packed: &PackedStep, from: &[(usize, usize)]) -> Result<O::Draws, EngineError> {
        let step = packed.step();
        let before = self.pending.back().and_then(|pending| pending.draws.as_ref());
        self.ops.begin(&step, before.map(|draws| (draws, from)))?;
        let hidden = self.decoder.forward(&mut self.ops, &mut self.kv, &step)?;
        self.decoder.draw(&mut self.ops, &mut self.kv, &hidden, &packed.wanted)
    }

    /// The step waits to be collected.
    pub(super) fn push(&mut self, rows: Vec<PendingRow>, draws: Option<O::Draws>) -> StepHandle {
        let step = self.next_step;
        self.next_step += 1;
        self.pending.push_back(Pending { step, rows, draws });
        StepHandle(step)
    }

    /// Waits for a step and commits its rows.
    pub(super) fn finish(&mut self, pending: Pending<O::Draws>) -> Result<StepOutcome, EngineError> {
        let drawn = match &pending.draws {
            Some(draws) => self.ops.drawn(draws)?,
            None => Vec::new(),
        };
        let mut outcome = StepOutcome::default();
        for row in pending.rows {
            let computed = match row.draw.map(|index| drawn.get(index).copied().flatten()) {
                None => row.outcome.clone(),
                Some(Some(token)) => RowOutcome::Sampled { token, scores: None },
                Some(None) => RowOutcome::Failed(EngineError::NotANumber),
            };
            outcome.rows.push(match computed {
                RowOutcome::Failed(error) => RowOutcome::Failed(error),
                good => match self.commit(&row) {
                    Ok(()) => good,
                    // A lazy device that fails here may have failed anywhere.
                    Err(error @ EngineError::Device { .. }) => return Err(error),
                    Err(error) => RowOutcome::Failed(error),
                },
            });
        }
        Ok(outcome)
    }

    /// Commits a row; one that was closed or truncated since the step ran fails alone.
    fn commit(&mut self, row: &PendingRow) -> Result<(), EngineError> {
        let committed = self.kv.len(row.sequence)?;
        if committed != row.start || row.is_void {
            let start = row.start;
            let message =
                format!("a row from {start} on was changed while it ran: it has {committed} tokens");
            return Err(EngineError::InvalidPlan { message });
        }
        self.kv.commit(row.sequence, row.end)
    }
}
