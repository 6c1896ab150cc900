//! Settings of a command: file < environment < flags.

use std::path::Path;

use greenroom::config::{Config, Sources};

use super::{Device, EngineArgs, LogForm, ServeArgs, Stop, home};
use crate::exit::Exit;

/// Settings for `serve`.
pub(super) fn for_serve(args: &ServeArgs) -> Result<Config, Stop> {
    let mut sources = with_engine(read(args.engine.settings.config.as_deref())?, &args.engine);
    if let Some(host) = &args.host {
        sources = sources.flag("--host", "http.host", host.clone());
    }
    if let Some(port) = args.port {
        sources = sources.flag("--port", "http.port", i64::from(port));
    }
    if let Some(path) = &args.unix_socket {
        sources = sources.flag("--unix-socket", "http.unix_socket", path.display().to_string());
        // Asked for on the command line alone, a socket is meant instead of a port.
        let also_tcp = args.host.is_some() || args.port.is_some();
        sources = sources.flag("--unix-socket", "http.tcp", also_tcp);
    } else if args.host.is_some() || args.port.is_some() {
        sources = sources.flag("--port", "http.tcp", true);
    }
    if let Some(model) = &args.speech_model {
        sources = sources.flag("--speech-model", "speech.model", model.clone());
    }
    if let Some(dir) = &args.cache_dir {
        sources = sources.flag("--cache-dir", "cache.dir", dir.display().to_string());
    }
    if let Some(gigabytes) = args.cache_ssd_gb {
        sources = sources.flag("--cache-ssd-gb", "cache.ssd_gb", gigabytes);
    }
    resolve(sources)
}

/// Settings for `run`: quiet unless the command line says otherwise.
pub(super) fn for_run(args: &EngineArgs) -> Result<Config, Stop> {
    let mut sources = with_engine(read(args.settings.config.as_deref())?, args);
    if args.log_level.is_none() {
        sources = sources.flag("--log-level", "log.level", "warn");
    }
    resolve(sources)
}

/// Settings without flags.
pub(super) fn plain(file: Option<&Path>) -> Result<Config, Stop> {
    resolve(read(file)?)
}

fn with_engine(mut sources: Sources, args: &EngineArgs) -> Sources {
    if let Some(device) = args.device {
        let name = match device {
            Device::Auto => "auto",
            Device::Cpu => "cpu",
            Device::Mlx => "mlx",
        };
        sources = sources.flag("--device", "engine.device", name);
    }
    if let Some(tokens) = args.ctx {
        sources = sources.flag("--ctx", "engine.context", i64::from(tokens));
    }
    if let Some(threads) = args.threads {
        sources = sources.flag("--threads", "cpu.threads", i64::from(threads));
    }
    if let Some(form) = args.log_format {
        let name = match form {
            LogForm::Text => "text",
            LogForm::Json => "json",
        };
        sources = sources.flag("--log-format", "log.format", name);
    }
    if let Some(level) = &args.log_level {
        sources = sources.flag("--log-level", "log.level", level.clone());
    }
    sources
}

fn read(file: Option<&Path>) -> Result<Sources, Stop> {
    let usual = home::folder().map(|folder| folder.join("greenroom.toml")).filter(|path| path.is_file());
    let mut sources = Sources::new();
    if let Some(path) = file.map(Path::to_owned).or(usual) {
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Stop::new(Exit::Config, format!("{}: {error}", path.display())))?;
        sources = sources.file(&path.display().to_string(), &text);
    }
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        Some((name, value.to_string_lossy().into_owned()))
    });
    Ok(sources.environment(variables))
}

fn resolve(sources: Sources) -> Result<Config, Stop> {
    sources.resolve().map_err(|error| {
        let message = match error.problems.as_slice() {
            [one] => format!("wrong configuration: {one}"),
            many => format!("wrong configuration:\n  {}", many.join("\n  ")),
        };
        Stop::new(Exit::Config, message)
    })
}
