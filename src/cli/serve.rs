//! `greenroom serve`: listen, load, serve, and go down in order.
//!
//! Going down: new requests get 503, open streams get `http.drain_s`, then an
//! error event and a proper end; a second signal ends everything at once. An
//! engine that cannot be kept alive ends the process with 70, a model that
//! cannot be loaded with 78.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::actors::Health;
use greenroom::config::Config;
use greenroom::http::{HttpFront, Listeners, Serving};
use greenroom::model::ModelSource;
use greenroom::model::source::FileModel;
use greenroom::model::speech::source::{SpeechFolder, SpeechSource};
use greenroom::{Greenroom, Handles};
use tokio::sync::watch;

use super::service::{Manager, notify};
use super::signals::StopSignals;
use super::{ServeArgs, Stop, home, log, settings, terminal};
use crate::exit::Exit;

/// How long actors and threads get to end once all requests have, what is kept being written.
const STOP_LIMIT: Duration = Duration::from_secs(12);

/// The same for listeners alone.
const SHORT_STOP: Duration = Duration::from_secs(3);

/// Why the server goes down.
enum Cause {
    Signal(&'static str),
    Failed(String),
}

/// Runs until somebody asks it to stop.
pub(super) fn serve(args: &ServeArgs) -> Result<Exit, Stop> {
    let config = settings::for_serve(args)?;
    let _written_at_the_end = log::install(&config.log)?;
    tracing::debug!(?config, "settings");
    let found = home::model(args.model.as_deref(), &config)?;
    let mut speech = speech_model(&config)?;
    let mut model: Option<Arc<dyn ModelSource>> = None;
    if SpeechFolder::is_one(&found.path) {
        // Speech alone: no chat model, and hardly any memory while nobody speaks.
        if speech.is_some() {
            let message = format!(
                "{} is a speech model: give a chat model beside --speech-model, or this one alone",
                found.path.display()
            );
            return Err(Stop::new(Exit::Usage, message));
        }
        speech = Some(speech_folder(found, &config)?);
    } else {
        let chat = FileModel::new(&found.path, &config)
            .map_err(|error| Stop::new(Exit::Config, error.to_string()))?;
        model = Some(Arc::new(chat.named(found.name)));
    }
    let listeners =
        Listeners::bind(&config.http).map_err(|error| Stop::new(Exit::Unavailable, error.to_string()))?;
    let system = actix_rt::System::new();
    system.block_on(live(config, model, speech, listeners, args.service))
}

/// The speech model that the settings name.
fn speech_model(config: &Config) -> Result<Option<Arc<dyn SpeechSource>>, Stop> {
    let Some(asked) = &config.speech.model else { return Ok(None) };
    speech_folder(home::model(Some(asked), config)?, config).map(Some)
}

fn speech_folder(found: home::Found, config: &Config) -> Result<Arc<dyn SpeechSource>, Stop> {
    let folder = SpeechFolder::new(&found.path, config);
    let folder = folder.map_err(|error| Stop::new(Exit::Config, error.to_string()))?;
    Ok(Arc::new(folder.named(found.name)))
}

async fn live(
    config: Config,
    model: Option<Arc<dyn ModelSource>>,
    speech: Option<Arc<dyn SpeechSource>>,
    listeners: Listeners,
    manager: Option<Manager>,
) -> Result<Exit, Stop> {
    let software = |error: &dyn std::fmt::Display| Stop::new(Exit::Software, error.to_string());
    let mut signals = StopSignals::listen().map_err(|error| software(&error))?;
    let mut builder = Greenroom::builder(config.clone());
    let mut served = Vec::new();
    if let Some(model) = &model {
        served.push(format!("model    {} (loading)", model.id()));
        builder = builder.model(Arc::clone(model));
    }
    if let Some(speech) = speech {
        served.push(format!("speech   {}", speech.id()));
        builder = builder.speech(speech);
    }
    let greenroom = builder.start().await.map_err(|error| software(&error))?;
    let handles = greenroom.handles();
    let serving = HttpFront::serve(greenroom.handles(), &config.http, listeners)
        .map_err(|error| Stop::new(Exit::Unavailable, error.to_string()))?;
    announce(&serving, &served);
    let mut was_ready = false;
    let cause = tokio::select! {
        signal = signals.next() => Cause::Signal(signal),
        message = watch(&handles, &serving, manager, model.is_some(), &mut was_ready) => Cause::Failed(message),
    };
    notify(manager, "STOPPING=1");
    match cause {
        Cause::Signal(signal) => {
            tracing::info!(signal, "stopping");
            // Nobody is being served while the model loads: nothing to wait for.
            let at_once = !was_ready;
            go_down(greenroom, serving, &config, &mut signals, at_once).await;
            Ok(Exit::Ok)
        }
        Cause::Failed(message) => {
            go_down(greenroom, serving, &config, &mut signals, !was_ready).await;
            let exit = if was_ready { Exit::Software } else { Exit::Config };
            Err(Stop::new(exit, message))
        }
    }
}

/// Follows the instance's health; returns when it has failed for good.
async fn watch(
    handles: &Handles,
    serving: &Serving,
    manager: Option<Manager>,
    chats: bool,
    was_ready: &mut bool,
) -> String {
    let begun = Instant::now();
    let mut health: watch::Receiver<Health> = handles.watch_health();
    loop {
        let now = health.borrow_and_update().clone();
        match now {
            Health::Failed { message } => return message,
            Health::Ready if !*was_ready => {
                *was_ready = true;
                ready(serving, begun.elapsed(), chats);
                notify(manager, "READY=1");
            }
            _ => {}
        }
        if health.changed().await.is_err() {
            return "the instance ended by itself".into();
        }
    }
}

/// The order of the end. Returns early, with less of it, on a second signal.
async fn go_down(
    greenroom: Greenroom,
    serving: Serving,
    config: &Config,
    signals: &mut StopSignals,
    at_once: bool,
) {
    if !at_once {
        let drained = tokio::select! {
            () = greenroom.drain(config.http.drain()) => true,
            _ = signals.next() => false,
        };
        if drained {
            let ended = async {
                serving.stop(true).await;
                // What has not ended by then ends with the process.
                let _ = tokio::time::timeout(STOP_LIMIT, greenroom.stop()).await;
            };
            tokio::select! {
                () = ended => tracing::info!("stopped"),
                _ = signals.next() => {}
            }
            return;
        }
    }
    // Removes the Unix socket; loader and compute threads end with the process.
    let _ = tokio::time::timeout(SHORT_STOP, serving.stop(false)).await;
}

/// Says where the server is. Nobody may be reading: that is no reason to stop.
fn announce(serving: &Serving, served: &[String]) {
    let mut text = format!("Greenroom {}\n", env!("CARGO_PKG_VERSION"));
    if let Some(address) = serving.address {
        text.push_str(&format!("address  {}\n", url(address)));
    }
    if let Some(path) = &serving.unix_socket {
        text.push_str(&format!("socket   {}\n", path.display()));
    }
    served.iter().for_each(|line| text.push_str(&format!("{line}\n")));
    let _ = terminal::say(&text);
}

fn ready(serving: &Serving, took: Duration, chats: bool) {
    let target = match (serving.address, &serving.unix_socket) {
        (Some(address), _) => url(address),
        (None, Some(path)) => format!("--unix-socket '{}' http://localhost", path.display()),
        (None, None) => return,
    };
    let example = match chats {
        true => {
            "/v1/chat/completions -H 'content-type: application/json' \
             -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'"
        }
        false => "/v1/audio/transcriptions -F file=@recording.wav",
    };
    let seconds = took.as_secs_f64();
    let _ = terminal::say(&format!("ready    after {seconds:.1} s; try:\ncurl {target}{example}\n"));
}

/// An address that a browser on this machine can open.
fn url(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        return format!("http://127.0.0.1:{}", address.port());
    }
    format!("http://{address}")
}
