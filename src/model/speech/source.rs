//! A speech model from a folder, packed for the backend that the settings choose.

use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::model::load::{self, whisper::WhisperFiles};
#[allow(unused_imports, reason = "with all backends nothing is missing")]
use crate::model::source::not_compiled;
use crate::model::source::{Backend, choose};
use crate::types::LoadError;

use super::WhisperDims;
use super::engine::PreparedSpeech;
use super::tokens::SpeechTokens;

/// A speech model that can be loaded, as often as wanted.
pub trait SpeechSource: Send + Sync {
    /// Its id in the API.
    fn id(&self) -> &str;

    /// Reads and packs it; blocking, on a loader thread.
    ///
    /// # Errors
    /// Any [`LoadError`].
    fn load(&self) -> Result<LoadedSpeech, LoadError>;
}

/// What a load gives.
pub struct LoadedSpeech {
    /// Text tokens, special ids, languages.
    pub tokens: SpeechTokens,
    /// Sizes.
    pub dims: WhisperDims,
    /// The format in words.
    pub format: &'static str,
    /// For the compute thread.
    pub engine: Box<dyn PreparedSpeech>,
}

/// A model on disk.
#[derive(Clone, Debug)]
pub struct SpeechFolder {
    id: String,
    path: PathBuf,
    config: Config,
}

impl SpeechFolder {
    /// A folder (or the `model.bin` in one). Its headers are read, its weights not yet.
    ///
    /// # Errors
    /// `NotFound` where there is no speech model, `Unsupported` for a device that is not compiled in.
    pub fn new(path: impl AsRef<Path>, config: &Config) -> Result<Self, LoadError> {
        let path = path.as_ref();
        if !load::whisper::is_whisper(path) {
            let message = format!(
                "{} is no Whisper model: give a folder with a `config.json` of model_type whisper, an MLX folder or \
                 a CTranslate2 `model.bin`",
                path.display()
            );
            return Err(LoadError::NotFound { message });
        }
        choose(config.engine.device)?;
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let id = crate::model::source::snapshot_name(folder).unwrap_or_else(|| load::model_id(folder));
        Ok(Self { id, path: path.to_owned(), config: config.clone() })
    }

    /// Whether there is a speech model at this path.
    pub fn is_one(path: &Path) -> bool {
        load::whisper::is_whisper(path)
    }

    /// Another id in the API than the folder's name, where there is one.
    pub fn named(mut self, id: Option<String>) -> Self {
        self.id = id.unwrap_or(self.id);
        self
    }
}

impl SpeechSource for SpeechFolder {
    fn id(&self) -> &str {
        &self.id
    }

    fn load(&self) -> Result<LoadedSpeech, LoadError> {
        let files = load::whisper::open(&self.path)?;
        let engine = prepare(choose(self.config.engine.device)?, &files, &self.config)?;
        let tokens = SpeechTokens::new(files.tokenizer, &files.dims);
        Ok(LoadedSpeech { tokens, dims: files.dims, format: files.format, engine })
    }
}

/// Packs for one backend.
fn prepare(
    backend: Backend,
    files: &WhisperFiles,
    config: &Config,
) -> Result<Box<dyn PreparedSpeech>, LoadError> {
    match backend {
        #[cfg(feature = "cpu")]
        Backend::Cpu => prepare_cpu(files, config),
        #[cfg(not(feature = "cpu"))]
        Backend::Cpu => Err(not_compiled("cpu")),
        #[cfg(feature = "mlx")]
        Backend::Mlx => prepare_mlx(files),
        #[cfg(not(feature = "mlx"))]
        Backend::Mlx => Err(not_compiled("mlx")),
    }
}

#[cfg(feature = "cpu")]
fn prepare_cpu(files: &WhisperFiles, config: &Config) -> Result<Box<dyn PreparedSpeech>, LoadError> {
    use super::engine::Prepared;
    use super::whisper;
    use crate::config::KvType;
    use crate::model::cpu::CpuOps;

    let packed = whisper::pack::<CpuOps>(files, &config.cpu)?;
    let element_bytes = if config.cpu.kv == KvType::F16 { 2 } else { 4 };
    Ok(Box::new(Prepared { config: config.cpu.clone(), packed, element_bytes }))
}

/// Half precision on Metal is f16, whatever the checkpoint's type: Whisper was trained in it, and
/// mlx-whisper computes in it.
#[cfg(feature = "mlx")]
fn prepare_mlx(files: &WhisperFiles) -> Result<Box<dyn PreparedSpeech>, LoadError> {
    use super::engine::Prepared;
    use super::whisper;
    use crate::model::mlx::{MlxOps, MlxType};
    use crate::model::source::mlx_config;

    let config = mlx_config(MlxType::F16);
    let packed = whisper::pack::<MlxOps>(files, &config)?;
    Ok(Box::new(Prepared { config, packed, element_bytes: config.activations.bytes() }))
}
