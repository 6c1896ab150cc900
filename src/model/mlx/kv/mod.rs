//! Key-value state on MLX: rows of like capacity share arrays, so that one operation appends
//! for all of them and one attends.
//!
//! A sequence is a slot of a [`slab::Slab`], or the first tokens of another's slot, which it
//! copies when it asks for room. Capacities are classes; a slab has 1, 2, 4, 8 or 16 slots and
//! doubles, array by array. A sequence that gave its spare room back *rests*: it holds a slot
//! without being at work, in a slab of its own, so that attention passes over live rows only.
//!
//! Invariants: slots in arrays never exceed the budget; nothing but views for the running step
//! leaves this folder; K and V of what a step wrote are computed with it. Spare slots count
//! against the budget but not as used: they are given back when the budget is short. While a
//! slab changes its size one array of it exists twice, which is not counted.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::rc::Rc;

use mlx_rs::Array;

use super::native::{StreamLease, array_from_vec};
use super::{MlxType, dim};
use crate::model::KvNumbers;
use crate::model::ops::{KvShape, KvStats, KvStore, LayerId, StartOps, check_bytes, check_piece};
use crate::types::{EngineError, Epoch, SequenceId};

mod homes;
mod slab;

use slab::Slab;

/// Smallest capacity, tokens; the larger ones are multiples of it.
const UNIT: u32 = 256;
/// Most slots of a slab.
const MOST_SLOTS: usize = 16;

/// Where a sequence's keys and values are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Home {
    slab: u64,
    slot: usize,
    /// It may append there; else it reads a prefix.
    writes: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    len: u32,
    home: Option<Home>,
}

/// Where a row of a step writes, for the step's duration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Which slab.
    pub slab: u64,
    /// Which slot of it.
    pub slot: usize,
    /// Slots of the slab.
    pub slots: usize,
    /// Positions beyond the row's end that hold what was given up: to be cleared.
    pub stale: Range<u32>,
}

/// What the store had MLX copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvCopies {
    /// Arrays that an append copied instead of writing in place. Zero, unless steps overlap.
    pub slab_copies: u64,
    /// Bytes moved because sequences grew, were forked, or rest.
    pub moved_bytes: u64,
}

/// The rows' key-value arrays.
pub struct MlxKv {
    epoch: Epoch,
    shape: KvShape,
    kind: MlxType,
    context: u32,
    budget: u64,
    /// Of the next sequence.
    next: u64,
    /// Of the next slab.
    next_slab: u64,
    sequences: HashMap<u64, Sequence>,
    slabs: BTreeMap<u64, Slab>,
    copies: KvCopies,
    /// Declared last: the stream goes back to the pool when the arrays above are gone.
    _stream: Rc<StreamLease>,
}

impl MlxKv {
    /// An empty store, whose arrays are computed on `stream`.
    pub fn new(start: &StartOps, kind: MlxType, stream: Rc<StreamLease>) -> Self {
        Self {
            epoch: start.epoch,
            shape: start.kv,
            kind,
            context: start.context,
            budget: start.kv_budget_bytes,
            next: 0,
            next_slab: 0,
            sequences: HashMap::new(),
            slabs: BTreeMap::new(),
            copies: KvCopies::default(),
            _stream: stream,
        }
    }

    /// What was copied so far.
    pub fn copies(&self) -> KvCopies {
        self.copies
    }

    /// Slabs by capacity and slots, the oldest first.
    pub fn slabs(&self) -> Vec<(u32, usize)> {
        self.slabs.values().map(|slab| (slab.capacity, slab.slots.len())).collect()
    }

    /// Where a row of `len` tokens from `start` goes. To be asked once a step and row.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` where room is missing.
    pub fn place(&self, id: SequenceId, start: u32, len: u32) -> Result<Place, EngineError> {
        let missing = |room: u32| {
            let message = format!("{len} tokens from {start} on in a sequence with room for {room}");
            EngineError::InvalidPlan { message }
        };
        let home = self.get(id)?.home.filter(|home| home.writes).ok_or_else(|| missing(0))?;
        let slab = self.slab(home.slab)?;
        let written = slab.slots.get(home.slot).map_or(0, |slot| slot.written);
        let end = start.checked_add(len).filter(|end| *end <= slab.capacity);
        let end = end.ok_or_else(|| missing(slab.capacity))?;
        Ok(Place { slab: home.slab, slot: home.slot, slots: slab.slots.len(), stale: end..written.max(end) })
    }

    /// Appends one position of several slots in one operation a side: keys and values are
    /// `[rows, kv_heads, 1, head_dim]`, `at` holds slots and positions.
    ///
    /// # Errors
    /// `Device`.
    pub fn scatter(
        &mut self,
        slab: u64,
        layer: LayerId,
        at: (&Array, &Array),
        new: [&Array; 2],
    ) -> Result<(), EngineError> {
        self.slab_mut(slab)?.scatter(layer.0, at, new)
    }

    /// Appends `[1, kv_heads, n, head_dim]` at a position of one slot.
    ///
    /// # Errors
    /// `InvalidPlan` where it does not fit; `Device`.
    pub fn write(
        &mut self,
        place: &Place,
        layer: LayerId,
        start: u32,
        new: [&Array; 2],
    ) -> Result<(), EngineError> {
        self.slab_mut(place.slab)?.write(layer.0, place.slot, start, new)
    }

    /// After a row's append: clears what it leaves beyond its end. A masked position must not
    /// hold a NaN, and a slot alone in its slab has none that are masked.
    ///
    /// # Errors
    /// `Device`.
    pub fn finish(&mut self, place: &Place, layer: LayerId) -> Result<(), EngineError> {
        let last = layer.0 + 1 == self.shape.layers;
        let slab = self.slab_mut(place.slab)?;
        let clears = !place.stale.is_empty() && place.slots > 1;
        if clears {
            slab.clear(layer.0, place.slot, place.stale.clone())?;
        }
        if let Some(slot) = slab.slots.get_mut(place.slot).filter(|_| last) {
            // What a lone slot keeps beyond the end is still there when it gets neighbours.
            slot.written = if clears { place.stale.start } else { slot.written.max(place.stale.start) };
        }
        Ok(())
    }

    /// What `slots` of a slab hold at `positions`, as views into the step's graph: to be made
    /// after all writes of the layer, and not to outlive the step.
    ///
    /// # Errors
    /// `Device`.
    pub fn view(
        &self,
        slab: u64,
        layer: LayerId,
        slots: Range<usize>,
        positions: Range<u32>,
    ) -> Result<[Array; 2], EngineError> {
        self.slab(slab)?.view(layer.0, slots, positions)
    }

    fn bytes_per_token(&self) -> u64 {
        let values = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim;
        u64::try_from(values).unwrap_or(u64::MAX).saturating_mul(self.kind.bytes())
    }

    fn bytes(&self, capacity: u32, slots: usize) -> u64 {
        u64::from(capacity).saturating_mul(slots as u64).saturating_mul(self.bytes_per_token())
    }

    fn used(&self) -> u64 {
        self.slabs.values().map(|slab| self.bytes(slab.capacity, slab.occupied())).sum()
    }

    fn free(&self) -> u64 {
        let all: u64 = self.slabs.values().map(|slab| self.bytes(slab.capacity, slab.slots.len())).sum();
        self.budget.saturating_sub(all)
    }

    fn check(&self, id: SequenceId) -> Result<(), EngineError> {
        if id.epoch != self.epoch {
            return Err(EngineError::StaleEpoch { sequence: id });
        }
        Ok(())
    }

    fn get(&self, id: SequenceId) -> Result<Sequence, EngineError> {
        self.check(id)?;
        self.sequences.get(&id.number).copied().ok_or(EngineError::UnknownSequence { sequence: id })
    }

    fn set(&mut self, id: SequenceId, sequence: Sequence) {
        self.sequences.insert(id.number, sequence);
    }

    fn slab(&self, id: u64) -> Result<&Slab, EngineError> {
        self.slabs.get(&id).ok_or_else(|| no_slab(id))
    }

    fn slab_mut(&mut self, id: u64) -> Result<&mut Slab, EngineError> {
        self.slabs.get_mut(&id).ok_or_else(|| no_slab(id))
    }

    /// The class for so many tokens, within the context.
    fn class_for(&self, tokens: u32) -> u32 {
        capacity_for(tokens).min(self.context.max(tokens))
    }

    /// Computes what steps wrote, without waiting for it where `wait` is false.
    ///
    /// # Errors
    /// `Device`.
    pub fn settle(&mut self, wait: bool) -> Result<(), EngineError> {
        for slab in self.slabs.values_mut() {
            self.copies.slab_copies += slab.settle(wait)?;
        }
        Ok(())
    }
}

/// Appends an array's values as they are stored.
fn append_bytes(array: &Array, kind: MlxType, into: &mut Vec<u8>) -> Result<(), EngineError> {
    let failed = |error: mlx_rs::error::AsSliceError| EngineError::Device { message: error.to_string() };
    match kind {
        MlxType::F32 => {
            let values = array.try_as_slice::<f32>().map_err(failed)?;
            into.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        MlxType::F16 => {
            let values = array.try_as_slice::<half::f16>().map_err(failed)?;
            into.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        MlxType::BF16 => {
            let values = array.try_as_slice::<half::bf16>().map_err(failed)?;
            into.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }
    Ok(())
}

fn array_of_bytes(bytes: &[u8], kind: MlxType, shape: &[i32]) -> Result<Array, EngineError> {
    match kind {
        MlxType::F32 => {
            let values = bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
            array_from_vec(values.collect(), shape, kind.dtype())
        }
        MlxType::F16 | MlxType::BF16 => {
            let values = bytes.as_chunks::<2>().0.iter().map(|value| u16::from_le_bytes(*value));
            array_from_vec::<u16>(values.collect(), shape, kind.dtype())
        }
    }
}

fn no_slab(id: u64) -> EngineError {
    EngineError::InvalidPlan { message: format!("there is no slab {id}") }
}

/// The capacity that `tokens` need: 256 times 1, 1.5, 2, 3, 4, 6, 8 and so on, so that a
/// growing row is copied a logarithmic number of times.
fn capacity_for(tokens: u32) -> u32 {
    let mut size = UNIT;
    loop {
        if tokens <= size {
            return size;
        }
        let and_half = size.saturating_add(size / 2);
        if tokens <= and_half || size > u32::MAX / 2 {
            return and_half.max(tokens);
        }
        size *= 2;
    }
}

impl KvStore for MlxKv {
    const SHARES_PREFIXES: bool = false;

    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        let mut sequence = Sequence::default();
        if let Some((source, tokens)) = from {
            let source = self.get(source)?;
            if tokens > source.len {
                let message = format!("a fork of {tokens} tokens from {}", source.len);
                return Err(EngineError::InvalidPlan { message });
            }
            sequence.len = tokens;
            sequence.home = source.home.filter(|_| tokens > 0).map(|home| Home { writes: false, ..home });
        }
        if let Some(home) = sequence.home
            && let Some(slot) = self.slab_mut(home.slab)?.slots.get_mut(home.slot)
        {
            slot.borrowers += 1;
        }
        let id = SequenceId { epoch: self.epoch, number: self.next };
        self.next += 1;
        self.set(id, sequence);
        Ok(id)
    }

    fn reserve(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let Sequence { len, home } = self.get(id)?;
        if tokens > self.context {
            let message = format!("{tokens} tokens in a context of {}", self.context);
            return Err(EngineError::InvalidPlan { message });
        }
        let tokens = tokens.max(len);
        let Some(home) = home else {
            return if tokens == 0 { Ok(()) } else { self.relocate(id, self.class_for(tokens), 0) };
        };
        let slab = self.slab(home.slab)?;
        let slot = slab.slots.get(home.slot).copied().unwrap_or_default();
        let fits = tokens <= slab.capacity;
        if home.writes && fits {
            return Ok(());
        }
        if fits && slot.writer.is_none() && slot.borrowers == 1 {
            // Nobody else reads it: it need not be copied.
            let home = self.turned(id.number, home, true);
            return self.move_in(id, home);
        }
        // A step under way may have written beyond the committed length.
        let held = if home.writes { slot.written } else { len };
        self.relocate(id, self.class_for(tokens), held)
    }

    fn commit(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let mut sequence = self.get(id)?;
        let home = sequence.home.filter(|home| home.writes);
        let room = match home {
            Some(home) => self.slab(home.slab)?.capacity,
            None => sequence.len,
        };
        if tokens > room {
            let message = format!("{tokens} tokens in room for {room}");
            return Err(EngineError::InvalidPlan { message });
        }
        // Both sides, every step: else the graph of a prompt without logits grows for ever.
        if let Some(home) = home {
            self.copies.slab_copies += self.slab_mut(home.slab)?.settle(true)?;
        }
        sequence.len = tokens;
        self.set(id, sequence);
        Ok(())
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let Sequence { len, home } = self.get(id)?;
        let forgets = tokens < len;
        let len = len.min(tokens);
        let Some(home) = home else { return Ok(()) };
        if len == 0 {
            self.release(home);
            self.set(id, Sequence::default());
            return Ok(());
        }
        let slab = self.slab(home.slab)?;
        let lent = slab.slots.get(home.slot).is_some_and(|slot| slot.borrowers > 0);
        // Others read here what it would overwrite.
        let home = if forgets && lent { self.turned(id.number, home, false) } else { home };
        self.set(id, Sequence { len, home: Some(home) });
        // A few tokens less are a draft that was refused; half as much room is worth a copy.
        let much_less = self.class_for(len) <= self.slab(home.slab)?.capacity / 2;
        if forgets && !much_less { Ok(()) } else { self.rest(id) }
    }

    fn len(&self, id: SequenceId) -> Result<u32, EngineError> {
        Ok(self.get(id)?.len)
    }

    fn restorable(&self, id: SequenceId, at: u32) -> Result<u32, EngineError> {
        Ok(self.get(id)?.len.min(at))
    }

    fn close(&mut self, id: SequenceId) {
        if id.epoch == self.epoch
            && let Some(Sequence { home: Some(home), .. }) = self.sequences.remove(&id.number)
        {
            self.release(home);
        }
    }

    fn export(&self, id: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError> {
        let Sequence { len, home } = self.get(id)?;
        check_piece(&range, len)?;
        let Some(home) = home else { return Err(no_slab(0)) };
        let slab = self.slab(home.slab)?;
        let mut bytes = Vec::with_capacity(range.len() * self.bytes_per_token() as usize);
        for layer in 0..self.shape.layers {
            for side in slab.copy_out(layer, home.slot, range.clone())? {
                append_bytes(&side, self.kind, &mut bytes)?;
            }
        }
        Ok(bytes)
    }

    fn import(&mut self, id: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError> {
        check_piece(&range, u32::MAX)?;
        check_bytes(bytes.len(), range.len() * self.bytes_per_token() as usize)?;
        let place = self.place(id, range.start, range.len() as u32)?;
        let KvShape { layers, kv_heads, head_dim } = self.shape;
        let shape = [1, dim(kv_heads)?, dim(range.len())?, dim(head_dim)?];
        let side = bytes.len() / (2 * layers.max(1));
        for (layer, both) in bytes.chunks_exact(2 * side).enumerate() {
            let keys = array_of_bytes(&both[..side], self.kind, &shape)?;
            let values = array_of_bytes(&both[side..], self.kind, &shape)?;
            self.write(&place, LayerId(layer), range.start, [&keys, &values])?;
            self.finish(&place, LayerId(layer))?;
        }
        Ok(())
    }

    fn format(&self) -> String {
        let KvShape { layers, kv_heads, head_dim } = self.shape;
        format!("mlx-slabs-1 {layers}x{kv_heads}x{head_dim} {:?}", self.kind)
    }

    fn numbers(&self) -> KvNumbers {
        match self.kind {
            MlxType::F32 => KvNumbers::F32,
            MlxType::F16 => KvNumbers::F16,
            MlxType::BF16 => KvNumbers::Bf16,
        }
    }

    fn stats(&self) -> KvStats {
        KvStats {
            capacity_bytes: self.budget,
            used_bytes: self.used(),
            bytes_per_token: self.bytes_per_token(),
            block_tokens: UNIT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_grow_in_half_steps_and_always_suffice() {
        let sizes: Vec<u32> = [1, 256, 257, 384, 385, 513, 769, 1025].map(capacity_for).to_vec();
        assert_eq!(sizes, [256, 256, 384, 384, 512, 768, 1024, 1536]);
        for tokens in [1, 255, 1000, 131_072, u32::MAX - 1, u32::MAX] {
            assert!(capacity_for(tokens) >= tokens);
        }
    }
}
