//! The tier on disk: prefixes that outlive the process, as bytes.
//!
//! A **segment** holds the state of some tokens of one path: those from `start` on, behind what
//! its parent holds up to there (a child may leave its parent's path anywhere inside it). One file
//! a segment ([`format`]), written once, under another name first, and never changed
//! ([`Folder`]); which there are is known from their heads alone ([`SegmentIndex`]), so nothing
//! on disk can disagree with anything else on disk.
//!
//! Not here: tensors, threads, and when something is written.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::types::TokenId;

mod codec;
mod folder;
mod format;
mod index;
mod radix;
#[cfg(test)]
mod tests;

pub use codec::{Codec, Element};
pub use folder::{Folder, OpenError, ReadError, ScanReport, inspect, verify};
pub use index::{Chain, Link, SegmentIndex};

/// Pieces of a segment end at multiples of so many tokens.
pub const PIECE_TOKENS: u32 = 64;
/// Most tokens of a segment.
pub const MOST_TOKENS: usize = 1 << 16;

/// Names a segment, and its file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct SegmentId(pub u64);

impl fmt::Display for SegmentId {
    /// 16 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What is known of a segment without reading it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentHead {
    /// Its name.
    pub id: SegmentId,
    /// All that makes bytes mean something else: weights, layout, numerics, salt.
    pub namespace: Arc<str>,
    /// What holds the tokens before `start`; `None` where that is 0.
    pub parent: Option<SegmentId>,
    /// Position of the first token.
    pub start: u32,
    /// Its tokens, at least one.
    pub tokens: Vec<TokenId>,
    /// Seconds since 1970 when it was made; for people.
    pub created: u64,
    /// Of the file; 0 before it is written.
    pub bytes: u64,
}

impl SegmentHead {
    /// Position after its last token.
    pub fn end(&self) -> u32 {
        self.start.saturating_add(u32::try_from(self.tokens.len()).unwrap_or(u32::MAX))
    }

    /// Whether the other one may build on it.
    pub fn carries(&self, child: &Self) -> bool {
        self.namespace == child.namespace && self.start < child.start && child.start <= self.end()
    }
}

/// The pieces of a range of tokens.
pub fn pieces(range: &Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
    let Range { mut start, end } = *range;
    std::iter::from_fn(move || {
        let next = (start / PIECE_TOKENS + 1).saturating_mul(PIECE_TOKENS).min(end);
        let piece = start..next;
        start = next;
        (!piece.is_empty()).then_some(piece)
    })
}
