//! Model folders: dense and MLX-quantised safetensors, shards, and files that lie.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::data;
use greenroom::model::load::{self, AffineShape};
use greenroom::types::{LoadError, TokenId};
use proptest::prelude::*;
use serde_json::{Value, json};

const WEIGHT: &str = "model.layers.0.self_attn.q_proj.weight";

/// A copy of a tiny checkpoint that a test may spoil.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in fs::read_dir(data(&format!("tiny/{name}"))).expect("test data") {
        let file = file.expect("an entry").path();
        let name = file.file_name().expect("a name");
        if name != "golden.safetensors" {
            fs::copy(&file, folder.path().join(name)).expect("copies");
        }
    }
    folder
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).expect("reads")).expect("is JSON");
    edit(&mut value);
    fs::write(path, value.to_string()).expect("writes");
}

fn rows(tensors: &load::TensorTable, name: &str, rows: usize, cols: usize) -> Vec<f32> {
    let matrix = tensors.matrix(name, rows, cols).expect("the matrix is there");
    let mut all = vec![0.0; rows * cols];
    for (row, out) in all.chunks_exact_mut(cols).enumerate() {
        matrix.dequantize_row(row, out);
    }
    all
}

/// Header and data of a safetensors file, tensor by tensor.
fn read_safetensors(path: &Path) -> Vec<(String, Value, Vec<u8>)> {
    let bytes = fs::read(path).expect("reads");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("is JSON");
    let tensors = header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, info)| {
            let at = |i: usize| 8 + length + info["data_offsets"][i].as_u64().expect("an offset") as usize;
            (name.clone(), info.clone(), bytes[at(0)..at(1)].to_vec())
        })
        .collect()
}

fn write_safetensors(path: &Path, tensors: &[(String, Value, Vec<u8>)]) {
    let (mut header, mut body) = (serde_json::Map::new(), Vec::new());
    for (name, info, bytes) in tensors {
        let mut info = info.clone();
        info["data_offsets"] = json!([body.len(), body.len() + bytes.len()]);
        header.insert(name.clone(), info);
        body.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&body);
    fs::write(path, file).expect("writes");
}

#[test]
fn a_dense_folder_gives_its_values() {
    let files = load::open(&data("tiny/llama")).expect("opens");
    assert_eq!(files.config["model_type"], "llama");
    let stored = read_safetensors(&data("tiny/llama/model.safetensors"));
    let (_, info, bytes) = stored.iter().find(|(name, ..)| name == WEIGHT).expect("is there");
    assert_eq!(info["dtype"], "F32");
    let values: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four"))).collect();
    assert_eq!(rows(&files.tensors, WEIGHT, 64, 64), values);
    assert_eq!(files.tensors.vector("model.norm.weight", 64).expect("a vector").len(), 64);
    assert!(!files.tensors.unconsumed().contains(&WEIGHT.to_owned()));
    assert!(files.tensors.unconsumed().contains(&"lm_head.weight".to_owned()));
    assert_eq!(files.text.end_tokens, [TokenId(2), TokenId(0)]);
    assert_eq!(files.text.defaults.temperature, Some(0.0));
    assert_eq!(files.text.context, 2048);
    assert_eq!(load::model_id(&data("tiny/llama")), "llama");
}

#[test]
fn half_precision_folders_are_close_to_the_single_precision_one() {
    let exact = load::open(&data("tiny/llama")).expect("opens");
    let half = load::open(&data("tiny/llama-f16")).expect("opens");
    let (a, b) = (rows(&exact.tensors, WEIGHT, 64, 64), rows(&half.tensors, WEIGHT, 64, 64));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= a.abs() * 1e-3 + 1e-6));
    assert_ne!(a, b);
}

#[test]
fn mlx_codes_scales_and_biases_give_what_dequantising_gives() {
    for (name, bits, group) in [("llama-mlx4", 4, 64), ("llama-mlx8", 8, 32), ("qwen3-mlx4", 4, 32)] {
        let files = load::open(&data(&format!("tiny/{name}"))).expect("opens");
        let matrix = files.tensors.matrix("model.embed_tokens.weight", 288, 64).expect("is there");
        assert_eq!(matrix.affine(), Some(AffineShape { bits, group }));
        let (mut codes, mut scales, mut biases) = (vec![0; 64], vec![0.0; 64 / group], vec![0.0; 64 / group]);
        let mut values = vec![0.0; 64];
        for row in [0, 1, 287] {
            matrix.affine_row(row, &mut codes, &mut scales, &mut biases);
            matrix.dequantize_row(row, &mut values);
            for (at, value) in values.iter().enumerate() {
                assert_eq!(scales[at / group] * f32::from(codes[at]) + biases[at / group], *value);
            }
            assert!(bits == 8 || codes.iter().all(|&code| code < 16));
            assert!(values.iter().any(|value| *value != 0.0));
        }
    }
}

#[test]
fn mlx_weights_are_near_the_ones_they_were_made_from() {
    let exact = load::open(&data("tiny/llama")).expect("opens");
    let a = rows(&exact.tensors, "lm_head.weight", 288, 64);
    for (name, tolerance) in [("llama-mlx4", 0.2), ("llama-mlx8", 0.02)] {
        let quantised = load::open(&data(&format!("tiny/{name}"))).expect("opens");
        let b = rows(&quantised.tensors, "lm_head.weight", 288, 64);
        let largest = a.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let error = a.iter().zip(&b).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(error < tolerance * largest, "{name}: {error} of {largest}");
    }
}

#[test]
fn weight_and_scales_may_lie_in_different_shards() {
    let folder = copy("llama-mlx4");
    let single = folder.path().join("model.safetensors");
    let tensors = read_safetensors(&single);
    fs::remove_file(&single).expect("removes");
    let (scales, others): (Vec<_>, Vec<_>) =
        tensors.iter().cloned().partition(|(name, ..)| name.ends_with(".scales"));
    write_safetensors(&folder.path().join("a.safetensors"), &others);
    write_safetensors(&folder.path().join("b.safetensors"), &scales);
    let file = |name: &str| if name.ends_with(".scales") { "b.safetensors" } else { "a.safetensors" };
    let map: serde_json::Map<_, _> =
        tensors.iter().map(|(name, ..)| (name.clone(), Value::from(file(name)))).collect();
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": map }).to_string()).expect("writes");
    let (sharded, whole) =
        (load::open(folder.path()).expect("opens"), load::open(&data("tiny/llama-mlx4")).expect("opens"));
    assert_eq!(rows(&sharded.tensors, WEIGHT, 64, 64), rows(&whole.tensors, WEIGHT, 64, 64));
    assert_eq!(sharded.tensors.names().count(), whole.tensors.names().count());

    // A tensor that the index promises and no shard holds, and a path that leads elsewhere.
    edit_json(&index, |index| index["weight_map"]["model.extra"] = "a.safetensors".into());
    assert!(load::open(folder.path()).expect_err("is refused").to_string().contains("model.extra"));
    edit_json(&index, |index| index["weight_map"]["model.extra"] = "../a.safetensors".into());
    assert!(load::open(folder.path()).expect_err("is refused").to_string().contains("model.extra"));
    // Without the scales' shard.
    edit_json(&index, |index| {
        let map = index["weight_map"].as_object_mut().expect("a map");
        map.retain(|name, _| name.ends_with(".weight") || name.ends_with(".biases"));
    });
    assert!(load::open(folder.path()).expect_err("is refused").to_string().contains(".scales` is missing"));
}

#[test]
fn the_shapes_decide_where_a_layer_differs_from_the_configuration() {
    let folder = copy("llama-mlx8");
    let config = folder.path().join("config.json");
    // Global 4 bits, every layer in truth 8: found by the shapes.
    edit_json(&config, |config| {
        config["quantization"] = json!({"bits": 4, "group_size": 32});
        config["quantization_config"] = Value::Null;
    });
    let files = load::open(folder.path()).expect("opens");
    let matrix = files.tensors.matrix(WEIGHT, 64, 64).expect("is there");
    assert_eq!(matrix.affine(), Some(AffineShape { bits: 8, group: 32 }));
    // An override under a longer name.
    edit_json(&config, |config| {
        config["quantization"] = json!({"bits": 4, "group_size": 128,
            "language_model.model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": 32}});
    });
    let error = load::open(folder.path()).expect_err("other layers do not fit").to_string();
    assert!(error.contains("4 bits in groups of 128") && !error.contains("q_proj"), "{error}");
    for (quantization, word) in [
        (json!({"bits": 4, "group_size": 32, "mode": "mxfp4"}), "mxfp4"),
        (json!({"quant_method": "gptq", "bits": 4}), "gptq"),
    ] {
        edit_json(&config, |config| config["quantization"] = quantization);
        let error = load::open(folder.path()).expect_err("is refused");
        assert!(matches!(&error, LoadError::Unsupported { message } if message.contains(word)), "{error}");
    }
}

#[test]
fn a_wrong_shape_is_told_with_both_shapes() {
    let files = load::open(&data("tiny/llama")).expect("opens");
    let error = files.tensors.matrix(WEIGHT, 64, 32).expect_err("is refused").to_string();
    assert!(error.contains(WEIGHT) && error.contains("[64, 64]") && error.contains("[64, 32]"), "{error}");
    assert!(files.tensors.matrix("nothing", 1, 1).expect_err("is refused").to_string().contains("nothing"));
    assert!(files.tensors.vector(WEIGHT, 64).is_err());
}

#[test]
fn a_shard_that_is_cut_short_is_refused_with_the_missing_bytes() {
    let folder = copy("llama");
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).expect("reads");
    fs::write(&path, &bytes[..bytes.len() - 1000]).expect("writes");
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    assert!(error.contains("model.safetensors") && error.contains("1000 bytes are missing"), "{error}");
    let mut longer = bytes;
    longer.extend_from_slice(&[0; 16]);
    fs::write(&path, longer).expect("writes");
    assert!(load::open(folder.path()).expect_err("is refused").to_string().contains("16 bytes follow"));
}

#[test]
fn folders_that_lack_something_say_what() {
    for (file, word) in [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "no weights"),
    ] {
        let folder = copy("llama");
        fs::remove_file(folder.path().join(file)).expect("removes");
        let error = load::open(folder.path()).expect_err("is refused");
        assert!(matches!(&error, LoadError::NotFound { message } if message.contains(word)), "{error}");
    }
    let folder = copy("llama");
    for file in ["tokenizer_config.json", "generation_config.json"] {
        fs::remove_file(folder.path().join(file)).expect("removes");
    }
    let files = load::open(folder.path()).expect("opens as a base model");
    assert!(files.text.template.is_none());
}

#[test]
fn more_token_ids_than_embeddings_are_refused() {
    let folder = copy("llama");
    edit_json(&folder.path().join("config.json"), |config| config["vocab_size"] = 280.into());
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    assert!(error.contains("288") && error.contains("280"), "{error}");
}

#[test]
fn templates_are_found_in_every_place() {
    let template = |edit: &dyn Fn(&Path)| {
        let folder = copy("llama");
        edit(folder.path());
        load::open(folder.path()).map(|files| files.text.template.map(|template| template.source))
    };
    let named = json!([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]);
    let listed = template(&|folder| {
        edit_json(&folder.join("tokenizer_config.json"), |json| json["chat_template"] = named.clone());
    });
    assert_eq!(listed.expect("opens").as_deref(), Some("D"));
    let own = template(&|folder| fs::write(folder.join("chat_template.jinja"), "J").expect("writes"));
    assert_eq!(own.expect("opens").as_deref(), Some("J"));
    let broken = template(&|folder| fs::write(folder.join("chat_template.jinja"), "{% if").expect("writes"));
    assert!(broken.expect_err("is refused").to_string().contains("does not compile"));
}

#[test]
fn buffers_and_a_tied_heads_copy_are_dropped() {
    let folder = copy("llama");
    let path = folder.path().join("model.safetensors");
    let mut tensors = read_safetensors(&path);
    let buffer = json!({"dtype": "F32", "shape": [2]});
    tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), buffer, vec![0; 8]));
    write_safetensors(&path, &tensors);
    edit_json(&folder.path().join("config.json"), |config| config["tie_word_embeddings"] = true.into());
    let files = load::open(folder.path()).expect("opens");
    assert!(!files.tensors.has("lm_head.weight"));
    assert!(files.tensors.names().all(|name| !name.contains("inv_freq")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is written over a file: an error or a model, never a panic.
    #[test]
    fn damaged_files_never_panic(
        cut in 0usize..4000,
        changes in proptest::collection::vec((0usize..3600, any::<u8>()), 0..8),
        which in 0usize..4,
    ) {
        let folder = copy("qwen3-mlx4");
        let names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"];
        let path = folder.path().join(names[which]);
        let mut bytes = fs::read(&path).expect("reads");
        if cut % 3 == 0 {
            bytes.truncate(cut);
        }
        let len = bytes.len().max(1);
        for (at, byte) in changes {
            if let Some(place) = bytes.get_mut(at % len) {
                *place = byte;
            }
        }
        fs::write(&path, bytes).expect("writes");
        if let Ok(files) = load::open(folder.path()) {
            let names: Vec<String> = files.tensors.names().map(str::to_owned).collect();
            for name in names {
                if let Some(&[r, c]) = files.tensors.shape(&name) {
                    rows(&files.tensors, &name, r, c);
                }
            }
        }
    }
}
