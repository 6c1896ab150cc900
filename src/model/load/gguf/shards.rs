//! Models that are split into several files: finding the parts and proving that
//! they belong together.
//!
//! Parts are found by name (`…-00001-of-00003.gguf`) from whichever one was given.
//! Configuration and vocabulary are the first one's; each part has its own tensors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::super::mapping::Mapping;
use super::super::parts::PartName;
use super::super::{malformed, missing};
use super::reader::Header;
use crate::types::LoadError;

/// Most parts of a model.
const MAX_PARTS: u64 = 1024;

/// The files of the model that a file belongs to, in order, mapped: itself alone, or all parts.
pub(super) fn open(path: &Path) -> Result<Vec<(PathBuf, Mapping)>, LoadError> {
    let given = Mapping::open(path)?;
    let Some(name) = path.file_name().and_then(|name| PartName::parse(name.to_str()?)) else {
        return Ok(vec![(path.to_owned(), given)]);
    };
    let metadata = Header::parse(given.bytes(), path, 0)?.metadata;
    let count = metadata.number("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![(path.to_owned(), given)]);
    }
    let number = metadata.required("split.no")?.saturating_add(1);
    if (name.number, name.count) != (number, count) {
        return Err(misnamed(path, number, count));
    }
    if count > MAX_PARTS {
        return Err(malformed(path, format!("is one of {count} parts; {MAX_PARTS} are the most")));
    }
    let paths: Vec<PathBuf> = (1..=count).map(|number| path.with_file_name(name.part(number))).collect();
    if let Some(missing) = missing(&paths) {
        return Err(LoadError::NotFound {
            message: format!("{} is one of {count} parts; missing: {missing}", path.display()),
        });
    }
    paths.into_iter().map(|path| Mapping::open(&path).map(|mapping| (path, mapping))).collect()
}

/// Parses all files; the first one's header gets every tensor.
pub(super) fn parse(files: &[(PathBuf, Mapping)]) -> Result<Header<'_>, LoadError> {
    let mut headers = files
        .iter()
        .enumerate()
        .map(|(file, (path, mapping))| Header::parse(mapping.bytes(), path, file))
        .collect::<Result<Vec<_>, _>>()?;
    match (files, headers.as_slice()) {
        ([(path, _)], [header]) => {
            let count = header.metadata.number("split.count")?.unwrap_or(1);
            if count > 1 {
                return Err(misnamed(path, header.metadata.required("split.no")?.saturating_add(1), count));
            }
        }
        _ => check_parts(&headers, files)?,
    }
    let others = headers.split_off(1.min(headers.len()));
    let mut whole = headers.pop().ok_or_else(|| LoadError::NotFound { message: "no file".into() })?;
    whole.tensors.extend(others.into_iter().flat_map(|header| header.tensors));
    Ok(whole)
}

fn check_parts(headers: &[Header<'_>], files: &[(PathBuf, Mapping)]) -> Result<(), LoadError> {
    let Some(first) = headers.first().map(|header| &header.metadata) else { return Ok(()) };
    let tensors = first.required("split.tensors.count")?;
    for (number, (header, (path, _))) in headers.iter().zip(files).enumerate() {
        let metadata = &header.metadata;
        let part = (metadata.required("split.no")?, metadata.required("split.count")?);
        if part != (number as u64, files.len() as u64) {
            let message = format!(
                "says it is part {} of {}; its name says otherwise",
                part.0.saturating_add(1),
                part.1
            );
            return Err(malformed(path, message));
        }
        if let Some(other) = metadata.number("split.tensors.count")?
            && other != tensors
        {
            let message = format!(
                "is a part of another model: it is one of {other} tensors, the first part of {tensors}"
            );
            return Err(malformed(path, message));
        }
        let architecture = metadata.optional_text("general.architecture")?;
        if architecture.is_some() && architecture != first.optional_text("general.architecture")? {
            let message = format!("is a part of another model, of architecture {architecture:?}");
            return Err(malformed(path, message));
        }
    }
    check_tensors(headers, files, tensors)
}

/// No tensor twice, and as many as the first part promises.
fn check_tensors(
    headers: &[Header<'_>],
    files: &[(PathBuf, Mapping)],
    promised: u64,
) -> Result<(), LoadError> {
    let mut seen: HashMap<&str, &Path> = HashMap::new();
    for (header, (path, _)) in headers.iter().zip(files) {
        for tensor in &header.tensors {
            if let Some(other) = seen.insert(tensor.name, path) {
                let message = format!("tensor `{}` is also in {}", tensor.name, other.display());
                return Err(malformed(path, message));
            }
        }
    }
    if seen.len() as u64 != promised {
        let path = files.first().map_or(Path::new(""), |(path, _)| path);
        let message = format!("promises {promised} tensors; the {} parts have {}", files.len(), seen.len());
        return Err(malformed(path, message));
    }
    Ok(())
}

fn misnamed(path: &Path, number: u64, count: u64) -> LoadError {
    let message = format!(
        "is part {number} of {count}, but its name does not end in -{number:05}-of-{count:05}.gguf: parts are found by their names"
    );
    malformed(path, message)
}
