//! Steps that overlap on MLX's CPU device: the same tokens as one after the other, rows that
//! end, fail or are refused while the next step is under way.
#![cfg(feature = "mlx")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints its figures"
)]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use checkpoints::{Checkpoint, advance, best, engine, feed};
use greenroom::model::engine::DecoderEngine;
use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};
use greenroom::model::{Engine, PREVIOUS, PlanRow, RowOutcome, SampleFor, StepHandle, StepPlan, Want};
use greenroom::types::{EngineError, SamplingParams, SequenceId, TokenId};

type MlxEngine = DecoderEngine<MlxOps>;

fn open_engine(path: &Path) -> MlxEngine {
    let config = MlxConfig { device: MlxDevice::Cpu, activations: MlxType::F32, dequantize: true };
    engine::<MlxOps>(path, &config, 512)
}

fn llama() -> MlxEngine {
    open_engine(&common::data("tiny/llama"))
}

fn greedy() -> Arc<SamplingParams> {
    Arc::new(SamplingParams::greedy())
}

fn row<'a>(
    sequence: SequenceId,
    input: &'a [TokenId],
    start: u32,
    params: &'a Arc<SamplingParams>,
) -> PlanRow<'a> {
    let wanted = SampleFor { params, position: start + input.len() as u32, output: &[], scores: None };
    PlanRow { sequence, input, start, want: Want::Sample(wanted) }
}

/// Sequences with everything of their prompts computed but the last token, and that token.
fn prefilled(engine: &mut MlxEngine, prompts: &[Vec<TokenId>]) -> Vec<(SequenceId, u32, TokenId)> {
    prompts
        .iter()
        .map(|prompt| {
            let sequence = engine.open(None).unwrap();
            engine.reserve(sequence, prompt.len() as u32 + 64).unwrap();
            let (last, first) = prompt.split_last().unwrap();
            if !first.is_empty() {
                advance(engine, sequence, 0, first);
            }
            (sequence, first.len() as u32, *last)
        })
        .collect()
}

fn prompts(vocab: u32) -> Vec<Vec<TokenId>> {
    let prompt =
        |(seed, length): (u32, u32)| (0..length).map(|at| TokenId((seed * 31 + at * 7) % vocab)).collect();
    [(1, 5), (2, 12), (3, 1), (4, 30)].into_iter().map(prompt).collect()
}

fn submit(engine: &mut MlxEngine, rows: Vec<PlanRow<'_>>) -> StepHandle {
    engine.submit(&StepPlan { rows }).unwrap()
}

/// Starts a step of single tokens, or of what the step before draws.
fn submit_all(
    engine: &mut MlxEngine,
    rows: &[(SequenceId, u32, TokenId)],
    params: &Arc<SamplingParams>,
) -> StepHandle {
    let inputs: Vec<[TokenId; 1]> = rows.iter().map(|(_, _, token)| [*token]).collect();
    let rows = rows.iter().zip(&inputs).map(|((id, start, _), input)| row(*id, input, *start, params));
    submit(engine, rows.collect())
}

fn tokens(engine: &mut MlxEngine, step: StepHandle) -> Vec<TokenId> {
    let outcome = engine.collect(step).unwrap();
    let token = |outcome: &RowOutcome| match outcome {
        RowOutcome::Sampled { token, scores: None } => *token,
        other => panic!("no token: {other:?}"),
    };
    outcome.rows.iter().map(token).collect()
}

/// Rows one position on, with what the step under way draws.
fn next(rows: &[(SequenceId, u32, TokenId)]) -> Vec<(SequenceId, u32, TokenId)> {
    rows.iter().map(|(id, start, _)| (*id, start + 1, PREVIOUS)).collect()
}

/// Tokens of each step, every step begun before the one before it is collected.
fn overlapped(engine: &mut MlxEngine, prompts: &[Vec<TokenId>], steps: usize) -> Vec<Vec<TokenId>> {
    let params = greedy();
    let mut rows = prefilled(engine, prompts);
    let mut under_way = submit_all(engine, &rows, &params);
    let mut seen = Vec::new();
    for _ in 1..steps {
        rows = next(&rows);
        let following = submit_all(engine, &rows, &params);
        seen.push(tokens(engine, under_way));
        under_way = following;
    }
    seen.push(tokens(engine, under_way));
    rows.iter().for_each(|(id, ..)| engine.close(*id));
    assert_eq!(engine.memory().kv_used_bytes, 0);
    seen
}

/// The same, each step after the other.
fn one_by_one(engine: &mut MlxEngine, prompts: &[Vec<TokenId>], steps: usize) -> Vec<Vec<TokenId>> {
    let params = greedy();
    let mut rows = prefilled(engine, prompts);
    let mut seen = Vec::new();
    for _ in 0..steps {
        let step = submit_all(engine, &rows, &params);
        let drawn = tokens(engine, step);
        for ((_, start, token), drawn) in rows.iter_mut().zip(&drawn) {
            (*start, *token) = (*start + 1, *drawn);
        }
        seen.push(drawn);
    }
    rows.iter().for_each(|(id, ..)| engine.close(*id));
    seen
}

#[test]
fn overlapping_steps_give_the_same_tokens_in_every_checkpoint() {
    let checkpoints = Checkpoint::all(&common::data("tiny"));
    assert!(checkpoints.len() >= 16);
    for checkpoint in &checkpoints {
        let mut engine = open_engine(&checkpoint.path);
        let prompts = prompts(engine.info().vocab);
        let expected = one_by_one(&mut engine, &prompts, 12);
        assert_eq!(overlapped(&mut engine, &prompts, 12), expected, "{}", checkpoint.name);
        // And those are the best of the logits that the host sees.
        let alone = engine.open(None).unwrap();
        let logits = feed(&mut engine, alone, 0, &prompts[1], 64);
        assert_eq!(best(logits.last().unwrap()), expected[0][1], "{}", checkpoint.name);
    }
}

#[test]
fn a_row_that_ended_loses_its_part_of_the_next_step_and_nobody_else_does() {
    let mut engine = llama();
    let all = prompts(engine.info().vocab);
    let expected = one_by_one(&mut engine, &all, 6);
    let params = greedy();
    let rows = prefilled(&mut engine, &all);
    let first = submit_all(&mut engine, &rows, &params);
    let rows = next(&rows);
    let second = submit_all(&mut engine, &rows, &params);
    assert_eq!(tokens(&mut engine, first), expected[0]);
    // One row is over and gone, one is kept, one goes on elsewhere.
    engine.close(rows[0].0);
    engine.truncate(rows[1].0, rows[1].1).unwrap();
    let fork = engine.open(Some((rows[2].0, rows[2].1))).unwrap();
    let outcome = engine.collect(second).unwrap();
    assert!(matches!(outcome.rows[0], RowOutcome::Failed(EngineError::UnknownSequence { .. })));
    assert!(matches!(outcome.rows[1], RowOutcome::Failed(EngineError::InvalidPlan { .. })), "{outcome:?}");
    for at in [2, 3] {
        assert_eq!(outcome.rows[at], RowOutcome::Sampled { token: expected[1][at], scores: None });
    }
    // Whoever takes the free place is not disturbed by what was under way.
    let mut again = prefilled(&mut engine, &all[..1]);
    let mut rows = vec![(rows[1].0, rows[1].1, expected[0][1]), (fork, rows[2].1, expected[0][2])];
    rows.iter().for_each(|(id, start, _)| engine.reserve(*id, start + 8).unwrap());
    rows.append(&mut again);
    for at in 0..5 {
        let step = submit_all(&mut engine, &rows, &params);
        let drawn = tokens(&mut engine, step);
        assert_eq!(drawn, [expected[at + 1][1], expected[at + 1][2], expected[at][0]]);
        for ((_, start, token), drawn) in rows.iter_mut().zip(drawn) {
            (*start, *token) = (*start + 1, drawn);
        }
    }
}

/// A copy of the tiny llama whose embedding of `token` holds no numbers.
fn poisoned(token: usize) -> tempfile::TempDir {
    let folder = common::tiny_copy("llama");
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let entry = &header["model.embed_tokens.weight"];
    let number = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
    let (rows, start, end) =
        (number(&entry["shape"][0]), number(&entry["data_offsets"][0]), number(&entry["data_offsets"][1]));
    let row = (end - start) / rows;
    let at = 8 + length + start + token * row;
    // All bits set are a NaN in every type.
    bytes[at..at + row].fill(0xFF);
    std::fs::write(&path, bytes).unwrap();
    folder
}

#[test]
fn a_row_without_numbers_fails_alone_and_so_does_its_next_step() {
    let folder = poisoned(200);
    let mut engine = open_engine(folder.path());
    let mut all = prompts(engine.info().vocab);
    all[1] = vec![TokenId(5), TokenId(200)];
    let params = greedy();
    let rows = prefilled(&mut engine, &all);
    let first = submit_all(&mut engine, &rows, &params);
    let following = next(&rows);
    let second = submit_all(&mut engine, &following, &params);
    let outcome = engine.collect(first).unwrap();
    let [good, bad, ..] = outcome.rows.as_slice() else { panic!("{outcome:?}") };
    assert!(matches!(good, RowOutcome::Sampled { .. }));
    assert_eq!(*bad, RowOutcome::Failed(EngineError::NotANumber));
    let outcome = engine.collect(second).unwrap();
    assert!(matches!(outcome.rows[1], RowOutcome::Failed(_)), "{outcome:?}");
    for at in [0, 2, 3] {
        assert!(matches!(outcome.rows[at], RowOutcome::Sampled { .. }), "{outcome:?}");
    }
    // The row's committed length is what it was, and what it wrote beyond harms nobody, itself included.
    let mut third = vec![(rows[1].0, rows[1].1, TokenId(5))];
    third.extend(
        following
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != 1)
            .map(|(_, row)| (row.0, row.1 + 1, TokenId(3))),
    );
    let step = submit_all(&mut engine, &third, &params);
    assert_eq!(tokens(&mut engine, step).len(), 4);
}

#[test]
fn prompts_go_on_while_other_rows_overlap() {
    let mut engine = llama();
    let all = prompts(engine.info().vocab);
    let expected = one_by_one(&mut engine, &all, 3);
    let params = greedy();
    let rows = prefilled(&mut engine, &all[..2]);
    let late = engine.open(None).unwrap();
    engine.reserve(late, 64).unwrap();
    let prompt = &all[3];
    let chunk = |range: std::ops::Range<usize>, want| PlanRow {
        sequence: late,
        input: &prompt[range.clone()],
        start: range.start as u32,
        want,
    };
    let [a, b] = [[rows[0].2], [rows[1].2]];
    let first = submit(
        &mut engine,
        vec![
            row(rows[0].0, &a, rows[0].1, &params),
            chunk(0..10, Want::Nothing),
            row(rows[1].0, &b, rows[1].1, &params),
        ],
    );
    let last = row(late, &prompt[10..], 10, &params);
    let rest = chunk(10..prompt.len(), last.want);
    let second = submit(
        &mut engine,
        vec![
            row(rows[1].0, &[PREVIOUS], rows[1].1 + 1, &params),
            rest,
            row(rows[0].0, &[PREVIOUS], rows[0].1 + 1, &params),
        ],
    );
    let outcome = engine.collect(first).unwrap();
    assert_eq!(outcome.rows[1], RowOutcome::Advanced);
    let sampled = |token| RowOutcome::Sampled { token, scores: None };
    assert_eq!([&outcome.rows[0], &outcome.rows[2]], [&sampled(expected[0][0]), &sampled(expected[0][1])]);
    let outcome = engine.collect(second).unwrap();
    let expected = [expected[1][1], expected[0][3], expected[1][0]].map(sampled);
    assert_eq!(outcome.rows, expected);
}

#[test]
fn plans_that_cannot_overlap_are_refused_and_lose_nothing() {
    let mut engine = llama();
    let params = greedy();
    let all = prompts(engine.info().vocab);
    let rows = prefilled(&mut engine, &all[..2]);
    let refused = |engine: &mut MlxEngine, rows: Vec<PlanRow<'_>>| match engine.submit(&StepPlan { rows }) {
        Err(EngineError::InvalidPlan { message }) => message,
        other => panic!("not refused: {other:?}"),
    };
    let (id, start) = (rows[0].0, rows[0].1);
    let previous = [PREVIOUS];
    let message = refused(&mut engine, vec![row(id, &previous, start, &params)]);
    assert!(message.contains("draws a token"), "{message}");
    let message = refused(&mut engine, vec![row(id, &[TokenId(1), PREVIOUS], start, &params)]);
    assert!(message.contains("vocabulary"), "{message}");
    let first = submit_all(&mut engine, &rows, &params);
    let message = refused(&mut engine, vec![row(id, &previous, start, &params)]);
    assert!(message.contains("starts at"), "{message}");
    let random = Arc::new(SamplingParams { temperature: 1.0, ..SamplingParams::greedy() });
    let message = refused(&mut engine, vec![row(id, &previous, start + 1, &random)]);
    assert!(message.contains("host draws"), "{message}");
    let second = submit_all(&mut engine, &next(&rows), &params);
    let message = refused(&mut engine, vec![row(id, &previous, start + 2, &params)]);
    assert!(message.contains("under way already"), "{message}");
    let out_of_turn = StepHandle(second.0);
    assert!(matches!(engine.collect(out_of_turn), Err(EngineError::InvalidPlan { .. })));
    assert_eq!(tokens(&mut engine, first).len(), 2);
    assert_eq!(tokens(&mut engine, second).len(), 2);
}

#[test]
fn only_the_best_token_is_drawn_ahead() {
    let engine = llama();
    assert!(engine.info().pipelined);
    assert!(engine.can_pipeline(&SamplingParams::greedy()));
    let changed: [fn(&mut SamplingParams); 4] = [
        |params| params.temperature = 0.7,
        |params| params.repetition_penalty = 1.1,
        |params| params.presence_penalty = 0.1,
        |params| params.logit_bias = vec![(TokenId(3), 1.0)],
    ];
    for change in changed {
        let mut params = SamplingParams::greedy();
        change(&mut params);
        assert!(!engine.can_pipeline(&params), "{params:?}");
    }
}

/// Seconds a step of decoding rows.
fn pace(
    run: impl Fn(&mut MlxEngine, &[Vec<TokenId>], usize) -> Vec<Vec<TokenId>>,
    path: &Path,
    rows: usize,
) -> f64 {
    let mut engine = open_engine(path);
    let prompts: Vec<Vec<TokenId>> =
        (0..rows as u32).map(|seed| (0..20 + seed).map(TokenId).collect()).collect();
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let (short, long) = (4, 12);
        let begun = Instant::now();
        run(&mut engine, &prompts, short);
        let middle = Instant::now();
        run(&mut engine, &prompts, long);
        let both = (middle.elapsed().as_secs_f64(), (middle - begun).as_secs_f64());
        best = best.min((both.0 - both.1) / (long - short) as f64);
    }
    best
}

#[test]
#[ignore = "prints figures"]
fn figures() {
    for path in [common::data("tiny/llama"), common::demo_model()] {
        for rows in [1, 8] {
            let (apart, over) = (pace(one_by_one, &path, rows), pace(overlapped, &path, rows));
            let rate = |seconds: f64| rows as f64 / seconds;
            println!(
                "{}: {rows} rows: {:.1} tokens/s one by one, {:.1} overlapping",
                path.file_name().unwrap().to_string_lossy(),
                rate(apart),
                rate(over)
            );
        }
    }
}
