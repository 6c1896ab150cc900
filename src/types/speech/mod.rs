//! Speech as plain data: what may be asked, and what was said.

mod formats;
mod languages;
mod options;
mod session;

pub use formats::{Format, json, srt, usage, verbose, vtt, write};
pub use languages::{LANGUAGES, language_code, language_name};
pub use options::{SpeechOptions, VadOptions};
pub use session::{
    AppendError, LiveInput, Partial, PcmEncoding, PcmFormat, SessionEnd, SessionEvent, SessionNews,
    SessionSpec, SessionState, SessionStatus,
};

/// What is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Task {
    /// What is said.
    #[default]
    Transcribe,
    /// The same in English.
    Translate,
}

/// A word, its times in seconds of the recording.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Word {
    /// With its leading space; punctuation joined.
    pub word: String,
    /// Seconds.
    pub start: f64,
    /// Seconds.
    pub end: f64,
    /// Mean of its tokens'.
    pub probability: f64,
    /// How many tokens it is.
    pub tokens: usize,
}

/// A stretch of text with its times, in seconds of the recording.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Segment {
    /// From 0, in the recording.
    pub id: usize,
    /// First frame of its window.
    pub seek: usize,
    /// Seconds.
    pub start: f64,
    /// Seconds.
    pub end: f64,
    /// With its leading space.
    pub text: String,
    /// Timestamps included.
    pub tokens: Vec<u32>,
    /// Of its text tokens.
    pub logprobs: Vec<f32>,
    /// Bytes of its text tokens, as many.
    pub token_texts: Vec<Vec<u8>>,
    /// That its window was accepted at.
    pub temperature: f64,
    /// Of its window.
    pub avg_logprob: f64,
    /// Of its window.
    pub compression_ratio: f64,
    /// Of its window.
    pub no_speech_prob: f64,
    /// Where they were asked for.
    pub words: Vec<Word>,
}

/// What became of a recording.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Transcription {
    /// Code of the language; `None` where nobody spoke and none was given.
    pub language: Option<&'static str>,
    /// How sure that is; 1 where it was given.
    pub language_probability: f64,
    /// Seconds of the recording.
    pub duration: f64,
    /// In order.
    pub segments: Vec<Segment>,
    /// Why the audio ended early, where it did.
    pub warning: Option<String>,
}

impl Transcription {
    /// All text.
    pub fn text(&self) -> String {
        self.segments.iter().map(|segment| segment.text.as_str()).collect::<String>().trim().to_owned()
    }
}

/// What kind of fault a recording has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AudioFaultKind {
    /// No bytes.
    Empty,
    /// Nothing that could be read.
    Undecodable,
    /// Less than a tenth of a second.
    TooShort,
    /// More seconds than are allowed.
    TooLong,
}

/// A recording that cannot be heard.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct AudioFault {
    /// Which kind.
    pub kind: AudioFaultKind,
    /// What was found, where, and what would be right.
    pub message: String,
}

/// Why a recording got no transcript.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpeechFailure {
    /// The recording's fault.
    #[error(transparent)]
    Audio(AudioFault),
    /// An option that the model cannot serve.
    #[error("{field}: {message}")]
    Option {
        /// The request's field.
        field: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
    /// The model could not be loaded.
    #[error("the speech model is not available: {message}")]
    Unavailable {
        /// Why.
        message: String,
    },
    /// The server is going down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Ours to mend.
    #[error("{message}")]
    Internal {
        /// One sentence.
        message: String,
    },
}

/// What happens to a recording, in order: started, segments, then one of the last two.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum SpeechEvent {
    /// It was looked through and can be heard.
    Started {
        /// Its length.
        seconds: f64,
    },
    /// One more segment, which will not change.
    Segment(Segment),
    /// The end.
    Done(Transcription),
    /// The end as well.
    Failed(SpeechFailure),
}
