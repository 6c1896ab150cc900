//! Key-value state of the CPU: sequences over a pool of shared blocks.
//!
//! A block holds 64 tokens of all layers. Invariants: full blocks of a common
//! prefix are shared and counted; a block with two owners is never written (a
//! write position inside one is copied by `reserve` first, or refused by
//! `attend`); only committed positions count, so that an abandoned step leaves
//! nothing to undo.

use std::collections::HashMap;
use std::ops::Range;

use super::simd::SimdPath;
use crate::config::KvType;
use crate::model::KvNumbers;
use crate::model::ops::{EXPORT_TOKENS, KvStats, KvStore, LayerId, StartOps, check_bytes, check_piece};
use crate::types::{EngineError, Epoch, SequenceId};

mod blocks;

pub use blocks::{BLOCK_TOKENS, BlockLayout};

use blocks::{BlockId, BlockPool};

const _: () = assert!(BLOCK_TOKENS == EXPORT_TOKENS as usize, "a piece lies in one block");

#[derive(Debug, Default)]
struct Sequence {
    blocks: Vec<BlockId>,
    committed: usize,
}

/// The pool and the sequences that own its blocks.
#[derive(Debug)]
pub struct CpuKv {
    epoch: Epoch,
    context: usize,
    pool: BlockPool,
    sequences: HashMap<u64, Sequence>,
    next_number: u64,
}

impl CpuKv {
    /// An empty pool; memory is taken from the system in slabs, as blocks are used.
    ///
    /// # Errors
    /// `Device` when the budget holds no block at all.
    pub fn new(start: &StartOps, kind: KvType) -> Result<Self, EngineError> {
        let layout = BlockLayout::new(&start.kv, kind);
        let pool = BlockPool::new(layout, start.kv_budget_bytes)?;
        let context = start.context as usize;
        Ok(Self { epoch: start.epoch, context, pool, sequences: HashMap::new(), next_number: 0 })
    }

    /// How a block is laid out.
    pub fn layout(&self) -> &BlockLayout {
        self.pool.layout()
    }

    /// Blocks in use and blocks there are; the sum over sequences of owned blocks, shared ones once,
    /// equals the first.
    pub fn blocks(&self) -> (usize, usize) {
        (self.pool.used(), self.pool.capacity())
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence, EngineError> {
        if id.epoch != self.epoch {
            return Err(EngineError::StaleEpoch { sequence: id });
        }
        self.sequences.get(&id.number).ok_or(EngineError::UnknownSequence { sequence: id })
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, EngineError> {
        self.sequence(id)?;
        self.sequences.get_mut(&id.number).ok_or(EngineError::UnknownSequence { sequence: id })
    }

    /// Appends the memory of the sequence's blocks to `into`, for a step that writes
    /// `start..start + len`.
    ///
    /// # Errors
    /// `InvalidPlan` when the step does not continue the sequence, room is missing, or a block that
    /// would be written is shared; `UnknownSequence`, `StaleEpoch`.
    pub(super) fn view(
        &self,
        id: SequenceId,
        start: usize,
        len: usize,
        into: &mut Vec<*mut u8>,
    ) -> Result<(), EngineError> {
        let sequence = self.sequence(id)?;
        let end = start + len;
        if start != sequence.committed {
            let have = sequence.committed;
            return Err(invalid(format!("a row starts at {start}, its sequence has {have} tokens")));
        }
        let needed = end.div_ceil(BLOCK_TOKENS);
        if needed > sequence.blocks.len() {
            let room = sequence.blocks.len() * BLOCK_TOKENS;
            return Err(invalid(format!("{end} tokens in a sequence with room for {room}")));
        }
        let written = &sequence.blocks[start / BLOCK_TOKENS..needed];
        if written.iter().any(|block| self.pool.owners(*block) > 1) {
            return Err(invalid("a shared block would be written: reserve first".into()));
        }
        into.extend(sequence.blocks[..needed].iter().map(|block| self.pool.memory(*block)));
        Ok(())
    }

    /// Writes one token's keys and values of a layer, `[kv_heads · head_dim]` each: what `attend`
    /// does for a whole step, here for tests and imports. Uncommitted until [`KvStore::commit`].
    ///
    /// # Errors
    /// As for a step that writes `committed..=position`; `InvalidPlan` for wrong widths or layers.
    pub fn write_token(
        &mut self,
        id: SequenceId,
        layer: LayerId,
        position: u32,
        key: &[f32],
        value: &[f32],
    ) -> Result<(), EngineError> {
        let layout = *self.layout();
        let width = layout.kv_heads * layout.head_dim;
        if key.len() != width || value.len() != width || layer.0 >= layout.layers {
            return Err(invalid(format!("keys and values are {width} wide in {} layers", layout.layers)));
        }
        let committed = self.sequence(id)?.committed;
        let position = position as usize;
        if position < committed {
            return Err(invalid(format!("position {position} is committed")));
        }
        let mut blocks = Vec::new();
        self.view(id, committed, position + 1 - committed, &mut blocks)?;
        let block = blocks[position / BLOCK_TOKENS];
        for head in 0..layout.kv_heads {
            let range = head * layout.head_dim..(head + 1) * layout.head_dim;
            let place = layout.place(block, layer.0, head);
            // SAFETY: `view` saw that this block belongs to the sequence alone, and `&mut self` keeps
            // everyone else out.
            unsafe {
                place.write(SimdPath::Portable, position % BLOCK_TOKENS, &key[range.clone()], &value[range]);
            }
        }
        Ok(())
    }

    /// One token's keys and values of a layer as stored, widened: `[kv_heads · head_dim]` each.
    ///
    /// # Errors
    /// `InvalidPlan` where nothing can have been written; `UnknownSequence`, `StaleEpoch`.
    pub fn read_token(
        &self,
        id: SequenceId,
        layer: LayerId,
        position: u32,
    ) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
        let sequence = self.sequence(id)?;
        let layout = *self.layout();
        let position = position as usize;
        let Some(block) = sequence.blocks.get(position / BLOCK_TOKENS) else {
            return Err(invalid(format!("position {position} has no block")));
        };
        if layer.0 >= layout.layers {
            return Err(invalid(format!("there are {} layers", layout.layers)));
        }
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in 0..layout.kv_heads {
            let place = layout.place(self.pool.memory(*block), layer.0, head);
            // SAFETY: the block is owned by the sequence, and nobody writes while `self` is borrowed.
            unsafe { place.read(position % BLOCK_TOKENS, &mut keys, &mut values) };
        }
        Ok((keys, values))
    }

    /// Whether `count` blocks can be had, as an error where not.
    fn check_free(&self, count: usize) -> Result<(), EngineError> {
        let bytes = self.pool.layout().bytes() as u64;
        let free = self.pool.free();
        if count <= free {
            return Ok(());
        }
        Err(EngineError::KvFull { need: count as u64 * bytes, free: free as u64 * bytes })
    }

    fn release(&mut self, blocks: Vec<BlockId>) {
        for block in blocks {
            self.pool.release(block);
        }
    }
}

/// The block that a piece lies in, and where.
fn in_block(range: &Range<u32>) -> (usize, Range<usize>) {
    let (start, len) = (range.start as usize, range.len());
    let first = start % BLOCK_TOKENS;
    (start / BLOCK_TOKENS, first..first + len)
}

fn invalid(message: String) -> EngineError {
    EngineError::InvalidPlan { message }
}

impl KvStore for CpuKv {
    const SHARES_PREFIXES: bool = true;

    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        let mut opened = Sequence::default();
        if let Some((source, tokens)) = from {
            let source = self.sequence(source)?;
            let tokens = tokens as usize;
            if tokens > source.committed {
                let have = source.committed;
                return Err(invalid(format!("a fork at {tokens} of a sequence of {have} tokens")));
            }
            let (full, tail) = (tokens / BLOCK_TOKENS, tokens % BLOCK_TOKENS);
            let mut blocks = source.blocks[..full].to_vec();
            if tail > 0 {
                let tail_block = source.blocks[full];
                self.check_free(1)?;
                blocks.push(self.pool.copy(tail_block, tail)?);
            }
            for block in &blocks[..full] {
                self.pool.share(*block);
            }
            opened = Sequence { blocks, committed: tokens };
        }
        let number = self.next_number;
        self.next_number += 1;
        self.sequences.insert(number, opened);
        Ok(SequenceId { epoch: self.epoch, number })
    }

    fn reserve(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let sequence = self.sequence(id)?;
        let tokens = tokens as usize;
        if tokens > self.context {
            return Err(invalid(format!("{tokens} tokens in a context of {}", self.context)));
        }
        let (committed, have) = (sequence.committed, sequence.blocks.len());
        let more = tokens.div_ceil(BLOCK_TOKENS).saturating_sub(have);
        // Only the block after the committed tokens can be both shared and about to be written: blocks
        // past it were never committed, so nobody forked them.
        let first = committed / BLOCK_TOKENS;
        let shared = sequence.blocks.get(first).copied().filter(|_| tokens > committed);
        let shared = shared.filter(|block| self.pool.owners(*block) > 1);
        self.check_free(more + usize::from(shared.is_some()))?;
        let mut fresh = Vec::with_capacity(more);
        for _ in 0..more {
            match self.pool.take() {
                Ok(block) => fresh.push(block),
                Err(error) => {
                    self.release(fresh);
                    return Err(error);
                }
            }
        }
        if let Some(block) = shared {
            match self.pool.copy(block, committed % BLOCK_TOKENS) {
                Ok(own) => {
                    self.pool.release(block);
                    self.sequence_mut(id)?.blocks[first] = own;
                }
                Err(error) => {
                    self.release(fresh);
                    return Err(error);
                }
            }
        }
        self.sequence_mut(id)?.blocks.append(&mut fresh);
        Ok(())
    }

    fn commit(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let sequence = self.sequence_mut(id)?;
        let tokens = tokens as usize;
        let room = sequence.blocks.len() * BLOCK_TOKENS;
        if tokens > room {
            return Err(invalid(format!("{tokens} tokens committed with room for {room}")));
        }
        if tokens < sequence.committed {
            let have = sequence.committed;
            return Err(invalid(format!("{tokens} tokens committed after {have}: truncate instead")));
        }
        sequence.committed = tokens;
        Ok(())
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let sequence = self.sequence_mut(id)?;
        let tokens = tokens as usize;
        sequence.committed = sequence.committed.min(tokens);
        let keep = tokens.div_ceil(BLOCK_TOKENS).min(sequence.blocks.len());
        let given_back = sequence.blocks.split_off(keep);
        self.release(given_back);
        Ok(())
    }

    fn len(&self, id: SequenceId) -> Result<u32, EngineError> {
        Ok(self.sequence(id)?.committed as u32)
    }

    fn restorable(&self, id: SequenceId, at: u32) -> Result<u32, EngineError> {
        Ok(self.len(id)?.min(at))
    }

    fn close(&mut self, id: SequenceId) {
        if id.epoch == self.epoch
            && let Some(sequence) = self.sequences.remove(&id.number)
        {
            self.release(sequence.blocks);
        }
    }

    fn export(&self, id: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError> {
        let sequence = self.sequence(id)?;
        check_piece(&range, sequence.committed as u32)?;
        let (block, slots) = in_block(&range);
        Ok(self.pool.export(sequence.blocks[block], slots))
    }

    fn import(&mut self, id: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError> {
        let sequence = self.sequence(id)?;
        let (committed, blocks) = (sequence.committed, sequence.blocks.len());
        check_piece(&range, (blocks * BLOCK_TOKENS) as u32)?;
        check_bytes(bytes.len(), range.len() * self.pool.layout().token_bytes())?;
        // Sees to it that the block is the sequence's alone.
        let mut view = Vec::new();
        self.view(id, committed, range.end as usize - committed.min(range.end as usize), &mut view)?;
        let (block, slots) = in_block(&range);
        let block = self.sequence(id)?.blocks[block];
        self.pool.import(block, slots, bytes);
        Ok(())
    }

    fn format(&self) -> String {
        let BlockLayout { layers, kv_heads, head_dim, value_width, kind } = *self.layout();
        format!("cpu-blocks-1 {layers}x{kv_heads}x{head_dim}/{value_width} {kind:?}")
    }

    fn numbers(&self) -> KvNumbers {
        match self.layout().kind {
            KvType::F16 => KvNumbers::F16,
            KvType::F32 => KvNumbers::F32,
        }
    }

    fn stats(&self) -> KvStats {
        let bytes = self.layout().bytes() as u64;
        KvStats {
            capacity_bytes: self.pool.capacity() as u64 * bytes,
            used_bytes: self.pool.used() as u64 * bytes,
            bytes_per_token: bytes / BLOCK_TOKENS as u64,
            block_tokens: BLOCK_TOKENS as u32,
        }
    }
}
