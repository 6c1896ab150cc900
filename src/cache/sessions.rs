//! Conversations by the names that clients give them: whose newest state is worth more than others'.
//!
//! A label and nothing else: what is served is found by tokens, so a conversation that was edited or
//! branched is looked up like any other. Bounded: the one that was not used for longest goes first,
//! and one that was idle for too long. What that means for the tree is told to the caller, who has it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::tree::{Namespace, NodeRef};
use crate::types::TokenId;

/// Conversations remembered.
const MOST_SESSIONS: usize = 1024;
/// Conversations that may be pinned.
const MOST_PINNED: usize = 64;
/// Tokens of all paths that are remembered; beyond it the oldest conversations lose theirs.
const MOST_TOKENS: usize = 4 << 20;
/// After so long without a request a conversation that is not pinned is forgotten.
const IDLE: Duration = Duration::from_secs(3600);

/// A conversation's name, and who may use it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SessionKey {
    /// An API key's hash, or empty.
    pub owner: String,
    /// The client's name for it.
    pub id: String,
}

/// What is known of a conversation.
#[derive(Clone, PartialEq, Debug)]
pub struct Session {
    /// Where its newest state ends.
    pub tail: NodeRef,
    /// Whose state it shares.
    pub namespace: Namespace,
    /// All tokens up to there; empty where too many are remembered.
    pub path: Arc<[TokenId]>,
    /// Requests so far.
    pub turns: u32,
    /// When the last one ended, on the clock's scale.
    pub used: Duration,
    /// Not given up and not forgotten.
    pub pinned: bool,
}

/// What the tree is to be told of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It is a session's tail from now on, or not any more.
    Favour(NodeRef, bool),
    /// It is pinned from now on, or not any more.
    Pin(NodeRef, bool),
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sessions {
    all: HashMap<SessionKey, Session>,
}

impl Sessions {
    /// A conversation's state ends at `tail` now.
    #[must_use = "the tree is to be told"]
    pub fn touch(
        &mut self,
        key: SessionKey,
        tail: NodeRef,
        namespace: &Namespace,
        path: &[TokenId],
        now: Duration,
    ) -> Vec<Change> {
        let mut changes = self.expire(now);
        let before = self.all.get(&key);
        let (turns, pinned) = before.map_or((0, false), |session| (session.turns, session.pinned));
        changes.extend(before.into_iter().flat_map(let_go));
        changes.push(Change::Favour(tail, true));
        changes.extend(pinned.then_some(Change::Pin(tail, true)));
        let namespace = namespace.clone();
        let path = path.into();
        self.all.insert(key, Session { tail, namespace, path, turns: turns + 1, used: now, pinned });
        self.bound_paths();
        if self.all.len() > MOST_SESSIONS {
            let oldest = self.all.iter().min_by_key(|(_, session)| (session.pinned, session.used));
            let oldest = oldest.map(|(key, _)| key.clone());
            changes.extend(
                oldest.and_then(|key| self.forget(&key)).map(|(_, changes)| changes).unwrap_or_default(),
            );
        }
        changes
    }

    fn bound_paths(&mut self) {
        let mut tokens: usize = self.all.values().map(|session| session.path.len()).sum();
        while tokens > MOST_TOKENS {
            let others = self.all.values_mut().filter(|session| !session.path.is_empty());
            let Some(oldest) = others.min_by_key(|session| session.used) else { return };
            tokens -= std::mem::take(&mut oldest.path).len();
        }
    }

    /// Forgets conversations that were idle for too long.
    #[must_use = "the tree is to be told"]
    pub fn expire(&mut self, now: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        self.all.retain(|_, session| {
            let is_kept = session.pinned || now.saturating_sub(session.used) < IDLE;
            if !is_kept {
                changes.extend(let_go(session));
            }
            is_kept
        });
        changes
    }

    /// Pins a conversation, or lets it go. `None` where there is none of that name, or too many are
    /// pinned.
    pub fn pin(&mut self, key: &SessionKey, is_on: bool) -> Option<Vec<Change>> {
        let pinned = self.all.values().filter(|session| session.pinned).count();
        let session = self.all.get_mut(key)?;
        if session.pinned == is_on {
            return Some(Vec::new());
        }
        if is_on && pinned >= MOST_PINNED {
            return None;
        }
        session.pinned = is_on;
        Some(vec![Change::Pin(session.tail, is_on)])
    }

    /// Forgets a conversation.
    pub fn forget(&mut self, key: &SessionKey) -> Option<(Session, Vec<Change>)> {
        let session = self.all.remove(key)?;
        let changes = let_go(&session).collect();
        Some((session, changes))
    }

    /// Forgets all: the tree is another one.
    pub fn forget_all(&mut self) {
        self.all.clear();
    }

    /// Those of one owner, the latest first.
    pub fn list(&self, owner: &str) -> Vec<(String, Session)> {
        let own = self.all.iter().filter(|(key, _)| key.owner == owner);
        let mut list: Vec<_> = own.map(|(key, session)| (key.id.clone(), session.clone())).collect();
        list.sort_by(|(a, one), (b, other)| other.used.cmp(&one.used).then_with(|| a.cmp(b)));
        list
    }
}

fn let_go(session: &Session) -> impl Iterator<Item = Change> + use<> {
    let pin = session.pinned.then_some(Change::Pin(session.tail, false));
    std::iter::once(Change::Favour(session.tail, false)).chain(pin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::tree::{PrefixTree, Terms};
    use crate::types::TokenId;

    fn key(id: &str) -> SessionKey {
        SessionKey { owner: String::new(), id: id.into() }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A tree with rows of its own, and sessions whose changes it is told.
    #[derive(Debug)]
    struct Both {
        tree: PrefixTree<u32>,
        sessions: Sessions,
    }

    impl Both {
        fn new() -> Self {
            Self { tree: PrefixTree::new(true), sessions: Sessions::default() }
        }

        fn tell(&mut self, changes: Vec<Change>) {
            for change in changes {
                match change {
                    Change::Favour(node, is_on) => self.tree.favour(node, is_on),
                    Change::Pin(node, true) => self.tree.pin(node),
                    Change::Pin(node, false) => self.tree.unpin(node),
                }
            }
        }

        fn turn(&mut self, id: &str, tokens: &[u32], payload: u32, now: u64) {
            let (tokens, name): (Vec<TokenId>, Namespace) =
                (tokens.iter().copied().map(TokenId).collect(), "".into());
            let _given_up = self.tree.insert(&name, &tokens, payload, Terms::default());
            let tail = self.tree.node_of(&name, &tokens).unwrap();
            let changes = self.sessions.touch(key(id), tail, &name, &tokens, at(now));
            self.tell(changes);
        }
    }

    #[test]
    fn a_tail_is_favoured_while_it_is_the_newest_and_pinned_while_it_is_told_so() {
        use crate::cache::tree::Evicted::Close;
        let mut both = Both::new();
        both.turn("a", &[1, 1], 1, 0);
        both.turn("a", &[2, 2], 2, 1);
        both.turn("b", &[3, 3], 3, 2);
        let pinned = both.sessions.pin(&key("b"), true).unwrap();
        both.tell(pinned);
        assert_eq!(both.tree.evict(), Some(Close(1)), "no tail any more");
        both.turn("b", &[3, 3, 4], 4, 3);
        let unpinned = both.sessions.pin(&key("a"), false);
        assert_eq!(unpinned, Some(Vec::new()), "it was not pinned");
        assert_eq!(both.tree.evict(), Some(Close(2)));
        assert_eq!(both.tree.evict(), None, "the pin moved along");
        let (_, changes) = both.sessions.forget(&key("b")).unwrap();
        both.tell(changes);
        assert!(both.tree.evict().is_some());
        assert_eq!(both.sessions.pin(&key("b"), true), None);
    }

    #[test]
    fn sessions_are_bounded_and_idle_ones_expire() {
        let mut both = Both::new();
        for number in 0..MOST_SESSIONS as u32 + 10 {
            both.turn(&number.to_string(), &[number, 1], number, u64::from(number));
        }
        let list = both.sessions.list("");
        assert_eq!(list.len(), MOST_SESSIONS);
        assert_eq!(list[0].0, (MOST_SESSIONS + 9).to_string());
        assert!(list.iter().all(|(id, _)| id.parse::<usize>().unwrap() >= 10));
        let _pinned = both.sessions.pin(&key("10"), true).unwrap();
        let changes = both.sessions.expire(at(10_000));
        assert_eq!(changes.len(), MOST_SESSIONS - 1);
        assert_eq!(both.sessions.list("").len(), 1, "a pinned one stays");
        assert!(both.sessions.list("somebody").is_empty());
    }

    #[test]
    fn the_oldest_conversations_lose_their_paths_first() {
        let mut both = Both::new();
        for number in 0..3u32 {
            let tokens: Vec<u32> =
                (0..MOST_TOKENS as u32 / 2).map(|at| if at == 0 { number } else { 7 }).collect();
            both.turn(&number.to_string(), &tokens, number, u64::from(number));
        }
        let paths: Vec<bool> =
            both.sessions.list("").iter().map(|(_, session)| session.path.is_empty()).collect();
        assert_eq!(paths, [false, false, true]);
    }

    #[test]
    fn no_more_are_pinned_than_may_be() {
        let mut both = Both::new();
        for number in 0..MOST_PINNED as u32 + 1 {
            both.turn(&number.to_string(), &[number, 1], number, 0);
        }
        let pinned = (0..=MOST_PINNED).filter(|id| both.sessions.pin(&key(&id.to_string()), true).is_some());
        assert_eq!(pinned.count(), MOST_PINNED);
    }
}
