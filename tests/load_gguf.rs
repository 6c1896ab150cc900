//! GGUF files: the demo model, every supported type, and files that lie.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{data, demo_model};
use greenroom::model::load::{self, AffineShape, ModelFiles};
use greenroom::types::{LoadError, TokenId};
use proptest::prelude::*;

const WEIGHT: &str = "model.layers.0.self_attn.q_proj.weight";

fn tiny(name: &str) -> PathBuf {
    data(&format!("tiny/gguf-{name}/{name}.gguf"))
}

fn open(name: &str) -> ModelFiles {
    load::open(&tiny(name)).expect("a tiny file opens")
}

fn rows(files: &ModelFiles, name: &str, rows: usize, cols: usize) -> Vec<f32> {
    let matrix = files.tensors.matrix(name, rows, cols).expect("the matrix is there");
    let mut all = vec![0.0; rows * cols];
    for (row, out) in all.chunks_exact_mut(cols).enumerate() {
        matrix.dequantize_row(row, out);
    }
    all
}

/// Writes bytes as a `.gguf` file and opens it.
fn open_bytes(bytes: &[u8]) -> Result<ModelFiles, LoadError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.gguf");
    std::fs::write(&path, bytes).expect("writes");
    load::open(&path)
}

#[test]
fn the_demo_model_has_its_configuration_and_every_tensor() {
    let path = demo_model();
    let files = load::open(&path).expect("opens");
    for (key, value) in [
        ("hidden_size", 576),
        ("num_hidden_layers", 30),
        ("num_attention_heads", 9),
        ("num_key_value_heads", 3),
        ("head_dim", 64),
        ("intermediate_size", 1536),
        ("vocab_size", 49_152),
        ("max_position_embeddings", 8192),
    ] {
        assert_eq!(files.config[key], value, "{key}");
    }
    assert_eq!(files.config["model_type"], "llama");
    assert_eq!(files.config["rope_theta"], 100_000.0);
    assert_eq!(files.config["tie_word_embeddings"], true);
    assert!((files.config["rms_norm_eps"].as_f64().expect("a number") - 1e-5).abs() < 1e-9);
    assert_eq!(files.tensors.names().count(), 272);
    assert_eq!(files.tensors.parameters(), 134_515_008);
    let facts: std::collections::HashMap<_, _> = files.text.facts.iter().cloned().collect();
    assert_eq!(facts["family"], "llama");
    assert_eq!(facts["format"], "GGUF");
    assert_eq!(facts["weights"], "Q4_1, Q8_0");
    assert_eq!(facts["parameters"], "135 M");
    assert_eq!(facts["context"], "8192 tokens");
    assert_eq!(facts["file size"], "93.8 MiB");
    assert_eq!(load::model_id(&path), "SmolLM2-135M-Instruct.Q4_1");
}

#[test]
fn every_type_gives_the_single_precision_weights_within_its_step() {
    let exact = open("llama-f32");
    let folder = load::open(&data("tiny/llama")).expect("opens");
    for (name, shape) in [
        (WEIGHT, (64, 64)),
        ("model.layers.1.self_attn.k_proj.weight", (32, 64)),
        ("model.layers.2.mlp.down_proj.weight", (64, 128)),
        ("model.embed_tokens.weight", (288, 64)),
        ("lm_head.weight", (288, 64)),
    ] {
        let reference = rows(&folder, name, shape.0, shape.1);
        // Row order included: the file's rows of q and k are interleaved, ours are not.
        assert_eq!(rows(&exact, name, shape.0, shape.1), reference, "{name}");
        let largest = reference.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        for (kind, tolerance) in [
            ("llama-f16", 1e-3),
            ("llama-bf16", 8e-3),
            ("llama-q8_0", 1e-2),
            ("llama-q5_0", 0.07),
            ("llama-q4_0", 0.15),
        ] {
            let got = rows(&open(kind), name, shape.0, shape.1);
            let error = got.iter().zip(&reference).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(error <= tolerance * largest, "{kind} {name}: {error} of {largest}");
        }
    }
    assert_eq!(
        exact.tensors.vector("model.norm.weight", 64).expect("a vector"),
        folder.tensors.vector("model.norm.weight", 64).expect("a vector")
    );
}

#[test]
fn codes_scales_and_biases_give_what_dequantising_gives() {
    for (kind, name, bits) in [
        ("llama-q4_0", WEIGHT, 4),
        ("llama-q4_1", WEIGHT, 4),
        ("llama-q8_0", WEIGHT, 8),
        ("llama-q5_0", WEIGHT, 5),
        ("llama-q5_1", WEIGHT, 5),
        ("llama-q4_1", "model.embed_tokens.weight", 8),
    ] {
        let files = open(kind);
        let matrix_rows = if name == WEIGHT { 64 } else { 288 };
        let matrix = files.tensors.matrix(name, matrix_rows, 64).expect("is there");
        assert_eq!(matrix.affine(), Some(AffineShape { bits, group: 32 }), "{kind}");
        let (mut codes, mut scales, mut biases) = (vec![0; 64], vec![0.0; 2], vec![0.0; 2]);
        let mut values = vec![0.0; 64];
        for row in 0..matrix_rows {
            matrix.affine_row(row, &mut codes, &mut scales, &mut biases);
            matrix.dequantize_row(row, &mut values);
            for (at, value) in values.iter().enumerate() {
                // In f64 both are exact up to the one rounding of the f32 result.
                let affine = f64::from(scales[at / 32]) * f64::from(codes[at]) + f64::from(biases[at / 32]);
                assert!((affine - f64::from(*value)).abs() <= f64::from(value.abs()) * 1e-6 + 1e-9, "{kind}");
            }
            assert!(codes.iter().all(|&code| u16::from(code) < 1 << bits));
        }
        assert_eq!(matrix.row_bytes(matrix_rows), b"", "a row that is not there");
    }
    assert_eq!(open("llama-f16").tensors.matrix(WEIGHT, 64, 64).expect("is there").affine(), None);
}

#[test]
fn a_file_of_another_family_keeps_its_rows_and_head_width() {
    let (files, folder) = (open("qwen3-q8_0"), load::open(&data("tiny/qwen3")).expect("opens"));
    assert_eq!(files.config["model_type"], "qwen3");
    assert_eq!(files.config["head_dim"], 32);
    let (a, b) = (rows(&files, WEIGHT, 128, 64), rows(&folder, WEIGHT, 128, 64));
    let largest = b.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 0.01 * largest));
    assert!(files.tensors.vector("model.layers.0.self_attn.q_norm.weight", 32).is_ok());
    assert_eq!(files.text.end_tokens, [TokenId(2), TokenId(0)]);
}

#[test]
fn rope_factors_become_configuration() {
    let files = open("llama3-rope-f16");
    let factors = files.config["rope_freq_factors"].as_array().expect("factors");
    assert_eq!(factors.len(), 8);
    assert_eq!(factors[0], 1.0);
    assert!(factors[7].as_f64().expect("a number") > 1.0);
    assert!(files.tensors.names().all(|name| !name.contains("rope")));
}

/// A GGUF file from parts, as small as they are.
#[derive(Default)]
struct Builder {
    values: Vec<u8>,
    value_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
}

impl Builder {
    fn text_bytes(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn value(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        self.values.extend(Self::text_bytes(key));
        self.values.extend(kind.to_le_bytes());
        self.values.extend(bytes);
        self.value_count += 1;
        self
    }

    fn text(self, key: &str, text: &str) -> Self {
        self.value(key, 8, &Self::text_bytes(text))
    }

    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors.extend(Self::text_bytes(name));
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| self.tensors.extend(dim.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.tensor_count += 1;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(self.tensor_count.to_le_bytes());
        bytes.extend(self.value_count.to_le_bytes());
        bytes.extend(&self.values);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
        bytes
    }
}

#[test]
fn lies_are_refused_quickly_and_name_the_figure() {
    let llama = || Builder::default().text("general.architecture", "llama");
    let huge = 1u64 << 60;
    let counts = |tensors: u64, values: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(values.to_le_bytes());
        bytes.resize(4096, 0);
        bytes
    };
    let array = [&8u32.to_le_bytes()[..], &huge.to_le_bytes()].concat();
    let nested: Vec<u8> =
        (0..100).flat_map(|_| [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat()).collect();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (counts(huge, 0), "claims 1152921504606846976 tensors"),
        (counts(0, huge), "claims 1152921504606846976 metadata values"),
        (llama().value("a", 9, &array).bytes(), "claims 1152921504606846976 list items"),
        (llama().value("a", 9, &nested).bytes(), "nested too deeply"),
        (llama().value("a", 8, &huge.to_le_bytes()).bytes(), "cut short"),
        (llama().value("a", 77, &[]).bytes(), "unknown type 77"),
        (llama().text("a", "x").text("a", "y").bytes(), "`a` is there twice"),
        (llama().tensor("t", &[huge, huge], 0, 0).bytes(), "impossible shape"),
        (llama().tensor("t", &[64, 64], 0, 0).bytes(), "cut short"),
        (llama().tensor("t", &[4], 0, u64::MAX - 31).bytes(), "cut short"),
        (llama().tensor("t", &[4], 0, 5).bytes(), "not a multiple of 32"),
        (llama().tensor("t", &[0], 0, 0).bytes(), "dimension of 0"),
        (llama().tensor("t", &[1; 9], 0, 0).bytes(), "9 dimensions"),
        (llama().tensor("t", &[33], 2, 0).bytes(), "no whole blocks"),
        (llama().tensor("t", &[4], 0, 0).tensor("t", &[4], 0, 0).bytes(), "twice"),
        (
            llama().tensor("a", &[16], 0, 0).tensor("b", &[4], 0, 32).bytes(),
            "tensor `b`: begins before `a` ends: at 32, not at 64 or later",
        ),
        (llama().tensor("t", &[255], 12, 0).bytes(), "rows of 255 are no whole blocks of 256 (Q4_K)"),
        (llama().bytes(), "token_embd.weight"),
        (llama().value("general.alignment", 4, &0u32.to_le_bytes()).bytes(), "general.alignment is 0"),
        (
            Builder::default().text("general.architecture", "mamba").bytes(),
            "known: llama, qwen2, qwen3, gemma2",
        ),
        (Builder::default().bytes(), "`general.architecture` is missing"),
        (b"GGUF".to_vec(), "cut short"),
        (b"GGML\0\0\0\0".to_vec(), "not a GGUF file"),
        (b"GGUF\0\0\0\x03".to_vec(), "big-endian"),
        (Vec::new(), "empty"),
    ];
    let started = Instant::now();
    for (bytes, words) in cases {
        let error = open_bytes(&bytes).expect_err("is refused").to_string();
        assert!(error.contains(words), "expected {words:?} in {error:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(10), "refusing took {:?}", started.elapsed());
}

#[test]
fn types_that_are_not_supported_are_refused_by_name() {
    for (kind, name) in [
        (4, "Q4_2"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (31, "a rearranged Q4_0"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
        (u32::MAX, "of an unknown type"),
    ] {
        let file = Builder::default().text("general.architecture", "llama");
        let error = open_bytes(&file.tensor("blk.7.attn_q.weight", &[256], kind, 0).bytes());
        let error = error.expect_err("is refused");
        let words = format!("tensor `blk.7.attn_q.weight` is {name}");
        assert!(
            matches!(&error, LoadError::Unsupported { message } if message.starts_with(&words)
                && message.contains(&format!("(type {kind}); supported are F32,"))
                && message.ends_with("Q4_K, Q5_K and Q6_K")),
            "{error}"
        );
    }
}

#[test]
fn a_type_is_read_from_each_tensor_and_not_from_the_label() {
    // Labelled 15, `mostly Q4_K`; in truth four types.
    let files = open("llama-q4_k");
    let kinds: Vec<String> = [
        ("model.layers.0.self_attn.q_proj.weight", 256),
        ("model.layers.0.mlp.down_proj.weight", 256),
        ("model.embed_tokens.weight", 288),
    ]
    .map(|(name, rows)| files.tensors.matrix(name, rows, 256).expect("is there").kind.describe())
    .into();
    assert_eq!(kinds, ["Q4_K", "Q6_K", "Q5_0"]);
    let facts: std::collections::HashMap<_, _> = files.text.facts.into_iter().collect();
    assert_eq!(facts["weights"], "Q4_K, Q6_K, Q5_0");
}

#[test]
fn a_vocabulary_that_does_not_fit_is_refused() {
    let bytes = std::fs::read(tiny("llama-f16")).expect("reads");
    let find = |needle: &[u8]| {
        bytes.windows(needle.len()).position(|window| window == needle).expect("the key is there")
    };
    // The length of the list of token types, one less: what follows is misread or refused.
    let key = b"tokenizer.ggml.token_type";
    let at = find(key) + key.len() + 4 + 4;
    let mut spoiled = bytes.clone();
    spoiled[at..at + 8].copy_from_slice(&287u64.to_le_bytes());
    assert!(open_bytes(&spoiled).is_err());
    // A pre-tokenizer nobody knows.
    let mut spoiled = bytes.clone();
    let at = find(b"smollm");
    spoiled[at..at + 6].copy_from_slice(b"smellm");
    let error = open_bytes(&spoiled).expect_err("is refused");
    assert!(matches!(&error, LoadError::Unsupported { message } if message.contains("smellm")), "{error}");
    // A SentencePiece vocabulary without scores is not read as something else.
    let mut spoiled = bytes.clone();
    let at = find(b"tokenizer.ggml.model") + 20 + 4;
    spoiled.splice(at..at + 12, [&5u64.to_le_bytes()[..], b"llama"].concat());
    let error = open_bytes(&spoiled).expect_err("is refused").to_string();
    assert!(error.contains("tokenizer.ggml.scores"), "{error}");
    // Nor is a kind that nobody knows.
    let mut spoiled = bytes.clone();
    spoiled[at..at + 12].copy_from_slice(&[&4u64.to_le_bytes()[..], b"bert"].concat());
    let error = open_bytes(&spoiled).expect_err("is refused").to_string();
    assert!(error.contains("`bert`") && error.contains("gpt2") && error.contains("llama"), "{error}");
}

#[test]
fn a_file_that_is_cut_short_is_refused_and_named() {
    let bytes = std::fs::read(tiny("llama-q8_0")).expect("reads");
    for keep in [0, 3, 23, 100, 5000, bytes.len() / 2, bytes.len() - 1] {
        let error = open_bytes(&bytes[..keep]).expect_err("is refused");
        assert!(
            matches!(&error, LoadError::Format { path, .. } if path.ends_with("x.gguf")),
            "{keep}: {error}"
        );
    }
}

#[test]
fn paths_that_are_no_model_say_what_to_give() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "x").expect("writes");
    for path in [folder.path(), &text, Path::new("/no/such/model.gguf")] {
        assert!(matches!(load::open(path), Err(LoadError::NotFound { .. })), "{}", path.display());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is written over a file's beginning, or cut off it: an error or a model, never a panic.
    #[test]
    fn damaged_files_never_panic(
        kind in 0usize..6,
        cut in proptest::option::weighted(0.3, prop_oneof![0usize..20_000, 0usize..450_000]),
        changes in proptest::collection::vec((0usize..9000, prop_oneof![any::<u8>(), Just(0xff), Just(0)]), 0..10),
    ) {
        let name =
            ["llama-q4_0", "qwen3-q8_0", "llama3-rope-f16", "llama-q4_k", "llama-q6_k", "llama-q5_1"][kind];
        let mut bytes = std::fs::read(tiny(name)).expect("reads");
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        let fs_len = bytes.len();
        if let Ok(files) = open_bytes(&bytes) {
            let names: Vec<String> = files.tensors.names().map(str::to_owned).collect();
            for name in names {
                if let Some(&[r, c]) = files.tensors.shape(&name) {
                    let values = rows(&files, &name, r, c);
                    let kind = files.tensors.matrix(&name, r, c).expect("is there").kind;
                    let bytes = kind.row_bytes(c).expect("whole blocks") * r;
                    prop_assert!(bytes <= fs_len && values.len() == r * c, "{name} of {r} by {c}");
                }
            }
            let ids = files.text.tokenizer.encode_with_specials("Hello <|im_end|> 12").unwrap_or_default();
            files.text.tokenizer.decode(&ids, true);
        }
    }
}
