//! One slab: for every layer and side an array `[slots, kv_heads, capacity, head_dim]`.
//!
//! What holds: a slot has at most one writer; what lies at and beyond a slot's `written` is
//! zero in every layer, so that a masked position can never carry a NaN of an earlier tenant
//! into a sum; arrays are replaced, never shared, so that MLX writes in place. Whether it did
//! is seen from the buffers' addresses ([`Slab::settle`]).
//!
//! Not here: which sequence is where, and budgets.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::zeros_dtype;

use super::super::native::{evaluate, owned, scatter, write_at};
use super::super::{MlxType, device_error, dim};
use crate::model::ops::KvShape;
use crate::types::EngineError;

/// Keys and values of a layer.
pub(super) type Sides = [Array; 2];

/// The address of a buffer that is not known yet.
const NOWHERE: usize = 0;

/// Who holds a slot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// The sequence that may append.
    pub writer: Option<u64>,
    /// Sequences that read a prefix, and copy it before they append.
    pub borrowers: u32,
    /// From this position on there are only zeros.
    pub written: u32,
}

impl Slot {
    /// Nobody holds it.
    pub fn is_free(&self) -> bool {
        self.writer.is_none() && self.borrowers == 0
    }
}

/// See the module.
pub(super) struct Slab {
    shape: KvShape,
    kind: MlxType,
    /// Positions of a slot.
    pub capacity: u32,
    /// As many as the arrays have.
    pub slots: Vec<Slot>,
    /// One a layer.
    layers: Vec<Sides>,
    /// Where the buffers lay when they were last settled: keys and values of each layer.
    addresses: Vec<usize>,
    /// Written to since it was last settled.
    dirty: bool,
}

impl Slab {
    /// Zeros.
    ///
    /// # Errors
    /// `Device`.
    pub fn new(shape: KvShape, kind: MlxType, capacity: u32, slots: usize) -> Result<Self, EngineError> {
        let zeros = || zeros(shape, kind, slots, capacity);
        let layers =
            (0..shape.layers).map(|_| Ok([zeros()?, zeros()?])).collect::<Result<Vec<Sides>, _>>()?;
        let addresses = evaluate(layers.iter().flatten(), true)?;
        let slots = vec![Slot::default(); slots];
        Ok(Self { shape, kind, capacity, slots, layers, addresses, dirty: false })
    }

    /// Slots that somebody holds.
    pub fn occupied(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.is_free()).count()
    }

    /// Whether another row may join those here: all that hold it are at work.
    pub fn is_at_work(&self) -> bool {
        self.slots.iter().all(|slot| slot.writer.is_some())
    }

    /// Moves the kept slots to the front of arrays of another size, one array at a time: no more
    /// than one of them exists twice. Gives the tokens that were copied.
    ///
    /// # Errors
    /// `Device`, after which the slab is of no use.
    pub fn rearrange(&mut self, keep: &[usize], slots: usize, capacity: u32) -> Result<u64, EngineError> {
        let kept: Vec<(usize, Slot)> =
            keep.iter().filter_map(|from| Some((*from, *self.slots.get(*from)?))).collect();
        for (array, address) in self.layers.iter_mut().flatten().zip(&mut self.addresses) {
            let mut fresh = zeros(self.shape, self.kind, slots, capacity)?;
            for (to, (from, slot)) in kept.iter().enumerate().filter(|(_, (_, slot))| slot.written > 0) {
                let old = part(array, *from..*from + 1, 0..slot.written)?;
                fresh = write_at(&fresh, &old, &[dim(to)?, 0, 0, 0])?;
            }
            evaluate(std::iter::once(&fresh), true)?.into_iter().for_each(|at| *address = at);
            *array = fresh;
        }
        let copied = kept.iter().map(|(_, slot)| u64::from(slot.written)).sum();
        self.slots = kept.into_iter().map(|(_, slot)| slot).collect();
        self.slots.resize(slots, Slot::default());
        self.capacity = capacity;
        Ok(copied)
    }

    /// A copy of some of a slot's positions in one layer, evaluated: nothing of it points here.
    ///
    /// # Errors
    /// `Device`; `InvalidPlan` for a layer that there is not.
    pub fn copy_out(&self, layer: usize, slot: usize, range: Range<u32>) -> Result<Sides, EngineError> {
        let sides = self.sides(layer)?;
        let own = |array: &Array| part(array, slot..slot + 1, range.clone()).and_then(|view| owned(&view));
        let copies = [own(&sides[0])?, own(&sides[1])?];
        evaluate(copies.iter(), true)?;
        Ok(copies)
    }

    /// Writes `[1, kv_heads, n, head_dim]` of keys and of values at a position of a slot.
    ///
    /// # Errors
    /// `InvalidPlan` where it does not fit; `Device`.
    pub fn write(
        &mut self,
        layer: usize,
        slot: usize,
        start: u32,
        new: [&Array; 2],
    ) -> Result<(), EngineError> {
        let at = [dim(slot)?, 0, dim(start as usize)?, 0];
        self.dirty = true;
        let sides = self.layers.get_mut(layer).ok_or_else(|| no_layer(layer))?;
        let addresses = self.addresses.iter_mut().skip(2 * layer);
        for ((array, new), address) in sides.iter_mut().zip(new).zip(addresses) {
            if array.shape() == new.shape() {
                // Replaced as a whole: another buffer is no copy.
                *address = NOWHERE;
            }
            *array = write_at(array, new, &at)?;
        }
        Ok(())
    }

    /// Writes one position of several slots: `[rows, kv_heads, 1, head_dim]` at
    /// `(slots[row], positions[row])`, one operation a side.
    ///
    /// # Errors
    /// `Device`.
    pub fn scatter(
        &mut self,
        layer: usize,
        (slots, positions): (&Array, &Array),
        new: [&Array; 2],
    ) -> Result<(), EngineError> {
        self.dirty = true;
        let sides = self.layers.get_mut(layer).ok_or_else(|| no_layer(layer))?;
        for (array, new) in sides.iter_mut().zip(new) {
            *array = scatter(array, [slots, positions], new, [0, 2])?;
        }
        Ok(())
    }

    /// Zeros over positions of a slot in one layer.
    ///
    /// # Errors
    /// `Device`.
    pub fn clear(&mut self, layer: usize, slot: usize, range: Range<u32>) -> Result<(), EngineError> {
        let nothing = zeros(self.shape, self.kind, 1, range.end - range.start)?;
        self.write(layer, slot, range.start, [&nothing, &nothing])
    }

    /// Positions of slots as views into the step's graph, `[slots, kv_heads, positions, head_dim]`.
    /// To be made after all of the step's writes, and not to outlive the step.
    ///
    /// # Errors
    /// `Device`.
    pub fn view(&self, layer: usize, slots: Range<usize>, range: Range<u32>) -> Result<Sides, EngineError> {
        let sides = self.sides(layer)?;
        Ok([part(&sides[0], slots.clone(), range.clone())?, part(&sides[1], slots, range)?])
    }

    /// Computes what was written, keys and values both, and gives how many arrays MLX copied
    /// instead of writing in place. Nothing is waited for where `wait` is false.
    ///
    /// # Errors
    /// `Device`.
    pub fn settle(&mut self, wait: bool) -> Result<u64, EngineError> {
        if !std::mem::take(&mut self.dirty) {
            return Ok(0);
        }
        let now = evaluate(self.layers.iter().flatten(), wait)?;
        let moved = now.iter().zip(&self.addresses);
        let moved = moved.filter(|(now, before)| **before != NOWHERE && now != before).count();
        self.addresses = now;
        Ok(moved as u64)
    }

    fn sides(&self, layer: usize) -> Result<&Sides, EngineError> {
        self.layers.get(layer).ok_or_else(|| no_layer(layer))
    }
}

fn no_layer(layer: usize) -> EngineError {
    EngineError::InvalidPlan { message: format!("there is no layer {layer}") }
}

fn zeros(shape: KvShape, kind: MlxType, slots: usize, tokens: u32) -> Result<Array, EngineError> {
    let shape = [dim(slots)?, dim(shape.kv_heads)?, dim(tokens as usize)?, dim(shape.head_dim)?];
    zeros_dtype(&shape, kind.dtype()).map_err(device_error)
}

fn part(array: &Array, slots: Range<usize>, range: Range<u32>) -> Result<Array, EngineError> {
    let slots = dim(slots.start)?..dim(slots.end)?;
    let range = dim(range.start as usize)?..dim(range.end as usize)?;
    array.try_index((slots, .., range, ..)).map_err(device_error)
}
