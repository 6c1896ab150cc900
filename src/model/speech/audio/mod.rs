//! From the bytes of a recording, or of a telephone line, to samples at 16 kHz, mono.
//!
//! [`Decoder`] reads files and streams: what they are is found out from their content, never from a
//! name. It works as a stream: a block of the source is demultiplexed, decoded, mixed down to one
//! channel and resampled, so that hours of audio need no more memory than seconds of it.
//! [`PcmReader`] does the same for samples without a container.
//!
//! Broken input never panics and never costs more than its limits: what can be read is delivered,
//! and [`Decoder::warning`] says why the audio ended early.

mod codec;
mod decode;
mod edits;
mod mix;
mod opus;
mod pcm;
mod resample;
mod riff;
mod sniff;
mod source;
mod tally;
mod tracks;

pub use crate::types::speech::{PcmEncoding, PcmFormat};
pub use decode::Decoder;
pub use pcm::PcmReader;

use bytes::Bytes;

/// Samples a second of everything that leaves this module.
pub const SAMPLE_RATE: u32 = 16_000;

/// What is read, for error messages.
const SUPPORTED: &str = "WAV, AIFF, CAF, FLAC, MP3, AAC (LC), ALAC, Ogg (Vorbis, Opus, FLAC), MP4/M4A and \
                         WebM/Matroska are supported";

/// Where decoding stops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AudioLimits {
    /// Most seconds of decoded audio.
    pub max_seconds: f64,
    /// Most channels.
    pub max_channels: u16,
}

impl Default for AudioLimits {
    fn default() -> Self {
        Self { max_seconds: 4.0 * 3600.0, max_channels: 8 }
    }
}

/// Where the bytes come from.
pub enum Source {
    /// A whole file, in memory.
    Memory(Bytes),
    /// Bytes as they arrive. Cannot go back, so MP4 files with their index at the end and some CAF
    /// files are refused. Reading blocks.
    Stream(Box<dyn std::io::Read + Send + Sync>),
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory(bytes) => write!(f, "Memory({} bytes)", bytes.len()),
            Self::Stream(_) => f.write_str("Stream"),
        }
    }
}

/// What a recording turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AudioInfo {
    /// The container's short name: `wav`, `mp4`, `webm`, …
    pub container: &'static str,
    /// The codec's short name: `pcm_s16le`, `aac`, `opus`, …
    pub codec: String,
    /// Channels: as the header says until the first samples are read, 0 where it does not.
    pub channels: u16,
    /// Samples a second and channel: as the header says until the first samples are read, 0 where it does
    /// not.
    pub rate: u32,
}

/// Why a recording cannot be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AudioError {
    /// No bytes at all.
    #[error("the audio file is empty")]
    Empty,
    /// Not audio, or audio in a form that is not read.
    #[error(
        "the audio could not be decoded or its format is not supported: found {found} at byte {at}; {}",
        SUPPORTED
    )]
    Unsupported {
        /// What it looks like.
        found: String,
        /// At which byte, about.
        at: u64,
    },
    /// A container without audio in it.
    #[error("there is no audio track in this {found} file")]
    NoAudioTrack {
        /// The container's name.
        found: &'static str,
    },
    /// Audio of a known form that is too damaged to be read.
    #[error("the audio could not be decoded: {found} is broken at byte {at}: {why}")]
    Broken {
        /// What it is.
        found: String,
        /// At which byte, about.
        at: u64,
        /// What is wrong with it.
        why: String,
    },
    /// More audio than is allowed.
    #[error("the audio is longer than {limit_s} seconds")]
    TooLong {
        /// The limit in seconds.
        limit_s: f64,
    },
    /// More channels than are allowed, or none.
    #[error("the audio has {channels} channels; 1 to {limit} are supported")]
    TooManyChannels {
        /// Channels in the file.
        channels: u16,
        /// The most that are read.
        limit: u16,
    },
}

/// Decodes a whole file: samples (16 kHz, mono), what it was, and why it ended early if it did.
///
/// # Errors
/// As [`Decoder::open`] and [`Decoder::read`].
pub fn decode_all(
    bytes: Bytes,
    limits: AudioLimits,
) -> Result<(Vec<f32>, AudioInfo, Option<String>), AudioError> {
    let mut decoder = Decoder::open(Source::Memory(bytes), limits)?;
    let mut samples = Vec::new();
    while decoder.read(&mut samples)? {}
    Ok((samples, decoder.info().clone(), decoder.warning().map(str::to_owned)))
}

/// NaN, infinities and absurd values, which float files can hold, would spread over everything near them, or
/// drown it. Some files hold whole numbers of up to 24 bits.
fn finite(sample: f32) -> f32 {
    if sample.abs() <= 1e7 { sample } else { 0.0 }
}
