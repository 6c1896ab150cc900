//! A model from disk: what is refused, and what the settings change.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use greenroom::config::{Config, DeviceChoice};
use greenroom::model::source::FileModel;
#[cfg(feature = "cpu")]
use greenroom::model::{Engine, LoadedModel, ModelSource};
#[cfg(feature = "cpu")]
use greenroom::types::Epoch;
use greenroom::types::LoadError;

fn settings(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config::default();
    config.engine.device = DeviceChoice::Cpu;
    change(&mut config);
    config
}

#[test]
fn what_is_no_model_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "hello").unwrap();
    for path in [folder.path().join("absent.gguf"), folder.path().to_path_buf(), text] {
        let error = FileModel::new(&path, &settings(|_| ())).expect_err("not a model").to_string();
        assert!(error.contains(&*path.to_string_lossy()), "{error}");
    }
}

#[cfg(not(feature = "mlx"))]
#[test]
fn a_device_that_is_not_compiled_in_is_refused_by_its_feature() {
    let config = settings(|config| config.engine.device = DeviceChoice::Mlx);
    let error = FileModel::new(common::data("tiny/llama"), &config).expect_err("no MLX here");
    assert!(
        matches!(&error, LoadError::Unsupported { message } if message.contains("feature `mlx`")),
        "{error}"
    );
}

#[cfg(feature = "cpu")]
mod cpu {
    use super::*;

    fn load(config: &Config) -> Result<LoadedModel, LoadError> {
        FileModel::new(common::data("tiny/llama"), config).unwrap().load()
    }

    fn engine(config: &Config) -> Box<dyn Engine> {
        load(config).unwrap().engine.adopt(Epoch(3)).unwrap()
    }

    #[test]
    fn the_models_own_context_is_the_default() {
        let engine = engine(&settings(|_| ()));
        let info = engine.info();
        assert_eq!((info.context, info.vocab, info.epoch), (2048, 288, Epoch(3)));
        assert!(engine.memory().weight_bytes > 0);
    }

    #[test]
    fn a_source_loads_again() {
        let source =
            FileModel::new(common::data("tiny/gguf-llama-q4_1/llama-q4_1.gguf"), &settings(|_| ())).unwrap();
        assert_eq!(source.id(), "llama-q4_1");
        for epoch in [1, 2] {
            let engine = source.load().unwrap().engine.adopt(Epoch(epoch)).unwrap();
            assert_eq!(engine.info().epoch, Epoch(epoch));
        }
    }

    #[test]
    fn the_context_can_be_smaller_but_not_larger() {
        let config = settings(|config| config.engine.context = Some(100));
        let loaded = load(&config).unwrap();
        assert_eq!(loaded.text.context, 100, "prompts are measured against it as well");
        let mut engine = loaded.engine.adopt(Epoch(0)).unwrap();
        let sequence = engine.open(None).unwrap();
        assert!(engine.reserve(sequence, 100).is_ok());
        assert!(engine.reserve(sequence, 101).is_err());
        for wrong in [0, 2049] {
            let error = load(&settings(|config| config.engine.context = Some(wrong))).err().expect("refused");
            assert!(
                error.to_string().contains("engine.context") && error.to_string().contains("2048"),
                "{error}"
            );
        }
    }

    #[test]
    fn key_value_memory_is_what_all_rows_can_use_or_as_set() {
        let config = settings(|config| {
            config.engine.context = Some(256);
            config.scheduler.max_rows = 3;
        });
        let small = engine(&config);
        let block = small.info().kv_bytes_per_token * u64::from(small.info().kv_block_tokens);
        // Four blocks of 64 tokens for each row's context, and one more.
        assert_eq!(small.memory().kv_capacity_bytes, 3 * 5 * block);
        let set = settings(|config| config.engine.kv_memory_mib = Some(2));
        let capacity = engine(&set).memory().kv_capacity_bytes;
        assert!(capacity <= 2 << 20 && capacity > (2 << 20) - block, "{capacity}");
    }

    #[test]
    fn a_model_that_cannot_fit_is_refused_with_what_would() {
        let refused = |change: &dyn Fn(&mut Config)| {
            let config = settings(|config| {
                config.engine.memory_mib = Some(1);
                change(config);
            });
            load(&config).err().expect("refused").to_string()
        };
        let error = refused(&|_| ());
        for words in ["does not fit", "for weights", "keys and values of 2048 tokens", "1.0 MiB may be used"]
        {
            assert!(error.contains(words), "{words}: {error}");
        }
        assert!(error.contains("What would fit: a smaller model"), "{error}");
    }

    #[test]
    fn a_long_context_that_nobody_asked_for_is_shortened_to_what_fits() {
        let long = common::tiny_copy("llama");
        common::edit_json(&long.path().join("config.json"), |config| {
            config["max_position_embeddings"] = (1 << 20).into();
        });
        let load = |context: Option<u32>, mib: u64| {
            let config = settings(|config| {
                config.engine.memory_mib = Some(mib);
                config.engine.context = context;
                config.scheduler.max_chunk_tokens = 16;
            });
            FileModel::new(long.path(), &config).unwrap().load().map_err(|error| error.to_string())
        };
        let loaded = load(None, 4).expect("a shorter context fits");
        let context = loaded.text.context;
        assert!((2048..1 << 20).contains(&context), "{context}");
        let engine = loaded.engine.adopt(Epoch(0)).unwrap();
        assert_eq!(engine.info().context, context);
        assert!(u64::from(context) * engine.info().kv_bytes_per_token < 4 << 20);
        // What is named can be used: a row of all of it finds its room.
        let mut engine = engine;
        let sequence = engine.open(None).unwrap();
        engine.reserve(sequence, context).expect("room for the whole context");
        let error = load(Some(1 << 20), 4).err().expect("who asks for it is told");
        assert!(error.contains(&format!("--ctx {context}")), "{error}");
        // Next to nothing is no use.
        assert!(load(None, 1).is_err());
    }

    #[test]
    fn what_is_advised_does_help() {
        // Too long a context is no matter of the weights, nor of the numbers' width where half is too much.
        let config = settings(|config| {
            config.engine.memory_mib = Some(2);
            config.scheduler.max_chunk_tokens = 16;
            config.cpu.kv = greenroom::config::KvType::F32;
        });
        let long = common::tiny_copy("llama");
        common::edit_json(&long.path().join("config.json"), |json| {
            json["max_position_embeddings"] = (1 << 20).into();
        });
        let error = FileModel::new(long.path(), &config).unwrap().load().err().expect("refused").to_string();
        assert!(error.contains("--ctx"), "{error}");
        assert!(!error.contains("quantisation") && !error.contains("cpu.kv"), "{error}");
    }

    #[test]
    fn the_context_that_is_proposed_does_fit() {
        let need = |context: Option<u32>, mib: Option<u64>| {
            let config = settings(|config| {
                config.engine.context = context;
                config.engine.memory_mib = mib;
                config.scheduler.max_chunk_tokens = 16;
                config.cpu.kv = greenroom::config::KvType::F32;
            });
            load(&config).map(drop).map_err(|error| error.to_string())
        };
        let mib = (1..64).find(|mib| need(None, Some(*mib)).is_ok()).expect("64 MiB are enough");
        let error = need(None, Some(mib - 1)).expect_err("the step before is too small");
        assert!(error.contains("cpu.kv = \"f16\""), "{error}");
        let Some((_, rest)) = error.split_once("--ctx ") else { return };
        let tokens: u32 = rest.split(')').next().unwrap().parse().unwrap();
        need(Some(tokens), Some(mib - 1)).expect("what was proposed fits");
    }
}

/// What is kept on disk belongs to weights, not to names.
#[cfg(feature = "cpu")]
#[test]
fn weights_are_named_by_all_that_is_in_them() {
    let tiny = common::data("tiny/llama");
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let folder = dir.path().join(name).join("llama");
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(&tiny).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
        folder
    };
    let fingerprint = |folder: &std::path::Path, has_folder: bool| {
        let config = settings(|config| config.cache.dir = has_folder.then(|| dir.path().join("cache")));
        FileModel::new(folder, &config).unwrap().load().unwrap().fingerprint
    };
    let (one, other) = (copy("one"), copy("other"));
    let first = fingerprint(&one, true);
    assert!(first.is_some());
    assert_eq!(first, fingerprint(&other, true), "wherever they lie");
    assert_eq!(fingerprint(&one, false), None, "nobody asked");
    // The last byte of the last tensor.
    let file = other.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_ne!(first, fingerprint(&other, true));
    // Other settings of the same weights are another model.
    let file = one.join("config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let changed = text.replace("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06");
    assert_ne!(text, changed, "the file has what the test changes");
    std::fs::write(&file, changed).unwrap();
    assert_ne!(first, fingerprint(&one, true));
}
