//! What a session's audio thread does: bytes to samples, samples to utterances.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::inlet::{Inlet, InletReader, Item, Mark};
use super::utterances::{Cutter, Edge};
use crate::model::speech::SAMPLE_RATE;
use crate::model::speech::audio::{AudioError, AudioLimits, Decoder, PcmReader, Source};
use crate::model::speech::features::{QUIET, fault};
use crate::model::speech::vad::{FRAME, VadStream};
use crate::types::speech::{AudioFault, AudioFaultKind, LiveInput, PcmFormat, SessionSpec, VadOptions};

/// Samples that are told at a time: a tenth of a second.
const BLOCK: usize = SAMPLE_RATE as usize / 10;
/// What is told and not taken yet, at most.
const WAITING: usize = 64;

/// What was heard, in order. Places are samples at 16 kHz from the beginning.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// All up to here.
    Until(usize),
    /// An utterance begins here, which is some time ago.
    Started(usize),
    /// More of it.
    Samples(Vec<f32>),
    /// It ends here: more may have been told of it.
    Stopped(usize),
    /// The turn is over.
    TurnEnded,
    /// What was told since the last turn is to be forgotten.
    Cleared,
    /// All was heard.
    Ended {
        /// As much as may be heard; there was more.
        is_too_long: bool,
        /// Why the audio ended early, where it did.
        warning: Option<String>,
    },
    /// The audio cannot be heard.
    Failed(AudioFault),
}

/// Finds utterances in samples; see the module.
pub struct Ear {
    vad: VadStream,
    cutter: Cutter,
    manual_turns: bool,
    /// Samples from `base` on.
    kept: Vec<f32>,
    base: usize,
    /// Up to here it is known whether somebody speaks.
    heard: usize,
    /// The last utterance ended here: the next one does not begin before.
    spoken: usize,
    /// Up to here the utterance under way was told.
    told: Option<usize>,
    /// Up to here silence was told.
    quiet: usize,
    probabilities: Vec<f32>,
}

impl Ear {
    /// Nothing heard yet. `None` where the voice detector cannot be read, a fault of the program.
    pub fn new(options: VadOptions, manual_turns: bool) -> Option<Self> {
        Some(Self {
            vad: VadStream::new()?,
            cutter: Cutter::new(options),
            manual_turns,
            kept: Vec::new(),
            base: 0,
            heard: 0,
            spoken: 0,
            told: None,
            quiet: 0,
            probabilities: Vec::new(),
        })
    }

    fn total(&self) -> usize {
        self.base + self.kept.len()
    }

    /// Takes samples.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<Heard>) {
        self.kept.extend_from_slice(samples);
        while self.total() - self.heard >= FRAME {
            let at = self.heard - self.base;
            let frame = &self.kept[at..at + FRAME];
            let energy: f64 = frame.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            self.vad.push(frame, &mut self.probabilities);
            // Nobody is heard in near silence, whatever the detector thinks.
            let loud = if energy < QUIET * FRAME as f64 { 0.0 } else { 1.0 };
            let probability = self.probabilities.drain(..).next_back().unwrap_or(0.0) * loud;
            self.heard += FRAME;
            let edge = self.cutter.push(probability);
            self.edge(edge, out);
            self.tell(BLOCK, out);
        }
        let mut needed = self.heard.saturating_sub(self.cutter.lookback());
        if let Some(start) = self.cutter.pending() {
            needed = needed.min(start.saturating_sub(self.cutter.pad()));
        }
        let from = self.told.unwrap_or(needed).min(needed).max(self.base);
        self.kept.drain(..from - self.base);
        self.base = from;
    }

    fn edge(&mut self, edge: Option<Edge>, out: &mut Vec<Heard>) {
        match edge {
            None => {}
            Some(Edge::TurnEnd) if self.manual_turns => {}
            Some(Edge::TurnEnd) => out.push(Heard::TurnEnded),
            Some(Edge::Start(at)) => {
                let from = at.saturating_sub(self.cutter.pad()).max(self.spoken).max(self.base);
                self.told = Some(from);
                out.push(Heard::Started(from));
            }
            Some(Edge::End { at, ends_turn }) => {
                self.tell(1, out);
                let end = (at + self.cutter.pad()).min(self.heard);
                self.spoken = end;
                self.told = None;
                out.push(Heard::Stopped(end));
                if ends_turn && !self.manual_turns {
                    out.push(Heard::TurnEnded);
                }
            }
        }
    }

    /// Tells what is not told yet, where it is so much.
    fn tell(&mut self, least: usize, out: &mut Vec<Heard>) {
        if let Some(told) = self.told {
            if self.heard - told >= least {
                out.push(Heard::Samples(self.kept[told - self.base..self.heard - self.base].to_vec()));
                self.told = Some(self.heard);
            }
        } else if self.heard - self.quiet >= 5 * least {
            self.quiet = self.heard;
            out.push(Heard::Until(self.heard));
        }
    }

    /// What a client says between two samples.
    pub fn mark(&mut self, mark: Mark, out: &mut Vec<Heard>) {
        let edge = self.cutter.cut();
        match mark {
            Mark::Commit => {
                if let Some(Edge::End { at, .. }) = edge {
                    self.edge(Some(Edge::End { at, ends_turn: false }), out);
                }
                out.push(Heard::TurnEnded);
            }
            Mark::Clear => {
                self.spoken = self.heard;
                self.told = None;
                out.push(Heard::Cleared);
            }
        }
    }

    /// The end of the audio.
    pub fn finish(&mut self, out: &mut Vec<Heard>) {
        let (total, told) = (self.total(), out.len());
        if total > self.heard {
            // The rest of a frame, with silence behind it.
            let missing = self.heard + FRAME - total;
            self.push(&vec![0.0; missing], out);
        }
        let edge = self.cutter.cut();
        self.edge(edge, out);
        out.push(Heard::Until(total));
        for heard in &mut out[told..] {
            if let Heard::Until(at) | Heard::Stopped(at) = heard {
                *at = total.min(*at);
            }
        }
    }
}

/// Samples of a session, until it ends or nobody listens.
pub(super) struct Listener {
    ear: Ear,
    to: mpsc::Sender<Heard>,
    left: usize,
    out: Vec<Heard>,
}

/// Nobody listens any more.
pub(super) struct Gone;

impl Listener {
    /// Takes samples; true where there may be no more.
    fn push(&mut self, samples: &[f32]) -> Result<bool, Gone> {
        let taken = samples.len().min(self.left);
        self.left -= taken;
        self.ear.push(&samples[..taken], &mut self.out);
        self.send()?;
        Ok(taken < samples.len())
    }

    pub(super) fn mark(&mut self, mark: Mark) -> Result<(), Gone> {
        self.ear.mark(mark, &mut self.out);
        self.send()
    }

    fn send(&mut self) -> Result<(), Gone> {
        self.out.drain(..).try_for_each(|heard| self.to.blocking_send(heard).map_err(|_| Gone))
    }

    fn end(mut self, is_too_long: bool, warning: Option<String>) -> Result<(), Gone> {
        self.ear.finish(&mut self.out);
        self.out.push(Heard::Ended { is_too_long, warning });
        self.send()
    }

    fn pcm(mut self, format: PcmFormat, inlet: &Inlet) -> Result<(), Gone> {
        let mut reader = match PcmReader::new(format) {
            Ok(reader) => reader,
            Err(error) => return self.fail(fault(&error)),
        };
        let mut samples = Vec::new();
        while let Some(item) = inlet.take() {
            let bytes = match item {
                Item::Bytes(bytes) => bytes,
                Item::Mark(mark) => {
                    self.mark(mark)?;
                    continue;
                }
            };
            // A second at a time, so that a large chunk waits as many small ones would.
            for bytes in bytes.chunks(format.bytes_per_second().max(1)) {
                samples.clear();
                reader.push(bytes, &mut samples);
                if self.push(&samples)? {
                    return self.end(true, None);
                }
            }
        }
        samples.clear();
        reader.finish(&mut samples);
        let is_too_long = self.push(&samples)?;
        self.end(is_too_long, None)
    }

    fn container(self, inlet: &Arc<Inlet>) -> Result<(), Gone> {
        // The reader is inside the decoder when it comes upon a mark, and tells the listener itself: what was
        // decoded before is heard already, but for a tenth of a second and what a packet was not whole yet.
        let listener = Arc::new(Mutex::new(Some(self)));
        let with = |act: &mut dyn FnMut(&mut Self) -> Result<bool, Gone>| {
            let mut listener = listener.lock().unwrap_or_else(PoisonError::into_inner);
            listener.as_mut().map_or(Err(Gone), act)
        };
        let take = || listener.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(Gone);
        let reader =
            InletReader { inlet: Arc::clone(inlet), rest: Bytes::new(), listener: Arc::clone(&listener) };
        let limits = AudioLimits { max_seconds: f64::MAX, ..AudioLimits::default() };
        let mut decoder = match Decoder::open(Source::Stream(Box::new(reader)), limits) {
            Ok(decoder) => decoder,
            // A session may end before anything was said.
            Err(AudioError::Empty) => return take()?.end(false, None),
            Err(error) => return take()?.fail(fault(&error)),
        };
        let mut samples = Vec::new();
        loop {
            samples.clear();
            let more = match decoder.read(&mut samples) {
                Ok(more) => more,
                // What was said before is not given up for a broken end.
                Err(error) if decoder.seconds() > 0.0 => return take()?.end(false, Some(error.to_string())),
                Err(error) => return take()?.fail(fault(&error)),
            };
            if with(&mut |listener| listener.push(&samples))? {
                return take()?.end(true, None);
            }
            if !more {
                return take()?.end(false, decoder.warning().map(str::to_owned));
            }
        }
    }

    fn fail(mut self, fault: AudioFault) -> Result<(), Gone> {
        self.out.push(Heard::Failed(fault));
        self.send()
    }
}

/// Starts a thread that hears what comes through `inlet`, for at most so many samples.
///
/// # Errors
/// Where there is no thread to be had.
pub fn listen(
    spec: &SessionSpec,
    inlet: Arc<Inlet>,
    most_samples: usize,
) -> io::Result<mpsc::Receiver<Heard>> {
    let (to, receiver) = mpsc::channel(WAITING);
    let (input, manual_turns) = (spec.input, spec.manual_turns);
    let vad = spec.options.vad.unwrap_or(VadOptions::LIVE);
    std::thread::Builder::new().name("greenroom-ear".into()).spawn(move || {
        let Some(ear) = Ear::new(vad, manual_turns) else {
            let message = "the voice detector cannot be read".into();
            let fault = AudioFault { kind: AudioFaultKind::Undecodable, message };
            let _gone = to.blocking_send(Heard::Failed(fault));
            return;
        };
        let listener = Listener { ear, to, left: most_samples, out: Vec::new() };
        let heard = match input {
            LiveInput::Pcm(format) => listener.pcm(format, &inlet),
            LiveInput::Container => listener.container(&inlet),
        };
        if heard.is_err() {
            tracing::debug!("a session ended before its audio");
        }
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::speech::audio::decode_all;
    use crate::model::speech::live::utterances::LONGEST;

    /// An utterance as it was told.
    fn utterances(out: &[Heard]) -> Vec<(usize, usize, Vec<f32>)> {
        let mut all: Vec<(usize, usize, Vec<f32>)> = Vec::new();
        for heard in out {
            match heard {
                Heard::Started(at) => all.push((*at, 0, Vec::new())),
                Heard::Samples(samples) => all.last_mut().unwrap().2.extend(samples),
                Heard::Stopped(at) => {
                    let last = all.last_mut().unwrap();
                    last.1 = *at;
                    last.2.truncate(at - last.0);
                }
                _ => {}
            }
        }
        all
    }

    fn clip(name: &str) -> Vec<f32> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/audio").join(name);
        decode_all(std::fs::read(path).unwrap().into(), AudioLimits::default()).unwrap().0
    }

    fn told(audio: &[f32], cuts: &[usize]) -> Vec<(usize, usize, Vec<f32>)> {
        let mut ear = Ear::new(VadOptions::LIVE, false).unwrap();
        let (mut out, mut at) = (Vec::new(), 0);
        for cut in cuts.iter().cycle() {
            if at == audio.len() {
                break;
            }
            let end = (at + cut).min(audio.len());
            ear.push(&audio[at..end], &mut out);
            at = end;
        }
        ear.finish(&mut out);
        utterances(&out)
    }

    #[test]
    fn utterances_are_the_same_however_the_audio_is_cut() {
        let mut audio = vec![0.0; 16_000];
        for name in ["ps-goforward.wav", "long-60s.wav", "ps-something.wav"] {
            audio.extend(clip(name));
            audio.extend(vec![0.0; 20_000]);
        }
        let whole = told(&audio, &[audio.len()]);
        assert!(whole.len() >= 3, "{} utterances", whole.len());
        for (from, to, samples) in &whole {
            assert!(samples.len() <= LONGEST);
            assert_eq!(samples[..], audio[*from..(*to).min(audio.len())]);
        }
        // A short word, a gap, and speech: the word belongs to it.
        let mut hesitant = vec![0.0; 16_000];
        hesitant.extend_from_slice(&clip("jfk.wav")[8_000..9_600]);
        hesitant.extend(vec![0.0; 8_192]);
        hesitant.extend(clip("jfk.wav"));
        let once = told(&hesitant, &[hesitant.len()]);
        for cuts in [&[320][..], &[1600], &[16_000]] {
            assert_eq!(told(&hesitant, cuts), once, "{cuts:?}");
        }
        for cuts in [&[1, 7, 512, 100][..], &[1600], &[511, 513], &[30_000]] {
            assert_eq!(told(&audio, cuts), whole, "{cuts:?}");
        }
    }
}
