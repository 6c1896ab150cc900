//! Listeners: a TCP port, and a Unix socket that is ours alone.
//!
//! actix's own binding of Unix sockets deletes whatever lies at the path,
//! leaves the mode to the umask and leaves the file behind; this one replaces
//! only a socket that nobody serves, and removes its own at the end.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

/// A listener that could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody else has the port.
    #[error(
        "port {port} on {host} is taken by another program; stop it or choose another port (--port, http.port; 0 takes a free one)"
    )]
    PortTaken {
        /// As configured.
        host: String,
        /// As configured.
        port: u16,
    },
    /// The address is not usable.
    #[error("cannot listen on {host}:{port} (http.host, http.port): {source}")]
    Tcp {
        /// As configured.
        host: String,
        /// As configured.
        port: u16,
        /// The system's words.
        source: io::Error,
    },
    /// The Unix socket is not usable.
    #[error("cannot listen on the Unix socket {} (http.unix_socket): {message}", path.display())]
    Unix {
        /// As configured.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The server could not be started on the listeners.
    #[error("the HTTP server could not be started: {source}")]
    Server {
        /// The system's words.
        source: io::Error,
    },
}

/// Binds a TCP port; 0 takes a free one.
///
/// # Errors
/// `PortTaken`, `Tcp`.
pub fn tcp(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), ListenError> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::PortTaken { host: host.to_owned(), port },
        _ => ListenError::Tcp { host: host.to_owned(), port, source },
    };
    let listener = TcpListener::bind((bare, port)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// A Unix socket's file, removed with its owner.
#[cfg(unix)]
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode: a file that replaced ours is not ours to remove.
    identity: Option<(u64, u64)>,
}

#[cfg(unix)]
impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // Nothing could be done about a failure; the next start replaces the file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(unix)]
fn identity(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Binds a Unix socket with mode 0600, in a folder of mode 0700 if it has to be made.
///
/// # Errors
/// `Unix`: a live server or another kind of file at the path, or the system's refusal.
#[cfg(unix)]
pub fn unix(path: &std::path::Path) -> Result<(std::os::unix::net::UnixListener, SocketFile), ListenError> {
    use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
    use std::os::unix::net::UnixListener;

    let failed = |message: String| ListenError::Unix { path: path.to_owned(), message };
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.exists()) {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(|error| failed(format!("its folder cannot be made: {error}")))?;
    }
    remove_stale(path).map_err(failed)?;
    // Bound under a private name and moved into place once its mode is right: nobody
    // can connect in between, whatever the umask.
    let hidden = private_name(path);
    if std::fs::symlink_metadata(&hidden).is_ok_and(|meta| meta.file_type().is_socket()) {
        // Left behind by a process of the same id that was killed in between.
        let _ = std::fs::remove_file(&hidden);
    }
    let bound = UnixListener::bind(&hidden);
    let listener = bound.map_err(|error| failed(format!("{}: {error}", hidden.display())))?;
    let placed = std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&hidden, path));
    if let Err(error) = placed {
        let _ = std::fs::remove_file(&hidden);
        return Err(failed(error.to_string()));
    }
    Ok((listener, SocketFile { path: path.to_owned(), identity: identity(path) }))
}

#[cfg(unix)]
fn private_name(path: &std::path::Path) -> PathBuf {
    // Short, so that a path at the system's limit still works: same folder, a name of its own.
    let name = format!(".gr{:x}", std::process::id());
    match path.parent() {
        Some(parent) => parent.join(name),
        None => PathBuf::from(name),
    }
}

/// Removes a socket that nobody serves; refuses anything else at the path.
#[cfg(unix)]
fn remove_stale(path: &std::path::Path) -> Result<(), String> {
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixStream;

    let Ok(meta) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.file_type().is_socket() {
        return Err("there is a file at this path that is not a socket; it is left alone".into());
    }
    match UnixStream::connect(path) {
        Ok(_) => Err("another server is listening on it".into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|error| format!("the old socket cannot be removed: {error}"))
        }
        Err(error) => Err(format!("there is a socket at this path that cannot be tried: {error}")),
    }
}
