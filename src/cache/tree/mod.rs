//! The prefixes that are kept, as a radix tree over token ids: one tree a namespace.
//!
//! A payload (in the product a sequence of the engine) holds *all* tokens from the root to
//! its node's end, and can be cut back to any shorter length. So a prompt that leaves the
//! tree inside a node, or at one without a payload, is served by any payload below; nothing
//! is split but the tree. Only the deepest nodes have payloads: what a longer one
//! holds as well is handed back. Where sequences share blocks a common prefix is stored once.
//!
//! A payload may be **lent** to the row that goes on from its very end, or be a running row's
//! own that others may already read: it is in the tree and belongs to the row.
//!
//! Eviction takes the least valuable tail: payloads are cut back node by node, to where
//! another one branches off, an earlier turn ended, or somebody holds a pin. Value falls with
//! requests that pass by and grows with uses and with what recomputing costs.
//! Tokens of evicted tails stay for a while as *ghosts*, so that a miss can say that it is one
//! of memory, and a tail that comes back keeps its uses.
//!
//! The payload is never freed here: whatever is given up is handed back to the caller.
//! Lookup costs in proportion to the prompt. Not here: bytes on disk, sessions' names.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use crate::cache::shared;
use crate::types::TokenId;

mod arena;
mod evict;
mod find;
#[cfg(test)]
mod tests;

pub use arena::NodeRef;
pub use evict::Evicted;
pub use find::{Found, Lookup, MissReason};

use arena::{Arena, Index, Node};

/// Whose prefixes a prompt may share: all that makes state different for equal tokens.
pub type Namespace = Arc<str>;

/// How the store behind the payloads keeps them, for what they are charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Storage {
    /// Memory is handed out in blocks of so many tokens; at least 1.
    pub block_tokens: u32,
    /// Payloads with a common prefix share its full blocks.
    pub shares: bool,
    /// A payload can be cut back to any length. If not, each serves its own length alone, and
    /// those of shorter prefixes are kept beside it.
    pub trims: bool,
}

impl Default for Storage {
    fn default() -> Self {
        Self { block_tokens: 1, shares: true, trims: true }
    }
}

/// What the tree did so far and holds now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TreeStatistics {
    /// Payloads.
    pub entries: u64,
    /// Tokens that can be served, common prefixes once.
    pub tokens: u64,
    /// Blocks that they are charged.
    pub blocks: u64,
    /// Tokens remembered after their state was given up.
    pub ghost_tokens: u64,
    /// Nodes of all trees.
    pub nodes: u64,
    /// Prompts that used a prefix.
    pub hits: u64,
    /// Prompts that found none.
    pub misses: u64,
    /// Tokens of the used prefixes.
    pub hit_tokens: u64,
    /// Tails given up for others.
    pub evicted: u64,
}

/// How a payload comes into the tree.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms<'a> {
    /// A running row keeps it and appends to it.
    pub lent: bool,
    /// Lengths at which the next prompt may leave this one: ends of turns, of shared beginnings.
    pub boundaries: &'a [u32],
    /// Those of them that a client asked to keep.
    pub hints: &'a [u32],
}

/// See the module.
#[derive(Debug)]
pub struct PrefixTree<P> {
    storage: Storage,
    enabled: bool,
    arena: Arena<P>,
    roots: HashMap<Namespace, Index>,
    /// Where each payload is.
    homes: HashMap<P, Index>,
    /// Payloads that may be given up, the least valuable first.
    order: BTreeSet<(u64, Index)>,
    /// Nodes that are pinned, or whose payload is lent: few.
    held_fast: BTreeSet<Index>,
    /// Leaves without state, the oldest first; some are not ghosts any more.
    ghosts: VecDeque<NodeRef>,
    /// Given up from outside, to be carried out by whoever can.
    released: Vec<Evicted<P>>,
    /// Requests so far: the tree's clock.
    now: u64,
    sums: TreeStatistics,
}

impl<P: Copy + Eq + Hash> PrefixTree<P> {
    /// An empty tree; one that is not `enabled` never keeps anything.
    pub fn new(enabled: bool) -> Self {
        Self {
            storage: Storage::default(),
            enabled,
            arena: Arena::default(),
            roots: HashMap::new(),
            homes: HashMap::new(),
            order: BTreeSet::new(),
            held_fast: BTreeSet::new(),
            ghosts: VecDeque::new(),
            released: Vec::new(),
            now: 0,
            sums: TreeStatistics::default(),
        }
    }

    /// Whether prefixes are kept at all.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Says how payloads are stored. Empties the tree: those of another store are void.
    pub fn set_storage(&mut self, storage: Storage) {
        self.forget_all();
        self.storage = Storage { block_tokens: storage.block_tokens.max(1), ..storage };
    }

    /// Numbers so far.
    pub fn statistics(&self) -> TreeStatistics {
        TreeStatistics { entries: self.homes.len() as u64, nodes: self.arena.len() as u64, ..self.sums }
    }

    /// Blocks charged for what is kept.
    pub fn blocks(&self) -> u64 {
        self.sums.blocks
    }

    /// The same without what pins and rows hold fast.
    pub fn evictable_blocks(&self) -> u64 {
        let (mut fast, mut seen) = (0, HashSet::new());
        for index in &self.held_fast {
            let mut next = Some(*index);
            while let Some(index) = next.filter(|index| seen.insert(*index)) {
                let Some(node) = self.node(index) else { break };
                fast += u64::from(node.blocks);
                next = node.parent;
            }
        }
        self.sums.blocks.saturating_sub(fast)
    }

    /// Keeps `payload`, which holds exactly `tokens`, and returns every payload that is not
    /// needed any more: of prefixes that it extends, or itself where a longer one has it all.
    /// One that is in the tree already moves to its new end.
    #[must_use = "what is handed back must be freed"]
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        payload: P,
        terms: Terms<'_>,
    ) -> Vec<P> {
        let mut given_up = Vec::new();
        let before = self.take_out(payload);
        if !self.enabled || tokens.is_empty() {
            given_up.extend((!terms.lent).then_some(payload));
            return given_up;
        }
        let node = self.path(namespace, tokens);
        for at in terms.boundaries.iter().chain(terms.hints) {
            self.bound(node, *at, terms.hints.contains(at));
        }
        if !terms.lent {
            self.change(node, |node| node.boundary = true);
        }
        let redundant = if self.storage.trims {
            self.node(node).is_some_and(|node| node.held > 0)
        } else {
            self.node(node).is_some_and(|node| node.payload.is_some())
        };
        if redundant {
            given_up.extend((!terms.lent).then_some(payload));
        } else {
            self.put(node, payload, terms.lent);
            if self.storage.trims {
                self.shed_above(node, &mut given_up);
            }
        }
        self.touch_path(node, false);
        if let Some(before) = before {
            self.tidy(before);
            self.merge(before);
        }
        self.forget_ghosts();
        given_up
    }

    /// A prompt used `length` tokens that were found: the path up to there was used once more.
    pub fn hit(&mut self, found: &Found<P>) {
        self.sums.hits += 1;
        self.sums.hit_tokens += u64::from(found.length);
        if let Some(node) = self.arena.resolve(found.node) {
            self.touch_path(node, true);
        }
    }

    /// A prompt used nothing.
    pub fn miss(&mut self) {
        self.now += 1;
        self.sums.misses += 1;
    }

    /// Lends the payload to the row that goes on from its end.
    pub fn lend(&mut self, payload: P) {
        if let Some(node) = self.homes.get(&payload).copied() {
            self.change(node, |node| node.lent = true);
        }
    }

    /// Takes a lent payload back as it was: it belongs to the tree again, which knows of so
    /// many of its tokens. `None` where it was not lent: then it is the caller's.
    #[must_use = "what was not lent must be freed"]
    pub fn reclaim(&mut self, payload: P) -> Option<u32> {
        let node = self.homes.get(&payload).copied()?;
        self.change(node, |node| node.lent = false);
        self.node(node).map(Node::end)
    }

    /// Forgets a payload that is void, or whose row does not share it any more.
    pub fn forget(&mut self, payload: P) {
        if let Some(node) = self.take_out(payload) {
            self.tidy(node);
        }
    }

    /// Forgets all payloads, without handing anything back, and all tokens.
    pub fn forget_all(&mut self) {
        *self = Self {
            now: self.now,
            storage: self.storage,
            sums: self.sums,
            arena: self.arena.emptied(),
            ..Self::new(self.enabled)
        };
        (self.sums.tokens, self.sums.blocks, self.sums.ghost_tokens) = (0, 0, 0);
    }

    /// Gives everything up, to be collected with [`Self::take_released`]. Lent payloads stay with
    /// their rows.
    pub fn release_all(&mut self) {
        let mut released = std::mem::take(&mut self.released);
        let owned = self.arena.iter().filter(|(_, node)| !node.lent).filter_map(|(_, node)| node.payload);
        released.extend(owned.map(Evicted::Close));
        self.forget_all();
        self.released = released;
    }

    /// Payloads given up by [`Self::release_all`] since the last call.
    #[must_use = "what is handed back must be freed"]
    pub fn take_released(&mut self) -> Vec<Evicted<P>> {
        std::mem::take(&mut self.released)
    }

    /// Keeps what was found, and no more, from being given up, until it is unpinned as often: gives the
    /// node to unpin.
    pub fn pin_found(&mut self, found: &Found<P>) -> NodeRef {
        let Some(index) = self.arena.resolve(found.node) else { return found.node };
        let start = self.node(index).map_or(0, |node| node.start);
        let index = self.split(index, found.length.saturating_sub(start) as usize);
        let name = self.arena.name(index);
        self.pin(name);
        name
    }

    /// Keeps the tokens up to the node's end from being given up, until it is unpinned as often.
    pub fn pin(&mut self, node: NodeRef) {
        self.change_named(node, |node| node.pins += 1);
    }

    /// Takes one pin away.
    pub fn unpin(&mut self, node: NodeRef) {
        self.change_named(node, |node| node.pins = node.pins.saturating_sub(1));
        if let Some(index) = self.arena.resolve(node) {
            self.merge(index);
        }
    }

    /// Makes the node's tokens worth more, until it is taken back as often.
    pub fn favour(&mut self, node: NodeRef, is_on: bool) {
        self.change_named(node, |node| {
            node.favours = if is_on { node.favours + 1 } else { node.favours.saturating_sub(1) };
        });
    }

    /// The node that ends where `tokens` do, if they end one and its state is there.
    pub fn node_of(&self, namespace: &Namespace, tokens: &[TokenId]) -> Option<NodeRef> {
        let lookup = self.find(namespace, tokens);
        let found = lookup.found.filter(|found| found.length as usize == tokens.len())?;
        let index = self.arena.resolve(found.node)?;
        (self.node(index)?.end() == found.length).then_some(found.node)
    }

    /// Tokens up to the node's end; 0 where it is gone or its state is.
    pub fn tokens_of(&self, node: NodeRef) -> u32 {
        let node = self.arena.resolve(node).and_then(|index| self.node(index));
        node.filter(|node| node.held > 0).map_or(0, Node::end)
    }

    /// Gives up the end of a path, and all above it that nobody else has: no other payload, no favour, no
    /// pin. To be collected with [`Self::take_released`]. What is lent stays with its row.
    pub fn release(&mut self, namespace: &Namespace, tokens: &[TokenId]) {
        let Some(found) = self.find(namespace, tokens).found else { return };
        let Some(index) = self.homes.get(&found.payload).copied() else { return };
        // One that ends behind the path is another's.
        if found.holds > found.length || self.node(index).is_none_or(|node| node.lent || node.pins > 0) {
            return;
        }
        self.take_out(found.payload);
        let mut above = self.node(index).and_then(|node| node.parent);
        while let Some(node) = above.and_then(|index| self.node(index)) {
            if node.held > 0 || node.favours > 0 || node.pins > 0 {
                break;
            }
            above = node.parent;
        }
        let kept = above.and_then(|index| Some((index, self.node(index)?)));
        let moves = kept.filter(|(_, node)| self.storage.trims && node.held == 0 && node.end() > 0);
        let given_up = match moves.map(|(index, node)| (index, node.end())) {
            Some((above, end)) => {
                self.put(above, found.payload, false);
                Evicted::Truncate(found.payload, end)
            }
            None => Evicted::Close(found.payload),
        };
        self.released.push(given_up);
        self.tidy(index);
    }

    fn node(&self, index: Index) -> Option<&Node<P>> {
        self.arena.get(index)
    }

    fn change_named(&mut self, name: NodeRef, change: impl FnOnce(&mut Node<P>)) {
        if let Some(index) = self.arena.resolve(name) {
            self.change(index, change);
        }
    }

    /// Changes a node, and its place in the order and what it is charged with it.
    fn change(&mut self, index: Index, change: impl FnOnce(&mut Node<P>)) {
        let Some(node) = self.arena.get_mut(index) else { return };
        let tokens = |node: &Node<P>| if node.held > 0 { node.label.len() as u64 } else { 0 };
        let (tokens_before, blocks_before, rank_before) = (tokens(node), node.blocks, node.rank);
        let ghosts_before = node.label.len() as u64 - tokens_before;
        change(node);
        node.blocks = blocks_of(node, self.storage);
        let evictable = node.payload.is_some() && !node.lent && node.pins == 0;
        node.rank = evictable.then(|| evict::rank(node));
        let sums = &mut self.sums;
        sums.tokens = sums.tokens + tokens(node) - tokens_before;
        sums.ghost_tokens = sums.ghost_tokens + (node.label.len() as u64 - tokens(node)) - ghosts_before;
        sums.blocks = sums.blocks + u64::from(node.blocks) - u64::from(blocks_before);
        let is_fast = node.pins > 0 || (node.payload.is_some() && node.lent);
        if is_fast != self.held_fast.contains(&index) {
            if is_fast {
                self.held_fast.insert(index)
            } else {
                self.held_fast.remove(&index)
            };
        }
        if rank_before != node.rank {
            let after = node.rank;
            rank_before.map(|rank| self.order.remove(&(rank, index)));
            after.map(|rank| self.order.insert((rank, index)));
        }
    }

    fn add(&mut self, parent: Index, start: u32, label: Vec<TokenId>) -> Index {
        let Some(first) = label.first().copied() else { return parent };
        let index = self.arena.add(Node::new(Some(parent), start, Vec::new()));
        self.change(index, |node| node.label = label);
        if let Some(parent) = self.arena.get_mut(parent) {
            parent.adopt(first, index);
        }
        index
    }

    /// The node that ends where `tokens` do, made where it is not there yet.
    fn path(&mut self, namespace: &Namespace, tokens: &[TokenId]) -> Index {
        let mut at = match self.roots.get(namespace) {
            Some(root) => *root,
            None => {
                let root = self.arena.add(Node::new(None, 0, Vec::new()));
                self.roots.insert(Arc::clone(namespace), root);
                root
            }
        };
        let mut done = 0;
        while done < tokens.len() {
            let next = self.node(at).and_then(|node| node.child(tokens[done]));
            let Some(next) = next else { return self.add(at, done as u32, tokens[done..].to_vec()) };
            let label = self.node(next).map_or(&[][..], |node| &node.label);
            let common = shared(label, &tokens[done..]);
            at = if common < label.len() { self.split(next, common) } else { next };
            done += common;
        }
        at
    }

    /// Cuts a node in two; gives the upper one, whose label has `length` tokens.
    fn split(&mut self, index: Index, length: usize) -> Index {
        let Some(node) = self.node(index) else { return index };
        if length == 0 || length >= node.label.len() {
            return index;
        }
        let (parent, start) = (node.parent, node.start);
        let (upper, lower) = (node.label[..length].to_vec(), node.label[length..].to_vec());
        let (held, uses, used) = (node.held, node.uses, node.used);
        let (first, next) = (upper[0], lower[0]);
        let above = self.arena.add(Node::new(parent, start, Vec::new()));
        self.change(above, |node| {
            node.label = upper;
            node.children.push((next, index));
            (node.held, node.uses, node.used) = (held, uses, used);
        });
        self.change(index, |node| {
            node.parent = Some(above);
            node.start = start + length as u32;
            node.label = lower;
        });
        if let Some(parent) = parent.and_then(|parent| self.arena.get_mut(parent)) {
            parent.adopt(first, above);
        }
        above
    }

    /// Makes the length `at` of the path to `node` a boundary.
    fn bound(&mut self, node: Index, at: u32, hinted: bool) {
        let mut index = Some(node);
        while let Some(node) = index.and_then(|index| self.node(index)) {
            if node.start < at {
                break;
            }
            index = node.parent;
        }
        let Some((index, node)) = index.and_then(|index| Some((index, self.node(index)?))) else { return };
        if at == 0 || at > node.end() {
            return;
        }
        let cut = self.split(index, (at - node.start) as usize);
        self.change(cut, |node| {
            node.boundary = true;
            node.hinted |= hinted;
        });
    }

    fn put(&mut self, index: Index, payload: P, lent: bool) {
        self.change(index, |node| (node.payload, node.lent) = (Some(payload), lent));
        self.count_held(index, 1);
        self.homes.insert(payload, index);
    }

    /// Takes a payload out, and gives the node that it was in.
    fn take_out(&mut self, payload: P) -> Option<Index> {
        let index = self.homes.remove(&payload)?;
        self.change(index, |node| (node.payload, node.lent) = (None, false));
        self.count_held(index, -1);
        Some(index)
    }

    fn count_held(&mut self, index: Index, by: i32) {
        let mut next = Some(index);
        while let Some(index) = next {
            self.change(index, |node| node.held = node.held.saturating_add_signed(by));
            next = self.node(index).and_then(|node| node.parent);
        }
    }

    /// Takes out the payloads of the prefixes of `node`: its own holds what they hold.
    fn shed_above(&mut self, node: Index, given_up: &mut Vec<P>) {
        let mut next = self.node(node).and_then(|node| node.parent);
        while let Some(index) = next {
            next = self.node(index).and_then(|node| node.parent);
            let Some(payload) = self.node(index).and_then(|node| node.payload) else { continue };
            let lent = self.node(index).is_some_and(|node| node.lent);
            self.take_out(payload);
            given_up.extend((!lent).then_some(payload));
            self.merge(index);
        }
    }

    /// One more request went along the path to `node`.
    fn touch_path(&mut self, node: Index, is_use: bool) {
        self.now += 1;
        let now = self.now;
        let mut next = Some(node);
        while let Some(index) = next {
            self.change(index, |node| {
                node.used = now;
                node.uses = node.uses.saturating_add(u32::from(is_use));
            });
            next = self.node(index).and_then(|node| node.parent);
        }
    }

    /// Joins a node with its only child where nothing keeps them apart.
    fn merge(&mut self, index: Index) {
        let Some(node) = self.node(index) else { return };
        let (Some(parent), &[(_, child)]) = (node.parent, node.children.as_slice()) else { return };
        if node.boundary || node.pins > 0 || node.favours > 0 || node.payload.is_some() {
            return;
        }
        let (start, mut label) = (node.start, node.label.clone());
        let first = label[0];
        self.change(index, |node| node.label.clear());
        self.arena.remove(index);
        self.change(child, |node| {
            label.append(&mut node.label);
            node.label = label;
            (node.parent, node.start) = (Some(parent), start);
        });
        if let Some(parent) = self.arena.get_mut(parent) {
            parent.adopt(first, child);
        }
    }
}

/// Blocks that a node is charged: those of its own tokens that nobody above is charged for.
fn blocks_of<P>(node: &Node<P>, storage: Storage) -> u32 {
    let block = storage.block_tokens;
    match (storage.shares, node.payload.is_some()) {
        (false, false) => 0,
        (false, true) => node.end().div_ceil(block),
        (true, true) => node.end().div_ceil(block) - node.start / block,
        (true, false) if node.held > 0 => node.end() / block - node.start / block,
        (true, false) => 0,
    }
}
