//! `greenroom run`: one answer, or a chat in the terminal. The same actors as
//! the server, without HTTP.

use std::io::{self, BufRead, IsTerminal, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::Greenroom;
use greenroom::actors::ChatStream;
use greenroom::model::source::FileModel;
use greenroom::types::{
    ChatEvent, ChatMessage, ChatRequest, FinishReason, PrepareError, Refusal, Role, SamplingOptions, Usage,
};
use tokio::sync::mpsc;

use super::signals::StopSignals;
use super::{RunArgs, Stop, home, log, settings, terminal};
use crate::exit::Exit;

/// How long threads get to end.
const STOP_LIMIT: Duration = Duration::from_secs(3);

/// Tokens that a base model goes on for where nobody says: it seldom ends by itself.
const CONTINUATION: u32 = 256;

/// How an answer ended.
enum Ended {
    Whole(String),
    Interrupted(String),
    /// Nobody reads stdout any more.
    PipeClosed,
}

/// Answers, or chats.
pub(super) fn run(args: &RunArgs) -> Result<Exit, Stop> {
    let config = settings::for_run(&args.engine)?;
    let _written_at_the_end = log::install(&config.log)?;
    check(args)?;
    let prompt = prompt(args)?;
    let found = home::model(Some(&args.model), &config)?;
    let model = FileModel::new(&found.path, &config)
        .map_err(|error| Stop::new(Exit::Config, error.to_string()))?
        .named(found.name);
    actix_rt::System::new().block_on(async {
        let greenroom = Greenroom::builder(config)
            .model(Arc::new(model))
            .start()
            .await
            .map_err(|error| Stop::new(Exit::Software, error.to_string()))?;
        let exit = talk(&greenroom, args, prompt).await;
        // Threads that do not end in time end with the process.
        let _ = tokio::time::timeout(STOP_LIMIT, greenroom.stop()).await;
        exit
    })
}

/// Ranges of the flags, before a model is loaded for them.
fn check(args: &RunArgs) -> Result<(), Stop> {
    request(args, &[]).check().map_err(|error| {
        let message = match error {
            PrepareError::Field { field, message } => format!("--{}: {message}", field.replace('_', "-")),
            other => other.to_string(),
        };
        Stop::new(Exit::Usage, message)
    })
}

fn request(args: &RunArgs, history: &[ChatMessage]) -> ChatRequest {
    ChatRequest {
        messages: history.to_vec(),
        sampling: SamplingOptions {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: args.seed,
            ..SamplingOptions::default()
        },
        max_tokens: args.max_tokens,
        ..ChatRequest::default()
    }
}

/// What a base model is asked: it has no template to chat with and goes on from the prompt.
fn continuation(args: &RunArgs, prompt: String) -> ChatRequest {
    ChatRequest {
        prompt: Some(prompt),
        max_tokens: args.max_tokens.or(Some(CONTINUATION)),
        ..request(args, &[])
    }
}

/// The prompt from the command line and the pipe; `None` means a chat.
fn prompt(args: &RunArgs) -> Result<Option<String>, Stop> {
    let mut stdin = io::stdin();
    // Only without a prompt is stdin surely meant: elsewhere it may be an idle pipe of a script.
    if args.prompt.is_some() && !is_pipe() {
        return Ok(args.prompt.clone());
    }
    if stdin.is_terminal() {
        return Ok(args.prompt.clone());
    }
    let mut text = String::new();
    stdin
        .read_to_string(&mut text)
        .map_err(|error| Stop::new(Exit::Failure, format!("stdin could not be read: {error}")))?;
    let text = text.trim_end().to_owned();
    match &args.prompt {
        Some(prompt) if text.is_empty() => Ok(Some(prompt.clone())),
        Some(prompt) => Ok(Some(format!("{prompt}\n\n{text}"))),
        None if text.is_empty() => Err(Stop::new(Exit::Usage, "there is no prompt: stdin is empty")),
        None => Ok(Some(text)),
    }
}

/// Whether stdin is a pipe or a file with something to say, not `/dev/null` or a terminal.
#[cfg(unix)]
fn is_pipe() -> bool {
    use std::os::unix::fs::FileTypeExt;
    // PORTABLE: both systems name the standard input so.
    std::fs::metadata("/dev/stdin").is_ok_and(|meta| meta.file_type().is_fifo() || meta.is_file())
}

#[cfg(not(unix))]
fn is_pipe() -> bool {
    !io::stdin().is_terminal()
}

async fn talk(greenroom: &Greenroom, args: &RunArgs, prompt: Option<String>) -> Result<Exit, Stop> {
    let mut signals = StopSignals::listen().map_err(|error| Stop::new(Exit::Software, error.to_string()))?;
    let talks = io::stderr().is_terminal();
    if talks {
        terminal::note("loading …");
    }
    let loaded = tokio::select! {
        loaded = greenroom.ready() => loaded,
        _ = signals.next() => return Ok(Exit::Interrupted),
    };
    if talks {
        terminal::note("\r         \r");
    }
    loaded.map_err(|message| Stop::new(Exit::Config, message))?;
    let mut history: Vec<ChatMessage> = Vec::new();
    history.extend(args.system.as_ref().map(|text| ChatMessage::text(Role::System, text)));
    match prompt {
        Some(prompt) => {
            history.push(ChatMessage::text(Role::User, prompt.clone()));
            let accepted = match greenroom.chat(request(args, &history)).await {
                Err(Refusal::Prepare(PrepareError::NoTemplate { .. })) => {
                    if args.system.is_some() {
                        let message =
                            "--system: the model has no chat template, so it takes no system prompt";
                        return Err(Stop::new(Exit::Usage, message));
                    }
                    greenroom.chat(continuation(args, prompt)).await
                }
                accepted => accepted,
            };
            match answer(accepted, args, &mut signals).await? {
                Ended::Whole(_) | Ended::PipeClosed => Ok(Exit::Ok),
                Ended::Interrupted(_) => Ok(Exit::Interrupted),
            }
        }
        None => chat(greenroom, args, history, &mut signals).await,
    }
}

async fn chat(
    greenroom: &Greenroom,
    args: &RunArgs,
    mut history: Vec<ChatMessage>,
    signals: &mut StopSignals,
) -> Result<Exit, Stop> {
    let begin = history.clone();
    let mut lines = stdin_lines();
    loop {
        terminal::note("> ");
        let line = tokio::select! {
            line = lines.recv() => line,
            _ = signals.next() => None,
        };
        let Some(line) = line else {
            terminal::note("\n");
            return Ok(Exit::Ok);
        };
        match line.trim() {
            "" => continue,
            "/exit" | "/bye" | "/quit" => return Ok(Exit::Ok),
            "/new" => {
                history.clone_from(&begin);
                continue;
            }
            text => history.push(ChatMessage::text(Role::User, text)),
        }
        match answer(greenroom.chat(request(args, &history)).await, args, signals).await {
            Ok(Ended::PipeClosed) => return Ok(Exit::Ok),
            Ok(Ended::Whole(text) | Ended::Interrupted(text)) => {
                history.push(ChatMessage::text(Role::Assistant, text));
            }
            Err(stop) => {
                // The chat goes on: the next message may be a shorter one.
                history.pop();
                terminal::complain(&stop.message);
            }
        }
    }
}

/// Lines of stdin, read on a thread of their own, which ends with the process:
/// a read cannot be called off.
fn stdin_lines() -> mpsc::Receiver<String> {
    let (tx, rx) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if tx.blocking_send(line).is_err() {
                return;
            }
        }
    });
    rx
}

async fn answer(
    accepted: Result<ChatStream, Refusal>,
    args: &RunArgs,
    signals: &mut StopSignals,
) -> Result<Ended, Stop> {
    let begun = Instant::now();
    let mut stream = accepted.map_err(|refusal| Stop::new(Exit::Failure, refusal.to_string()))?;
    let mut text = String::new();
    loop {
        let event = tokio::select! {
            event = stream.events.recv() => event,
            // Dropping the stream stops the answer.
            _ = signals.next() => {
                let _ = terminal::say("\n");
                return Ok(Ended::Interrupted(text));
            }
        };
        match event {
            Some(ChatEvent::Text(piece)) => {
                if terminal::say(&piece).is_err() {
                    return Ok(Ended::PipeClosed);
                }
                text.push_str(&piece);
            }
            Some(ChatEvent::Done { finish, usage, .. }) => {
                if !text.ends_with('\n') && terminal::say("\n").is_err() {
                    return Ok(Ended::PipeClosed);
                }
                finished(args, finish, usage, stream.seed, begun.elapsed());
                return Ok(Ended::Whole(text));
            }
            Some(ChatEvent::Failed(failure)) => return Err(Stop::new(Exit::Failure, failure.message)),
            // Thought is no part of what is asked for: it goes beside it.
            Some(ChatEvent::Reasoning(piece)) => terminal::note(&piece),
            Some(_) => {}
            None => return Err(Stop::new(Exit::Failure, "the answer broke off")),
        }
    }
}

fn finished(args: &RunArgs, finish: FinishReason, usage: Usage, seed: u64, took: Duration) {
    if finish == FinishReason::Length && io::stderr().is_terminal() {
        terminal::note("(cut: the limit of tokens was reached)\n");
    }
    if args.stats {
        let rate = f64::from(usage.completion_tokens) / took.as_secs_f64().max(1e-9);
        terminal::note(&format!(
            "prompt {} tokens ({} cached), answer {} tokens in {:.2} s ({rate:.1}/s), seed {seed}\n",
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            took.as_secs_f64()
        ));
    }
}
