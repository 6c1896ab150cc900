//! Configurations: what is read, what is refused, and that nothing panics.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::block::BlockSpec;
use super::hyperparameters::Hyperparameters;
use super::*;

fn small() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu",
    })
}

/// `small` with keys changed; null takes a key away.
fn with(changes: Value) -> Value {
    let mut config = small();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn llama(config: &Value) -> Result<BlockSpec, LoadError> {
    llama::spec(&Hyperparameters::of(Path::new("config.json"), config))
}

fn qwen3(config: &Value) -> Result<BlockSpec, LoadError> {
    qwen3::spec(&Hyperparameters::of(Path::new("config.json"), config))
}

fn frequencies(changes: Value) -> Vec<f32> {
    llama(&with(changes)).unwrap().inv_freq
}

#[test]
fn absent_keys_take_their_usual_values() {
    let spec = llama(&with(json!({"num_key_value_heads": null, "hidden_act": null}))).unwrap();
    assert_eq!((spec.sizes.kv_heads, spec.sizes.head_dim, spec.sizes.tied), (4, 16, false));
    let explicit = qwen3(&with(json!({"head_dim": 32, "tie_word_embeddings": true}))).unwrap();
    assert_eq!((explicit.sizes.head_dim, explicit.sizes.tied, explicit.head_norms), (32, true, true));
}

#[test]
fn values_that_make_no_sense_are_refused_by_name() {
    let cases = [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(1e300)),
        ("hidden_size", json!(u64::MAX)),
        ("hidden_size", json!("64")),
        ("intermediate_size", json!(-1)),
        ("num_hidden_layers", json!(1_000_000)),
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!(10)),
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(0)),
        ("head_dim", json!(15)),
        ("head_dim", json!(65_536 * 32)),
        ("vocab_size", json!(0)),
        ("vocab_size", json!(2.5)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(2)),
        ("max_position_embeddings", json!(u64::MAX)),
        ("rope_theta", json!(-1)),
        ("rope_theta", json!([])),
        ("tie_word_embeddings", json!("yes")),
        ("rope_scaling", json!("llama3")),
    ];
    for (key, value) in cases {
        let error = llama(&with(json!({ key: value }))).expect_err(key);
        assert!(matches!(error, LoadError::Format { .. }), "{key}: {error}");
        assert!(error.to_string().contains(&format!("`{key}`")), "{key}: {error}");
    }
    for key in ["hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings"]
    {
        let error = llama(&with(json!({ key: null }))).expect_err(key).to_string();
        assert!(error.contains(&format!("`{key}` is missing")), "{error}");
    }
}

#[test]
fn switches_that_are_not_there_are_refused_when_on() {
    let refused = |result: Result<BlockSpec, LoadError>, key: &str| match result {
        Err(LoadError::Unsupported { message }) => assert!(message.contains(key), "{message}"),
        other => panic!("{key}: {other:?}"),
    };
    for key in ["attention_bias", "mlp_bias"] {
        refused(llama(&with(json!({ key: true }))), key);
        assert!(llama(&with(json!({ key: false }))).is_ok());
    }
    for (key, value) in [
        ("attention_bias", json!(true)),
        ("use_sliding_window", json!(true)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
    ] {
        refused(qwen3(&with(json!({ key: value }))), key);
    }
    let off = json!({"use_sliding_window": false, "sliding_window": 4096, "layer_types": ["full_attention"]});
    assert!(qwen3(&with(off)).is_ok());
    refused(llama(&with(json!({"hidden_act": "gelu"}))), "hidden_act");
    refused(llama(&with(json!({"partial_rotary_factor": 0.5}))), "partial_rotary_factor");
    refused(llama(&with(json!({"rope_scaling": {"rope_type": "yarn", "factor": 4}}))), "yarn");
    refused(
        llama(&with(json!({"rope_parameters": {"full_attention": {"rope_theta": 1}}}))),
        "full_attention",
    );
}

#[test]
fn both_spellings_of_rope_say_the_same() {
    let scaling =
        |object: Value, theta: Value| frequencies(json!({"rope_scaling": object, "rope_theta": theta}));
    let parameters = |object: Value| frequencies(json!({"rope_parameters": object, "rope_theta": null}));
    assert_eq!(
        scaling(json!(null), json!(25000)),
        parameters(json!({"rope_type": "default", "rope_theta": 25000}))
    );
    let mut ramp = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let older = scaling(ramp.clone(), json!(500000.0));
    ramp["rope_theta"] = json!(500000.0);
    assert_eq!(older, parameters(ramp));
    assert_eq!(
        scaling(json!({"type": "linear", "factor": 4}), json!(10000)),
        frequencies(json!({})).iter().map(|frequency| frequency / 4.0).collect::<Vec<_>>()
    );
}

#[test]
fn the_llama3_ramp_has_its_three_parts() {
    let plain = frequencies(json!({"rope_theta": 500000.0}));
    let scaled = frequencies(json!({"rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}));
    let ratios: Vec<f32> = scaled.iter().zip(&plain).map(|(scaled, plain)| scaled / plain).collect();
    // Waves of 6.3, 32.4 and 167 positions; original context 64: short, between, long.
    assert_eq!(ratios[0], 1.0);
    let share = (64.0 / (2.0 * std::f64::consts::PI / f64::from(plain[1])) - 1.0) / 3.0;
    let expected = (1.0 - share) / 8.0 + share;
    assert!((f64::from(ratios[1]) - expected).abs() < 1e-6, "{} {expected}", ratios[1]);
    assert!(ratios[2..].iter().all(|ratio| (ratio - 0.125).abs() < 1e-6), "{ratios:?}");
}

#[test]
fn factors_of_a_file_divide_the_frequencies() {
    let plain = frequencies(json!({}));
    let halved = frequencies(json!({"rope_freq_factors": [2, 2, 2, 2, 2, 2, 2, 1]}));
    assert_eq!(halved[0], plain[0] / 2.0);
    assert_eq!(halved[7], plain[7]);
    for bad in [json!([1, 2]), json!([0, 1, 1, 1, 1, 1, 1, 1]), json!(["a"]), json!(3)] {
        let error = llama(&with(json!({"rope_freq_factors": bad}))).unwrap_err().to_string();
        assert!(error.contains("`rope_freq_factors`"), "{error}");
    }
}

#[test]
fn unknown_families_are_refused_with_those_known() {
    let message = unknown(Some("mamba")).to_string();
    assert!(message.contains("`mamba`") && message.contains("llama, qwen3"), "{message}");
    assert!(unknown(None).to_string().contains("without `model_type`"));
}

/// Any JSON value of a little depth.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0i64..300).prop_map(Value::from),
        prop_oneof![Just("llama3"), Just("linear"), Just("silu"), Just("x")].prop_map(Value::from),
    ];
    let key = prop_oneof![
        Just("rope_type"),
        Just("type"),
        Just("factor"),
        Just("low_freq_factor"),
        Just("high_freq_factor"),
        Just("original_max_position_embeddings"),
        Just("rope_theta"),
        Just("partial_rotary_factor"),
    ];
    leaf.prop_recursive(2, 16, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..9).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..8).prop_map(|pairs| {
                Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
            }),
        ]
    })
}

const KEYS: [&str; 20] = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_freq_factors",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "layer_types",
];

proptest! {
    #[test]
    fn no_configuration_panics(changes in prop::collection::vec((0..KEYS.len(), any_value()), 0..6)) {
        let mut config = small();
        for (key, value) in changes {
            config[KEYS[key]] = value;
        }
        for spec in [llama(&config), qwen3(&config)].into_iter().flatten() {
            prop_assert_eq!(spec.sizes.heads % spec.sizes.kv_heads, 0);
            prop_assert_eq!(spec.inv_freq.len() * 2, spec.sizes.head_dim);
        }
    }
}
