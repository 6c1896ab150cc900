//! Checkpoints that do not fit their configuration are refused by tensor and key.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use greenroom::model::plain::PlainOps;
use greenroom::model::{families, load};
use greenroom::types::LoadError;
use serde_json::{Value, json};

/// The error of the tiny llama with a changed configuration.
fn error_with(changes: Value) -> LoadError {
    let folder = tempfile::tempdir().unwrap();
    let original = common::data("tiny/llama");
    for entry in std::fs::read_dir(original).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut config = common::json("tiny/llama/config.json");
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
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
    assert!(error.contains("mamba2") && error.contains("llama") && error.contains("qwen3"), "{error}");
}
