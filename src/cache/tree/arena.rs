//! Nodes by number. A number is used again, with another generation, so that a
//! reference kept outside never means a node that came later.

use crate::types::TokenId;

/// A node's place.
pub(super) type Index = u32;

/// Names a node as long as it is there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NodeRef {
    index: Index,
    generation: u64,
}

/// A run of tokens that continues its parent's.
#[derive(Debug)]
pub(super) struct Node<P> {
    /// `None` for a root.
    pub parent: Option<Index>,
    /// Its tokens; empty for a root alone.
    pub label: Vec<TokenId>,
    /// Position of the first of them.
    pub start: u32,
    /// By first token, sorted.
    pub children: Vec<(TokenId, Index)>,
    /// What holds all tokens up to this node's end.
    pub payload: Option<P>,
    /// A running row has the payload and appends to it.
    pub lent: bool,
    /// Payloads here and below.
    pub held: u32,
    pub pins: u32,
    /// Where it ends an earlier row did, or the next turn begins: kept apart from its child.
    pub boundary: bool,
    /// Times that a prompt went through it.
    pub uses: u32,
    /// When that happened last, in requests.
    pub used: u64,
    /// A session's newest tail.
    pub favours: u32,
    /// A client marked its end as worth keeping.
    pub hinted: bool,
    /// Blocks charged for it.
    pub blocks: u32,
    /// Its key in the order of eviction.
    pub rank: Option<u64>,
}

impl<P> Node<P> {
    pub fn new(parent: Option<Index>, start: u32, label: Vec<TokenId>) -> Self {
        Self {
            parent,
            label,
            start,
            children: Vec::new(),
            payload: None,
            lent: false,
            held: 0,
            pins: 0,
            boundary: false,
            uses: 0,
            used: 0,
            favours: 0,
            hinted: false,
            blocks: 0,
            rank: None,
        }
    }

    /// Tokens from the root up to its end.
    pub fn end(&self) -> u32 {
        self.start + self.label.len() as u32
    }

    pub fn child(&self, token: TokenId) -> Option<Index> {
        let place = self.children.binary_search_by_key(&token, |(first, _)| *first).ok()?;
        Some(self.children[place].1)
    }

    /// Makes `child` the one that begins with `token`.
    pub fn adopt(&mut self, token: TokenId, child: Index) {
        match self.children.binary_search_by_key(&token, |(first, _)| *first) {
            Ok(place) => self.children[place].1 = child,
            Err(place) => self.children.insert(place, (token, child)),
        }
    }

    pub fn abandon(&mut self, child: Index) {
        self.children.retain(|(_, index)| *index != child);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Arena<P> {
    nodes: Vec<(u64, Option<Node<P>>)>,
    free: Vec<Index>,
    /// Generation of a number that was never used.
    first: u64,
}

impl<P> Default for Arena<P> {
    fn default() -> Self {
        Self { nodes: Vec::new(), free: Vec::new(), first: 0 }
    }
}

impl<P> Arena<P> {
    /// Without nodes; no reference to an earlier one means one that is made from now on.
    pub fn emptied(&self) -> Self {
        let latest = self.nodes.iter().map(|(generation, _)| *generation).max();
        Self { first: latest.map_or(self.first, |latest| latest + 1), ..Self::default() }
    }

    pub fn add(&mut self, node: Node<P>) -> Index {
        match self.free.pop() {
            Some(index) => {
                self.nodes[index as usize].1 = Some(node);
                index
            }
            None => {
                self.nodes.push((self.first, Some(node)));
                (self.nodes.len() - 1) as Index
            }
        }
    }

    pub fn remove(&mut self, index: Index) {
        let slot = &mut self.nodes[index as usize];
        if slot.1.take().is_some() {
            slot.0 += 1;
            self.free.push(index);
        }
    }

    pub fn get(&self, index: Index) -> Option<&Node<P>> {
        self.nodes.get(index as usize)?.1.as_ref()
    }

    pub fn get_mut(&mut self, index: Index) -> Option<&mut Node<P>> {
        self.nodes.get_mut(index as usize)?.1.as_mut()
    }

    pub fn name(&self, index: Index) -> NodeRef {
        let generation = self.nodes.get(index as usize).map_or(0, |(generation, _)| *generation);
        NodeRef { index, generation }
    }

    pub fn resolve(&self, name: NodeRef) -> Option<Index> {
        let (generation, node) = self.nodes.get(name.index as usize)?;
        (node.is_some() && *generation == name.generation).then_some(name.index)
    }

    pub fn iter(&self) -> impl Iterator<Item = (Index, &Node<P>)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter_map(|(index, (_, node))| Some((index as Index, node.as_ref()?)))
    }

    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }
}
