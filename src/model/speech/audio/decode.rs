//! The loop: packets out of the container, samples out of packets, one channel at 16 kHz out of those.

use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::packet::Packet;

use super::codec::{self, Codec, Failure};
use super::edits::{self, Edit};
use super::mix::Mixer;
use super::resample::Resampler;
use super::sniff::{self, Sniffed};
use super::source::{Input, Position};
use super::tally::Tally;
use super::tracks::{check_channels, choose, panic_text, refused};
use super::{AudioError, AudioInfo, AudioLimits, SAMPLE_RATE, Source, pcm};

/// [`Decoder::read`] comes back with so many samples at least.
const ENOUGH: usize = SAMPLE_RATE as usize / 10;

/// Reads a recording as 16 kHz mono, block by block.
pub struct Decoder {
    info: AudioInfo,
    limits: AudioLimits,
    format: Box<dyn FormatReader>,
    track: u32,
    codec: Codec,
    /// For the current rate and channels.
    chain: Option<(Mixer, Resampler)>,
    sniffed: Sniffed,
    position: Position,
    tally: Tally,
    /// Samples given, at 16 kHz.
    given: u64,
    mono: Vec<f32>,
    ended: bool,
    warning: Option<String>,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("info", &self.info).field("seconds", &self.seconds()).finish()
    }
}

impl Decoder {
    /// Finds out what `source` is and gets ready to decode it. Blocks on streams, for their header.
    ///
    /// # Errors
    /// `Empty`, `Unsupported`, `NoAudioTrack`, `Broken`, `TooManyChannels`.
    pub fn open(source: Source, limits: AudioLimits) -> Result<Self, AudioError> {
        let mut input = Input::new(source);
        let sniffed = sniff::sniff(&mut input)?;
        // Before a reader sees them: what is known of a WAV file is certain.
        if let Some(channels) = sniffed.channels {
            check_channels(channels, limits)?;
        }
        let position = input.position();
        let at = std::sync::Arc::clone(&position);
        catch_unwind(AssertUnwindSafe(move || Self::open_sniffed(input, sniffed, position, limits)))
            .unwrap_or_else(|panic| {
                Err(AudioError::Broken {
                    found: sniffed.container.unwrap_or("audio").to_owned(),
                    at: at.load(Ordering::Relaxed),
                    why: panic_text(panic.as_ref()),
                })
            })
    }

    fn open_sniffed(
        mut input: Input,
        sniffed: Sniffed,
        position: Position,
        limits: AudioLimits,
    ) -> Result<Self, AudioError> {
        let unknown = sniff::unknown(input.head(0).unwrap_or_default());
        let whole = input.whole().cloned();
        let stream = MediaSourceStream::new(Box::new(input), Default::default());
        let (options, metadata) = (FormatOptions::default(), MetadataOptions::default());
        let format = symphonia::default::get_probe()
            .probe(&Hint::new(), stream, options, metadata)
            .map_err(|error| refused(error, sniffed, unknown, position.load(Ordering::Relaxed)))?;
        let container = sniffed.container.unwrap_or(format.format_info().short_name);
        let at = position.load(Ordering::Relaxed);
        let (index, track, params) = choose(format.tracks(), container, at)?;
        let channels = params.channels.as_ref().map_or(0, |channels| channels.count());
        let channels = u16::try_from(channels).unwrap_or(u16::MAX);
        // Before there is a decoder for each of them.
        check_channels(channels.max(1), limits)?;
        let edit = match (&whole, container) {
            (Some(file), "mp4") => edits::edit(file, index).unwrap_or_default(),
            _ => Edit::default(),
        };
        let lame = track.delay.is_some();
        let codec = Codec::new(params, edit, lame).map_err(|failure| match failure {
            Failure::Unsupported(what) => {
                AudioError::Unsupported { found: format!("{what} in {container}"), at }
            }
            Failure::Broken(why) => AudioError::Broken { found: container.to_owned(), at, why },
        })?;
        let info = AudioInfo {
            container,
            codec: codec::name(params),
            channels,
            rate: params.sample_rate.unwrap_or(0),
        };
        let promised = if container == "mp3" && lame { track.num_frames } else { None };
        let tally = Tally::new(promised, matches!(container, "ogg" | "flac"));
        let track = track.id;
        Ok(Self {
            info,
            limits,
            format,
            track,
            codec,
            chain: None,
            sniffed,
            position,
            tally,
            given: 0,
            mono: Vec::new(),
            ended: false,
            warning: None,
        })
    }

    /// What it is.
    pub fn info(&self) -> &AudioInfo {
        &self.info
    }

    /// After the end: why the audio ended early, if it did. What was readable was delivered. None for
    /// streams that simply stop where that is normal.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Seconds delivered so far.
    pub fn seconds(&self) -> f64 {
        self.given as f64 / f64::from(SAMPLE_RATE)
    }

    /// Appends some samples (16 kHz, mono; a tenth of a second or a packet, whichever is more). False
    /// at the end: nothing more will come. Blocks on streams.
    ///
    /// # Errors
    /// `TooLong`, `TooManyChannels`, `Unsupported` for a rate that makes no sense, `Broken` where more
    /// packets were bad than good or the stream failed. The decoder has ended then.
    pub fn read(&mut self, out: &mut Vec<f32>) -> Result<bool, AudioError> {
        if self.ended {
            return Ok(false);
        }
        let before = out.len();
        let result = catch_unwind(AssertUnwindSafe(|| {
            while !self.ended && out.len() < before + ENOUGH {
                self.step(out)?;
            }
            Ok(())
        }))
        .unwrap_or_else(|panic| Err(self.broken(panic_text(panic.as_ref()))));
        self.given += (out.len() - before) as u64;
        // Of a WAV file it is known before it is decoded.
        let seconds = self.sniffed.seconds.unwrap_or(0.0).max(self.seconds());
        if result.is_ok() && seconds > self.limits.max_seconds {
            self.ended = true;
            return Err(AudioError::TooLong { limit_s: self.limits.max_seconds });
        }
        self.ended |= result.is_err();
        result.map(|()| !self.ended)
    }

    fn step(&mut self, out: &mut Vec<f32>) -> Result<(), AudioError> {
        match self.format.next_packet() {
            Ok(Some(packet)) if packet.track_id == self.track => self.take(&packet, out),
            Ok(Some(_)) => self.idled(),
            Ok(None) => self.finish(None, out),
            // Another file follows in the same stream: chained Ogg.
            Err(Error::ResetRequired) => match self.restart() {
                Ok(()) => self.idled(),
                Err(why) => self.finish(Some(format!("what follows cannot be read: {why}")), out),
            },
            Err(Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => {
                let reached = self.position.load(Ordering::Relaxed);
                let is_short = !self.sniffed.unbounded && self.sniffed.end.is_none_or(|end| reached < end);
                let short = is_short.then(|| "the file ends early".to_owned());
                self.finish(short, out)
            }
            Err(Error::IoError(error)) => Err(self.broken(error.to_string())),
            Err(error) if !self.tally.any_good() => Err(self.broken(error.to_string())),
            Err(error) => self.finish(Some(format!("the file is damaged: {error}")), out),
        }
    }

    fn take(&mut self, packet: &Packet, out: &mut Vec<f32>) -> Result<(), AudioError> {
        self.tally.arrived(packet);
        let block = match self.codec.decode(packet) {
            Ok(block) => block,
            Err(_) if self.tally.bad() => return self.idled(),
            Err(why) => return Err(self.broken(why)),
        };
        self.tally.good(block.samples.len() / usize::from(block.channels.max(1)));
        if block.samples.is_empty() {
            return self.idled();
        }
        self.mono.clear();
        let is_other = (block.channels, block.rate) != (self.info.channels, self.info.rate);
        if is_other || self.chain.is_none() {
            check_channels(block.channels, self.limits)?;
            let at = self.position.load(Ordering::Relaxed);
            let resampler =
                Resampler::new(block.rate).ok_or_else(|| pcm::unsupported_rate(block.rate, at))?;
            let fresh = (Mixer::new(block.channels, block.rate), resampler);
            if let Some(last) = self.chain.replace(fresh) {
                drain(last, &mut self.mono, out);
            }
            (self.info.channels, self.info.rate) = (block.channels, block.rate);
        }
        if let Some((mixer, resampler)) = &mut self.chain {
            mixer.push(block.samples, &mut self.mono);
            resampler.push(&self.mono, out);
        }
        Ok(())
    }

    /// Nothing came of a packet.
    fn idled(&mut self) -> Result<(), AudioError> {
        if self.tally.idled() {
            return Ok(());
        }
        Err(self.broken("there is no end of empty packets".to_owned()))
    }

    fn restart(&mut self) -> Result<(), String> {
        let at = self.position.load(Ordering::Relaxed);
        let (_, track, params) =
            choose(self.format.tracks(), self.info.container, at).map_err(|error| error.to_string())?;
        self.codec =
            Codec::new(params, Edit::default(), track.delay.is_some()).map_err(Failure::into_text)?;
        self.track = track.id;
        self.tally.restarted();
        Ok(())
    }

    /// Delivers the rest; `short` is why it is not all there is, if so.
    fn finish(&mut self, short: Option<String>, out: &mut Vec<f32>) -> Result<(), AudioError> {
        self.ended = true;
        if let Some(why) = self.tally.mostly_bad() {
            return Err(self.broken(why));
        }
        self.mono.clear();
        if let Some(last) = self.chain.take() {
            drain(last, &mut self.mono, out);
        }
        let at = self.position.load(Ordering::Relaxed);
        let missing = self.sniffed.missing;
        self.warning = short
            .map(|why| format!("{why}: at byte {at}"))
            .or_else(|| (missing > 0).then(|| format!("the file ends early: {missing} bytes are missing")))
            .or_else(|| self.tally.remark());
        Ok(())
    }

    fn broken(&self, why: String) -> AudioError {
        AudioError::Broken {
            found: format!("{} in {}", self.info.codec, self.info.container),
            at: self.position.load(Ordering::Relaxed),
            why,
        }
    }
}

/// Empties what waits in a chain.
fn drain((mut mixer, mut resampler): (Mixer, Resampler), mono: &mut Vec<f32>, out: &mut Vec<f32>) {
    mono.clear();
    mixer.finish(mono);
    resampler.push(mono, out);
    resampler.finish(out);
    mono.clear();
}
