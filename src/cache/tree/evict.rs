//! What goes first.

use std::hash::Hash;

use super::PrefixTree;
use super::arena::{Index, Node};

/// Requests that pass by and take one token's worth of one use away.
const FADING: f64 = 16.0;
/// Uses that count: however often it was used, what is not used any more goes in the end.
const MOST_USES: u32 = 64;
/// Attending to so many positions costs as much again as all else of a token.
const ATTENDED: f64 = 4096.0;
/// How much more a session's newest tail is worth, and what a client marked.
const FAVOURED: f64 = 4.0;
/// Ghosts beyond this many tokens are forgotten, the oldest first.
const MOST_GHOST_TOKENS: u64 = 1 << 18;
/// The same of tails.
const MOST_GHOSTS: usize = 1 << 12;

/// A tail that was given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Evicted<P> {
    /// This payload is not needed any more.
    Close(P),
    /// Cut this payload back to so many tokens; it stays in the tree.
    Truncate(P, u32),
}

/// What keeping a node's tokens is worth, per byte of theirs: the cost of computing one again times
/// how likely that is.
fn value<P>(node: &Node<P>) -> f64 {
    let middle = f64::from(node.start + node.end()) / 2.0;
    let cost = 1.0 + middle / ATTENDED;
    let favour = |is_on: bool| if is_on { FAVOURED } else { 1.0 };
    let likely = f64::from((1 + node.uses).min(MOST_USES));
    node.used as f64 / FADING + cost * likely * favour(node.favours > 0) * favour(node.hinted)
}

/// The place in the order: bits of a number that is not negative sort as the number does.
pub(super) fn rank<P>(node: &Node<P>) -> u64 {
    value(node).to_bits()
}

impl<P: Copy + Eq + Hash> PrefixTree<P> {
    /// Gives up the least valuable tail that nobody pins or has been lent.
    #[must_use = "what is handed back must be freed"]
    pub fn evict(&mut self) -> Option<Evicted<P>> {
        let victim = self.order.first()?.1;
        self.give_up(victim)
    }

    /// The same where nothing else helps: pinned ones as well.
    #[must_use = "what is handed back must be freed"]
    pub fn evict_pinned(&mut self) -> Option<Evicted<P>> {
        let pinned = self.arena.iter().filter(|(_, node)| node.payload.is_some() && !node.lent);
        let victim = pinned.min_by_key(|(_, node)| rank(node)).map(|(index, _)| index)?;
        self.give_up(victim)
    }

    fn give_up(&mut self, victim: Index) -> Option<Evicted<P>> {
        let node = self.node(victim)?;
        let (payload, parent) = (node.payload?, node.parent?);
        self.sums.evicted += 1;
        self.take_out(payload);
        let name = self.arena.name(victim);
        self.ghosts.push_back(name);
        // The tokens above are worth keeping by themselves, if nothing else holds them.
        let above = self.node(parent)?;
        let (end, held) = (above.end(), above.held);
        let moves = self.storage.trims && end > 0 && held == 0;
        if moves {
            self.put(parent, payload, false);
        }
        self.forget_ghosts();
        Some(if moves { Evicted::Truncate(payload, end) } else { Evicted::Close(payload) })
    }

    /// Forgets the oldest tokens without state where there are too many.
    pub(super) fn forget_ghosts(&mut self) {
        while self.sums.ghost_tokens > MOST_GHOST_TOKENS || self.ghosts.len() > MOST_GHOSTS {
            let Some(oldest) = self.ghosts.pop_front() else { return };
            if let Some(index) = self.arena.resolve(oldest) {
                self.tidy(index);
            }
        }
    }

    /// Removes a leaf without state, and then what becomes one.
    pub(super) fn tidy(&mut self, index: Index) {
        let mut next = Some(index);
        while let Some(index) = next {
            let Some(node) = self.node(index) else { return };
            // Pins and favours are about state, and there is none.
            let kept = node.held > 0 || !node.children.is_empty();
            if kept {
                return;
            }
            let Some(parent) = node.parent else {
                // Namespaces come from clients: an empty one goes.
                self.arena.remove(index);
                return self.roots.retain(|_, root| *root != index);
            };
            self.change(index, |node| node.label.clear());
            self.arena.remove(index);
            if let Some(parent) = self.arena.get_mut(parent) {
                parent.abandon(index);
            }
            next = Some(parent);
        }
    }
}
