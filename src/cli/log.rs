//! The log: text or JSON on stderr.

use std::io::IsTerminal;

use greenroom::config::{LogConfig, LogFormat};
use tracing_subscriber::EnvFilter;

use super::Stop;
use crate::exit::Exit;

/// Installs the subscriber. Once a process.
///
/// # Errors
/// A level that is none.
pub(super) fn install(config: &LogConfig) -> Result<(), Stop> {
    let filter = EnvFilter::try_new(&config.level).map_err(|error| {
        let message =
            format!("log.level: `{}` is not a level or a list of directives: {error}", config.level);
        Stop::new(Exit::Config, message)
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let installed = match config.format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    installed.map_err(|error| Stop::new(Exit::Failure, format!("the log could not be set up: {error}")))
}
