//! Samples without a container: telephone lines, microphones.

use super::mix::Mixer;
use super::resample::{RATES, Resampler};
use super::{AudioError, AudioLimits};
use crate::types::speech::{PcmEncoding, PcmFormat};

impl PcmEncoding {
    /// The sample in `bytes`, which are as long as one.
    fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::S16, &[a, b]) => f32::from(i16::from_le_bytes([a, b])) / 32768.0,
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::MuLaw, &[code]) => f32::from(mu_law(code)) / 32768.0,
            (Self::ALaw, &[code]) => f32::from(a_law(code)) / 32768.0,
            _ => 0.0,
        }
    }
}

/// Turns raw samples into 16 kHz mono, however the bytes are cut: what comes out for the same bytes is
/// always the same, part of a frame waits for the rest.
pub struct PcmReader {
    format: PcmFormat,
    mixer: Mixer,
    resampler: Resampler,
    rest: Vec<u8>,
    frames: Vec<f32>,
    mono: Vec<f32>,
}

impl PcmReader {
    /// A reader for `format`.
    ///
    /// # Errors
    /// `TooManyChannels`, also for none; `Unsupported` for a rate out of range.
    pub fn new(format: PcmFormat) -> Result<Self, AudioError> {
        let limit = AudioLimits::default().max_channels;
        if format.channels == 0 || format.channels > limit {
            return Err(AudioError::TooManyChannels { channels: format.channels, limit });
        }
        let resampler = Resampler::new(format.rate).ok_or_else(|| unsupported_rate(format.rate, 0))?;
        Ok(Self {
            format,
            mixer: Mixer::new(format.channels, format.rate),
            resampler,
            rest: Vec::new(),
            frames: Vec::new(),
            mono: Vec::new(),
        })
    }

    /// Takes `bytes` and appends the samples that are ready.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<f32>) {
        let width = self.format.encoding.width();
        let frame = width * usize::from(self.format.channels);
        let mut bytes = bytes;
        if !self.rest.is_empty() {
            let missing = frame.saturating_sub(self.rest.len()).min(bytes.len());
            let (head, tail) = bytes.split_at(missing);
            self.rest.extend_from_slice(head);
            bytes = tail;
        }
        self.frames.clear();
        if self.rest.len() == frame {
            self.frames.extend(self.rest.chunks_exact(width).map(|sample| self.format.encoding.read(sample)));
            self.rest.clear();
        }
        let frames = bytes.chunks_exact(frame);
        self.rest.extend_from_slice(frames.remainder());
        self.frames.extend(
            frames
                .flat_map(|frame| frame.chunks_exact(width))
                .map(|sample| self.format.encoding.read(sample)),
        );
        self.mono.clear();
        self.mixer.push(&self.frames, &mut self.mono);
        self.resampler.push(&self.mono, out);
    }

    /// Appends the rest; part of a frame is dropped. The reader can be used for another stream then.
    pub fn finish(&mut self, out: &mut Vec<f32>) {
        self.rest.clear();
        self.mono.clear();
        self.mixer.finish(&mut self.mono);
        self.resampler.push(&self.mono, out);
        self.resampler.finish(out);
    }
}

/// The error for a rate that makes no sense.
pub(super) fn unsupported_rate(rate: u32, at: u64) -> AudioError {
    let found = format!("a sample rate of {rate} Hz (allowed: {} to {})", RATES.start(), RATES.end());
    AudioError::Unsupported { found, at }
}

/// ITU-T G.711: 14 bits, scaled to 16.
fn mu_law(code: u8) -> i16 {
    let code = !code;
    let magnitude = ((i16::from(code & 0x0f) << 3) + 0x84) << ((code & 0x70) >> 4);
    if code & 0x80 == 0 { magnitude - 0x84 } else { 0x84 - magnitude }
}

/// ITU-T G.711: 13 bits, scaled to 16.
fn a_law(code: u8) -> i16 {
    let code = code ^ 0x55;
    let step = i16::from(code & 0x0f) << 4;
    let magnitude = match (code & 0x70) >> 4 {
        0 => step + 8,
        exponent => (step + 0x108) << (exponent - 1),
    };
    if code & 0x80 == 0 { -magnitude } else { magnitude }
}
