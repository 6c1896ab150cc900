//! Whole recordings through the recogniser: segments and word times against mlx-whisper's, silence, every format.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test")]

mod common;

use greenroom::config::{Config, KvType};
use greenroom::model::speech::audio::AudioLimits;
use greenroom::model::speech::compute::{Direct, EngineCell};
use greenroom::model::speech::features::{self, Recording};
use greenroom::model::speech::recognise::recognise;
use greenroom::model::speech::source::{SpeechFolder, SpeechSource};
use greenroom::model::speech::tokens::SpeechTokens;
use greenroom::types::speech::{SpeechOptions, Transcription, language_code};

struct Recogniser {
    compute: Direct,
    tokens: SpeechTokens,
    mels: usize,
}

impl Recogniser {
    fn new(model: &str) -> Self {
        let mut config = Config::default();
        config.cpu.kv = KvType::F32;
        let loaded = SpeechFolder::new(common::speech_model(model), &config).unwrap().load().unwrap();
        let engine = loaded.engine.start().unwrap();
        Self { compute: Direct(EngineCell::new(engine)), tokens: loaded.tokens, mels: loaded.dims.mels }
    }

    fn hear(&self, clip: &str, options: &SpeechOptions) -> Transcription {
        let bytes = std::fs::read(common::data("audio").join(clip)).unwrap();
        self.hear_bytes(bytes, options)
    }

    fn hear_bytes(&self, bytes: Vec<u8>, options: &SpeechOptions) -> Transcription {
        let recording = Recording::Encoded(bytes.into());
        let receiver =
            features::start(recording, AudioLimits::default(), self.mels, options.vad_used()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut tell = |_: greenroom::model::speech::recognise::Progress<'_>| {};
        let work = recognise(&self.compute, &self.tokens, options, receiver, &mut tell);
        runtime.block_on(work).unwrap()
    }
}

/// The settings of the reference's run.
fn reference() -> SpeechOptions {
    let mut options = SpeechOptions::default();
    options.condition_on_previous_text = false;
    options.words = true;
    options.vad = None;
    options.ladder = [0.0].into();
    options
}

fn against_the_reference(model: &str, golden: &str) {
    let recogniser = Recogniser::new(model);
    let golden = common::json(golden);
    let (mut words, mut near) = (0, 0);
    for (clip, expected) in golden["clips"].as_object().unwrap() {
        let mut options = reference();
        options.language = expected["language"].as_str().and_then(language_code);
        let got = recogniser.hear(clip, &options);
        println!("{clip}: {}", got.text());
        assert_eq!(got.text(), expected["text"].as_str().unwrap().trim(), "{clip}");
        let expected: Vec<_> = expected["segments"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|s| !s["text"].as_str().unwrap().trim().is_empty())
            .collect();
        assert_eq!(got.segments.len(), expected.len(), "{clip}: {:?}", got.segments);
        for (got, expected) in got.segments.iter().zip(expected) {
            assert_eq!(got.text, expected["text"].as_str().unwrap(), "{clip}");
            let close = |got: f64, key: &str, by: f64| {
                let want = expected[key].as_f64().unwrap();
                assert!((got - want).abs() <= by, "{clip}: {key} {got}, {want} in {:?}", got);
            };
            close(got.avg_logprob, "avg_logprob", 0.01);
            close(got.no_speech_prob, "no_speech_prob", 0.02);
            close(got.compression_ratio, "compression_ratio", 0.02);
            for (got, want) in got.words.iter().zip(expected["words"].as_array().unwrap()) {
                assert_eq!(got.word, want[0].as_str().unwrap(), "{clip}");
                words += 1;
                let off = (got.start - want[1].as_f64().unwrap())
                    .abs()
                    .max((got.end - want[2].as_f64().unwrap()).abs());
                near += usize::from(off <= 0.1);
                if off > 0.1 {
                    println!("{clip}: {got:?} {want}");
                }
            }
        }
    }
    println!("{near} of {words} words within 0.1 s");
    assert!(near * 100 >= words * 97, "{near} of {words}");
}

#[test]
fn tiny_english_hears_what_the_reference_hears_and_when() {
    against_the_reference("whisper-tiny.en", "speech/whisper-tiny.en-mlx.json");
}

#[test]
#[ignore = "needs whisper-base: make test-full"]
fn base_hears_what_the_reference_hears_and_when() {
    against_the_reference("whisper-base", "speech/whisper-base-mlx.json");
}

#[test]
fn every_kind_of_file_gives_the_same_words() {
    let recogniser = Recogniser::new("whisper-tiny.en");
    let options = SpeechOptions::default();
    let plain = |text: &str| text.to_lowercase().replace([',', '.', '!'], "");
    let expected = plain(&recogniser.hear("jfk.wav", &options).text());
    assert!(expected.contains("ask not what your country can do for you"), "{expected}");
    for clip in [
        "jfk.flac",
        "jfk.mp3",
        "jfk.m4a",
        "jfk.ogg",
        "jfk.opus",
        "jfk.webm",
        "jfk-22k-f32.wav",
        "jfk-stereo-44k.mp3",
    ] {
        assert_eq!(plain(&recogniser.hear(clip, &options).text()), expected, "{clip}");
    }
}

#[test]
fn a_telephone_loses_a_letter_at_most() {
    let recogniser = Recogniser::new("whisper-tiny.en");
    let words = |clip: &str| -> Vec<String> {
        let text = recogniser.hear(clip, &SpeechOptions::default()).text().to_lowercase();
        text.replace([',', '.'], "").split(' ').map(str::to_owned).collect()
    };
    let (whole, telephone) = (words("jfk.wav"), words("jfk-8k-mulaw.wav"));
    assert_eq!(whole.len(), telephone.len(), "{telephone:?}");
    assert!(whole.iter().zip(&telephone).filter(|(a, b)| a != b).count() <= 1, "{telephone:?}");
}

#[test]
fn silence_and_noise_say_nothing() {
    let recogniser = Recogniser::new("whisper-tiny.en");
    for clip in ["silence-5s.wav", "noise-5s.wav"] {
        let out = recogniser.hear(clip, &SpeechOptions::default());
        assert_eq!((out.text(), out.segments.len()), (String::new(), 0), "{clip}");
        assert!((out.duration - 5.0).abs() < 0.01);
    }
}

#[test]
fn what_was_said_is_not_taken_for_made_up() {
    let recogniser = Recogniser::new("whisper-tiny.en");
    for clip in ["jfk.wav", "long-60s.wav"] {
        let mut options = SpeechOptions::default();
        options.words = true;
        let whole = recogniser.hear(clip, &options);
        (options.words, options.hallucination_silence_s) = (false, Some(2.0));
        let sifted = recogniser.hear(clip, &options);
        assert_eq!(sifted.text(), whole.text(), "{clip}");
        assert!(sifted.segments.iter().all(|segment| segment.words.is_empty()), "nobody asked for words");
    }
}

#[test]
fn words_after_long_silences_are_when_they_were_said() {
    let recogniser = Recogniser::new("whisper-tiny.en");
    let silence = |seconds: usize| vec![0.0_f32; seconds * 16_000];
    let one = common::samples("ps-goforward.wav");
    let two = common::samples("ps-something.wav");
    let samples = [silence(10), one.clone(), silence(10), two].concat();
    let mut wav =
        b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0".to_vec();
    wav.extend(samples.iter().flat_map(|x| ((x * 32767.0) as i16).to_le_bytes()));
    let mut options = SpeechOptions::default();
    options.words = true;
    let out = recogniser.hear_bytes(wav, &options);
    let words: Vec<_> = out.segments.iter().flat_map(|segment| &segment.words).collect();
    println!("{words:?}");
    let second = 20.0 + one.len() as f64 / 16_000.0;
    let at = |text: &str| {
        words.iter().filter(|w| w.word.to_lowercase().contains(text)).map(|w| w.start).collect::<Vec<_>>()
    };
    assert!(at("forward").iter().any(|at| (10.0..13.0).contains(at)), "{words:?}");
    assert!(at("some").iter().all(|at| *at >= second - 0.3 && *at < second + 3.0), "{words:?}");
    assert!(words.windows(2).all(|pair| pair[0].start <= pair[1].start));
}

/// Least edits from one list of words to the other.
fn edits(a: &[String], b: &[String]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, word) in a.iter().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in b.iter().enumerate() {
            let best = (corner + usize::from(word != other)).min(row[j] + 1).min(row[j + 1] + 1);
            corner = std::mem::replace(&mut row[j + 1], best);
        }
    }
    row[b.len()]
}

fn spoken(heard: &Transcription) -> Vec<String> {
    let plain = |word: &str| word.chars().filter(|c| c.is_alphanumeric()).collect::<String>().to_lowercase();
    heard.text().split_whitespace().map(plain).filter(|word| !word.is_empty()).collect()
}

#[test]
fn pieces_at_a_time_say_the_same_as_one_after_the_other() {
    let recogniser = Recogniser::new("whisper-tiny.en");
    let one = recogniser.hear("long-60s.wav", &SpeechOptions::default());
    for words in [false, true] {
        let mut options = SpeechOptions::default();
        (options.batch_size, options.words) = (4, words);
        let many = recogniser.hear("long-60s.wav", &options);
        let (a, b) = (spoken(&one), spoken(&many));
        println!("{} of {} words differ", edits(&a, &b), a.len());
        assert!(edits(&a, &b) * 20 <= a.len(), "{}\n{}", one.text(), many.text());
        assert_eq!(many.duration, one.duration);
        let segments = &many.segments;
        assert!(segments.windows(2).all(|pair| pair[0].end <= pair[1].start + 0.5), "{segments:?}");
        assert!(segments.iter().enumerate().all(|(index, segment)| segment.id == index));
        assert_eq!(segments.iter().all(|segment| !segment.words.is_empty()), words);
    }
}
