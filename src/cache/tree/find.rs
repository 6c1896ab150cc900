//! The longest kept prefix of a prompt, and why it is not longer.

use std::hash::Hash;

use super::arena::{Index, NodeRef};
use super::{Namespace, PrefixTree};
use crate::cache::shared;
use crate::types::TokenId;

/// Other namespaces looked at to explain a miss.
const OTHERS: usize = 8;

/// A prefix that can be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found<P> {
    /// The node that it ends in.
    pub node: NodeRef,
    /// Tokens that can be served, at least one.
    pub length: u32,
    /// What holds them, and perhaps more.
    pub payload: P,
    /// Tokens that the payload holds, as far as the tree knows.
    pub holds: u32,
    /// A running row has it.
    pub lent: bool,
}

/// Why a match is not longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MissReason {
    /// All of the prompt is there.
    Complete,
    /// Other prompts go on with another token here.
    OtherToken,
    /// What is kept ends here.
    NotSeen,
    /// It was there and was given up.
    Evicted,
    /// The next tokens are kept, but this store cannot be cut back to where the prompt leaves them.
    NotTrimmable,
}

impl MissReason {
    /// For traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::OtherToken => "other_token",
            Self::NotSeen => "not_seen",
            Self::Evicted => "evicted",
            Self::NotTrimmable => "not_trimmable",
        }
    }
}

/// What a prompt has in common with all that was ever kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lookup<P> {
    /// What can be served of it.
    pub found: Option<Found<P>>,
    /// Tokens in common, also such whose state is gone.
    pub equal: u32,
    /// Why not more.
    pub why: MissReason,
}

/// Where a walk along the prompt ended.
struct Walk {
    equal: u32,
    /// Tokens of them whose state is there, in one payload or another.
    held: u32,
    /// The deepest node with state that the prompt reaches into, and how far.
    live: Option<(Index, u32)>,
    /// The walk ended inside a node.
    inside: bool,
    /// Other tokens follow at its end.
    branches: bool,
}

impl<P: Copy + Eq + Hash> PrefixTree<P> {
    /// The longest prefix of `tokens` that can be served. Counts nothing: see
    /// [`PrefixTree::hit`] and [`PrefixTree::miss`].
    pub fn find(&self, namespace: &Namespace, tokens: &[TokenId]) -> Lookup<P> {
        let walk = self.roots.get(namespace).map(|root| self.walk(*root, tokens));
        let Some(walk) = walk else { return Lookup { found: None, equal: 0, why: MissReason::NotSeen } };
        let found = walk.live.and_then(|(node, length)| self.serve(node, length));
        let served = found.map_or(0, |found| found.length);
        let why = if served as usize == tokens.len() {
            MissReason::Complete
        } else if walk.held > served {
            MissReason::NotTrimmable
        } else if walk.equal > served {
            MissReason::Evicted
        } else if walk.inside || walk.branches {
            MissReason::OtherToken
        } else {
            MissReason::NotSeen
        };
        Lookup { found, equal: walk.equal, why }
    }

    /// The longest match in other namespaces; only some of them where there are many. For the operator
    /// alone: to a client it would tell what others said.
    pub fn elsewhere(&self, namespace: &Namespace, tokens: &[TokenId]) -> u32 {
        let others = self.roots.iter().filter(|(name, _)| *name != namespace).take(OTHERS);
        others.map(|(_, root)| self.walk(*root, tokens).equal).max().unwrap_or(0)
    }

    fn walk(&self, root: Index, tokens: &[TokenId]) -> Walk {
        let mut walk = Walk { equal: 0, held: 0, live: None, inside: false, branches: false };
        let (mut at, mut done) = (root, 0);
        while done < tokens.len() {
            let Some(next) = self.node(at).and_then(|node| node.child(tokens[done])) else { break };
            let Some(node) = self.node(next) else { break };
            let common = shared(&node.label, &tokens[done..]);
            done += common;
            walk.equal = done as u32;
            if node.held > 0 {
                walk.held = walk.equal;
            }
            let exact = common == node.label.len() && node.payload.is_some();
            if node.held > 0 && (self.storage.trims || exact) {
                walk.live = Some((next, done as u32));
            }
            at = next;
            if common < node.label.len() {
                walk.inside = true;
                return walk;
            }
        }
        walk.branches = self.node(at).is_some_and(|node| !node.children.is_empty());
        walk
    }

    /// A payload for the first `length` tokens, which end in `node`.
    fn serve(&self, node: Index, length: u32) -> Option<Found<P>> {
        let mut at = node;
        loop {
            let here = self.node(at)?;
            if let Some(payload) = here.payload {
                let (holds, lent) = (here.end(), here.lent);
                return Some(Found { node: self.arena.name(node), length, payload, holds, lent });
            }
            let holds =
                |(_, child): &&(TokenId, Index)| self.node(*child).is_some_and(|child| child.held > 0);
            at = here.children.iter().find(holds)?.1;
        }
    }
}
