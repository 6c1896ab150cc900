//! What a query computes: blocks of 64 keys ascending inside absolute spans of
//! 512 positions, each span from scratch, spans merged ascending.
//!
//! Invariant: a query's operations and their order depend on its position, its
//! window and the stored keys and values alone. Queries that are computed
//! together share loads, never a sum; keys outside a query's mask are not read
//! into its sums, not even times zero.

use std::cell::RefCell;

use super::super::kv::{BLOCK_TOKENS, BlockLayout};
use super::super::math::{exp, exp_one, softcapped};
use super::super::simd::{Kernel, LANES, Simd, SimdPath, dispatch, tree_sum};
use crate::config::KvType;

/// Positions of a span.
const SPAN: usize = 512;
const SPAN_BLOCKS: usize = SPAN / BLOCK_TOKENS;
/// Queries that share loads of keys and values.
const TOGETHER: usize = 6;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Lanes of keys or dimensions kept in registers for each of them.
const WIDE: usize = 2 * LANES;

/// The query heads of one key-value head, for some consecutive tokens of a row.
pub(super) struct Queries<'a> {
    pub(super) layout: BlockLayout,
    pub(super) layer: usize,
    /// Key-value head.
    pub(super) head: usize,
    /// Query heads that share it.
    pub(super) group: usize,
    pub(super) tokens: usize,
    /// Absolute position of the first token.
    pub(super) position: usize,
    pub(super) window: Option<usize>,
    /// Every query sees so many positions, whatever its own: a memory.
    pub(super) whole: Option<usize>,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    /// The row's blocks.
    pub(super) blocks: &'a [*mut u8],
    /// First query; a token's query heads follow each other.
    pub(super) q: *const f32,
    pub(super) q_stride: usize,
    /// Output of the first query, laid out like the queries.
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
}

/// What becomes of what was summed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    /// Every span, then the outputs.
    All,
    /// One span, kept as a partial: [`Queries::partial_len`] numbers from here on.
    Span(usize, *mut f32),
    /// The outputs of so many partials, which follow each other from here on.
    Merge(usize, *const f32),
}

thread_local! {
    /// Running values of the queries at hand; grows once.
    static STATE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Does a job for all queries.
///
/// # Safety
/// `q` and `out` hold the queries and outputs, the blocks cover every position up to the last token's,
/// partials are as long as said; nobody else touches the outputs or the partial, or writes the blocks or
/// the partials to be merged.
pub(super) unsafe fn compute(path: SimdPath, queries: &Queries<'_>, job: Job) {
    STATE.with_borrow_mut(|state| match queries.layout.kind {
        KvType::F16 => dispatch(path, Compute::<Half> { queries, job, state, stored: Half }),
        KvType::F32 => dispatch(path, Compute::<Single> { queries, job, state, stored: Single }),
    });
}

/// How keys and values are stored.
trait Stored: Copy {
    /// Eight elements from the `index`-th on.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load<S: Simd>(self, s: S, from: *const u8, index: usize) -> S::V;
}

#[derive(Clone, Copy)]
struct Half;
#[derive(Clone, Copy)]
struct Single;

impl Stored for Half {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, from: *const u8, index: usize) -> S::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { s.load_f16(from.cast::<u16>().add(index)) }
    }
}

impl Stored for Single {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, from: *const u8, index: usize) -> S::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { s.load_ptr(from.cast::<f32>().add(index)) }
    }
}

struct Compute<'a, E> {
    queries: &'a Queries<'a>,
    job: Job,
    state: &'a mut Vec<f32>,
    stored: E,
}

/// Running maximum, sum of probabilities and weighted values of each query, in a span and in all.
struct State<'a> {
    span_max: &'a mut [f32],
    span_sum: &'a mut [f32],
    span_out: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> State<'a> {
    fn new(memory: &'a mut Vec<f32>, queries: usize, width: usize) -> Self {
        let need = queries * (4 + 2 * width);
        if memory.len() < need {
            memory.resize(need, 0.0);
        }
        let (span_max, rest) = memory.split_at_mut(queries);
        let (span_sum, rest) = rest.split_at_mut(queries);
        let (max, rest) = rest.split_at_mut(queries);
        let (sum, rest) = rest.split_at_mut(queries);
        let (span_out, rest) = rest.split_at_mut(queries * width);
        let out = &mut rest[..queries * width];
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        out.fill(0.0);
        Self { span_max, span_sum, span_out, max, sum, out }
    }

    /// Keeps the span at hand as a partial, as it is: what is merged later are the very bits.
    #[inline(always)]
    fn write(&self, to: &mut [f32]) {
        let (max, rest) = to.split_at_mut(self.span_max.len());
        let (sum, out) = rest.split_at_mut(self.span_sum.len());
        max.copy_from_slice(self.span_max);
        sum.copy_from_slice(self.span_sum);
        out.copy_from_slice(self.span_out);
    }

    /// A partial as the span at hand.
    #[inline(always)]
    fn read(&mut self, from: &[f32]) {
        let (max, rest) = from.split_at(self.span_max.len());
        let (sum, out) = rest.split_at(self.span_sum.len());
        self.span_max.copy_from_slice(max);
        self.span_sum.copy_from_slice(sum);
        self.span_out.copy_from_slice(out);
    }

    fn begin_span(&mut self) {
        self.span_max.fill(f32::NEG_INFINITY);
        self.span_sum.fill(0.0);
        self.span_out.fill(0.0);
    }

    /// Joins the span to what came before, for the queries that saw any of it.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, s: S, width: usize) {
        for query in 0..self.max.len() {
            let (before, span) = (self.max[query], self.span_max[query]);
            if self.span_sum[query] == 0.0 {
                continue;
            }
            let max = if before > span { before } else { span };
            let (keep, take) = (exp_one(s, before - max), exp_one(s, span - max));
            self.max[query] = max;
            self.sum[query] = self.sum[query] * keep + self.span_sum[query] * take;
            let range = query * width..(query + 1) * width;
            for (out, span) in self.out[range.clone()].iter_mut().zip(&self.span_out[range]) {
                *out = *out * keep + *span * take;
            }
        }
    }
}

/// Slots of a block that a query sees.
#[derive(Clone, Copy, Default)]
struct Seen {
    query: usize,
    from: usize,
    to: usize,
}

impl<E: Stored> Kernel for Compute<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { queries: q, job, state, stored } = self;
        let mut state = State::new(state, q.tokens * q.group, q.layout.value_width);
        match job {
            Job::All => {
                for span in q.spans() {
                    q.span(s, stored, span, &mut state);
                    state.merge(s, q.layout.value_width);
                }
                q.finish(&state);
            }
            Job::Span(span, to) => {
                q.span(s, stored, span, &mut state);
                // SAFETY: `compute`'s caller vouches for the place.
                state.write(unsafe { std::slice::from_raw_parts_mut(to, q.partial_len()) });
            }
            Job::Merge(count, from) => {
                for index in 0..count {
                    let at = from.wrapping_add(index * q.partial_len());
                    // SAFETY: `compute`'s caller vouches for the partials.
                    state.read(unsafe { std::slice::from_raw_parts(at, q.partial_len()) });
                    state.merge(s, q.layout.value_width);
                }
                q.finish(&state);
            }
        }
    }
}

impl Queries<'_> {
    /// Numbers of a partial.
    pub(super) fn partial_len(&self) -> usize {
        self.tokens * self.group * (2 + self.layout.value_width)
    }

    /// Spans that any of the queries sees.
    #[inline(always)]
    pub(super) fn spans(&self) -> std::ops::RangeInclusive<usize> {
        self.first_seen(self.position) / SPAN..=(self.end_of(self.position + self.tokens - 1) - 1) / SPAN
    }

    /// Computes one span from scratch.
    #[inline(always)]
    fn span<S: Simd, E: Stored>(&self, s: S, stored: E, span: usize, state: &mut State<'_>) {
        state.begin_span();
        let last = self.end_of(self.position + self.tokens - 1) - 1;
        let from = (self.first_seen(self.position) / BLOCK_TOKENS).max(span * SPAN_BLOCKS);
        let to = (last / BLOCK_TOKENS).min(span * SPAN_BLOCKS + SPAN_BLOCKS - 1);
        if self.wishes_ahead() {
            // Nobody wished for the first block of a span: all of it is wanted at once.
            let keys = self.layout.place(self.blocks[from], self.layer, self.head).keys();
            for line in 0..self.layout.head_bytes() / LINE {
                s.prefetch(keys.wrapping_add(LINE * line));
            }
        }
        for block in from..=to {
            self.block(s, stored, block, state);
        }
    }

    /// Writes the outputs.
    #[inline(always)]
    fn finish(&self, state: &State<'_>) {
        let (d, width) = (self.layout.head_dim, self.layout.value_width);
        for query in 0..self.tokens * self.group {
            let sum = state.sum[query];
            let values = &state.out[query * width..query * width + d];
            // SAFETY: `compute`'s caller vouches for the outputs.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.out.add(self.offset(query, self.out_stride)), d)
            };
            for (out, value) in out.iter_mut().zip(values) {
                *out = *value / sum;
            }
        }
    }

    /// Whether the next block's lines should be wished near while this one is computed: each half of the
    /// work then brings the like half. Many queries compute for longer on a block than it takes to come.
    #[inline(always)]
    fn wishes_ahead(&self) -> bool {
        self.tokens * self.group <= TOGETHER
    }

    /// First position that the query at `position` sees.
    #[inline(always)]
    fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Where what the query at `position` sees ends.
    #[inline(always)]
    fn end_of(&self, position: usize) -> usize {
        self.whole.unwrap_or(position + 1)
    }

    /// Where a query's vector begins, token-major.
    #[inline(always)]
    fn offset(&self, query: usize, stride: usize) -> usize {
        query / self.group * stride + query % self.group * self.layout.head_dim
    }

    /// Lets every query see one block, some at a time.
    #[inline(always)]
    fn block<S: Simd, E: Stored>(&self, s: S, stored: E, block: usize, state: &mut State<'_>) {
        let base = block * BLOCK_TOKENS;
        let mut together = [Seen::default(); TOGETHER];
        let mut count = 0;
        for query in 0..self.tokens * self.group {
            let position = self.position + query / self.group;
            let from = self.first_seen(position).saturating_sub(base);
            let to = self.end_of(position).saturating_sub(base).min(BLOCK_TOKENS);
            if from < to {
                together[count] = Seen { query, from, to };
                count += 1;
            }
            if count == TOGETHER {
                self.see::<S, E, TOGETHER>(s, stored, block, &together, state);
                count = 0;
            }
        }
        match count {
            1 => self.see::<S, E, 1>(s, stored, block, &together[..count], state),
            2 => self.see::<S, E, 2>(s, stored, block, &together[..count], state),
            3 => self.see::<S, E, 3>(s, stored, block, &together[..count], state),
            4 => self.see::<S, E, 4>(s, stored, block, &together[..count], state),
            5 => self.see::<S, E, 5>(s, stored, block, &together[..count], state),
            _ => {}
        }
    }

    /// Scores, probabilities and weighted values of `N` queries in one block.
    #[inline(always)]
    fn see<S: Simd, E: Stored, const N: usize>(
        &self,
        s: S,
        stored: E,
        block: usize,
        seen: &[Seen],
        state: &mut State<'_>,
    ) {
        let Some(seen) = seen.first_chunk::<N>() else { return };
        let place = self.layout.place(self.blocks[block], self.layer, self.head);
        let mut weights = [[0.0_f32; BLOCK_TOKENS]; N];
        let next = self.layout.place(
            *self.blocks.get(block + 1).unwrap_or(&self.blocks[block]),
            self.layer,
            self.head,
        );
        let ahead = self.wishes_ahead();
        self.scores(s, stored, [place.keys(), next.keys()], seen, &mut weights);
        let mut corrections = [0.0; N];
        for i in 0..N {
            let query = seen[i].query;
            let (max, sum) = (&mut state.span_max[query], &mut state.span_sum[query]);
            corrections[i] = soften(s, &mut weights[i], &seen[i], max, sum);
        }
        let width = self.layout.value_width;
        let from = seen.iter().map(|seen| seen.from).max().unwrap_or(0);
        let to = seen.iter().map(|seen| seen.to).min().unwrap_or(0).max(from);
        for column in (0..width).step_by(WIDE) {
            let mut sums = [[s.splat(0.0); 2]; N];
            for i in 0..N {
                let at = seen[i].query * width + column;
                let (halves, _) = state.span_out[at..at + WIDE].as_chunks::<LANES>();
                let correction = s.splat(corrections[i]);
                sums[i] = [s.mul(s.load(&halves[0]), correction), s.mul(s.load(&halves[1]), correction)];
            }
            let column = Column { start: place.values(), width, column };
            // What only some queries see is theirs alone, before and after what all of them see.
            for i in 0..N {
                for slot in seen[i].from..from.min(seen[i].to) {
                    sums[i] = weigh(s, weights[i][slot], column.at(s, stored, slot), sums[i]);
                }
            }
            for slot in from..to {
                if ahead && column.column.is_multiple_of(2 * WIDE) {
                    let line = column.column / WIDE / 2 * BLOCK_TOKENS + slot;
                    s.prefetch(next.values().wrapping_add(LINE * line));
                }
                let value = column.at(s, stored, slot);
                for i in 0..N {
                    sums[i] = weigh(s, weights[i][slot], value, sums[i]);
                }
            }
            for i in 0..N {
                for slot in to.max(seen[i].from)..seen[i].to {
                    sums[i] = weigh(s, weights[i][slot], column.at(s, stored, slot), sums[i]);
                }
            }
            for i in 0..N {
                let at = seen[i].query * width + column.column;
                let (halves, _) = state.span_out[at..at + WIDE].as_chunks_mut::<LANES>();
                s.store(sums[i][0], &mut halves[0]);
                s.store(sums[i][1], &mut halves[1]);
            }
        }
    }

    /// Scaled dot products with all keys of a block: one chain over dimensions each. Chunks of keys
    /// that no query sees are left alone.
    #[inline(always)]
    fn scores<S: Simd, E: Stored, const N: usize>(
        &self,
        s: S,
        stored: E,
        [keys, next]: [*const u8; 2],
        seen: &[Seen; N],
        scores: &mut [[f32; BLOCK_TOKENS]; N],
    ) {
        let first = seen.iter().map(|seen| seen.from).min().unwrap_or(0) / WIDE * WIDE;
        let last = seen.iter().map(|seen| seen.to).max().unwrap_or(0);
        let mut query = [self.q; N];
        for i in 0..N {
            query[i] = self.q.wrapping_add(self.offset(seen[i].query, self.q_stride));
        }
        let scale = s.splat(self.scale);
        let ahead = self.wishes_ahead();
        for chunk in (first..last).step_by(WIDE) {
            let mut sums = [[s.splat(0.0); 2]; N];
            for dim in 0..self.layout.head_dim {
                if ahead && chunk.is_multiple_of(2 * WIDE) {
                    s.prefetch(next.wrapping_add(LINE * (chunk / WIDE / 2 * self.layout.head_dim + dim)));
                }
                let at = dim * BLOCK_TOKENS + chunk;
                // SAFETY: `dim < head_dim` and `chunk + 16 <= 64`: inside the block's keys.
                let key = unsafe { [stored.load(s, keys, at), stored.load(s, keys, at + LANES)] };
                for i in 0..N {
                    // SAFETY: `compute`'s caller vouches for the query's `head_dim` values.
                    let x = s.splat(unsafe { *query[i].add(dim) });
                    sums[i] = [s.fma(x, key[0], sums[i][0]), s.fma(x, key[1], sums[i][1])];
                }
            }
            for i in 0..N {
                let (halves, _) = scores[i][chunk..chunk + WIDE].as_chunks_mut::<LANES>();
                for (half, sum) in halves.iter_mut().zip(sums[i]) {
                    let score = s.mul(sum, scale);
                    s.store(self.softcap.map_or(score, |cap| softcapped(s, score, cap)), half);
                }
            }
        }
    }
}

/// Sixteen dimensions of a block's values.
struct Column {
    start: *const u8,
    width: usize,
    column: usize,
}

impl Column {
    #[inline(always)]
    fn at<S: Simd, E: Stored>(&self, s: S, stored: E, slot: usize) -> [S::V; 2] {
        debug_assert!(slot < BLOCK_TOKENS && self.column + WIDE <= self.width);
        let at = slot * self.width + self.column;
        // SAFETY: a slot of the block and sixteen of its dimensions, as asserted: inside the values.
        unsafe { [stored.load(s, self.start, at), stored.load(s, self.start, at + LANES)] }
    }
}

#[inline(always)]
fn weigh<S: Simd>(s: S, weight: f32, value: [S::V; 2], sums: [S::V; 2]) -> [S::V; 2] {
    let weight = s.splat(weight);
    [s.fma(weight, value[0], sums[0]), s.fma(weight, value[1], sums[1])]
}

/// Turns a block's scores into probabilities against the span's running maximum; gives the factor for
/// what was summed before.
#[inline(always)]
fn soften<S: Simd>(s: S, scores: &mut [f32; BLOCK_TOKENS], seen: &Seen, max: &mut f32, sum: &mut f32) -> f32 {
    scores[..seen.from].fill(f32::NEG_INFINITY);
    scores[seen.to..].fill(f32::NEG_INFINITY);
    let (chunks, _) = scores.as_chunks_mut::<LANES>();
    let mut top = s.splat(f32::NEG_INFINITY);
    for chunk in chunks.iter() {
        top = s.max(s.load(chunk), top);
    }
    let mut lanes = [0.0; LANES];
    s.store(top, &mut lanes);
    let mut now = *max;
    for lane in lanes {
        now = if lane > now { lane } else { now };
    }
    let correction = exp_one(s, *max - now);
    let offset = s.splat(now);
    let mut sums = [s.splat(0.0); BLOCK_TOKENS / LANES];
    for (chunk, sum) in chunks.iter_mut().zip(&mut sums) {
        *sum = exp(s, s.sub(s.load(chunk), offset));
        s.store(*sum, chunk);
    }
    let quarters =
        [s.add(sums[0], sums[4]), s.add(sums[1], sums[5]), s.add(sums[2], sums[6]), s.add(sums[3], sums[7])];
    let total = s.add(s.add(quarters[0], quarters[2]), s.add(quarters[1], quarters[3]));
    s.store(total, &mut lanes);
    *max = now;
    *sum = sum.mul_add(correction, tree_sum(lanes));
    correction
}
