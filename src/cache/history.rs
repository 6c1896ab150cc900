//! Which ids texts were made of: prompts with their answers, so that the next turn of a
//! conversation is told to the model in the very tokens that it produced.
//!
//! A model may spell a text in other tokens than its tokenizer would, and state that was kept for
//! the ones is of no use for the others. Remembering costs the compute thread a push; decoding and
//! looking up is done by those who prepare prompts. What is found is a *candidate* by length and
//! hash of its text: whoever asks compares it with what it has.
//!
//! Knows no tokenizer: the text of ids comes from a closure.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::types::TokenId;

/// Lists remembered.
const MOST_LISTS: usize = 1024;
/// Tokens of all of them.
const MOST_TOKENS: usize = 4 << 20;
/// Lists that wait to be looked at; beyond it the oldest is forgotten.
const MOST_PENDING: usize = 256;
/// Base of the hash; odd.
const BASE: u64 = 0x9E37_79B9_7F4A_7C15;

/// A text's length in bytes and its hash.
type Key = (usize, u64);

#[derive(Debug)]
struct List {
    ids: Arc<[TokenId]>,
    /// When it was remembered or found last; unique.
    used: u64,
}

/// One tokenizer's lists.
#[derive(Debug, Default)]
struct Lists {
    by_text: HashMap<Key, List>,
    /// How many there are of each length.
    lengths: BTreeMap<usize, u32>,
}

#[derive(Debug, Default)]
struct Table {
    models: HashMap<Arc<str>, Lists>,
    /// By use, the oldest first; some are not current any more.
    order: VecDeque<(u64, Arc<str>, Key)>,
    lists: usize,
    tokens: usize,
    ticks: u64,
}

/// See the module. Shared by threads.
#[derive(Debug, Default)]
pub struct TokenHistory {
    pending: Mutex<VecDeque<(Arc<str>, Vec<TokenId>)>>,
    table: Mutex<Table>,
}

impl TokenHistory {
    /// Under which name ids are remembered: those of different models or salts do not meet.
    pub fn of(model: &str, salt: Option<&str>) -> String {
        format!("{model}\0{}", salt.unwrap_or_default())
    }

    /// Remembers ids under a name, see [`TokenHistory::of`]. Takes no time.
    pub fn remember(&self, model: &str, ids: Vec<TokenId>) {
        if ids.is_empty() {
            return;
        }
        let mut pending = lock(&self.pending);
        pending.push_back((model.into(), ids));
        if pending.len() > MOST_PENDING {
            pending.pop_front();
        }
    }

    /// Forgets all.
    pub fn clear(&self) {
        lock(&self.pending).clear();
        *lock(&self.table) = Table::default();
    }

    /// Lists whose text may be the beginning of `text`, but not all of it; the longest first.
    /// `spell` gives the text of this model's ids.
    pub fn candidates(
        &self,
        model: &str,
        text: &[u8],
        spell: impl Fn(&[TokenId]) -> Vec<u8>,
    ) -> Vec<Arc<[TokenId]>> {
        let mut fresh = Vec::new();
        lock(&self.pending).retain_mut(|(of, ids)| {
            let mine = **of == *model;
            if mine {
                fresh.push((Arc::clone(of), std::mem::take(ids)));
            }
            !mine
        });
        // Without the lock: that takes longer.
        let fresh: Vec<_> = fresh
            .into_iter()
            .map(|(of, ids)| {
                let text = spell(&ids);
                (of, (text.len(), hash(&text)), ids)
            })
            .collect();
        let mut table = lock(&self.table);
        for (of, key, ids) in fresh {
            table.add(&of, key, ids.into());
        }
        table.find(model, text)
    }
}

impl Table {
    fn add(&mut self, model: &Arc<str>, key: Key, ids: Arc<[TokenId]>) {
        if key.0 == 0 || ids.len() > MOST_TOKENS {
            return;
        }
        self.ticks += 1;
        let used = self.ticks;
        let lists = self.models.entry(Arc::clone(model)).or_default();
        self.tokens += ids.len();
        match lists.by_text.insert(key, List { ids, used }) {
            Some(older) => self.tokens -= older.ids.len(),
            None => {
                self.lists += 1;
                *lists.lengths.entry(key.0).or_default() += 1;
            }
        }
        self.order.push_back((used, Arc::clone(model), key));
        while self.lists > MOST_LISTS || self.tokens > MOST_TOKENS || self.order.len() > 4 * MOST_LISTS {
            let Some((used, model, key)) = self.order.pop_front() else { return };
            self.forget(used, &model, key);
        }
    }

    /// Forgets a list that was not used since.
    fn forget(&mut self, used: u64, model: &Arc<str>, key: Key) {
        let Some(lists) = self.models.get_mut(model) else { return };
        if lists.by_text.get(&key).is_none_or(|list| list.used != used) {
            return;
        }
        let Some(list) = lists.by_text.remove(&key) else { return };
        self.lists -= 1;
        self.tokens -= list.ids.len();
        if let Some(count) = lists.lengths.get_mut(&key.0) {
            *count -= 1;
            if *count == 0 {
                lists.lengths.remove(&key.0);
            }
        }
    }

    fn find(&mut self, model: &str, text: &[u8]) -> Vec<Arc<[TokenId]>> {
        let Some(lists) = self.models.get_mut(model) else { return Vec::new() };
        let (mut found, mut value, mut done) = (Vec::new(), 0, 0);
        for length in lists.lengths.range(..text.len()).map(|(length, _)| *length) {
            value = extend(value, &text[done..length]);
            done = length;
            let key = (length, value);
            if let Some(list) = lists.by_text.get_mut(&key) {
                found.push((list.ids.clone(), key));
            }
        }
        found.reverse();
        if let Some(((_, key), (name, _))) = found.first().zip(self.models.get_key_value(model)) {
            let (key, name) = (*key, Arc::clone(name));
            self.touch(&name, key);
        }
        found.into_iter().map(|(ids, _)| ids).collect()
    }

    fn touch(&mut self, model: &Arc<str>, key: Key) {
        self.ticks += 1;
        let used = self.ticks;
        if let Some(list) = self.models.get_mut(model).and_then(|lists| lists.by_text.get_mut(&key)) {
            list.used = used;
            self.order.push_back((used, Arc::clone(model), key));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hash(text: &[u8]) -> u64 {
    extend(0, text)
}

/// The hash of a text that goes on with `more`.
fn extend(value: u64, more: &[u8]) -> u64 {
    more.iter().fold(value, |value, byte| {
        let mixed = (value ^ u64::from(*byte)).wrapping_add(1).wrapping_mul(BASE);
        mixed ^ (mixed >> 29)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each id is a byte.
    fn spell(ids: &[TokenId]) -> Vec<u8> {
        ids.iter().map(|id| id.0 as u8).collect()
    }

    fn ids(text: &str) -> Vec<TokenId> {
        text.bytes().map(|byte| TokenId(u32::from(byte))).collect()
    }

    fn found(history: &TokenHistory, model: &str, text: &str) -> Vec<String> {
        let all = history.candidates(model, text.as_bytes(), spell);
        all.iter().map(|ids| String::from_utf8(spell(ids)).unwrap()).collect()
    }

    #[test]
    fn the_longest_text_that_is_not_all_of_it_comes_first() {
        let (history, model) = (TokenHistory::default(), "m");
        for text in ["a", "a b", "a b c", "x"] {
            history.remember(model, ids(text));
        }
        history.remember("other", ids("a b c d"));
        assert_eq!(found(&history, "m", "a b c d"), ["a b c", "a b", "a"]);
        assert_eq!(found(&history, "m", "a b c"), ["a b", "a"]);
        assert_eq!(found(&history, "m", "b"), [""; 0]);
        assert_eq!(found(&history, "other", "a b c d e"), ["a b c d"]);
        assert_eq!(found(&history, "nobody", "a"), [""; 0]);
    }

    #[test]
    fn salts_do_not_see_what_others_answers_were_made_of() {
        let history = TokenHistory::default();
        history.remember(&TokenHistory::of("m", Some("secret")), ids("a b"));
        assert_eq!(found(&history, &TokenHistory::of("m", None), "a b c"), [""; 0]);
        assert_eq!(found(&history, &TokenHistory::of("m", Some("")), "a b c"), [""; 0]);
        assert_eq!(found(&history, &TokenHistory::of("m", Some("secret")), "a b c"), ["a b"]);
        assert_eq!(TokenHistory::of("m", None), TokenHistory::of("m", Some("")));
    }

    #[test]
    fn what_is_cleared_is_gone_whether_it_was_looked_at_or_not() {
        let history = TokenHistory::default();
        history.remember("m", ids("a"));
        assert_eq!(found(&history, "m", "ab"), ["a"]);
        history.remember("m", ids("b"));
        history.clear();
        assert_eq!((found(&history, "m", "ab"), found(&history, "m", "bc")), (vec![], vec![]));
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let (history, model) = (TokenHistory::default(), "m");
        history.remember(model, ids("used"));
        for number in 0..3 * MOST_LISTS {
            history.remember(model, ids(&format!("{number:06}")));
            assert!(number % 100 != 0 || found(&history, "m", "used now") == ["used"], "{number}");
        }
        found(&history, "m", "");
        let table = lock(&history.table);
        assert!(table.lists <= MOST_LISTS && table.order.len() <= 4 * MOST_LISTS + 1);
        let lists = &table.models["m"];
        assert_eq!(lists.by_text.len(), table.lists);
        assert_eq!(lists.lengths.values().sum::<u32>() as usize, table.lists);
        let tokens: usize = lists.by_text.values().map(|list| list.ids.len()).sum();
        assert_eq!(tokens, table.tokens);
    }

    #[test]
    fn a_huge_list_pushes_others_out_and_no_more_than_it_must() {
        let (history, model) = (TokenHistory::default(), "m");
        history.remember(model, ids("small"));
        history.remember(model, vec![TokenId(1); MOST_TOKENS - 2]);
        assert_eq!(found(&history, "m", "small one"), [""; 0]);
        history.remember(model, vec![TokenId(1); MOST_TOKENS + 1]);
        history.remember(model, ids("a"));
        assert_eq!(found(&history, "m", "ab"), ["a"]);
    }
}
