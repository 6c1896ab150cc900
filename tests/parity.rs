//! Logits of tiny random checkpoints, one for each family, format and tensor type,
//! against an independent implementation: within 1e-3 in f32, prompt and decode,
//! chunked and whole.

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
#[allow(dead_code, reason = "each test program uses a part")]
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
