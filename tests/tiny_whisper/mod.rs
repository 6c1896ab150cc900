//! A tiny random Whisper model, written in every layout that a folder may have.
//!
//! All values are halves, so that f16 and f32 files hold the same model.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "every test binary uses a part of this and fails by panicking"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

/// Its sizes: mel bins and vocabulary are published ones, all else is small.
pub const MELS: usize = 80;
pub const WIDTH: usize = 128;
pub const HEADS: usize = 2;
pub const FEED_FORWARD: usize = 256;
pub const ENCODER_LAYERS: usize = 1;
pub const DECODER_LAYERS: usize = 2;
pub const CONTEXT: usize = 64;
pub const VOCABULARY: usize = 51_864;

/// Tensors by MLX's names, convolutions `[out, 3, in]`.
#[derive(Clone)]
pub struct TinyWhisper(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

/// A tensor on its way to a file.
struct Stored {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn half(value: f32) -> f32 {
    half::f16::from_f32(value).to_f32()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn f16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect()
}

struct Maker {
    state: u64,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Maker {
    fn tensor(&mut self, name: String, shape: &[usize], middle: f32, spread: f32) {
        let count = shape.iter().product();
        let values = (0..count).map(|_| {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            half(middle + spread * ((self.state >> 40) as f32 / (1 << 23) as f32 - 1.0))
        });
        let values = values.collect();
        self.tensors.insert(name, (shape.to_vec(), values));
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, has_bias: bool) {
        self.tensor(format!("{name}.weight"), &[rows, cols], 0.0, (3.0 / cols as f32).sqrt());
        if has_bias {
            self.tensor(format!("{name}.bias"), &[rows], 0.0, 0.2);
        }
    }

    fn norm(&mut self, name: &str) {
        self.tensor(format!("{name}.weight"), &[WIDTH], 1.0, 0.2);
        self.tensor(format!("{name}.bias"), &[WIDTH], 0.0, 0.2);
    }

    fn attention(&mut self, name: &str) {
        for part in ["query", "key", "value", "out"] {
            self.linear(&format!("{name}.{part}"), WIDTH, WIDTH, part != "key");
        }
        self.norm(&format!("{name}_ln"));
    }
}

impl TinyWhisper {
    pub fn new(seed: u64) -> Self {
        let mut maker = Maker { state: seed, tensors: BTreeMap::new() };
        for (conv, cols) in [("conv1", MELS), ("conv2", WIDTH)] {
            let spread = (1.0 / cols as f32).sqrt();
            maker.tensor(format!("encoder.{conv}.weight"), &[WIDTH, 3, cols], 0.0, spread);
            maker.tensor(format!("encoder.{conv}.bias"), &[WIDTH], 0.0, 0.2);
        }
        for (part, layers) in [("encoder", ENCODER_LAYERS), ("decoder", DECODER_LAYERS)] {
            for layer in 0..layers {
                let block = format!("{part}.blocks.{layer}");
                maker.attention(&format!("{block}.attn"));
                if part == "decoder" {
                    maker.attention(&format!("{block}.cross_attn"));
                }
                maker.norm(&format!("{block}.mlp_ln"));
                maker.linear(&format!("{block}.mlp1"), FEED_FORWARD, WIDTH, true);
                maker.linear(&format!("{block}.mlp2"), WIDTH, FEED_FORWARD, true);
            }
        }
        maker.norm("encoder.ln_post");
        maker.norm("decoder.ln");
        maker.tensor("decoder.token_embedding.weight".into(), &[VOCABULARY, WIDTH], 0.0, 0.3);
        maker.tensor("decoder.positional_embedding".into(), &[CONTEXT, WIDTH], 0.0, 0.3);
        Self(maker.tensors)
    }

    /// As `transformers` writes it: `model.safetensors` in f32, kernels `[out, in, 3]`.
    pub fn write_hugging_face(&self, folder: &Path) {
        let mut tensors: Vec<Stored> = Vec::new();
        for (name, (shape, values)) in &self.0 {
            let mut stored = Stored {
                name: format!("model.{}", hugging_face_name(name)),
                dtype: "F32",
                shape: shape.clone(),
                bytes: f32_bytes(values),
            };
            if let [out, 3, cols] = shape[..] {
                let at = |o: usize, c: usize, tap: usize| values[(o * 3 + tap) * cols + c];
                let turned: Vec<f32> = (0..out * cols * 3)
                    .map(|index| at(index / (3 * cols), index / 3 % cols, index % 3))
                    .collect();
                (stored.shape, stored.bytes) = (vec![out, cols, 3], f32_bytes(&turned));
            }
            tensors.push(stored);
        }
        // The encoder's places are computed, whatever a file has for them.
        tensors.push(Stored {
            name: "model.encoder.embed_positions.weight".into(),
            dtype: "F32",
            shape: vec![4, WIDTH],
            bytes: f32_bytes(&[9.0; 4 * WIDTH]),
        });
        let config = json!({
            "model_type": "whisper", "d_model": WIDTH, "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS, "num_mel_bins": MELS, "vocab_size": VOCABULARY,
        });
        write_safetensors(&folder.join("model.safetensors"), &tensors);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }

    /// As MLX's converter writes it: `weights.safetensors` in f16.
    pub fn write_mlx(&self, folder: &Path) {
        let (tensors, config) = self.mlx(None);
        write_safetensors(&folder.join("weights.safetensors"), &tensors);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }

    /// The same in NumPy's archive, as older conversions have it.
    pub fn write_npz(&self, folder: &Path) {
        let (tensors, config) = self.mlx(None);
        write_npz(&folder.join("weights.npz"), &tensors);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }

    /// Quantised in groups of 64: linear layers and the embedding.
    pub fn write_quantised(&self, folder: &Path, bits: u32) {
        let (tensors, config) = self.mlx(Some(bits));
        write_safetensors(&folder.join("weights.safetensors"), &tensors);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }

    /// The quantised archive.
    pub fn write_quantised_npz(&self, folder: &Path, bits: u32) {
        let (tensors, config) = self.mlx(Some(bits));
        write_npz(&folder.join("weights.npz"), &tensors);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }

    /// What a model quantised so holds in fact.
    pub fn rounded(&self, bits: u32) -> Self {
        let tensors = self.0.iter().map(|(name, (shape, values))| {
            let values = match is_quantised(name, shape) {
                true => values.chunks_exact(64).flat_map(|group| Group::of(group, bits).values()).collect(),
                false => values.clone(),
            };
            (name.clone(), (shape.clone(), values))
        });
        Self(tensors.collect())
    }

    fn mlx(&self, bits: Option<u32>) -> (Vec<Stored>, Value) {
        let mut tensors = Vec::new();
        for (name, (shape, values)) in &self.0 {
            match bits.filter(|_| is_quantised(name, shape)) {
                Some(bits) => tensors.extend(quantised(name, shape, values, bits)),
                None => tensors.push(Stored {
                    name: name.clone(),
                    dtype: "F16",
                    shape: shape.clone(),
                    bytes: f16_bytes(values),
                }),
            }
        }
        let mut config = json!({
            "model_type": "whisper", "n_mels": MELS, "n_audio_ctx": 1500, "n_audio_state": WIDTH,
            "n_audio_head": HEADS, "n_audio_layer": ENCODER_LAYERS, "n_vocab": VOCABULARY,
            "n_text_ctx": CONTEXT, "n_text_state": WIDTH, "n_text_head": HEADS, "n_text_layer": DECODER_LAYERS,
        });
        if let Some(bits) = bits {
            config["quantization"] = json!({ "group_size": 64, "bits": bits });
        }
        (tensors, config)
    }
}

/// Text tokens: all letters and enough pairs of them.
pub fn write_vocabulary(folder: &Path) {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let rest = (0..256).filter(|byte| !printable(byte)).count() as u32;
    let letters = (0..256).filter(printable).chain(256..256 + rest);
    let letters: Vec<char> = letters.filter_map(char::from_u32).collect();
    let pairs = letters.iter().flat_map(|a| letters.iter().map(move |b| format!("{a}{b}")));
    let words: Vec<String> = letters.iter().map(char::to_string).chain(pairs).take(50_256).collect();
    fs::write(folder.join("vocabulary.json"), json!(words).to_string()).unwrap();
}

fn is_quantised(name: &str, shape: &[usize]) -> bool {
    shape.len() == 2 && name != "decoder.positional_embedding"
}

fn hugging_face_name(name: &str) -> String {
    let pairs = [
        ("decoder.token_embedding.", "decoder.embed_tokens."),
        ("decoder.positional_embedding", "decoder.embed_positions.weight"),
        ("encoder.ln_post.", "encoder.layer_norm."),
        ("decoder.ln.", "decoder.layer_norm."),
        (".blocks.", ".layers."),
        (".cross_attn_ln.", ".encoder_attn_layer_norm."),
        (".attn_ln.", ".self_attn_layer_norm."),
        (".mlp_ln.", ".final_layer_norm."),
        (".cross_attn.", ".encoder_attn."),
        (".attn.", ".self_attn."),
        (".query.", ".q_proj."),
        (".key.", ".k_proj."),
        (".value.", ".v_proj."),
        (".out.", ".out_proj."),
        (".mlp1.", ".fc1."),
        (".mlp2.", ".fc2."),
    ];
    pairs.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// 64 values in codes: `scale · code + bias`.
struct Group {
    codes: Vec<u32>,
    scale: f32,
    bias: f32,
}

impl Group {
    fn of(values: &[f32], bits: u32) -> Self {
        let most = (1 << bits) - 1;
        let (low, high) = values.iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
        let (scale, bias) = (half((high - low) / most as f32), half(low));
        let code = |value: &f32| ((value - bias) / scale).round().clamp(0.0, most as f32) as u32;
        Self { codes: values.iter().map(code).collect(), scale, bias }
    }

    fn values(&self) -> Vec<f32> {
        self.codes.iter().map(|code| self.scale * *code as f32 + self.bias).collect()
    }
}

fn quantised(name: &str, shape: &[usize], values: &[f32], bits: u32) -> [Stored; 3] {
    let (rows, groups) = (shape[0], shape[1] / 64);
    let layer = name.strip_suffix(".weight").unwrap();
    let all: Vec<Group> = values.chunks_exact(64).map(|group| Group::of(group, bits)).collect();
    let words = all.iter().flat_map(|group| group.codes.chunks_exact(32 / bits as usize)).flat_map(|codes| {
        codes.iter().enumerate().fold(0, |word, (at, code)| word | code << (at as u32 * bits)).to_le_bytes()
    });
    let part = |kind: &str, dtype, cols, bytes| Stored {
        name: format!("{layer}.{kind}"),
        dtype,
        shape: vec![rows, cols],
        bytes,
    };
    let meta = |of: fn(&Group) -> f32| f16_bytes(&all.iter().map(of).collect::<Vec<_>>());
    [
        part("weight", "U32", shape[1] * bits as usize / 32, words.collect()),
        part("scales", "F16", groups, meta(|group| group.scale)),
        part("biases", "F16", groups, meta(|group| group.bias)),
    ]
}

fn write_safetensors(path: &Path, tensors: &[Stored]) {
    let (mut header, mut body) = (Map::new(), Vec::new());
    for Stored { name, dtype, shape, bytes } in tensors {
        let offsets = [body.len(), body.len() + bytes.len()];
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        body.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &body].concat();
    fs::write(path, file).unwrap();
}

/// A zip of `.npy` arrays without compression, as NumPy and MLX write it.
fn write_npz(path: &Path, tensors: &[Stored]) {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for Stored { name, dtype, shape, bytes } in tensors {
        let descr = match *dtype {
            "F16" => "<f2",
            "U32" => "<u4",
            _ => "<f4",
        };
        let shape: Vec<String> = shape.iter().map(|n| format!("{n},")).collect();
        let mut header =
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", shape.concat());
        // Data begin at a multiple of 64.
        while (10 + header.len() + 1) % 64 != 0 {
            header.push(' ');
        }
        header.push('\n');
        let array =
            [b"\x93NUMPY\x01\0", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), bytes].concat();
        let name = format!("{name}.npy");
        let sizes = (array.len() as u32).to_le_bytes();
        let sizes = [crc32fast::hash(&array).to_le_bytes(), sizes, sizes].concat();
        let lengths = [(name.len() as u16).to_le_bytes(), [0; 2]].concat();
        let at = (file.len() as u32).to_le_bytes();
        // Version, flags, method 0 = stored, time and date.
        let common = [&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &sizes, &lengths].concat();
        directory.extend([b"PK\x01\x02\x14\0", &common[..], &[0; 10], &at, name.as_bytes()].concat());
        file.extend([b"PK\x03\x04", &common[..], name.as_bytes(), &array].concat());
    }
    let count = (tensors.len() as u16).to_le_bytes();
    let (size, at) = ((directory.len() as u32).to_le_bytes(), (file.len() as u32).to_le_bytes());
    let end = [b"PK\x05\x06\0\0\0\0", &count[..], &count, &size, &at, &[0; 2]].concat();
    fs::write(path, [file, directory, end].concat()).unwrap();
}
