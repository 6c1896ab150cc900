//! The paths of all segments as one radix tree a namespace: a walk along a prompt's tokens finds how far any
//! of them goes, whatever their number.
//!
//! A node is a stretch of a path between two places where segments begin, end or part. It keeps no tokens:
//! they are those of any segment that covers it. Invariants: a segment that covers a part of a node covers all
//! of it; every node but a root is covered by at least one; a segment ends where a node ends. So a segment must
//! be taken out after those that build on it.

use std::collections::HashMap;
use std::sync::Arc;

use super::SegmentHead;
use crate::cache::shared;
use crate::types::TokenId;

/// Names a node as long as a segment ends there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NodeId(usize);

#[derive(Debug)]
struct Node {
    parent: NodeId,
    /// Positions of its first token and behind its last one; both 0 for a root alone.
    start: u32,
    end: u32,
    /// Who covers it, the oldest first.
    cover: Vec<Arc<SegmentHead>>,
    /// By their first token.
    children: HashMap<TokenId, NodeId>,
}

impl Node {
    fn is_root(&self) -> bool {
        self.end == 0
    }

    fn label(&self) -> &[TokenId] {
        let label = self.cover.first().and_then(|head| {
            let from = self.start.checked_sub(head.start)? as usize;
            let to = self.end.checked_sub(head.start)? as usize;
            head.tokens.get(from..to)
        });
        label.unwrap_or_default()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Paths {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    roots: HashMap<Arc<str>, NodeId>,
}

impl Paths {
    /// How many of `tokens` some path of the namespace begins with, and the oldest segment that covers the
    /// last one of them. Always the oldest, so that of segments with the same tokens one stays in use and the
    /// others age.
    pub(super) fn deepest(&self, namespace: &str, tokens: &[TokenId]) -> Option<(u32, &Arc<SegmentHead>)> {
        let mut at = self.node(*self.roots.get(namespace)?);
        let mut rest = tokens;
        while let Some(next) = rest.first().and_then(|token| at.children.get(token)) {
            at = self.node(*next);
            let label = at.label();
            let common = shared(label, rest);
            rest = &rest[common..];
            if common < label.len() {
                break;
            }
        }
        let depth = u32::try_from(tokens.len() - rest.len()).ok()?;
        Some((depth, at.cover.first()?))
    }

    /// Adds a segment and returns the node where it ends. `parent_end` is where its parent ends; the segment
    /// begins there or on the parent's own tokens before.
    pub(super) fn add(&mut self, head: &Arc<SegmentHead>, parent_end: Option<NodeId>) -> NodeId {
        let mut at = match parent_end {
            Some(end) => self.branch(end, head.start),
            None => self.root(&head.namespace),
        };
        let mut rest = head.tokens.as_slice();
        while let Some(first) = rest.first() {
            let start = head.end() - rest.len() as u32;
            let Some(next) = self.node(at).children.get(first).copied() else {
                let cover = vec![Arc::clone(head)];
                let leaf =
                    self.make(Node { parent: at, start, end: head.end(), cover, children: HashMap::new() });
                self.node_mut(at).children.insert(*first, leaf);
                return leaf;
            };
            let common = shared(self.node(next).label(), rest);
            at = self.split(next, start + common as u32);
            self.node_mut(at).cover.push(Arc::clone(head));
            rest = &rest[common..];
        }
        at
    }

    /// Takes a segment out that ends at `end` and that nothing builds on.
    pub(super) fn remove(&mut self, head: &Arc<SegmentHead>, end: NodeId) {
        let mut at = end;
        while !self.node(at).is_root() && self.node(at).start >= head.start {
            let node = self.node_mut(at);
            let parent = node.parent;
            if let Some(index) = node.cover.iter().position(|other| Arc::ptr_eq(other, head)) {
                // In order: who is the oldest decides who is found.
                node.cover.remove(index);
            }
            if node.cover.is_empty() {
                let first = head.tokens.get((node.start - head.start) as usize).copied();
                node.children = HashMap::new();
                self.free.push(at);
                if let Some(first) = first {
                    self.node_mut(parent).children.remove(&first);
                }
            } else {
                self.join(at);
            }
            at = parent;
        }
        if !self.node(at).is_root() {
            self.join(at);
        } else if self.node(at).children.is_empty() {
            self.roots.remove(&head.namespace);
            self.free.push(at);
        }
    }

    /// The node that ends at `depth` on the way from a root to `end`.
    fn branch(&mut self, end: NodeId, depth: u32) -> NodeId {
        let mut at = end;
        while self.node(at).start >= depth && !self.node(at).is_root() {
            at = self.node(at).parent;
        }
        self.split(at, depth)
    }

    /// Makes a node end at `depth`, and returns the one that does. The lower part keeps the id, because
    /// segments end there.
    fn split(&mut self, at: NodeId, depth: u32) -> NodeId {
        let node = self.node(at);
        let (parent, start) = (node.parent, node.start);
        let label = node.label();
        let cut = depth.saturating_sub(start) as usize;
        let (Some(first), Some(second)) = (label.first().copied(), label.get(cut).copied()) else {
            return at;
        };
        let cover = node.cover.clone();
        let children = HashMap::from([(second, at)]);
        let upper = self.make(Node { parent, start, end: depth, cover, children });
        self.node_mut(parent).children.insert(first, upper);
        let lower = self.node_mut(at);
        (lower.start, lower.parent) = (depth, upper);
        upper
    }

    /// Undoes a split that nobody needs any more, so that there are never more than three nodes a segment.
    fn join(&mut self, at: NodeId) {
        let upper = self.node(at);
        let (parent, start) = (upper.parent, upper.start);
        let mut children = upper.children.values();
        let (Some(lower), None) = (children.next().copied(), children.next()) else { return };
        let below = &self.node(lower).cover;
        let same = upper.cover.len() == below.len()
            && upper.cover.iter().zip(below).all(|(upper, lower)| Arc::ptr_eq(upper, lower));
        let Some(first) = upper.label().first().copied().filter(|_| same) else { return };
        self.node_mut(parent).children.insert(first, lower);
        let node = self.node_mut(lower);
        (node.start, node.parent) = (start, parent);
        let upper = self.node_mut(at);
        (upper.cover, upper.children) = (Vec::new(), HashMap::new());
        self.free.push(at);
    }

    fn root(&mut self, namespace: &Arc<str>) -> NodeId {
        if let Some(root) = self.roots.get(namespace) {
            return *root;
        }
        // A root is its own parent; nobody climbs beyond it.
        let node = Node { parent: NodeId(0), start: 0, end: 0, cover: Vec::new(), children: HashMap::new() };
        let root = self.make(node);
        self.node_mut(root).parent = root;
        self.roots.insert(Arc::clone(namespace), root);
        root
    }

    fn make(&mut self, node: Node) -> NodeId {
        match self.free.pop() {
            Some(id) => {
                *self.node_mut(id) = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId(self.nodes.len() - 1)
            }
        }
    }

    // Ids come from `make` alone and nodes are never taken out of the list, so that no id is out of range.
    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0]
    }

    /// Fails where the tree breaks an invariant.
    #[cfg(test)]
    pub(super) fn check(&self, segments: usize) {
        let live = self.nodes.len() - self.free.len();
        assert!(live <= 3 * segments + self.roots.len(), "{live} nodes for {segments} segments");
        let mut seen = 0;
        let mut open: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(id) = open.pop() {
            seen += 1;
            let node = self.node(id);
            assert_eq!(node.is_root(), node.cover.is_empty());
            assert_eq!(node.label().len(), (node.end - node.start) as usize);
            for head in &node.cover {
                let from = (node.start - head.start) as usize;
                assert_eq!(&head.tokens[from..from + node.label().len()], node.label());
            }
            for (first, child) in &node.children {
                let child = self.node(*child);
                assert_eq!((child.parent, child.start), (id, node.end));
                assert_eq!(child.label().first(), Some(first));
            }
            open.extend(node.children.values());
        }
        assert_eq!(seen, live, "every node is reached");
    }
}
