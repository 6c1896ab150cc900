//! Gauges and counters of the transcription service.

use super::gauges::{Counter, Level, Seconds};

/// See the module. All live things return to zero.
#[derive(Debug, Default)]
pub struct SpeechGauges {
    /// Bytes of the model's weights; 0 while it is not loaded.
    pub weight_bytes: Level,
    /// Recordings that are worked on.
    pub running: Level,
    /// Live sessions that are open.
    pub sessions: Level,
    /// Recordings written down.
    pub recordings: Counter,
    /// Utterances of sessions written down.
    pub utterances: Counter,
    /// Audio of both, milliseconds.
    pub audio_ms: Counter,
    /// From a recording's place to its last word.
    pub recording_seconds: Seconds,
    /// From an utterance's end to its last word.
    pub utterance_seconds: Seconds,
}

/// One more of a level, as long as it is held.
pub struct Held<'a>(&'a Level);

impl Level {
    /// Counts one more until what comes back is dropped.
    pub fn hold(&self) -> Held<'_> {
        self.shift(0, 1);
        Held(self)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.shift(1, 0);
    }
}
