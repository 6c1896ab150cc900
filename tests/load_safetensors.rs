//! Model folders: dense and MLX-quantised safetensors, shards, and files that lie.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::{data, edit_json, tiny_copy};
use greenroom::model::load::{self, AffineShape};
use greenroom::types::{LoadError, TokenId};
use proptest::prelude::*;
use serde_json::{Value, json};

const WEIGHT: &str = "model.layers.0.self_attn.q_proj.weight";

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
    for (name, bits, group, cols) in [
        ("llama-mlx2", 2, 32, 64),
        ("llama-mlx3", 3, 128, 256),
        ("llama-mlx4", 4, 64, 64),
        ("llama-mlx5", 5, 32, 64),
        ("llama-mlx6", 6, 64, 64),
        ("llama-mlx8", 8, 32, 64),
        ("qwen3-mlx4", 4, 32, 64),
    ] {
        let files = load::open(&data(&format!("tiny/{name}"))).expect("opens");
        let matrix = files.tensors.matrix("model.embed_tokens.weight", 288, cols).expect("is there");
        assert_eq!(matrix.affine(), Some(AffineShape { bits, group }));
        let groups = cols / group;
        let (mut codes, mut scales, mut biases) = (vec![0; cols], vec![0.0; groups], vec![0.0; groups]);
        let mut values = vec![0.0; cols];
        for row in [0, 1, 287] {
            matrix.affine_row(row, &mut codes, &mut scales, &mut biases);
            matrix.dequantize_row(row, &mut values);
            for (at, value) in values.iter().enumerate() {
                assert_eq!(scales[at / group] * f32::from(codes[at]) + biases[at / group], *value);
            }
            assert!(codes.iter().all(|&code| u16::from(code) < 1 << bits));
            assert!(values.iter().any(|value| *value != 0.0));
        }
    }
}

#[test]
fn mlx_weights_are_near_the_ones_they_were_made_from() {
    let exact = load::open(&data("tiny/llama")).expect("opens");
    let a = rows(&exact.tensors, "lm_head.weight", 288, 64);
    for (name, tolerance) in
        [("llama-mlx4", 0.2), ("llama-mlx5", 0.1), ("llama-mlx6", 0.06), ("llama-mlx8", 0.02)]
    {
        let quantised = load::open(&data(&format!("tiny/{name}"))).expect("opens");
        let b = rows(&quantised.tensors, "lm_head.weight", 288, 64);
        let largest = a.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let error = a.iter().zip(&b).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(error < tolerance * largest, "{name}: {error} of {largest}");
    }
}

#[test]
fn weight_and_scales_may_lie_in_different_shards() {
    let folder = tiny_copy("llama-mlx4");
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
    // Without one of the files.
    let (kept, away) = (folder.path().join("b.safetensors"), folder.path().join("away"));
    fs::rename(&kept, &away).expect("renames");
    edit_json(&index, |index| index["weight_map"]["model.extra"] = "a.safetensors".into());
    let error = load::open(folder.path()).expect_err("is refused");
    assert!(
        matches!(&error, LoadError::NotFound { message } if message.contains("of 2 files named in model.safetensors.index.json")
            && message.contains("b.safetensors")),
        "{error}"
    );
    fs::rename(&away, &kept).expect("renames");
    edit_json(&index, |index| {
        drop(index["weight_map"].as_object_mut().expect("a map").remove("model.extra"))
    });
    // With half of one.
    let bytes = fs::read(&kept).expect("reads");
    fs::write(&kept, &bytes[..bytes.len() - 100]).expect("writes");
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    assert!(
        error.contains("b.safetensors: is cut short: tensor `") && error.contains("100 bytes are missing"),
        "{error}"
    );
    fs::write(&kept, bytes).expect("writes");
    // Without the scales' shard in the index.
    edit_json(&index, |index| {
        let map = index["weight_map"].as_object_mut().expect("a map");
        map.retain(|name, _| name.ends_with(".weight") || name.ends_with(".biases"));
    });
    assert!(load::open(folder.path()).expect_err("is refused").to_string().contains(".scales` is missing"));
}

#[test]
fn layers_may_differ_from_the_model_and_be_spelt_in_other_ways() {
    let files = load::open(&data("tiny/llama-mlx-mixed")).expect("opens");
    for (name, rows, cols, what) in [
        (WEIGHT, 64, 64, "MLX 4-bit, groups of 64"),
        ("model.layers.0.self_attn.v_proj.weight", 32, 64, "MLX 6-bit, groups of 64"),
        ("model.layers.1.mlp.down_proj.weight", 64, 128, "MLX 8-bit, groups of 32"),
        ("model.layers.2.mlp.up_proj.weight", 128, 64, "MLX 3-bit, groups of 64"),
        ("model.layers.1.self_attn.q_proj.weight", 64, 64, "BF16"),
        ("lm_head.weight", 288, 64, "MLX 5-bit, groups of 32"),
    ] {
        let matrix = files.tensors.matrix(name, rows, cols).expect("is there");
        assert_eq!(matrix.kind.describe(), what, "{name}");
    }
}

/// A copy of a tiny folder whose `quantization` is another.
fn with_quantization(name: &str, quantization: Value) -> tempfile::TempDir {
    let folder = tiny_copy(name);
    edit_json(&folder.path().join("config.json"), |config| {
        config["quantization"] = quantization;
        config["quantization_config"] = Value::Null;
    });
    folder
}

#[test]
fn the_shapes_decide_where_a_layer_differs_from_the_model() {
    // The model's figure is 4 bits, every layer is in truth of 8: told by the shapes.
    let folder = with_quantization("llama-mlx8", json!({"bits": 4, "group_size": 32}));
    let files = load::open(folder.path()).expect("opens");
    let matrix = files.tensors.matrix(WEIGHT, 64, 64).expect("is there");
    assert_eq!(matrix.affine(), Some(AffineShape { bits: 8, group: 32 }));
}

#[test]
fn a_configuration_that_contradicts_the_shapes_is_refused_with_both_figures() {
    let layer = "model.layers.0.self_attn.q_proj";
    for (quantization, words) in [
        // Of the layer by its name, in either spelling.
        (
            json!({"bits": 8, "group_size": 32, layer: {"bits": 6, "group_size": 32}}),
            "tensor `model.layers.0.self_attn.q_proj.weight`: has 16 words of codes and 2 groups a row, which in groups of 32 are 8 bits; config.json says 6 bits",
        ),
        (
            json!({"bits": 8, "group_size": 32, "language_model.model.layers.0.self_attn.q_proj": {"bits": 6, "group_size": 32}}),
            "are 8 bits; config.json says 6 bits",
        ),
        // The longest name wins, and one that ends within a word is another's.
        (
            json!({"bits": 8, "group_size": 32, "q_proj": {"bits": 3}, "a.model.layers.0.self_attn.q_proj": {"bits": 2},
                "b.a.model.layers.0.self_attn.q_proj": {"bits": 6}, "xmodel.layers.0.self_attn.q_proj": {"bits": 5}}),
            "are 8 bits; config.json says 6 bits",
        ),
        (
            json!({"bits": 8, "group_size": 32, "layers.0.self_attn.q_proj": {"bits": 3}}),
            "are 8 bits; config.json says 3 bits",
        ),
        // Groups that are too wide make the matrix too wide, which whoever asks for it is told.
        (
            json!({"bits": 4, "group_size": 128}),
            "has the shape [64, 256] (MLX 2-bit, groups of 128, 4096 bytes), the configuration asks for [64, 64]",
        ),
        (json!({"bits": 4, "group_size": 48}), "in groups of 48 are no whole bits; config.json says 4 bits"),
        (json!({"bits": 8, "group_size": 32, layer: false}), "says `false` of it"),
        (json!({"group_size": 32}), "`quantization`: `bits` and `group_size` are needed together"),
        (json!({"bits": "four", "group_size": 32}), "`bits` is \"four\", not a number from 1 on"),
        (json!({"bits": 300, "group_size": 32}), "`bits` is 300; supported are 2, 3, 4, 5, 6 and 8 bits"),
        (json!({"bits": 4, "group_size": 0}), "`group_size` is 0, not a number from 1 on"),
        (
            json!({"bits": 8, "group_size": 32, layer: {"bits": -1}}),
            "`quantization` of `model.layers.0.self_attn.q_proj`: `bits` is -1",
        ),
        (json!([]), "`quantization` is not an object"),
        (json!({}), "no `quantization` with bits and group_size"),
    ] {
        let folder = with_quantization("llama-mlx8", quantization.clone());
        let error = match load::open(folder.path()) {
            Err(error) => error.to_string(),
            Ok(files) => files.tensors.matrix(WEIGHT, 64, 64).expect_err("is refused").to_string(),
        };
        assert!(error.contains(words), "{quantization}: expected {words:?} in {error:?}");
    }
}

#[test]
fn modes_other_than_affine_are_refused_by_tensor_and_mode() {
    let layer = "model.layers.1.mlp.up_proj";
    for (quantization, words) in [
        (
            json!({"bits": 4, "group_size": 32, "mode": "mxfp4"}),
            "tensor `lm_head.weight` is quantised in mode `mxfp4`; `affine` is supported",
        ),
        (
            json!({"bits": 8, "group_size": 32, "mode": "mxfp8"}),
            "tensor `lm_head.weight` is quantised in mode `mxfp8`",
        ),
        (
            json!({"bits": 8, "group_size": 32, layer: {"bits": 4, "group_size": 16, "mode": "nvfp4"}}),
            "tensor `model.layers.1.mlp.up_proj.weight` is quantised in mode `nvfp4`",
        ),
        (json!({"quant_method": "gptq", "bits": 4}), "quantisation by `gptq`"),
    ] {
        let folder = with_quantization("llama-mlx8", quantization);
        let error = load::open(folder.path()).expect_err("is refused");
        assert!(matches!(&error, LoadError::Unsupported { message } if message.contains(words)), "{error}");
    }
    // The model in another mode, each layer affine of its own.
    let mut quantization = json!({"bits": 4, "group_size": 32, "mode": "mxfp4"});
    for (name, ..) in read_safetensors(&data("tiny/llama-mlx8/model.safetensors")) {
        if let Some(layer) = name.strip_suffix(".scales") {
            quantization[layer] = json!({"bits": 8, "group_size": 32});
        }
    }
    let folder = with_quantization("llama-mlx8", quantization);
    assert!(load::open(folder.path()).is_ok());
}

/// A folder with one tensor changed in its header or bytes.
fn with_tensor(name: &str, tensor: &str, edit: impl FnOnce(&mut Value, &mut Vec<u8>)) -> tempfile::TempDir {
    let folder = tiny_copy(name);
    let path = folder.path().join("model.safetensors");
    let mut tensors = read_safetensors(&path);
    let (_, info, bytes) = tensors.iter_mut().find(|(name, ..)| name == tensor).expect("is there");
    edit(info, bytes);
    write_safetensors(&path, &tensors);
    folder
}

#[test]
fn element_types_that_are_not_supported_are_refused_by_tensor_and_type() {
    for (kind, bytes) in [
        ("F8_E4M3", 1),
        ("F8_E5M2", 1),
        ("F8_E8M0", 1),
        ("I8", 1),
        ("U8", 1),
        ("BOOL", 1),
        ("I16", 2),
        ("I32", 4),
        ("F64", 8),
        ("I64", 8),
        ("F4", 1),
        ("C64", 8),
    ] {
        let folder = with_tensor("llama", WEIGHT, |info, data| {
            info["dtype"] = kind.into();
            data.resize(64 * 64 * bytes, 0);
        });
        let error = load::open(folder.path()).expect_err("is refused");
        assert!(
            matches!(&error, LoadError::Unsupported { message } if message.contains(&format!("tensor `{WEIGHT}`"))
                && message.contains(&format!("is {kind}; supported are F32, F16, BF16 and MLX's affine quantisation"))),
            "{error}"
        );
    }
}

#[test]
fn scales_and_biases_that_do_not_fit_are_refused_by_name() {
    let scales = WEIGHT.replace(".weight", ".scales");
    let folder = with_tensor("llama-mlx4", &scales, |info, data| {
        info["shape"] = json!([32, 1]);
        data.truncate(32 * 2);
    });
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    assert!(error.contains(WEIGHT) && error.contains("has 64 rows; scales are F16 [32, 1]"), "{error}");
    let folder = with_tensor("llama-mlx4", &scales, |info, data| {
        info["shape"] = json!([64, 0]);
        data.clear();
    });
    assert!(load::open(folder.path()).expect_err("is refused").to_string().contains(WEIGHT));
    let folder = with_tensor("llama-mlx4", &scales, |info, data| {
        info["dtype"] = "U8".into();
        data.truncate(64);
    });
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    assert!(error.contains(WEIGHT) && error.contains("scales are U8"), "{error}");
}

#[test]
fn a_wrong_shape_is_told_with_both_shapes() {
    let files = load::open(&data("tiny/llama")).expect("opens");
    let error = files.tensors.matrix(WEIGHT, 64, 32).expect_err("is refused").to_string();
    assert!(
        error.contains(WEIGHT)
            && error.contains("in model.safetensors has the shape [64, 64] (F32, 16384 bytes)")
            && error.contains("[64, 32]"),
        "{error}"
    );
    let missing = files.tensors.matrix("nothing", 1, 1).expect_err("is refused").to_string();
    assert_eq!(missing, "tensor `nothing`: is missing from model.safetensors");
    assert!(files.tensors.matrix("nothing", 1, 1).expect_err("is refused").to_string().contains("nothing"));
    assert!(files.tensors.vector(WEIGHT, 64).is_err());
}

#[test]
fn a_shard_that_is_cut_short_is_refused_with_the_missing_bytes() {
    let folder = tiny_copy("llama");
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).expect("reads");
    fs::write(&path, &bytes[..bytes.len() - 1000]).expect("writes");
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    // The first tensor that is not whole.
    let last = format!(
        "is cut short: tensor `model.layers.2.self_attn.v_proj.weight` is not all there; the file has {} bytes, 1000 bytes are missing",
        bytes.len() - 1000
    );
    assert!(error.contains("model.safetensors") && error.contains(&last), "{error}");
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
        let folder = tiny_copy("llama");
        fs::remove_file(folder.path().join(file)).expect("removes");
        let error = load::open(folder.path()).expect_err("is refused");
        assert!(matches!(&error, LoadError::NotFound { message } if message.contains(word)), "{error}");
    }
    let folder = tiny_copy("llama");
    for file in ["tokenizer_config.json", "generation_config.json"] {
        fs::remove_file(folder.path().join(file)).expect("removes");
    }
    let files = load::open(folder.path()).expect("opens as a base model");
    assert!(files.text.template.is_none());
}

#[test]
fn what_a_configuration_leaves_out_is_the_familys() {
    let folder = tiny_copy("gemma3-parts");
    edit_json(&folder.path().join("config.json"), |config| {
        let all = config.as_object_mut().expect("an object");
        all.remove("vocab_size");
        all.remove("max_position_embeddings");
        let text = all["text_config"].as_object_mut().expect("an object");
        text.remove("vocab_size");
        text.remove("max_position_embeddings");
    });
    let files = load::open(folder.path()).expect("opens");
    let sizes = greenroom::model::families::sizes(&files).expect("has sizes");
    assert_eq!((files.text.context, sizes.context, sizes.vocab), (131_072, 131_072, 262_208));
}

#[test]
fn keys_of_other_formats_mean_nothing_in_a_folder() {
    let folder = tiny_copy("llama");
    edit_json(&folder.path().join("config.json"), |config| {
        config["rope_freq_factors"] = json!([1, 2]);
        config["rms_norm_one_is_added"] = json!(true);
        config["rope_dimension_count"] = json!(2);
    });
    let files = load::open(folder.path()).expect("opens");
    let config = files.config.as_object().expect("an object");
    assert!(config.keys().all(|key| !key.starts_with("rope_freq") && !key.ends_with("_added")));
    assert!(!config.contains_key("rope_dimension_count"));
}

#[test]
fn files_that_are_too_large_are_not_read() {
    for (file, most) in [
        ("config.json", 16),
        ("tokenizer_config.json", 16),
        ("special_tokens_map.json", 16),
        ("added_tokens.json", 16),
        ("model.safetensors.index.json", 64),
        ("tokenizer.json", 256),
    ] {
        let folder = tiny_copy("llama");
        let large = fs::File::create(folder.path().join(file)).expect("creates");
        // A hole: nothing is written.
        large.set_len((most << 20) + 1).expect("grows");
        let error = load::open(folder.path()).expect_err(file).to_string();
        assert!(error.contains(file) && error.contains(&format!("at most {}", most << 20)), "{error}");
    }
}

#[test]
fn more_token_ids_than_embeddings_are_refused() {
    let folder = tiny_copy("llama");
    edit_json(&folder.path().join("config.json"), |config| config["vocab_size"] = 280.into());
    let error = load::open(folder.path()).expect_err("is refused").to_string();
    assert!(error.contains("288") && error.contains("280"), "{error}");
}

#[test]
fn templates_are_found_in_every_place() {
    let template = |edit: &dyn Fn(&Path)| {
        let folder = tiny_copy("llama");
        edit(folder.path());
        load::open(folder.path()).map(|files| files.text.template.map(|template| template.source))
    };
    let named = json!([{"name": "tool_use", "template": "T{{ messages[0].content }}"}, {"name": "default", "template": "D{{ messages[0].content }}"}]);
    let listed = template(&|folder| {
        edit_json(&folder.join("tokenizer_config.json"), |json| json["chat_template"] = named.clone());
    });
    assert_eq!(listed.expect("opens").as_deref(), Some("D{{ messages[0].content }}"));
    let own = template(&|folder| {
        fs::write(folder.join("chat_template.jinja"), "J{{ messages[0].content }}").expect("writes")
    });
    assert_eq!(own.expect("opens").as_deref(), Some("J{{ messages[0].content }}"));
    let broken = template(&|folder| fs::write(folder.join("chat_template.jinja"), "{% if").expect("writes"));
    assert!(broken.expect_err("is refused").to_string().contains("does not compile"));
}

#[test]
fn buffers_and_a_tied_heads_copy_are_dropped() {
    let folder = tiny_copy("llama");
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
        let folder = tiny_copy("qwen3-mlx4");
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
