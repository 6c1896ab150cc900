//! The command line: one file a command. Only in the binary, never in the library.
//!
//! Installs what a library must not: the log's subscriber and signal handlers.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exit::Exit;

mod doctor;
mod home;
mod log;
mod render;
mod run;
mod serve;
mod service;
mod settings;
mod signals;
mod terminal;

/// What was compiled in.
#[derive(Clone, Copy, Debug)]
pub struct Build {
    /// Our CPU backend.
    pub cpu: bool,
    /// MLX.
    pub mlx: bool,
    /// The scripted engine.
    pub fake: bool,
}

/// A command that cannot go on: one message, and how the process ends.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) exit: Exit,
    pub(crate) message: String,
}

impl Stop {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}

/// Language models on your own machine, behind OpenAI's API.
#[derive(Debug, Parser)]
#[command(
    name = "greenroom",
    version,
    after_help = "\
Examples:
  greenroom serve                                   the demo model on http://127.0.0.1:8080
  greenroom serve ~/models/Qwen3-0.6B-4bit --port 9000
  greenroom run ~/models/SmolLM2.gguf \"Why is the sky blue?\"
  greenroom doctor                                  what this machine can do, and what is wrong"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model: OpenAI's chat API and a chat page
    Serve(Box<ServeArgs>),
    /// Answer once, or chat in the terminal
    Run(Box<RunArgs>),
    /// Print what a chat template makes of given variables
    Render(RenderArgs),
    /// Say what this machine can do, what is wrong and how to mend it
    Doctor(DoctorArgs),
}

/// Flags of the settings that concern a model.
#[derive(Debug, Args)]
struct EngineArgs {
    /// Settings file; without it greenroom.toml in the data folder, where there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Device that computes
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Context in tokens; the model's own without it
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<u32>,
    /// Compute threads of the CPU backend
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Form of the log on stderr
    #[arg(long, value_enum)]
    log_format: Option<LogForm>,
    /// off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom serve model.gguf --port 0               any free port
  greenroom serve model.gguf --unix-socket /run/greenroom/api.sock
  greenroom serve --config /etc/greenroom.toml --service systemd model.gguf
Every setting: config/greenroom.toml. Each is also a variable: GREENROOM__HTTP__PORT=9000")]
struct ServeArgs {
    /// A .gguf file or a model folder; without it the demo model
    model: Option<String>,
    /// Address to listen on
    #[arg(long)]
    host: Option<String>,
    /// Port; 0 takes a free one
    #[arg(long)]
    port: Option<u16>,
    /// Listen on this Unix socket; also on a port where --port or --host is given
    #[arg(long, value_name = "PATH")]
    unix_socket: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Behave as this service manager expects
    #[arg(long, value_enum)]
    service: Option<service::Manager>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom run model.gguf \"Name three rivers.\"
  git diff | greenroom run model.gguf \"Summarise this change:\"
  greenroom run model.gguf                          a chat; /new begins again, /exit ends")]
struct RunArgs {
    /// A .gguf file or a model folder
    model: String,
    /// What to say; text from a pipe is added to it; without either a chat
    prompt: Option<String>,
    /// System prompt
    #[arg(long)]
    system: Option<String>,
    /// 0 takes the best token each time
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Smallest set of tokens with this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// The K best tokens; 0 = all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Most tokens of the answer
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Replays an answer
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Say on stderr how long it took
    #[arg(long)]
    stats: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom render chat_template.jinja variables.json
  greenroom render chat_template.jinja variables.json --bos '<s>' --eos '</s>' --now 2026-01-15T12:34:56Z
variables.json: {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"add_generation_prompt\": true}")]
struct RenderArgs {
    /// The template
    template: PathBuf,
    /// Its variables: a JSON object with messages, tools, add_generation_prompt and any other
    variables: PathBuf,
    /// Text of bos_token
    #[arg(long, value_name = "TEXT")]
    bos: Option<String>,
    /// Text of eos_token
    #[arg(long, value_name = "TEXT")]
    eos: Option<String>,
    /// What strftime_now sees, in UTC; without it the time it is
    #[arg(long, value_name = "ISO-TIME")]
    now: Option<String>,
}

#[derive(Debug, Args)]
struct DoctorArgs {
    /// Settings file; without it greenroom.toml in the data folder, where there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Device {
    /// Metal where there is one, else the CPU backend
    Auto,
    /// The CPU backend
    Cpu,
    /// MLX on any machine
    Mlx,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogForm {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// Parses the command line and runs the command.
pub fn run(build: Build) -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help goes to stdout, mistakes to stderr; a closed pipe is nobody's fault.
            let _ = error.print();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Ok,
                _ => service::exit_for(service::asked_for(std::env::args()), Exit::Usage),
            };
        }
    };
    let (manager, result) = match cli.command {
        Command::Serve(args) => (args.service, serve::serve(&args)),
        Command::Run(args) => (None, run::run(&args)),
        Command::Render(args) => (None, render::render(&args)),
        Command::Doctor(args) => (None, doctor::doctor(build, &args)),
    };
    match result {
        Ok(exit) => exit,
        Err(stop) => {
            if !stop.message.is_empty() {
                terminal::complain(&stop.message);
            }
            service::exit_for(manager, stop.exit)
        }
    }
}
