//! Segments of a window's tokens, and where the next window begins.

use super::decode::Decoded;
use super::tokens::SpeechTokens;
use crate::types::speech::Segment;

/// Frames of a timestamp's step of 0.02 s.
const FRAMES_PER_STEP: usize = 2;

/// What a window's tokens come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Cut {
    /// In order; ids are 0, times include the offset.
    pub segments: Vec<Segment>,
    /// Frames from this window's first to the next one's.
    pub advance: usize,
    /// The text ends with one timestamp: the window holds all of it.
    pub single_ending: bool,
}

/// Cuts a window of `size` frames that begins at frame `seek`.
pub fn cut(tokens: &SpeechTokens, decoded: &Decoded, seek: usize, size: usize) -> Cut {
    let offset = seek as f64 / 100.0;
    let ids = &decoded.tokens;
    let time = |id: u32| tokens.time_of(id);
    let is_time = |index: usize| ids.get(index).is_some_and(|id| time(*id).is_some());
    let single_ending = ids.len() >= 2 && !is_time(ids.len() - 2) && is_time(ids.len() - 1);
    let mut cuts: Vec<usize> = (1..ids.len()).filter(|index| is_time(*index) && is_time(index - 1)).collect();
    let mut segments = Vec::new();
    let mut add = |start: f64, end: f64, range: std::ops::Range<usize>| {
        let slice = &ids[range.clone()];
        let text = tokens.decode(slice);
        if text.trim().is_empty() || end <= start {
            return;
        }
        let logprobs = decoded.logprobs.get(range).unwrap_or(&[]);
        let texts = slice.iter().zip(logprobs).filter(|(id, _)| **id < tokens.eot);
        segments.push(Segment {
            id: 0,
            seek,
            start,
            end,
            text,
            tokens: slice.to_vec(),
            token_texts: texts.clone().map(|(id, _)| tokens.bytes(*id)).collect(),
            logprobs: texts.map(|(_, logprob)| *logprob).collect(),
            temperature: decoded.temperature,
            avg_logprob: decoded.avg_logprob,
            compression_ratio: decoded.compression_ratio,
            no_speech_prob: decoded.no_speech_prob,
            words: Vec::new(),
        });
    };
    let seconds = |index: u32| (offset * 100.0 + f64::from(index) * 2.0).round() / 100.0;
    let advance = if cuts.is_empty() {
        let last = ids.iter().rev().find_map(|id| time(*id)).filter(|index| *index > 0);
        let end = last.map_or(((seek + size) as f64) / 100.0, seconds);
        add(offset, end, 0..ids.len());
        size
    } else {
        if single_ending {
            cuts.push(ids.len());
        }
        let mut from = 0;
        for to in &cuts {
            let slice = &ids[from..*to];
            let at = |id: Option<&u32>| id.and_then(|id| time(*id)).unwrap_or(0);
            add(seconds(at(slice.first())), seconds(at(slice.last())), from..*to);
            from = *to;
        }
        let last = ids.get(from.saturating_sub(1)).and_then(|id| time(*id)).unwrap_or(0) as usize;
        if single_ending { size } else { last * FRAMES_PER_STEP }
    };
    // Without progress the window would be decoded for ever.
    let advance = if advance == 0 { size } else { advance.min(size.max(1)) };
    Cut { segments, advance, single_ending }
}
