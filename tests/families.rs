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

/// A metadata value to be spliced into a file: key, GGUF's number of the type, bytes.
type Spliced<'a> = (&'a str, u32, &'a [u8]);

/// A tiny GGUF file with further metadata and, where named, a further tensor of eight ones, opened and packed.
fn with_spliced(
    model: &str,
    values: &[Spliced<'_>],
    tensor: Option<&str>,
) -> Result<load::ModelFiles, LoadError> {
    let mut file = std::fs::read(common::data(&format!("tiny/gguf-{model}/{model}.gguf"))).unwrap();
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let end = (file.len() as u64).next_multiple_of(32);
    let mut info = Vec::new();
    if let Some(name) = tensor {
        info = [&text(name)[..], &1u32.to_le_bytes(), &8u64.to_le_bytes()].concat();
        info.extend([&0u32.to_le_bytes()[..], &end.to_le_bytes()].concat());
        let embedding = text("token_embd.weight");
        let at = file.windows(embedding.len()).position(|window| window == embedding).unwrap();
        file.splice(at..at, info.iter().copied());
        file[8] += 1;
    }
    let mut spliced: Vec<u8> = values
        .iter()
        .flat_map(|(key, kind, value)| [&text(key)[..], &kind.to_le_bytes(), value].concat())
        .collect();
    // Data stays aligned when whole units are put before it.
    let head = 8 + 3 + 4 + 8;
    let padding =
        (spliced.len() + info.len() + head).next_multiple_of(32) - spliced.len() - info.len() - head;
    spliced.extend([&text("pad")[..], &8u32.to_le_bytes(), &text(&" ".repeat(padding))].concat());
    file[16] += values.len() as u8 + 1;
    file.splice(24..24, spliced);
    if tensor.is_some() {
        let ones = file.len().next_multiple_of(4);
        file.resize(ones, 0);
        file.extend(1f32.to_le_bytes().repeat(ones / 2));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file).unwrap();
    let files = load::open(&path)?;
    families::pack::<PlainOps>(&files, &())?;
    Ok(files)
}

#[test]
fn a_rope_factor_without_a_kind_is_linear() {
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        let scaling = |factor: f32| {
            let files = with_spliced("llama-f32", &[(key, 6, &factor.to_le_bytes())], None).expect("opens");
            files.config.get("rope_scaling").cloned()
        };
        assert_eq!(scaling(4.0), Some(json!({"rope_type": "linear", "factor": 4.0})), "{key}");
        assert_eq!((scaling(0.0), scaling(1.0)), (None, None), "{key}");
    }
}

#[test]
fn metadata_that_changes_attention_or_rope_is_refused_by_key() {
    let factor = 1.5f32.to_le_bytes();
    for (key, kind, value) in
        [("llama.rope.scaling.attn_factor", 6, &factor[..]), ("llama.attention.causal", 7, &[0][..])]
    {
        let error = with_spliced("llama-f32", &[(key, kind, value)], None).unwrap_err();
        assert!(matches!(&error, LoadError::Unsupported { message } if message.contains(key)), "{error}");
    }
    assert!(with_spliced("llama-f32", &[("llama.attention.causal", 7, &[1])], None).is_ok());
}

#[test]
fn rope_factors_that_an_architecture_does_not_read_are_refused() {
    for (model, tensor) in [
        ("gemma3", "rope_freqs.weight"),
        ("phi3", "rope_freqs.weight"),
        ("llama-f32", "rope_factors_long.weight"),
    ] {
        match with_spliced(model, &[], Some(tensor)) {
            Err(LoadError::Tensor { name, .. }) => assert_eq!(name, tensor, "{model}"),
            other => panic!("{model}: {other:?}"),
        }
    }
    let llama = with_spliced("llama-f32", &[], Some("rope_freqs.weight"));
    assert!(llama.expect("reads them").config.get("rope_freq_factors").is_some());
}
