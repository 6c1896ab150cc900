//! The process' exit codes, after sysexits: service managers decide by them.

use std::process::ExitCode;

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// All went well, or somebody asked it to stop.
    Ok,
    /// Something failed that has no code of its own.
    Failure,
    /// The command line is wrong.
    Usage,
    /// Something that it needs is not there: a port, a socket.
    Unavailable,
    /// The engine could not be kept alive.
    Software,
    /// A setting, or the model it names, is wrong: starting again would not help.
    Config,
    /// Stopped by Ctrl-C.
    Interrupted,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Ok => 0,
            Exit::Failure => 1,
            Exit::Usage => 64,
            Exit::Unavailable => 69,
            Exit::Software => 70,
            Exit::Config => 78,
            Exit::Interrupted => 130,
        })
    }
}
