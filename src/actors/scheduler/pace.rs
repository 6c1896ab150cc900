//! How long a step takes, learned from the steps before. Pure.
//!
//! A step's time is modelled as a sum with factors that are never negative:
//!
//! > t = a + b·(decode tokens) + c·(positions attended by them)
//! >   + d·(prompt tokens) + e·(positions attended by them)
//!
//! fitted by least squares of the *relative* error (so that short steps count as much as long ones),
//! the latest steps most, one coordinate after the other. The first three factors come from steps
//! without prompt tokens alone, the others from what remains of steps with them: in one fit for all,
//! what a long prompt costs would slowly be taken for what growing streams cost, and the time that
//! prompts may add follows from the latter. So that it stays known, a step without prompt tokens is
//! wanted now and then ([`Pace::wants_quiet`]).

use std::collections::VecDeque;
use std::time::Duration;

/// Steps remembered of each kind.
const REMEMBERED: usize = 32;
/// What a step counts beside the one after it.
const FADING: f64 = 0.92;
/// Passes over the coordinates at each fit; it goes on from the last one's result.
const PASSES: usize = 4;
/// Steps of a kind before its factors are believed.
const ENOUGH: usize = 2;
/// Of a step's time, what its prompt tokens take at least: what the others take may have been
/// taken for too much, but prompt tokens are never free.
const LEAST_SHARE: f64 = 0.1;
/// Steps with prompt tokens beside decode tokens, before one without is wanted.
const LONGEST_MIXED: u32 = 16;
/// Positions are counted in thousands, so that the factors are of like size.
const POSITIONS: f64 = 1e-3;

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

    fn decode_features(self) -> [f64; 3] {
        [1.0, f64::from(self.decode_tokens), self.decode_positions as f64 * POSITIONS]
    }

    fn prompt_features(self) -> [f64; 2] {
        [f64::from(self.prompt_tokens), self.prompt_positions as f64 * POSITIONS]
    }
}

/// Positions that `tokens` tokens from `start` on attend to, themselves included.
fn attended(start: u32, tokens: u32) -> u64 {
    let (start, tokens) = (u64::from(start), u64::from(tokens));
    start * tokens + tokens * (tokens + 1) / 2
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    work: Work,
    seconds: f64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    quiet: VecDeque<Sample>,
    mixed: VecDeque<Sample>,
    decode: [f64; 3],
    prompt: [f64; 2],
    /// Steps that had both, since the last one without prompt tokens.
    since_quiet: u32,
}

impl Pace {
    /// Takes one step's time into account.
    pub(crate) fn record(&mut self, work: Work, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-6);
        let is_quiet = work.prompt_tokens == 0;
        self.since_quiet = match is_quiet {
            true => 0,
            false => self.since_quiet + u32::from(work.decode_tokens > 0),
        };
        let kind = if is_quiet { &mut self.quiet } else { &mut self.mixed };
        if kind.len() == REMEMBERED {
            kind.pop_front();
        }
        kind.push_back(Sample { work, seconds });
        if is_quiet {
            let rows = self
                .quiet
                .iter()
                .map(|sample| (sample.work.decode_features(), sample.seconds, sample.seconds));
            fit(&mut self.decode, rows);
        }
        let decode = self.decode;
        let rows = self.mixed.iter().map(|sample| {
            let rest = sample.seconds - dot(&decode, &sample.work.decode_features());
            (sample.work.prompt_features(), sample.seconds, rest.max(LEAST_SHARE * sample.seconds))
        });
        fit(&mut self.prompt, rows);
    }

    /// Whether the next step should go without prompt tokens, so that what the others cost stays known.
    pub(crate) fn wants_quiet(&self) -> bool {
        self.knows_prompts() && (self.quiet.is_empty() || self.since_quiet >= LONGEST_MIXED)
    }

    /// Whether the time of prompt tokens is known well enough to plan with.
    pub(crate) fn knows_prompts(&self) -> bool {
        self.mixed.len() >= ENOUGH
    }

    /// Expected time of a step, seconds.
    pub(crate) fn seconds(&self, work: Work) -> f64 {
        dot(&self.decode, &work.decode_features()) + dot(&self.prompt, &work.prompt_features())
    }

    /// What one more decode token adds at position `at`, seconds.
    pub(crate) fn decode_token(&self, at: u32) -> f64 {
        self.decode[1] + self.decode[2] * f64::from(at) * POSITIONS
    }

    /// Most prompt tokens from position `start` on that can be added to `work` within
    /// `seconds` in all.
    pub(crate) fn prompt_tokens_within(&self, work: Work, start: u32, seconds: f64) -> u32 {
        let left = seconds - self.seconds(work);
        if left <= 0.0 {
            return 0;
        }
        // d·n + e·(start·n + n²/2) = left, with e per position.
        let [token, position] = self.prompt;
        let per_position = position * POSITIONS;
        let linear = token + per_position * f64::from(start);
        let tokens = if per_position > 1e-15 {
            ((linear * linear + 2.0 * per_position * left).sqrt() - linear) / per_position
        } else {
            left / linear.max(1e-12)
        };
        // `as` saturates.
        tokens as u32
    }
}

/// Fits factors to rows of features, the step's seconds, and what they are to sum up to; oldest first.
fn fit<const FACTORS: usize>(
    factors: &mut [f64; FACTORS],
    rows: impl DoubleEndedIterator<Item = ([f64; FACTORS], f64, f64)> + Clone,
) {
    for _ in 0..PASSES {
        for factor in 0..FACTORS {
            let (mut above, mut below, mut recent) = (0.0, 0.0, 1.0);
            for (features, seconds, target) in rows.clone().rev() {
                let feature = features[factor];
                let weight = recent / (seconds * seconds);
                let others = dot(factors, &features) - factors[factor] * feature;
                above += weight * feature * (target - others);
                below += weight * feature * feature;
                recent *= FADING;
            }
            if below > 0.0 {
                factors[factor] = (above / below).max(0.0);
            }
        }
    }
}

fn dot<const FACTORS: usize>(left: &[f64; FACTORS], right: &[f64; FACTORS]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// a, b, c and d, e.
    type Truth = ([f64; 3], [f64; 2]);

    fn seconds(truth: &Truth, work: Work) -> f64 {
        dot(&truth.0, &work.decode_features()) + dot(&truth.1, &work.prompt_features())
    }

    fn time(truth: &Truth, work: Work) -> Duration {
        Duration::from_secs_f64(seconds(truth, work))
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
            let truth = ([base, decode, decode_at], [prompt, prompt_at]);
            let mut pace = Pace::default();
            for (work, noise) in history().zip(noise) {
                pace.record(work, time(&truth, work).mul_f64(noise));
            }
            let work = Work::default().with_decode(300, 1).with_decode(250, 1).with_prompt(900, 60);
            let (said, is) = (pace.seconds(work), seconds(&truth, work));
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
        let fast = ([0.004, 0.001, 0.0], [0.001, 0.0]);
        let slow = ([0.012, 0.003, 0.0], [0.003, 0.0]);
        history().for_each(|work| pace.record(work, time(&fast, work)));
        history().for_each(|work| pace.record(work, time(&slow, work)));
        let work = Work::default().with_decode(10, 1).with_prompt(0, 40);
        assert!((pace.seconds(work) / seconds(&slow, work) - 1.0).abs() < 0.05);
    }

    /// Streams grow by a token a step, as the prompt does: what is which cannot be told from these alone.
    #[test]
    fn a_long_prompt_is_not_taken_for_what_streams_cost() {
        let truth = ([0.010, 0.002, 0.0005], [0.001, 0.0012]);
        let mut pace = Pace::default();
        let streams = |step: u32| (0..4).fold(Work::default(), |work, _| work.with_decode(200 + step, 1));
        (0..40).for_each(|step| pace.record(streams(step), time(&truth, streams(step))));
        let (mut start, mut quiet) = (0, 0);
        for step in 40..1000 {
            let alone = seconds(&truth, streams(step));
            let tokens = match pace.wants_quiet() {
                true => 0,
                false if !pace.knows_prompts() => 32,
                false => {
                    pace.prompt_tokens_within(streams(step), start, 1.8 * pace.seconds(streams(step))).max(2)
                }
            };
            quiet += u32::from(tokens == 0);
            let work = streams(step).with_prompt(start, tokens);
            start += tokens;
            // The machine is not the same all the time.
            let speed = if step < 500 { 1.0 } else { 1.5 };
            pace.record(work, time(&truth, work).mul_f64(speed));
            let said = pace.seconds(streams(step)) / alone;
            assert!((0.9..1.75).contains(&said), "step {step}: {said} times what it is");
            assert!(
                tokens <= 2 || tokens == 32 || seconds(&truth, work) < 2.0 * alone,
                "step {step}: {tokens} tokens"
            );
        }
        assert!(start > 3000 && quiet < 100, "{start} tokens, {quiet} steps without any");
        assert!((pace.seconds(streams(1000)) / seconds(&truth, streams(1000)) - 1.5).abs() < 0.2);
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
