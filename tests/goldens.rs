//! The demo model's greedy continuations: exact arithmetic gives the exact tokens,
//! rounded arithmetic the tokens that the exact one is sure of.
#![cfg(any(feature = "cpu", feature = "mlx"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use checkpoints::demo;

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

    use super::demo;

    #[test]
    fn without_rounding_the_tokens_are_exact() {
        let mut config = CpuConfig::default();
        config.activations = Activations::F32;
        config.kv = KvType::F32;
        demo::hold_to_the_exact_tokens::<CpuOps>(&config, &demo::cases());
    }

    #[test]
    fn with_rounding_the_sure_tokens_are_equal() {
        demo::hold_to_the_sure_tokens::<CpuOps>(&CpuConfig::default(), &demo::cases());
    }
}

#[cfg(feature = "mlx")]
mod mlx {
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};

    use super::demo;

    /// The shortest case alone: MLX's CPU device computes a few tokens a second.
    #[test]
    fn the_shortest_answer_is_exact() {
        let mut cases = demo::cases();
        cases.sort_by_key(|case| case.tokens.len());
        demo::hold_to_the_exact_tokens::<MlxOps>(&config(), &cases[..1]);
    }

    #[test]
    #[ignore = "minutes on MLX's CPU device; `make test-full` runs it"]
    fn every_answer_is_exact() {
        demo::hold_to_the_exact_tokens::<MlxOps>(&config(), &demo::cases());
    }

    fn config() -> MlxConfig {
        MlxConfig::for_device(MlxDevice::Cpu, MlxType::F16)
    }
}
