//! Where utterances begin and end, from probabilities of speech as they come.

use crate::model::speech::vad::FRAME;
use crate::types::speech::VadOptions;

/// Longest utterance, in samples with what is kept around it: less than a window.
pub const LONGEST: usize = 28 * 16_000;
/// From here on a short pause ends an utterance.
const LONG: usize = 15 * 16_000;
/// From here on a breath does.
const VERY_LONG: usize = 22 * 16_000;
const SHORT_PAUSE: usize = 300 * 16;
const BREATH: usize = 100 * 16;

/// Where something begins or ends, in samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Edge {
    /// Somebody has begun to speak here, some frames ago.
    Start(usize),
    /// And has ended here.
    End {
        /// Where.
        at: usize,
        /// The pause that ends a turn has passed; otherwise the utterance was only getting too long.
        ends_turn: bool,
    },
    /// Nobody went on after an utterance that was too long: the turn is over.
    TurnEnd,
}

/// Cuts utterances; see the module.
#[derive(Clone, Debug)]
pub struct Cutter {
    options: VadOptions,
    at: usize,
    start: Option<usize>,
    /// The start was told.
    told: bool,
    /// The silence that lasts till now.
    silent_since: Option<usize>,
    /// An utterance ended that did not end its turn.
    is_turn_open: bool,
}

impl Cutter {
    /// Nobody speaks yet.
    pub fn new(options: VadOptions) -> Self {
        Self { options, at: 0, start: None, told: false, silent_since: None, is_turn_open: false }
    }

    /// Samples kept around an utterance.
    pub fn pad(&self) -> usize {
        self.options.pad_ms as usize * 16
    }

    /// Where speech may have begun that was not told yet.
    pub fn pending(&self) -> Option<usize> {
        self.start.filter(|_| !self.told)
    }

    /// How far back a start can be from the frame that tells it, in samples, what is kept before included.
    pub fn lookback(&self) -> usize {
        self.pad() + self.least() + FRAME
    }

    fn least(&self) -> usize {
        self.options.min_speech_ms as usize * 16
    }

    /// The next frame's probability. At most one edge a frame.
    pub fn push(&mut self, probability: f32) -> Option<Edge> {
        let begin = self.at;
        self.at += FRAME;
        if probability >= self.options.threshold {
            self.silent_since = None;
            self.start.get_or_insert(begin);
        }
        if probability < (self.options.threshold - 0.15).max(0.01) {
            self.silent_since.get_or_insert(begin);
        }
        let pause = self.silent_since.map_or(0, |since| self.at - since);
        let wanted = (self.options.min_silence_ms as usize * 16).max(FRAME);
        let edge = self.start.and_then(|start| self.speaking(start, pause, wanted));
        if edge.is_none() && self.is_turn_open && !self.told && pause >= wanted {
            (self.is_turn_open, self.start) = (false, None);
            return Some(Edge::TurnEnd);
        }
        edge
    }

    /// The same, where somebody has begun to speak.
    fn speaking(&mut self, start: usize, pause: usize, wanted: usize) -> Option<Edge> {
        let spoken = self.silent_since.unwrap_or(self.at) - start;
        if !self.told && spoken >= self.least().max(FRAME) && self.silent_since.is_none() {
            self.told = true;
            return Some(Edge::Start(start));
        }
        let ends_turn = pause >= wanted;
        let enough = match self.at - start {
            long if long >= VERY_LONG => wanted.min(BREATH),
            long if long >= LONG => wanted.min(SHORT_PAUSE),
            _ => wanted,
        };
        if pause >= enough {
            return self.end(self.silent_since.unwrap_or(self.at), ends_turn);
        }
        if self.told && self.at - start + 2 * self.pad() + FRAME > LONGEST {
            let edge = self.end(self.at, false);
            // They go on speaking: the next one begins here.
            self.start = Some(self.at);
            return edge;
        }
        None
    }

    fn end(&mut self, at: usize, ends_turn: bool) -> Option<Edge> {
        self.start = None;
        // What was too short to be told was a click.
        let edge = std::mem::take(&mut self.told).then_some(Edge::End { at, ends_turn });
        if edge.is_some() {
            self.is_turn_open = !ends_turn;
        }
        edge
    }

    /// The end of the audio or of a turn, whatever was said: the end of what was told.
    pub fn cut(&mut self) -> Option<Edge> {
        let open = std::mem::take(&mut self.is_turn_open);
        let edge = self.end(self.silent_since.unwrap_or(self.at), true);
        edge.or(open.then_some(Edge::TurnEnd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(options: VadOptions, probabilities: &[(f32, usize)]) -> Vec<Edge> {
        let mut cutter = Cutter::new(options);
        let all = probabilities.iter().flat_map(|(p, count)| std::iter::repeat_n(*p, *count));
        let mut edges: Vec<Edge> = all.filter_map(|p| cutter.push(p)).collect();
        edges.extend(cutter.cut());
        edges
    }

    #[test]
    fn a_pause_ends_an_utterance_and_a_click_is_none() {
        let found = edges(VadOptions::LIVE, &[(0.0, 10), (0.9, 2), (0.0, 30), (0.9, 40), (0.0, 40)]);
        assert_eq!(found, [Edge::Start(42 * FRAME), Edge::End { at: 82 * FRAME, ends_turn: true }]);
    }

    #[test]
    fn a_short_pause_ends_one_that_is_long() {
        let short = SHORT_PAUSE.div_ceil(FRAME);
        let (few, many) = (100, LONG / FRAME + 1);
        assert_eq!(edges(VadOptions::LIVE, &[(0.9, few), (0.0, short), (0.9, few)]).len(), 2);
        let found = edges(VadOptions::LIVE, &[(0.9, many), (0.0, short), (0.9, few)]);
        assert_eq!(found[1], Edge::End { at: many * FRAME, ends_turn: false });
        assert_eq!(found.len(), 4, "{found:?}");
    }

    #[test]
    fn a_turn_ends_with_the_pause_behind_its_last_utterance_however_that_ended() {
        for (spoken, silent) in
            [(LONG / FRAME + 1, 100), (VERY_LONG / FRAME + 1, 100), (LONGEST / FRAME - 38, 100)]
        {
            let found = edges(VadOptions::LIVE, &[(0.9, spoken), (0.0, silent)]);
            let ends = |edge: &&Edge| matches!(edge, Edge::TurnEnd | Edge::End { ends_turn: true, .. });
            assert_eq!(found.iter().filter(ends).count(), 1, "{spoken}: {found:?}");
        }
        // Where the audio ends before the pause does, the turn ends with it.
        let found =
            edges(VadOptions::LIVE, &[(0.9, LONG / FRAME + 1), (0.0, SHORT_PAUSE.div_ceil(FRAME) + 1)]);
        assert_eq!(found.last(), Some(&Edge::TurnEnd), "{found:?}");
    }

    #[test]
    fn none_is_longer_than_it_may_be_and_nothing_is_lost() {
        let found = edges(VadOptions::LIVE, &[(0.9, 3000)]);
        let mut last = 0;
        for pair in found.chunks(2) {
            let [Edge::Start(start), Edge::End { at, .. }] = pair else { panic!("{found:?}") };
            assert_eq!(*start, last);
            assert!(at - start + 2 * 300 * 16 <= LONGEST);
            last = *at;
        }
        assert_eq!(last, 3000 * FRAME);
    }
}
