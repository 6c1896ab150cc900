//! Finished rows by their tokens, and the longest prefix that one of them shares with
//! a new prompt.
//!
//! Whole rows in memory, a linear look over at most `max_entries` of them (each stops at
//! its first difference). Not a tree, and nothing on disk. No entry is a prefix of
//! another. The payload is owned here until it is handed back; it is never freed here.

use crate::types::TokenId;

/// Names an entry as long as it is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryId(u64);

/// The best entry for a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found<P> {
    /// Which entry.
    pub entry: EntryId,
    /// Tokens that it shares with the prompt, at least one.
    pub length: u32,
    /// What it holds.
    pub payload: P,
}

/// What the index did so far. `entries` and `tokens` are of now, the rest are sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefixStatistics {
    /// Rows kept.
    pub entries: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Prompts that used a prefix.
    pub hits: u64,
    /// Prompts that found none.
    pub misses: u64,
    /// Tokens of the used prefixes.
    pub hit_tokens: u64,
    /// Rows given up for newer ones or for memory.
    pub evicted: u64,
}

#[derive(Debug)]
struct Entry<P> {
    id: EntryId,
    tokens: Vec<TokenId>,
    payload: P,
    /// When it was last used; unique, greater = later.
    used: u64,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex<P> {
    entries: Vec<Entry<P>>,
    /// Given up from outside, to be freed by whoever can.
    released: Vec<P>,
    max_entries: usize,
    ticks: u64,
    /// Without `entries`; `tokens` follows every change, because it is asked for in every step.
    sums: PrefixStatistics,
}

impl<P: Copy> PrefixIndex<P> {
    /// An empty index for `max_entries` rows; with 0 nothing is ever kept.
    pub fn new(max_entries: usize) -> Self {
        Self {
            entries: Vec::new(),
            released: Vec::new(),
            max_entries,
            ticks: 0,
            sums: PrefixStatistics::default(),
        }
    }

    /// Whether rows are kept at all.
    pub fn is_enabled(&self) -> bool {
        self.max_entries > 0
    }

    /// The entry that shares most tokens with `prompt`, the latest used one among equals.
    /// Counts nothing: see [`Self::hit`] and [`Self::miss`].
    pub fn longest(&self, prompt: &[TokenId]) -> Option<Found<P>> {
        self.entries
            .iter()
            .map(|entry| (shared(&entry.tokens, prompt), entry))
            .filter(|(length, _)| *length > 0)
            .max_by_key(|(length, entry)| (*length, entry.used))
            .map(|(length, entry)| Found {
                entry: entry.id,
                length: u32::try_from(length).unwrap_or(u32::MAX),
                payload: entry.payload,
            })
    }

    /// A prompt used `length` tokens of this entry, which becomes the latest used.
    pub fn hit(&mut self, entry: EntryId, length: u32) {
        self.touch(entry);
        self.sums.hits += 1;
        self.sums.hit_tokens += u64::from(length);
    }

    /// Makes an entry the latest used, so that it is the last to be given up.
    pub fn touch(&mut self, entry: EntryId) {
        let now = self.tick();
        if let Some(entry) = self.entries.iter_mut().find(|other| other.id == entry) {
            entry.used = now;
        }
    }

    /// A prompt used nothing.
    pub fn miss(&mut self) {
        self.sums.misses += 1;
    }

    /// Keeps a finished row and returns every payload that is not needed any more: of
    /// rows that the new one extends, of the oldest ones beyond the limit, or the new
    /// one's own when a kept row extends it already.
    #[must_use = "what is handed back must be freed"]
    pub fn insert(&mut self, tokens: Vec<TokenId>, payload: P) -> Vec<P> {
        let mut given_up = Vec::new();
        if self.max_entries == 0 || tokens.is_empty() {
            given_up.push(payload);
            return given_up;
        }
        let now = self.tick();
        if let Some(longer) = self.entries.iter_mut().find(|entry| entry.tokens.starts_with(&tokens)) {
            longer.used = now;
            given_up.push(payload);
            return given_up;
        }
        self.keep(|entry| {
            let extended = tokens.starts_with(&entry.tokens);
            if extended {
                given_up.push(entry.payload);
            }
            !extended
        });
        self.sums.tokens += tokens.len() as u64;
        self.entries.push(Entry { id: EntryId(now), tokens, payload, used: now });
        while self.entries.len() > self.max_entries {
            given_up.extend(self.evict());
        }
        given_up
    }

    /// Gives up the entry that was not used for longest.
    #[must_use = "what is handed back must be freed"]
    pub fn evict(&mut self) -> Option<P> {
        let oldest = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.used)?.0;
        let oldest = self.entries.swap_remove(oldest);
        self.sums.evicted += 1;
        self.sums.tokens -= oldest.tokens.len() as u64;
        Some(oldest.payload)
    }

    /// Forgets one entry, for a payload that turned out to be void.
    pub fn forget(&mut self, entry: EntryId) {
        self.keep(|other| other.id != entry);
    }

    /// Forgets entries whose payload is void, without handing anything back.
    pub fn retain(&mut self, good: impl Fn(P) -> bool) {
        self.keep(|entry| good(entry.payload));
        self.released.retain(|payload| good(*payload));
    }

    /// Gives everything up, to be collected with [`Self::take_released`].
    pub fn release_all(&mut self) {
        self.released.extend(self.entries.drain(..).map(|entry| entry.payload));
        self.sums.tokens = 0;
    }

    /// Payloads given up by [`Self::release_all`] since the last call.
    #[must_use = "what is handed back must be freed"]
    pub fn take_released(&mut self) -> Vec<P> {
        std::mem::take(&mut self.released)
    }

    /// Numbers so far.
    pub fn statistics(&self) -> PrefixStatistics {
        PrefixStatistics { entries: self.entries.len() as u64, ..self.sums }
    }

    fn keep(&mut self, mut good: impl FnMut(&Entry<P>) -> bool) {
        let tokens = &mut self.sums.tokens;
        self.entries.retain(|entry| {
            let good = good(entry);
            if !good {
                *tokens -= entry.tokens.len() as u64;
            }
            good
        });
    }

    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }
}

fn shared(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(numbers: &[u32]) -> Vec<TokenId> {
        numbers.iter().copied().map(TokenId).collect()
    }

    #[test]
    fn a_longer_row_replaces_the_one_it_extends() {
        let mut index = PrefixIndex::new(4);
        assert!(index.insert(ids(&[1, 2]), 'a').is_empty());
        assert_eq!(index.insert(ids(&[1, 2, 3]), 'b'), ['a']);
        assert_eq!(index.insert(ids(&[1]), 'c'), ['c'], "a kept row has it all");
        assert_eq!(index.statistics().entries, 1);
        let found = index.longest(&ids(&[1, 2, 9])).unwrap();
        assert_eq!((found.length, found.payload), (2, 'b'));
        assert_eq!(index.longest(&ids(&[7])), None);
    }

    #[test]
    fn the_row_unused_for_longest_goes_first() {
        let mut index = PrefixIndex::new(2);
        assert!(index.insert(ids(&[1]), 'a').is_empty());
        assert!(index.insert(ids(&[2]), 'b').is_empty());
        let found = index.longest(&ids(&[1, 5])).unwrap();
        index.hit(found.entry, found.length);
        assert_eq!(index.insert(ids(&[3]), 'c'), ['b']);
        assert_eq!(index.evict(), Some('a'));
        assert_eq!(index.evict(), Some('c'));
        assert_eq!(index.evict(), None);
        assert_eq!((index.statistics().evicted, index.statistics().tokens), (3, 0));
    }

    #[test]
    fn what_is_released_is_handed_back_once() {
        let mut index = PrefixIndex::new(2);
        assert!(index.insert(ids(&[1]), 'a').is_empty());
        index.release_all();
        assert_eq!(index.longest(&ids(&[1])), None);
        assert_eq!(index.take_released(), ['a']);
        assert!(index.take_released().is_empty());
        assert_eq!(index.statistics(), PrefixStatistics::default());
    }

    #[test]
    fn a_touched_row_is_the_last_to_go_and_forgotten_ones_are_not_counted() {
        let mut index = PrefixIndex::new(3);
        for (tokens, payload) in [(&[1, 1][..], 'a'), (&[2][..], 'b'), (&[3, 3, 3][..], 'c')] {
            assert!(index.insert(ids(tokens), payload).is_empty());
        }
        index.touch(index.longest(&ids(&[1])).unwrap().entry);
        assert_eq!(index.evict(), Some('b'));
        assert_eq!(index.statistics().tokens, 5);
        index.retain(|payload| payload != 'c');
        assert_eq!(index.statistics().tokens, 2);
        index.forget(index.longest(&ids(&[1])).unwrap().entry);
        assert_eq!((index.statistics().tokens, index.statistics().hits), (0, 0));
    }

    #[test]
    fn a_disabled_index_keeps_nothing() {
        let mut index = PrefixIndex::new(0);
        assert_eq!(index.insert(ids(&[1]), 'a'), ['a']);
        assert_eq!(index.longest(&ids(&[1])), None);
    }

    proptest! {
        /// Every payload is either kept or was handed back, exactly once, and the match
        /// is the longest that any kept row gives.
        #[test]
        fn payloads_are_conserved_and_matches_are_longest(
            rows in prop::collection::vec(prop::collection::vec(0u32..3, 1..6), 1..40),
            probe in prop::collection::vec(0u32..3, 1..6),
            limit in 1usize..6,
        ) {
            let mut index = PrefixIndex::new(limit);
            let mut kept: Vec<(usize, Vec<TokenId>)> = Vec::new();
            for (number, row) in rows.iter().enumerate() {
                let row = ids(row);
                kept.push((number, row.clone()));
                for gone in index.insert(row, number) {
                    let before = kept.len();
                    kept.retain(|(other, _)| *other != gone);
                    prop_assert_eq!(kept.len(), before - 1);
                }
                prop_assert!(kept.len() <= limit);
                prop_assert_eq!(index.statistics().entries, kept.len() as u64);
                let tokens: usize = kept.iter().map(|(_, row)| row.len()).sum();
                prop_assert_eq!(index.statistics().tokens, tokens as u64);
            }
            let probe = ids(&probe);
            let best = kept.iter().map(|(_, row)| shared(row, &probe)).max().unwrap_or(0);
            prop_assert_eq!(index.longest(&probe).map_or(0, |found| found.length as usize), best);
        }
    }
}
