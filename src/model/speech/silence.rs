//! Text that was made up where nobody spoke: segments whose words are improbable, too short or too long, with
//! silence or more of the kind around them. What to do about it is OpenAI's, as published with Whisper's
//! `hallucination_silence_threshold`.

use crate::types::speech::{Segment, Word};

/// Words of a segment that are looked at.
const WORDS: usize = 8;
/// A segment whose words come to this is one of the kind.
const ANOMALOUS: f64 = 3.0;
/// A word of this probability is suspicious.
const IMPROBABLE: f64 = 0.15;
/// A word is said in this many seconds at least.
const SHORTEST: f64 = 0.133;
/// And in this many at most.
const LONGEST: f64 = 2.0;
/// Seconds at a window's ends that count as silence.
const EDGE: f64 = 2.0;
/// Marks that are not counted as words.
const MARKS: &str = "\"'“¿([{-\"'.。,，!！?？:：”)]}、";

/// Where a window lies, in seconds among the frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Its begin.
    pub start: f64,
    /// Its end.
    pub end: f64,
    /// The recording's end.
    pub content_end: f64,
    /// End of the latest speech before it.
    pub last_end: f64,
}

/// What is to be kept of a window's segments, and where to go on where that changes, in seconds among the frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept {
    /// As many of the first ones.
    pub segments: usize,
    /// Begin of the next window; `None` where it stays.
    pub next: Option<f64>,
}

/// Looks for made-up segments among those of a window that have their words. `threshold` is the silence, in
/// seconds, that makes a suspicious segment one.
pub fn sift(segments: &[Segment], span: Span, threshold: f64, single_ending: bool) -> Kept {
    let spoken = |segment: &&Segment| !segment.words.is_empty();
    let all = Kept { segments: segments.len(), next: None };
    let Some(first) = segments.iter().find(spoken) else { return all };
    let gap = first.start - span.start;
    if is_anomalous(first) && gap > threshold {
        return Kept { segments: 0, next: Some(span.start + gap) };
    }
    let mut before = span.last_end;
    for (index, segment) in segments.iter().enumerate().filter(|(_, segment)| spoken(segment)) {
        let after = segments[index + 1..].iter().find(spoken);
        if is_anomalous(segment) {
            let (start, end) = (segment.start, segment.end);
            let silence_before = start - before > threshold || start < threshold || start - span.start < EDGE;
            let next_start = after.map_or(span.end, |next| next.words[0].start);
            let silence_after =
                next_start - end > threshold || after.is_some_and(is_anomalous) || span.end - end < EDGE;
            if silence_before && silence_after {
                let is_last = span.content_end - end < threshold;
                let next = if is_last { span.content_end } else { start.max(span.start + 1.0) };
                return Kept { segments: index, next: Some(next) };
            }
        }
        before = segment.end;
    }
    // What comes after a long silence at the window's end is heard once more in the next one.
    let last = segments.iter().rev().find_map(|segment| segment.words.last()).map(|word| word.end);
    let next = last.filter(|end| !single_ending && *end > span.start);
    let next = next.map(|end| if span.end - end > threshold { end } else { span.end });
    Kept { next, ..all }
}

/// Whether a segment's words look made up.
fn is_anomalous(segment: &Segment) -> bool {
    let words = segment.words.iter().filter(|word| !is_mark(word)).take(WORDS);
    let (score, count) = words.fold((0.0, 0), |(score, count), word| (score + suspicion(word), count + 1));
    score >= ANOMALOUS || score + 0.01 >= f64::from(count)
}

fn is_mark(word: &Word) -> bool {
    !word.word.trim().is_empty() && MARKS.contains(word.word.trim())
}

fn suspicion(word: &Word) -> f64 {
    let seconds = word.end - word.start;
    f64::from(word.probability < IMPROBABLE)
        + 15.0 * (SHORTEST - seconds).max(0.0)
        + (seconds - LONGEST).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Span = Span { start: 30.0, end: 60.0, content_end: 90.0, last_end: 29.0 };

    /// A segment of words of a third of a second each.
    fn segment(start: f64, words: usize, probability: f64) -> Segment {
        let word = |index: usize| Word {
            word: " word".into(),
            start: start + index as f64 / 3.0,
            end: start + (index + 1) as f64 / 3.0,
            probability,
            ..Word::default()
        };
        let words: Vec<Word> = (0..words).map(word).collect();
        Segment { start, end: words.last().map_or(start, |word| word.end), words, ..Segment::default() }
    }

    fn real(start: f64, words: usize) -> Segment {
        segment(start, words, 0.9)
    }

    fn made_up(start: f64, words: usize) -> Segment {
        segment(start, words, 0.05)
    }

    #[test]
    fn what_was_said_is_kept() {
        let segments = [real(30.5, 9), real(34.0, 60)];
        assert_eq!(sift(&segments, SPAN, 2.0, true), Kept { segments: 2, next: None });
        assert_eq!(sift(&[], SPAN, 2.0, false), Kept { segments: 0, next: None });
        let without_words = [Segment { start: 30.0, end: 40.0, ..Segment::default() }];
        assert_eq!(sift(&without_words, SPAN, 2.0, false), Kept { segments: 1, next: None });
    }

    #[test]
    fn a_window_goes_on_at_its_last_word_where_silence_follows_alone() {
        let short = sift(&[real(30.5, 9)], SPAN, 2.0, false);
        assert_eq!(short, Kept { segments: 1, next: Some(33.5) });
        let full = sift(&[real(30.5, 85)], SPAN, 2.0, false);
        assert_eq!(full, Kept { segments: 1, next: Some(60.0) });
    }

    #[test]
    fn made_up_text_behind_silence_is_heard_from_its_begin_again() {
        let kept = sift(&[made_up(40.0, 6), real(43.0, 30)], SPAN, 2.0, true);
        assert_eq!(kept, Kept { segments: 0, next: Some(40.0) });
    }

    #[test]
    fn made_up_text_among_silence_goes_and_what_was_before_stays() {
        let segments = [real(30.5, 9), made_up(40.0, 6), real(50.0, 9)];
        assert_eq!(sift(&segments, SPAN, 2.0, true), Kept { segments: 1, next: Some(40.0) });
        // Too near to speech on one side.
        let segments = [real(30.5, 9), made_up(34.0, 6), real(50.0, 9)];
        assert_eq!(sift(&segments, SPAN, 2.0, true).segments, 3);
        // More of the kind counts as silence.
        let segments = [real(30.5, 9), made_up(40.0, 6), made_up(42.5, 6), real(44.6, 9)];
        assert_eq!(sift(&segments, SPAN, 2.0, true).segments, 1);
    }

    #[test]
    fn made_up_text_at_the_recordings_end_ends_it() {
        let span = Span { content_end: 60.0, ..SPAN };
        let segments = [real(30.5, 9), made_up(57.0, 6)];
        assert_eq!(sift(&segments, span, 2.0, true), Kept { segments: 1, next: Some(60.0) });
    }

    #[test]
    fn words_that_are_too_short_or_too_long_are_suspicious() {
        let lasting =
            |seconds: f64| Word { start: 1.0, end: 1.0 + seconds, probability: 0.9, ..Word::default() };
        assert_eq!(suspicion(&lasting(0.3)), 0.0);
        assert!((suspicion(&lasting(0.033)) - 1.5).abs() < 1e-9);
        assert!((suspicion(&lasting(4.5)) - 2.5).abs() < 1e-9);
        // Marks are not counted: one real word, unlikely, makes it.
        let mark = Word { word: " .".into(), ..lasting(0.0) };
        let one =
            Segment { words: vec![mark, Word { probability: 0.1, ..lasting(0.3) }], ..Segment::default() };
        assert!(is_anomalous(&one));
    }
}
