//! Greenroom's own folder, and the model that a word on the command line means.

use std::path::{Path, PathBuf};

use super::Stop;
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

/// The model that was asked for, or the demo model.
///
/// # Errors
/// Says how to get one.
pub(super) fn model(asked: Option<&str>) -> Result<PathBuf, Stop> {
    match asked {
        Some(asked) => named(asked),
        None => demo(),
    }
}

fn named(asked: &str) -> Result<PathBuf, Stop> {
    let path = Path::new(asked);
    if path.exists() {
        return Ok(path.to_owned());
    }
    // A bare name may lie in the folder of models.
    if let Some(found) = models().map(|folder| folder.join(asked)).filter(|path| path.exists()) {
        return Ok(found);
    }
    let hub =
        asked.split('/').count() == 2 && !asked.starts_with(['.', '/', '~']) && !asked.ends_with(".gguf");
    let hint = if hub {
        "; if this is a hub id: those are not supported yet, download the model and give its folder"
    } else {
        ""
    };
    Err(Stop::new(
        Exit::Config,
        format!("{asked}: no such file or folder; a .gguf file or a model folder is needed{hint}"),
    ))
}

fn demo() -> Result<PathBuf, Stop> {
    let place = models().map(|folder| folder.join(DEMO_MODEL));
    match place {
        Some(path) if path.is_file() => Ok(path),
        place => {
            let place = place.map_or_else(|| DEMO_MODEL.to_owned(), |path| path.display().to_string());
            let message = format!(
                "no model was given and the demo model is not there ({place}); \
                 `make model` gets it, or give one: greenroom serve path/to/model.gguf"
            );
            Err(Stop::new(Exit::Config, message))
        }
    }
}
