//! Key-value state on MLX: one contiguous array a row, layer and side.
//!
//! `[1, kv_heads, capacity, head_dim]`. Arrays are values: a fork shares them, and the
//! first append of either side copies (MLX writes in place only what nobody else holds).
//! Memory is charged by capacity, a shared array once a sequence: an upper bound.
//!
//! No array leaves this file but as a slice inside the step's graph.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::zeros_dtype;

use super::native::{StreamLease, slice_update};
use super::{MlxType, device_error, dim};
use crate::model::ops::{KvShape, KvStats, KvStore, LayerId, StartOps};
use crate::types::{EngineError, Epoch, SequenceId};

/// Smallest capacity, tokens; the larger ones are multiples of it.
const UNIT: u32 = 256;

struct Sequence {
    len: u32,
    capacity: u32,
    /// One pair (keys, values) a layer, made at the first append.
    layers: Vec<Option<(Array, Array)>>,
}

/// The rows' key-value arrays.
pub struct MlxKv {
    epoch: Epoch,
    shape: KvShape,
    kind: MlxType,
    context: u32,
    budget: u64,
    next: u64,
    sequences: HashMap<u64, Sequence>,
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
            sequences: HashMap::new(),
            _stream: stream,
        }
    }

    fn bytes_per_token(&self) -> u64 {
        let values = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim;
        u64::try_from(values).unwrap_or(u64::MAX).saturating_mul(self.kind.bytes())
    }

    fn used(&self) -> u64 {
        let tokens: u64 = self.sequences.values().map(|sequence| u64::from(sequence.capacity)).sum();
        tokens * self.bytes_per_token()
    }

    fn check(&self, id: SequenceId) -> Result<(), EngineError> {
        if id.epoch != self.epoch {
            return Err(EngineError::StaleEpoch { sequence: id });
        }
        Ok(())
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence, EngineError> {
        self.check(id)?;
        self.sequences.get(&id.number).ok_or(EngineError::UnknownSequence { sequence: id })
    }

    fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, EngineError> {
        self.check(id)?;
        self.sequences.get_mut(&id.number).ok_or(EngineError::UnknownSequence { sequence: id })
    }

    /// Writes keys and values `[1, kv_heads, n, head_dim]` at `start` and returns the slices
    /// that hold the positions `visible`. They must not outlive the step.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` where room is missing; `Device`.
    pub fn append(
        &mut self,
        id: SequenceId,
        layer: LayerId,
        start: u32,
        new: (&Array, &Array),
        visible: Range<u32>,
    ) -> Result<(Array, Array), EngineError> {
        let (shape, kind) = (self.shape, self.kind);
        let sequence = self.get_mut(id)?;
        let capacity = sequence.capacity;
        let slot = sequence.layers.get_mut(layer.0).ok_or_else(|| EngineError::InvalidPlan {
            message: format!("layer {} of {}", layer.0, shape.layers),
        })?;
        // The slot keeps the old arrays until the new ones are there; after that the graph holds
        // the only reference to them, and the write is in place.
        let (keys, values) = match slot.as_ref() {
            Some((keys, values)) => (keys.clone(), values.clone()),
            None => (empty(shape, kind, capacity)?, empty(shape, kind, capacity)?),
        };
        let at = dim(start as usize)?;
        let keys = slice_update(&keys, new.0, 2, at)?;
        let values = slice_update(&values, new.1, 2, at)?;
        let range = dim(visible.start as usize)?..dim(visible.end as usize)?;
        let seen = (
            keys.try_index((.., .., range.clone(), ..)).map_err(device_error)?,
            values.try_index((.., .., range, ..)).map_err(device_error)?,
        );
        *slot = Some((keys, values));
        Ok(seen)
    }
}

fn empty(shape: KvShape, kind: MlxType, capacity: u32) -> Result<Array, EngineError> {
    let shape = [1, dim(shape.kv_heads)?, dim(capacity as usize)?, dim(shape.head_dim)?];
    zeros_dtype(&shape, kind.dtype()).map_err(device_error)
}

/// A copy of the first `capacity` positions.
fn shortened(array: &Array, capacity: u32) -> Result<Array, EngineError> {
    let range = 0..dim(capacity as usize)?;
    array.try_index((.., .., range, ..)).and_then(|part| part.contiguous()).map_err(device_error)
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
    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        let sequence = match from {
            None => Sequence { len: 0, capacity: 0, layers: (0..self.shape.layers).map(|_| None).collect() },
            Some((source, tokens)) => {
                let source = self.get(source)?;
                if tokens > source.len {
                    let message = format!("a fork of {tokens} tokens from {}", source.len);
                    return Err(EngineError::InvalidPlan { message });
                }
                let bytes = u64::from(source.capacity) * self.bytes_per_token();
                let free = self.budget.saturating_sub(self.used());
                if bytes > free {
                    return Err(EngineError::KvFull { need: bytes, free });
                }
                Sequence { len: tokens, capacity: source.capacity, layers: source.layers.clone() }
            }
        };
        let id = SequenceId { epoch: self.epoch, number: self.next };
        self.next += 1;
        self.sequences.insert(id.number, sequence);
        Ok(id)
    }

    fn reserve(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let current = self.get(id)?.capacity;
        if tokens > self.context {
            let message = format!("{tokens} tokens in a context of {}", self.context);
            return Err(EngineError::InvalidPlan { message });
        }
        if tokens <= current {
            return Ok(());
        }
        let capacity = capacity_for(tokens).min(self.context.max(tokens));
        // While it grows, the old array and the new one live together.
        let need = u64::from(capacity) * self.bytes_per_token();
        let free = self.budget.saturating_sub(self.used());
        if need > free {
            return Err(EngineError::KvFull { need, free });
        }
        let (shape, kind) = (self.shape, self.kind);
        let sequence = self.get_mut(id)?;
        for (keys, values) in sequence.layers.iter_mut().flatten() {
            *keys = slice_update(&empty(shape, kind, capacity)?, keys, 2, 0)?;
            *values = slice_update(&empty(shape, kind, capacity)?, values, 2, 0)?;
        }
        sequence.capacity = capacity;
        Ok(())
    }

    fn commit(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let sequence = self.get_mut(id)?;
        if tokens > sequence.capacity {
            let message = format!("{tokens} tokens in room for {}", sequence.capacity);
            return Err(EngineError::InvalidPlan { message });
        }
        // Both sides, every step: else the graph of a prompt without logits grows for ever.
        let arrays = sequence.layers.iter().flatten().flat_map(|(keys, values)| [keys, values]);
        mlx_rs::transforms::eval(arrays).map_err(device_error)?;
        sequence.len = tokens;
        Ok(())
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<(), EngineError> {
        let (context, sequence) = (self.context, self.get_mut(id)?);
        let tokens = sequence.len.min(tokens);
        let capacity = if tokens == 0 { 0 } else { capacity_for(tokens).min(context.max(tokens)) };
        if capacity < sequence.capacity {
            // What is left over goes back: a shorter copy, evaluated so that the long array is freed.
            for layer in &mut sequence.layers {
                *layer = match layer.take() {
                    Some((keys, values)) if capacity > 0 => {
                        Some((shortened(&keys, capacity)?, shortened(&values, capacity)?))
                    }
                    _ => None,
                };
            }
            let arrays = sequence.layers.iter().flatten().flat_map(|(keys, values)| [keys, values]);
            mlx_rs::transforms::eval(arrays).map_err(device_error)?;
            sequence.capacity = capacity;
        }
        sequence.len = tokens;
        Ok(())
    }

    fn len(&self, id: SequenceId) -> Result<u32, EngineError> {
        Ok(self.get(id)?.len)
    }

    fn restorable(&self, id: SequenceId, at: u32) -> Result<u32, EngineError> {
        Ok(self.get(id)?.len.min(at))
    }

    fn close(&mut self, id: SequenceId) {
        if id.epoch == self.epoch {
            self.sequences.remove(&id.number);
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
