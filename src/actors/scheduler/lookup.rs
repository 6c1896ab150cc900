//! Prompt lookup: what followed the last time the same tokens stood here, in the prompt or in the
//! answer so far (Saxena, "Prompt Lookup Decoding", 2023). Pays where answers repeat their prompt:
//! code that is edited, texts that are summarised or quoted.
//!
//! How many tokens are proposed follows from how many were right lately and from what a token
//! costs beside a step; where it doesn't pay nothing is proposed but a probe now and then.

use std::collections::HashMap;

use crate::actors::scheduler::fill::{Fill, Policy, Proposal};
use crate::types::TokenId;

/// Tokens that must stand alike before a place counts as the same.
const ANCHOR: usize = 3;
/// Most tokens of a proposal.
const MAX_PROPOSED: usize = 8;
/// Tokens produced between two probes where proposals do not pay.
const PROBE_EVERY: u32 = 48;
/// Weight of the latest proposal in the moving average.
const NEWEST: f64 = 0.25;
/// Share of right tokens that is assumed before any was seen.
const ASSUMED: f64 = 0.6;

/// See the module. One a row.
#[derive(Debug)]
pub(crate) struct PromptLookup {
    /// Where each run of [`ANCHOR`] tokens was followed last; never by nothing.
    places: HashMap<[TokenId; ANCHOR], usize>,
    /// Tokens taken in.
    seen: usize,
    /// Moving average of the chance that a proposed token is right, given those before it were.
    right: f64,
    proposed: usize,
    since_probe: u32,
}

impl Default for PromptLookup {
    fn default() -> Self {
        Self { places: HashMap::new(), seen: 0, right: ASSUMED, proposed: 0, since_probe: 0 }
    }
}

impl PromptLookup {
    /// Notes every run that has a token after it.
    fn take_in(&mut self, tokens: &[TokenId]) {
        let first = self.seen.max(ANCHOR);
        for end in first..tokens.len() {
            if let Some(anchor) = anchor(&tokens[..end]) {
                self.places.insert(anchor, end);
            }
        }
        self.since_probe =
            self.since_probe.saturating_add((tokens.len() - self.seen.min(tokens.len())) as u32);
        self.seen = tokens.len();
    }
}

fn anchor(tokens: &[TokenId]) -> Option<[TokenId; ANCHOR]> {
    tokens.last_chunk::<ANCHOR>().copied()
}

impl Fill for PromptLookup {
    fn propose(&mut self, tokens: &[TokenId], most: usize) -> Option<Proposal> {
        self.take_in(tokens);
        let place = *self.places.get(&anchor(tokens)?)?;
        let follows = tokens.get(place..)?;
        let tokens = follows.get(..most.min(follows.len()))?.to_vec();
        if tokens.is_empty() {
            return None;
        }
        self.proposed = tokens.len();
        self.since_probe = 0;
        Some(Proposal { tokens, policy: Policy::Verify })
    }

    fn commit(&mut self, taken: usize) {
        // Each right token is one good trial, the first wrong one a bad trial; the rest is unknown.
        let wrong = usize::from(taken < self.proposed);
        let trials = taken + wrong;
        if trials > 0 {
            let share = taken as f64 / trials as f64;
            self.right += NEWEST * (share - self.right);
        }
        self.proposed = 0;
    }

    /// The number that makes most tokens a second, by what is expected to be right:
    /// with k proposed tokens `r + r² + … + rᵏ` are.
    fn worth(&self, rows: usize, step: f64, token: f64) -> usize {
        let rows = rows.max(1) as f64;
        let (mut best, mut best_rate) = (0, rows / step.max(1e-9));
        let (mut expected, mut chance) = (0.0, 1.0);
        for count in 1..=MAX_PROPOSED {
            chance *= self.right;
            expected += chance;
            let rate = (rows + expected) / (step + count as f64 * token).max(1e-9);
            if rate > best_rate {
                (best, best_rate) = (count, rate);
            }
        }
        if best == 0 && self.since_probe >= PROBE_EVERY { 1 } else { best }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Vec<TokenId> {
        text.bytes().map(|byte| TokenId(u32::from(byte))).collect()
    }

    fn text(tokens: &[TokenId]) -> String {
        tokens.iter().map(|token| char::from(token.0 as u8)).collect()
    }

    #[test]
    fn what_followed_the_same_tokens_last_is_proposed() {
        let mut lookup = PromptLookup::default();
        let said = |lookup: &mut PromptLookup, history: &str, most| {
            lookup.propose(&ids(history), most).map(|proposal| text(&proposal.tokens))
        };
        assert_eq!(said(&mut lookup, "the cat sat; the", 4), Some(" cat".into()));
        assert_eq!(
            said(&mut lookup, "the cat sat; the c", 9),
            Some("at sat; the c".into()).map(|s: String| s[..9].into())
        );
        assert_eq!(said(&mut lookup, "the cat sat; the cq", 4), None);
        assert_eq!(said(&mut PromptLookup::default(), "ab", 4), None);
    }

    #[test]
    fn a_later_place_counts_more_than_an_earlier_one() {
        let mut lookup = PromptLookup::default();
        let proposal = lookup.propose(&ids("abcX abcY abc"), 1).unwrap();
        assert_eq!(text(&proposal.tokens), "Y");
    }

    #[test]
    fn right_proposals_grow_and_wrong_ones_stop_but_for_a_probe() {
        let mut lookup = PromptLookup::default();
        let history = ids("the cat sat; the");
        assert!(lookup.worth(1, 5.0, 1.0) > 0, "nothing is known: it is tried");
        for _ in 0..12 {
            let proposed = lookup.propose(&history, 4).unwrap().tokens.len();
            lookup.commit(proposed);
        }
        assert_eq!(lookup.worth(1, 5.0, 1.0), MAX_PROPOSED);
        assert_eq!(lookup.worth(1, 5.0, 6.0), 0, "a token costs more than a step");
        for _ in 0..12 {
            lookup.propose(&history, 4).unwrap();
            lookup.commit(0);
        }
        assert_eq!(lookup.worth(1, 5.0, 1.0), 0);
        let mut longer = history.clone();
        longer.extend((1000..1050).map(TokenId));
        assert_eq!(lookup.propose(&longer, 4).map(|proposal| proposal.tokens), None);
        assert_eq!(lookup.worth(1, 5.0, 1.0), 1, "a probe");
    }
}
