//! Service managers: what they expect of exit codes, and how systemd is told
//! that the server is ready.

use clap::ValueEnum;

use crate::exit::Exit;

/// Who starts and restarts the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Manager {
    /// macOS
    Launchd,
    /// Linux
    Systemd,
}

/// The exit code that a manager understands.
///
/// launchd has no list of codes after which it should not start again: a
/// mistake that would come back at once ends there like success.
pub(super) fn exit_for(manager: Option<Manager>, exit: Exit) -> Exit {
    match (manager, exit) {
        (Some(Manager::Launchd), Exit::Usage | Exit::Config) => Exit::Ok,
        (_, exit) => exit,
    }
}

/// The manager named by a command line that could not be parsed.
pub(super) fn asked_for(args: impl Iterator<Item = String>) -> Option<Manager> {
    let args: Vec<String> = args.collect();
    let spaced = args.windows(2).any(|pair| pair[0] == "--service" && pair[1] == "launchd");
    let joined = args.iter().any(|arg| arg == "--service=launchd");
    (spaced || joined).then_some(Manager::Launchd)
}

/// Tells systemd about the process' state, where it asked for that.
pub(super) fn notify(manager: Option<Manager>, state: &str) {
    if manager != Some(Manager::Systemd) {
        return;
    }
    #[cfg(unix)]
    if let Err(error) = send(state) {
        tracing::warn!(%error, "systemd could not be told about the state");
    }
}

#[cfg(unix)]
fn send(state: &str) -> std::io::Result<()> {
    use std::os::unix::net::UnixDatagram;

    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let socket = UnixDatagram::unbound()?;
    #[cfg(target_os = "linux")]
    {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::net::SocketAddr;

        if let Some(name) = name.as_bytes().strip_prefix(b"@") {
            let address = SocketAddr::from_abstract_name(name)?;
            return socket.send_to_addr(state.as_bytes(), &address).map(drop);
        }
    }
    socket.send_to(state.as_bytes(), name).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchd_is_found_in_a_wrong_command_line() {
        let args = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>().into_iter();
        assert_eq!(
            asked_for(args(&["greenroom", "serve", "--service", "launchd", "--x"])),
            Some(Manager::Launchd)
        );
        assert_eq!(asked_for(args(&["greenroom", "--service=launchd"])), Some(Manager::Launchd));
        assert_eq!(asked_for(args(&["greenroom", "serve", "--service", "systemd"])), None);
        assert_eq!(exit_for(Some(Manager::Launchd), Exit::Software), Exit::Software);
    }
}
