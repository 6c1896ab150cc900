//! Log-probabilities of tokens under the model's own distribution: before bias, penalties,
//! temperature and filters.

use super::weigh::{self, Best};
use crate::types::TokenId;

/// The drawn token's log-probability and the best ones'.
#[derive(Clone, PartialEq, Debug)]
pub struct Scores {
    /// Natural logarithm of the drawn token's probability.
    pub drawn: f32,
    /// The most probable tokens with theirs, best first; among equals the lowest id first.
    pub top: Vec<(TokenId, f32)>,
}

/// Scores of `token` and of the `count` best among `logits` `[vocab]`, whose best one is known.
pub(super) fn scores(logits: &[f32], best: Best, token: u32, count: u8) -> Scores {
    let log_total = weigh::total(logits, best.logit, 1.0).ln();
    let logprob = |logit: f32| (f64::from(logit) - f64::from(best.logit) - log_total) as f32;
    let drawn = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let top = largest(logits, usize::from(count));
    Scores {
        drawn: logprob(drawn),
        top: top.into_iter().map(|(id, logit)| (TokenId(id), logprob(logit))).collect(),
    }
}

/// The `count` largest values with their places, in falling order; among equals the first comes first.
fn largest(values: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut found: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    let mut least = f32::NEG_INFINITY;
    for (id, value) in (0..).zip(values) {
        if found.len() == count && (*value <= least || count == 0) {
            continue;
        }
        let at = found.partition_point(|(_, other)| *other >= *value);
        found.insert(at, (id, *value));
        found.truncate(count);
        least = found.last().map_or(f32::NEG_INFINITY, |(_, value)| *value);
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_largest_are_those_of_a_stable_sort(
            values in prop::collection::vec(-4_i8..4, 0..200), count in 0_usize..24,
        ) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(values.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
            sorted.truncate(count);
            prop_assert_eq!(largest(&values, count), sorted);
        }
    }
}
