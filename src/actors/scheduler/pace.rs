//! How long a step takes, learned from the steps before. Pure.
//!
//! A step's time is modelled as a sum with factors that are never negative:
//!
//! > t = a + b·(decode tokens) + c·(prompt tokens) + d·(positions attended by the decode tokens)
//! > + e·(positions attended by the prompt tokens)
//!
//! fitted to the latest steps by least squares of the *relative* error (so that short steps count
//! as much as long ones), one coordinate after the other. Steps with and without prompt tokens are
//! kept apart, so that a long quiet stretch of one kind does not forget the other.

use std::collections::VecDeque;
use std::time::Duration;

/// Steps remembered of each kind.
const REMEMBERED: usize = 32;
/// Passes over the coordinates at each fit; it goes on from the last one's result.
const PASSES: usize = 4;
/// Steps of a kind before its factors are believed.
const ENOUGH: usize = 2;
/// Positions are counted in thousands, so that the factors are of like size.
const POSITIONS: f64 = 1e-3;
const FACTORS: usize = 5;

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Work {
    /// Tokens of decoding rows, verified proposals included.
    pub(crate) decode_tokens: u32,
    /// Positions that they attend to, together.
    pub(crate) decode_positions: u64,
    /// Tokens of prompts.
    pub(crate) prompt_tokens: u32,
    /// Positions that they attend to, together.
    pub(crate) prompt_positions: u64,
}

impl Work {
    /// Adds `tokens` tokens of a prompt from position `start` on.
    pub(crate) fn with_prompt(mut self, start: u32, tokens: u32) -> Self {
        self.prompt_tokens += tokens;
        self.prompt_positions += attended(start, tokens);
        self
    }

    /// Adds a decoding row's `tokens` tokens from position `start` on.
    pub(crate) fn with_decode(mut self, start: u32, tokens: u32) -> Self {
        self.decode_tokens += tokens;
        self.decode_positions += attended(start, tokens);
        self
    }

    fn features(self) -> [f64; FACTORS] {
        [
            1.0,
            f64::from(self.decode_tokens),
            f64::from(self.prompt_tokens),
            self.decode_positions as f64 * POSITIONS,
            self.prompt_positions as f64 * POSITIONS,
        ]
    }
}

/// Positions that `tokens` tokens from `start` on attend to, themselves included.
fn attended(start: u32, tokens: u32) -> u64 {
    let (start, tokens) = (u64::from(start), u64::from(tokens));
    start * tokens + tokens * (tokens + 1) / 2
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    features: [f64; FACTORS],
    seconds: f64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    quiet: VecDeque<Sample>,
    mixed: VecDeque<Sample>,
    factors: [f64; FACTORS],
}

impl Pace {
    /// Takes one step's time into account.
    pub(crate) fn record(&mut self, work: Work, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-6);
        let kind = if work.prompt_tokens == 0 { &mut self.quiet } else { &mut self.mixed };
        if kind.len() == REMEMBERED {
            kind.pop_front();
        }
        kind.push_back(Sample { features: work.features(), seconds });
        self.fit();
    }

    /// Whether the time of prompt tokens is known well enough to plan with.
    pub(crate) fn knows_prompts(&self) -> bool {
        self.mixed.len() >= ENOUGH
    }

    /// Expected time of a step, seconds.
    pub(crate) fn seconds(&self, work: Work) -> f64 {
        dot(&self.factors, &work.features())
    }

    /// What one more decode token adds at position `at`, seconds.
    pub(crate) fn decode_token(&self, at: u32) -> f64 {
        self.factors[1] + self.factors[3] * f64::from(at) * POSITIONS
    }

    /// Most prompt tokens from position `start` on that can be added to `work` within
    /// `seconds` in all.
    pub(crate) fn prompt_tokens_within(&self, work: Work, start: u32, seconds: f64) -> u32 {
        let left = seconds - self.seconds(work);
        if left <= 0.0 {
            return 0;
        }
        // c·n + e·(start·n + n²/2) = left, with e per position.
        let per_position = self.factors[4] * POSITIONS;
        let linear = self.factors[2] + per_position * f64::from(start);
        let tokens = if per_position > 1e-15 {
            ((linear * linear + 2.0 * per_position * left).sqrt() - linear) / per_position
        } else {
            left / linear.max(1e-12)
        };
        // `as` saturates.
        tokens as u32
    }

    fn fit(&mut self) {
        for _ in 0..PASSES {
            for factor in 0..FACTORS {
                let (mut above, mut below) = (0.0, 0.0);
                for sample in self.quiet.iter().chain(&self.mixed) {
                    let feature = sample.features[factor];
                    if feature == 0.0 {
                        continue;
                    }
                    let weight = 1.0 / (sample.seconds * sample.seconds);
                    let others = dot(&self.factors, &sample.features) - self.factors[factor] * feature;
                    above += weight * feature * (sample.seconds - others);
                    below += weight * feature * feature;
                }
                if below > 0.0 {
                    self.factors[factor] = (above / below).max(0.0);
                }
            }
        }
    }
}

fn dot(left: &[f64; FACTORS], right: &[f64; FACTORS]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn time(factors: &[f64; FACTORS], work: Work) -> Duration {
        Duration::from_secs_f64(dot(factors, &work.features()))
    }

    /// Steps as a server sees them: rows decode, now and then a prompt goes beside them.
    fn history() -> impl Iterator<Item = Work> {
        (0..200u32).map(|step| {
            let mut work = Work::default();
            for row in 0..step % 7 {
                work = work.with_decode(100 + 37 * row + step, 1);
            }
            if step % 3 == 0 { work.with_prompt(step * 11, 16 + step % 90) } else { work }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_time_of_a_step_is_foretold_from_those_before(
            base in 0.0005..0.01f64, decode in 0.0002..0.003f64, prompt in 0.0002..0.003f64,
            decode_at in 0.00001..0.0005f64, prompt_at in 0.00001..0.0005f64,
            noise in prop::collection::vec(0.95..1.05f64, 200),
        ) {
            let truth = [base, decode, prompt, decode_at, prompt_at];
            let mut pace = Pace::default();
            for (work, noise) in history().zip(noise) {
                pace.record(work, time(&truth, work).mul_f64(noise));
            }
            let work = Work::default().with_decode(300, 1).with_decode(250, 1).with_prompt(900, 60);
            let (said, is) = (pace.seconds(work), dot(&truth, &work.features()));
            prop_assert!((said / is - 1.0).abs() < 0.25, "{said} for {is}");
            let beside = Work::default().with_decode(300, 1);
            let tokens = pace.prompt_tokens_within(beside, 500, is);
            prop_assert!(pace.seconds(beside.with_prompt(500, tokens)) <= is * 1.001);
            prop_assert!(pace.seconds(beside.with_prompt(500, tokens + 2)) > is * 0.999);
        }
    }

    #[test]
    fn a_machine_that_becomes_slower_is_followed() {
        let mut pace = Pace::default();
        let fast = [0.004, 0.001, 0.001, 0.0, 0.0];
        let slow = fast.map(|factor| 3.0 * factor);
        history().for_each(|work| pace.record(work, time(&fast, work)));
        history().for_each(|work| pace.record(work, time(&slow, work)));
        let work = Work::default().with_decode(10, 1).with_prompt(0, 40);
        assert!((pace.seconds(work) / dot(&slow, &work.features()) - 1.0).abs() < 0.05);
    }

    #[test]
    fn nothing_is_known_before_the_first_steps() {
        let mut pace = Pace::default();
        assert!(!pace.knows_prompts());
        assert_eq!(pace.seconds(Work::default().with_decode(5, 1)), 0.0);
        pace.record(Work::default().with_prompt(0, 16), Duration::ZERO);
        pace.record(Work::default().with_prompt(0, 16), Duration::ZERO);
        assert!(pace.knows_prompts());
        assert!(pace.prompt_tokens_within(Work::default(), 0, 1.0) > 1000);
    }
}
