//! Greenroom's own folder, and the model that a word on the command line means.

use std::path::{Path, PathBuf};

use greenroom::Config;
use greenroom::model::hub::{HubError, HubId};

use super::progress::Report;
use super::{Stop, demo, pull, terminal};
use crate::exit::Exit;

/// File name of the demo model.
pub(super) const DEMO_MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// `$GREENROOM_HOME`, else the system's place for such data; `None` without a home folder.
pub(super) fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("GREENROOM_HOME").filter(|folder| !folder.is_empty()) {
        return Some(folder.into());
    }
    let user = PathBuf::from(std::env::var_os("HOME").filter(|home| !home.is_empty())?);
    let below = match std::env::consts::OS {
        "macos" => "Library/Application Support/greenroom",
        _ => ".local/share/greenroom",
    };
    Some(user.join(below))
}

/// The folder of models.
pub(super) fn models() -> Option<PathBuf> {
    Some(folder()?.join("models"))
}

/// A model that is here.
#[derive(Debug)]
pub(super) struct Found {
    /// File or folder.
    pub(super) path: PathBuf,
    /// What the API calls it, where the path does not say it.
    pub(super) name: Option<String>,
}

/// The model that was asked for, or the demo model. A hub id that is not whole in the cache is pulled.
///
/// # Errors
/// Says how to get one.
pub(super) fn model(asked: Option<&str>, config: &Config) -> Result<Found, Stop> {
    match asked {
        Some(asked) => named(asked, config),
        None => demo(),
    }
}

fn named(asked: &str, config: &Config) -> Result<Found, Stop> {
    if let Some(path) = local(asked) {
        return Ok(Found { path, name: None });
    }
    if demo::named(asked).is_some() {
        let message = format!("{asked} is not on this machine: run `greenroom pull {asked}`");
        return Err(Stop::new(Exit::Config, message));
    }
    let looks_like_a_path = asked.starts_with(['.', '/', '~']) || asked.to_lowercase().ends_with(".gguf");
    let missing = |why: &str| {
        let message = format!(
            "{asked}: no such file or folder{why}; a .gguf file, a model folder or a hub id \
             (ORG/NAME) is needed"
        );
        Stop::new(Exit::Config, message)
    };
    if looks_like_a_path || !asked.contains('/') {
        return Err(missing(""));
    }
    let id = HubId::parse(asked).map_err(|error| missing(&format!(", and {error}")))?;
    from_hub(&id, config)
}

/// A model that is here already: nobody is asked.
pub(super) fn here(asked: Option<&str>, config: &Config) -> Result<Found, Stop> {
    let Some(asked) = asked else { return demo() };
    let mut config = config.clone();
    config.hub.auto_pull = false;
    // A file that is no model yet is no reason to look elsewhere.
    named(asked, &config)
}

/// A file or folder by its path, by its name in the folder of models, or by a short name.
pub(super) fn local(asked: &str) -> Option<PathBuf> {
    let path = Path::new(asked);
    if path.exists() {
        return Some(path.to_owned());
    }
    let name = if asked == "demo" { DEMO_MODEL } else { asked };
    models().map(|folder| folder.join(name)).filter(|path| path.exists())
}

/// What is whole in the cache is served without asking anybody; else it is pulled, unless that is not wanted.
fn from_hub(id: &HubId, config: &Config) -> Result<Found, Stop> {
    let hub = pull::hub(config);
    let error = match hub.find(id) {
        Ok(found) => return Ok(Found { path: found.path, name: Some(found.name) }),
        Err(error @ (HubError::Absent { .. } | HubError::Incomplete { .. })) => error,
        Err(error) => return Err(pull::stop(&error)),
    };
    if hub.is_offline() || !config.hub.auto_pull {
        return Err(pull::stop(&error));
    }
    terminal::note(&format!("{id} is not (all) on this machine: pulling it\n"));
    hub.pull(id, &[], &Report::new()).map_err(|error| pull::stop(&error))?;
    let found = hub.find(id).map_err(|error| pull::stop(&error))?;
    Ok(Found { path: found.path, name: Some(found.name) })
}

fn demo() -> Result<Found, Stop> {
    let place = models().map(|folder| folder.join(DEMO_MODEL));
    match place {
        Some(path) if path.is_file() => Ok(Found { path, name: None }),
        place => {
            let place = place.map_or_else(|| DEMO_MODEL.to_owned(), |path| path.display().to_string());
            let message = format!(
                "no model was given and the demo model is not there ({place}); \
                 `greenroom pull demo` gets it, or give one: greenroom serve path/to/model.gguf"
            );
            Err(Stop::new(Exit::Config, message))
        }
    }
}
