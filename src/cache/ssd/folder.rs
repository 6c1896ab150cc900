//! The folder: one process has it, files appear whole or not at all, what is broken goes.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::format::{self, Opening};
use super::{SegmentHead, SegmentId, pieces};

/// Ends the name of a segment's file.
const SUFFIX: &str = "gkv";
/// Ends it while it is written.
const UNFINISHED: &str = "tmp";
/// The file whose lock says who has the folder.
const LOCK: &str = "lock";

/// How often a folder that somebody has is tried, and how long after each try.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process has it.
    #[error("the cache folder {} is in use by another process; give each server one of its own", .0.display())]
    InUse(PathBuf),
    /// It cannot be made, read or written.
    #[error("the cache folder {} cannot be used: {source}", dir.display())]
    Io {
        /// Which.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why a segment cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Its file is gone.
    #[error("the file is gone")]
    Missing,
    /// Its file is not what was written.
    #[error("{reason}")]
    Corrupt {
        /// In words.
        reason: String,
    },
    /// The disk did not answer; that says nothing of the file.
    #[error("{0}")]
    Io(io::Error),
}

/// What a scan met besides segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScanReport {
    /// Files of ours that are no good, by name, and why. Removed where the folder is ours.
    pub bad: Vec<(String, String)>,
    /// Files of ours that could not be read or removed, by name, and why. Left where they are, and not
    /// used, nor what builds on them: the disk may give them back.
    pub unread: Vec<(String, String)>,
    /// Files that were being written when a process ended.
    pub unfinished: usize,
    /// Others than the owner may look into the folder.
    pub is_open_to_others: bool,
}

/// A folder that this process has to itself.
#[derive(Debug)]
pub struct Folder {
    dir: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl Folder {
    /// Takes the folder, made where it is not there, and finds out what it holds: heads in the order in
    /// which their files were last used. What is unfinished, damaged, or builds on what is gone is
    /// removed; files with other names are left alone.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(dir: &Path) -> Result<(Self, Vec<SegmentHead>, ScanReport), OpenError> {
        let failed = |source| OpenError::Io { dir: dir.to_path_buf(), source };
        make_private(dir).map_err(failed)?;
        let lock = private(OpenOptions::new().create(true).truncate(false).write(true))
            .open(dir.join(LOCK))
            .map_err(failed)?;
        take(&lock).map_err(|error| match error {
            TryLockError::WouldBlock => OpenError::InUse(dir.to_path_buf()),
            TryLockError::Error(source) => failed(source),
        })?;
        let (heads, report) = scan(dir, true).map_err(failed)?;
        Ok((Self { dir: dir.to_path_buf(), _lock: lock }, heads, report))
    }

    /// Writes a segment, and returns the bytes of its file. `pace` is told of bytes as they are
    /// written, and may take its time. After an error nothing of it is there.
    ///
    /// # Errors
    /// Those of the disk; `InvalidInput` for a head that no file could have, `AlreadyExists` where its id
    /// has a file.
    pub fn write(
        &self,
        head: &SegmentHead,
        pieces: &[impl AsRef<[u8]>],
        pace: &mut dyn FnMut(u64),
    ) -> io::Result<u64> {
        let (unfinished, finished) = (self.path(head.id, UNFINISHED), self.path(head.id, SUFFIX));
        // Nobody else writes here: nothing comes between this look and the renaming.
        if fs::symlink_metadata(&finished).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let written = self.write_to(&unfinished, head, pieces, pace);
        let published = written.and_then(|bytes| {
            fs::rename(&unfinished, &finished)?;
            // The name is on the disk as well.
            let synced = File::open(&self.dir).and_then(|dir| dir.sync_all());
            if synced.is_err() {
                // Nobody is told of it, so nobody would remove it.
                let _left = fs::remove_file(&finished);
            }
            synced.map(|()| bytes)
        });
        if published.is_err() {
            // What cannot be removed now is at the next start.
            let _left = fs::remove_file(&unfinished);
        }
        published
    }

    fn write_to(
        &self,
        path: &Path,
        head: &SegmentHead,
        pieces: &[impl AsRef<[u8]>],
        pace: &mut dyn FnMut(u64),
    ) -> io::Result<u64> {
        let mut file = private(OpenOptions::new().create(true).truncate(true).write(true)).open(path)?;
        let opening = format::opening(head, pieces)?;
        let mut bytes = 0;
        for part in std::iter::once(opening.as_slice()).chain(pieces.iter().map(AsRef::as_ref)) {
            file.write_all(part)?;
            bytes += part.len() as u64;
            pace(part.len() as u64);
        }
        file.sync_all()?;
        Ok(bytes)
    }

    /// The pieces that hold a segment's first `tokens` tokens, checked.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(&self, head: &SegmentHead, tokens: u32) -> Result<Vec<Vec<u8>>, ReadError> {
        read(&self.path(head.id, SUFFIX), head, tokens, true)
    }

    /// Removes a segment's file; one that is not there is no error.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn remove(&self, id: SegmentId) -> io::Result<()> {
        gone(fs::remove_file(self.path(id, SUFFIX)))
    }

    fn path(&self, id: SegmentId, suffix: &str) -> PathBuf {
        path_of(&self.dir, id, suffix)
    }
}

/// Locks a file. One that is about to be let go is waited for: by a server that was just told to end, or by
/// a process that was just forked and has not begun yet.
fn take(lock: &File) -> Result<(), TryLockError> {
    for _ in 1..LOCK_TRIES {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            done => return done,
        }
    }
    lock.try_lock()
}

/// What a folder holds, without taking it or changing anything: for commands beside a server.
///
/// # Errors
/// Those of the disk.
pub fn inspect(dir: &Path) -> io::Result<(Vec<SegmentHead>, ScanReport)> {
    scan(dir, false)
}

/// Reads a whole segment of a folder that a server may have, and says what is wrong with it.
///
/// # Errors
/// See [`ReadError`].
pub fn verify(dir: &Path, head: &SegmentHead) -> Result<(), ReadError> {
    read(&path_of(dir, head.id, SUFFIX), head, u32::MAX, false).map(drop)
}

fn path_of(dir: &Path, id: SegmentId, suffix: &str) -> PathBuf {
    dir.join(format!("{id}.{suffix}"))
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// `is_use`: the next scan finds it among the latest used.
fn read(path: &Path, head: &SegmentHead, tokens: u32, is_use: bool) -> Result<Vec<Vec<u8>>, ReadError> {
    let corrupt = |reason: &str| ReadError::Corrupt { reason: reason.to_owned() };
    let file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ReadError::Missing,
        _ => ReadError::Io(error),
    })?;
    let length = file.metadata().map_err(ReadError::Io)?.len();
    if is_use {
        let _only_an_order = file.set_modified(SystemTime::now());
    }
    let mut file = BufReader::with_capacity(1 << 16, file);
    let Opening { head: there, pieces: sizes } = format::read_opening(&mut file)
        .map_err(ReadError::Io)?
        .map_err(|reason| ReadError::Corrupt { reason })?;
    if there.bytes != length || there != (SegmentHead { bytes: there.bytes, ..head.clone() }) {
        return Err(corrupt("it is not the file that it was"));
    }
    let wanted = head.start.saturating_add(tokens).min(head.end());
    let mut all = Vec::new();
    for (piece, (bytes, crc)) in pieces(&(head.start..head.end())).zip(sizes) {
        if piece.start >= wanted {
            break;
        }
        let length = usize::try_from(bytes).map_err(|_| corrupt("its sizes are wrong"))?;
        let mut buffer = Vec::new();
        // No more than the file says it has; but a file may have holes, and memory may be short.
        buffer.try_reserve_exact(length).map_err(|_| ReadError::Io(io::ErrorKind::OutOfMemory.into()))?;
        file.by_ref().take(bytes).read_to_end(&mut buffer).map_err(ReadError::Io)?;
        if buffer.len() < length {
            return Err(corrupt("it is cut off"));
        }
        if crc32fast::hash(&buffer) != crc {
            return Err(corrupt("a piece of it is damaged"));
        }
        all.push(buffer);
    }
    Ok(all)
}

fn scan(dir: &Path, cleans: bool) -> io::Result<(Vec<SegmentHead>, ScanReport)> {
    let mut report = ScanReport { is_open_to_others: is_open_to_others(dir), ..ScanReport::default() };
    let mut found: Vec<(SystemTime, SegmentHead)> = Vec::new();
    let mut unread = HashSet::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        // A folder, a link or a pipe by such a name is nothing that was written here; a pipe would not even open.
        if !entry.file_type()?.is_file() {
            continue;
        }
        let Some((id, suffix)) = name_of(&path) else { continue };
        if suffix == UNFINISHED {
            report.unfinished += 1;
            report.clear(&path, cleans, None);
            continue;
        }
        match head_of(&path, id) {
            Ok(Ok(head)) => {
                let used = entry.metadata().and_then(|data| data.modified());
                found.push((used.unwrap_or(SystemTime::UNIX_EPOCH), head));
            }
            Ok(Err(reason)) => report.clear(&path, cleans, Some(reason)),
            // Another process removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                unread.insert(id);
                report.unread.push((file_name(&path), error.to_string()));
            }
        }
    }
    // A parent starts before its child, so that it is judged first.
    found.sort_by_key(|(_, head)| head.start);
    let mut good: HashMap<SegmentId, (SystemTime, SegmentHead)> = HashMap::with_capacity(found.len());
    for (used, head) in found {
        let above = head.parent.map(|parent| (parent, good.get(&parent)));
        match above {
            Some((parent, _)) if unread.contains(&parent) => {
                unread.insert(head.id);
                let name = file_name(&path_of(dir, head.id, SUFFIX));
                report.unread.push((name, "what it builds on could not be read".into()));
            }
            Some((_, parent)) if !parent.is_some_and(|(_, parent)| parent.carries(&head)) => {
                let reason = "what it builds on is gone".into();
                report.clear(&path_of(dir, head.id, SUFFIX), cleans, Some(reason));
            }
            _ => {
                good.insert(head.id, (used, head));
            }
        }
    }
    let mut found: Vec<_> = good.into_values().collect();
    found.sort_by_key(|(used, head)| (*used, head.id));
    Ok((found.into_iter().map(|(_, head)| head).collect(), report))
}

impl ScanReport {
    /// Notes a file that is no good for a reason, or an unfinished one, and removes it where it may.
    fn clear(&mut self, path: &Path, cleans: bool, reason: Option<String>) {
        let removed = if cleans { gone(fs::remove_file(path)) } else { Ok(()) };
        match (removed, reason) {
            (Ok(()), Some(reason)) => self.bad.push((file_name(path), reason)),
            (Ok(()), None) => {}
            (Err(error), _) => self.unread.push((file_name(path), format!("it cannot be removed: {error}"))),
        }
    }
}

fn head_of(path: &Path, id: SegmentId) -> io::Result<Result<SegmentHead, String>> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let opening = match format::read_opening(&mut BufReader::with_capacity(1 << 13, file))? {
        Ok(opening) => opening,
        Err(reason) => return Ok(Err(reason)),
    };
    if opening.head.id != id {
        return Ok(Err("it bears another's name".into()));
    }
    if opening.head.bytes != length {
        return Ok(Err("it is cut off, or too long".into()));
    }
    Ok(Ok(opening.head))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The segment that a file of ours is named after.
fn name_of(path: &Path) -> Option<(SegmentId, &str)> {
    let (stem, suffix) = (path.file_stem()?.to_str()?, path.extension()?.to_str()?);
    let is_ours = stem.len() == 16 && [SUFFIX, UNFINISHED].contains(&suffix);
    let lower = stem.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    (is_ours && lower).then(|| u64::from_str_radix(stem, 16).ok()).flatten().map(|id| (SegmentId(id), suffix))
}

#[cfg(unix)]
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600)
}

#[cfg(not(unix))]
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// Makes the folder where it is not there; what its parents lack is made as usual.
fn make_private(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn is_open_to_others(dir: &Path) -> bool {
    let mode = fs::metadata(dir).map(|data| std::os::unix::fs::PermissionsExt::mode(&data.permissions()));
    mode.is_ok_and(|mode| mode & 0o077 != 0)
}

#[cfg(not(unix))]
fn is_open_to_others(_: &Path) -> bool {
    false
}
