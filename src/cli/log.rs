//! The log: text or JSON on stderr, written by a thread of its own.
//!
//! Nobody who logs waits: a reader of stderr that stops reading would else stop the
//! compute thread and with it every stream. What its queue cannot hold is dropped.

use std::io::IsTerminal;

use greenroom::config::{LogConfig, LogFormat};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

use super::Stop;
use crate::exit::Exit;

/// Lines that may wait for stderr.
const QUEUE_LINES: usize = 4096;

/// Installs the subscriber. Once a process. What was logged is written at the latest when the
/// guard is dropped.
///
/// # Errors
/// A level that is none.
pub(super) fn install(config: &LogConfig) -> Result<WorkerGuard, Stop> {
    let filter = EnvFilter::try_new(&config.level).map_err(|error| {
        let message =
            format!("log.level: `{}` is not a level or a list of directives: {error}", config.level);
        Stop::new(Exit::Config, message)
    })?;
    let (writer, guard) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(QUEUE_LINES)
        .thread_name("log")
        .finish(std::io::stderr());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let installed = match config.format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    installed
        .map(|()| guard)
        .map_err(|error| Stop::new(Exit::Failure, format!("the log could not be set up: {error}")))
}
