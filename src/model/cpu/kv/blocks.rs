//! The block pool: memory, owners, free list, and what lies where in a block.
//!
//! Knows no sequences. A block: for each layer, for each head, keys `[head_dim][64]`
//! (a lane is a key), then values `[64][value_width]` (a lane is a dimension).

use std::ops::Range;

use half::f16;

use crate::config::KvType;
use crate::model::cpu::memory::ZeroedBytes;
use crate::model::cpu::simd::{Kernel, LANES, Simd, SimdPath, dispatch, widen_f16};
use crate::model::ops::KvShape;
use crate::types::EngineError;

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = 64;
/// Blocks taken from the system at once, at most.
const SLAB_BLOCKS: usize = 64;
/// Values of a token are padded to a multiple of this, so that kernels need no tail.
const VALUE_STEP: usize = 16;

/// A block's index in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockId(u32);

/// What lies where in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockLayout {
    /// Decoder layers.
    pub layers: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// `head_dim` rounded up to 16: the stored width of a value.
    pub value_width: usize,
    /// Type of the elements.
    pub kind: KvType,
}

impl BlockLayout {
    /// For a model's shape.
    pub fn new(shape: &KvShape, kind: KvType) -> Self {
        let value_width = shape.head_dim.next_multiple_of(VALUE_STEP);
        let KvShape { layers, kv_heads, head_dim } = *shape;
        Self { layers, kv_heads, head_dim, value_width, kind }
    }

    /// Bytes of an element.
    pub fn element_bytes(&self) -> usize {
        match self.kind {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }

    fn head_elements(&self) -> usize {
        BLOCK_TOKENS * (self.head_dim + self.value_width)
    }

    /// Bytes of one head's keys and values in a block.
    pub(in crate::model::cpu) fn head_bytes(&self) -> usize {
        self.head_elements() * self.element_bytes()
    }

    /// Bytes of a token, all layers.
    pub(super) fn token_bytes(&self) -> usize {
        self.layers * self.kv_heads * (self.head_dim + self.value_width) * self.element_bytes()
    }

    /// Bytes of a block.
    pub fn bytes(&self) -> usize {
        self.layers * self.kv_heads * self.head_bytes()
    }

    /// Where a layer's head lies in a block's memory.
    #[inline]
    pub(in crate::model::cpu) fn place(&self, block: *mut u8, layer: usize, head: usize) -> HeadPlace {
        let offset = (layer * self.kv_heads + head) * self.head_bytes();
        // Wrapping, because nothing is read here: whoever reads answers for the bounds.
        HeadPlace { start: block.wrapping_add(offset), layout: *self }
    }
}

/// One head's keys and values in one block.
#[derive(Clone, Copy, Debug)]
pub(in crate::model::cpu) struct HeadPlace {
    start: *mut u8,
    layout: BlockLayout,
}

impl HeadPlace {
    /// The keys, `[head_dim][64]`.
    #[inline(always)]
    pub(in crate::model::cpu) fn keys(&self) -> *mut u8 {
        self.start
    }

    /// The values, `[64][value_width]`.
    #[inline(always)]
    pub(in crate::model::cpu) fn values(&self) -> *mut u8 {
        self.start.wrapping_add(self.layout.head_dim * BLOCK_TOKENS * self.layout.element_bytes())
    }

    /// Stores one token's key and value, `[head_dim]` each, rounded to the stored type.
    ///
    /// # Safety
    /// The block is alive and `slot < 64`; nobody else reads or writes this slot meanwhile.
    pub(in crate::model::cpu) unsafe fn write(
        &self,
        path: SimdPath,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let (keys, values, width) = (self.keys(), self.values(), self.layout.value_width);
        match self.layout.kind {
            KvType::F32 => {
                let (keys, values) = (keys.cast::<f32>(), values.cast::<f32>());
                for (i, x) in key.iter().enumerate() {
                    // SAFETY: `i < head_dim` and `slot < 64`: inside this head's keys.
                    unsafe { keys.add(i * BLOCK_TOKENS + slot).write(*x) };
                }
                // SAFETY: `head_dim <= value_width` values from `slot · value_width`: inside the values.
                unsafe {
                    std::ptr::copy_nonoverlapping(value.as_ptr(), values.add(slot * width), value.len());
                };
            }
            KvType::F16 => {
                let (keys, values) = (keys.cast::<u16>(), values.cast::<u16>());
                let put_key = |i: usize, half: u16| {
                    // SAFETY: as for f32, with half the bytes.
                    unsafe { keys.add(i * BLOCK_TOKENS + slot).write(half) }
                };
                let put_value = |i: usize, half: u16| {
                    // SAFETY: as for f32, with half the bytes.
                    unsafe { values.add(slot * width + i).write(half) }
                };
                dispatch(path, ToHalves { from: key, put: put_key });
                dispatch(path, ToHalves { from: value, put: put_value });
            }
        }
    }

    /// Appends one token's key and value as stored, widened.
    ///
    /// # Safety
    /// The block is alive and `slot < 64`; nobody writes this slot meanwhile.
    pub(super) unsafe fn read(&self, slot: usize, key: &mut Vec<f32>, value: &mut Vec<f32>) {
        let (keys, values, width) = (self.keys(), self.values(), self.layout.value_width);
        for i in 0..self.layout.head_dim {
            let (k, v) = (i * BLOCK_TOKENS + slot, slot * width + i);
            // SAFETY: `i < head_dim <= value_width` and `slot < 64`: inside this head's keys and values.
            let (k, v) = unsafe {
                match self.layout.kind {
                    KvType::F32 => (keys.cast::<f32>().add(k).read(), values.cast::<f32>().add(v).read()),
                    KvType::F16 => (
                        widen_f16(keys.cast::<u16>().add(k).read()),
                        widen_f16(values.cast::<u16>().add(v).read()),
                    ),
                }
            };
            key.push(k);
            value.push(v);
        }
    }
}

/// Rounds a row to halves and hands each to `put`.
struct ToHalves<'a, F> {
    from: &'a [f32],
    put: F,
}

impl<F: Fn(usize, u16)> Kernel for ToHalves<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (chunks, tail) = self.from.as_chunks::<LANES>();
        for (c, chunk) in chunks.iter().enumerate() {
            let halves = s.to_f16(s.load(chunk));
            for (i, h) in halves.iter().enumerate() {
                (self.put)(c * LANES + i, *h);
            }
        }
        for (i, x) in tail.iter().enumerate() {
            (self.put)(chunks.len() * LANES + i, f16::from_f32(*x).to_bits());
        }
    }
}

/// Blocks, their owners, and those without one.
#[derive(Debug)]
pub(super) struct BlockPool {
    layout: BlockLayout,
    slabs: Vec<ZeroedBytes>,
    blocks_per_slab: usize,
    /// Owners of each block that has memory.
    owners: Vec<u32>,
    /// Blocks with memory and no owner; the last given back comes first, its memory is warm.
    idle: Vec<BlockId>,
    capacity: usize,
}

impl BlockPool {
    pub(super) fn new(layout: BlockLayout, budget: u64) -> Result<Self, EngineError> {
        let bytes = layout.bytes();
        let capacity =
            if bytes == 0 { 0 } else { usize::try_from(budget / bytes as u64).unwrap_or(usize::MAX) };
        // A block's index is 32 bits; no machine has memory for more of them.
        let capacity = capacity.min(u32::MAX as usize);
        if capacity == 0 {
            let message = format!(
                "engine.kv_memory_mib allows {budget} bytes of key-value memory, one block of {BLOCK_TOKENS} tokens needs {bytes}"
            );
            return Err(EngineError::Device { message });
        }
        let blocks_per_slab = SLAB_BLOCKS.min(capacity);
        Ok(Self {
            layout,
            slabs: Vec::new(),
            blocks_per_slab,
            owners: Vec::new(),
            idle: Vec::new(),
            capacity,
        })
    }

    pub(super) fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn free(&self) -> usize {
        self.capacity - self.used()
    }

    pub(super) fn used(&self) -> usize {
        self.owners.len() - self.idle.len()
    }

    pub(super) fn owners(&self, block: BlockId) -> u32 {
        self.owners[block.0 as usize]
    }

    /// The block's first byte. Whoever writes answers for being the only owner.
    pub(super) fn memory(&self, block: BlockId) -> *mut u8 {
        let index = block.0 as usize;
        let slab = &self.slabs[index / self.blocks_per_slab];
        slab.as_mut_ptr().wrapping_add(index % self.blocks_per_slab * self.layout.bytes())
    }

    /// A block with one owner; its contents are whatever was there.
    pub(super) fn take(&mut self) -> Result<BlockId, EngineError> {
        if self.idle.is_empty() {
            self.grow()?;
        }
        let Some(block) = self.idle.pop() else {
            return Err(self.full());
        };
        self.owners[block.0 as usize] = 1;
        Ok(block)
    }

    fn full(&self) -> EngineError {
        let bytes = self.layout.bytes() as u64;
        EngineError::KvFull { need: bytes, free: self.free() as u64 * bytes }
    }

    /// Takes a slab from the system, which maps its pages only when they are touched.
    fn grow(&mut self) -> Result<(), EngineError> {
        let have = self.owners.len();
        let count = self.blocks_per_slab.min(self.capacity - have);
        if count == 0 {
            return Err(self.full());
        }
        let bytes = count.checked_mul(self.layout.bytes());
        let Some(slab) = bytes.and_then(ZeroedBytes::new) else {
            let need = (count * self.layout.bytes()) as u64;
            return Err(EngineError::KvFull { need, free: 0 });
        };
        self.slabs.push(slab);
        self.owners.resize(have + count, 0);
        self.idle.extend((have..have + count).rev().map(|index| BlockId(index as u32)));
        Ok(())
    }

    pub(super) fn share(&mut self, block: BlockId) {
        self.owners[block.0 as usize] += 1;
    }

    /// One owner less; without any, the block is free.
    pub(super) fn release(&mut self, block: BlockId) {
        let owners = &mut self.owners[block.0 as usize];
        *owners -= 1;
        if *owners == 0 {
            self.idle.push(block);
        }
    }

    /// Copies tokens of a block: for each layer, for each head, keys `[head_dim][slots]`, then values
    /// `[slots][value_width]`.
    pub(super) fn export(&self, block: BlockId, slots: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; slots.len() * self.layout.token_bytes()];
        let mut rest = bytes.as_mut_slice();
        self.each_run(block, &slots, |run, length| {
            let (into, after) = std::mem::take(&mut rest).split_at_mut(length);
            // SAFETY: `each_run` gives runs inside the block, which nobody writes while `self` is
            // borrowed; the vector has room for all of them together.
            unsafe { std::ptr::copy_nonoverlapping(run, into.as_mut_ptr(), length) };
            rest = after;
        });
        bytes
    }

    /// Writes what [`BlockPool::export`] gave for as many slots. The block must have one owner.
    pub(super) fn import(&mut self, block: BlockId, slots: Range<usize>, bytes: &[u8]) {
        debug_assert_eq!(bytes.len(), slots.len() * self.layout.token_bytes(), "checked by the caller");
        let mut rest = bytes;
        self.each_run(block, &slots, |run, length| {
            let (from, after) = rest.split_at(length);
            // SAFETY: as in `export`; `&mut self` keeps readers out.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), run, length) };
            rest = after;
        });
    }

    /// The runs of memory that hold these slots of a block, in the order of [`BlockPool::export`].
    fn each_run(&self, block: BlockId, slots: &Range<usize>, mut run: impl FnMut(*mut u8, usize)) {
        let layout = self.layout;
        let (memory, element) = (self.memory(block), layout.element_bytes());
        let is_whole = slots.len() == BLOCK_TOKENS;
        for layer in 0..layout.layers {
            for head in 0..layout.kv_heads {
                let place = layout.place(memory, layer, head);
                if is_whole {
                    run(place.keys(), layout.head_bytes());
                    continue;
                }
                for i in 0..layout.head_dim {
                    let key = (i * BLOCK_TOKENS + slots.start) * element;
                    run(place.keys().wrapping_add(key), slots.len() * element);
                }
                let width = layout.value_width * element;
                run(place.values().wrapping_add(slots.start * width), slots.len() * width);
            }
        }
    }

    /// A block of one's own with the first `tokens` of another.
    pub(super) fn copy(&mut self, from: BlockId, tokens: usize) -> Result<BlockId, EngineError> {
        let to = self.take()?;
        let (source, target) = (self.memory(from), self.memory(to));
        let layout = self.layout;
        let element = layout.element_bytes();
        for layer in 0..layout.layers {
            for head in 0..layout.kv_heads {
                let (a, b) = (layout.place(source, layer, head), layout.place(target, layer, head));
                for i in 0..layout.head_dim {
                    let row = i * BLOCK_TOKENS * element;
                    // SAFETY: both are whole blocks of this pool, distinct, and `tokens <= 64` elements
                    // of key row `i` lie inside each.
                    unsafe {
                        std::ptr::copy_nonoverlapping(a.keys().add(row), b.keys().add(row), tokens * element);
                    }
                }
                // SAFETY: as above: `tokens` whole values.
                unsafe {
                    let bytes = tokens * layout.value_width * element;
                    std::ptr::copy_nonoverlapping(a.values(), b.values(), bytes);
                }
            }
        }
        Ok(to)
    }
}
