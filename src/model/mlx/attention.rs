//! Attention of a step on MLX: which rows go together, and their graph.
//!
//! Rows that add one token in one slab are a **group**: one scatter a side appends for all of
//! them, one attention passes over their slots, with a mask that is made once a step. Any
//! other row goes alone: a write into its slot, causal attention over its own slice. All
//! writes of a layer come before all reads of it: a slab that somebody still reads would be
//! copied by the next write. Positions are host numbers, put on the device once a step.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::fast::{
    ScaledDotProductAttentionMask, rms_norm, rope, rope_dynamic, scaled_dot_product_attention,
};
use mlx_rs::ops::indexing::{TryIndexOp, take_axis};
use mlx_rs::ops::{
    concatenate, expand_dims, matmul, multiply, reshape, select, softmax_axis, tanh, transpose_axes,
};

use super::kv::{MlxKv, Place};
use super::ops::MlxVector;
use super::{device_error, dim};
use crate::model::ops::{AttnSpec, LayerId, Norm, Step, StepRow};
use crate::types::EngineError;

/// How the rows of a step go through attention; the same for every layer.
#[derive(Default)]
pub(super) struct StepParts {
    parts: Vec<Part>,
    /// Where each packed token is in the parts' joined outputs, unless that is its own index.
    order: Option<Array>,
}

/// Rows that go together.
struct Part {
    places: Vec<Place>,
    /// Of the packed tokens.
    tokens: Tokens,
    start: Start,
    /// Batch and tokens of its queries, keys and values.
    batch: usize,
    len: usize,
    kind: Kind,
    /// Slots that are read.
    slots: Range<usize>,
    /// First token's position and end of each slot read, where it is in the step.
    spans: Vec<Option<(u32, u32)>>,
    /// Layers of one kind share theirs; nothing where none is needed.
    masks: HashMap<MaskKind, Option<Array>>,
}

/// What a mask depends on besides the part.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct MaskKind {
    window: Option<u32>,
    /// Attention that knows no causality of its own.
    explicit: bool,
}

enum Tokens {
    /// Neighbours.
    Range(Range<usize>),
    /// At these places.
    At(Array),
}

enum Start {
    One(u32),
    /// Of each row.
    Each(Array),
}

enum Kind {
    /// A row by itself.
    Alone,
    /// One token a row.
    Group {
        /// Slots and positions that are written.
        at: (Array, Array),
        /// The row of each slot, where that is not its own index.
        by_slot: Option<Array>,
    },
}

/// Queries `[batch, heads, len, d]`, keys and values `[batch, kv_heads, len, d]`.
struct Heads {
    queries: Array,
    keys: Array,
    values: Array,
}

impl StepParts {
    /// Sorts a step's rows into parts.
    ///
    /// # Errors
    /// `UnknownSequence`, `StaleEpoch`; `InvalidPlan` where room is missing.
    pub fn plan(kv: &MlxKv, step: &Step<'_>) -> Result<Self, EngineError> {
        let mut decoding: BTreeMap<u64, Vec<(&StepRow, Place)>> = BTreeMap::new();
        let mut alone = Vec::new();
        for row in step.rows {
            let place = kv.place(row.sequence, row.start, u32::try_from(row.len).unwrap_or(u32::MAX))?;
            match row.len == 1 && place.slots > 1 {
                true => decoding.entry(place.slab).or_default().push((row, place)),
                false => alone.push((row, place)),
            }
        }
        let mut parts = Vec::new();
        // Packed tokens in the order of the parts' outputs.
        let (mut outputs, mut joined) = (vec![0u32; step.tokens.len()], 0u32);
        for rows in decoding.into_values() {
            let slots = slots_of(&rows);
            if rows.len() < 2 || slots.len() > 2 * rows.len() {
                // Going through more slots than that costs more than the operations.
                alone.extend(rows);
                continue;
            }
            for (row, place) in &rows {
                outputs[row.first] = joined + (place.slot - slots.start) as u32;
            }
            joined += slots.len() as u32;
            parts.push(Part::group(rows, slots)?);
        }
        for (row, place) in alone {
            for (index, output) in outputs[row.first..row.first + row.len].iter_mut().enumerate() {
                *output = joined + index as u32;
            }
            joined += row.len as u32;
            parts.push(Part::alone(row, place));
        }
        let order = if is_identity(&outputs, joined) { None } else { Some(indices(&outputs)?) };
        Ok(Self { parts, order })
    }

    /// Norms and rotates heads, appends keys and values, attends. See [`crate::model::ops::Ops::attend`].
    ///
    /// # Errors
    /// `Device`.
    pub fn attend(
        &mut self,
        kv: &mut MlxKv,
        layer: LayerId,
        qkv: &Array,
        spec: &AttnSpec<MlxVector>,
    ) -> Result<Array, EngineError> {
        let mut queries = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let x = part.pick(qkv)?;
            let heads = part.heads(&x, spec)?;
            part.append(kv, layer, &heads)?;
            queries.push(heads.queries);
        }
        let mut outputs = Vec::with_capacity(queries.len());
        for (part, queries) in self.parts.iter_mut().zip(queries) {
            outputs.push(part.attend(kv, layer, queries, spec)?);
        }
        let output = match outputs.len() {
            1 => outputs.swap_remove(0),
            _ => concatenate(&outputs, 0).map_err(device_error)?,
        };
        match &self.order {
            Some(order) => take_axis(&output, order, 0).map_err(device_error),
            None => Ok(output),
        }
    }
}

/// From the first slot to the last.
fn slots_of(rows: &[(&StepRow, Place)]) -> Range<usize> {
    let slots = rows.iter().map(|(_, place)| place.slot);
    slots.clone().min().unwrap_or(0)..slots.max().unwrap_or(0) + 1
}

fn is_identity(indices: &[u32], count: u32) -> bool {
    indices.len() == count as usize && indices.iter().enumerate().all(|(at, index)| at == *index as usize)
}

fn indices(values: &[u32]) -> Result<Array, EngineError> {
    Ok(Array::from_slice(values, &[dim(values.len())?]))
}

impl Part {
    fn alone(row: &StepRow, place: Place) -> Self {
        let end = row.start + row.len as u32;
        Self {
            tokens: Tokens::Range(row.first..row.first + row.len),
            start: Start::One(row.start),
            batch: 1,
            len: row.len,
            kind: Kind::Alone,
            slots: place.slot..place.slot + 1,
            spans: vec![Some((row.start, end))],
            masks: HashMap::new(),
            places: vec![place],
        }
    }

    fn group(rows: Vec<(&StepRow, Place)>, slots: Range<usize>) -> Result<Self, EngineError> {
        let mut spans = vec![None; slots.len()];
        let mut by_slot = vec![0u32; slots.len()];
        for (index, (row, place)) in rows.iter().enumerate() {
            spans[place.slot - slots.start] = Some((row.start, row.start + 1));
            by_slot[place.slot - slots.start] = index as u32;
        }
        let starts: Vec<u32> = rows.iter().map(|(row, _)| row.start).collect();
        let offsets: Vec<i32> = starts.iter().map(|start| dim(*start as usize)).collect::<Result<_, _>>()?;
        let written: Vec<u32> = rows.iter().map(|(_, place)| place.slot as u32).collect();
        let packed: Vec<u32> = rows.iter().map(|(row, _)| row.first as u32).collect();
        let first = packed.first().copied().unwrap_or(0);
        let neighbours = packed.iter().zip(first..).all(|(packed, expected)| *packed == expected);
        Ok(Self {
            tokens: match neighbours {
                true => Tokens::Range(first as usize..first as usize + rows.len()),
                false => Tokens::At(indices(&packed)?),
            },
            start: Start::Each(Array::from_slice(&offsets, &[dim(offsets.len())?])),
            batch: rows.len(),
            len: 1,
            kind: Kind::Group {
                at: (indices(&written)?, indices(&starts)?),
                by_slot: match is_identity(&by_slot, rows.len() as u32) {
                    true => None,
                    false => Some(indices(&by_slot)?),
                },
            },
            slots,
            spans,
            masks: HashMap::new(),
            places: rows.into_iter().map(|(_, place)| place).collect(),
        })
    }

    /// Its tokens out of all.
    fn pick(&self, x: &Array) -> Result<Array, EngineError> {
        match &self.tokens {
            Tokens::Range(range) if range.len() == x.shape().first().map_or(0, |n| *n as usize) => {
                Ok(x.clone())
            }
            Tokens::Range(range) => x.try_index(dim(range.start)?..dim(range.end)?).map_err(device_error),
            Tokens::At(at) => take_axis(x, at, 0).map_err(device_error),
        }
    }

    /// `[tokens, heads · d]` as `[batch, heads, len, d]`.
    fn split(&self, x: &Array, width: usize) -> Result<Array, EngineError> {
        let (batch, len, width) = (dim(self.batch)?, dim(self.len)?, dim(width)?);
        if self.len == 1 {
            return reshape(x, &[batch, -1, 1, width]).map_err(device_error);
        }
        reshape(x, &[batch, len, -1, width])
            .and_then(|x| transpose_axes(x, &[0, 2, 1, 3]))
            .map_err(device_error)
    }

    fn heads(&self, x: &Array, spec: &AttnSpec<MlxVector>) -> Result<Heads, EngineError> {
        let (heads, kv_heads) = (dim(spec.heads)?, dim(spec.kv_heads)?);
        let all = heads + 2 * kv_heads;
        let whole = |norm: &Option<Norm<MlxVector>>, heads: usize| {
            norm.as_ref().is_some_and(|norm| heads > 1 && norm.weight.values.size() == heads * spec.head_dim)
        };
        if whole(&spec.q_norm, spec.heads) || whole(&spec.k_norm, spec.kv_heads) {
            return self.heads_normed_as_one(x, spec);
        }
        let x = self.split(x, spec.head_dim)?;
        let cut = |x: &Array, from: i32, to: i32| x.try_index((.., from..to)).map_err(device_error);
        let values = cut(&x, heads + kv_heads, all)?;
        if spec.q_norm.is_none() && spec.k_norm.is_none() {
            let both = self.rotate(cut(&x, 0, heads + kv_heads)?, spec)?;
            let (queries, keys) = (cut(&both, 0, heads)?, cut(&both, heads, heads + kv_heads)?);
            return Ok(Heads { queries, keys, values });
        }
        let queries = self.rotate(normed(cut(&x, 0, heads)?, &spec.q_norm)?, spec)?;
        let keys = self.rotate(normed(cut(&x, heads, heads + kv_heads)?, &spec.k_norm)?, spec)?;
        Ok(Heads { queries, keys, values })
    }

    /// As [`Self::heads`], where each norm takes all heads as one.
    fn heads_normed_as_one(&self, x: &Array, spec: &AttnSpec<MlxVector>) -> Result<Heads, EngineError> {
        let (q, kv) = (dim(spec.heads * spec.head_dim)?, dim(spec.kv_heads * spec.head_dim)?);
        let part = |from: i32, to: i32, norm: &Option<Norm<MlxVector>>| {
            let part = x.try_index((.., from..to)).map_err(device_error)?;
            self.split(&normed(part, norm)?, spec.head_dim)
        };
        let queries = self.rotate(part(0, q, &spec.q_norm)?, spec)?;
        let keys = self.rotate(part(q, q + kv, &spec.k_norm)?, spec)?;
        Ok(Heads { queries, keys, values: part(q + kv, q + 2 * kv, &None)? })
    }

    fn rotate(&self, x: Array, spec: &AttnSpec<MlxVector>) -> Result<Array, EngineError> {
        let Some(r) = &spec.rope else { return Ok(x) };
        let x = if r.scale == 1.0 {
            x
        } else {
            // Rotation is linear: scaling before it is scaling after it.
            let factors: Vec<f32> =
                (0..spec.head_dim).map(|i| if i < r.dims { r.scale } else { 1.0 }).collect();
            let factors = Array::from_slice(&factors, &[dim(spec.head_dim)?]);
            factors.as_dtype(x.dtype()).and_then(|factors| multiply(&x, &factors)).map_err(device_error)?
        };
        let (dims, periods) = (dim(r.dims)?, &r.inv_freq.inverted);
        match &self.start {
            Start::One(start) => rope(&x, dims, false, None, 1.0, dim(*start as usize)?, periods),
            Start::Each(starts) => rope_dynamic(&x, dims, false, None, 1.0, starts, periods),
        }
        .map_err(device_error)
    }

    fn append(&self, kv: &mut MlxKv, layer: LayerId, heads: &Heads) -> Result<(), EngineError> {
        match (&self.kind, &self.start, self.places.first()) {
            (Kind::Group { at: (slots, positions), .. }, _, Some(place)) => {
                // `[rows, slot, kv_heads, position, d]`: an index takes one of its axis.
                let keys = expand_dims(&heads.keys, 1).map_err(device_error)?;
                let values = expand_dims(&heads.values, 1).map_err(device_error)?;
                kv.scatter(place.slab, layer, (slots, positions), [&keys, &values])?;
            }
            (Kind::Alone, Start::One(start), Some(place)) => {
                kv.write(place, layer, *start, [&heads.keys, &heads.values])?;
            }
            _ => return Err(EngineError::InvalidPlan { message: "a part without a place".into() }),
        }
        self.places.iter().try_for_each(|place| kv.finish(place, layer))
    }

    /// `[tokens read, heads · d]`: of a group one row a slot.
    fn attend(
        &mut self,
        kv: &MlxKv,
        layer: LayerId,
        queries: Array,
        spec: &AttnSpec<MlxVector>,
    ) -> Result<Array, EngineError> {
        let Some(slab) = self.places.first().map(|place| place.slab) else { return Ok(queries) };
        let visible = self.visible(spec.window);
        let [keys, values] = kv.view(slab, layer, self.slots.clone(), visible.clone())?;
        let queries = match &self.kind {
            Kind::Group { by_slot: Some(by_slot), .. } => {
                take_axis(&queries, by_slot, 0).map_err(device_error)?
            }
            _ => queries,
        };
        let alone = matches!(self.kind, Kind::Alone);
        let (batch, len) = (dim(self.slots.len())?, dim(self.len)?);
        let kind = MaskKind { window: spec.window, explicit: spec.softcap.is_some() };
        let mask = self.mask(kind, visible)?;
        let out = match (spec.softcap, mask) {
            (Some(cap), mask) => capped_attention(&queries, &keys, &values, spec, cap, mask),
            (None, Some(mask)) => {
                scaled_dot_product_attention(&queries, &keys, &values, spec.scale, mask, None)
            }
            (None, None) if alone && len > 1 => {
                let causal = ScaledDotProductAttentionMask::Causal;
                scaled_dot_product_attention(&queries, &keys, &values, spec.scale, causal, None)
            }
            (None, None) => {
                let none = None::<ScaledDotProductAttentionMask<'_>>;
                scaled_dot_product_attention(&queries, &keys, &values, spec.scale, none, None)
            }
        };
        let width = dim(spec.heads * spec.head_dim)?;
        out.and_then(|out| if len == 1 { Ok(out) } else { transpose_axes(out, &[0, 2, 1, 3]) })
            .and_then(|out| reshape(out, &[batch * len, width]))
            .map_err(device_error)
    }

    /// Positions that any token of the part sees.
    fn visible(&self, window: Option<u32>) -> Range<u32> {
        let end = self.spans.iter().flatten().map(|(_, end)| *end).max().unwrap_or(0);
        let Some(window) = window else { return 0..end };
        // The oldest position that a row's first token still sees.
        let first = self.spans.iter().flatten().map(|(start, _)| (start + 1).saturating_sub(window)).min();
        first.unwrap_or(0)..end
    }

    /// Where the tokens may look, made by the step's first layer that needs it:
    /// `[slots, 1, len, visible]`; nothing where that is what attention does by itself.
    fn mask(&mut self, kind: MaskKind, visible: Range<u32>) -> Result<Option<&Array>, EngineError> {
        let made = match self.masks.entry(kind) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => {
                let window = kind.window.unwrap_or(u32::MAX);
                // A row alone is causal without a mask, unless a window hides its oldest keys.
                let causal = matches!(self.kind, Kind::Alone) && !kind.explicit;
                let bare = causal && visible.end - visible.start <= window;
                place.insert(if bare { None } else { mask(&self.spans, self.len, window, visible)? })
            }
        };
        Ok(made.as_ref())
    }
}

/// True where a token sees a key; nothing where every token sees everything. A slot that is
/// not in the step sees everything: its output is dropped.
fn mask(
    spans: &[Option<(u32, u32)>],
    len: usize,
    window: u32,
    visible: Range<u32>,
) -> Result<Option<Array>, EngineError> {
    let sees = |query: u32, key: u32| key <= query && query - key < window;
    let mut values = Vec::with_capacity(spans.len() * len * visible.len());
    for span in spans {
        match span {
            Some((start, end)) => {
                (*start..*end).for_each(|query| values.extend(visible.clone().map(|key| sees(query, key))))
            }
            None => values.resize(values.len() + len * visible.len(), true),
        }
    }
    let shape = [dim(spans.len())?, 1, dim(len)?, dim(visible.len())?];
    Ok(values.contains(&false).then(|| Array::from_slice(&values, &shape)))
}

fn normed(x: Array, norm: &Option<Norm<MlxVector>>) -> Result<Array, EngineError> {
    match norm {
        Some(norm) => rms_norm(&x, Some(&norm.weight.values), norm.eps).map_err(device_error),
        None => Ok(x),
    }
}

/// Attention whose scores are bent to `cap`: MLX's own has no place for that. Query heads of a
/// key head form an axis of their own, so that keys and values are not repeated.
fn capped_attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    spec: &AttnSpec<MlxVector>,
    cap: f32,
    mask: Option<&Array>,
) -> mlx_rs::error::Result<Array> {
    let &[batch, heads, tokens, width] = queries.shape() else {
        return Err("queries are four-dimensional".into());
    };
    let kv_heads = keys.shape().get(1).copied().unwrap_or(1);
    let scalar = |value: f32| Array::from_f32(value).as_dtype(queries.dtype());
    let scaled = multiply(queries, &scalar(spec.scale / cap)?)?;
    let grouped = reshape(&scaled, &[batch, kv_heads, heads / kv_heads, tokens, width])?;
    let (keys, values) = (expand_dims(keys, 2)?, expand_dims(values, 2)?);
    let scores = matmul(&grouped, transpose_axes(&keys, &[0, 1, 2, 4, 3])?)?;
    let bent = multiply(&tanh(&scores)?, &scalar(cap)?)?;
    let masked = match mask {
        Some(mask) => select(&expand_dims(mask, 1)?, &bent, &scalar(f32::NEG_INFINITY)?)?,
        None => bent,
    };
    let weights = softmax_axis(&masked, -1, true)?;
    reshape(&matmul(&weights, &values)?, &[batch, heads, tokens, width])
}
