//! Checkpoints that do not fit their configuration are refused by tensor and key.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use greenroom::model::plain::PlainOps;
use greenroom::model::{families, load};
use greenroom::types::LoadError;
use serde_json::{Value, json};

/// The error of the tiny llama with a changed configuration.
fn error_with(changes: Value) -> LoadError {
    let folder = common::tiny_copy("llama");
    common::edit_json(&folder.path().join("config.json"), |config| {
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
    });
    match load::open(folder.path()) {
        Ok(files) => families::pack::<PlainOps>(&files, &()).err().expect("it is refused"),
        Err(error) => error,
    }
}

#[test]
fn tensors_that_are_not_part_of_the_model_are_named() {
    let LoadError::Tensor { name, message } = error_with(json!({"num_hidden_layers": 2})) else {
        panic!("another error");
    };
    assert!(name.starts_with("model.layers.2."), "{name}");
    assert!(message.contains("and 3 more"), "{message}");
}

#[test]
fn tensors_that_are_missing_are_named() {
    let error = error_with(json!({"num_hidden_layers": 4})).to_string();
    assert!(error.contains("model.layers.3.") && error.contains("is missing"), "{error}");
    let error = error_with(json!({"model_type": "qwen3"})).to_string();
    assert!(error.contains("q_norm") && error.contains("is missing"), "{error}");
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let error = error_with(json!({"intermediate_size": 96})).to_string();
    assert!(error.contains("mlp.") && error.contains("128") && error.contains("96"), "{error}");
    let error = error_with(json!({"num_key_value_heads": 4})).to_string();
    assert!(error.contains("k_proj") && error.contains("[32, 64]") && error.contains("[64, 64]"), "{error}");
}

#[test]
fn a_tied_head_that_is_stored_once_more_is_passed_over() {
    let folder = common::data("tiny/llama");
    let mut files = load::open(&folder).unwrap();
    files.config["tie_word_embeddings"] = json!(true);
    assert!(families::pack::<PlainOps>(&files, &()).is_ok());
}

#[test]
fn an_unknown_family_is_refused_with_those_known() {
    let error = error_with(json!({"model_type": "mamba2"})).to_string();
    let known = "llama, mistral, qwen2, qwen3, gemma2, gemma3, gemma3_text, phi3, granite, smollm3, olmo2";
    assert!(error.contains("`mamba2`") && error.contains(known), "{error}");
}

/// The error of a tiny GGUF file in which one name was changed for another of its length.
fn error_with_name(model: &str, from: &str, to: &str) -> LoadError {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(common::data(&format!("tiny/gguf-{model}/{model}.gguf"))).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    match load::open(&path) {
        Ok(files) => families::pack::<PlainOps>(&files, &()).err().expect("it is refused"),
        Err(error) => error,
    }
}

#[test]
fn metadata_without_which_text_would_be_wrong_is_asked_for() {
    for (model, from, to, named) in [
        ("gemma3", "gemma3.attention.sliding_window", "gemma3.attention.sliding_wind0w", "sliding_window"),
        ("gemma3", "gemma3.rope.freq_base", "gemma3.rope.freq_bass", "rope.freq_base"),
        ("gemma2", "gemma2.attention.sliding_window", "gemma2.attention.sliding_wind0w", "sliding_window"),
        ("phi3", "rope_factors_short.weight", "rope_factors_shirt.weight", "rope_factors_short"),
        (
            "phi3",
            "phi3.rope.scaling.original_context_length",
            "phi3.rope.scaling.original_context_lengtx",
            "original_context_length",
        ),
        ("olmo2", "blk.2.attn_q_norm.weight", "blk.2.attn_q_nurm.weight", "q_norm"),
        ("qwen2", "blk.1.attn_k.bias", "blk.1.attn_k.bios", "k_proj.bias"),
        ("olmo2", "olmo2.attention.head_count_kv", "olmo2.attention.zead_count_kv", "k_norm"),
        ("granite", "blk.0.ffn_gate.weight", "blk.0.ffn_gate.woight", "gate_proj"),
    ] {
        let error = error_with_name(model, from, to).to_string();
        assert!(error.contains(named), "{model} without {from}: {error}");
    }
}
