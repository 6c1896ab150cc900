//! `greenroom pull`: a model from the hub, or one of the demo models.

use greenroom::model::hub::{Hub, HubError, HubId, HubSettings};
use greenroom::types::ByteSize;

use super::progress::Report;
use super::{PullArgs, Stop, demo, settings, terminal};
use crate::exit::Exit;

/// Pulls and says where the model is: its path is the last line on stdout.
pub(super) fn pull(args: &PullArgs) -> Result<Exit, Stop> {
    if let Some(demo) = demo::named(&args.model) {
        if !args.file.is_empty() {
            return Err(Stop::new(Exit::Usage, format!("--file: {} is one whole", args.model)));
        }
        let path = demo.fetch()?;
        let _ = terminal::say(&format!("{}\n", path.display()));
        return Ok(Exit::Ok);
    }
    let id = HubId::parse(&args.model).map_err(|error| {
        let message = format!("{error}; or `demo`, `demo-speech`");
        Stop::new(Exit::Usage, message)
    })?;
    let hub = hub(&settings::plain(args.settings.config.as_deref())?);
    let pulled = hub.pull(&id, &args.file, &Report::new()).map_err(|error| stop(&error))?;
    let fetched = match pulled.fetched {
        0 => "all here already".to_owned(),
        bytes => format!("{} fetched", ByteSize(bytes)),
    };
    terminal::note(&format!("{id}: {} files, {}, {fetched}\n", pulled.files, ByteSize(pulled.bytes)));
    let _ = terminal::say(&format!("{}\n", pulled.path.display()));
    Ok(Exit::Ok)
}

/// The hub as variables and settings have it.
pub(super) fn hub(config: &greenroom::Config) -> Hub {
    let mut hub = HubSettings::from_variables(|name| std::env::var_os(name));
    hub.offline |= config.hub.offline;
    Hub::new(hub)
}

/// How a command ends after an error of the hub's.
pub(super) fn stop(error: &HubError) -> Stop {
    let exit = match error {
        HubError::Unreachable { .. } | HubError::Status { .. } => Exit::Unavailable,
        HubError::Io { .. }
        | HubError::NoSpace { .. }
        | HubError::Checksum { .. }
        | HubError::Protocol { .. } => Exit::Failure,
        HubError::Id { .. } | HubError::NoMatch { .. } => Exit::Usage,
        _ => Exit::Config,
    };
    Stop::new(exit, error.to_string())
}
