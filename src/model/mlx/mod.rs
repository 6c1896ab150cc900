//! The MLX backend: builds MLX's lazy graph. Metal on a Mac; elsewhere MLX's CPU device,
//! which is slow but runs, so that the Mac's path is tested.
//!
//! A step builds a graph over all rows, `head` or the store's commit
//! evaluates it. Arrays are born and die on the compute thread; no slice of a cache array
//! leaves [`kv::MlxKv`], because a living view makes the next append copy the whole array.
//!
//! What is true of Metal only (its activation types) is small and was not run off a Mac.

mod attention;
mod draws;
pub mod kv;
pub mod native;
pub mod ops;
mod speech;
pub mod weight;

use mlx_rs::Dtype;
use mlx_rs::error::Exception;

pub use draws::MlxDraws;
pub use native::{MlxDevice, version};
pub use ops::MlxOps;
pub use speech::MlxMemory;

use crate::types::EngineError;

/// Type of activations, key-value state and scales.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MlxType {
    /// For MLX's CPU device, which computes the half types in plain loops.
    F32,
    /// For Metal.
    F16,
    /// For Metal.
    BF16,
}

impl MlxType {
    /// MLX's name for it.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::Float32,
            Self::F16 => Dtype::Float16,
            Self::BF16 => Dtype::Bfloat16,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }
}

/// Settings of the MLX backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MlxConfig {
    /// Which device.
    pub device: MlxDevice,
    /// Type of activations.
    pub activations: MlxType,
    /// Widen quantised weights at load. Right for MLX's CPU device, whose quantised product
    /// is several times slower than its dense one.
    pub dequantize: bool,
}

impl MlxConfig {
    /// What suits a device: exact f32 on MLX's CPU device, quantised weights with the
    /// checkpoint's half type on Metal.
    pub fn for_device(device: MlxDevice, checkpoint: MlxType) -> Self {
        match device {
            MlxDevice::Cpu => Self { device, activations: MlxType::F32, dequantize: true },
            MlxDevice::Gpu => Self {
                device,
                activations: if checkpoint == MlxType::F16 { MlxType::F16 } else { MlxType::BF16 },
                dequantize: false,
            },
        }
    }
}

fn device_error(error: Exception) -> EngineError {
    EngineError::Device { message: error.what().to_owned() }
}

/// A size as MLX wants it.
fn dim(size: usize) -> Result<i32, EngineError> {
    i32::try_from(size).map_err(|_| EngineError::InvalidPlan {
        message: format!("{size} is more than an MLX array can be long"),
    })
}
