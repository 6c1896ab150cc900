//! Checkpoints on any backend: opening them, feeding them, comparing their logits.
//!
//! Generic over the operators, so that every backend is held to the same figures.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints the figures that it compared"
)]

pub mod demo;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use greenroom::model::engine::{DecoderEngine, Prepared};
use greenroom::model::ops::Ops;
use greenroom::model::{Engine, PlanRow, RowOutcome, StepOutcome, StepPlan, Want, families, load};
use greenroom::types::{Epoch, SequenceId, TokenId};

/// Largest difference of a logit that counts as the same computation.
pub const TOLERANCE: f32 = 1e-3;
/// Key-value memory that no test here fills.
const KV_BUDGET: u64 = 256 << 20;

/// A model on a backend, with at most `context` tokens a sequence.
pub fn engine<O: Ops + 'static>(path: &Path, config: &O::Config, context: u32) -> DecoderEngine<O> {
    let files = load::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let packed =
        families::pack::<O>(&files, config).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let context = context.min(packed.facts.context);
    let prepared = Prepared { config: config.clone(), packed, context, kv_budget_bytes: KV_BUDGET };
    prepared.into_engine(Epoch(1)).expect("the backend starts")
}

/// Runs one step.
pub fn step(engine: &mut dyn Engine, rows: Vec<PlanRow<'_>>) -> StepOutcome {
    let handle = engine.submit(&StepPlan { rows }).expect("the step runs");
    engine.collect(handle).expect("the step is collected")
}

/// Feeds tokens in chunks and returns the logits of every position.
pub fn feed(
    engine: &mut dyn Engine,
    sequence: SequenceId,
    start: u32,
    tokens: &[TokenId],
    chunk: usize,
) -> Vec<Vec<f32>> {
    engine.reserve(sequence, start + tokens.len() as u32).expect("there is room");
    let mut all = Vec::new();
    for input in tokens.chunks(chunk) {
        let row = PlanRow { sequence, input, start: start + all.len() as u32, want: Want::AllLogits };
        match step(engine, vec![row]).rows.pop() {
            Some(RowOutcome::Logits(mut logits)) => all.append(&mut logits),
            other => panic!("logits were wanted, not {other:?}"),
        }
    }
    all
}

/// Feeds tokens in one chunk without asking for anything; room must be reserved.
pub fn advance(engine: &mut dyn Engine, sequence: SequenceId, start: u32, tokens: &[TokenId]) {
    let row = PlanRow { sequence, input: tokens, start, want: Want::Nothing };
    assert_eq!(step(engine, vec![row]).rows, [RowOutcome::Advanced]);
}

/// Position of the highest logit, the first among equals.
pub fn best(logits: &[f32]) -> TokenId {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    TokenId(logits.iter().position(|logit| *logit == top).expect("a best token") as u32)
}

/// Largest absolute difference; infinite when lengths differ or a value is no number.
pub fn difference(a: &[f32], b: &[f32]) -> f32 {
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0f32, |worst, difference| {
        if difference.is_nan() { f32::INFINITY } else { worst.max(difference) }
    });
    if a.len() == b.len() { worst } else { f32::INFINITY }
}

/// One prompt with its logits, as the reference computed them.
pub struct Case {
    /// `short` or `long`.
    pub name: &'static str,
    /// Fed from position 0.
    pub prompt: Vec<TokenId>,
    /// Positions whose logits are known, with them.
    pub logits: BTreeMap<usize, Vec<f32>>,
    /// Greedy continuation.
    pub decoded: Vec<TokenId>,
    /// Logits after each of them.
    pub decode_logits: Vec<Vec<f32>>,
}

/// A tiny checkpoint.
pub struct Checkpoint {
    /// The folder's name.
    pub name: String,
    /// What a loader is given.
    pub path: PathBuf,
    /// Its prompts.
    pub cases: Vec<Case>,
}

impl Checkpoint {
    /// Every checkpoint below `root`.
    pub fn all(root: &Path) -> Vec<Self> {
        let mut found: Vec<PathBuf> = std::fs::read_dir(root)
            .expect("the checkpoints are there")
            .map(|entry| entry.expect("a folder can be listed").path())
            .filter(|path| path.join("golden.safetensors").is_file())
            .collect();
        found.sort();
        found.iter().map(|folder| Self::read(folder)).collect()
    }

    /// One checkpoint.
    pub fn read(folder: &Path) -> Self {
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let golden = Golden::read(&folder.join("golden.safetensors"));
        let path = match name.strip_prefix("gguf-") {
            Some(stem) => folder.join(format!("{stem}.gguf")),
            None => folder.to_path_buf(),
        };
        Self { name, path, cases: ["short", "long"].map(|case| golden.case(case)).into() }
    }
}

/// The tensors of a golden file; a reader of its own, so that a fault of the
/// product's cannot hide.
struct Golden {
    header: serde_json::Value,
    data: Vec<u8>,
}

impl Golden {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("the golden file is there");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + length]).expect("a header in JSON");
        Self { header, data: bytes[8 + length..].to_vec() }
    }

    /// Four-byte elements of a tensor, and the width of its last dimension.
    fn tensor<T>(&self, name: &str, kind: &str, value: impl Fn([u8; 4]) -> T) -> (Vec<T>, usize) {
        let entry = &self.header[name];
        assert_eq!(entry["dtype"], kind, "{name}");
        let number = |value: &serde_json::Value| value.as_u64().expect("a number") as usize;
        let span = number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1]);
        let width = number(entry["shape"].as_array().and_then(|shape| shape.last()).expect("a shape"));
        let words = self.data[span].chunks_exact(4);
        (words.map(|word| value(word.try_into().expect("four bytes"))).collect(), width)
    }

    fn ids(&self, name: &str) -> Vec<TokenId> {
        self.tensor(name, "I32", |word| TokenId(u32::from_le_bytes(word))).0
    }

    fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let (values, width) = self.tensor(name, "F32", f32::from_le_bytes);
        values.chunks_exact(width).map(<[f32]>::to_vec).collect()
    }

    fn case(&self, name: &'static str) -> Case {
        let prompt = self.ids(&format!("{name}.prompt_ids"));
        let rows = self.rows(&format!("{name}.logits"));
        let positions: Vec<usize> = match self.header.get(format!("{name}.positions")) {
            Some(_) => self.ids(&format!("{name}.positions")).iter().map(|id| id.0 as usize).collect(),
            None => (0..prompt.len()).collect(),
        };
        assert_eq!(positions.len(), rows.len());
        Case {
            name,
            prompt,
            logits: positions.into_iter().zip(rows).collect(),
            decoded: self.ids(&format!("{name}.decode_ids")),
            decode_logits: self.rows(&format!("{name}.decode_logits")),
        }
    }
}

/// Largest differences of one checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Over the prompts' positions.
    pub prompt: f32,
    /// Over the steps after them.
    pub decode: f32,
}

/// Compares a checkpoint on a backend with the reference, prompts cut in chunks.
pub fn compare(engine: &mut dyn Engine, checkpoint: &Checkpoint, chunk: usize) -> Figures {
    let mut figures = Figures::default();
    for case in &checkpoint.cases {
        let sequence = engine.open(None).expect("a sequence");
        let logits = feed(engine, sequence, 0, &case.prompt, chunk);
        assert_eq!(logits.len(), case.prompt.len());
        for (position, expected) in &case.logits {
            figures.prompt = figures.prompt.max(difference(&logits[*position], expected));
        }
        assert_eq!(
            best(&logits[case.prompt.len() - 1]),
            case.decoded[0],
            "{} {}",
            checkpoint.name,
            case.name
        );
        let decoded = feed(engine, sequence, case.prompt.len() as u32, &case.decoded, 1);
        for (logits, expected) in decoded.iter().zip(&case.decode_logits) {
            figures.decode = figures.decode.max(difference(logits, expected));
        }
        engine.close(sequence);
    }
    figures
}

/// Holds every checkpoint below `root` to the tolerance on a backend, whole and
/// chunked, and prints the figures.
pub fn hold_to_the_reference<O: Ops + 'static>(root: &Path, config: &O::Config) {
    let checkpoints = Checkpoint::all(root);
    assert!(checkpoints.len() >= 16, "found only {} checkpoints", checkpoints.len());
    let mut faults = Vec::new();
    let mut table =
        format!("{:24} {:>9} {:>8} {:>10} {:>10}\n", "checkpoint", "bytes", "chunk", "prompt", "decode");
    for checkpoint in &checkpoints {
        let mut engine = engine::<O>(&checkpoint.path, config, u32::MAX);
        for chunk in [1, 7, 64, usize::MAX] {
            let figures = compare(&mut engine, checkpoint, chunk);
            let cut = if chunk == usize::MAX { "whole".into() } else { chunk.to_string() };
            let bytes = engine.memory().weight_bytes;
            let line = format!(
                "{:24} {bytes:>9} {cut:>8} {:>10.2e} {:>10.2e}",
                checkpoint.name, figures.prompt, figures.decode
            );
            table += &line;
            table.push('\n');
            if !(figures.prompt < TOLERANCE && figures.decode < TOLERANCE) {
                faults.push(line);
            }
        }
        assert_eq!(engine.memory().kv_used_bytes, 0, "{}: key-value memory is left over", checkpoint.name);
    }
    println!("{} on {}\n{table}", std::any::type_name::<O>(), checkpoints.len());
    assert!(faults.is_empty(), "above {TOLERANCE}:\n{}", faults.join("\n"));
}
