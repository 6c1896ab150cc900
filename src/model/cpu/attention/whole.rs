//! Attention to a memory: keys and values of one layer that every query reads whole, laid out as a
//! sequence's blocks are. What a query computes is [`super::span`]'s matter, as for causal rows.

use super::super::kv::{BLOCK_TOKENS, BlockLayout};
use super::super::linear::Machine;
use super::super::memory::ZeroedBytes;
use super::super::simd::{Kernel, LANES, Simd, SimdPath, dispatch};
use super::ITEM_QUERIES;
use super::span::{self, Job, Queries};
use crate::config::KvType;
use crate::model::ops::KvShape;
use crate::model::ops::speech::RecallSpec;

/// See the module.
#[derive(Debug)]
pub struct CpuMemory {
    layout: BlockLayout,
    bytes: ZeroedBytes,
    positions: usize,
}

impl CpuMemory {
    /// Zeros; `None` when the system has no room.
    pub fn new(positions: usize, spec: &RecallSpec, kind: KvType) -> Option<Self> {
        let shape = KvShape { layers: 1, kv_heads: spec.heads, head_dim: spec.head_dim };
        let layout = BlockLayout::new(&shape, kind);
        let bytes = ZeroedBytes::new(positions.div_ceil(BLOCK_TOKENS).checked_mul(layout.bytes())?)?;
        Some(Self { layout, bytes, positions })
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// How many positions there are.
    pub fn positions(&self) -> usize {
        self.positions
    }

    fn fits(&self, spec: &RecallSpec) -> bool {
        self.layout.kv_heads == spec.heads && self.layout.head_dim == spec.head_dim
    }

    fn block(&self, index: usize) -> *mut u8 {
        self.bytes.as_mut_ptr().wrapping_add(index * self.layout.bytes())
    }

    /// Stores keys and values `[tokens][2 · heads · head_dim]`, keys first, at `first`; false where they do not fit.
    pub fn write(&mut self, machine: Machine<'_>, first: usize, tokens: usize, keys_values: &[f32]) -> bool {
        let (heads, d) = (self.layout.kv_heads, self.layout.head_dim);
        let width = 2 * heads * d;
        if first + tokens > self.positions || keys_values.len() != tokens * width {
            return false;
        }
        let memory: &Self = self;
        machine.pool.run(machine.threads, tokens, tokens.div_ceil(4 * machine.threads).max(4), &|range| {
            for token in range {
                let position = first + token;
                let (keys, values) = keys_values[token * width..(token + 1) * width].split_at(heads * d);
                for (head, (key, value)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
                    let place = memory.layout.place(memory.block(position / BLOCK_TOKENS), 0, head);
                    // SAFETY: the position is inside, as checked; this thread claimed the token, and
                    // the memory is borrowed exclusively by this call.
                    unsafe { place.write(machine.path, position % BLOCK_TOKENS, key, value) };
                }
            }
        });
        true
    }
}

/// Outputs that threads write at disjoint places.
struct Shared(*mut f32);

// SAFETY: written only at the places of an item, which one thread claims.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(&self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

/// Queries `[tokens][heads · head_dim]` to `out`, alike; `rows` are consecutive tokens and their memory.
/// False where shapes do not fit; nothing is written then.
pub fn recall(
    machine: Machine<'_>,
    spec: &RecallSpec,
    rows: &[(usize, &CpuMemory)],
    queries: &[f32],
    out: &mut [f32],
) -> bool {
    let width = spec.heads * spec.head_dim;
    let tokens: usize = rows.iter().map(|(tokens, _)| tokens).sum();
    let fits = rows.iter().all(|(_, memory)| memory.fits(spec) && memory.positions > 0);
    if !fits || queries.len() != tokens * width || out.len() != queries.len() {
        return false;
    }
    let blocks: Vec<Vec<*mut u8>> = rows
        .iter()
        .map(|(_, memory)| (0..memory.positions.div_ceil(BLOCK_TOKENS)).map(|b| memory.block(b)).collect())
        .collect();
    let mut items = Vec::new();
    let mut first = 0;
    for (row, (tokens, _)) in rows.iter().enumerate() {
        for from in (0..*tokens).step_by(ITEM_QUERIES) {
            let count = ITEM_QUERIES.min(tokens - from);
            items.extend((0..spec.heads).map(|head| (row, first + from, count, head)));
        }
        first += tokens;
    }
    let blocks = SharedBlocks(blocks);
    let out = Shared(out.as_mut_ptr());
    machine.pool.run(machine.threads, items.len(), 1, &|range| {
        for (row, token, tokens, head) in items[range].iter().copied() {
            let at = token * width + head * spec.head_dim;
            let memory = rows[row].1;
            let queries = Queries {
                layout: memory.layout,
                layer: 0,
                head,
                group: 1,
                tokens,
                position: 0,
                window: None,
                whole: Some(memory.positions),
                scale: spec.scale,
                softcap: None,
                blocks: blocks.of(row),
                q: queries[at..].as_ptr(),
                q_stride: width,
                out: out.at(at),
                out_stride: width,
            };
            // SAFETY: lengths were checked above; the item's outputs are this thread's alone, and memories
            // are borrowed: nobody writes them.
            unsafe { span::compute(machine.path, &queries, Job::All) };
        }
    });
    true
}

/// Blocks of each row's memory.
struct SharedBlocks(Vec<Vec<*mut u8>>);

// SAFETY: they are only read through while memories are borrowed.
unsafe impl Sync for SharedBlocks {}

impl SharedBlocks {
    fn of(&self, row: usize) -> &[*mut u8] {
        &self.0[row]
    }
}

/// Scaled scores of one head: `[tokens][positions]`, of queries that lie `stride` apart.
pub fn scores(
    path: SimdPath,
    spec: &RecallSpec,
    memory: &CpuMemory,
    head: usize,
    queries: &[f32],
    out: &mut Vec<f32>,
) -> bool {
    if !memory.fits(spec) || head >= spec.heads {
        return false;
    }
    let width = spec.heads * spec.head_dim;
    for query in queries.chunks_exact(width) {
        let query = &query[head * spec.head_dim..(head + 1) * spec.head_dim];
        let start = out.len();
        for block in 0..memory.positions.div_ceil(BLOCK_TOKENS) {
            let keys = memory.layout.place(memory.block(block), 0, head).keys();
            dispatch(path, BlockScores { query, keys, kind: memory.layout.kind, scale: spec.scale, out });
        }
        out.truncate(start + memory.positions);
    }
    true
}

/// Scores of a query with all keys of a block.
struct BlockScores<'a> {
    query: &'a [f32],
    keys: *const u8,
    kind: KvType,
    scale: f32,
    out: &'a mut Vec<f32>,
}

impl Kernel for BlockScores<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for chunk in (0..BLOCK_TOKENS).step_by(LANES) {
            let mut sum = s.splat(0.0);
            for (dim, x) in self.query.iter().enumerate() {
                let at = dim * BLOCK_TOKENS + chunk;
                // SAFETY: `dim < head_dim` and `chunk + 8 <= 64`: inside the block's keys, which are alive
                // and not written while their memory is borrowed.
                let key = unsafe {
                    match self.kind {
                        KvType::F16 => s.load_f16(self.keys.cast::<u16>().add(at)),
                        KvType::F32 => s.load_ptr(self.keys.cast::<f32>().add(at)),
                    }
                };
                sum = s.fma(s.splat(*x), key, sum);
            }
            let mut lanes = [0.0; LANES];
            s.store(s.mul(sum, s.splat(self.scale)), &mut lanes);
            self.out.extend_from_slice(&lanes);
        }
    }
}
