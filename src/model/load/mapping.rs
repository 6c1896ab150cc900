//! A file mapped read-only: the only place that maps.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::malformed;
use crate::types::LoadError;

/// A mapped file, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    map: Mmap,
    path: PathBuf,
}

impl Mapping {
    /// Maps a file that is not empty.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let io = |source| LoadError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(malformed(path, "not a regular file"));
        }
        if meta.len() == 0 {
            return Err(malformed(path, "the file is empty"));
        }
        // SAFETY: the map is read-only and private to this value. It is sound as long as no other
        // process truncates or rewrites the file while it is mapped, which whoever serves a model
        // upholds; downloads are written under another name and renamed.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { map, path: path.to_owned() })
    }

    /// The file's name without its folder, for errors.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Lets the process' share of the pages go: what was read counts no longer as its memory. They are
    /// still the file's, so a later look reads them again.
    pub fn release(&self) {
        #[cfg(unix)]
        // SAFETY: dropping pages of a read-only map of a file changes no byte that anybody sees: the
        // next access maps the same page of the file again. Without success they stay, which is no fault.
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// All of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
