//! The command line: one file a command. Only in the binary, never in the library.
//!
//! Installs what a library must not: the log's subscriber and signal handlers.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exit::Exit;

mod bench;
mod cache;
mod demo;
mod doctor;
mod explain;
mod home;
mod inspect;
mod log;
mod models;
mod progress;
mod pull;
mod render;
mod run;
mod serve;
mod service;
mod settings;
mod signals;
mod terminal;
mod transcribe;

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
  greenroom serve ORG/NAME                          a model of the hub, pulled where it is not here yet
  greenroom pull ORG/NAME:Q4_K_M                    one quantisation of a GGUF repository
  greenroom run ~/models/SmolLM2.gguf \"Why is the sky blue?\"
  greenroom transcribe talk.mp3 --format srt         what is said in a recording, and when
  greenroom bench                                   how fast it is
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
    /// Write down what is said in audio files
    Transcribe(Box<TranscribeArgs>),
    /// Get a model from the hub, or a demo model
    Pull(PullArgs),
    /// List the models on this machine: own folder and the hub's cache
    Models(ModelsArgs),
    /// Show what a model is made of, without loading it
    Inspect(InspectArgs),
    /// Print what a chat template makes of given variables
    Render(RenderArgs),
    /// Look into the prompt cache
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Say what this machine can do, what is wrong and how to mend it
    Doctor(DoctorArgs),
    /// Measure how fast a model is served, here or by another server
    Bench(Box<BenchArgs>),
}

/// Where the settings are read.
#[derive(Debug, Args)]
struct SettingsFile {
    /// Settings file; without it greenroom.toml in the data folder, where there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Flags of the settings that concern a model.
#[derive(Debug, Args)]
struct EngineArgs {
    #[command(flatten)]
    settings: SettingsFile,
    /// Device that computes
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Context in tokens; without it the model's own, or what of it fits the memory
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
  greenroom serve model.gguf --speech-model whisper-tiny.en
  greenroom serve model.gguf --cache-dir ~/.cache/greenroom --cache-ssd-gb 50
  greenroom serve --config /etc/greenroom.toml --service systemd model.gguf
Every setting: config/greenroom.toml. Each is also a variable: GREENROOM__HTTP__PORT=9000")]
struct ServeArgs {
    /// A .gguf file, a model folder or a hub id; without it the demo model
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
    /// Folder in which computed prompts outlive a restart; without it memory alone
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Gigabytes that this folder may hold
    #[arg(long, value_name = "N")]
    cache_ssd_gb: Option<f64>,
    /// Beside it a Whisper model for /v1/audio: a folder, a name in the folder of models or a hub id
    #[arg(long, value_name = "MODEL")]
    speech_model: Option<String>,
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
    /// A .gguf file, a model folder or a hub id
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
  greenroom transcribe talk.mp3                     with the demo speech model (Whisper tiny.en, English)
  greenroom transcribe talk.m4a --format srt --output subtitles
  greenroom transcribe recordings/ --model ~/models/whisper-base --language de
  arecord -f S16_LE -r 16000 -d 5 | greenroom transcribe -
Reads wav, flac, mp3, m4a (AAC-LC, ALAC), ogg and webm (Opus, Vorbis), aiff and caf, whatever the name. Models:
folders of openai/whisper-* and mlx-community/whisper-*, and CTranslate2's.")]
struct TranscribeArgs {
    /// Audio files; a folder stands for the audio in it, - for stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A Whisper model's folder; without it the demo speech model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// What is written
    #[arg(long, value_enum, default_value = "text")]
    format: TranscriptFormat,
    /// Give words times (in verbose-json; segments begin and end with them everywhere)
    #[arg(long)]
    words: bool,
    /// What is spoken: en, de, japanese, pt-BR; without it the first 30 seconds tell
    #[arg(long, value_name = "LANGUAGE")]
    language: Option<String>,
    /// Write English, whatever is spoken
    #[arg(long)]
    translate: bool,
    /// Text that is taken as having come before: names, spelling, style
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Search with so many beams, 1 to 16: slower, seldom better
    #[arg(long, value_name = "N", default_value_t = 1)]
    beam_size: usize,
    /// Pieces of a long recording that are decoded at a time, each for itself: faster, with a bit less context
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch_size: usize,
    /// Leave text of unlikely words out that has more silence than this around it; 2 is a good value
    #[arg(long, value_name = "SECONDS")]
    hallucination_silence: Option<f64>,
    /// Hear all of it, silence as well
    #[arg(long)]
    no_vad: bool,
    /// Write into this folder, named after the recordings, and not to stdout
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum TranscriptFormat {
    /// The text
    Text,
    /// Subtitles (SubRip)
    Srt,
    /// Subtitles (WebVTT)
    Vtt,
    /// OpenAI's short form
    Json,
    /// OpenAI's long form
    VerboseJson,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom pull demo                               the demo model of `greenroom serve`
  greenroom pull ORG/NAME                           a model folder, or the only GGUF file
  greenroom pull ORG/NAME:Q4_K_M@v1.0               one quantisation, at a tag
  greenroom pull ORG/NAME --file '*.json'           just these files
Files go to the cache that all programs of the hub share: HF_HOME and HF_HUB_CACHE name another place,
HF_TOKEN opens gated models, HF_ENDPOINT names a mirror, HF_HUB_OFFLINE=1 asks nobody. What breaks off is
taken up again by the same command. The last line on stdout is the model's path.")]
struct PullArgs {
    /// ORG/NAME[:QUANT][@REVISION], demo or demo-speech
    model: String,
    /// Only files that match: * is anything, ? one character; may be given several times
    #[arg(long, value_name = "GLOB")]
    file: Vec<String>,
    #[command(flatten)]
    settings: SettingsFile,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom models                                  name, size, family, context, whether it fits
  greenroom models --json | jq '.[].id'")]
struct ModelsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: SettingsFile,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom inspect model.gguf                      sizes, types, special tokens, memory
  greenroom inspect ORG/NAME --tensors              every tensor
  greenroom inspect model.gguf --template           the chat template alone
  greenroom inspect model.gguf --json | jq .details.memory")]
struct InspectArgs {
    /// A .gguf file, a model folder, or a hub id that was pulled; without it the demo model
    model: Option<String>,
    /// Print every tensor
    #[arg(long)]
    tensors: bool,
    /// Print the chat template and nothing else
    #[arg(long, conflicts_with_all = ["tensors", "json"])]
    template: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: SettingsFile,
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

#[derive(Debug, Subcommand)]
enum CacheCommand {
    /// List what is in the folder
    Ls(ListArgs),
    /// Sum up what is in the folder
    Stats(ListArgs),
    /// Read every byte in the folder and say what is damaged
    Verify(ListArgs),
    /// Remove segments, with all that build on them
    Rm(RemoveArgs),
    /// Say where two requests part, and what that costs
    Explain(ExplainArgs),
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The folder of `serve --cache-dir`; without it the settings' cache.dir
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingsFile,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom cache ls ~/.cache/greenroom
  greenroom cache stats --json | jq .bytes
  greenroom cache verify ~/.cache/greenroom         ends with 1 where a file is damaged
All three may be used beside a server.")]
struct ListArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom cache rm ~/.cache/greenroom --all
  greenroom cache rm ~/.cache/greenroom --namespace int8     those of which the name holds this
  greenroom cache rm ~/.cache/greenroom 00c0ffee00c0ffee
Not beside a server: that one forgets by DELETE /v1/cache?disk=true.")]
struct RemoveArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// Segments, as `cache ls` shows them
    #[arg(value_name = "SEGMENT", required_unless_present_any = ["all", "namespace"])]
    segments: Vec<String>,
    /// Those whose namespace holds this text
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    namespace: Option<String>,
    /// All of them
    #[arg(long, conflicts_with_all = ["segments", "namespace"])]
    all: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom cache explain first.json second.json --model model.gguf
  greenroom cache explain first.json second.json --tokens-per-s 180 --json | jq .hints
Both files hold a body of /v1/chat/completions, as a client sent it.")]
struct ExplainArgs {
    /// The earlier request
    a: PathBuf,
    /// The later one
    b: PathBuf,
    /// A .gguf file, a model folder or a hub id, for template and tokenizer; without it the demo model
    #[arg(long)]
    model: Option<String>,
    /// How fast prompts are computed there, to tell the cost in seconds
    #[arg(long, value_name = "N")]
    tokens_per_s: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: SettingsFile,
}

#[derive(Debug, Args)]
struct DoctorArgs {
    #[command(flatten)]
    settings: SettingsFile,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  greenroom bench model.gguf
  greenroom bench --url http://127.0.0.1:8080 --concurrency 8 --json
  greenroom bench model.gguf --context 4000 --concurrency 1
Nothing else should run meanwhile: look at the load average.")]
struct BenchArgs {
    /// A .gguf file, a model folder or a hub id; without it the demo model. With --url: the model's name there
    model: Option<String>,
    /// Tokens of the prompt whose computation is measured
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: u32,
    /// Tokens of the prompt that each client's answer continues
    #[arg(long, value_name = "N", default_value_t = 100)]
    context: u32,
    /// Tokens that each client asks for
    #[arg(long = "gen", value_name = "N", default_value_t = 128)]
    generate: u32,
    /// Clients at once
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 4, 8, 16])]
    concurrency: Vec<usize>,
    /// How often each figure is measured
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// Measure this server (any that has OpenAI's /v1/completions) instead
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// One JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
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
        Command::Transcribe(args) => (None, transcribe::transcribe(&args)),
        Command::Pull(args) => (None, pull::pull(&args)),
        Command::Models(args) => (None, models::models(&args)),
        Command::Inspect(args) => (None, inspect::inspect(&args)),
        Command::Render(args) => (None, render::render(&args)),
        Command::Cache(command) => {
            let done = match &command {
                CacheCommand::Ls(args) => cache::list(args),
                CacheCommand::Stats(args) => cache::stats(args),
                CacheCommand::Verify(args) => cache::check(args),
                CacheCommand::Rm(args) => cache::remove(args),
                CacheCommand::Explain(args) => explain::explain(args),
            };
            (None, done)
        }
        Command::Doctor(args) => (None, doctor::doctor(build, &args)),
        Command::Bench(args) => (None, bench::bench(&args)),
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
