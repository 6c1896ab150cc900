//! MLX's key-value slabs on MLX's CPU device: rows that share arrays see their own keys
//! alone, appends stay in place, memory is counted, few graph nodes serve many rows.
#![cfg(feature = "mlx")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints the figures that it compared"
)]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use checkpoints::{Checkpoint, TOLERANCE, best, difference, engine, feed, step};
use greenroom::model::mlx::kv::{KvCopies, MlxKv};
use greenroom::model::mlx::native::graph_operations;
use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};
use greenroom::model::ops::{AttnSpec, KvShape, KvStore, LayerId, Norm, Ops, Rope, StartOps, Step, StepRow};
use greenroom::model::plain::{Matrix, PlainKv, PlainOps};
use greenroom::model::{Engine, PlanRow, RowOutcome, Want};
use greenroom::types::{EngineError, Epoch, SequenceId, TokenId};

const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 8 };
const HEADS: usize = 4;
/// Queries, keys and values of a token.
const WIDTH: usize = (HEADS + 2 * SHAPE.kv_heads) * SHAPE.head_dim;
const TOKEN_BYTES: u64 = (2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4) as u64;
const CONTEXT: u32 = 1200;

/// Pseudo-random numbers that are the same on every machine.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// In `0..below`.
    fn below(&mut self, below: u32) -> u32 {
        (self.next() % u64::from(below)) as u32
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.next() % 20_001) as f32 / 10_000.0 - 1.0).collect()
    }
}

fn config() -> MlxConfig {
    MlxConfig { device: MlxDevice::Cpu, activations: MlxType::F32, dequantize: true }
}

fn begin(tokens: u64) -> StartOps {
    StartOps { epoch: Epoch(1), kv: SHAPE, kv_budget_bytes: tokens * TOKEN_BYTES, context: CONTEXT }
}

fn mlx(tokens: u64) -> (MlxOps, MlxKv) {
    MlxOps::start(&config(), &begin(tokens)).unwrap()
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    window: Option<u32>,
    softcap: Option<f32>,
    norms: bool,
    whole: bool,
    rotated: usize,
}

const USUAL: Kind = Kind { window: None, softcap: None, norms: false, whole: false, rotated: 8 };

fn attention<O: Ops>(ops: &mut O, kind: Kind) -> AttnSpec<O::V> {
    let inv_freq: Vec<f32> = (0..kind.rotated / 2).map(|i| 0.5f32.powi(i as i32)).collect();
    let head_norm = |ops: &mut O, heads: usize| {
        let width = SHAPE.head_dim * if kind.whole { heads } else { 1 };
        let norm: Vec<f32> = (0..width).map(|i| 0.5 + (i % 11) as f32 / 8.0).collect();
        kind.norms.then(|| Norm { weight: ops.vector(&norm).unwrap(), eps: 1e-6 })
    };
    AttnSpec {
        heads: HEADS,
        kv_heads: SHAPE.kv_heads,
        head_dim: SHAPE.head_dim,
        scale: 0.35,
        softcap: kind.softcap,
        window: kind.window,
        q_norm: head_norm(ops, HEADS),
        k_norm: head_norm(ops, SHAPE.kv_heads),
        rope: (kind.rotated > 0).then(|| Rope {
            inv_freq: ops.vector(&inv_freq).unwrap(),
            dims: kind.rotated,
            scale: 1.5,
        }),
    }
}

fn array(values: &[f32]) -> mlx_rs::Array {
    mlx_rs::Array::from_slice(values, &[(values.len() / WIDTH) as i32, WIDTH as i32])
}

fn values(array: &mlx_rs::Array) -> Vec<f32> {
    array.contiguous().unwrap().try_as_slice::<f32>().unwrap().to_vec()
}

/// Rows of a step, packed: sequence, start, tokens.
fn packed(rows: &[(SequenceId, u32, usize)]) -> (Vec<StepRow>, Vec<u32>) {
    let (mut packed, mut positions) = (Vec::new(), Vec::new());
    for (sequence, start, len) in rows {
        packed.push(StepRow { sequence: *sequence, first: positions.len(), len: *len, start: *start });
        positions.extend(*start..*start + *len as u32);
    }
    (packed, positions)
}

/// One layer's attention over `qkv`.
fn attend<O: Ops>(
    ops: &mut O,
    kv: &mut O::Kv,
    layer: usize,
    kind: Kind,
    rows: &[(SequenceId, u32, usize)],
    qkv: O::T,
) -> O::T {
    let spec = attention(ops, kind);
    let (rows, positions) = packed(rows);
    let tokens = vec![TokenId(0); positions.len()];
    let step = Step { tokens: &tokens, positions: &positions, rows: &rows };
    ops.attend(kv, LayerId(layer), qkv, &spec, &step).unwrap()
}

/// Both backends side by side, and what each sequence holds.
struct Walk {
    numbers: Numbers,
    kind: Kind,
    ours: (MlxOps, MlxKv),
    theirs: (PlainOps, PlainKv),
    open: Vec<(SequenceId, u32)>,
}

impl Walk {
    fn new(seed: u64, kind: Kind) -> Self {
        let theirs = PlainOps::start(&(), &begin(1 << 30)).unwrap();
        Self { numbers: Numbers(seed), kind, ours: mlx(1 << 30), theirs, open: Vec::new() }
    }

    fn pick(&mut self) -> usize {
        self.numbers.below(self.open.len() as u32) as usize
    }

    fn open(&mut self, from: Option<(SequenceId, u32)>) {
        let id = self.ours.1.open(from).unwrap();
        assert_eq!(self.theirs.1.open(from).unwrap(), id);
        self.open.push((id, from.map_or(0, |(_, len)| len)));
    }

    fn close(&mut self, index: usize) {
        let (id, _) = self.open.swap_remove(index);
        self.ours.1.close(id);
        self.theirs.1.close(id);
    }

    fn truncate(&mut self, index: usize, to: u32) {
        let (id, len) = &mut self.open[index];
        *len = to.min(*len);
        self.ours.1.truncate(*id, to).unwrap();
        self.theirs.1.truncate(*id, to).unwrap();
    }

    /// A step of some of the sequences; now and then one that is never committed.
    fn step(&mut self) {
        let mut rows = Vec::new();
        for index in 0..self.open.len() {
            let (id, start) = self.open[index];
            let len = match self.numbers.below(20) {
                0..4 => continue,
                4..18 => 1,
                18 => 1 + self.numbers.below(40),
                _ => 1 + self.numbers.below(200),
            };
            if start + len > CONTEXT {
                continue;
            }
            self.ours.1.reserve(id, start + len).unwrap();
            self.theirs.1.reserve(id, start + len).unwrap();
            rows.push((id, start, len as usize));
        }
        // The plan's order is not the slots'.
        if self.numbers.below(2) == 0 {
            rows.reverse();
        }
        if rows.is_empty() {
            return;
        }
        let tokens: usize = rows.iter().map(|(_, _, len)| len).sum();
        for layer in 0..SHAPE.layers {
            let qkv = self.numbers.floats(tokens * WIDTH);
            let out = attend(&mut self.ours.0, &mut self.ours.1, layer, self.kind, &rows, array(&qkv));
            let matrix = Matrix { rows: tokens, cols: WIDTH, data: qkv };
            let expected = attend(&mut self.theirs.0, &mut self.theirs.1, layer, self.kind, &rows, matrix);
            let apart = difference(&values(&out), &expected.data);
            assert!(apart < 1e-4, "{:?} layer {layer} {rows:?}: {apart}", self.kind);
        }
        if self.numbers.below(12) == 0 {
            return;
        }
        for (id, start, len) in rows {
            let end = start + len as u32;
            self.ours.1.commit(id, end).unwrap();
            self.theirs.1.commit(id, end).unwrap();
            self.open.iter_mut().find(|(open, _)| *open == id).unwrap().1 = end;
        }
    }

    fn act(&mut self) {
        let some = !self.open.is_empty();
        match self.numbers.below(16) {
            0..3 if self.open.len() < 12 => self.open(None),
            3 if some && self.open.len() < 12 => {
                let index = self.pick();
                let (id, len) = self.open[index];
                let at = self.numbers.below(len + 1);
                self.open(Some((id, at)));
            }
            4 if some => {
                let index = self.pick();
                self.close(index);
            }
            5 if some => {
                let index = self.pick();
                let to = self.numbers.below(self.open[index].1 + 1);
                self.truncate(index, to);
            }
            6 if some => {
                // A draft that was refused, or a row that is finished.
                let index = self.pick();
                let back = self.numbers.below(3);
                self.truncate(index, self.open[index].1.saturating_sub(back));
            }
            _ => self.step(),
        }
    }
}

#[test]
fn any_history_of_rows_attends_as_plain_loops_do() {
    let windowed = Kind { window: Some(37), ..USUAL };
    let capped = Kind { softcap: Some(0.5), norms: true, ..USUAL };
    let kinds = [
        USUAL,
        windowed,
        capped,
        Kind { window: Some(1), ..capped },
        Kind { norms: true, whole: true, rotated: 4, ..windowed },
        Kind { rotated: 0, ..USUAL },
    ];
    for (seed, kind) in kinds.into_iter().enumerate() {
        let mut walk = Walk::new(seed as u64 + 1, kind);
        for _ in 0..4 {
            walk.open(None);
        }
        for _ in 0..90 {
            walk.act();
        }
        let copies = walk.ours.1.copies();
        println!("{kind:?}: {copies:?}, slabs {:?}", walk.ours.1.slabs());
        assert_eq!(copies.slab_copies, 0, "an append copied its slab");
        while !walk.open.is_empty() {
            walk.close(0);
        }
        assert_eq!(walk.ours.1.stats().used_bytes, 0);
        assert!(walk.ours.1.slabs().is_empty(), "slabs that nobody holds are left over");
    }
}

/// Appends `len` tokens to each sequence and commits.
fn append(ops: &mut MlxOps, kv: &mut MlxKv, rows: &[(SequenceId, u32, usize)], qkv: &[f32]) -> Vec<f32> {
    let mut output = Vec::new();
    for (id, start, len) in rows {
        kv.reserve(*id, start + *len as u32).unwrap();
    }
    for layer in 0..SHAPE.layers {
        output = values(&attend(ops, kv, layer, USUAL, rows, array(qkv)));
    }
    for (id, start, len) in rows {
        kv.commit(*id, start + *len as u32).unwrap();
    }
    output
}

#[test]
fn appends_stay_in_place_while_rows_grow_through_the_classes() {
    let mut numbers = Numbers(11);
    let (mut ops, mut kv) = mlx(1 << 20);
    let open: Vec<SequenceId> = (0..5).map(|_| kv.open(None).unwrap()).collect();
    for at in 0..70 {
        let rows: Vec<_> = open.iter().map(|id| (*id, at * 6, 6)).collect();
        append(&mut ops, &mut kv, &rows, &numbers.floats(30 * WIDTH));
    }
    for at in 420..450 {
        let rows: Vec<_> = open.iter().map(|id| (*id, at, 1)).collect();
        append(&mut ops, &mut kv, &rows, &numbers.floats(5 * WIDTH));
    }
    let KvCopies { slab_copies, moved_bytes } = kv.copies();
    assert_eq!(slab_copies, 0);
    assert_eq!(kv.slabs(), [(512, 8)]);
    // Two moves to the next class, and four rows' worth of doublings in each of three classes.
    let most = 5 * (256 + 384) + (1 + 2 + 4) * (6 + 258 + 390);
    assert!((1..most * TOKEN_BYTES).contains(&moved_bytes), "{moved_bytes} of {}", most * TOKEN_BYTES);
}

#[test]
fn a_view_that_outlives_its_step_is_seen_as_copies() {
    let mut numbers = Numbers(12);
    let (mut ops, mut kv) = mlx(1 << 20);
    let id = kv.open(None).unwrap();
    append(&mut ops, &mut kv, &[(id, 0, 3)], &numbers.floats(3 * WIDTH));
    let slab = kv.place(id, 3, 1).unwrap().slab;
    let held = kv.view(slab, LayerId(0), 0..1, 0..3).unwrap();
    held.iter().for_each(|view| view.eval().unwrap());
    append(&mut ops, &mut kv, &[(id, 3, 1)], &numbers.floats(WIDTH));
    assert_eq!(kv.copies().slab_copies, 2, "keys and values of the layer that is held");
    drop(held);
    append(&mut ops, &mut kv, &[(id, 4, 1)], &numbers.floats(WIDTH));
    assert_eq!(kv.copies().slab_copies, 2, "once nobody holds it, appends are in place again");
}

#[test]
fn a_prompt_that_fills_its_slot_does_not_become_the_slab() {
    let mut numbers = Numbers(13);
    let (mut ops, mut kv) = mlx(1 << 20);
    let id = kv.open(None).unwrap();
    let all = numbers.floats(256 * WIDTH);
    append(&mut ops, &mut kv, &[(id, 0, 256)], &all);
    let fork = kv.open(Some((id, 200))).unwrap();
    let token = numbers.floats(WIDTH);
    let seen = append(&mut ops, &mut kv, &[(fork, 200, 1)], &token);
    let cold = kv.open(None).unwrap();
    append(&mut ops, &mut kv, &[(cold, 0, 200)], &all[..200 * WIDTH]);
    let expected = append(&mut ops, &mut kv, &[(cold, 200, 1)], &token);
    assert!(difference(&seen, &expected) < 1e-5);
    assert_eq!(kv.copies().slab_copies, 0, "appends after it are in place");
}

#[test]
fn a_row_without_numbers_leaves_nothing_to_the_next_tenant_of_its_slot() {
    let mut numbers = Numbers(14);
    let (mut ops, mut kv) = mlx(1 << 20);
    let long = kv.open(None).unwrap();
    let bad = kv.open(None).unwrap();
    append(&mut ops, &mut kv, &[(long, 0, 60), (bad, 0, 50)], &numbers.floats(110 * WIDTH));
    let before = kv.place(bad, 50, 1).unwrap();
    // Committed or not, what it wrote is in the slot.
    append(&mut ops, &mut kv, &[(bad, 50, 4)], &[f32::NAN; 4 * WIDTH]);
    kv.close(bad);
    let next = kv.open(None).unwrap();
    append(&mut ops, &mut kv, &[(next, 0, 2)], &numbers.floats(2 * WIDTH));
    let after = kv.place(next, 2, 1).unwrap();
    assert_eq!((before.slab, before.slot), (after.slab, after.slot), "the test needs the same slot");
    let rows = [(long, 60, 1), (next, 2, 1)];
    let output = append(&mut ops, &mut kv, &rows, &numbers.floats(2 * WIDTH));
    assert!(output.iter().all(|value| value.is_finite()), "{output:?}");
}

#[test]
fn slabs_double_and_finished_rows_rest_apart() {
    let mut numbers = Numbers(15);
    let (mut ops, mut kv) = mlx(1 << 20);
    let mut open = Vec::new();
    for expected in [1usize, 2, 4, 4, 8] {
        let id = kv.open(None).unwrap();
        append(&mut ops, &mut kv, &[(id, 0, 20)], &numbers.floats(20 * WIDTH));
        open.push(id);
        assert_eq!(kv.slabs(), [(256, expected)]);
    }
    assert_eq!(kv.stats().used_bytes, 5 * 256 * TOKEN_BYTES, "spare slots are not in use");
    // Done: it keeps its twenty tokens and nothing else, out of the others' way.
    kv.truncate(open[1], 20).unwrap();
    assert_eq!(kv.slabs(), [(256, 8), (20, 1)]);
    assert_eq!(kv.stats().used_bytes, (4 * 256 + 20) * TOKEN_BYTES);
    // A prefix of it costs nothing until it is to grow.
    let fork = kv.open(Some((open[1], 16))).unwrap();
    assert_eq!(kv.stats().used_bytes, (4 * 256 + 20) * TOKEN_BYTES);
    kv.reserve(fork, 30).unwrap();
    assert_eq!(kv.slabs(), [(256, 8), (20, 1)], "the free slot is taken");
    // A draft that was refused does not move the row.
    let moved = kv.copies().moved_bytes;
    kv.truncate(open[0], 18).unwrap();
    assert_eq!(kv.copies().moved_bytes, moved);
    // The source may go first.
    let last = kv.open(Some((open[1], 20))).unwrap();
    kv.close(open[1]);
    kv.reserve(last, 20).unwrap();
    assert_eq!((kv.copies().moved_bytes, kv.len(last).unwrap()), (moved, 20), "nobody else reads it");
}

#[test]
fn the_budget_holds_for_arrays_and_spare_slots_are_given_back() {
    let mut numbers = Numbers(16);
    let (mut ops, mut kv) = mlx(8 * 256 + 100);
    let open: Vec<SequenceId> = (0..3).map(|_| kv.open(None).unwrap()).collect();
    for id in &open {
        append(&mut ops, &mut kv, &[(*id, 0, 9)], &numbers.floats(9 * WIDTH));
    }
    assert_eq!(kv.slabs(), [(256, 4)]);
    kv.close(open[0]);
    kv.close(open[1]);
    assert_eq!(kv.stats().used_bytes, 256 * TOKEN_BYTES);
    let wide = kv.open(None).unwrap();
    let refused = kv.reserve(wide, 1200).err();
    assert_eq!(kv.reserve(wide, 1200).err(), None, "three spare slots make room: {refused:?}");
    assert_eq!(kv.slabs(), [(256, 1), (1200, 1)]);
    // The one that was moved by that still knows what it knew.
    let (mut other_ops, mut other) = mlx(1 << 20);
    let cold = other.open(None).unwrap();
    let mut again = Numbers(16);
    again.floats(18 * WIDTH);
    append(&mut other_ops, &mut other, &[(cold, 0, 9)], &again.floats(9 * WIDTH));
    let token = numbers.floats(WIDTH);
    let expected = append(&mut other_ops, &mut other, &[(cold, 9, 1)], &token);
    let seen = append(&mut ops, &mut kv, &[(open[2], 9, 1)], &token);
    assert!(difference(&seen, &expected) < 1e-5);
    let more = kv.open(None).unwrap();
    let free = (8 * 256 + 100 - 256 - 1200) * TOKEN_BYTES;
    let need = 768 * TOKEN_BYTES;
    assert_eq!(kv.reserve(more, 700), Err(EngineError::KvFull { need, free }));
    // A row alone in its slab grows by the difference, not by old and new at once.
    kv.close(wide);
    kv.close(more);
    let grown = kv.open(None).unwrap();
    append(&mut ops, &mut kv, &[(grown, 0, 700)], &numbers.floats(700 * WIDTH));
    kv.reserve(grown, 1200).unwrap();
    assert_eq!(kv.slabs(), [(256, 1), (1200, 1)]);
    assert_eq!(kv.reserve(open[2], 300).err(), None);
}

/// Graph operations of one layer's attention for `rows` decoding rows.
fn attention_nodes(rows: usize, kind: Kind) -> usize {
    let mut numbers = Numbers(17);
    let (mut ops, mut kv) = mlx(1 << 20);
    let open: Vec<SequenceId> = (0..rows).map(|_| kv.open(None).unwrap()).collect();
    let at = |step: u32| -> Vec<_> {
        open.iter().enumerate().map(|(index, id)| (*id, (5 + index as u32) * (step > 0) as u32, 1)).collect()
    };
    // Different lengths, so that a mask is needed.
    for (index, id) in open.iter().enumerate() {
        append(&mut ops, &mut kv, &[(*id, 0, 5 + index)], &numbers.floats((5 + index) * WIDTH));
    }
    let x = array(&numbers.floats(rows * WIDTH));
    x.eval().unwrap();
    let out = attend(&mut ops, &mut kv, 0, kind, &at(1), x);
    graph_operations(std::slice::from_ref(&out)).unwrap()
}

#[test]
fn many_rows_cost_hardly_more_graph_nodes_than_one() {
    for (what, kind) in [("usual", USUAL), ("window", Kind { window: Some(4), ..USUAL })] {
        let [one, two, eight, sixteen] = [1, 2, 8, 16].map(|rows| attention_nodes(rows, kind));
        println!("{what}: {one} nodes of attention for 1 row, {two} for 2, {eight} for 8, {sixteen} for 16");
        assert_eq!((two, two), (eight, sixteen));
        // On the CPU device MLX composes rope and attention from parts, which Metal runs as one
        // node each; masks and a vector of offsets add some of those.
        assert!(eight <= one + 14 && eight <= 70, "{one} and {eight} nodes");
    }
}

/// Prompts of different lengths below `vocab`.
fn prompts(count: usize, vocab: u32) -> Vec<Vec<TokenId>> {
    let mut numbers = Numbers(18);
    let lengths = [3, 17, 64, 65, 9, 30, 1, 40];
    let prompt = |length: usize| (0..length).map(|_| TokenId(numbers.below(vocab))).collect();
    lengths.into_iter().cycle().take(count).map(prompt).collect()
}

#[test]
fn eight_rows_of_every_checkpoint_equal_each_alone() {
    let checkpoints = Checkpoint::all(&common::data("tiny"));
    assert!(checkpoints.len() >= 16);
    for checkpoint in &checkpoints {
        let mut engine = engine::<MlxOps>(&checkpoint.path, &config(), 512);
        let prompts = prompts(8, engine.info().vocab);
        let alone: Vec<Vec<Vec<f32>>> = prompts
            .iter()
            .map(|prompt| {
                let id = engine.open(None).unwrap();
                let mut trace = feed(&mut engine, id, 0, prompt, usize::MAX);
                trace.drain(..prompt.len() - 1);
                for at in 0..4 {
                    let next = best(trace.last().unwrap());
                    trace.append(&mut feed(&mut engine, id, (prompt.len() + at) as u32, &[next], 1));
                }
                engine.close(id);
                trace
            })
            .collect();
        let open: Vec<SequenceId> = prompts.iter().map(|_| engine.open(None).unwrap()).collect();
        let mut next = Vec::new();
        for ((id, prompt), alone) in open.iter().zip(&prompts).zip(&alone) {
            let logits = feed(&mut engine, *id, 0, prompt, 31);
            assert!(difference(logits.last().unwrap(), &alone[0]) < TOLERANCE, "{}", checkpoint.name);
            next.push([best(&alone[0])]);
        }
        for at in 0..4 {
            let mut rows = Vec::new();
            for ((id, prompt), input) in open.iter().zip(&prompts).zip(&next) {
                let start = (prompt.len() + at) as u32;
                engine.reserve(*id, start + 1).unwrap();
                rows.push(PlanRow { sequence: *id, input, start, want: Want::LastLogits });
            }
            let outcome = step(&mut engine, rows);
            for (index, outcome) in outcome.rows.into_iter().enumerate() {
                let RowOutcome::Logits(logits) = outcome else { panic!("{outcome:?}") };
                let expected = &alone[index][at + 1];
                let apart = difference(&logits[0], expected);
                assert!(apart < TOLERANCE, "{} row {index} token {at}: {apart}", checkpoint.name);
                next[index] = [best(expected)];
            }
        }
        open.iter().for_each(|id| engine.close(*id));
        assert_eq!(engine.memory().kv_used_bytes, 0);
    }
}
