//! Output of the commands: whole lines on stdout, mistakes on stderr.

use std::io::{self, Write};

/// Writes to stdout and flushes: under a service manager stdout is a pipe, and
/// what is held back there is not seen.
pub(super) fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes one message on stderr; there is nowhere to say that it failed.
pub(super) fn complain(message: &str) {
    let _ = writeln!(io::stderr().lock(), "greenroom: {message}");
}

/// Writes to stderr as it is.
pub(super) fn note(text: &str) {
    let mut err = io::stderr().lock();
    let _ = err.write_all(text.as_bytes());
    let _ = err.flush();
}
