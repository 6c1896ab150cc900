//! Newtypes for every number that has an owner.

use std::fmt;

/// Index of a token in a model's vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// One life of an engine; a rebuilt engine has the next epoch, and sequences
/// of an older one are refused as stale.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, serde::Serialize)]
#[serde(transparent)]
pub struct Epoch(pub u32);

/// A row's key-value state inside an engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId {
    /// The engine life that made it.
    pub epoch: Epoch,
    /// Unique within the epoch, never reused.
    pub number: u64,
}

/// A request's identity for its whole life: in logs, in response ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u128);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for RequestId {
    /// 32 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
