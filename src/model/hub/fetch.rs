//! One file into the cache: resumed, counted, verified, named.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::client::{BodyError, Client};
use super::layout::RepoFolder;
use super::{HubError, Progress};

/// Bytes read and written at a time.
const CHUNK: usize = 256 * 1024;
/// Tries in a row that bring nothing before a file is given up.
const IDLE_TRIES: usize = 5;
/// Bytes by which a try counts as having brought something.
const WORTHWHILE: u64 = 64 * 1024;

/// By what a file is known to be right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Checksum {
    /// Of a large file.
    Sha256(String),
    /// Git's hash of a small file: its length is part of it.
    Git(String),
}

impl Checksum {
    /// By the form of an etag or listed hash.
    pub fn of(text: &str) -> Option<Self> {
        let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match text.len() {
            64 if is_hex => Some(Self::Sha256(text.to_ascii_lowercase())),
            40 if is_hex => Some(Self::Git(text.to_ascii_lowercase())),
            _ => None,
        }
    }

    fn begin(&self, size: u64) -> Running {
        match self {
            Self::Sha256(_) => Running::Sha256(Sha256::new()),
            Self::Git(_) => Running::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    fn verify(&self, running: Running, file: &str) -> Result<(), HubError> {
        let (kind, expected) = match self {
            Self::Sha256(expected) => ("sha256", expected),
            Self::Git(expected) => ("git hash", expected),
        };
        let found = match running {
            Running::Sha256(state) => hex(&state.finalize()),
            Running::Git(state) => hex(&state.finalize()),
        };
        if found == *expected {
            return Ok(());
        }
        Err(HubError::Checksum { file: file.to_owned(), kind, expected: expected.clone(), found })
    }
}

enum Running {
    Sha256(Sha256),
    Git(Sha1),
}

impl Running {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(state) => state.update(bytes),
            Self::Git(state) => state.update(bytes),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file to be fetched.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub file: String,
    pub commit: String,
    pub etag: String,
    pub size: u64,
    pub checksum: Checksum,
}

impl Remote {
    /// Bytes of it that still have to come.
    pub fn owed(&self, folder: &RepoFolder) -> u64 {
        if self.is_here(folder) {
            return 0;
        }
        let have = std::fs::metadata(folder.part(&self.etag)).map_or(0, |meta| meta.len());
        self.size.saturating_sub(have.min(self.size))
    }

    fn is_here(&self, folder: &RepoFolder) -> bool {
        std::fs::metadata(folder.blob(&self.etag)).is_ok_and(|meta| meta.len() == self.size)
    }
}

/// Brings a file into the cache and links it into its snapshot. Whoever else fetches it is waited for.
pub(super) fn fetch(
    client: &Client<'_>,
    folder: &RepoFolder,
    remote: &Remote,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    if !remote.is_here(folder) {
        let _held = lock(&folder.lock(&remote.etag), &remote.file, progress)?;
        // Another process may have brought it in the meantime.
        if !remote.is_here(folder) {
            transfer(client, folder, remote, progress)?;
        }
    }
    folder.link(&remote.etag, &remote.commit, &remote.file)
}

/// Held until it is dropped; the system lets go when a process dies.
fn lock(path: &Path, file: &str, progress: &dyn Progress) -> Result<File, HubError> {
    let io = |source| HubError::Io { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(io)?;
    }
    let held = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(io)?;
    match held.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            progress.note(&format!("another process is fetching {file}: waiting for it"));
            held.lock().map_err(io)?;
        }
        // Some network disks have no locks: the checksum finds out what two at once may spoil.
        Err(std::fs::TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
        Err(std::fs::TryLockError::Error(error)) => return Err(io(error)),
    }
    Ok(held)
}

/// What has arrived so far, open for more.
struct Part {
    file: File,
    path: PathBuf,
    have: u64,
    running: Running,
}

impl Part {
    /// Takes up what an earlier try left.
    fn open(path: PathBuf, remote: &Remote) -> Result<Self, HubError> {
        let io = |source| HubError::Io { path: path.clone(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(io)?;
        }
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).map_err(io)?;
        let mut part =
            Self { running: remote.checksum.begin(remote.size), file, have: 0, path: path.clone() };
        if part.file.metadata().map_err(io)?.len() > remote.size {
            part.clear(remote)?;
        }
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = part.file.read(&mut buffer).map_err(io)?;
            if read == 0 {
                return Ok(part);
            }
            part.running.update(&buffer[..read]);
            part.have += read as u64;
        }
    }

    fn clear(&mut self, remote: &Remote) -> Result<(), HubError> {
        let io = |source| HubError::Io { path: self.path.clone(), source };
        self.file.set_len(0).map_err(io)?;
        self.file.seek(SeekFrom::Start(0)).map_err(io)?;
        self.have = 0;
        self.running = remote.checksum.begin(remote.size);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(|source| HubError::Io { path: self.path.clone(), source })?;
        self.running.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }
}

fn transfer(
    client: &Client<'_>,
    folder: &RepoFolder,
    remote: &Remote,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let path = folder.part(&remote.etag);
    let mut part = Part::open(path.clone(), remote)?;
    let mut is_resumed = part.have > 0;
    progress.begin(&remote.file, remote.size);
    loop {
        progress.at(part.have);
        fill(client, remote, &mut part, progress)?;
        let running = std::mem::replace(&mut part.running, remote.checksum.begin(remote.size));
        match remote.checksum.verify(running, &remote.file) {
            Ok(()) => break,
            // The fault may be in what an earlier run, or another program, left.
            Err(_) if is_resumed => {
                progress.note(&format!("what was there of {} is damaged: fetching it anew", remote.file));
                part.clear(remote)?;
                is_resumed = false;
            }
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                return Err(error);
            }
        }
    }
    let io = |source| HubError::Io { path: path.clone(), source };
    part.file.sync_all().map_err(io)?;
    std::fs::rename(&path, folder.blob(&remote.etag)).map_err(io)?;
    progress.end();
    Ok(())
}

/// Until all bytes are there, by as many connections as it takes.
fn fill(
    client: &Client<'_>,
    remote: &Remote,
    part: &mut Part,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let mut idle = 0;
    while part.have < remote.size {
        let before = part.have;
        let (message, pause) = match client.body(&remote.commit, &remote.file, part.have) {
            Ok((begins, body)) => {
                if begins != part.have {
                    part.clear(remote)?;
                }
                (read_on(body, remote, part, progress)?, None)
            }
            Err(BodyError::Final(error)) => return Err(error),
            Err(BodyError::FromStart) => {
                part.clear(remote)?;
                ("the range that is missing was refused".to_owned(), None)
            }
            Err(BodyError::Again(message, pause)) => (message, pause),
        };
        if part.have >= remote.size {
            return Ok(());
        }
        idle = if part.have >= before.saturating_add(WORTHWHILE) { 0 } else { idle + 1 };
        if idle >= IDLE_TRIES {
            return Err(client.unreachable(format!("{}: {message}", remote.file)));
        }
        std::thread::sleep(client.pause(idle.max(1), pause));
    }
    Ok(())
}

/// Reads until the body ends; says how it did.
fn read_on(
    mut body: Box<dyn Read>,
    remote: &Remote,
    part: &mut Part,
    progress: &dyn Progress,
) -> Result<String, HubError> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match body.read(&mut buffer) {
            Ok(0) => return Ok("the connection ended early".into()),
            Ok(read) => {
                let room = remote.size - part.have;
                if read as u64 > room {
                    // Not the file that was promised, whatever its beginning.
                    part.clear(remote)?;
                    let message =
                        format!("{} is longer than the {} bytes promised", remote.file, remote.size);
                    return Err(HubError::Protocol { what: remote.file.clone(), message });
                }
                part.append(&buffer[..read])?;
                progress.at(part.have);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(error.to_string()),
        }
    }
}
