//! Logits of tiny random checkpoints, one for each family, format and tensor type,
//! against an independent implementation: within 1e-3 in f32, prompt and decode,
//! chunked and whole.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use greenroom::model::plain::PlainOps;

#[test]
fn the_reference_operators_match() {
    checkpoints::hold_to_the_reference::<PlainOps>(&common::data("tiny"), &());
}

#[cfg(feature = "cpu")]
mod cpu {
    use greenroom::config::{Activations, CpuConfig, KvType};
    use greenroom::model::cpu::CpuOps;

    use super::{checkpoints, common};

    #[test]
    fn the_cpu_backend_matches_without_rounding() {
        let mut config = CpuConfig::default();
        config.activations = Activations::F32;
        config.kv = KvType::F32;
        checkpoints::hold_to_the_reference::<CpuOps>(&common::data("tiny"), &config);
    }
}

#[cfg(feature = "mlx")]
mod mlx {
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};

    use super::{checkpoints, common};

    #[test]
    fn mlx_matches_with_widened_weights() {
        let config = MlxConfig::for_device(MlxDevice::Cpu, MlxType::F16);
        assert_eq!((config.activations, config.dequantize), (MlxType::F32, true));
        checkpoints::hold_to_the_reference::<MlxOps>(&common::data("tiny"), &config);
    }

    /// The products that Metal uses, in f32.
    #[test]
    fn mlx_matches_with_quantised_weights() {
        let config = MlxConfig { device: MlxDevice::Cpu, activations: MlxType::F32, dequantize: false };
        checkpoints::hold_to_the_reference::<MlxOps>(&common::data("tiny"), &config);
    }
}
