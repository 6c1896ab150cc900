//! Attention over ragged rows and the block pool: the driver.
//!
//! Two passes over a step. The first norms and rotates each token's heads and
//! writes its keys and values into the row's blocks, rounded as stored. The
//! second lets every query read them, its own chunk's included, as stored. So a
//! query's result depends on what came before it, never on where chunks began.
//! A third pass merges the spans of long contexts that were cut among threads.
//! What one query computes, and in which order, is [`span`]'s matter.

use super::kv::{BLOCK_TOKENS, BlockLayout, CpuKv};
use super::linear::Machine;
use super::math::RmsNormInPlace;
use super::rope::RopeTable;
use super::simd::{Kernel, Simd, dispatch};
use crate::model::ops::{AttnSpec, LayerId, Norm, Step};
use crate::types::EngineError;

mod span;
pub mod whole;

use span::{Job, Queries};

/// Query vectors that one item computes at most: they share keys and values while those are near.
const ITEM_QUERIES: usize = 48;
/// Pieces for each thread that keep all of them busy to the end, nearly.
const PIECES_PER_THREAD: usize = 8;
/// Numbers that the partials of a step hold at most (16 MiB); what is beyond is not cut.
const PARTIALS: usize = 4 << 20;
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

/// Some tokens of a row with one key-value head.
#[derive(Clone, Copy, Debug)]
struct Piece {
    row: RowPlace,
    head: usize,
    /// First token, counted from the row's first in this step.
    token: usize,
    tokens: usize,
}

/// One claimable item of the second pass, or of the third.
#[derive(Clone, Copy, Debug)]
struct Item {
    piece: Piece,
    part: Part,
}

/// What of a piece an item is; partials by their place in [`Scratch::partials`].
#[derive(Clone, Copy, Debug)]
enum Part {
    All,
    Span { span: usize, to: usize },
    Merge { spans: usize, from: usize },
}

/// Lists that a step refills; kept so that a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    blocks: Vec<*mut u8>,
    rows: Vec<RowPlace>,
    items: Vec<Item>,
    merges: Vec<Item>,
    partials: Vec<f32>,
}

/// Everything that the threads share.
struct Pass<'a> {
    machine: Machine<'a>,
    layout: BlockLayout,
    layer: usize,
    spec: &'a AttnSpec<Vector>,
    rope: Option<&'a RopeTable>,
    rows: &'a [RowPlace],
    blocks: &'a [*mut u8],
    partials: *mut f32,
    qkv: *mut f32,
    out: *mut f32,
}

// SAFETY: threads touch a token's queries, keys and values (first pass) or an item's queries and outputs or
// partial (later passes) only after claiming it; blocks are written in the first pass only, each slot by the thread
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
    if spec.kv_heads == 0 || spec.heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) {
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
    let Scratch { blocks, rows, items, merges, partials } = scratch;
    blocks.clear();
    rows.clear();
    for row in step.rows {
        let (start, at) = (row.start as usize, blocks.len());
        kv.view(row.sequence, start, row.len, blocks)?;
        rows.push(RowPlace { first: row.first, len: row.len, start, blocks: at });
    }
    let (qkv, out, rows) = (qkv.as_mut_ptr(), out.as_mut_ptr(), &rows[..]);
    let partials_at = std::ptr::null_mut();
    let mut pass =
        Pass { machine, layout, layer: layer.0, spec, rope, rows, blocks, partials: partials_at, qkv, out };
    let room = pass.cut(items, merges);
    if partials.len() < room {
        partials.resize(room, 0.0);
    }
    pass.partials = partials.as_mut_ptr();
    let grain = tokens.div_ceil(4 * machine.threads.max(1)).max(PREPARE_TOKENS);
    machine.pool.run(machine.threads, tokens, grain, &|range| {
        for token in range {
            // SAFETY: this thread claimed the token.
            unsafe { pass.prepare(token) };
        }
    });
    for items in [&items[..], &merges[..]] {
        machine.pool.run(machine.threads, items.len(), 1, &|range| {
            for item in range {
                // SAFETY: this thread claimed the item, and the passes before are over.
                unsafe { pass.attend(&items[item]) };
            }
        });
    }
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

    /// Lists the items of the second and third pass; gives the numbers that their partials hold.
    ///
    /// Few pieces would leave threads idle beside a long context, so these are cut by spans, which are
    /// computed from scratch and merged in the same order either way.
    fn cut(&self, items: &mut Vec<Item>, merges: &mut Vec<Item>) -> usize {
        items.clear();
        merges.clear();
        let group = self.spec.heads / self.spec.kv_heads;
        let per_piece = (ITEM_QUERIES / group).max(1);
        let pieces: usize =
            self.rows.iter().map(|row| row.len.div_ceil(per_piece) * self.spec.kv_heads).sum();
        let enough = pieces >= PIECES_PER_THREAD * self.machine.threads || self.machine.threads <= 1;
        let mut room = 0;
        for row in self.rows {
            for token in (0..row.len).step_by(per_piece) {
                let tokens = per_piece.min(row.len - token);
                for head in 0..self.spec.kv_heads {
                    let piece = Piece { row: *row, head, token, tokens };
                    let queries = self.queries(&piece);
                    let (from, spans) = (room, queries.spans());
                    let count = spans.clone().count();
                    if enough || count == 1 || room + count * queries.partial_len() > PARTIALS {
                        items.push(Item { piece, part: Part::All });
                        continue;
                    }
                    for span in spans.clone() {
                        items.push(Item { piece, part: Part::Span { span, to: room } });
                        room += queries.partial_len();
                    }
                    merges.push(Item { piece, part: Part::Merge { spans: count, from } });
                }
            }
        }
        room
    }

    fn queries(&self, piece: &Piece) -> Queries<'_> {
        let group = self.spec.heads / self.spec.kv_heads;
        let first = piece.row.first + piece.token;
        let column = piece.head * group * self.spec.head_dim;
        let out_stride = self.spec.heads * self.spec.head_dim;
        Queries {
            layout: self.layout,
            layer: self.layer,
            head: piece.head,
            group,
            tokens: piece.tokens,
            position: piece.row.start + piece.token,
            window: self.spec.window.map(|window| window as usize),
            whole: None,
            scale: self.spec.scale,
            softcap: self.spec.softcap,
            blocks: &self.blocks[piece.row.blocks..],
            // Both are inside their buffers, whose lengths `attend` checked.
            q: self.qkv.wrapping_add(first * self.stride() + column),
            q_stride: self.stride(),
            out: self.out.wrapping_add(first * out_stride + column),
            out_stride,
        }
    }

    /// Computes an item's queries.
    ///
    /// # Safety
    /// The item is the calling thread's alone; the first pass is over, and for a merge the second.
    unsafe fn attend(&self, item: &Item) {
        let job = match item.part {
            Part::All => Job::All,
            Part::Span { span, to } => Job::Span(span, self.partials.wrapping_add(to)),
            Part::Merge { spans, from } => Job::Merge(spans, self.partials.wrapping_add(from)),
        };
        // SAFETY: passed on: the item's queries, outputs and partials are this thread's, as `cut` laid them
        // out, and nobody writes blocks.
        unsafe { span::compute(self.machine.path, &self.queries(&item.piece), job) }
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
