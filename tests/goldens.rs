//! Greedy continuations of real models: exact arithmetic gives the exact tokens,
//! rounded arithmetic the tokens that the exact one is sure of.
#![cfg(any(feature = "cpu", feature = "mlx"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use checkpoints::demo;

/// Gemma 3 270M, base: sliding and full layers, K-quants.
const GEMMA: &str = "golden/gemma3.json";
/// Fetched by `native/gemma.sh`.
const GEMMA_FILE: &str = "models/gemma-3-270m-q4_k_m.gguf";

#[test]
fn the_cases_are_those_that_the_figures_are_about() {
    let cases = demo::cases();
    let gaps: Vec<f64> = cases.iter().flat_map(|case| case.gaps.iter().copied()).collect();
    let above = |least: f64| gaps.iter().filter(|gap| **gap >= least).count();
    assert_eq!((gaps.len(), above(1.0), above(0.25)), (235, 140, 204));
    assert!(cases.iter().all(|case| case.gaps.len() == case.tokens.len()));
}

#[cfg(feature = "cpu")]
mod cpu {
    use greenroom::config::{Activations, CpuConfig, KvType};
    use greenroom::model::cpu::CpuOps;

    use super::{GEMMA, GEMMA_FILE, common, demo};

    #[test]
    fn without_rounding_the_tokens_are_exact() {
        let mut config = CpuConfig::default();
        config.activations = Activations::F32;
        config.kv = KvType::F32;
        demo::hold_to_the_exact_tokens::<CpuOps>(&common::demo_model(), &config, &demo::cases());
    }

    #[test]
    #[ignore = "Gemma is fetched by native/gemma.sh; `make test-full` runs it"]
    fn gemma_3_without_rounding_is_exact() {
        let mut config = CpuConfig::default();
        config.activations = Activations::F32;
        config.kv = KvType::F32;
        demo::hold_to_the_exact_tokens::<CpuOps>(
            &common::fetched(GEMMA_FILE),
            &config,
            &demo::cases_of(GEMMA),
        );
    }

    #[test]
    #[ignore = "Gemma is fetched by native/gemma.sh; `make test-full` runs it"]
    fn gemma_3_with_rounding_is_sure_where_the_exact_one_is() {
        demo::hold_to_the_sure_tokens::<CpuOps>(
            &common::fetched(GEMMA_FILE),
            &CpuConfig::default(),
            &demo::cases_of(GEMMA),
        );
    }

    #[test]
    fn with_rounding_the_sure_tokens_are_equal() {
        demo::hold_to_the_sure_tokens::<CpuOps>(&common::demo_model(), &CpuConfig::default(), &demo::cases());
    }
}

#[cfg(feature = "mlx")]
mod mlx {
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};

    use super::{GEMMA, GEMMA_FILE, common, demo};

    /// The shortest case alone: MLX's CPU device computes a few tokens a second.
    #[test]
    fn the_shortest_answer_is_exact() {
        let mut cases = demo::cases();
        cases.sort_by_key(|case| case.tokens.len());
        demo::hold_to_the_exact_tokens::<MlxOps>(&common::demo_model(), &config(), &cases[..1]);
    }

    #[test]
    #[ignore = "minutes on MLX's CPU device; `make test-full` runs it"]
    fn every_answer_is_exact() {
        demo::hold_to_the_exact_tokens::<MlxOps>(&common::demo_model(), &config(), &demo::cases());
    }

    #[test]
    #[ignore = "Gemma is fetched by native/gemma.sh, and minutes on MLX's CPU device; `make test-full` runs it"]
    fn the_shortest_answer_of_gemma_3_is_exact() {
        let mut cases = demo::cases_of(GEMMA);
        cases.sort_by_key(|case| case.prompt.len());
        demo::hold_to_the_exact_tokens::<MlxOps>(&common::fetched(GEMMA_FILE), &config(), &cases[..1]);
    }

    fn config() -> MlxConfig {
        MlxConfig::for_device(MlxDevice::Cpu, MlxType::F16)
    }
}
