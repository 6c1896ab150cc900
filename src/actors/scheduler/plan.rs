//! How many prompt tokens go beside the decode tokens of a step. Pure: numbers in,
//! numbers out, no engine, no row.
//!
//! Every running row that owes one token gets it. Rows that owe more share what the
//! time budget leaves, shortest remainder first so that a short prompt never waits for
//! a long one, but a row that was passed over [`PATIENCE`] times goes first. Some prompt
//! tokens go in every step, so neither side starves.

use std::time::Duration;

/// Prompt tokens that a step always takes, whatever the budget says.
pub(crate) const LEAST_PREFILL: u32 = 16;
/// Prompt tokens beside decode tokens before anything was measured.
pub(crate) const UNMEASURED_PREFILL: u32 = 32;
/// Steps that a prefilling row can be passed over before it goes first.
pub(crate) const PATIENCE: u32 = 4;

/// Limits of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Prompt tokens of a step, at most.
    pub(crate) max_chunk: u32,
    /// Time of a step with prompt tokens while rows decode.
    pub(crate) prefill_budget: Duration,
}

/// A row that owes more than one token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefilling {
    /// Tokens it owes.
    pub(crate) owed: u32,
    /// Steps in a row in which it got nothing.
    pub(crate) passed_over: u32,
}

/// Measured step times, as moving averages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// A step without prompt tokens, seconds.
    decode_s: Option<f64>,
    /// What a prompt token adds, seconds.
    token_s: Option<f64>,
}

impl Pace {
    /// Takes one step's time into account.
    pub(crate) fn record(&mut self, decoding: usize, prefill_tokens: u32, took: Duration) {
        let took = took.as_secs_f64();
        if prefill_tokens == 0 {
            self.decode_s = Some(blend(self.decode_s, took));
        } else {
            let decode = if decoding > 0 { self.decode_s.unwrap_or(0.0) } else { 0.0 };
            let token = (took - decode).max(0.0) / f64::from(prefill_tokens);
            self.token_s = Some(blend(self.token_s, token));
        }
    }

    /// Prompt tokens that fit into `budget` beside the decode tokens.
    fn tokens_within(&self, budget: Duration) -> u32 {
        let Some(token) = self.token_s else { return UNMEASURED_PREFILL };
        let left = budget.as_secs_f64() - self.decode_s.unwrap_or(0.0);
        // `as` saturates: nothing per token gives infinity, a negative rest gives 0.
        (left.max(0.0) / token.max(1e-9)) as u32
    }
}

fn blend(old: Option<f64>, new: f64) -> f64 {
    old.map_or(new, |old| old * 0.75 + new * 0.25)
}

/// Tokens for each prefilling row, in their order; 0 = passed over in this step.
pub(crate) fn share(rows: &[Prefilling], decoding: usize, limits: Limits, pace: &Pace) -> Vec<u32> {
    let max_chunk = limits.max_chunk.max(1);
    let mut left = if decoding == 0 {
        max_chunk
    } else {
        pace.tokens_within(limits.prefill_budget).clamp(LEAST_PREFILL.min(max_chunk), max_chunk)
    };
    let mut order: Vec<usize> = (0..rows.len()).collect();
    // A stable sort: rows come in order of arrival, which decides between equals.
    order.sort_by_key(|&index| {
        let Prefilling { owed, passed_over } = rows[index];
        if passed_over >= PATIENCE { (0, u32::MAX - passed_over) } else { (1, owed) }
    });
    let mut given = vec![0; rows.len()];
    for index in order {
        given[index] = rows[index].owed.min(left);
        left -= given[index];
    }
    given
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { max_chunk: 512, prefill_budget: Duration::from_millis(100) };

    fn row(owed: u32) -> Prefilling {
        Prefilling { owed, passed_over: 0 }
    }

    #[test]
    fn alone_a_prompt_gets_whole_chunks() {
        assert_eq!(share(&[row(2000)], 0, LIMITS, &Pace::default()), [512]);
        assert_eq!(share(&[row(100)], 0, LIMITS, &Pace::default()), [100]);
    }

    #[test]
    fn beside_streams_the_measured_time_decides() {
        let mut pace = Pace::default();
        assert_eq!(share(&[row(2000)], 3, LIMITS, &pace), [UNMEASURED_PREFILL]);
        pace.record(3, 0, Duration::from_millis(20));
        pace.record(3, 40, Duration::from_millis(60));
        assert_eq!(share(&[row(2000)], 3, LIMITS, &pace), [80], "(100 - 20) ms at 1 ms a token");
        pace.record(3, 0, Duration::from_secs(9));
        assert_eq!(share(&[row(2000)], 3, LIMITS, &pace), [LEAST_PREFILL], "slow, but never nothing");
    }

    #[test]
    fn a_short_prompt_does_not_wait_for_a_long_one() {
        assert_eq!(share(&[row(5000), row(30)], 1, LIMITS, &Pace::default()), [2, 30]);
        let starving = Prefilling { owed: 5000, passed_over: PATIENCE };
        assert_eq!(share(&[row(30), starving], 1, LIMITS, &Pace::default()), [0, 32]);
    }

    proptest! {
        #[test]
        fn nobody_starves_and_nothing_exceeds_its_limit(
            mut owed in prop::collection::vec(1u32..3000, 1..8),
            arrivals in prop::collection::vec(1u32..50, 0..60),
            decoding in 0usize..4,
            step_ms in 1u64..400,
        ) {
            let mut pace = Pace::default();
            pace.record(1, 0, Duration::from_millis(step_ms));
            pace.record(1, 16, Duration::from_millis(2 * step_ms));
            let mut passed = vec![0u32; owed.len()];
            for new in arrivals {
                owed.push(new);
                passed.push(0);
                let rows: Vec<Prefilling> = owed.iter().zip(&passed)
                    .map(|(&owed, &passed_over)| Prefilling { owed, passed_over }).collect();
                let given = share(&rows, decoding, LIMITS, &pace);
                prop_assert!(given.iter().sum::<u32>() <= LIMITS.max_chunk);
                prop_assert!(given.iter().sum::<u32>() >= LEAST_PREFILL.min(owed.iter().sum()));
                for (index, &got) in given.iter().enumerate() {
                    prop_assert!(got <= owed[index]);
                    owed[index] -= got;
                    passed[index] = if got == 0 { passed[index] + 1 } else { 0 };
                }
                let waiting = owed.len() as u32;
                prop_assert!(passed.iter().all(|&steps| steps <= PATIENCE + waiting));
                let mut keep = owed.iter().map(|&rest| rest > 0);
                passed.retain(|_| keep.next().unwrap_or(false));
                owed.retain(|&rest| rest > 0);
                if owed.is_empty() { break; }
            }
        }
    }
}
