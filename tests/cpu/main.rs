//! The CPU backend against plain loops, and against itself: every path, any
//! number of threads, any batch and chunking give the same bits.
//!
//! A path that this processor lacks is named in the output as not run.

#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod any;
mod attention;
mod elementwise;
mod kv;
mod linear;
mod matrix;
mod memory;
mod pool;
mod random;

use std::io::Write as _;

use greenroom::config::CpuConfig;
use greenroom::model::cpu::{CpuKv, CpuOps, SimdPath};
use greenroom::model::ops::{KvShape, StartOps};
use greenroom::types::Epoch;

use random::Random;

/// Paths that this machine can run; names the others.
fn paths() -> Vec<SimdPath> {
    let (run, not_run): (Vec<_>, Vec<_>) = SimdPath::ALL.into_iter().partition(|path| path.is_supported());
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        for path in not_run {
            // Straight to the terminal: a passing test's output would be swallowed.
            let _ =
                writeln!(std::io::stderr(), "the {} path was not run: this processor lacks it", path.name());
        }
    });
    run
}

/// A start for small models.
fn start(kv: KvShape, blocks: u64) -> StartOps {
    let bytes = 64 * (kv.layers * kv.kv_heads * (kv.head_dim + kv.head_dim.next_multiple_of(16)) * 4) as u64;
    StartOps { epoch: Epoch(3), kv, kv_budget_bytes: blocks * bytes, context: 4096 }
}

/// Operators with a shape for tests that need no keys and values.
fn ops(config: &CpuConfig, path: SimdPath) -> (CpuOps, CpuKv) {
    let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 16 };
    CpuOps::with_path(config, &start(kv, 4), path).unwrap()
}

/// Bits, so that equality is exact and NaN equals itself.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
