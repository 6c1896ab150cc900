//! Where sequences live: finding a slot, moving, lending, resting.
//!
//! Everything that decides about memory is here; nothing here appends for a step.

use super::slab::Slab;
use super::{Home, MOST_SLOTS, MlxKv, Sequence};
use crate::types::{EngineError, SequenceId};

impl MlxKv {
    /// Whether nobody else has anything in this home's slab.
    pub(super) fn is_alone(&self, home: Home) -> bool {
        self.slabs.get(&home.slab).is_some_and(|slab| match slab.slots.as_slice() {
            [slot] => usize::from(slot.writer.is_some()) + slot.borrowers as usize == 1,
            _ => false,
        })
    }

    /// Forgets that a sequence holds its home; a slab that nobody holds goes.
    pub(super) fn release(&mut self, home: Home) {
        let Some(slab) = self.slabs.get_mut(&home.slab) else { return };
        if let Some(slot) = slab.slots.get_mut(home.slot) {
            match home.writes {
                true => slot.writer = None,
                false => slot.borrowers = slot.borrowers.saturating_sub(1),
            }
        }
        if slab.occupied() == 0 {
            self.slabs.remove(&home.slab);
        }
    }

    /// The same home, where the sequence writes or only reads from now on.
    pub(super) fn turned(&mut self, number: u64, home: Home, writes: bool) -> Home {
        let slot = self.slabs.get_mut(&home.slab).and_then(|slab| slab.slots.get_mut(home.slot));
        if let Some(slot) = slot.filter(|_| home.writes != writes) {
            match writes {
                true => (slot.writer, slot.borrowers) = (Some(number), slot.borrowers.saturating_sub(1)),
                false => (slot.writer, slot.borrowers) = (None, slot.borrowers + 1),
            }
        }
        Home { writes, ..home }
    }

    /// A slab of zeros, or nothing where the budget is short.
    fn new_slab(&mut self, capacity: u32) -> Result<Option<u64>, EngineError> {
        if self.bytes(capacity, 1) > self.free() {
            return Ok(None);
        }
        let id = self.next_slab;
        self.next_slab += 1;
        self.slabs.insert(id, Slab::new(self.shape, self.kind, capacity, 1)?);
        Ok(Some(id))
    }

    /// Changes a slab's size and moves the slots that are held to its front.
    fn rearrange(&mut self, id: u64, slots: usize, capacity: u32) -> Result<(), EngineError> {
        let bytes_per_token = self.bytes_per_token();
        let slab = self.slab_mut(id)?;
        let keep: Vec<usize> = (0..slab.slots.len()).filter(|slot| !slab.slots[*slot].is_free()).collect();
        let tokens = slab.rearrange(&keep, slots, capacity)?;
        self.copies.moved_bytes += tokens * bytes_per_token;
        for home in self.sequences.values_mut().filter_map(|sequence| sequence.home.as_mut()) {
            if let Some(to) = keep.iter().position(|from| *from == home.slot).filter(|_| home.slab == id) {
                home.slot = to;
            }
        }
        Ok(())
    }

    /// Gives spare slots back where half of a slab or more is spare.
    fn trim(&mut self) -> Result<(), EngineError> {
        let halved =
            |slab: &Slab| Some(slab.occupied().next_power_of_two()).filter(|n| *n < slab.slots.len());
        let spare: Vec<(u64, usize, u32)> =
            self.slabs.iter().filter_map(|(id, slab)| Some((*id, halved(slab)?, slab.capacity))).collect();
        spare.into_iter().try_for_each(|(id, slots, capacity)| self.rearrange(id, slots, capacity))
    }

    /// A free slot of a class, in a slab that has one, that can double, or that is new; nothing
    /// where the budget is short.
    fn free_slot(&mut self, capacity: u32) -> Result<Option<(u64, usize)>, EngineError> {
        let joined = |slab: &&Slab| slab.capacity == capacity;
        let vacant = self.slabs.iter().filter(|(_, slab)| joined(slab)).find_map(|(id, slab)| {
            let slot = slab.slots.iter().position(|slot| slot.is_free())?;
            Some((*id, slot))
        });
        if vacant.is_some() {
            return Ok(vacant);
        }
        // Spare slots should not take what other classes will need: half of what is left is free.
        let doubles = |slab: &Slab| {
            let slots = slab.slots.len();
            slots < MOST_SLOTS && slab.is_at_work() && self.bytes(capacity, slots) <= self.free() / 2
        };
        let grown = self.slabs.iter().find(|(_, slab)| joined(slab) && doubles(slab));
        if let Some((id, slots)) = grown.map(|(id, slab)| (*id, slab.slots.len())) {
            self.rearrange(id, 2 * slots, capacity)?;
            return Ok(Some((id, slots)));
        }
        Ok(self.new_slab(capacity)?.map(|id| (id, 0)))
    }

    /// Gives a sequence a slot of a class, with its first `tokens` tokens in it.
    pub(super) fn relocate(&mut self, id: SequenceId, capacity: u32, tokens: u32) -> Result<(), EngineError> {
        let old = self.get(id)?.home;
        let mut found = self.free_slot(capacity)?;
        if found.is_none() {
            self.trim()?;
            found = self.free_slot(capacity)?;
        }
        // A trim may have moved it.
        let old = old.and(self.get(id)?.home);
        let Some((slab, slot)) = found else {
            let alone = old.filter(|home| self.is_alone(*home));
            let has = alone.and_then(|home| self.slabs.get(&home.slab)).map_or(0, |slab| slab.capacity);
            let (need, free) = (self.bytes(capacity.saturating_sub(has), 1), self.free());
            let Some(home) = alone.filter(|_| need <= free) else {
                return Err(EngineError::KvFull { need, free });
            };
            self.resize(home, capacity, tokens)?;
            let home = self.turned(id.number, home, true);
            return self.move_in(id, home);
        };
        let home = Home { slab, slot, writes: true };
        // Held at once, so that nothing else takes it.
        if let Some(slot) = self.slab_mut(slab)?.slots.get_mut(slot) {
            slot.writer = Some(id.number);
        }
        if let Some(old) = old {
            self.copy(old, home, tokens)?;
            self.release(old);
        }
        self.move_in(id, home)
    }

    /// The sequence's home from now on.
    pub(super) fn move_in(&mut self, id: SequenceId, home: Home) -> Result<(), EngineError> {
        let len = self.get(id)?.len;
        self.set(id, Sequence { len, home: Some(home) });
        Ok(())
    }

    /// Changes the size of a slab whose one slot somebody holds alone, in place, and keeps
    /// the first `tokens` tokens.
    fn resize(&mut self, home: Home, capacity: u32, tokens: u32) -> Result<(), EngineError> {
        if let Some(slot) = self.slab_mut(home.slab)?.slots.first_mut() {
            slot.written = slot.written.min(tokens);
        }
        self.rearrange(home.slab, 1, capacity)
    }

    /// Copies the first tokens of a slot into another, layer by layer.
    fn copy(&mut self, from: Home, to: Home, tokens: u32) -> Result<(), EngineError> {
        let stale = self.slab(to.slab)?.slots.get(to.slot).map_or(0, |slot| slot.written);
        let mut slab_copies = 0;
        for layer in 0..self.shape.layers {
            if tokens > 0 {
                let [keys, values] = self.slab(from.slab)?.copy_out(layer, from.slot, 0..tokens)?;
                self.slab_mut(to.slab)?.write(layer, to.slot, 0, [&keys, &values])?;
            }
            let slab = self.slab_mut(to.slab)?;
            if stale > tokens {
                slab.clear(layer, to.slot, tokens..stale)?;
            }
            slab_copies += slab.settle(true)?;
        }
        if let Some(slot) = self.slab_mut(to.slab)?.slots.get_mut(to.slot) {
            slot.written = tokens;
        }
        self.copies.slab_copies += slab_copies;
        self.copies.moved_bytes += u64::from(tokens) * self.bytes_per_token();
        Ok(())
    }

    /// Puts a sequence that will not append soon where it takes no more than it holds, and
    /// where live rows do not pass over it. Where there is no room for that it stays.
    pub(super) fn rest(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let Sequence { len, home: Some(home) } = self.get(id)? else { return Ok(()) };
        let home = self.turned(id.number, home, false);
        self.move_in(id, home)?;
        let slab = self.slab(home.slab)?;
        if self.is_alone(home) {
            let wide = self.class_for(len) < slab.capacity;
            return if wide { self.resize(home, len, len) } else { Ok(()) };
        }
        let only_its_own = slab.slots.get(home.slot).is_some_and(|slot| slot.borrowers == 1);
        if slab.slots.len() == 1 || !only_its_own {
            return Ok(());
        }
        let Some(own) = self.new_slab(len)? else { return Ok(()) };
        let to = Home { slab: own, slot: 0, writes: false };
        if let Some(slot) = self.slab_mut(own)?.slots.first_mut() {
            slot.borrowers = 1;
        }
        self.copy(home, to, len)?;
        self.release(home);
        self.move_in(id, to)
    }
}
