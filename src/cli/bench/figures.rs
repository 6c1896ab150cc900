//! What is computed from the moments at which pieces of answers came. Pure, but
//! for the load average.

use std::time::Duration;

use serde::Serialize;

/// One answer as it came.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    /// Tokens of the prompt, those from a cache included.
    pub(super) prompt_tokens: u32,
    /// Of these, from a cache.
    pub(super) cached_tokens: u32,
    /// Tokens produced.
    pub(super) completion_tokens: u32,
    /// When each piece of text came, since the request was sent.
    pub(super) pieces: Vec<Duration>,
    /// When it was whole.
    pub(super) whole: Duration,
}

impl Answer {
    /// Until the first piece, or the end of an answer without text.
    fn first(&self) -> Duration {
        self.pieces.first().copied().unwrap_or(self.whole)
    }
}

/// A prompt's computation.
#[derive(Clone, Copy, Debug, Serialize, PartialEq)]
pub(super) struct Prefill {
    /// Tokens computed.
    pub(super) tokens: u32,
    /// Tokens a second.
    pub(super) tokens_per_second: f64,
    /// Until the first token, milliseconds.
    pub(super) first_token_ms: f64,
    /// Tokens that came from a cache all the same.
    pub(super) cached_tokens: u32,
}

impl Prefill {
    pub(super) fn of(answer: &Answer) -> Self {
        let tokens = answer.prompt_tokens.saturating_sub(answer.cached_tokens);
        let seconds = answer.first().as_secs_f64();
        Self {
            tokens,
            tokens_per_second: rate(f64::from(tokens), seconds),
            first_token_ms: seconds * 1e3,
            cached_tokens: answer.cached_tokens,
        }
    }

    /// The one with the median speed.
    pub(super) fn median(all: &[Self]) -> Option<Self> {
        let mut all = all.to_vec();
        all.sort_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second));
        all.get(all.len() / 2).copied()
    }
}

/// Some clients asking at once.
#[derive(Clone, Copy, Debug, Serialize, PartialEq)]
pub(super) struct Burst {
    /// How many.
    pub(super) clients: usize,
    /// Tokens of a client's prompt, the most.
    pub(super) prompt_tokens: u32,
    /// Tokens that a client got, the least; fewer than asked for where a server does not ignore a text's end.
    pub(super) least_tokens: u32,
    /// All their tokens a second, from the first request to the last answer's end.
    pub(super) total_tokens_per_second: f64,
    /// One client's tokens a second after its first, the median one's.
    pub(super) client_tokens_per_second: f64,
    /// Until the first token, milliseconds, the median client's.
    pub(super) first_token_ms: f64,
    /// Between two pieces of an answer's text, milliseconds (a token without text, as control tokens are, makes none): half, 95 and 99 of 100 are shorter.
    pub(super) gap_p50_ms: f64,
    /// See [`Self::gap_p50_ms`].
    pub(super) gap_p95_ms: f64,
    /// See [`Self::gap_p50_ms`].
    pub(super) gap_p99_ms: f64,
}

impl Burst {
    pub(super) fn of(answers: &[Answer], wall: Duration) -> Self {
        let tokens: f64 = answers.iter().map(|answer| f64::from(answer.completion_tokens)).sum();
        let speeds = answers.iter().map(|answer| {
            let decoding = answer.whole.saturating_sub(answer.first()).as_secs_f64();
            rate(f64::from(answer.completion_tokens.saturating_sub(1)), decoding)
        });
        let firsts = answers.iter().map(|answer| answer.first().as_secs_f64() * 1e3);
        let gaps = answers.iter().flat_map(|answer| answer.pieces.windows(2)).map(|pair| match pair {
            [before, after] => after.saturating_sub(*before).as_secs_f64() * 1e3,
            _ => 0.0,
        });
        let (speeds, firsts, gaps) = (sorted(speeds), sorted(firsts), sorted(gaps));
        Self {
            clients: answers.len(),
            prompt_tokens: answers.iter().map(|answer| answer.prompt_tokens).max().unwrap_or(0),
            least_tokens: answers.iter().map(|answer| answer.completion_tokens).min().unwrap_or(0),
            total_tokens_per_second: rate(tokens, wall.as_secs_f64()),
            client_tokens_per_second: quantile(&speeds, 0.5),
            first_token_ms: quantile(&firsts, 0.5),
            gap_p50_ms: quantile(&gaps, 0.5),
            gap_p95_ms: quantile(&gaps, 0.95),
            gap_p99_ms: quantile(&gaps, 0.99),
        }
    }

    /// Each figure's median over the rounds with so many clients.
    pub(super) fn median(all: &[Self], clients: usize) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            quantile(&sorted(all.iter().filter(|burst| burst.clients == clients).map(figure)), 0.5)
        };
        let with = all.iter().filter(|burst| burst.clients == clients);
        Self {
            clients,
            prompt_tokens: with.clone().map(|burst| burst.prompt_tokens).max().unwrap_or(0),
            least_tokens: with.map(|burst| burst.least_tokens).min().unwrap_or(0),
            total_tokens_per_second: of(|burst| burst.total_tokens_per_second),
            client_tokens_per_second: of(|burst| burst.client_tokens_per_second),
            first_token_ms: of(|burst| burst.first_token_ms),
            gap_p50_ms: of(|burst| burst.gap_p50_ms),
            gap_p95_ms: of(|burst| burst.gap_p95_ms),
            gap_p99_ms: of(|burst| burst.gap_p99_ms),
        }
    }
}

/// Zero where no time went by.
fn rate(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The value below which a share of the sorted ones lies (nearest rank); 0 where there are none.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Of 1, 5 and 15 minutes, as the system says it.
pub(super) fn load_average() -> Option<String> {
    let text = if cfg!(target_os = "macos") {
        let answer =
            std::process::Command::new("/usr/sbin/sysctl").args(["-n", "vm.loadavg"]).output().ok()?;
        String::from_utf8(answer.stdout).ok()?
    } else {
        // PORTABLE: Linux alone has it; elsewhere there is no load average.
        std::fs::read_to_string("/proc/loadavg").ok()?
    };
    let numbers: Vec<&str> =
        text.split_whitespace().filter(|word| word.parse::<f64>().is_ok()).take(3).collect();
    (numbers.len() == 3).then(|| numbers.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(values: &[u64]) -> Vec<Duration> {
        values.iter().map(|&value| Duration::from_millis(value)).collect()
    }

    #[test]
    fn a_bursts_figures_are_those_of_the_pieces() {
        let slow = Answer {
            prompt_tokens: 10,
            cached_tokens: 4,
            completion_tokens: 3,
            pieces: ms(&[100, 200, 400]),
            whole: Duration::from_millis(500),
        };
        let fast = Answer { pieces: ms(&[50, 60, 70]), whole: Duration::from_millis(70), ..slow.clone() };
        let burst = Burst::of(&[slow.clone(), fast.clone(), fast], Duration::from_millis(500));
        assert_eq!((burst.clients, burst.prompt_tokens), (3, 10));
        assert_eq!(burst.total_tokens_per_second, 18.0);
        assert_eq!(burst.client_tokens_per_second, 100.0);
        assert_eq!((burst.first_token_ms, burst.gap_p50_ms, burst.gap_p99_ms), (50.0, 10.0, 200.0));
        let prefill = Prefill::of(&slow);
        assert_eq!((prefill.tokens, prefill.tokens_per_second, prefill.first_token_ms), (6, 60.0, 100.0));
        assert_eq!(Burst::median(&[burst], 3), burst);
    }

    #[test]
    fn answers_without_pieces_or_time_give_figures_all_the_same() {
        let burst = Burst::of(&[Answer::default()], Duration::ZERO);
        assert_eq!((burst.total_tokens_per_second, burst.client_tokens_per_second), (0.0, 0.0));
        assert_eq!(Prefill::of(&Answer::default()).tokens_per_second, 0.0);
        assert_eq!(Prefill::median(&[]), None);
    }
}
