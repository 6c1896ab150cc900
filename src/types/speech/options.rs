//! What may be asked of recognising.

use std::sync::Arc;

use super::Task;

/// How speech is told from silence. Times in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct VadOptions {
    /// Speech begins at this probability; it may end 0.15 below.
    pub threshold: f32,
    /// Shorter speech is none.
    pub min_speech_ms: u32,
    /// Longer speech is cut, at a silence where there is one. `None`: never.
    pub max_speech_ms: Option<u32>,
    /// Speech ends with a silence as long as this.
    pub min_silence_ms: u32,
    /// Kept before and after.
    pub pad_ms: u32,
}

impl VadOptions {
    /// For a recording that is decoded as one.
    pub const FILE: Self =
        Self { threshold: 0.5, min_speech_ms: 0, max_speech_ms: None, min_silence_ms: 2000, pad_ms: 400 };
    /// For a recording that is decoded in pieces.
    pub const PIECES: Self = Self {
        threshold: 0.5,
        min_speech_ms: 0,
        max_speech_ms: Some(30_000),
        min_silence_ms: 160,
        pad_ms: 400,
    };
    /// For dictation.
    pub const LIVE: Self =
        Self { threshold: 0.5, min_speech_ms: 120, max_speech_ms: None, min_silence_ms: 600, pad_ms: 300 };
}

/// Options of a recording or a session; [`SpeechOptions::default`] is what a request without any gets.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SpeechOptions {
    /// Code of the language; `None`: found out.
    pub language: Option<&'static str>,
    /// Only these are found; empty: any.
    pub languages: Vec<&'static str>,
    /// Transcribe or translate.
    pub task: Task,
    /// Text that is taken as having come before.
    pub prompt: String,
    /// Words that are told to each window.
    pub hotwords: String,
    /// Segments get times; without, a window is one segment.
    pub timestamps: bool,
    /// Words get times.
    pub words: bool,
    /// One temperature; `None` (or 0): the ladder.
    pub temperature: Option<f64>,
    /// Beams at temperature 0, 1 to 16.
    pub beam_size: usize,
    /// Candidates at other temperatures, 1 to 16.
    pub best_of: usize,
    /// A window is told what was said before.
    pub condition_on_previous_text: bool,
    /// Above it, and with an unlikely text, a window is silent.
    pub no_speech_threshold: f64,
    /// Below it a text is unlikely.
    pub logprob_threshold: f64,
    /// Above it a text repeats itself.
    pub compression_ratio_threshold: f64,
    /// Text of unlikely words with silence of more than so many seconds around it is taken for made up and
    /// left out; words are aligned for it. 2 is a good value.
    pub hallucination_silence_s: Option<f64>,
    /// Silence is skipped; `None`: all is heard.
    pub vad: Option<VadOptions>,
    /// So many pieces of a long recording are decoded at a time, each for itself; 1: one after the other.
    pub batch_size: usize,
    /// What is left of a recording behind its last words is not heard by itself where it is shorter than so
    /// many seconds: models tend to find words in a breath.
    pub least_rest_s: f64,
    /// Keys random numbers of temperatures.
    pub seed: u64,
    /// Steps of the ladder.
    pub ladder: Arc<[f64]>,
}

impl Default for SpeechOptions {
    fn default() -> Self {
        Self {
            language: None,
            languages: Vec::new(),
            task: Task::Transcribe,
            prompt: String::new(),
            hotwords: String::new(),
            timestamps: true,
            words: false,
            temperature: None,
            beam_size: 1,
            best_of: 3,
            condition_on_previous_text: true,
            no_speech_threshold: 0.6,
            logprob_threshold: -1.0,
            compression_ratio_threshold: 2.4,
            hallucination_silence_s: None,
            vad: Some(VadOptions::FILE),
            batch_size: 1,
            least_rest_s: 0.0,
            seed: 0,
            ladder: [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].into(),
        }
    }
}

impl SpeechOptions {
    /// How speech is told from silence: pieces that are decoded at a time fit a window each.
    pub fn vad_used(&self) -> Option<VadOptions> {
        if self.batch_size <= 1 {
            return self.vad;
        }
        let vad = self.vad.unwrap_or(VadOptions::PIECES);
        let min_silence_ms = vad.min_silence_ms.min(VadOptions::PIECES.min_silence_ms);
        Some(VadOptions { max_speech_ms: VadOptions::PIECES.max_speech_ms, min_silence_ms, ..vad })
    }

    /// Temperatures to try, in order.
    pub fn temperatures(&self) -> Vec<f64> {
        match self.temperature.filter(|temperature| *temperature > 0.0) {
            Some(temperature) => vec![temperature],
            None => self.ladder.to_vec(),
        }
    }
}
