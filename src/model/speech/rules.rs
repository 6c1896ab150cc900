//! What may be said next: Whisper's rules on the logits of a step, and probabilities.

use super::tokens::SpeechTokens;

/// Rules of a window.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Never sampled.
    never: Vec<u32>,
    not_first: [u32; 2],
    eot: usize,
    no_timestamps: usize,
    first_time: usize,
    /// Timestamps are wanted.
    timestamps: bool,
    /// The latest time that a window may begin with, as an index.
    max_initial: usize,
}

/// Index of 1.0 s, beyond which no window's first segment begins.
pub const MAX_INITIAL: usize = 50;

impl Rules {
    /// For a model, with or without timestamps.
    pub fn new(tokens: &SpeechTokens, timestamps: bool) -> Self {
        Self {
            never: tokens.suppressed(),
            not_first: tokens.not_first(),
            eot: tokens.eot as usize,
            no_timestamps: tokens.no_timestamps() as usize,
            first_time: tokens.timestamps() as usize,
            timestamps,
            max_initial: MAX_INITIAL,
        }
    }

    /// Forbids by −∞ what may not follow `sampled`.
    pub fn apply(&self, logits: &mut [f32], sampled: &[u32]) {
        let forbid = |logits: &mut [f32], ids: std::ops::Range<usize>| {
            let end = ids.end.min(logits.len());
            if let Some(logits) = logits.get_mut(ids.start.min(end)..end) {
                logits.fill(f32::NEG_INFINITY);
            }
        };
        let one = |logits: &mut [f32], id: usize| {
            if let Some(logit) = logits.get_mut(id) {
                *logit = f32::NEG_INFINITY;
            }
        };
        if sampled.is_empty() {
            self.not_first.iter().for_each(|id| one(logits, *id as usize));
        }
        self.never.iter().for_each(|id| one(logits, *id as usize));
        if !self.timestamps {
            return;
        }
        one(logits, self.no_timestamps);
        let end = logits.len();
        let is_time = |id: &u32| *id as usize >= self.first_time;
        let last_is_time = sampled.last().is_some_and(is_time);
        let before_is_time = sampled.len() < 2 || is_time(&sampled[sampled.len() - 2]);
        if last_is_time {
            match before_is_time {
                true => forbid(logits, self.first_time..end),
                false => forbid(logits, 0..self.eot),
            }
        }
        if let Some(latest) = sampled.iter().rev().find(|id| is_time(id)) {
            // The second half of a pair may repeat the first; a segment is never empty.
            let may_repeat = last_is_time && !before_is_time;
            forbid(logits, self.first_time..*latest as usize + usize::from(!may_repeat));
        }
        if sampled.is_empty() {
            forbid(logits, 0..self.first_time);
            forbid(logits, self.first_time + self.max_initial + 1..end);
        }
        if end > self.first_time {
            let (texts, times) = logits.split_at(self.first_time);
            let best = texts.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if log_sum_exp(times) > best {
                forbid(logits, 0..self.first_time);
            }
        }
    }

    /// Ends a window.
    pub fn eot(&self) -> u32 {
        self.eot as u32
    }
}

/// `e^x` for `x ≤ 0`, about 2e-7 off; 0 below −87. Without branches and calls, so that loops of it become
/// vectors.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.max(-87.0);
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = ((((1.987_569_1e-4 * r + 1.398_2e-3) * r + 8.333_452e-3) * r + 4.166_579_6e-2) * r
        + 0.166_666_65)
        * r
        + 0.5;
    let y = p * r * r + r + 1.0;
    // `n` is an integer between −126 and 0.
    let scale = f32::from_bits((((n + 127.0) as i32) as u32) << 23);
    if x < -87.0 { 0.0 } else { y * scale }
}

/// `ln Σ e^x`; −∞ where nothing is allowed.
pub fn log_sum_exp(logits: &[f32]) -> f32 {
    const LANES: usize = 8;
    let (chunks, tail) = logits.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        most.iter_mut().zip(chunk).for_each(|(most, x)| *most = if *x > *most { *x } else { *most });
    }
    let max = most.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return max;
    }
    let mut sums = [0.0_f32; LANES];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += exp_of_negative(x - max));
    }
    let sum = sums.iter().sum::<f32>() + tail.iter().map(|x| exp_of_negative(x - max)).sum::<f32>();
    max + sum.ln()
}

/// The best id, the first among equals, and its logit; `None` where nothing is allowed.
pub fn best(logits: &[f32]) -> Option<(u32, f32)> {
    let mut found: Option<(u32, f32)> = None;
    for (id, logit) in (0_u32..).zip(logits) {
        if *logit > found.map_or(f32::NEG_INFINITY, |(_, best)| best) {
            found = Some((id, *logit));
        }
    }
    found
}

/// The best so many ids with their logits, best first, the lowest id among equals.
pub fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut found: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, logit) in (0_u32..).zip(logits) {
        let worst = if found.len() < count {
            f32::NEG_INFINITY
        } else {
            found.last().map_or(f32::NEG_INFINITY, |f| f.1)
        };
        if *logit > worst {
            let at = found.partition_point(|(_, other)| other >= logit);
            found.insert(at, (id, *logit));
            found.truncate(count);
        }
    }
    found
}

/// An id drawn from `softmax(logits / temperature)` by a number of `[0, 1)`.
pub fn draw(logits: &[f32], temperature: f32, uniform: f32) -> Option<u32> {
    let (best, max) = best(logits)?;
    let weight = |x: &f32| f64::from(exp_of_negative((x - max) / temperature));
    let total: f64 = logits.iter().map(weight).sum();
    let mut left = f64::from(uniform) * total;
    for (id, logit) in (0_u32..).zip(logits) {
        let weight = weight(logit);
        if weight > 0.0 && left < weight {
            return Some(id);
        }
        left -= weight;
    }
    Some(best)
}

/// A number of `[0, 1)` that depends on nothing but these.
pub fn uniform(seed: u64, parts: [u64; 4]) -> f32 {
    // SplitMix64's finaliser over each part in turn.
    let mut state = seed;
    for part in parts {
        state = state.wrapping_add(part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    (state >> 40) as f32 / (1_u64 << 24) as f32
}

/// Bytes of a text for each byte of its zlib stream: high where it repeats itself.
pub fn compression_ratio(text: &str) -> f64 {
    use std::io::Write;

    let text = text.trim();
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::new(6));
    let written = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    let bytes = written.map_or(1, |bytes| bytes.len().max(1));
    text.len() as f64 / bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_exponentials_are_right() {
        let logits: Vec<f32> = (0..1003).map(|i| ((i * 37) % 101) as f32 / 7.0 - 9.0).collect();
        let exact = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
        assert!((f64::from(log_sum_exp(&logits)) - exact).abs() < 1e-5);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 20]), f32::NEG_INFINITY);
    }

    #[test]
    fn the_best_are_in_order_and_the_first_among_equals() {
        let logits = [1.0, 3.0, 3.0, f32::NEG_INFINITY, 2.0];
        assert_eq!(best(&logits), Some((1, 3.0)));
        assert_eq!(top(&logits, 3), [(1, 3.0), (2, 3.0), (4, 2.0)]);
        assert_eq!(best(&[f32::NEG_INFINITY; 3]), None);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0, (3.0_f32).ln(), f32::NEG_INFINITY];
        let count = (0..4000).filter(|i| draw(&logits, 1.0, uniform(7, [*i, 0, 0, 0])) == Some(1)).count();
        assert!((2900..3100).contains(&count), "{count}");
    }

    #[test]
    fn loops_compress() {
        assert!(compression_ratio(&"thank you ".repeat(20)) > 2.4);
        assert!(
            compression_ratio("And so my fellow Americans ask not what your country can do for you") < 1.5
        );
    }
}
