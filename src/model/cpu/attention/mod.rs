//! Attention over ragged rows and the block pool: the driver.
//!
//! Two passes over a step. The first norms and rotates each token's heads and
//! writes its keys and values into the row's blocks, rounded as stored. The
//! second lets every query read them, its own chunk's included, as stored. So a
//! query's result depends on what came before it, never on where chunks began.
//! What one query computes, and in which order, is [`span`]'s matter.

use super::kv::{BLOCK_TOKENS, BlockLayout, CpuKv};
use super::linear::Machine;
use super::math::RmsNormInPlace;
use super::rope::RopeTable;
use super::simd::{Kernel, Simd, dispatch};
use crate::model::ops::{AttnSpec, LayerId, Norm, Step};
use crate::types::EngineError;

mod span;

use span::Queries;

/// Query vectors that one item computes at most: they share keys and values while those are near.
const ITEM_QUERIES: usize = 48;
/// Tokens prepared by one claim, at least.
const PREPARE_TOKENS: usize = 4;

/// A small vector on the CPU.
pub type Vector = std::sync::Arc<[f32]>;

/// One row of a step and where its blocks are in [`Scratch::blocks`].
#[derive(Clone, Copy, Debug)]
struct RowPlace {
    first: usize,
    len: usize,
    start: usize,
    blocks: usize,
}

/// One claimable piece of the second pass: some tokens of a row, one key-value head.
#[derive(Clone, Copy, Debug)]
struct Item {
    row: RowPlace,
    head: usize,
    /// First token, counted from the row's first in this step.
    token: usize,
    tokens: usize,
}

/// Lists that a step refills; kept so that a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    blocks: Vec<*mut u8>,
    rows: Vec<RowPlace>,
    items: Vec<Item>,
}

/// Everything that the threads share.
struct Pass<'a> {
    machine: Machine<'a>,
    layout: BlockLayout,
    layer: usize,
    spec: &'a AttnSpec<Vector>,
    rope: Option<&'a RopeTable>,
    rows: &'a [RowPlace],
    items: &'a [Item],
    blocks: &'a [*mut u8],
    qkv: *mut f32,
    out: *mut f32,
}

// SAFETY: threads touch a token's queries, keys and values (first pass) or an item's queries and outputs
// (second pass) only after claiming it; blocks are written in the first pass only, each slot by the thread
// that claimed its token, and `CpuKv::view` saw that no other sequence owns them.
unsafe impl Sync for Pass<'_> {}

/// Widths and rows fit together, or the step's author made a mistake.
fn check(
    spec: &AttnSpec<Vector>,
    layout: &BlockLayout,
    layer: LayerId,
    step: &Step<'_>,
) -> Result<(), EngineError> {
    let fail = |message: String| Err(EngineError::InvalidPlan { message });
    if spec.kv_heads != layout.kv_heads || spec.head_dim != layout.head_dim || layer.0 >= layout.layers {
        return fail(format!("layer {} of {spec:?} does not fit {layout:?}", layer.0));
    }
    if spec.kv_heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) {
        return fail(format!("{} query heads over {} key heads", spec.heads, spec.kv_heads));
    }
    let rope_fits = spec.rope.as_ref().is_none_or(|rope| 2 * rope.inv_freq.len() <= spec.head_dim);
    let misfits = |norm: &Option<Norm<Vector>>, heads: usize| {
        let widths = [spec.head_dim, heads * spec.head_dim];
        norm.as_ref().is_some_and(|norm| !widths.contains(&norm.weight.len()))
    };
    if !rope_fits || misfits(&spec.q_norm, spec.heads) || misfits(&spec.k_norm, spec.kv_heads) {
        return fail(format!("norms or frequencies do not fit heads of {}", spec.head_dim));
    }
    let mut next = 0;
    for (index, row) in step.rows.iter().enumerate() {
        if row.first != next || row.len == 0 {
            return fail(format!(
                "row {index} has {} tokens from {}, expected from {next}",
                row.len, row.first
            ));
        }
        if step.rows[..index].iter().any(|other| other.sequence == row.sequence) {
            return fail(format!("sequence {:?} comes twice", row.sequence));
        }
        next += row.len;
    }
    if next != step.tokens.len() {
        return fail(format!("rows cover {next} of {} tokens", step.tokens.len()));
    }
    Ok(())
}

/// Norms, rotates, appends and attends; `qkv` is `[tokens][(heads + 2 · kv_heads) · head_dim]` and
/// is overwritten, `out` is `[tokens][heads · head_dim]`.
///
/// # Errors
/// `InvalidPlan` when shapes or rows do not fit, room is missing or a sequence comes twice;
/// `UnknownSequence`, `StaleEpoch`. Nothing is written then.
#[allow(clippy::too_many_arguments, reason = "an operator's operands; bundling them would only rename them")]
pub fn attend(
    machine: Machine<'_>,
    kv: &mut CpuKv,
    layer: LayerId,
    spec: &AttnSpec<Vector>,
    rope: Option<&RopeTable>,
    step: &Step<'_>,
    scratch: &mut Scratch,
    qkv: &mut [f32],
    out: &mut [f32],
) -> Result<(), EngineError> {
    let layout = *kv.layout();
    check(spec, &layout, layer, step)?;
    let tokens = step.tokens.len();
    assert_eq!(qkv.len(), tokens * (spec.heads + 2 * spec.kv_heads) * spec.head_dim, "queries, keys, values");
    assert_eq!(out.len(), tokens * spec.heads * spec.head_dim, "an output for every query");
    let Scratch { blocks, rows, items } = scratch;
    blocks.clear();
    rows.clear();
    items.clear();
    for row in step.rows {
        let (start, at) = (row.start as usize, blocks.len());
        kv.view(row.sequence, start, row.len, blocks)?;
        rows.push(RowPlace { first: row.first, len: row.len, start, blocks: at });
    }
    let group = spec.heads / spec.kv_heads;
    let per_item = (ITEM_QUERIES / group).max(1);
    for row in rows.iter() {
        for token in (0..row.len).step_by(per_item) {
            let tokens = per_item.min(row.len - token);
            items.extend((0..spec.kv_heads).map(|head| Item { row: *row, head, token, tokens }));
        }
    }
    let (qkv, out) = (qkv.as_mut_ptr(), out.as_mut_ptr());
    let pass = Pass { machine, layout, layer: layer.0, spec, rope, rows, items, blocks, qkv, out };
    let grain = tokens.div_ceil(4 * machine.threads.max(1)).max(PREPARE_TOKENS);
    machine.pool.run(machine.threads, tokens, grain, &|range| {
        for token in range {
            // SAFETY: this thread claimed the token.
            unsafe { pass.prepare(token) };
        }
    });
    machine.pool.run(machine.threads, pass.items.len(), 1, &|range| {
        for item in range {
            // SAFETY: this thread claimed the item, and the first pass is over.
            unsafe { pass.attend(&pass.items[item]) };
        }
    });
    Ok(())
}

impl Pass<'_> {
    fn stride(&self) -> usize {
        (self.spec.heads + 2 * self.spec.kv_heads) * self.spec.head_dim
    }

    /// Norms and rotates a token's heads, and stores its keys and values.
    ///
    /// # Safety
    /// The token is the calling thread's alone, in the first pass.
    unsafe fn prepare(&self, token: usize) {
        let row = self.rows.partition_point(|row| row.first <= token) - 1;
        let row = &self.rows[row];
        let position = row.start + (token - row.first);
        let (heads, kv_heads, d) = (self.spec.heads, self.spec.kv_heads, self.spec.head_dim);
        // SAFETY: `attend` checked the length of `qkv`; the token is this thread's.
        let qkv =
            unsafe { std::slice::from_raw_parts_mut(self.qkv.add(token * self.stride()), self.stride()) };
        let (turned, values) = qkv.split_at_mut((heads + kv_heads) * d);
        let (queries, keys) = turned.split_at_mut(heads * d);
        for (part, norm) in [(queries, &self.spec.q_norm), (keys, &self.spec.k_norm)] {
            let Some(norm) = norm else { continue };
            // A norm as wide as all heads takes them as one.
            for x in part.chunks_exact_mut(norm.weight.len()) {
                dispatch(self.machine.path, RmsNormInPlace { x, weight: &norm.weight, eps: norm.eps });
            }
        }
        for head in turned.chunks_exact_mut(d) {
            if let Some(rope) = self.rope {
                dispatch(self.machine.path, Rotate { rope, head, position });
            }
        }
        let keys = turned[heads * d..].chunks_exact(d);
        let block = self.blocks[row.blocks + position / BLOCK_TOKENS];
        for (head, (key, value)) in keys.zip(values.chunks_exact(d)).enumerate() {
            let place = self.layout.place(block, self.layer, head);
            // SAFETY: `CpuKv::view` saw that the block is alive and this sequence's alone; the slot is
            // this token's.
            unsafe { place.write(self.machine.path, position % BLOCK_TOKENS, key, value) };
        }
    }

    /// Computes an item's queries.
    ///
    /// # Safety
    /// The item is the calling thread's alone, in the second pass.
    unsafe fn attend(&self, item: &Item) {
        let group = self.spec.heads / self.spec.kv_heads;
        let first = item.row.first + item.token;
        let column = item.head * group * self.spec.head_dim;
        let queries = Queries {
            layout: self.layout,
            layer: self.layer,
            head: item.head,
            group,
            tokens: item.tokens,
            position: item.row.start + item.token,
            window: self.spec.window.map(|window| window as usize),
            scale: self.spec.scale,
            softcap: self.spec.softcap,
            blocks: &self.blocks[item.row.blocks..],
            // SAFETY: both are inside their buffers, whose lengths `attend` checked.
            q: unsafe { self.qkv.add(first * self.stride() + column) },
            q_stride: self.stride(),
            // SAFETY: as above.
            out: unsafe { self.out.add(first * self.spec.heads * self.spec.head_dim + column) },
            out_stride: self.spec.heads * self.spec.head_dim,
        };
        // SAFETY: passed on: the item's queries and outputs are this thread's, and nobody writes blocks.
        unsafe { span::compute(self.machine.path, &queries) }
    }
}

/// Rotates one head.
struct Rotate<'a> {
    rope: &'a RopeTable,
    head: &'a mut [f32],
    position: usize,
}

impl Kernel for Rotate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        self.rope.rotate(self.head, self.position);
    }
}
