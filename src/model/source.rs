//! A model from a file or folder: reads it, checks it against the settings,
//! packs it for the backend that the settings choose.
//!
//! The only place that chooses a backend. The mapping of the file is let go as
//! soon as the weights are packed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{Config, DeviceChoice};
use crate::model::engine::Prepared;
use crate::model::families::{self, DecoderFacts};
use crate::model::load::{self, ModelFiles};
use crate::model::ops::Ops;
use crate::model::{LoadedModel, ModelSource, PreparedEngine};
use crate::types::LoadError;

pub mod fit;
mod memory;

/// A model on disk.
#[derive(Clone, Debug)]
pub struct FileModel {
    id: String,
    path: PathBuf,
    config: Config,
}

/// What a backend's key-value memory is counted in.
#[derive(Clone, Copy, Debug)]
struct KvUnits {
    /// Bytes of a stored number.
    element_bytes: u64,
    /// Tokens of a block.
    block_tokens: u64,
    /// Bytes left beside weights and scratch; `None` where the system does not tell.
    room: Option<u64>,
}

/// The backends there are, as compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Backend {
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
fn snapshot_name(path: &Path) -> Option<String> {
    let folder = path.is_dir().then(|| path.canonicalize().ok()).flatten()?;
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repo = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(repo.split_once("--").map_or(repo, |(_, name)| name).to_owned())
}

/// The backend for a choice: Metal where there is one, else our own.
fn choose(choice: DeviceChoice) -> Result<Backend, LoadError> {
    let (cpu, mlx) = (cfg!(feature = "cpu"), cfg!(feature = "mlx"));
    match choice {
        DeviceChoice::Auto if mlx && (cfg!(target_os = "macos") || !cpu) => Ok(Backend::Mlx),
        DeviceChoice::Mlx if mlx => Ok(Backend::Mlx),
        DeviceChoice::Auto | DeviceChoice::Cpu if cpu => Ok(Backend::Cpu),
        DeviceChoice::Mlx => Err(not_compiled("mlx")),
        DeviceChoice::Auto | DeviceChoice::Cpu => Err(not_compiled("cpu")),
    }
}

fn not_compiled(feature: &str) -> LoadError {
    let message =
        format!("this program was built without the device `{feature}` (Cargo feature `{feature}`)");
    LoadError::Unsupported { message }
}

/// The context that rows get: as set, at most the model's.
fn context(config: &Config, facts: &DecoderFacts) -> Result<u32, LoadError> {
    context_of(config, facts.context)
}

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
fn kv_budget(config: &Config, facts: &DecoderFacts, context: u32, units: KvUnits) -> u64 {
    if let Some(mib) = config.engine.kv_memory_mib {
        return mib.saturating_mul(1024 * 1024);
    }
    let per_token =
        2 * (facts.kv.layers * facts.kv.kv_heads * facts.kv.head_dim) as u64 * units.element_bytes;
    let row_tokens = u64::from(context) + units.block_tokens;
    let one_row = row_tokens.saturating_mul(per_token);
    let all_rows = (config.scheduler.max_rows as u64).saturating_mul(one_row);
    let Some((bytes, room)) = limit(config).zip(units.room) else { return all_rows };
    all_rows.min(bytes / 4).max(one_row).min(room)
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
    ops: O::Config,
    units: KvUnits,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    let packed = families::pack::<O>(files, &ops)?;
    let context = context(config, &packed.facts)?;
    let kv_budget_bytes = kv_budget(config, &packed.facts, context, units);
    Ok(Box::new(Prepared { config: ops, packed, context, kv_budget_bytes }))
}

fn prepare_for(
    backend: Backend,
    files: &ModelFiles,
    config: &Config,
    room: Option<u64>,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    match backend {
        #[cfg(feature = "cpu")]
        Backend::Cpu => prepare_cpu(files, config, room),
        #[cfg(not(feature = "cpu"))]
        Backend::Cpu => Err(not_compiled("cpu")),
        #[cfg(feature = "mlx")]
        Backend::Mlx => prepare_mlx(files, config, room),
        #[cfg(not(feature = "mlx"))]
        Backend::Mlx => Err(not_compiled("mlx")),
    }
}

#[cfg(feature = "cpu")]
fn prepare_cpu(
    files: &ModelFiles,
    config: &Config,
    room: Option<u64>,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    let element_bytes = match config.cpu.kv {
        crate::config::KvType::F16 => 2,
        crate::config::KvType::F32 => 4,
    };
    let units = KvUnits { element_bytes, block_tokens: 64, room };
    prepare::<crate::model::cpu::CpuOps>(files, config, config.cpu.clone(), units)
}

/// Metal on a Mac, MLX's CPU device elsewhere; half precision in the type that the family and its
/// checkpoint bear.
#[cfg(feature = "mlx")]
fn prepare_mlx(
    files: &ModelFiles,
    config: &Config,
    room: Option<u64>,
) -> Result<Box<dyn PreparedEngine>, LoadError> {
    use crate::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};

    let device = if cfg!(target_os = "macos") { MlxDevice::Gpu } else { MlxDevice::Cpu };
    let half = if families::fits_float16(&files.config) { MlxType::F16 } else { MlxType::BF16 };
    let ops = MlxConfig::for_device(device, half);
    let units = KvUnits { element_bytes: ops.activations.bytes(), block_tokens: 256, room };
    prepare::<MlxOps>(files, config, ops, units)
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
    use crate::model::mlx::{MlxConfig, MlxDevice, MlxType};

    let device = if cfg!(target_os = "macos") { MlxDevice::Gpu } else { MlxDevice::Cpu };
    let config = MlxConfig::for_device(device, MlxType::BF16);
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
        let engine = prepare_for(backend, &files, &config, estimate.room())?;
        let mut text = files.text;
        if let Some(context) = config.engine.context {
            text.context = text.context.min(context);
        }
        Ok(LoadedModel { text: Arc::new(text), engine })
    }
}
