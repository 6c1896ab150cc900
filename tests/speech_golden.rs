//! Whisper against an exact f32 computation: features, encoder, tokens, log-probabilities.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test")]

mod common;

use greenroom::config::{Config, DeviceChoice, KvType};
use greenroom::model::speech::source::{SpeechFolder, SpeechSource};
use greenroom::model::speech::{LogitsOf, SpeechEngine, SpeechRow, mel};
use greenroom::types::TokenId;
use serde_json::Value;

/// Greedy tokens of the first window with their log-probabilities after suppression, and what the first
/// position says about silence.
fn greedy(
    engine: &mut dyn SpeechEngine,
    samples: &[f32],
    prompt: &[u32],
    never: &[u32],
    not_first: &[u32],
    no_speech: usize,
    eot: u32,
) -> (Vec<u32>, Vec<f32>, f32) {
    let window = engine.begin(mel::single_window(samples, engine.dims().mels)).unwrap();
    assert!(engine.encode(window, &mut || true).unwrap());
    let sequence = engine.open(None).unwrap();
    let mut input: Vec<TokenId> = prompt.iter().map(|id| TokenId(*id)).collect();
    let (mut tokens, mut logprobs, mut silence, mut start) = (Vec::new(), Vec::new(), 0.0, 0);
    while tokens.len() < 224 {
        let logits = if tokens.is_empty() { LogitsOf::Ends } else { LogitsOf::Last };
        let row = SpeechRow { window, sequence, start, tokens: &input, logits, scores: false };
        let out = engine.decode(&[row]).unwrap().remove(0);
        start += input.len() as u32;
        if tokens.is_empty() {
            let first = &out.logits[0];
            let max = first.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = first.iter().map(|x| (x - max).exp()).sum();
            silence = (first[no_speech] - max).exp() / sum;
        }
        let mut last = out.logits.last().unwrap().clone();
        never.iter().for_each(|id| last[*id as usize] = f32::NEG_INFINITY);
        if tokens.is_empty() {
            not_first.iter().for_each(|id| last[*id as usize] = f32::NEG_INFINITY);
        }
        let (best, max) = last
            .iter()
            .copied()
            .enumerate()
            .fold((0, f32::MIN), |a, (i, x)| if x > a.1 { (i, x) } else { a });
        let sum: f32 = last.iter().map(|x| (x - max).exp()).sum();
        tokens.push(best as u32);
        logprobs.push(-sum.ln());
        if best as u32 == eot {
            break;
        }
        input = vec![TokenId(best as u32)];
    }
    engine.close(sequence);
    engine.forget(window);
    (tokens, logprobs, silence)
}

fn compare(model: &str, golden: &str, kv: KvType) {
    let mut config = Config::default();
    config.engine.device = DeviceChoice::Cpu;
    config.cpu.kv = kv;
    let worst = compare_clips(model, golden, &config, |_| true);
    assert!(worst < if kv == KvType::F32 { 6e-3 } else { 3e-2 }, "{worst}");
}

/// The tokens of some clips; by how much log-probabilities are off at most.
fn compare_clips(model: &str, golden: &str, config: &Config, wanted: impl Fn(&str) -> bool) -> f32 {
    let loaded = SpeechFolder::new(common::speech_model(model), config).unwrap().load().unwrap();
    let golden = common::json(golden);
    let ids = &golden["special_ids"];
    let id = |name: &str| ids[name].as_u64().unwrap() as u32;
    let tokens = &loaded.tokens;
    assert_eq!((tokens.eot, tokens.sot), (id("eot"), id("sot")));
    assert_eq!((tokens.translate(), tokens.transcribe()), (id("translate"), id("transcribe")));
    assert_eq!((tokens.previous(), tokens.no_speech()), (id("sot_prev"), id("no_speech")));
    assert_eq!((tokens.no_timestamps(), tokens.timestamps()), (id("no_timestamps"), id("timestamp_begin")));
    let mut engine = loaded.engine.start().unwrap();
    let (mut same, mut worst, mut count) = (0, 0.0_f32, 0);
    for (clip, expected) in golden["clips"].as_object().unwrap().iter().filter(|(clip, _)| wanted(clip)) {
        let numbers = |key: &str| {
            expected[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>()
        };
        let expected_tokens: Vec<u32> = numbers("tokens").iter().map(|x| *x as u32).collect();
        let prompt = expected.get("prompt").or(golden.get("prompt")).and_then(Value::as_array).unwrap();
        let prompt: Vec<u32> = prompt.iter().map(|x| x.as_u64().unwrap() as u32).collect();
        let samples = common::samples(clip);
        let features = mel::single_window(&samples, loaded.dims.mels);
        let mean = features.iter().map(|x| f64::from(*x)).sum::<f64>() / features.len() as f64;
        assert!((mean - expected["mel_mean"].as_f64().unwrap()).abs() < 1e-5, "{clip}: mean {mean}");
        let (got, logprobs, silence) = greedy(
            engine.as_mut(),
            &samples,
            &prompt,
            &tokens.suppressed(),
            &tokens.not_first(),
            tokens.no_speech() as usize,
            tokens.eot,
        );
        count += 1;
        println!("{clip}: {}", tokens.decode(&got));
        // The yardstick stopped a loop earlier.
        let got = got[..got.len().min(expected_tokens.len())].to_vec();
        if got == expected_tokens {
            same += 1;
            let off =
                logprobs.iter().zip(numbers("logprobs")).map(|(got, want)| (f64::from(*got) - want).abs());
            let off = off.fold(0.0, f64::max) as f32;
            println!("  off by {off}");
            worst = worst.max(off);
            let want = expected["no_speech_prob"].as_f64().unwrap();
            assert!(
                (f64::from(silence) - want).abs() < 0.01 * want + 2e-4,
                "{clip}: no speech {silence}, {want}"
            );
        } else {
            println!("  {got:?}\n  {expected_tokens:?}");
        }
    }
    println!("{model}: {same} of {count} the same, log-probabilities off by at most {worst}");
    assert!(same == count && count > 0, "{same} of {count}");
    worst
}

#[test]
fn tiny_english_gives_the_exact_computations_tokens() {
    compare("whisper-tiny.en", "speech/whisper-tiny.en.json", KvType::F32);
}

#[test]
fn keys_and_values_in_halves_change_no_token_of_it() {
    compare("whisper-tiny.en", "speech/whisper-tiny.en.json", KvType::F16);
}

#[test]
#[ignore = "needs whisper-base: make test-full"]
fn base_gives_the_exact_computations_tokens() {
    compare("whisper-base", "speech/whisper-base.json", KvType::F32);
}

/// Whisper on MLX in exact numbers, which MLX's CPU device has.
#[cfg(feature = "mlx")]
fn compare_on_mlx(model: &str, golden: &str, wanted: impl Fn(&str) -> bool) {
    let mut config = Config::default();
    config.engine.device = DeviceChoice::Mlx;
    let worst = compare_clips(model, golden, &config, wanted);
    let bound = if cfg!(target_os = "macos") { 3e-2 } else { 6e-3 };
    assert!(worst < bound, "{worst}");
}

#[test]
#[cfg(feature = "mlx")]
fn tiny_english_gives_them_on_mlx() {
    compare_on_mlx("whisper-tiny.en", "speech/whisper-tiny.en.json", |clip| clip == "jfk.wav");
}

#[test]
#[cfg(feature = "mlx")]
#[ignore = "slow on MLX's CPU device: make test-full"]
fn tiny_english_gives_all_of_them_on_mlx() {
    compare_on_mlx("whisper-tiny.en", "speech/whisper-tiny.en.json", |_| true);
}
