//! Data structures of prompt reuse: bytes and lists, no actors, no tensors.
//!
//! What is kept is a parameter, so that nothing here knows what a payload is worth or
//! how it is freed: whatever is given up is handed back to the caller.

pub mod history;
pub mod sessions;
pub mod ssd;
pub mod tree;

use crate::types::TokenId;

pub use history::TokenHistory;
pub use sessions::{Session, SessionKey, Sessions};
pub use tree::{
    Evicted, Found, Lookup, MissReason, Namespace, NodeRef, PrefixTree, Storage, Terms, TreeStatistics,
};

/// How many tokens both begin with.
pub fn shared(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
