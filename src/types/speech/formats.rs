//! A transcription as subtitles and as OpenAI's JSON.

use serde_json::{Value, json};

use super::{Segment, Task, Transcription, Word, language_name};

/// How a transcription is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// The text in an object.
    #[default]
    Json,
    /// The text alone.
    Text,
    /// SubRip.
    Srt,
    /// WebVTT.
    Vtt,
    /// Everything.
    VerboseJson,
}

/// Hours, minutes, seconds and milliseconds: rounded once, then split. `mark` stands before the milliseconds.
fn clock(milliseconds: u64, mark: char) -> String {
    let (seconds, milliseconds) = (milliseconds / 1000, milliseconds % 1000);
    format!("{:02}:{:02}:{:02}{mark}{milliseconds:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Milliseconds of a moment, ties to even.
fn milliseconds(seconds: f64) -> u64 {
    (seconds.max(0.0) * 1000.0).round_ties_even() as u64
}

/// Cues: begin, end, text. A cue lasts at least a millisecond; none is empty.
fn cues(segments: &[Segment]) -> impl Iterator<Item = (u64, u64, String)> + '_ {
    segments.iter().filter_map(|segment| {
        let text = segment.text.trim().replace("-->", "->");
        let start = milliseconds(segment.start);
        (!text.is_empty()).then(|| (start, milliseconds(segment.end).max(start + 1), text))
    })
}

/// SubRip.
pub fn srt(segments: &[Segment]) -> String {
    let cue = |(number, (start, end, text)): (usize, (u64, u64, String))| {
        format!("{}\n{} --> {}\n{text}\n\n", number + 1, clock(start, ','), clock(end, ','))
    };
    cues(segments).enumerate().map(cue).collect()
}

/// WebVTT.
pub fn vtt(segments: &[Segment]) -> String {
    let cue = |(start, end, text): (u64, u64, String)| {
        format!("{} --> {}\n{text}\n\n", clock(start, '.'), clock(end, '.'))
    };
    std::iter::once("WEBVTT\n\n".to_owned()).chain(cues(segments).map(cue)).collect()
}

/// A number that JSON can hold.
fn finite(x: f64) -> f64 {
    if x.is_finite() { x } else { 0.0 }
}

fn hundredths(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

/// OpenAI's `verbose_json`; words where the segments have them.
pub fn verbose(transcription: &Transcription, task: Task) -> Value {
    let words = |segment: &Segment| -> Vec<Value> {
        let word = |word: &Word| json!({"word": word.word.trim(), "start": word.start, "end": word.end});
        segment.words.iter().map(word).collect()
    };
    let segments: Vec<Value> = transcription
        .segments
        .iter()
        .map(|segment| {
            let mut value = json!({
                "id": segment.id,
                "seek": segment.seek,
                "start": segment.start,
                "end": segment.end,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": finite(segment.avg_logprob),
                "compression_ratio": finite(segment.compression_ratio),
                "no_speech_prob": finite(segment.no_speech_prob),
            });
            if !segment.words.is_empty() {
                value["words"] = words(segment).into();
            }
            value
        })
        .collect();
    let (name, language) = match task {
        Task::Transcribe => ("transcribe", transcription.language),
        Task::Translate => ("translate", Some("en")),
    };
    let mut body = json!({
        "task": name,
        "language": language.map(language_name),
        "duration": hundredths(transcription.duration),
        "text": transcription.text(),
        "segments": segments,
        "usage": usage(transcription),
    });
    let all: Vec<Value> = transcription.segments.iter().flat_map(words).collect();
    if !all.is_empty() {
        body["words"] = all.into();
    }
    body
}

/// OpenAI's `json`.
pub fn json(transcription: &Transcription) -> Value {
    json!({"text": transcription.text(), "usage": usage(transcription)})
}

/// How long the recording was, as OpenAI counts.
pub fn usage(transcription: &Transcription) -> Value {
    json!({"type": "duration", "seconds": transcription.duration.ceil() as u64})
}

/// The whole document of a format.
pub fn write(transcription: &Transcription, task: Task, format: Format) -> String {
    match format {
        Format::Json => json(transcription).to_string() + "\n",
        Format::Text => transcription.text() + "\n",
        Format::Srt => srt(&transcription.segments),
        Format::Vtt => vtt(&transcription.segments),
        Format::VerboseJson => verbose(transcription, task).to_string() + "\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(start: f64, end: f64, text: &str) -> Segment {
        Segment { start, end, text: text.into(), ..Segment::default() }
    }

    #[test]
    fn milliseconds_are_rounded_once_and_carried() {
        for (seconds, shown) in [
            (0.9995, "00:00:01,000"),
            (59.9996, "00:01:00,000"),
            (3599.9999, "01:00:00,000"),
            (360_000.0, "100:00:00,000"),
            (0.0025, "00:00:00,002"),
            (-1.0, "00:00:00,000"),
        ] {
            assert_eq!(clock(milliseconds(seconds), ','), shown, "{seconds}");
        }
    }

    #[test]
    fn cues_are_numbered_without_gaps_and_never_empty() {
        let segments =
            [segment(0.0, 1.5, " One --> two"), segment(1.5, 2.0, "  "), segment(2.0, 2.0, " three")];
        let expected = "1\n00:00:00,000 --> 00:00:01,500\nOne -> two\n\n\
                        2\n00:00:02,000 --> 00:00:02,001\nthree\n\n";
        assert_eq!(srt(&segments), expected);
        assert!(vtt(&segments).starts_with("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two\n"));
    }

    #[test]
    fn silence_has_no_text_and_no_language() {
        let body = verbose(&Transcription { duration: 5.004, ..Transcription::default() }, Task::Transcribe);
        assert_eq!((&body["text"], &body["segments"]), (&json!(""), &json!([])));
        assert_eq!((&body["duration"], &body["language"]), (&json!(5.0), &Value::Null));
        assert_eq!(body["usage"], json!({"type": "duration", "seconds": 6}));
    }
}
