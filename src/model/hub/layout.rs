//! The cache on disk: `models--ORG--NAME` with `blobs/`, `snapshots/COMMIT/` and
//! `refs/REVISION`, as every program of the hub's knows it.
//!
//! Besides, `.greenroom/COMMIT.json` keeps what the hub listed when a model was
//! pulled: by it a snapshot is known to be whole without asking anybody.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::id::is_commit;
use super::select::{self, Group, INDEX, Listed};
use super::{HubError, HubId};

/// Most files of a snapshot that are looked at.
const MAX_FILES: usize = 10_000;
/// Deepest folder of a snapshot that is looked at.
const MAX_DEPTH: usize = 4;
/// Largest listing or index read.
const MAX_JSON: u64 = 64 << 20;

/// Where a whole model of the cache lies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cached {
    /// A snapshot's folder, or the (first) GGUF file in it.
    pub path: PathBuf,
    /// What the API calls it.
    pub name: String,
}

/// A model of the cache, whole or not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CachedModel {
    /// As it is asked for.
    pub id: String,
    /// A snapshot's folder, or the (first) GGUF file in it, which may be missing.
    pub path: PathBuf,
    /// Files that are missing or cut short.
    pub missing: Vec<String>,
}

/// A repository's folder in the cache.
#[derive(Clone, Debug)]
pub(super) struct RepoFolder {
    /// The cache's own folder.
    pub cache: PathBuf,
    /// Of the repository, in the cache.
    name: String,
}

impl RepoFolder {
    pub fn new(cache: &Path, repo: &str) -> Self {
        let name = hf_hub::Repo::model(repo.to_owned()).folder_name();
        Self { cache: cache.to_owned(), name }
    }

    fn root(&self) -> PathBuf {
        self.cache.join(&self.name)
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.root().join("blobs").join(etag)
    }

    /// What has arrived of a blob so far; other programs of the hub's resume it as well.
    pub fn part(&self, etag: &str) -> PathBuf {
        self.root().join("blobs").join(format!("{etag}.incomplete"))
    }

    pub fn lock(&self, etag: &str) -> PathBuf {
        self.cache.join(".locks").join(&self.name).join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root().join("snapshots").join(commit)
    }

    fn listing(&self, commit: &str) -> PathBuf {
        self.root().join(".greenroom").join(format!("{commit}.json"))
    }

    /// The commit that a revision meant when it was last pulled.
    pub fn commit(&self, id: &HubId) -> Option<String> {
        let commit = if id.is_commit() {
            id.revision.clone()
        } else {
            read_bounded(&self.root().join("refs").join(&id.revision))?
        };
        let commit = commit.trim();
        (is_commit(commit) && self.snapshot(commit).is_dir()).then(|| commit.to_owned())
    }

    /// Notes what a revision means.
    pub fn write_ref(&self, id: &HubId, commit: &str) -> Result<(), HubError> {
        if id.is_commit() {
            return Ok(());
        }
        replace(&self.root().join("refs").join(&id.revision), commit.as_bytes())
    }

    /// Gives a blob its name in a snapshot.
    pub fn link(&self, etag: &str, commit: &str, file: &str) -> Result<(), HubError> {
        let pointer = self.snapshot(commit).join(file);
        let io = |source| HubError::Io { path: pointer.clone(), source };
        if let Some(folder) = pointer.parent() {
            fs::create_dir_all(folder).map_err(io)?;
        }
        // Under another name first: whoever looks in the meantime sees the old one or the new.
        let fresh = fresh_name(&pointer);
        let _ = fs::remove_file(&fresh);
        self.point(etag, file, &fresh).map_err(io)?;
        fs::rename(&fresh, &pointer).map_err(io)
    }

    #[cfg(unix)]
    fn point(&self, etag: &str, file: &str, at: &Path) -> std::io::Result<()> {
        let up = "../".repeat(2 + file.matches('/').count());
        std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), at)
    }

    #[cfg(not(unix))]
    fn point(&self, etag: &str, _file: &str, at: &Path) -> std::io::Result<()> {
        let blob = self.blob(etag);
        fs::hard_link(&blob, at).or_else(|_| fs::copy(&blob, at).map(drop))
    }

    /// Keeps what the hub listed.
    pub fn write_listing(&self, commit: &str, files: &[Listed]) -> Result<(), HubError> {
        let sizes: BTreeMap<&str, Option<u64>> =
            files.iter().map(|file| (file.name.as_str(), file.size)).collect();
        let text = serde_json::to_vec(&sizes).unwrap_or_default();
        replace(&self.listing(commit), &text)
    }

    fn read_listing(&self, commit: &str) -> Option<Vec<Listed>> {
        let text = read_bounded(&self.listing(commit))?;
        let sizes: BTreeMap<String, Option<u64>> = serde_json::from_str(&text).ok()?;
        let files = sizes.into_iter().filter(|(name, _)| is_safe(name));
        Some(files.map(|(name, size)| Listed { name, size }).collect())
    }

    /// Everything of a snapshot that is there, and what must be for the models in it.
    fn contents(&self, commit: &str) -> Contents {
        let mut here = Vec::new();
        walk(&self.snapshot(commit), "", 0, &mut here);
        let here = here.into_iter().collect();
        Contents { folder: self.snapshot(commit), listing: self.read_listing(commit), here }
    }
}

/// A snapshot as it lies there.
struct Contents {
    folder: PathBuf,
    listing: Option<Vec<Listed>>,
    /// Names and sizes of what is whole.
    here: BTreeMap<String, u64>,
}

impl Contents {
    /// Those of the names that are missing, or of another size than the hub said.
    fn missing(&self, names: impl IntoIterator<Item = String>) -> Vec<String> {
        let promised = |name: &str| {
            let listing = self.listing.as_ref()?;
            listing.iter().find(|file| file.name == name)?.size
        };
        let is_whole = |name: &String| {
            self.here.get(name).is_some_and(|size| promised(name).is_none_or(|promised| promised == *size))
        };
        names.into_iter().filter(|name| !is_whole(name)).collect()
    }

    /// All names that are known of.
    fn known(&self) -> Vec<Listed> {
        let mut files = self.listing.clone().unwrap_or_default();
        for (name, size) in &self.here {
            if !files.iter().any(|file| file.name == *name) {
                files.push(Listed { name: name.clone(), size: Some(*size) });
            }
        }
        files
    }

    /// What a model folder lacks; `None` where this is not one.
    fn folder_lacks(&self) -> Option<Vec<String>> {
        let mut names = select::folder(&self.known());
        if names.is_empty() && !self.here.contains_key(INDEX) {
            return None;
        }
        // Without a listing, what any folder needs.
        if self.listing.is_none() {
            names.extend(["config.json", "tokenizer.json"].map(String::from));
        }
        names.extend(indexed(&self.folder.join(INDEX)));
        names.sort();
        names.dedup();
        Some(self.missing(names))
    }

    /// The GGUF models, and what each lacks.
    fn gguf(&self) -> Vec<(Group, Vec<String>)> {
        let groups = select::gguf_groups(&self.known());
        groups.into_iter().map(|group| (self.missing(group.expected()), group)).map(|(m, g)| (g, m)).collect()
    }
}

/// Finds a whole model.
pub(super) fn find(folder: &RepoFolder, id: &HubId) -> Result<Cached, HubError> {
    let absent = || HubError::Absent { id: id.to_string() };
    let incomplete = |missing: Vec<String>| HubError::Incomplete { id: id.to_string(), missing };
    let commit = folder.commit(id).ok_or_else(absent)?;
    let contents = folder.contents(&commit);
    let name = id.name().to_owned();
    if id.variant.is_none()
        && let Some(missing) = contents.folder_lacks()
    {
        return match missing.is_empty() {
            true => Ok(Cached { path: contents.folder, name }),
            false => Err(incomplete(missing)),
        };
    }
    let mut groups = contents.gguf();
    if let Some(asked) = &id.variant {
        groups.retain(|(group, _)| group.label.eq_ignore_ascii_case(asked));
    }
    let whole: Vec<&Group> =
        groups.iter().filter(|(_, missing)| missing.is_empty()).map(|(group, _)| group).collect();
    match whole.as_slice() {
        [one] => {
            let first = one.names.first().ok_or_else(absent)?;
            Ok(Cached { path: contents.folder.join(first), name })
        }
        [] => {
            let begun = groups.into_iter().find(|(group, missing)| missing.len() < group.count);
            Err(begun.map_or_else(absent, |(_, missing)| incomplete(missing)))
        }
        several => Err(HubError::Choose {
            repo: id.repo.clone(),
            variants: several.iter().map(|group| group.variant()).collect(),
        }),
    }
}

/// Every model of a cache that something is here of, by name. What cannot be read is passed over.
pub(super) fn list(cache: &Path) -> Vec<CachedModel> {
    let mut models = Vec::new();
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((org, name)) = name.strip_prefix("models--").and_then(|rest| rest.split_once("--")) else {
            continue;
        };
        let Ok(id) = HubId::parse(&format!("{org}/{name}")) else { continue };
        let folder = RepoFolder::new(cache, &id.repo);
        for (revision, commit) in revisions(&folder) {
            let id = HubId { revision, ..id.clone() };
            models.extend(of_snapshot(&id, &folder.contents(&commit)));
        }
    }
    models.sort_by(|a, b| a.id.cmp(&b.id));
    models
}

fn of_snapshot(id: &HubId, contents: &Contents) -> Vec<CachedModel> {
    let mut models = Vec::new();
    let has_weights = contents.here.keys().any(|name| name.ends_with(".safetensors"));
    if let Some(missing) = contents.folder_lacks()
        && (has_weights || contents.here.contains_key("config.json"))
    {
        models.push(CachedModel { id: id.to_string(), path: contents.folder.clone(), missing });
    }
    for (group, missing) in contents.gguf() {
        let Some(first) = group.names.first().filter(|_| missing.len() < group.count) else { continue };
        let id = HubId { variant: Some(group.label.clone()), ..id.clone() };
        models.push(CachedModel { id: id.to_string(), path: contents.folder.join(first), missing });
    }
    models
}

/// Revisions that are known, and snapshots that none of them names.
fn revisions(folder: &RepoFolder) -> Vec<(String, String)> {
    let mut names = Vec::new();
    walk(&folder.root().join("refs"), "", 0, &mut names);
    let mut found: Vec<(String, String)> = Vec::new();
    for (revision, _) in names {
        let id = HubId { repo: String::new(), revision, variant: None };
        if let Some(commit) = folder.commit(&id) {
            found.push((id.revision, commit));
        }
    }
    for entry in fs::read_dir(folder.root().join("snapshots")).into_iter().flatten().flatten() {
        let commit = entry.file_name().to_string_lossy().into_owned();
        if is_commit(&commit) && !found.iter().any(|(_, known)| *known == commit) {
            found.push((commit.clone(), commit));
        }
    }
    found
}

/// Files below a folder with their sizes; links that lead nowhere are none.
fn walk(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<(String, u64)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if found.len() >= MAX_FILES {
            return;
        }
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match fs::metadata(entry.path()) {
            Ok(meta) if meta.is_file() => found.push((name, meta.len())),
            Ok(meta) if meta.is_dir() && depth < MAX_DEPTH => {
                walk(&entry.path(), &format!("{name}/"), depth + 1, found);
            }
            _ => {}
        }
    }
}

/// The shards that an index names.
fn indexed(path: &Path) -> Vec<String> {
    let index = read_bounded(path).and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok());
    let Some(map) = index.as_ref().and_then(|index| index.get("weight_map")?.as_object()) else {
        return Vec::new();
    };
    let mut names: Vec<String> = map.values().filter_map(|name| name.as_str().map(String::from)).collect();
    names.sort();
    names.dedup();
    names
}

fn read_bounded(path: &Path) -> Option<String> {
    let meta = fs::metadata(path).ok().filter(|meta| meta.is_file() && meta.len() <= MAX_JSON);
    meta.and_then(|_| fs::read_to_string(path).ok())
}

/// Writes a small file so that it is there whole or not at all.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let io = |source| HubError::Io { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(io)?;
    }
    let fresh = fresh_name(path);
    fs::write(&fresh, bytes).map_err(io)?;
    fs::rename(&fresh, path).map_err(io)
}

/// A name beside a path that no other thread and no other process uses.
fn fresh_name(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{}.{}.new", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    fresh.into()
}

/// Whether a file's name stays inside its folder.
pub(super) fn is_safe(name: &str) -> bool {
    let plain = !name.is_empty()
        && name.len() <= 1024
        && !name.chars().any(|c| c.is_control() || matches!(c, '\\' | ':'));
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    plain && inside && !name.split('/').any(|part| part.is_empty() || part == ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_their_folder_are_not_safe() {
        for name in ["a", "a.json", "sub/b", "a b", "Ünï.txt", "..a/b"] {
            assert!(is_safe(name), "{name}");
        }
        for name in
            ["", "/a", "../a", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "c:\\a", "c:a", "a\\b", "a\0b"]
        {
            assert!(!is_safe(name), "{name}");
        }
    }
}
