//! The engine's rules, over the reference operators and a decoder of a few lines.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::*;
use crate::model::SampleFor;
use crate::model::ops::KvShape;
use crate::model::plain::{Matrix, PlainKv, PlainOps};
use crate::types::SamplingParams;

const VOCAB: u32 = 16;
/// Gives NaN at its position.
const POISON: TokenId = TokenId(13);
/// Breaks the device.
const BREAKS: TokenId = TokenId(14);
/// Panics.
const PANICS: TokenId = TokenId(15);

/// The token after `t` is `t + 1`.
struct Successor;

impl Decoder<PlainOps> for Successor {
    fn forward(&self, _: &mut PlainOps, _: &mut PlainKv, step: &Step<'_>) -> Result<Matrix, EngineError> {
        assert!(!step.tokens.contains(&PANICS), "a bad token");
        if step.tokens.contains(&BREAKS) {
            return Err(EngineError::Device { message: "broken".into() });
        }
        let data = step.tokens.iter().map(|token| token.0 as f32).collect();
        Ok(Matrix { rows: step.tokens.len(), cols: 1, data })
    }

    fn logits(&self, _: &mut PlainOps, hidden: &Matrix, rows: &[usize]) -> Result<Logits, EngineError> {
        let mut data = vec![0.0; rows.len() * VOCAB as usize];
        for (row, logits) in rows.iter().zip(data.chunks_mut(VOCAB as usize)) {
            let token = hidden.data[*row] as u32;
            let value = if TokenId(token) == POISON { f32::NAN } else { 5.0 };
            logits[((token + 1) % VOCAB) as usize] = value;
        }
        Ok(Logits { vocab: VOCAB as usize, data })
    }

    fn draw(&self, _: &mut PlainOps, _: &mut PlainKv, _: &Matrix, _: &[usize]) -> Result<(), EngineError> {
        unreachable!("plain loops draw on the host")
    }
}

fn engine() -> DecoderEngine<PlainOps> {
    let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 2 };
    let life = Life { epoch: Epoch(4), context: 32 };
    let start = StartOps { epoch: life.epoch, kv, kv_budget_bytes: 16 * 40, context: life.context };
    let facts = DecoderFacts { vocab: VOCAB, context: 32, kv };
    DecoderEngine::new(PlainOps::default(), PlainKv::new(&start), Box::new(Successor), &facts, life)
}

fn ids(tokens: &[u32]) -> Vec<TokenId> {
    tokens.iter().map(|token| TokenId(*token)).collect()
}

fn open(engine: &mut DecoderEngine<PlainOps>, room: u32) -> SequenceId {
    let sequence = engine.open(None).unwrap();
    engine.reserve(sequence, room).unwrap();
    sequence
}

fn row(sequence: SequenceId, input: &[TokenId], start: u32) -> PlanRow<'_> {
    PlanRow { sequence, input, start, want: Want::LastLogits }
}

fn run(engine: &mut DecoderEngine<PlainOps>, rows: Vec<PlanRow<'_>>) -> Result<StepOutcome, EngineError> {
    let handle = engine.submit(&StepPlan { rows })?;
    engine.collect(handle)
}

fn refused(engine: &mut DecoderEngine<PlainOps>, rows: Vec<PlanRow<'_>>) -> String {
    match engine.submit(&StepPlan { rows }) {
        Err(EngineError::InvalidPlan { message }) => message,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn each_want_gets_its_outcome_in_the_plans_order() {
    let mut engine = engine();
    let (a, b, c, d) =
        (open(&mut engine, 8), open(&mut engine, 8), open(&mut engine, 8), open(&mut engine, 8));
    let greedy = Arc::new(SamplingParams::greedy());
    let wanted = SampleFor { params: &greedy, position: 2, output: &[], scores: Some(0) };
    let (two, three) = (ids(&[1, 2]), ids(&[3, 4, 5]));
    let rows = vec![
        PlanRow { want: Want::AllLogits, ..row(a, &three, 0) },
        PlanRow { want: Want::Nothing, ..row(b, &two, 0) },
        PlanRow { want: Want::Sample(wanted), ..row(c, &two, 0) },
        row(d, &three, 0),
    ];
    let outcome = run(&mut engine, rows).unwrap();
    let RowOutcome::Logits(all) = &outcome.rows[0] else { panic!("{outcome:?}") };
    assert_eq!(
        all.iter().map(|row| row.iter().position(|l| *l == 5.0)).collect::<Vec<_>>(),
        [Some(4), Some(5), Some(6)]
    );
    assert_eq!(outcome.rows[1], RowOutcome::Advanced);
    let RowOutcome::Sampled { token, scores: Some(scores) } = outcome.rows[2].clone() else {
        panic!("{outcome:?}")
    };
    assert_eq!(token, TokenId(3));
    let exact = 5.0 - (5.0f64.exp() + 15.0).ln();
    assert!((f64::from(scores.drawn) - exact).abs() < 1e-6);
    let RowOutcome::Logits(last) = &outcome.rows[3] else { panic!("{outcome:?}") };
    assert_eq!((last.len(), last[0][6]), (1, 5.0));
}

#[test]
fn plans_that_break_a_rule_are_refused_before_anything_runs() {
    let mut engine = engine();
    let (a, b) = (open(&mut engine, 4), open(&mut engine, 4));
    let (one, many, outside) = (ids(&[1]), ids(&[1, 2, 3, 4, 5]), ids(&[16]));
    assert!(refused(&mut engine, vec![]).contains("no rows"));
    assert!(refused(&mut engine, vec![row(a, &[], 0)]).contains("no input"));
    assert!(refused(&mut engine, vec![row(a, &one, 1)]).contains("starts at 1"));
    assert!(refused(&mut engine, vec![row(a, &many, 0)]).contains("room for 4"));
    assert!(refused(&mut engine, vec![row(a, &outside, 0)]).contains("vocabulary of 16"));
    assert!(refused(&mut engine, vec![row(a, &one, 0), row(b, &one, 0), row(a, &one, 0)]).contains("twice"));
    engine.close(b);
    let closed = engine.submit(&StepPlan { rows: vec![row(a, &one, 0), row(b, &one, 0)] });
    assert_eq!(closed, Err(EngineError::UnknownSequence { sequence: b }));
    let stale = SequenceId { epoch: Epoch(3), number: a.number };
    let closed = engine.submit(&StepPlan { rows: vec![row(stale, &one, 0)] });
    assert_eq!(closed, Err(EngineError::StaleEpoch { sequence: stale }));
    assert!(run(&mut engine, vec![row(a, &one, 0)]).is_ok(), "nothing was committed by those");
}

#[test]
fn a_row_without_numbers_fails_alone_and_is_not_committed() {
    let mut engine = engine();
    let (good, bad) = (open(&mut engine, 8), open(&mut engine, 8));
    let (input, poison) = (ids(&[1]), [POISON]);
    let outcome = run(&mut engine, vec![row(bad, &poison, 0), row(good, &input, 0)]).unwrap();
    assert_eq!(outcome.rows[0], RowOutcome::Failed(EngineError::NotANumber));
    assert!(matches!(outcome.rows[1], RowOutcome::Logits(_)));
    let outcome = run(&mut engine, vec![row(bad, &input, 0), row(good, &input, 1)]).unwrap();
    assert!(outcome.rows.iter().all(|row| matches!(row, RowOutcome::Logits(_))), "{outcome:?}");
}

#[test]
fn a_step_that_failed_or_panicked_commits_nothing() {
    let mut engine = engine();
    let (a, b) = (open(&mut engine, 8), open(&mut engine, 8));
    let input = ids(&[1]);
    let broken = run(&mut engine, vec![row(a, &input, 0), row(b, &[BREAKS], 0)]);
    assert!(matches!(broken, Err(EngineError::Device { .. })));
    let rows = vec![row(a, &input, 0), row(b, &[PANICS], 0)];
    assert!(catch_unwind(AssertUnwindSafe(|| run(&mut engine, rows))).is_err());
    let outcome = run(&mut engine, vec![row(a, &input, 0), row(b, &input, 0)]).unwrap();
    assert!(outcome.rows.iter().all(|row| matches!(row, RowOutcome::Logits(_))), "{outcome:?}");
}

#[test]
fn a_handle_is_collected_once_and_only_its_own_step() {
    let mut engine = engine();
    let a = open(&mut engine, 8);
    let input = ids(&[1]);
    let first = engine.submit(&StepPlan { rows: vec![row(a, &input, 0)] }).unwrap();
    let second = engine.submit(&StepPlan { rows: vec![row(a, &input, 0)] }).unwrap();
    assert!(matches!(engine.collect(first), Err(EngineError::InvalidPlan { .. })));
    let again = StepHandle(second.0);
    assert!(engine.collect(second).is_ok(), "a foreign handle does not lose the step");
    assert!(matches!(engine.collect(again), Err(EngineError::InvalidPlan { .. })));
    assert!(run(&mut engine, vec![row(a, &input, 1)]).is_ok(), "committed once");
}

#[test]
fn a_row_that_changed_under_way_fails_alone() {
    let mut engine = engine();
    let (a, b, c) = (open(&mut engine, 8), open(&mut engine, 8), open(&mut engine, 8));
    let input = ids(&[1, 2]);
    run(&mut engine, vec![row(b, &input, 0)]).unwrap();
    let rows = vec![row(a, &input, 0), row(b, &input, 2), row(c, &input, 0)];
    let handle = engine.submit(&StepPlan { rows }).unwrap();
    engine.close(a);
    engine.truncate(b, 1).unwrap();
    let outcome = engine.collect(handle).unwrap();
    assert_eq!(outcome.rows[0], RowOutcome::Failed(EngineError::UnknownSequence { sequence: a }));
    assert!(matches!(outcome.rows[1], RowOutcome::Failed(EngineError::InvalidPlan { .. })), "{outcome:?}");
    assert!(matches!(outcome.rows[2], RowOutcome::Logits(_)));
}

#[test]
fn room_is_bounded_by_context_and_budget_and_given_back() {
    let mut engine = engine();
    let a = open(&mut engine, 30);
    assert!(matches!(engine.reserve(a, 33), Err(EngineError::InvalidPlan { .. })));
    let b = engine.open(None).unwrap();
    assert_eq!(engine.reserve(b, 12), Err(EngineError::KvFull { need: 12 * 16, free: 10 * 16 }));
    assert_eq!(engine.memory().kv_used_bytes, 30 * 16);
    engine.truncate(a, 0).unwrap();
    assert!(refused(&mut engine, vec![row(a, &ids(&[1]), 0)]).contains("room for 0"));
    engine.reserve(b, 12).unwrap();
    engine.close(a);
    engine.close(b);
    engine.close(b);
    assert_eq!(engine.memory().kv_used_bytes, 0);
}

#[test]
fn a_fork_starts_where_it_was_cut() {
    let mut engine = engine();
    let a = open(&mut engine, 8);
    let input = ids(&[1, 2, 3]);
    run(&mut engine, vec![row(a, &input, 0)]).unwrap();
    assert!(matches!(engine.open(Some((a, 4))), Err(EngineError::InvalidPlan { .. })));
    let fork = engine.open(Some((a, 2))).unwrap();
    engine.reserve(fork, 5).unwrap();
    assert!(run(&mut engine, vec![row(fork, &input, 2), row(a, &input, 3)]).is_ok());
}
