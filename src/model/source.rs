//! A model from a file or folder: reads it, checks it against the settings,
//! packs it for the backend that the settings choose.
//!
//! The only place that chooses a backend. The mapping of the file is let go as
//! soon as the weights are packed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{Config, DeviceChoice};
use crate::model::engine::Prepared;
use crate::model::families;
use crate::model::load::{self, ModelFiles};
use crate::model::ops::Ops;
use crate::model::{LoadedModel, ModelSource, PreparedEngine};
use crate::types::LoadError;

pub mod fit;
mod memory;

use fit::Estimate;

/// A model on disk.
#[derive(Clone, Debug)]
pub struct FileModel {
    id: String,
    path: PathBuf,
    config: Config,
}

/// The backends there are, as compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backend {
    Cpu,
    Mlx,
}

impl FileModel {
    /// A `.gguf` file, or a folder with a `config.json`. Reads nothing else yet.
    ///
    /// # Errors
    /// `NotFound` or `Io` when there is no model, `Unsupported` for a device that is
    /// not compiled in.
    pub fn new(path: impl AsRef<Path>, config: &Config) -> Result<Self, LoadError> {
        let path = path.as_ref();
        load::kind(path)?;
        choose(config.engine.device)?;
        Ok(Self {
            id: snapshot_name(path).unwrap_or_else(|| load::model_id(path)),
            path: path.to_path_buf(),
            config: config.clone(),
        })
    }

    /// Another id in the API than the path's, where there is one.
    pub fn named(mut self, id: Option<String>) -> Self {
        self.id = id.unwrap_or(self.id);
        self
    }
}

/// The model's name where a path is a snapshot of the hub's cache: a commit would say nothing to anybody.
pub(crate) fn snapshot_name(path: &Path) -> Option<String> {
    let folder = path.is_dir().then(|| path.canonicalize().ok()).flatten()?;
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repo = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(repo.split_once("--").map_or(repo, |(_, name)| name).to_owned())
}

/// The backend for a choice: Metal where there is one, else our own.
pub(crate) fn choose(choice: DeviceChoice) -> Result<Backend, LoadError> {
    let (cpu, mlx) = (cfg!(feature = "cpu"), cfg!(feature = "mlx"));
    match choice {
        DeviceChoice::Auto if mlx && (cfg!(target_os = "macos") || !cpu) => Ok(Backend::Mlx),
        DeviceChoice::Mlx if mlx => Ok(Backend::Mlx),
        DeviceChoice::Auto | DeviceChoice::Cpu if cpu => Ok(Backend::Cpu),
        DeviceChoice::Mlx => Err(not_compiled("mlx")),
        DeviceChoice::Auto | DeviceChoice::Cpu => Err(not_compiled("cpu")),
    }
}

pub(crate) fn not_compiled(feature: &str) -> LoadError {
    let message =
        format!("this program was built without the device `{feature}` (Cargo feature `{feature}`)");
    LoadError::Unsupported { message }
}

/// The context that rows get: as set, at most the model's own.
fn context_of(config: &Config, own: u32) -> Result<u32, LoadError> {
    match config.engine.context {
        None => Ok(own),
        Some(asked) if (1..=own).contains(&asked) => Ok(asked),
        Some(asked) => {
            let message = format!("engine.context = {asked}: this model has from 1 to {own} tokens");
            Err(LoadError::Unsupported { message })
        }
    }
}

/// Key-value bytes: as set, else what all rows can use, at most a quarter of the memory and at least one
/// row's whole context, within the room that the estimate found.
fn kv_budget(config: &Config, estimate: &Estimate, context: u32, block_tokens: u32) -> u64 {
    if let Some(bytes) = kv_memory(config) {
        return bytes;
    }
    let row_tokens = u64::from(context) + u64::from(block_tokens);
    let one_row = row_tokens.saturating_mul(estimate.kv_per_token);
    let all_rows = (config.scheduler.max_rows as u64).saturating_mul(one_row);
    let Some((bytes, room)) = estimate.limit.zip(estimate.room()) else { return all_rows };
    all_rows.min(bytes / 4).max(one_row).min(room)
}

/// Key-value bytes as set.
fn kv_memory(config: &Config) -> Option<u64> {
    config.engine.kv_memory_mib.map(|mib| mib.saturating_mul(1024 * 1024))
}

/// Memory that may be used: as set, else the machine's less an eighth for all else that runs on it.
fn limit(config: &Config) -> Option<u64> {
    let set = config.engine.memory_mib.map(|mib| mib.saturating_mul(1024 * 1024));
    set.or_else(|| memory::machine_bytes().map(|bytes| bytes / 8 * 7))
}

/// Packs for one backend.
fn prepare<O: Ops + 'static>(
    files: &ModelFiles,
    config: &Config,
    estimate: &Estimate,
    ops: O::Config,
    block_tokens: u32,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    let packed = families::pack::<O>(files, &ops)?;
    let context = context_of(config, packed.facts.context)?;
    let kv_budget_bytes = kv_budget(config, estimate, context, block_tokens);
    Ok(Box::new(Prepared { config: ops, packed, context, kv_budget_bytes }))
}

fn prepare_for(
    backend: Backend,
    files: &ModelFiles,
    config: &Config,
    estimate: &Estimate,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    match backend {
        #[cfg(feature = "cpu")]
        Backend::Cpu => prepare_cpu(files, config, estimate),
        #[cfg(not(feature = "cpu"))]
        Backend::Cpu => Err(not_compiled("cpu")),
        #[cfg(feature = "mlx")]
        Backend::Mlx => prepare_mlx(files, config, estimate),
        #[cfg(not(feature = "mlx"))]
        Backend::Mlx => Err(not_compiled("mlx")),
    }
}

#[cfg(feature = "cpu")]
fn prepare_cpu(
    files: &ModelFiles,
    config: &Config,
    estimate: &Estimate,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    prepare::<crate::model::cpu::CpuOps>(files, config, estimate, config.cpu.clone(), 64)
}

/// Metal on a Mac, MLX's CPU device elsewhere; half precision in the type that the family and its
/// checkpoint bear.
#[cfg(feature = "mlx")]
fn prepare_mlx(
    files: &ModelFiles,
    config: &Config,
    estimate: &Estimate,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    use crate::model::mlx::{MlxOps, MlxType};

    let half = if families::fits_float16(&files.config) { MlxType::F16 } else { MlxType::BF16 };
    prepare::<MlxOps>(files, config, estimate, mlx_config(half), 256)
}

/// MLX on the device that this machine has for it.
#[cfg(feature = "mlx")]
pub(crate) fn mlx_config(half: crate::model::mlx::MlxType) -> crate::model::mlx::MlxConfig {
    use crate::model::mlx::{MlxConfig, MlxDevice};

    MlxConfig::for_device(if cfg!(target_os = "macos") { MlxDevice::Gpu } else { MlxDevice::Cpu }, half)
}

/// How MLX holds a model on this machine's device.
#[derive(Clone, Copy, Debug)]
struct MlxNumbers {
    /// Bytes of an activation, and of a key or value.
    element_bytes: u64,
    /// Quantised weights are widened as well.
    dequantizes: bool,
}

#[cfg(feature = "mlx")]
fn mlx_numbers() -> MlxNumbers {
    // Either half type has the same width.
    let config = mlx_config(crate::model::mlx::MlxType::BF16);
    MlxNumbers { element_bytes: config.activations.bytes(), dequantizes: config.dequantize }
}

#[cfg(not(feature = "mlx"))]
fn mlx_numbers() -> MlxNumbers {
    MlxNumbers { element_bytes: 4, dequantizes: true }
}

impl ModelSource for FileModel {
    fn id(&self) -> &str {
        &self.id
    }

    fn load(&self) -> Result<LoadedModel, LoadError> {
        let backend = choose(self.config.engine.device)?;
        let files = load::open(&self.path)?;
        let estimate = fit::estimate(&files, &self.config)?;
        let config = estimate.settings(&self.config)?;
        let engine = prepare_for(backend, &files, &config, &estimate)?;
        // Every byte is read once more: only for who needs it.
        let asked = self.config.cache.enabled && self.config.cache.dir.is_some();
        let fingerprint = asked.then(|| files.tensors.fingerprint(&files.config));
        let mut text = files.text;
        if let Some(context) = config.engine.context {
            text.context = text.context.min(context);
        }
        Ok(LoadedModel { text: Arc::new(text), engine, fingerprint })
    }
}
