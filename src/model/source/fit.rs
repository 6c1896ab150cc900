//! Whether a model fits the memory: estimated from headers, before anything is packed.
//!
//! An estimate from above for what a row of the whole context needs; the operators' own small buffers
//! are a few per cent. Mapped files are not counted: the system takes their pages back. What is found to
//! fit here finds its room when it is loaded: [`super::kv_budget`] goes by the same numbers.

use super::{Backend, choose, context_of, kv_memory, limit, mlx_numbers};
use crate::config::{Config, KvType};
use crate::model::families;
use crate::model::load::{ModelFiles, TensorFacts, TensorType};
use crate::types::{ByteSize, LoadError};

/// Shortest context that is worth proposing, and the steps of what is.
const LEAST_CONTEXT: u64 = 256;
/// Tokens of the larger backend's block: a row may begin one that it does not fill.
const MOST_BLOCK_TOKENS: u64 = 256;
/// Shortest context that is taken without having been asked for.
const USEFUL_CONTEXT: u32 = 2048;

/// What a model needs and what there is, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Estimate {
    /// Weights as packed.
    pub weights: u64,
    /// Keys and values of a token, all layers.
    pub kv_per_token: u64,
    /// Tokens of a row.
    pub context: u32,
    /// Keys and values: one row of the whole context, or as set.
    pub kv: u64,
    /// Activations of a step and logits.
    pub scratch: u64,
    /// What may be used; `None` where the system does not tell.
    pub limit: Option<u64>,
    /// Keys and values could be stored in half of it.
    kv_can_be_halved: bool,
    /// The size of the key-value memory is a setting.
    kv_is_set: bool,
}

/// Estimates for the backend that the settings choose.
///
/// # Errors
/// `Unsupported` for a context that the model has not; those of [`families::sizes`].
pub fn estimate(files: &ModelFiles, config: &Config) -> Result<Estimate, LoadError> {
    // Without that device the numbers are still worth showing; the load itself refuses it.
    let backend = choose(config.engine.device).unwrap_or(Backend::Cpu);
    let sizes = families::sizes(files)?;
    let element = match (backend, config.cpu.kv) {
        (Backend::Mlx, _) => mlx_numbers().element_bytes,
        (Backend::Cpu, KvType::F16) => 2,
        (Backend::Cpu, KvType::F32) => 4,
    };
    let product = |factors: &[u64]| factors.iter().fold(1u64, |all, factor| all.saturating_mul(*factor));
    let cached = [sizes.layers, sizes.kv_heads, sizes.head_dim].map(|size| size as u64);
    let kv_per_token = product(&[2, element]).saturating_mul(product(&cached));
    let context = context_of(config, files.text.context)?;
    let set = kv_memory(config);
    let tokens = u64::from(config.scheduler.max_chunk_tokens).min(u64::from(context));
    let wide = (6 * sizes.hidden + 3 * sizes.intermediate) as u64;
    let rows = config.scheduler.max_rows as u64;
    let logits = product(&[sizes.vocab as u64, rows, 4]);
    Ok(Estimate {
        weights: files
            .tensors
            .facts()
            .map(|tensor| packed_bytes(backend, &tensor))
            .fold(0, u64::saturating_add),
        kv_per_token,
        context,
        kv: set.unwrap_or_else(|| kv_per_token.saturating_mul(u64::from(context) + MOST_BLOCK_TOKENS)),
        scratch: product(&[tokens, wide, 4]).saturating_add(logits),
        limit: limit(config),
        kv_can_be_halved: element == 4 && backend == Backend::Cpu,
        kv_is_set: set.is_some(),
    })
}

/// What a backend makes of a tensor, from above.
///
/// The CPU keeps the widths of files, but for codes of 2 and 3 bits (kept as 4), scales that are no
/// halves (kept in single precision), and the factors of K types (a byte each). MLX widens plain floats
/// and `Q6_K` to its activations' type, keeps other codes with single-precision scales and biases, and
/// on some devices widens all of it.
fn packed_bytes(backend: Backend, tensor: &TensorFacts<'_>) -> u64 {
    let elements = tensor.shape.iter().fold(1u64, |all, dim| all.saturating_mul(*dim as u64));
    let affine = |bits: u8, group: u64, scale: u64| {
        let codes = (elements / 8).saturating_mul(u64::from(bits));
        codes.saturating_add(elements.div_ceil(group).saturating_mul(2 * scale))
    };
    let numbers = mlx_numbers();
    match (backend, tensor.kind) {
        (Backend::Cpu, TensorType::Affine { bits, group, .. }) => affine(bits.max(4), group.into(), 4),
        (Backend::Cpu, TensorType::Q4K | TensorType::Q5K) => (tensor.bytes / 36).saturating_mul(37),
        (Backend::Cpu, _) => tensor.bytes,
        (Backend::Mlx, kind) if kind.is_dense() || kind == TensorType::Q6K || numbers.dequantizes => {
            elements.saturating_mul(numbers.element_bytes)
        }
        (Backend::Mlx, TensorType::Affine { .. }) => tensor.bytes,
        (Backend::Mlx, kind) => affine(kind.code_bits(), 32, 4),
    }
}

impl Estimate {
    /// Bytes that are left for keys and values beside weights and scratch; `None` where nobody knows.
    pub fn room(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.weights).saturating_sub(self.scratch))
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.scratch)
    }

    /// Whether it fits; where nobody knows the limit it is taken to.
    pub fn fits(&self) -> bool {
        self.limit.is_none_or(|limit| self.total() <= limit)
    }

    /// The longest context that fits beside weights and scratch, in steps of 256 tokens.
    pub fn fitting_context(&self) -> Option<u64> {
        let left = self.limit?.checked_sub(self.weights)?.checked_sub(self.scratch)?;
        let tokens = left.checked_div(self.kv_per_token)?.checked_sub(MOST_BLOCK_TOKENS)?;
        let tokens = tokens / LEAST_CONTEXT * LEAST_CONTEXT;
        (tokens >= LEAST_CONTEXT).then(|| tokens.min(u64::from(self.context)))
    }

    /// The settings to load with: where nobody named a context and the model's own does not fit beside the
    /// weights, the longest that does, if it is of use.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn settings(&self, config: &Config) -> Result<Config, LoadError> {
        let mut config = config.clone();
        let is_free = config.engine.context.is_none() && !self.kv_is_set && !self.fits();
        let tokens = self.fitting_context().filter(|_| is_free).and_then(|tokens| u32::try_from(tokens).ok());
        match tokens.filter(|tokens| *tokens >= USEFUL_CONTEXT) {
            Some(tokens) => {
                tracing::warn!(
                    context = tokens,
                    of = self.context,
                    "the model's whole context does not fit the memory: a shorter one is used"
                );
                config.engine.context = Some(tokens);
            }
            None => self.check()?,
        }
        Ok(config)
    }

    /// Refuses what cannot fit.
    ///
    /// # Errors
    /// `DoesNotFit` with the numbers and what would fit.
    pub fn check(&self) -> Result<(), LoadError> {
        if self.fits() {
            return Ok(());
        }
        let limit = self.limit.unwrap_or(u64::MAX);
        let size = |bytes: u64| ByteSize(bytes).to_string();
        let kv = if self.kv_is_set {
            format!("{} for keys and values (engine.kv_memory_mib)", size(self.kv))
        } else {
            format!("{} for keys and values of {} tokens", size(self.kv), self.context)
        };
        let mut message = format!(
            "the model needs {}: {} for weights, {kv}, {} for computing; {} may be used. ",
            size(self.total()),
            size(self.weights),
            size(self.scratch),
            size(limit)
        );
        message += &self.advice(limit);
        Err(LoadError::DoesNotFit { message })
    }

    /// Ways that each do it alone.
    fn advice(&self, limit: u64) -> String {
        let mut ways = Vec::new();
        if let Some(tokens) = self.fitting_context() {
            if self.kv_is_set {
                let mib = self.kv_per_token.saturating_mul(tokens) >> 20;
                ways.push(format!("engine.kv_memory_mib of at most {}", mib.max(1)));
            } else {
                ways.push(format!("a context of {tokens} tokens (--ctx {tokens})"));
            }
        }
        if self.kv_can_be_halved && self.total().saturating_sub(self.kv / 2) <= limit {
            ways.push("half the bytes for keys and values (cpu.kv = \"f16\")".into());
        }
        let room = limit.saturating_sub(self.scratch).saturating_sub(self.kv);
        // Two bits a weight are the least there is; from sixteen that is an eighth.
        if room < self.weights && room >= self.weights / 8 {
            ways.push(format!("a quantisation of at most {}", ByteSize(room)));
        }
        if ways.is_empty() {
            ways.push("a smaller model".into());
        }
        format!("What would fit: {}", ways.join("; or "))
    }
}
