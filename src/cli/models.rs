//! `greenroom models`: what is on this machine, and what of it can be served.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use greenroom::model::inspect::{Inspection, inspect};
use greenroom::types::ByteSize;
use serde_json::json;

use super::{ModelsArgs, Stop, home, pull, settings, terminal};
use crate::exit::Exit;

/// A model by the word that `serve` takes for it.
struct Listed {
    id: String,
    path: PathBuf,
    /// Files that are missing or cut short.
    missing: Vec<String>,
}

/// Prints the list.
pub(super) fn models(args: &ModelsArgs) -> Result<Exit, Stop> {
    let config = settings::plain(args.settings.config.as_deref())?;
    let mut listed = own();
    let cached = pull::hub(&config).list();
    listed.extend(cached.into_iter().map(|model| Listed {
        id: model.id,
        path: model.path,
        missing: model.missing,
    }));
    let models: Vec<(Listed, Inspection)> = listed
        .into_iter()
        .map(|model| {
            let mut found = inspect(&model.path, &config);
            if !model.missing.is_empty() {
                found.problem = Some(format!("incomplete, {} missing", model.missing.join(", ")));
            }
            (model, found)
        })
        .collect();
    let text = if args.json { as_json(&models) } else { as_table(&models) };
    let _ = terminal::say(&text);
    Ok(Exit::Ok)
}

/// Models in Greenroom's own folder: files, folders, and shards once.
fn own() -> Vec<Listed> {
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    let folder = home::models();
    for entry in folder.iter().flat_map(std::fs::read_dir).flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') && is_model(&path) && !is_later_shard(&name) {
            found.insert(name, path);
        }
    }
    found.into_iter().map(|(id, path)| Listed { id, path, missing: Vec::new() }).collect()
}

pub(super) fn is_model(path: &Path) -> bool {
    let is_gguf = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
    is_gguf || path.join("config.json").is_file()
}

/// `NAME-00002-of-00003.gguf` and on.
fn is_later_shard(name: &str) -> bool {
    let Some((rest, _)) = name.rsplit_once("-of-") else { return false };
    rest.rsplit_once('-').is_some_and(|(_, number)| number.len() == 5 && number != "00001")
}

fn as_json(models: &[(Listed, Inspection)]) -> String {
    let one = |(listed, model): &(Listed, Inspection)| {
        let details = model.details.as_ref();
        json!({
            "id": listed.id,
            "path": model.path,
            "format": model.format,
            "family": model.family,
            "bytes": model.file_bytes,
            "parameters": details.map(|details| details.parameters),
            "context": details.map(|details| details.context),
            "quantisation": details.map(|details| &details.quantisation),
            "memory": details.map(|details| details.memory),
            "complete": listed.missing.is_empty(),
            "missing": listed.missing,
            "supported": model.problem.is_none(),
            "problem": model.problem,
        })
    };
    let list: Vec<_> = models.iter().map(one).collect();
    format!("{:#}\n", serde_json::Value::Array(list))
}

fn as_table(models: &[(Listed, Inspection)]) -> String {
    if models.is_empty() {
        return "There are no models here: `greenroom pull demo` gets a small one.\n".into();
    }
    let width = models.iter().map(|(listed, _)| listed.id.chars().count()).max().unwrap_or(0).max(5);
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "{:width$}  {:>9}  {:<11}  {:<9}  {:>7}  {:<26}  fits",
        "MODEL", "SIZE", "FORMAT", "FAMILY", "CONTEXT", "WEIGHTS"
    );
    for (listed, model) in models {
        let family = shown(model.family.as_deref().unwrap_or("?"));
        let (context, weights) = model.details.as_ref().map_or_else(
            || ("?".to_owned(), "?".to_owned()),
            |details| (details.context.to_string(), details.quantisation.clone()),
        );
        let _ = writeln!(
            out,
            "{:width$}  {:>9}  {:<11}  {family:<9}  {context:>7}  {weights:<26}  {}",
            shown(&listed.id),
            ByteSize(model.file_bytes),
            model.format.unwrap_or("?"),
            verdict(model)
        );
    }
    out
}

fn verdict(model: &Inspection) -> String {
    match (&model.problem, &model.details) {
        (Some(problem), _) => format!("no: {}", shown(problem)),
        (None, None) => "unknown".into(),
        (None, Some(details)) if details.memory.fits => "yes".into(),
        (None, Some(details)) => match details.memory.fitting_context {
            Some(tokens) => format!("with --ctx {tokens}"),
            None => format!("no: needs {}", ByteSize(details.memory.total)),
        },
    }
}

/// A text of a file's, without what could steer a terminal.
pub(super) fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
