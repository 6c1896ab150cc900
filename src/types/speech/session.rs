//! Live sessions as plain data: how audio comes, what is heard meanwhile, and how it ends.

use std::sync::Arc;
use std::time::Duration;

use super::{Format, Segment, SpeechFailure, SpeechOptions, Transcription, VadOptions, Word};

/// How a sample is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PcmEncoding {
    /// 16 bits, signed, little-endian.
    S16,
    /// 32-bit float, little-endian, full scale 1.
    F32,
    /// G.711 µ-law, 8 bits.
    MuLaw,
    /// G.711 A-law, 8 bits.
    ALaw,
}

impl PcmEncoding {
    /// Bytes a sample.
    pub fn width(self) -> usize {
        match self {
            Self::S16 => 2,
            Self::F32 => 4,
            Self::MuLaw | Self::ALaw => 1,
        }
    }
}

/// What raw bytes of audio are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcmFormat {
    /// How a sample is written.
    pub encoding: PcmEncoding,
    /// Frames a second, 1 to 384 kHz.
    pub rate: u32,
    /// Interleaved channels, 1 to 8.
    pub channels: u16,
}

impl PcmFormat {
    /// Bytes of one second.
    pub fn bytes_per_second(self) -> usize {
        self.encoding.width() * self.rate as usize * usize::from(self.channels)
    }
}

/// How a session's audio comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LiveInput {
    /// Raw samples, cut anywhere.
    Pcm(PcmFormat),
    /// One file of any kind that can be read from its beginning on, cut anywhere.
    Container,
}

/// What is asked of a session. Times that are `None` are the server's.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionSpec {
    /// For the recogniser; `vad` says when an utterance ends, and is [`VadOptions::LIVE`] where it is `None`.
    pub options: SpeechOptions,
    /// Which model; `None`: the one there is.
    pub model: Option<String>,
    /// How the finished text is written.
    pub format: Format,
    /// How the audio comes.
    pub input: LiveInput,
    /// Text is wanted while somebody speaks, not only after.
    pub partials: bool,
    /// A turn ends only when the client says so, however long nobody speaks.
    pub manual_turns: bool,
    /// Longest audio.
    pub max_duration: Option<Duration>,
    /// Without audio for so long, the session finishes by itself.
    pub idle: Option<Duration>,
}

impl Default for SessionSpec {
    fn default() -> Self {
        let options = SpeechOptions { vad: Some(VadOptions::LIVE), ..SpeechOptions::default() };
        let pcm = PcmFormat { encoding: PcmEncoding::S16, rate: 16_000, channels: 1 };
        Self {
            options,
            model: None,
            format: Format::Json,
            input: LiveInput::Pcm(pcm),
            partials: true,
            manual_turns: false,
            max_duration: None,
            idle: None,
        }
    }
}

/// Where a session is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SessionStatus {
    /// Takes audio.
    #[default]
    Open,
    /// Takes none any more; what came is being written down.
    Finishing,
    /// All is written down.
    Done,
    /// Given up by its client.
    Cancelled,
    /// Ended by an error.
    Failed,
}

impl SessionStatus {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Finishing => "finishing",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// Why audio was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// The session takes no audio any more.
    #[error("the session is {} and takes no audio any more", .status.name())]
    Closed {
        /// What it is.
        status: SessionStatus,
    },
    /// It had as much audio as it may have, and finished by itself.
    #[error("the session has reached its longest duration and finished by itself")]
    DurationLimit,
    /// A chunk before this one is missing.
    #[error("the next chunk has seq {expected}")]
    OutOfOrder {
        /// The chunk that is missing.
        expected: u64,
    },
    /// Earlier audio waits for being heard.
    #[error("as much audio as may wait is waiting to be heard already")]
    Full,
}

/// What happens in a session, each once and in order; times in seconds of the audio.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum SessionEvent {
    /// Somebody speaks.
    SpeechStarted {
        /// From 0, in the session.
        utterance: usize,
        /// That it is part of, from 0.
        turn: usize,
        /// When.
        start: f64,
    },
    /// They do not any more, or have for as long as an utterance may be.
    SpeechStopped {
        /// Which.
        utterance: usize,
        /// When.
        end: f64,
    },
    /// The text that grew while somebody spoke has grown to its end.
    Committed {
        /// Which.
        utterance: usize,
        /// All of the utterance's.
        text: String,
        /// With times, where it grew; empty without partials.
        words: Vec<Word>,
    },
    /// What the whole utterance says, heard once more: may differ from what was committed.
    Final {
        /// Which.
        utterance: usize,
        /// All of it.
        text: String,
        /// With times.
        segments: Vec<Segment>,
    },
    /// A turn is over; its text may not be there yet.
    TurnEnded {
        /// Which.
        turn: usize,
        /// When.
        end: f64,
    },
    /// All of a turn's utterances are final.
    TurnFinal {
        /// Which.
        turn: usize,
    },
    /// What was said in a turn was dropped, as the client asked; the next turn begins.
    Cleared {
        /// Which.
        turn: usize,
    },
}

/// Text under way; the newest replaces those before.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Partial {
    /// Grows with every change of the session.
    pub revision: u64,
    /// Which.
    pub utterance: usize,
    /// Of this utterance: only grows.
    pub committed: String,
    /// May change.
    pub tentative: String,
    /// Seconds of audio that were heard for it.
    pub audio_s: f64,
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEnd {
    /// All that was said.
    Done(Arc<Transcription>),
    /// An error.
    Failed(SpeechFailure),
    /// By its client.
    Cancelled,
}

/// What a reader is told.
#[derive(Clone, Debug, PartialEq)]
pub enum SessionNews {
    /// Happens once; never left out.
    Event(Arc<SessionEvent>),
    /// The newest; older ones that were not read in time are left out.
    Partial(Partial),
    /// Nothing comes after it.
    End(SessionEnd),
}

/// A session at a moment.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionState {
    /// Where it is in its life.
    pub status: SessionStatus,
    /// Grows with every change.
    pub revision: u64,
    /// Seconds of audio that came.
    pub received_s: f64,
    /// Seconds of audio that are done with.
    pub processed_s: f64,
    /// Committed text since the revision that was asked for, of all utterances.
    pub committed: String,
    /// Text that may change.
    pub tentative: String,
}
