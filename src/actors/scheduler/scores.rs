//! Log-probabilities on their way: each goes out right before the text that its token begins.

use std::collections::VecDeque;

use crate::types::TokenScores;

/// Those of one answer whose tokens' text is not released yet.
#[derive(Debug, Default)]
pub(crate) struct Scoring {
    /// Each with the place of its token's first byte in the answer.
    waiting: VecDeque<(usize, TokenScores)>,
}

impl Scoring {
    /// Of the token whose text begins at this byte of the answer.
    pub(crate) fn push(&mut self, at: usize, scores: TokenScores) {
        self.waiting.push_back((at, scores));
    }

    /// Of the tokens that begin within the first bytes of the answer, which are certain.
    pub(crate) fn release_to(&mut self, bytes: usize) -> Vec<TokenScores> {
        let count = self.waiting.iter().take_while(|(at, _)| *at < bytes).count();
        self.waiting.drain(..count).map(|(_, scores)| scores).collect()
    }

    /// No text follows: the scores of tokens without text at the end.
    pub(crate) fn finish(&mut self) -> Vec<TokenScores> {
        self.waiting.drain(..).map(|(_, scores)| scores).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ScoredToken, TokenId};

    fn scores(token: u32) -> TokenScores {
        let chosen = ScoredToken { token: TokenId(token), bytes: Vec::new(), logprob: 0.0 };
        TokenScores { chosen, top: Vec::new() }
    }

    fn tokens(scores: &[TokenScores]) -> Vec<u32> {
        scores.iter().map(|scores| scores.chosen.token.0).collect()
    }

    #[test]
    fn a_token_goes_out_with_the_text_that_it_begins() {
        let mut scoring = Scoring::default();
        // Of the second one's text two bytes are held back, the third one has none, the fourth follows.
        for (at, token) in [(0, 1), (3, 2), (5, 3), (5, 4)] {
            scoring.push(at, scores(token));
        }
        assert_eq!(tokens(&scoring.release_to(3)), [1]);
        assert_eq!(tokens(&scoring.release_to(3)), [0; 0]);
        assert_eq!(tokens(&scoring.release_to(5)), [2]);
        assert_eq!(tokens(&scoring.release_to(6)), [3, 4]);
        scoring.push(6, scores(5));
        assert_eq!(tokens(&scoring.finish()), [5], "one without text, at the end");
    }
}
