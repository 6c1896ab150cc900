//! A tiny random Whisper through every layout of its files and every backend: the same logits.
#![cfg(any(feature = "cpu", feature = "mlx"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test")]

mod tiny_whisper;

use std::io::BufRead;
use std::path::Path;

use greenroom::config::{Activations, Config, DeviceChoice, KvType};
use greenroom::model::speech::source::{SpeechFolder, SpeechSource};
use greenroom::model::speech::{LogitsOf, SpeechEngine, SpeechOut, SpeechRow, WINDOW_FRAMES, WindowId};
use greenroom::types::{LoadError, TokenId};
use tempfile::TempDir;
use tiny_whisper::TinyWhisper;

/// Devices that are compiled.
fn devices() -> Vec<DeviceChoice> {
    let all = [(cfg!(feature = "cpu"), DeviceChoice::Cpu), (cfg!(feature = "mlx"), DeviceChoice::Mlx)];
    all.into_iter().filter(|(is_there, _)| *is_there).map(|(_, device)| device).collect()
}

fn exact(device: DeviceChoice) -> Config {
    let mut config = Config::default();
    config.engine.device = device;
    config.cpu.kv = KvType::F32;
    config.cpu.activations = Activations::F32;
    config
}

fn folder(write: impl FnOnce(&Path)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    tiny_whisper::write_vocabulary(folder.path());
    folder
}

/// The engine and the format in words.
fn engine(folder: &Path, config: &Config) -> (Box<dyn SpeechEngine>, &'static str) {
    let loaded = SpeechFolder::new(folder, config).unwrap().load().unwrap();
    (loaded.engine.start().unwrap(), loaded.format)
}

/// Log-mel frames that are the same on every machine.
fn frames(seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..WINDOW_FRAMES * tiny_whisper::MELS).map(next).collect()
}

fn ids(tokens: &[u32]) -> Vec<TokenId> {
    tokens.iter().copied().map(TokenId).collect()
}

/// Encodes in as many calls as there are pieces.
fn encoded(engine: &mut dyn SpeechEngine, seed: u32) -> (WindowId, usize) {
    let window = engine.begin(frames(seed)).unwrap();
    let mut calls = 1;
    while !engine.encode(window, &mut || false).unwrap() {
        calls += 1;
    }
    (window, calls)
}

/// Two windows; prompts of two lengths in one step, then a fork and its source beside each other, then one
/// row alone. All logits, and the alignment heads' scores.
fn recording(engine: &mut dyn SpeechEngine) -> Vec<SpeechOut> {
    let (one, calls) = encoded(engine, 1);
    assert!(calls > 4, "the encoder was not cut");
    let two = engine.begin(frames(2)).unwrap();
    assert!(engine.encode(two, &mut || true).unwrap());
    let (a, b) = (engine.open(None).unwrap(), engine.open(None).unwrap());
    let (long, short) = (ids(&[50_257, 50_362, 7, 40_000]), ids(&[50_257, 3]));
    let (first, second, third) = (ids(&[11]), ids(&[12]), ids(&[13]));
    let row = |window, sequence, start, tokens| SpeechRow {
        window,
        sequence,
        start,
        tokens,
        logits: LogitsOf::All,
        scores: true,
    };
    let mut outs = engine.decode(&[row(one, a, 0, &long), row(two, b, 0, &short)]).unwrap();
    let fork = engine.open(Some((a, 3))).unwrap();
    let rows = [row(one, a, 4, &first), row(one, fork, 3, &second), row(two, b, 2, &third)];
    outs.extend(engine.decode(&rows).unwrap());
    let few = SpeechRow { logits: LogitsOf::Ends, scores: false, ..row(one, fork, 4, &long) };
    outs.extend(engine.decode(&[few]).unwrap());
    assert!(engine.state_bytes() > 0 && engine.weight_bytes() > 0);
    for sequence in [a, b, fork] {
        engine.close(sequence);
    }
    for window in [one, two] {
        engine.forget(window);
    }
    outs
}

/// Largest difference of a logit and of a score.
fn apart(left: &[SpeechOut], right: &[SpeechOut]) -> (f32, f32) {
    let most = |a: &[f32], b: &[f32]| {
        assert_eq!(a.len(), b.len());
        let largest = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(a.iter().all(|x| x.is_finite()));
        largest
    };
    assert_eq!(left.len(), right.len());
    let pairs = left.iter().zip(right);
    let logits = |(a, b): (&SpeechOut, &SpeechOut)| most(&a.logits.concat(), &b.logits.concat());
    let scores = |(a, b): (&SpeechOut, &SpeechOut)| most(&a.scores, &b.scores);
    (pairs.clone().map(logits).fold(0.0, f32::max), pairs.map(scores).fold(0.0, f32::max))
}

/// How far logits are apart, as a share of how far they spread.
fn distance(left: &[SpeechOut], right: &[SpeechOut]) -> f32 {
    let all = |outs: &[SpeechOut]| outs.iter().flat_map(|out| out.logits.concat()).collect::<Vec<f32>>();
    let (left_all, right_all) = (all(left), all(right));
    let sum: f32 = left_all.iter().zip(&right_all).map(|(a, b)| (a - b).powi(2)).sum();
    (sum / left_all.len() as f32).sqrt() / spread(right)
}

/// How far logits spread, so that a tolerance means something.
fn spread(outs: &[SpeechOut]) -> f32 {
    let all: Vec<f32> = outs.iter().flat_map(|out| out.logits.concat()).collect();
    let mean = all.iter().sum::<f32>() / all.len() as f32;
    (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / all.len() as f32).sqrt()
}

fn heard(folder: &Path, config: &Config) -> (Vec<SpeechOut>, &'static str) {
    let (mut engine, format) = engine(folder, config);
    (recording(engine.as_mut()), format)
}

#[test]
fn every_layout_on_every_backend_gives_the_same_logits() {
    let model = TinyWhisper::new(1);
    let hugging_face = folder(|folder| model.write_hugging_face(folder));
    let mlx = folder(|folder| model.write_mlx(folder));
    let npz = folder(|folder| model.write_npz(folder));
    let mut yardstick: Option<Vec<SpeechOut>> = None;
    for device in devices() {
        let (expected, format) = heard(hugging_face.path(), &exact(device));
        assert_eq!(format, "safetensors");
        assert!(spread(&expected) > 0.5, "{}", spread(&expected));
        // One backend computes the same for the same values, wherever they were read.
        for (other, name) in [(&mlx, "MLX safetensors"), (&npz, "MLX npz")] {
            let (outs, format) = heard(other.path(), &exact(device));
            assert_eq!(format, name);
            assert_eq!(apart(&outs, &expected), (0.0, 0.0), "{name} on {device:?}");
        }
        if let Some(yardstick) = &yardstick {
            let (logits, scores) = apart(&expected, yardstick);
            println!("{device:?}: logits {logits}, scores {scores} off, spread {}", spread(yardstick));
            assert!(logits < 1e-3 && scores < 1e-3, "{device:?}: logits {logits}, scores {scores}");
        }
        yardstick.get_or_insert(expected);
    }
}

#[test]
fn quantised_layouts_give_the_logits_of_the_values_that_their_codes_stand_for() {
    let model = TinyWhisper::new(2);
    let dense = folder(|folder| model.write_mlx(folder));
    let dense: Vec<_> = devices().iter().map(|device| heard(dense.path(), &exact(*device)).0).collect();
    for (bits, loose) in [(8, 0.02), (4, 0.3)] {
        let rounded = folder(|folder| model.rounded(bits).write_hugging_face(folder));
        let quantised = folder(|folder| model.write_quantised(folder, bits));
        for (device, dense) in devices().into_iter().zip(&dense) {
            let (expected, _) = heard(rounded.path(), &exact(device));
            let (outs, format) = heard(quantised.path(), &exact(device));
            assert_eq!(format, "MLX safetensors");
            let (logits, scores) = apart(&outs, &expected);
            assert!(logits < 1e-3 && scores < 1e-3, "{bits} bits, {device:?}: {logits}, {scores}");
            // And something like those of the model that it was made from.
            let distance = distance(&outs, dense);
            println!("{bits} bits on {device:?}: {distance} of the spread from the dense model's");
            assert!(distance > 0.0 && distance < loose, "{bits} bits, {device:?}: {distance}");
            if bits == 4 {
                let npz = folder(|folder| model.write_quantised_npz(folder, bits));
                let (from_npz, format) = heard(npz.path(), &exact(device));
                assert_eq!((apart(&from_npz, &outs), format), ((0.0, 0.0), "MLX npz"), "{device:?}");
            }
        }
    }
}

/// The numbers of Metal's path, computed by MLX's CPU device: halves, and codes that are not widened.
#[test]
#[cfg(feature = "mlx")]
fn halves_and_codes_as_they_are_stay_near_exact_numbers() {
    use greenroom::model::load::whisper;
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};
    use greenroom::model::speech::engine::{Prepared, PreparedSpeech};

    /// One window and one prompt: products of halves are slow there.
    fn brief(engine: &mut dyn SpeechEngine) -> Vec<SpeechOut> {
        let window = engine.begin(frames(3)).unwrap();
        assert!(engine.encode(window, &mut || true).unwrap());
        let (sequence, tokens) = (engine.open(None).unwrap(), ids(&[50_257, 50_362, 7]));
        let row =
            SpeechRow { window, sequence, start: 0, tokens: &tokens, logits: LogitsOf::All, scores: true };
        engine.decode(&[row]).unwrap()
    }

    let folder = folder(|folder| TinyWhisper::new(6).write_quantised(folder, 8));
    let (mut engine, _) = engine(folder.path(), &exact(DeviceChoice::Mlx));
    let expected = brief(engine.as_mut());
    let config = MlxConfig { device: MlxDevice::Cpu, activations: MlxType::F16, dequantize: false };
    let files = whisper::open(folder.path()).unwrap();
    let packed = greenroom::model::speech::whisper::pack::<MlxOps>(&files, &config).unwrap();
    let prepared = Prepared { config, packed, element_bytes: config.activations.bytes() };
    let mut halves = Box::new(prepared).start().unwrap();
    assert!(halves.weight_bytes() * 3 < engine.weight_bytes(), "codes were widened");
    let outs = brief(halves.as_mut());
    let (distance, (_, scores)) = (distance(&outs, &expected), apart(&outs, &expected));
    println!("logits {distance} of their spread, scores {scores} off");
    assert!(distance > 0.0 && distance < 0.01 && scores < 0.05, "{distance}, {scores}");
}

#[test]
fn the_settings_choose_the_device() {
    let model = TinyWhisper::new(3);
    let folder = folder(|folder| model.write_mlx(folder));
    let device = |choice| engine(folder.path(), &exact(choice)).0.device();
    for choice in devices() {
        assert_eq!(device(choice).contains("MLX"), choice == DeviceChoice::Mlx, "{choice:?}");
    }
    // As for chat: our own backend where there is no Metal.
    let mlx = cfg!(feature = "mlx") && (cfg!(target_os = "macos") || !cfg!(feature = "cpu"));
    assert_eq!(device(DeviceChoice::Auto).contains("MLX"), mlx);
}

#[test]
fn a_folder_without_a_vocabulary_says_which_file_it_needs_and_whose() {
    let folder = tempfile::tempdir().unwrap();
    TinyWhisper::new(4).write_mlx(folder.path());
    let error = SpeechFolder::new(folder.path(), &exact(devices()[0])).unwrap().load().err().unwrap();
    assert!(matches!(error, LoadError::NotFound { .. }), "{error}");
    let message = error.to_string();
    for part in ["tokenizer.json", "openai/whisper-tiny.en", &folder.path().display().to_string()] {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Ends with the test.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_loads_it_on_the_device_of_the_settings() {
    let folder = folder(|folder| TinyWhisper::new(5).write_mlx(folder));
    let chat = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
    let mut choices: Vec<(&str, bool)> = Vec::new();
    for device in devices() {
        let is_mlx = device == DeviceChoice::Mlx;
        choices.push((if is_mlx { "mlx" } else { "cpu" }, is_mlx));
    }
    for (device, is_mlx) in choices {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_greenroom"));
        command.arg("serve").arg(&chat).args(["--device", device, "--port", "0", "--speech-model"]);
        command.arg(folder.path()).env("GREENROOM__SPEECH__PRELOAD", "true");
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        let mut server = Server(command.spawn().unwrap());
        let lines = std::io::BufReader::new(server.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        let told: Vec<String> = lines.filter(|line| line.contains("the speech model")).take(1).collect();
        assert!(told.concat().contains("is loaded"), "{told:?}");
        assert_eq!(told.concat().contains("device=\"MLX"), is_mlx, "{device}: {told:?}");
    }
}
