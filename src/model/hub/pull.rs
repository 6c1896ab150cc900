//! A whole model: list, choose, measure, fetch.

use std::path::{Path, PathBuf};

use super::client::{Client, Sibling};
use super::fetch::{Checksum, Remote, fetch};
use super::layout::{self, Cached, CachedModel, RepoFolder};
use super::select::{self, Choice, Listed};
use super::{HubError, HubId, HubSettings};

/// Who is told how a pull goes. Called from the thread that pulls.
pub trait Progress {
    /// One line.
    fn note(&self, text: &str);
    /// A file begins; it has so many bytes.
    fn begin(&self, file: &str, bytes: u64);
    /// So many bytes of the file are there; may go back.
    fn at(&self, bytes: u64);
    /// The file is whole and right.
    fn end(&self);
}

/// A model that was pulled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pulled {
    /// The snapshot's folder, or the (first) GGUF file in it.
    pub path: PathBuf,
    /// Files of it.
    pub files: usize,
    /// Bytes of them all.
    pub bytes: u64,
    /// Bytes that had to be fetched.
    pub fetched: u64,
}

/// The hub and its cache.
#[derive(Clone, Debug)]
pub struct Hub {
    settings: HubSettings,
}

impl Hub {
    /// Asks nobody yet.
    pub fn new(settings: HubSettings) -> Self {
        Self { settings }
    }

    /// Whether nobody may be asked.
    pub fn is_offline(&self) -> bool {
        self.settings.offline
    }

    /// The cache's folder; `None` where there is no home.
    pub fn cache(&self) -> Option<&Path> {
        self.settings.cache.as_deref()
    }

    /// A whole model in the cache, without asking anybody.
    ///
    /// # Errors
    /// `NoCache`, `Absent`, `Incomplete` naming what is missing, `Choose` among several.
    pub fn find(&self, id: &HubId) -> Result<Cached, HubError> {
        let cache = self.cache().ok_or(HubError::NoCache)?;
        layout::find(&RepoFolder::new(cache, &id.repo), id)
    }

    /// Everything in the cache that looks like a model, whole or not.
    pub fn list(&self) -> Vec<CachedModel> {
        self.cache().map(layout::list).unwrap_or_default()
    }

    /// Pulls what is missing of a model: its folder's files or one quantisation, or
    /// exactly what the patterns match (`*` anything, `?` one character).
    ///
    /// What breaks off is taken up again by the next call. Blocks.
    ///
    /// # Errors
    /// See [`HubError`]. What was there before stays.
    pub fn pull(&self, id: &HubId, patterns: &[String], progress: &dyn Progress) -> Result<Pulled, HubError> {
        let cache = self.cache().ok_or(HubError::NoCache)?;
        if self.settings.offline {
            return Err(HubError::Offline { id: id.to_string() });
        }
        let folder = RepoFolder::new(cache, &id.repo);
        let client = Client::new(&self.settings, id, cache)?;
        let listing = client.listing()?;
        let files: Vec<Listed> = listing.siblings.iter().map(listed).collect();
        let choice = select::choose(id, &files, patterns)?;
        std::fs::create_dir_all(cache).map_err(|source| HubError::Io { path: cache.to_owned(), source })?;
        let mut remotes = choice
            .names()
            .iter()
            .map(|name| remote(&client, &listing.sha, name, &listing.siblings))
            .collect::<Result<Vec<_>, _>>()?;
        check_space(cache, &folder, &remotes)?;
        folder.write_listing(&listing.sha, &with_sizes(files, &remotes))?;
        // Weights last: where they are, all else is.
        remotes.sort_by_key(|remote| (is_weight(&remote.file), remote.file.clone()));
        let total = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
        let fetched = total(&mut remotes.iter().map(|remote| remote.owed(&folder)));
        for remote in &remotes {
            fetch(&client, &folder, remote, progress)?;
        }
        // Some files of a newer commit must not take the place of a whole older snapshot.
        let is_some_files = matches!(choice, Choice::Patterns(_));
        if !is_some_files || layout::find(&folder, id).is_err() {
            folder.write_ref(id, &listing.sha)?;
        }
        let path = self.path_of(&choice, &folder.snapshot(&listing.sha), id)?;
        let bytes = total(&mut remotes.iter().map(|remote| remote.size));
        Ok(Pulled { path, files: remotes.len(), bytes, fetched })
    }

    /// The model's place, once more checked for being whole.
    fn path_of(&self, choice: &Choice, snapshot: &Path, id: &HubId) -> Result<PathBuf, HubError> {
        match choice {
            Choice::Patterns(names) => match names.as_slice() {
                [one] => Ok(snapshot.join(one)),
                _ => Ok(snapshot.to_owned()),
            },
            Choice::Folder(_) => self.find(id).map(|found| found.path),
            Choice::Gguf(names) => {
                Ok(names.first().map_or_else(|| snapshot.to_owned(), |name| snapshot.join(name)))
            }
        }
    }
}

fn listed(sibling: &Sibling) -> Listed {
    let size = sibling.lfs.as_ref().and_then(|lfs| lfs.size).or(sibling.size);
    Listed { name: sibling.name.clone(), size }
}

fn is_weight(file: &str) -> bool {
    [".safetensors", ".gguf", ".bin"].iter().any(|end| file.ends_with(end))
}

/// Sizes as the files' own answers have them.
fn with_sizes(mut files: Vec<Listed>, remotes: &[Remote]) -> Vec<Listed> {
    for file in &mut files {
        if let Some(remote) = remotes.iter().find(|remote| remote.file == file.name) {
            file.size = Some(remote.size);
        }
    }
    files
}

/// Asks for a file's size and checksum. Where its etag is no checksum, the listing's is taken.
fn remote(client: &Client<'_>, commit: &str, file: &str, siblings: &[Sibling]) -> Result<Remote, HubError> {
    let head = client.head(commit, file)?;
    let sibling = siblings.iter().find(|sibling| sibling.name == file);
    let sum = sibling.and_then(|sibling| match &sibling.lfs {
        Some(lfs) => lfs.sha256.clone(),
        None => sibling.blob_id.clone(),
    });
    let wrong = |message: &str| HubError::Protocol { what: file.to_owned(), message: message.to_owned() };
    let checksum = Checksum::of(&head.etag).or_else(|| Checksum::of(sum.as_deref()?)).ok_or_else(|| {
        wrong("neither its etag nor the listing gives a checksum, and it is not taken on trust")
    })?;
    let size = head.size.or_else(|| sibling.and_then(|sibling| listed(sibling).size));
    let size = size.ok_or_else(|| wrong("nothing says how large it is"))?;
    let plain = |etag: &str| etag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    let etag = match &checksum {
        _ if !head.etag.is_empty() && head.etag.len() <= 128 && plain(&head.etag) => head.etag,
        Checksum::Sha256(sum) | Checksum::Git(sum) => sum.clone(),
    };
    Ok(Remote { file: file.to_owned(), commit: commit.to_owned(), etag, size, checksum })
}

fn check_space(cache: &Path, folder: &RepoFolder, remotes: &[Remote]) -> Result<(), HubError> {
    let need = remotes.iter().map(|remote| remote.owed(folder)).fold(0u64, u64::saturating_add);
    match free_bytes(cache) {
        Some(free) if need > free => Err(HubError::NoSpace { place: cache.to_owned(), need, free }),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}
