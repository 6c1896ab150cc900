//! A row's answer does not depend on its neighbours, on how its prompt is cut, on
//! where it was forked, or on steps that failed: bit for bit on the CPU.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use std::sync::Arc;
use std::time::SystemTime;

use checkpoints::{advance, best, engine, feed, step};
use greenroom::config::{Activations, CpuConfig, KvType};
use greenroom::model::cpu::CpuOps;
use greenroom::model::{Engine, PlanRow, RowOutcome, SampleFor, StepPlan, Want, load};
use greenroom::types::{ChatMessage, ChatRequest, EngineError, Role, SamplingParams, SequenceId, TokenId};

fn exact() -> CpuConfig {
    let mut config = CpuConfig::default();
    config.activations = Activations::F32;
    config.kv = KvType::F32;
    config
}

/// A prompt and how many tokens are to follow it.
struct Row {
    prompt: Vec<TokenId>,
    answer: usize,
    /// The step at which it joins.
    joins: usize,
}

/// Pseudo-random tokens below `vocab`.
fn tokens(seed: u64, count: usize, vocab: u64) -> Vec<TokenId> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        TokenId(((state >> 33) % vocab) as u32)
    };
    (0..count).map(|_| next()).collect()
}

/// Eight rows of different lengths that join and leave at different steps.
fn ragged(vocab: u64) -> Vec<Row> {
    let lengths = [3, 17, 64, 65, 100, 130, 1, 40];
    let row = |(number, length): (usize, usize)| Row {
        prompt: tokens(number as u64 + 1, length, vocab),
        answer: 3 + (number * 5) % 11,
        joins: (number * 2) % 7,
    };
    lengths.into_iter().enumerate().map(row).collect()
}

/// Logits of every prompt position and every answered token but the last.
type Trace = Vec<Vec<f32>>;

/// A row alone, its prompt in one piece, greedy.
fn alone(engine: &mut dyn Engine, row: &Row) -> Trace {
    let sequence = engine.open(None).unwrap();
    let mut trace = feed(engine, sequence, 0, &row.prompt, usize::MAX);
    for _ in 1..row.answer {
        let next = best(trace.last().unwrap());
        let start = trace.len() as u32;
        trace.append(&mut feed(engine, sequence, start, &[next], 1));
    }
    engine.close(sequence);
    trace
}

/// A row among others.
struct Running<'a> {
    row: &'a Row,
    sequence: Option<SequenceId>,
    tokens: Vec<TokenId>,
    trace: Trace,
}

impl Running<'_> {
    fn is_over(&self) -> bool {
        self.trace.len() == self.row.prompt.len() + self.row.answer - 1
    }
}

/// All rows together, prompts in chunks, joining as they say and leaving when done.
fn together(engine: &mut dyn Engine, rows: &[Row], chunk: usize) -> Vec<Trace> {
    let mut running: Vec<Running<'_>> = rows
        .iter()
        .map(|row| Running { row, sequence: None, tokens: row.prompt.clone(), trace: Vec::new() })
        .collect();
    for now in 0.. {
        for row in running.iter_mut().filter(|row| row.row.joins == now) {
            let sequence = engine.open(None).unwrap();
            engine.reserve(sequence, (row.row.prompt.len() + row.row.answer) as u32).unwrap();
            row.sequence = Some(sequence);
        }
        let mut active: Vec<&mut Running<'_>> =
            running.iter_mut().filter(|row| row.sequence.is_some()).collect();
        let plan = active.iter().map(|row| {
            let done = row.trace.len();
            let end = row.tokens.len().min(done + chunk);
            let sequence = row.sequence.unwrap();
            PlanRow { sequence, input: &row.tokens[done..end], start: done as u32, want: Want::AllLogits }
        });
        let outcome = step(engine, plan.collect());
        for (row, outcome) in active.iter_mut().zip(outcome.rows) {
            let RowOutcome::Logits(mut logits) = outcome else { panic!("not logits: {outcome:?}") };
            row.trace.append(&mut logits);
            if row.trace.len() == row.tokens.len() {
                row.tokens.push(best(row.trace.last().unwrap()));
            }
            if row.is_over() {
                engine.close(row.sequence.take().unwrap());
            }
        }
        if running.iter().all(Running::is_over) {
            break;
        }
    }
    running.into_iter().map(|row| row.trace).collect()
}

fn assert_same_bits(expected: &Trace, seen: &Trace, what: &str) {
    assert_eq!(expected.len(), seen.len(), "{what}");
    for (position, (a, b)) in expected.iter().zip(seen).enumerate() {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{what}: position {position} differs by {}", checkpoints::difference(a, b));
    }
}

fn hold_rows_apart(engine: &mut dyn Engine, rows: &[Row], chunks: &[usize]) {
    let expected: Vec<Trace> = rows.iter().map(|row| alone(engine, row)).collect();
    for chunk in chunks {
        let seen = together(engine, rows, *chunk);
        for (number, (expected, seen)) in expected.iter().zip(&seen).enumerate() {
            assert_same_bits(expected, seen, &format!("row {number}, chunk {chunk}"));
        }
    }
    assert_eq!(engine.memory().kv_used_bytes, 0, "key-value memory is left over");
}

#[test]
fn eight_rows_equal_each_alone_in_both_modes() {
    // The last two with windows shorter than the rows, one of them with soft-capped scores.
    for name in ["gguf-llama-q4_1/llama-q4_1.gguf", "qwen3-mlx4", "llama-f16", "gemma2", "mistral"] {
        for config in [CpuConfig::default(), exact()] {
            let mut engine = engine::<CpuOps>(&common::data("tiny").join(name), &config, 512);
            hold_rows_apart(&mut engine, &ragged(288), &[1, 7, 64, 512]);
        }
    }
}

#[test]
fn eight_rows_of_the_demo_model_equal_each_alone() {
    let mut engine = engine::<CpuOps>(&common::demo_model(), &CpuConfig::default(), 512);
    let cases = checkpoints::demo::cases();
    let mut rows: Vec<Row> = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let prompt = case.prompt[..case.prompt.len() - number].to_vec();
        rows.push(Row { prompt, answer: 2 + number % 3, joins: number % 4 });
    }
    rows.push(Row { prompt: tokens(9, 70, 49_152), answer: 2, joins: 1 });
    hold_rows_apart(&mut engine, &rows, &[7, 512]);
}

#[test]
fn a_fork_equals_a_cold_run() {
    for config in [CpuConfig::default(), exact()] {
        let path = common::data("tiny").join("gguf-llama-q4_1/llama-q4_1.gguf");
        let mut engine = engine::<CpuOps>(&path, &config, 512);
        let first = tokens(5, 140, 288);
        let source = engine.open(None).unwrap();
        let whole = feed(&mut engine, source, 0, &first, 64);
        for at in [0usize, 1, 63, 64, 65, 127, 128, 140] {
            let mut changed = first[..at].to_vec();
            changed.extend(tokens(at as u64 + 77, 80, 288));
            let fork = engine.open(Some((source, at as u32))).unwrap();
            let seen = feed(&mut engine, fork, at as u32, &changed[at..], 7);
            let cold = engine.open(None).unwrap();
            let expected = feed(&mut engine, cold, 0, &changed, usize::MAX);
            assert_same_bits(&expected[at..].to_vec(), &seen, &format!("fork at {at}"));
            engine.close(cold);
            engine.close(fork);
        }
        // What the source holds was not touched by its forks.
        let more = tokens(6, 20, 288);
        let seen = feed(&mut engine, source, 140, &more, 3);
        let cold = engine.open(None).unwrap();
        let again = feed(&mut engine, cold, 0, &[first.clone(), more].concat(), usize::MAX);
        assert_same_bits(&again[..140].to_vec(), &whole, "the source");
        assert_same_bits(&again[140..].to_vec(), &seen, "the source, continued");
        engine.close(cold);
        engine.close(source);
        assert_eq!(engine.memory().kv_used_bytes, 0);
    }
}

#[test]
fn steps_that_were_refused_or_abandoned_leave_nothing_to_undo() {
    let path = common::data("tiny").join("gguf-llama-q4_1/llama-q4_1.gguf");
    let mut engine = engine::<CpuOps>(&path, &CpuConfig::default(), 512);
    let prompt = tokens(3, 90, 288);
    let cold = engine.open(None).unwrap();
    let expected = feed(&mut engine, cold, 0, &prompt, usize::MAX);
    let sequence = engine.open(None).unwrap();
    let mut seen = feed(&mut engine, sequence, 0, &prompt[..50], 50);
    engine.reserve(sequence, 90).unwrap();
    let row = |input| PlanRow { sequence, input, start: 50, want: Want::LastLogits };
    let outside = [TokenId(7), TokenId(288)];
    let refused = engine.submit(&StepPlan { rows: vec![row(&outside)] });
    assert!(matches!(refused, Err(EngineError::InvalidPlan { .. })), "{refused:?}");
    // Other tokens at the same positions, computed and never collected.
    let _abandoned = engine.submit(&StepPlan { rows: vec![row(&prompt[..40])] }).unwrap();
    seen.append(&mut feed(&mut engine, sequence, 50, &prompt[50..], 7));
    assert_same_bits(&expected, &seen, "after steps that never counted");
    // Truncated and computed again.
    engine.truncate(sequence, 33).unwrap();
    let again = feed(&mut engine, sequence, 33, &prompt[33..], 64);
    assert_same_bits(&expected[33..].to_vec(), &again, "after a truncation");
    engine.close(sequence);
    engine.close(cold);
}

const SECRETS: [&str; 16] = [
    "banana", "castle", "dragon", "engine", "forest", "guitar", "hammer", "island", "jungle", "kitten",
    "lemon", "mirror", "needle", "orange", "pencil", "rocket",
];

#[test]
fn sixteen_secrets_stay_where_they_belong() {
    let path = common::demo_model();
    let text = load::open(&path).unwrap().text;
    let mut engine = engine::<CpuOps>(&path, &CpuConfig::default(), 256);
    let prompts: Vec<Vec<TokenId>> = SECRETS
        .iter()
        .map(|word| {
            let request = ChatRequest {
                messages: vec![ChatMessage::text(
                    Role::User,
                    format!("The secret word is \"{word}\". Repeat the secret word: what is it?"),
                )],
                ..ChatRequest::default()
            };
            text.encode(&text.render(&request, SystemTime::UNIX_EPOCH).unwrap()).unwrap()
        })
        .collect();
    let greedy = Arc::new(SamplingParams::greedy());
    let mut rows: Vec<(SequenceId, Vec<TokenId>)> = Vec::new();
    for prompt in &prompts {
        let sequence = engine.open(None).unwrap();
        engine.reserve(sequence, prompt.len() as u32 + 16).unwrap();
        // Everything but the last token, all rows in different steps.
        advance(&mut engine, sequence, 0, &prompt[..prompt.len() - 1]);
        rows.push((sequence, vec![prompt[prompt.len() - 1]]));
    }
    for now in 0..14 {
        let plan = rows.iter().zip(&prompts).map(|((sequence, output), prompt)| {
            let start = (prompt.len() - 1 + now) as u32;
            let wanted =
                SampleFor { params: &greedy, position: start + 1, output: &output[1..], scores: None };
            let input = &output[output.len() - 1..];
            PlanRow { sequence: *sequence, input, start, want: Want::Sample(wanted) }
        });
        let outcome = step(&mut engine, plan.collect());
        for ((_, output), outcome) in rows.iter_mut().zip(outcome.rows) {
            let RowOutcome::Sampled { token, .. } = outcome else { panic!("no token: {outcome:?}") };
            output.push(token);
        }
    }
    let mut told = 0;
    for ((_, output), own) in rows.iter().zip(SECRETS) {
        let answer = text.tokenizer.decode(&output[1..], false).to_lowercase();
        told += usize::from(answer.contains(own));
        for other in SECRETS.iter().filter(|other| **other != own) {
            assert!(!answer.contains(other), "the row of {own} says {other}: {answer}");
        }
    }
    println!("{told} of 16 rows tell their own word");
    assert!(told >= 12, "only {told} rows tell their own word: the test would see nothing");
}
