//! The reference key-value state: one growing array a sequence and layer.
//!
//! A fork copies; nothing is shared, so a "block" is one token. The budget is
//! kept all the same, so that tests can run out of it.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::model::KvNumbers;
use crate::model::ops::{KvShape, KvStats, KvStore, LayerId, StartOps, check_bytes, check_piece};
use crate::types::{EngineError, Epoch, SequenceId};

/// Keys and values of one sequence in one layer, `[positions][kv_heads · head_dim]`.
#[derive(Clone, Debug, Default)]
struct LayerState {
    keys: Vec<f32>,
    values: Vec<f32>,
}

#[derive(Clone, Debug, Default)]
struct Sequence {
    committed: u32,
    reserved: u32,
    layers: Vec<LayerState>,
}

/// The reference key-value state.
#[derive(Debug)]
pub struct PlainKv {
    shape: KvShape,
    epoch: Epoch,
    context: u32,
    capacity_tokens: u64,
    next: u64,
    sequences: BTreeMap<u64, Sequence>,
}

/// Keys and values of one sequence in one layer, to be read by position and head.
pub(super) struct LayerRows<'a> {
    shape: KvShape,
    state: &'a LayerState,
}

impl LayerRows<'_> {
    fn at(&self, position: usize, head: usize) -> std::ops::Range<usize> {
        let start = (position * self.shape.kv_heads + head) * self.shape.head_dim;
        start..start + self.shape.head_dim
    }

    /// `[head_dim]`.
    pub(super) fn key(&self, position: usize, head: usize) -> &[f32] {
        &self.state.keys[self.at(position, head)]
    }

    /// `[head_dim]`.
    pub(super) fn value(&self, position: usize, head: usize) -> &[f32] {
        &self.state.values[self.at(position, head)]
    }
}

impl PlainKv {
    /// An empty store with the budget's room.
    pub fn new(start: &StartOps) -> Self {
        let mut kv = Self {
            shape: start.kv,
            epoch: start.epoch,
            context: start.context,
            capacity_tokens: 0,
            next: 0,
            sequences: BTreeMap::new(),
        };
        kv.capacity_tokens = start.kv_budget_bytes / kv.bytes_per_token().max(1);
        kv
    }

    fn width(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    fn bytes_per_token(&self) -> u64 {
        (2 * 4 * self.shape.layers * self.width()) as u64
    }

    fn used_tokens(&self) -> u64 {
        self.sequences.values().map(|sequence| u64::from(sequence.reserved)).sum()
    }

    /// Whether `tokens` more fit.
    fn check_room(&self, tokens: u32) -> Result<(), EngineError> {
        let free = self.capacity_tokens.saturating_sub(self.used_tokens());
        let bytes = self.bytes_per_token();
        if u64::from(tokens) > free {
            return Err(EngineError::KvFull { need: u64::from(tokens) * bytes, free: free * bytes });
        }
        Ok(())
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence, EngineError> {
        if id.epoch != self.epoch {
            return Err(EngineError::StaleEpoch { sequence: id });
        }
        self.sequences.get(&id.number).ok_or(EngineError::UnknownSequence { sequence: id })
    }

    fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, EngineError> {
        self.get(id)?;
        self.sequences.get_mut(&id.number).ok_or(EngineError::UnknownSequence { sequence: id })
    }

    /// Writes one position; it counts once committed.
    pub(super) fn write(
        &mut self,
        id: SequenceId,
        layer: LayerId,
        position: u32,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), EngineError> {
        let width = self.width();
        let sequence = self.get_mut(id)?;
        if position >= sequence.reserved || position < sequence.committed {
            let message =
                format!("position {position} is not in {}..{}", sequence.committed, sequence.reserved);
            return Err(EngineError::InvalidPlan { message });
        }
        let state = &mut sequence.layers[layer.0];
        let at = position as usize * width..(position as usize + 1) * width;
        state.keys[at.clone()].copy_from_slice(keys);
        state.values[at].copy_from_slice(values);
        Ok(())
    }

    /// One layer of a sequence, to be read.
    pub(super) fn layer(&self, id: SequenceId, layer: LayerId) -> Result<LayerRows<'_>, EngineError> {
        let state = &self.get(id)?.layers[layer.0];
        Ok(LayerRows { shape: self.shape, state })
    }

    fn resize(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let values = tokens as usize * self.width();
        let sequence = self.get_mut(id)?;
        sequence.reserved = tokens;
        for layer in &mut sequence.layers {
            layer.keys.resize(values, 0.0);
            layer.values.resize(values, 0.0);
        }
        Ok(())
    }
}

impl KvStore for PlainKv {
    const SHARES_PREFIXES: bool = false;

    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        let layers = vec![LayerState::default(); self.shape.layers];
        let mut sequence = Sequence { committed: 0, reserved: 0, layers };
        if let Some((source, tokens)) = from {
            let original = self.get(source)?;
            if tokens > original.committed {
                let message = format!("fork at {tokens} of a sequence with {}", original.committed);
                return Err(EngineError::InvalidPlan { message });
            }
            self.check_room(tokens)?;
            sequence = original.clone();
        }
        let id = SequenceId { epoch: self.epoch, number: self.next };
        self.next += 1;
        self.sequences.insert(id.number, sequence);
        if let Some((_, tokens)) = from {
            self.truncate(id, tokens)?;
        }
        Ok(id)
    }

    fn reserve(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let reserved = self.get(sequence)?.reserved;
        if tokens > self.context {
            let message = format!("room for {tokens} tokens asked for, the context is {}", self.context);
            return Err(EngineError::InvalidPlan { message });
        }
        if tokens <= reserved {
            return Ok(());
        }
        self.check_room(tokens - reserved)?;
        self.resize(sequence, tokens)
    }

    fn commit(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let state = self.get_mut(sequence)?;
        if tokens > state.reserved {
            let message = format!("commit of {tokens} tokens, reserved are {}", state.reserved);
            return Err(EngineError::InvalidPlan { message });
        }
        state.committed = tokens;
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let state = self.get_mut(sequence)?;
        state.committed = state.committed.min(tokens);
        let reserved = state.reserved.min(tokens);
        self.resize(sequence, reserved)
    }

    fn len(&self, sequence: SequenceId) -> Result<u32, EngineError> {
        Ok(self.get(sequence)?.committed)
    }

    fn restorable(&self, sequence: SequenceId, at: u32) -> Result<u32, EngineError> {
        Ok(self.get(sequence)?.committed.min(at))
    }

    fn close(&mut self, sequence: SequenceId) {
        if sequence.epoch == self.epoch {
            self.sequences.remove(&sequence.number);
        }
    }

    fn export(&self, sequence: SequenceId, range: Range<u32>) -> Result<Vec<u8>, EngineError> {
        let state = self.get(sequence)?;
        check_piece(&range, state.committed)?;
        let at = range.start as usize * self.width()..range.end as usize * self.width();
        let sides = state.layers.iter().flat_map(|layer| [&layer.keys, &layer.values]);
        Ok(sides.flat_map(|side| &side[at.clone()]).flat_map(|value| value.to_le_bytes()).collect())
    }

    fn import(&mut self, sequence: SequenceId, range: Range<u32>, bytes: &[u8]) -> Result<(), EngineError> {
        let width = self.width();
        check_bytes(bytes.len(), range.len() * self.bytes_per_token() as usize)?;
        let state = self.get_mut(sequence)?;
        check_piece(&range, state.reserved)?;
        let at = range.start as usize * width..range.end as usize * width;
        let (values, _) = bytes.as_chunks::<4>();
        let mut values = values.iter().map(|value| f32::from_le_bytes(*value));
        for side in state.layers.iter_mut().flat_map(|layer| [&mut layer.keys, &mut layer.values]) {
            side[at.clone()].iter_mut().zip(&mut values).for_each(|(into, value)| *into = value);
        }
        Ok(())
    }

    fn format(&self) -> String {
        format!("plain-1 {:?}", self.shape)
    }

    fn numbers(&self) -> KvNumbers {
        KvNumbers::F32
    }

    fn stats(&self) -> KvStats {
        let bytes = self.bytes_per_token();
        KvStats {
            capacity_bytes: self.capacity_tokens * bytes,
            used_bytes: self.used_tokens() * bytes,
            bytes_per_token: bytes,
            block_tokens: 1,
        }
    }
}
