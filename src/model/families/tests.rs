//! Configurations: what is read, what is refused, and that nothing panics.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::block::{HeadNorms, LayerSpec, Norms};
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

fn llama(config: &Value) -> Result<StackSpec, LoadError> {
    llama::spec(&Hyperparameters::of(Path::new("config.json"), config))
}

fn of(config: &Value) -> Hyperparameters<'_> {
    Hyperparameters::of(Path::new("config.json"), config)
}

fn qwen3(config: &Value) -> Result<StackSpec, LoadError> {
    qwen3::spec(&Hyperparameters::of(Path::new("config.json"), config))
}

fn frequencies(changes: Value) -> Vec<f32> {
    llama(&with(changes)).unwrap().ropes.remove(0).inv_freq
}

#[test]
fn absent_keys_take_their_usual_values() {
    let spec = llama(&with(json!({"num_key_value_heads": null}))).unwrap();
    assert_eq!((spec.sizes.kv_heads, spec.sizes.head_dim, spec.sizes.tied), (4, 16, false));
    let explicit = qwen3(&with(json!({"head_dim": 32, "tie_word_embeddings": true}))).unwrap();
    assert_eq!((explicit.sizes.head_dim, explicit.sizes.tied), (32, true));
    assert_eq!(explicit.block.head_norms, HeadNorms::Each);
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
    let refused = |result: Result<StackSpec, LoadError>, key: &str| match result {
        Err(LoadError::Unsupported { message }) => assert!(message.contains(key), "{message}"),
        other => panic!("{key}: {other:?}"),
    };
    for key in ["attention_bias", "mlp_bias"] {
        refused(mistral::spec(&of(&with(json!({ key: true })))), key);
        refused(phi3::spec(&of(&with(json!({ key: true })))), key);
    }
    let sliding = json!(["full_attention", "sliding_attention"]);
    for (read, kinds) in [
        (llama::spec as ReadSpec, sliding.clone()),
        (qwen3::spec, sliding.clone()),
        (mistral::spec, sliding),
        (gemma2::spec, json!(["full_attention", "chunked_attention"])),
    ] {
        refused(read(&of(&with(json!({ "layer_types": kinds })))), "layer_types");
    }
    for read in [gemma2::spec as ReadSpec, gemma3::spec] {
        refused(
            read(&of(&with(json!({"use_bidirectional_attention": true})))),
            "use_bidirectional_attention",
        );
    }
    refused(gemma3::spec(&of(&with(json!({"attn_logit_softcapping": 50})))), "attn_logit_softcapping");
    let off = json!({"use_sliding_window": false, "sliding_window": 4096,
        "layer_types": ["full_attention", "full_attention"]});
    assert!(qwen3(&with(off)).is_ok());
    refused(llama(&with(json!({"hidden_act": "relu2"}))), "hidden_act");
    refused(llama(&with(json!({"hidden_act": null}))), "hidden_act");
    refused(gemma3::spec(&of(&with(json!({"hidden_activation": null})))), "hidden_activation");
    refused(gemma3::spec(&of(&with(json!({"partial_rotary_factor": 0.5})))), "partial_rotary_factor");
    let part = json!({"full_attention": {"partial_rotary_factor": 0.5}});
    refused(gemma3::spec(&of(&with(json!({ "rope_parameters": part })))), "partial_rotary_factor");
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
fn two_spellings_of_rope_that_differ_are_refused() {
    let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor, "rope_theta": 10000.0});
    let both = |scaling: Value, parameters: Value| {
        with(json!({"rope_scaling": scaling, "rope_parameters": parameters}))
    };
    let differ = both(linear(4.0), linear(2.0));
    let nested = both(linear(4.0), json!({"full_attention": linear(2.0)}));
    let results = [llama(&differ), phi3::spec(&of(&differ)), gemma3::spec(&of(&nested))];
    for error in results.map(|result| result.unwrap_err().to_string()) {
        assert!(error.contains("`rope_scaling`") && error.contains("`rope_parameters`"), "{error}");
    }
    assert!(llama(&both(linear(4.0), linear(4.0))).is_ok());
    assert!(llama(&both(json!({}), linear(4.0))).is_ok());
    assert!(gemma3::spec(&of(&both(linear(4.0), json!({"full_attention": linear(4.0)})))).is_ok());
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
    assert!(message.contains("`mamba`") && message.contains("llama, mistral, qwen2"), "{message}");
    assert!(unknown(None).to_string().contains("without `model_type`"));
}

#[test]
fn each_family_says_what_is_its_own() {
    let read = |read: ReadSpec, changes: Value| read(&of(&with(changes))).unwrap();
    let window = |spec: &StackSpec, layer: usize| spec.layers[layer].window;
    let mistral = read(mistral::spec, json!({}));
    assert_eq!(window(&mistral, 0), Some(4096), "the reference's default");
    let absent = read(mistral::spec, json!({"sliding_window": null}));
    assert_eq!(window(&absent, 1), None, "null is not absent");
    let qwen2 = read(qwen2::spec, json!({"use_sliding_window": true, "max_window_layers": 1}));
    assert_eq!((window(&qwen2, 0), window(&qwen2, 1), qwen2.block.qkv_bias), (None, Some(4096), true));
    let gemma2 = read(gemma2::spec, json!({"query_pre_attn_scalar": 144, "sliding_window": 9}));
    assert_eq!((window(&gemma2, 0), window(&gemma2, 1)), (Some(9), None));
    assert_eq!((gemma2.block.scale, gemma2.block.softcap), (1.0 / 12.0, Some(50.0)));
    assert_eq!((gemma2.block.norms, gemma2.block.norm_offset), (Norms::BeforeAndAfter, 1.0));
    assert_eq!((gemma2.logits.softcap, gemma2.embedding_scale), (Some(30.0), 8.0));
    let gemma3 = read(gemma3::spec, json!({"num_hidden_layers": 7, "rope_theta": null}));
    assert_eq!(gemma3.layers[4], LayerSpec { window: Some(4096), rope: Some(1) });
    assert_eq!(gemma3.layers[5], LayerSpec { window: None, rope: Some(0) });
    assert!(gemma3.ropes[0].inv_freq[1] < gemma3.ropes[1].inv_freq[1]);
    let granite = read(granite::spec, json!({"logits_scaling": 8, "residual_multiplier": 0.5}));
    assert_eq!((granite.logits.scale, granite.block.residual_scale, granite.block.scale), (0.125, 0.5, 1.0));
    let smollm3 = read(smollm3::spec, json!({"num_hidden_layers": 5}));
    let rotated: Vec<bool> = smollm3.layers.iter().map(|layer| layer.rope.is_some()).collect();
    assert_eq!(rotated, [true, true, true, false, true]);
    let olmo2 = read(olmo2::spec, json!({}));
    assert_eq!((olmo2.block.norms, olmo2.block.head_norms), (Norms::After, HeadNorms::Whole));
}

#[test]
fn an_embedding_is_scaled_in_the_type_that_the_checkpoint_declares() {
    let scale = |key: &str, name: Value| {
        let config = with(json!({"hidden_size": 640, "num_attention_heads": 4, key: name}));
        gemma3::spec(&of(&config)).unwrap().embedding_scale
    };
    let exact = 640f32.sqrt();
    assert_eq!(scale("torch_dtype", json!("bfloat16")), 25.25);
    assert_eq!(scale("dtype", json!("float16")), half::f16::from_f32(exact).to_f32());
    assert_eq!(scale("dtype", json!("float32")), exact);
    assert_eq!(scale("dtype", json!(null)), exact);
}

#[test]
fn a_text_part_without_a_type_has_the_outer_one() {
    let text = with(json!({"hidden_size": 640, "num_attention_heads": 4}));
    let scale = |config: Value| gemma3::text_part(&of(&config)).unwrap().embedding_scale;
    assert_eq!(scale(json!({"dtype": "bfloat16", "text_config": text})), 25.25);
    assert_eq!(scale(json!({"torch_dtype": "bfloat16", "text_config": text})), 25.25);
    let mut own = text.clone();
    own["dtype"] = json!("float32");
    assert_eq!(scale(json!({"dtype": "bfloat16", "text_config": own})), 640f32.sqrt());
    assert_eq!(scale(json!({"text_config": text})), 640f32.sqrt());
}

#[test]
fn float16_is_for_models_that_say_so_and_stay_within_it() {
    let of = |family: &str, key: &str, name: Value| fits_float16(&json!({"model_type": family, key: name}));
    assert!(of("llama", "torch_dtype", json!("float16")) && of("phi3", "dtype", json!("torch.float16")));
    for name in [json!("bfloat16"), json!("float32"), json!(null), json!(16)] {
        assert!(!of("llama", "dtype", name.clone()), "{name}");
    }
    assert!(!fits_float16(&json!({"model_type": "llama"})), "a GGUF file says nothing");
    for family in ["gemma2", "gemma3", "gemma3_text"] {
        assert!(!of(family, "dtype", json!("float16")), "{family}: its residual stream passes 65,504");
    }
}

#[test]
fn sizes_have_the_familys_defaults() {
    let config =
        json!({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}});
    let sizes = sizes_of(Path::new("config.json"), &config).unwrap();
    assert_eq!((sizes.hidden, sizes.layers, sizes.kv_heads, sizes.head_dim), (2560, 34, 4, 256));
    assert_eq!((sizes.vocab, sizes.context, sizes.intermediate), (262_208, 131_072, 9216));
}

#[test]
fn long_contexts_have_their_own_frequencies() {
    let factors = |long: f64| {
        json!({"type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1],
        "long_factor": [long, long, long, long, long, long]})
    };
    let config = |scaling: Value| {
        with(json!({"rope_scaling": scaling, "partial_rotary_factor": 0.75,
        "max_position_embeddings": 512, "original_max_position_embeddings": 64}))
    };
    let spec = phi3::spec(&of(&config(factors(2.0)))).unwrap();
    let rope = &spec.ropes[0];
    assert_eq!((rope.frequencies(64).len(), rope.frequencies(65).len()), (6, 6));
    assert_eq!(rope.frequencies(65)[0], rope.frequencies(64)[0] / 2.0);
    let expected = (1.0 + 8f64.ln() / 64f64.ln()).sqrt();
    assert!((f64::from(rope.scale) - expected).abs() < 1e-6);
    for (scaling, named) in [
        (json!({"type": "longrope"}), "short_factor"),
        (json!({"type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1]}), "short_factor"),
        (factors(0.0), "long_factor"),
        (json!({"type": "yarn", "factor": 4}), "yarn"),
    ] {
        let error = phi3::spec(&of(&config(scaling))).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    let mut inner = factors(2.0);
    inner["original_max_position_embeddings"] = json!(32);
    let spec = phi3::spec(&of(&config(inner))).unwrap();
    assert_eq!(spec.ropes[0].long.as_ref().unwrap().0, 64, "the outer key wins");
    let odd = with(json!({"partial_rotary_factor": 0.2}));
    assert!(phi3::spec(&of(&odd)).unwrap_err().to_string().contains("partial_rotary_factor"));
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

const KEYS: [&str; 38] = [
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
    "mlp_bias",
    "sliding_window",
    "sliding_window_pattern",
    "max_window_layers",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "original_max_position_embeddings",
    "rope_dimension_count",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "no_rope_layers",
    "no_rope_layer_interval",
    "hidden_activation",
    "text_config",
];

proptest! {
    #[test]
    fn no_configuration_panics(changes in prop::collection::vec((0..KEYS.len(), any_value()), 0..6)) {
        let mut config = small();
        for (key, value) in changes {
            config[KEYS[key]] = value;
        }
        for (_, read) in KNOWN {
            let Ok(spec) = read(&of(&config)) else { continue };
            prop_assert_eq!(spec.sizes.heads % spec.sizes.kv_heads, 0);
            prop_assert_eq!(spec.layers.len(), spec.sizes.layers);
            for layer in &spec.layers {
                prop_assert!(layer.window != Some(0) && layer.rope.is_none_or(|rope| rope < spec.ropes.len()));
            }
            for rope in &spec.ropes {
                prop_assert!(2 * rope.inv_freq.len() <= spec.sizes.head_dim);
                prop_assert!(rope.inv_freq.iter().all(|frequency| !frequency.is_nan()));
            }
        }
    }
}
