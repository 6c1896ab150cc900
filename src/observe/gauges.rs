//! Gauges and counters as atomics, and their text for Prometheus.
//!
//! Owned by one instance, written by the part that knows, read by anybody. Reading
//! never asks an actor. Everything that counts live things returns to zero.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::speech::SpeechGauges;
use super::tally::{Admitted, Refusals, Tally};

/// Only goes up.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn up(&self) {
        self.add(1);
    }

    /// Adds `by`.
    pub fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Goes up and down. Several models write their own share by differences.
#[derive(Debug, Default)]
pub struct Level(AtomicU64);

impl Level {
    /// Replaces one writer's share: what it said `before` by what it says `now`.
    pub fn shift(&self, before: u64, now: u64) {
        self.0.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }

    /// The sum of all writers' shares.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A sum of durations and their number.
#[derive(Debug, Default)]
pub struct Seconds {
    sum_ns: AtomicU64,
    count: AtomicU64,
}

impl Seconds {
    /// One more measurement.
    pub fn record(&self, took: Duration) {
        self.sum_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Sum in seconds, and number of measurements.
    pub fn get(&self) -> (f64, u64) {
        let sum = Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed)).as_secs_f64();
        (sum, self.count.load(Ordering::Relaxed))
    }
}

/// How a request ended, as counted in `greenroom_requests_total`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// An end token or a stop string.
    Stop,
    /// Its limit or the context's end.
    Length,
    /// The client went away.
    Cancelled,
    /// It was accepted and could not be finished.
    Failed,
    /// It was not accepted.
    Refused,
}

impl Outcome {
    /// Every outcome, in the order of the text.
    pub const ALL: [Self; 5] = [Self::Stop, Self::Length, Self::Cancelled, Self::Failed, Self::Refused];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// All gauges of one instance.
#[derive(Debug, Default)]
pub struct Gauges {
    /// Reads the number of tickets out; set once by the part that owns them.
    tickets: OnceLock<TicketsLive>,
    /// Requests being computed.
    pub rows_running: Level,
    /// Requests accepted and waiting for a row.
    pub rows_waiting: Level,
    /// Running rows whose client does not read.
    pub rows_parked: Level,
    /// Rows that gave their place to others and kept their memory.
    pub rows_paused: Level,
    /// Steps that an engine finished.
    pub steps: Counter,
    /// Steps that began before the one before them was collected.
    pub overlapped_steps: Counter,
    /// Tokens of prompts of requests that got a row.
    pub prompt_tokens: Counter,
    /// Tokens produced.
    pub completion_tokens: Counter,
    /// Tokens proposed to rows and verified.
    pub proposed_tokens: Counter,
    /// Those of them that the model drew as well.
    pub proposed_right_tokens: Counter,
    /// Requests by outcome, in the order of [`Outcome::ALL`].
    requests: [Counter; Outcome::ALL.len()],
    /// Requests that were admitted, by their priority.
    pub admitted: Admitted,
    /// Requests that were not accepted, by the reason.
    pub refusals: Refusals,
    /// Rows whose memory was taken away to be computed again later.
    pub preemptions: Counter,
    /// Rows that had to give their place to others for a while.
    pub pauses: Counter,
    /// Rows computed anew after an engine was lost.
    pub replays: Counter,
    /// Engines rebuilt after a failure.
    pub engine_restarts: Counter,
    /// Key-value bytes in use.
    pub kv_used_bytes: Level,
    /// Key-value bytes there are.
    pub kv_capacity_bytes: Level,
    /// Prefixes kept in memory for reuse.
    pub cache_entries: Level,
    /// Requests that found a prefix.
    pub cache_hits: Counter,
    /// Requests that found none.
    pub cache_misses: Counter,
    /// Prompt tokens that did not have to be computed.
    pub cache_hit_tokens: Counter,
    /// Those of them that the tier on disk brought.
    pub cache_ssd_hit_tokens: Counter,
    /// Bytes of the tier on disk.
    pub ssd_bytes: Level,
    /// Bytes written there.
    pub ssd_written_bytes: Counter,
    /// Bytes read from there.
    pub ssd_read_bytes: Counter,
    /// Segments that were to be written and were not.
    pub ssd_dropped: Counter,
    /// Segments that were damaged or gone when they were read.
    pub ssd_bad: Counter,
    /// Of the transcription service.
    pub speech: SpeechGauges,
    /// Time of steps.
    pub step_seconds: Seconds,
    /// Time from acceptance to the end, of requests that were finished.
    pub request_seconds: Seconds,
    /// Moving average of the same, nanoseconds; 0 = none yet.
    request_average_ns: AtomicU64,
}

struct TicketsLive(Arc<dyn Fn() -> usize + Send + Sync>);

impl std::fmt::Debug for TicketsLive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TicketsLive({})", (self.0)())
    }
}

impl Gauges {
    /// Says how the number of live tickets is read. Only the first call counts.
    pub fn watch_tickets(&self, read: Arc<dyn Fn() -> usize + Send + Sync>) {
        let _first_wins = self.tickets.set(TicketsLive(read));
    }

    /// Requests that hold a place now.
    pub fn tickets_live(&self) -> usize {
        self.tickets.get().map_or(0, |tickets| (tickets.0)())
    }

    /// Counts a request's end.
    pub fn ended(&self, outcome: Outcome) {
        if let Some(counter) = self.requests.get(outcome as usize) {
            counter.up();
        }
    }

    /// Requests that ended so.
    pub fn requests(&self, outcome: Outcome) -> u64 {
        self.requests.get(outcome as usize).map_or(0, Counter::get)
    }

    /// Requests that held a place and have left it, whatever became of them; those whose
    /// prompt was refused are not counted, and leave fast.
    pub fn left(&self) -> u64 {
        let all = Outcome::ALL.into_iter().filter(|outcome| *outcome != Outcome::Refused);
        all.map(|outcome| self.requests(outcome)).sum()
    }

    /// Records how long a finished request took, for the retry time of refused ones.
    pub fn request_took(&self, took: Duration) {
        self.request_seconds.record(took);
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // One writer a model; a lost update only makes the average a little older.
        let before = self.request_average_ns.load(Ordering::Relaxed);
        let average = if before == 0 { took } else { before - before / 8 + took / 8 };
        self.request_average_ns.store(average.max(1), Ordering::Relaxed);
    }

    /// Recent time of a request; `None` before the first was finished.
    pub fn request_average(&self) -> Option<Duration> {
        match self.request_average_ns.load(Ordering::Relaxed) {
            0 => None,
            ns => Some(Duration::from_nanos(ns)),
        }
    }

    /// The text of `/metrics`, in Prometheus' format 0.0.4.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(4096);
        self.render_levels(&mut out);
        self.render_counters(&mut out);
        metric(&mut out, "requests_total", "counter", "Requests by how they ended.");
        for outcome in Outcome::ALL {
            let value = self.requests(outcome);
            let _infallible =
                writeln!(out, "greenroom_requests_total{{outcome=\"{}\"}} {value}", outcome.as_str());
        }
        labelled(&mut out, "admitted_total", "Requests admitted, by priority.", "priority", &self.admitted);
        labelled(&mut out, "refusals_total", "Requests refused, by reason.", "reason", &self.refusals);
        summary(&mut out, "step_seconds", "Time of steps.", &self.step_seconds);
        summary(&mut out, "request_seconds", "Time of finished requests.", &self.request_seconds);
        let speech = &self.speech;
        summary(&mut out, "speech_recording_seconds", "Time of recordings.", &speech.recording_seconds);
        let help = "From an utterance's end to its text.";
        summary(&mut out, "speech_utterance_seconds", help, &speech.utterance_seconds);
        out
    }

    fn render_levels(&self, out: &mut String) {
        let speech = &self.speech;
        let levels: [(&str, &str, u64); 12] = [
            ("tickets_live", "Requests that hold a place.", self.tickets_live() as u64),
            ("rows_running", "Requests being computed.", self.rows_running.get()),
            ("rows_waiting", "Requests waiting for a row.", self.rows_waiting.get()),
            ("rows_parked", "Rows whose client does not read.", self.rows_parked.get()),
            ("rows_paused", "Rows that wait and keep their memory.", self.rows_paused.get()),
            ("kv_used_bytes", "Key-value memory in use.", self.kv_used_bytes.get()),
            ("kv_capacity_bytes", "Key-value memory there is.", self.kv_capacity_bytes.get()),
            ("cache_entries", "Prefixes kept in memory for reuse.", self.cache_entries.get()),
            ("ssd_bytes", "Bytes of the prompt cache on disk.", self.ssd_bytes.get()),
            ("speech_weight_bytes", "Weights of the speech model in memory.", speech.weight_bytes.get()),
            ("speech_running", "Recordings being written down.", speech.running.get()),
            ("speech_sessions", "Live sessions that are open.", speech.sessions.get()),
        ];
        for (name, help, value) in levels {
            metric(out, name, "gauge", help);
            let _infallible = writeln!(out, "greenroom_{name} {value}");
        }
    }

    fn render_counters(&self, out: &mut String) {
        let counters: [(&str, &str, u64); 22] = [
            ("steps_total", "Steps that an engine finished.", self.steps.get()),
            (
                "overlapped_steps_total",
                "Steps that began before the one before them was over.",
                self.overlapped_steps.get(),
            ),
            ("prompt_tokens_total", "Tokens of prompts that got a row.", self.prompt_tokens.get()),
            ("completion_tokens_total", "Tokens produced.", self.completion_tokens.get()),
            ("cancelled_total", "Requests whose client went away.", self.requests(Outcome::Cancelled)),
            ("preemptions_total", "Rows set back for memory.", self.preemptions.get()),
            ("pauses_total", "Rows that gave their place to others for a while.", self.pauses.get()),
            ("replays_total", "Rows computed anew after an engine was lost.", self.replays.get()),
            ("proposed_tokens_total", "Tokens proposed and verified.", self.proposed_tokens.get()),
            (
                "proposed_right_tokens_total",
                "Proposed tokens that were right.",
                self.proposed_right_tokens.get(),
            ),
            ("engine_restarts_total", "Engines rebuilt after a failure.", self.engine_restarts.get()),
            ("cache_hits_total", "Requests that found a prefix.", self.cache_hits.get()),
            ("cache_misses_total", "Requests that found no prefix.", self.cache_misses.get()),
            ("cache_hit_tokens_total", "Prompt tokens not computed again.", self.cache_hit_tokens.get()),
            (
                "cache_ssd_hit_tokens_total",
                "Those of them that came from disk.",
                self.cache_ssd_hit_tokens.get(),
            ),
            ("ssd_written_bytes_total", "Bytes written to disk.", self.ssd_written_bytes.get()),
            ("ssd_read_bytes_total", "Bytes read from disk.", self.ssd_read_bytes.get()),
            ("ssd_dropped_total", "Segments that were to be written and were not.", self.ssd_dropped.get()),
            ("ssd_bad_total", "Segments found damaged or gone.", self.ssd_bad.get()),
            ("speech_recordings_total", "Recordings written down.", self.speech.recordings.get()),
            ("speech_utterances_total", "Utterances of live sessions.", self.speech.utterances.get()),
            ("speech_audio_ms_total", "Audio written down, milliseconds.", self.speech.audio_ms.get()),
        ];
        for (name, help, value) in counters {
            metric(out, name, "counter", help);
            let _infallible = writeln!(out, "greenroom_{name} {value}");
        }
    }
}

fn metric(out: &mut String, name: &str, kind: &str, help: &str) {
    let _infallible = writeln!(out, "# HELP greenroom_{name} {help}\n# TYPE greenroom_{name} {kind}");
}

fn labelled(out: &mut String, name: &str, help: &str, label: &str, tally: &Tally) {
    metric(out, name, "counter", help);
    for (value, sum) in tally.all() {
        let _infallible = writeln!(out, "greenroom_{name}{{{label}=\"{value}\"}} {sum}");
    }
}

fn summary(out: &mut String, name: &str, help: &str, seconds: &Seconds) {
    let (sum, count) = seconds.get();
    metric(out, name, "summary", help);
    let _infallible = writeln!(out, "greenroom_{name}_sum {sum}\ngreenroom_{name}_count {count}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_text_is_a_comment_or_a_name_and_a_number() {
        let gauges = Gauges::default();
        gauges.ended(Outcome::Length);
        gauges.step_seconds.record(Duration::from_millis(250));
        gauges.kv_used_bytes.shift(0, 7);
        gauges.kv_used_bytes.shift(7, 3);
        let text = gauges.render();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("greenroom_"), "{line}");
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
        assert!(text.contains("greenroom_requests_total{outcome=\"length\"} 1\n"));
        assert!(text.contains("greenroom_kv_used_bytes 3\n"));
        assert!(text.contains("greenroom_step_seconds_sum 0.25\ngreenroom_step_seconds_count 1\n"));
    }

    #[test]
    fn the_average_follows_recent_requests() {
        let gauges = Gauges::default();
        assert_eq!(gauges.request_average(), None);
        gauges.request_took(Duration::from_secs(8));
        assert_eq!(gauges.request_average(), Some(Duration::from_secs(8)));
        gauges.request_took(Duration::from_secs(16));
        assert_eq!(gauges.request_average(), Some(Duration::from_secs(9)));
    }
}
