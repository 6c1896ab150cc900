//! What each layer sees: everything, or a window of the last positions.

use serde_json::Value;

use super::hyperparameters::{Hyperparameters, MAX_CONTEXT};
use crate::types::LoadError;

const TYPES: &str = "layer_types";

/// Each layer's window: by `layer_types` where it is there, else by `slides`.
///
/// # Errors
/// `Format` for a list that does not fit, `Unsupported` for another kind of layer or for
/// sliding layers in a model without a window.
pub fn by_layer(
    config: &Hyperparameters<'_>,
    layers: usize,
    window: Option<u32>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<u32>>, LoadError> {
    let kinds = match config.get(TYPES) {
        None => (0..layers).map(slides).collect(),
        Some(value) => kinds(config, value, layers)?,
    };
    let windowed = |slides: bool| match (slides, window) {
        (true, None) => {
            Err(config.refused(TYPES, "sliding_attention", "a `sliding_window` is needed for it"))
        }
        (slides, window) => Ok(window.filter(|_| slides)),
    };
    kinds.into_iter().map(windowed).collect()
}

fn kinds(config: &Hyperparameters<'_>, value: &Value, layers: usize) -> Result<Vec<bool>, LoadError> {
    let list = value.as_array().ok_or_else(|| config.wrong(TYPES, "is not a list"))?;
    if list.len() != layers {
        let message = format!("has {} entries for {layers} layers", list.len());
        return Err(config.wrong(TYPES, &message));
    }
    let kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(config.refused(TYPES, kind, "`full_attention` and `sliding_attention` are supported")),
    };
    list.iter().map(kind).collect()
}

/// `sliding_window`; `None` when absent.
///
/// # Errors
/// `Format` for anything but a whole number above 0.
pub fn width(config: &Hyperparameters<'_>) -> Result<Option<u32>, LoadError> {
    Ok(config.count("sliding_window", MAX_CONTEXT)?.map(|width| width as u32))
}

/// Refuses layers that see less than everything.
///
/// # Errors
/// As [`by_layer`].
pub fn refuse(config: &Hyperparameters<'_>, layers: usize) -> Result<(), LoadError> {
    by_layer(config, layers, None, |_| false).map(drop)
}
