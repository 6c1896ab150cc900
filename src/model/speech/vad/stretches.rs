//! Stretches of speech from probabilities, as Silero's users cut them.

use std::ops::Range;

use super::FRAME;
use crate::types::speech::VadOptions;

/// A silence of so many samples lets over-long speech be cut there.
const CUT_SILENCE: usize = 1568;

fn samples(ms: u32) -> usize {
    ms as usize * 16
}

/// Takes probabilities as they come; gives stretches as they end.
#[derive(Clone, Debug)]
pub struct Stretches {
    options: VadOptions,
    /// Frames so far, in samples.
    at: usize,
    start: Option<usize>,
    /// Where speech may have ended.
    end: Option<usize>,
    /// The last silence inside the speech at which it could be cut: its begin, and where speech went on.
    cut: Option<(usize, usize)>,
    done: Vec<Range<usize>>,
}

impl Stretches {
    /// None yet.
    pub fn new(options: VadOptions) -> Self {
        Self { options, at: 0, start: None, end: None, cut: None, done: Vec::new() }
    }

    /// Where the speech under way began, in samples, without what is kept before.
    pub fn speaking_since(&self) -> Option<usize> {
        self.start
    }

    /// How long nobody has spoken, in samples, while speech is not over yet.
    pub fn pause(&self) -> usize {
        self.end.map_or(0, |end| self.at - end)
    }

    /// The next frame; true where speech ended with it.
    pub fn push(&mut self, probability: f32) -> bool {
        let VadOptions { threshold, .. } = self.options;
        let begin = self.at;
        self.at += FRAME;
        let most = self
            .options
            .max_speech_ms
            .map(|ms| samples(ms).saturating_sub(FRAME + 2 * samples(self.options.pad_ms)).max(FRAME));
        if probability >= threshold {
            if let Some(end) = self.end.take()
                && begin - end >= CUT_SILENCE
            {
                self.cut = Some((end, begin));
            }
            if self.start.is_none() {
                self.start = Some(begin);
                return false;
            }
        }
        let Some(start) = self.start else { return false };
        if let Some(most) = most
            && begin - start > most
        {
            match self.cut.take() {
                Some((end, next)) => {
                    self.close(end);
                    self.start = Some(next);
                    self.end = None;
                }
                None => {
                    self.close(begin);
                    self.start = Some(begin);
                    self.end = None;
                }
            }
            return true;
        }
        if probability < (threshold - 0.15).max(0.01) {
            let end = *self.end.get_or_insert(begin);
            if begin - end >= samples(self.options.min_silence_ms) {
                return self.close(end);
            }
        }
        false
    }

    fn close(&mut self, end: usize) -> bool {
        let start = self.start.take().unwrap_or(end);
        (self.end, self.cut) = (None, None);
        if end > start && end - start >= samples(self.options.min_speech_ms) {
            self.done.push(start..end);
            return true;
        }
        false
    }

    /// Whether any speech was found so far.
    pub fn any(&self) -> bool {
        !self.done.is_empty()
            || self
                .start
                .is_some_and(|start| self.at - start >= samples(self.options.min_speech_ms).max(FRAME))
    }

    /// All stretches of a recording of so many samples, padded; a gap shorter than both pads is shared.
    pub fn finish(mut self, total: usize) -> Vec<Range<usize>> {
        if self.start.is_some() {
            let end = total.max(self.start.unwrap_or(0));
            self.close(end);
        }
        let pad = samples(self.options.pad_ms);
        let mut out = self.done;
        let raw = out.clone();
        for (index, stretch) in out.iter_mut().enumerate() {
            let before = match index.checked_sub(1).and_then(|i| raw.get(i)) {
                Some(last) => pad.min((raw[index].start - last.end) / 2),
                None => pad,
            };
            let after = match raw.get(index + 1) {
                Some(next) => pad.min((next.start - raw[index].end) / 2),
                None => pad,
            };
            *stretch = stretch.start.saturating_sub(before)..(stretch.end + after).min(total);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretches(options: VadOptions, probabilities: &[(f32, usize)]) -> Vec<Range<usize>> {
        let mut stretches = Stretches::new(options);
        let mut frames = 0;
        for (probability, count) in probabilities {
            for _ in 0..*count {
                stretches.push(*probability);
            }
            frames += count;
        }
        stretches.finish(frames * FRAME)
    }

    #[test]
    fn speech_ends_with_a_long_silence_and_is_padded() {
        let found = stretches(VadOptions::FILE, &[(0.0, 100), (0.9, 50), (0.0, 30), (0.9, 50), (0.0, 200)]);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].start, found[0].end), (100 * FRAME - 6400, 230 * FRAME + 6400));
    }

    #[test]
    fn a_gap_shorter_than_both_pads_is_shared() {
        let found = stretches(VadOptions::PIECES, &[(0.9, 50), (0.0, 10), (0.9, 50)]);
        assert_eq!(found, [0..55 * FRAME, 55 * FRAME..110 * FRAME]);
    }

    #[test]
    fn no_stretch_of_pieces_is_longer_than_a_window() {
        let found = stretches(VadOptions::PIECES, &[(0.9, 700), (0.0, 4), (0.9, 2000), (0.0, 50)]);
        assert!(found.iter().all(|stretch| stretch.len() <= 480_000), "{found:?}");
        assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start), "{found:?}");
        assert_eq!(found.first().map(|stretch| stretch.start), Some(0));
    }

    #[test]
    fn silence_has_none() {
        assert!(stretches(VadOptions::LIVE, &[(0.1, 500)]).is_empty());
        assert!(stretches(VadOptions::LIVE, &[(0.1, 50), (0.9, 2), (0.1, 50)]).is_empty(), "a click");
    }
}
