//! Which segments there are, by their tokens. Pure.
//!
//! The paths of all of them are one radix tree ([`Paths`]); what is above a segment is known from its
//! parents. So lookup costs in proportion to the prompt. Leaves are given up
//! first, the one that was not used for longest; what others build on stays.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::radix::{NodeId, Paths};
use super::{SegmentHead, SegmentId};
use crate::types::TokenId;

/// A segment's part in a chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Which.
    pub id: SegmentId,
    /// Positions to take from it, from its start on.
    pub range: Range<u32>,
}

/// Segments that together hold a prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chain {
    /// Tokens of the prefix.
    pub covered: u32,
    /// From the first token on, without a gap.
    pub links: Vec<Link>,
}

#[derive(Debug)]
struct Entry {
    head: Arc<SegmentHead>,
    /// Where it ends among the paths.
    end: NodeId,
    children: BTreeSet<SegmentId>,
    pins: u32,
    /// When it was used last; unique, greater = later.
    used: u64,
}

/// See the module.
#[derive(Debug)]
pub struct SegmentIndex {
    entries: HashMap<SegmentId, Entry>,
    paths: Paths,
    /// Leaves that may go, by use.
    order: BTreeSet<(u64, SegmentId)>,
    bytes: u64,
    budget: u64,
    ticks: u64,
}

impl SegmentIndex {
    /// An empty index for so many bytes of files.
    pub fn new(budget: u64) -> Self {
        Self {
            entries: HashMap::new(),
            paths: Paths::default(),
            order: BTreeSet::new(),
            bytes: 0,
            budget,
            ticks: 0,
        }
    }

    /// Segments.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of their files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Most bytes that they may have.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// All of them, in no order.
    pub fn heads(&self) -> impl Iterator<Item = &Arc<SegmentHead>> {
        self.entries.values().map(|entry| &entry.head)
    }

    /// A segment's head.
    pub fn head(&self, id: SegmentId) -> Option<&Arc<SegmentHead>> {
        self.entries.get(&id).map(|entry| &entry.head)
    }

    /// Takes a segment in, and returns those whose files are to be removed: for the budget, the new one
    /// last of all; or the new one alone where all of its tokens are there already, or what it builds
    /// on is not.
    #[must_use = "files of these are to be removed"]
    pub fn insert(&mut self, head: SegmentHead) -> Vec<SegmentId> {
        let id = head.id;
        let parent_fits = match head.parent {
            None => head.start == 0,
            Some(parent) => self.head(parent).is_some_and(|parent| parent.carries(&head)),
        };
        if !parent_fits || self.entries.contains_key(&id) || head.tokens.is_empty() {
            return if self.entries.contains_key(&id) { Vec::new() } else { vec![id] };
        }
        let parent = head.parent;
        let mut path = parent.map(|parent| self.path(parent)).unwrap_or_default();
        path.truncate(head.start as usize);
        path.extend_from_slice(&head.tokens);
        let covered = self.paths.deepest(&head.namespace, &path).map_or(0, |(covered, _)| covered);
        if covered as usize == path.len() {
            return vec![id];
        }
        self.bytes += head.bytes;
        self.ticks += 1;
        let (head, used) = (Arc::new(head), self.ticks);
        let above = parent.and_then(|parent| self.entries.get(&parent)).map(|parent| parent.end);
        let end = self.paths.add(&head, above);
        self.entries.insert(id, Entry { head, end, children: BTreeSet::new(), pins: 0, used });
        self.rank(id);
        if let Some(parent) = parent {
            self.change(parent, |entry| {
                entry.children.insert(id);
            });
        }
        self.shrink(Some(id))
    }

    /// Takes in what a folder holds, the least recently used first; returns what is beyond the budget.
    #[must_use = "files of these are to be removed"]
    pub fn restore(&mut self, heads: Vec<SegmentHead>) -> Vec<SegmentId> {
        let budget = std::mem::replace(&mut self.budget, u64::MAX);
        let by_use: Vec<SegmentId> = heads.iter().map(|head| head.id).collect();
        let mut heads = heads;
        // Parents before their children.
        heads.sort_by_key(|head| head.start);
        let mut gone: Vec<SegmentId> = heads.into_iter().flat_map(|head| self.insert(head)).collect();
        for id in by_use {
            self.ticks += 1;
            let now = self.ticks;
            self.change(id, |entry| entry.used = now);
        }
        self.budget = budget;
        gone.extend(self.shrink(None));
        gone
    }

    /// Gives leaves up until the budget is kept; `last` only where no other helps.
    fn shrink(&mut self, last: Option<SegmentId>) -> Vec<SegmentId> {
        let mut gone = Vec::new();
        while self.bytes > self.budget {
            let others = self.order.iter().map(|(_, leaf)| *leaf).find(|leaf| Some(*leaf) != last);
            let Some(victim) = others.or_else(|| self.order.first().map(|(_, leaf)| *leaf)) else { break };
            self.take_out(victim);
            gone.push(victim);
        }
        gone
    }

    /// The segments that hold the longest prefix of `tokens`.
    pub fn longest(&self, namespace: &str, tokens: &[TokenId]) -> Option<Chain> {
        let (covered, last) = self.paths.deepest(namespace, tokens)?;
        let (mut links, mut end, mut next) = (Vec::new(), covered, Some(last));
        while let Some(head) = next {
            links.push(Link { id: head.id, range: head.start..end });
            end = head.start;
            next = head.parent.and_then(|parent| self.head(parent));
        }
        links.reverse();
        (end == 0).then_some(Chain { covered, links })
    }

    /// A chain was used.
    pub fn touch(&mut self, chain: &Chain) {
        // Parents after their children: what others build on is the last to go.
        for link in chain.links.iter().rev() {
            self.ticks += 1;
            let now = self.ticks;
            self.change(link.id, |entry| entry.used = now);
        }
    }

    /// Keeps a segment from being given up, until it is unpinned as often.
    pub fn pin(&mut self, id: SegmentId) {
        self.change(id, |entry| entry.pins += 1);
    }

    /// Takes one pin away.
    pub fn unpin(&mut self, id: SegmentId) {
        self.change(id, |entry| entry.pins = entry.pins.saturating_sub(1));
    }

    /// Forgets a segment and all that build on it; their files are to be removed.
    #[must_use = "files of these are to be removed"]
    pub fn remove(&mut self, id: SegmentId) -> Vec<SegmentId> {
        let (mut gone, mut next) = (Vec::new(), vec![id]);
        while let Some(id) = next.pop() {
            if let Some(entry) = self.entries.get(&id) {
                gone.push(id);
                next.extend(&entry.children);
            }
        }
        // Children first: each is a leaf when its turn comes.
        gone.reverse();
        gone.iter().for_each(|id| self.take_out(*id));
        gone
    }

    /// Paths that no other goes on from, of one namespace, the latest used first.
    pub fn ends<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = Vec<TokenId>> + 'a {
        let leaves = self.order.iter().rev().filter_map(|(_, id)| self.head(*id));
        leaves.filter(move |head| *head.namespace == *namespace).map(|head| self.path(head.id))
    }

    /// Forgets the end of a path, and all before it that nothing else builds on; the files are to be
    /// removed.
    #[must_use = "files of these are to be removed"]
    pub fn remove_path(&mut self, namespace: &str, tokens: &[TokenId]) -> Vec<SegmentId> {
        let links = self.longest(namespace, tokens).map(|chain| chain.links).unwrap_or_default();
        let mut gone = Vec::new();
        for link in links.into_iter().rev() {
            if self.entries.get(&link.id).is_none_or(|entry| !entry.children.is_empty()) {
                break;
            }
            self.take_out(link.id);
            gone.push(link.id);
        }
        gone
    }

    /// All tokens up to a segment's end.
    fn path(&self, id: SegmentId) -> Vec<TokenId> {
        let (mut parts, mut end, mut next) = (Vec::new(), u32::MAX, Some(id));
        while let Some(head) = next.and_then(|id| self.head(id)) {
            let count = end.min(head.end()).saturating_sub(head.start) as usize;
            parts.push(head.tokens.get(..count).unwrap_or(&[]));
            end = end.min(head.start);
            next = head.parent;
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    /// Forgets a leaf; its parent may become one.
    fn take_out(&mut self, id: SegmentId) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.order.remove(&(entry.used, id));
        self.bytes -= entry.head.bytes;
        self.paths.remove(&entry.head, entry.end);
        if let Some(parent) = entry.head.parent {
            self.change(parent, |entry| {
                entry.children.remove(&id);
            });
        }
    }

    fn change(&mut self, id: SegmentId, change: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        self.order.remove(&(entry.used, id));
        change(entry);
        self.rank(id);
    }

    fn rank(&mut self, id: SegmentId) {
        if let Some(entry) =
            self.entries.get(&id).filter(|entry| entry.children.is_empty() && entry.pins == 0)
        {
            self.order.insert((entry.used, id));
        }
    }

    /// Fails where the paths break an invariant.
    #[cfg(test)]
    pub(super) fn check(&self) {
        self.paths.check(self.entries.len());
    }
}
