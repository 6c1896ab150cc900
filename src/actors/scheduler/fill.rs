//! Tokens that need not be drawn one by one: known ones and proposed ones.
//!
//! A [`Fill`] looks at what a row has produced and may say what comes next. **Known** tokens are
//! taken as they are (`Assert`); **proposed** ones are computed together with the row's last token
//! in one forward and kept as far as the model itself draws the same (`Verify`), so the answer is
//! the one that single steps would have given. Either way positions are absolute, and a seed
//! replays. Prompt lookup ([`super::lookup`]) is one such source.

use crate::types::TokenId;

/// Longest run of tokens that is taken at once.
pub(crate) const MAX_SPAN: usize = 32;

/// What to do with a [`Proposal`]'s tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(
    not(test),
    allow(dead_code, reason = "tool scaffolding will be asserted; no request can ask for it yet")
)]
pub(crate) enum Policy {
    /// They are what follows: appended unseen.
    Assert,
    /// Kept as far as the model draws the same.
    Verify,
}

/// Tokens that may follow.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Proposal {
    /// In order.
    pub(crate) tokens: Vec<TokenId>,
    /// What to do with them.
    pub(crate) policy: Policy,
}

/// A source of proposals for one row.
pub(crate) trait Fill: Send {
    /// Takes in what is new in `tokens` (prompt and output so far) and proposes at most `most`
    /// tokens. After a proposal comes exactly one [`Fill::commit`], before the next call.
    fn propose(&mut self, tokens: &[TokenId], most: usize) -> Option<Proposal>;

    /// How many tokens of the last proposal were taken.
    fn commit(&mut self, taken: usize);

    /// Tokens worth proposing now, where a step takes `step` seconds for `rows` rows and each
    /// token more adds `token` seconds. Only asked of sources whose proposals are verified.
    fn worth(&self, _rows: usize, _step: f64, _token: f64) -> usize {
        MAX_SPAN
    }
}

/// A proposal as it may be taken: before the first token that ends the answer, which is the
/// model's own decision, at most `most` tokens. A single known token saves no forward.
pub(crate) fn clamped(mut proposal: Proposal, ends: &[TokenId], most: usize) -> Option<Proposal> {
    let end = proposal.tokens.iter().position(|token| ends.contains(token));
    let keep = end.unwrap_or(proposal.tokens.len()).min(most).min(MAX_SPAN);
    proposal.tokens.truncate(keep);
    let least = match proposal.policy {
        Policy::Assert => 2,
        Policy::Verify => 1,
    };
    (proposal.tokens.len() >= least).then_some(proposal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proposal_ends_before_the_end_and_within_what_is_left() {
        let tokens = |ids: &[u32]| ids.iter().copied().map(TokenId).collect::<Vec<_>>();
        let known = |ids: &[u32]| Proposal { tokens: tokens(ids), policy: Policy::Assert };
        let ends = [TokenId(9)];
        assert_eq!(clamped(known(&[1, 2, 9, 3]), &ends, 10), Some(known(&[1, 2])));
        assert_eq!(clamped(known(&[1, 2, 3]), &ends, 2), Some(known(&[1, 2])));
        assert_eq!(clamped(known(&[1, 9]), &ends, 10), None, "one token saves no forward");
        let guess = Proposal { policy: Policy::Verify, ..known(&[1, 9]) };
        assert_eq!(clamped(guess.clone(), &ends, 10).map(|kept| kept.tokens), Some(tokens(&[1])));
        assert_eq!(clamped(guess, &ends, 0), None);
        let long: Vec<u32> = (100..200).collect();
        assert_eq!(clamped(known(&long), &ends, 90).map(|kept| kept.tokens.len()), Some(MAX_SPAN));
    }
}
