//! Features of a recording, in bounded memory: what an audio thread does for a recogniser.
//!
//! Whisper's last step needs the loudest frame of all, and silence is known only when all was heard, so a
//! recording is gone through twice: once to look, once to give. A short one is decoded once and kept.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::audio::{AudioError, AudioLimits, Decoder, Source};
use super::mel::{self, MelStream};
use super::vad::{Stretches, VadStream};
use super::{HOP, SAMPLE_RATE};
use crate::types::speech::{AudioFault, AudioFaultKind, VadOptions};

/// Samples of a recording that are kept rather than decoded again: 10 minutes, 38 MB.
const KEPT: usize = 600 * SAMPLE_RATE as usize;
/// Frames that are handed over at once.
const BLOCK_FRAMES: usize = 500;
/// Blocks that wait for the recogniser: some seconds of audio each.
const WAITING_BLOCKS: usize = 4;
/// Below this mean square (−60 dBFS) nobody is heard.
pub(super) const QUIET: f64 = 1e-6;

/// What is to be heard.
#[derive(Clone, Debug)]
pub enum Recording {
    /// A file of any kind that [`super::audio`] knows.
    Encoded(Bytes),
    /// Samples at 16 kHz.
    Samples(Arc<[f32]>),
}

/// What a first look found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Survey {
    /// Samples in all.
    pub samples: usize,
    /// Of the frames that will come, log10.
    pub loudest: f32,
    /// Stretches that will come, in samples, in order.
    pub speech: Vec<Range<usize>>,
    /// Why the audio ended early, where it did.
    pub warning: Option<String>,
}

impl Survey {
    /// Seconds of the recording.
    pub fn seconds(&self) -> f64 {
        super::seconds(self.samples)
    }

    /// Frames that will come.
    pub fn frames(&self) -> usize {
        self.speech.iter().map(Range::len).sum::<usize>() / HOP
    }

    /// A moment among the frames, in seconds, as a moment of the recording; `ends` where something ends there:
    /// the end of a stretch belongs to it, not to the next one.
    pub fn original(&self, seconds: f64, ends: bool) -> f64 {
        seconds + self.shift(seconds, ends)
    }

    /// What [`Self::original`] adds.
    pub fn shift(&self, seconds: f64, ends: bool) -> f64 {
        let at = seconds * f64::from(SAMPLE_RATE);
        let mut before = 0;
        let mut shift = 0;
        for stretch in &self.speech {
            shift = stretch.start - before;
            before += stretch.len();
            let inside = if ends { at <= before as f64 } else { at < before as f64 };
            if inside {
                break;
            }
        }
        shift as f64 / f64::from(SAMPLE_RATE)
    }
}

/// What comes, in order: one survey, then frames.
#[derive(Clone, Debug, PartialEq)]
pub enum Feed {
    /// First.
    Survey(Survey),
    /// `[frames][mels]`, log10, not normalised.
    Frames(Vec<f32>),
    /// Last, where it went wrong.
    Failed(AudioFault),
}

/// Reads a recording from its beginning.
enum Reader {
    Decoder(Box<Decoder>),
    Samples(Arc<[f32]>, usize),
}

impl Reader {
    fn new(recording: &Recording, limits: &AudioLimits) -> Result<Self, AudioError> {
        Ok(match recording {
            Recording::Encoded(bytes) => {
                Self::Decoder(Box::new(Decoder::open(Source::Memory(bytes.clone()), *limits)?))
            }
            Recording::Samples(samples) => Self::Samples(Arc::clone(samples), 0),
        })
    }

    /// Some more samples; false at the end.
    fn read(&mut self, out: &mut Vec<f32>) -> Result<bool, AudioError> {
        out.clear();
        match self {
            Self::Decoder(decoder) => decoder.read(out),
            Self::Samples(samples, at) => {
                let end = samples.len().min(*at + SAMPLE_RATE as usize);
                out.extend_from_slice(&samples[*at..end]);
                *at = end;
                Ok(end < samples.len())
            }
        }
    }

    fn warning(&self) -> Option<String> {
        match self {
            Self::Decoder(decoder) => decoder.warning().map(str::to_owned),
            Self::Samples(..) => None,
        }
    }
}

/// Looks through all of a recording, unless nobody listens any more. Short ones come back decoded.
fn look(
    recording: &Recording,
    limits: &AudioLimits,
    mels: usize,
    vad: Option<VadOptions>,
    to: &mpsc::Sender<Feed>,
) -> Result<Option<(Survey, Recording)>, AudioError> {
    let mut reader = Reader::new(recording, limits)?;
    let mut stream = MelStream::new(mels);
    let mut voice = vad.and_then(|options| Some((VadStream::new()?, Stretches::new(options))));
    let (mut block, mut frames, mut tops) = (Vec::new(), Vec::new(), Vec::new());
    let mut probabilities = Vec::new();
    let (mut kept, mut samples, mut energy) = (Some(Vec::new()), 0, 0.0);
    let mut more = true;
    while more {
        if to.is_closed() {
            return Ok(None);
        }
        more = reader.read(&mut block)?;
        samples += block.len();
        energy += block.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
        kept = kept.filter(|kept: &Vec<f32>| kept.len() + block.len() <= KEPT);
        if let Some(kept) = &mut kept {
            kept.extend_from_slice(&block);
        }
        stream.push(&block, &mut frames);
        if !more {
            stream.finish(0, &mut frames);
        }
        tops.extend(frames.chunks_exact(mels).map(mel::loudest));
        frames.clear();
        if let Some((stream, stretches)) = &mut voice {
            stream.push(&block, &mut probabilities);
            if !more {
                stream.finish(&mut probabilities);
            }
            probabilities.drain(..).for_each(|probability| {
                stretches.push(probability);
            });
        }
    }
    let is_quiet = energy < QUIET * samples as f64;
    let speech = match voice {
        Some(_) if is_quiet => Vec::new(),
        Some((_, stretches)) => stretches.finish(samples),
        None => std::iter::once(0..samples).collect(),
    };
    let heard = speech.iter().flat_map(|stretch| {
        let end = tops.len().min(stretch.end.div_ceil(HOP));
        &tops[end.min(stretch.start / HOP)..end]
    });
    let loudest = heard.copied().fold(mel::SILENCE, f32::max);
    let survey = Survey { samples, loudest, speech, warning: reader.warning() };
    let recording = kept.map_or_else(|| recording.clone(), |kept| Recording::Samples(kept.into()));
    Ok(Some((survey, recording)))
}

pub(super) fn fault(error: &AudioError) -> AudioFault {
    let kind = match error {
        AudioError::Empty => AudioFaultKind::Empty,
        AudioError::TooLong { .. } => AudioFaultKind::TooLong,
        _ => AudioFaultKind::Undecodable,
    };
    AudioFault { kind, message: error.to_string() }
}

/// Starts a thread that gives all of a recording's features, and ends early once the receiver is dropped.
///
/// # Errors
/// Where there is no thread to be had.
pub fn start(
    recording: Recording,
    limits: AudioLimits,
    mels: usize,
    vad: Option<VadOptions>,
) -> std::io::Result<mpsc::Receiver<Feed>> {
    let (to, receiver) = mpsc::channel(WAITING_BLOCKS);
    std::thread::Builder::new().name("greenroom-audio".into()).spawn(move || {
        if let Err(error) = feed(&recording, &limits, mels, vad, &to) {
            // Nobody listens any more: nobody misses it.
            let _gone = to.blocking_send(Feed::Failed(fault(&error)));
        }
    })?;
    Ok(receiver)
}

fn feed(
    recording: &Recording,
    limits: &AudioLimits,
    mels: usize,
    vad: Option<VadOptions>,
    to: &mpsc::Sender<Feed>,
) -> Result<(), AudioError> {
    let Some((survey, recording)) = look(recording, limits, mels, vad, to)? else { return Ok(()) };
    let speech = survey.speech.clone();
    if to.blocking_send(Feed::Survey(survey)).is_err() || speech.is_empty() {
        return Ok(());
    }
    let mut reader = Reader::new(&recording, limits)?;
    let mut stream = MelStream::new(mels);
    let (mut block, mut frames, mut at, mut more) = (Vec::new(), Vec::new(), 0, true);
    while more {
        more = reader.read(&mut block)?;
        let here = at..at + block.len();
        at = here.end;
        for stretch in &speech {
            let (start, end) = (stretch.start.max(here.start), stretch.end.min(here.end));
            if start < end {
                stream.push(&block[start - here.start..end - here.start], &mut frames);
            }
        }
        if !more {
            stream.finish(0, &mut frames);
        }
        let is_due = !more || frames.len() >= BLOCK_FRAMES * mels;
        if is_due && to.blocking_send(Feed::Frames(std::mem::take(&mut frames))).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_recording() {
        let second = SAMPLE_RATE as usize;
        let speech = vec![10 * second..12 * second, 20 * second..21 * second];
        let survey = Survey { samples: 30 * second, speech, ..Survey::default() };
        assert_eq!(survey.original(0.5, false), 10.5);
        assert_eq!(survey.original(2.0, true), 12.0, "an end belongs to what ends");
        assert_eq!(survey.original(2.0, false), 20.0, "a beginning to what begins");
        assert_eq!(survey.original(2.5, true), 20.5);
        assert_eq!(survey.frames(), 300);
    }
}
