//! The settings: one struct tree, every key with unit, default and range.
//!
//! A leaf. Sources, later wins: defaults, file, environment
//! (`GREENROOM__SECTION__KEY`), command line. `config/greenroom.toml` documents
//! every key and a test holds it to these defaults.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

mod load;
mod validate;

pub use load::{ConfigError, Sources};
pub use validate::Problem;

/// All settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// Listeners and limits of the HTTP side.
    pub http: HttpConfig,
    /// Which device, and its numerics.
    pub engine: EngineConfig,
    /// Our own CPU backend.
    pub cpu: CpuConfig,
    /// Rows, queue, steps.
    pub scheduler: SchedulerConfig,
    /// Reuse of what was computed.
    pub cache: CacheConfig,
    /// Speech.
    pub speech: SpeechConfig,
    /// The Hugging Face hub.
    pub hub: HubConfig,
    /// Operator's sampling defaults; unset = the model's own.
    pub sampling: SamplingConfig,
    /// Logs.
    pub log: LogConfig,
    /// Traces of requests.
    pub trace: TraceConfig,
}

/// Listeners and limits of the HTTP side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct HttpConfig {
    /// Address to listen on.
    pub host: String,
    /// Port; 0 = any free one.
    pub port: u16,
    /// Listen on `host` and `port`; off only where a Unix socket is set.
    pub tcp: bool,
    /// Also listen on this Unix socket (mode 0600).
    pub unix_socket: Option<PathBuf>,
    /// Largest JSON body, bytes.
    pub max_json_bytes: usize,
    /// Threads that serve connections.
    pub workers: usize,
    /// Go on answering a client that closed its write side; `false` takes that as having gone.
    pub allow_half_close: bool,
    /// Host names that may be asked for besides loopback ones and the listening address.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may call besides the server's own.
    pub allowed_origins: Vec<String>,
    /// Seconds between comments on a silent stream.
    pub heartbeat_s: u64,
    /// Seconds that open streams get when the server is asked to stop.
    pub drain_s: u64,
    /// Seconds in which a request's body must arrive.
    pub body_timeout_s: u64,
    /// Seconds that an idle connection is kept.
    pub keep_alive_s: u64,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8080,
            tcp: true,
            unix_socket: None,
            max_json_bytes: 32 * 1024 * 1024,
            workers: 2,
            allow_half_close: false,
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            heartbeat_s: 10,
            drain_s: 15,
            body_timeout_s: 60,
            keep_alive_s: 75,
        }
    }
}

/// Which device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// Metal where there is one, else the CPU backend.
    #[default]
    Auto,
    /// Our CPU backend.
    Cpu,
    /// MLX on any machine: Metal on a Mac, else MLX's CPU device.
    Mlx,
}

/// Which device, and its numerics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct EngineConfig {
    /// `auto`, `cpu` or `mlx`.
    pub device: DeviceChoice,
    /// Context in tokens; unset = the model's own, or what of it fits the memory.
    pub context: Option<u32>,
    /// Key-value memory in MiB; unset = what all rows can use, at most a quarter of the memory, at least one row.
    pub kv_memory_mib: Option<u64>,
    /// Memory in MiB that a model may need in all; unset = seven eighths of the machine's or container's.
    pub memory_mib: Option<u64>,
}

/// Activations inside the CPU backend's products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// Rounded to int8 by groups of 32: fast.
    #[default]
    Int8,
    /// Exact: weights are widened instead.
    F32,
}

/// Storage type of keys and values on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// Half the memory.
    #[default]
    F16,
    /// Exact.
    F32,
}

/// Our own CPU backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CpuConfig {
    /// `int8` or `f32`.
    pub activations: Activations,
    /// `f16` or `f32`.
    pub kv: KvType,
    /// Compute threads; unset = physical cores.
    pub threads: Option<usize>,
}

/// Rows, queue, steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SchedulerConfig {
    /// Requests computed together.
    pub max_rows: usize,
    /// Requests that may wait besides; more are refused with 429.
    pub max_queue: usize,
    /// Longest chunk of a prompt in one step, tokens.
    pub max_chunk_tokens: u32,
    /// Longest time between two tokens of a stream that prompts of others may cause, milliseconds.
    pub max_itl_ms: u64,
    /// The same as a multiple of what it would be without those prompts.
    pub max_itl_growth: f64,
    /// A waiting request rises by one priority class after so long, seconds.
    pub ageing_s: u64,
    /// A step that takes longer is reported as hanging, seconds.
    pub hang_timeout_s: u64,
    /// Propose tokens from the prompt and verify several in one step.
    pub prompt_lookup: bool,
    /// A client that reads nothing for so long loses its row, seconds.
    pub stall_timeout_s: u64,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_rows: 16,
            max_queue: 64,
            max_chunk_tokens: 512,
            max_itl_ms: 100,
            max_itl_growth: 1.8,
            ageing_s: 10,
            hang_timeout_s: 120,
            prompt_lookup: false,
            stall_timeout_s: 60,
        }
    }
}

/// How keys and values are written to disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SsdKv {
    /// As they are in memory: answers are the same to the last bit.
    #[default]
    Stored,
    /// Rounded to 8 bits: half the bytes, and answers that may differ from those computed anew.
    Q8,
}

/// The prompt cache: reuse of what was computed for requests that begin alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Keep what was computed.
    pub enabled: bool,
    /// Memory in MiB for what is kept; unset = what live requests leave of the key-value memory.
    pub memory_mib: Option<u64>,
    /// Folder of the tier on disk, which outlives restarts; unset = memory alone.
    pub dir: Option<PathBuf>,
    /// Gigabytes (10⁹ bytes) that the folder may hold.
    pub ssd_gb: f64,
    /// Most MiB a second that are written there.
    pub ssd_write_mib_s: u64,
    /// How state is written there.
    pub ssd_kv: SsdKv,
    /// Patterns of lines that differ in every request and are taken out where they lead a system prompt.
    pub nonce_lines: Vec<String>,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            memory_mib: None,
            dir: None,
            ssd_gb: 20.0,
            ssd_write_mib_s: 200,
            ssd_kv: SsdKv::Stored,
            nonce_lines: vec!["x-anthropic-billing-header: *;".into()],
        }
    }
}

impl CacheConfig {
    /// Bytes that the folder may hold.
    pub fn ssd_bytes(&self) -> u64 {
        (self.ssd_gb * 1e9) as u64
    }
}

/// The transcription service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SpeechConfig {
    /// A speech model's folder, or its name or hub id; unset = none beside a chat model.
    pub model: Option<String>,
    /// Load it at the start, not with the first recording.
    pub preload: bool,
    /// Load it at the start and keep it.
    pub resident: bool,
    /// Seconds without a recording after which its weights are given back.
    pub idle_unload_s: u64,
    /// Recordings that are worked on at a time.
    pub max_running: usize,
    /// Recordings that may wait besides; more are refused with 429.
    pub max_queue: usize,
    /// Largest recording, MiB as uploaded.
    pub max_file_mib: usize,
    /// Longest recording, seconds.
    pub max_seconds: u64,
    /// Live sessions that may be open; more are refused with 429.
    pub max_sessions: usize,
    /// Seconds without audio after which a session finishes by itself.
    pub session_idle_s: u64,
    /// Longest session, seconds of audio.
    pub session_max_s: u64,
    /// Seconds for which an ended session's text can still be fetched.
    pub session_keep_s: u64,
    /// Share of the compute thread's time while chat wants it as well; a chat model has 1.
    pub weight: f64,
}

impl Default for SpeechConfig {
    fn default() -> Self {
        Self {
            model: None,
            preload: false,
            resident: false,
            idle_unload_s: 300,
            max_running: 4,
            max_queue: 16,
            max_file_mib: 100,
            max_seconds: 14_400,
            max_sessions: 16,
            session_idle_s: 60,
            session_max_s: 7200,
            session_keep_s: 300,
            weight: 0.5,
        }
    }
}

/// The Hugging Face hub. Where it and its cache are, and the token, the variables of all its programs say
/// (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and so on).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct HubConfig {
    /// Ask nobody, as `HF_HUB_OFFLINE=1` does.
    pub offline: bool,
    /// Pull a hub id that is given to `serve` or `run` and is not whole on this machine.
    pub auto_pull: bool,
}

impl Default for HubConfig {
    fn default() -> Self {
        Self { offline: false, auto_pull: true }
    }
}

/// Operator's sampling defaults: used where a request says nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SamplingConfig {
    /// 0 = best token.
    pub temperature: Option<f32>,
    /// Tokens; 0 = all.
    pub top_k: Option<u32>,
    /// Probability.
    pub top_p: Option<f32>,
    /// Fraction.
    pub min_p: Option<f32>,
    /// 0.01 to 100; 1 = off.
    pub repetition_penalty: Option<f32>,
    /// Tokens an answer may have where a request sets no limit.
    pub max_tokens: Option<u32>,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct LogConfig {
    /// `text` or `json`.
    pub format: LogFormat,
    /// `off`, `error`, `warn`, `info`, `debug`, `trace`, or directives of tracing's filter as `warn,greenroom=debug`.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".into() }
    }
}

/// Traces of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct TraceConfig {
    /// How many are kept to be asked for; 0 = none.
    pub ring: usize,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self { ring: 256 }
    }
}

impl HttpConfig {
    /// How long open streams get when the server is asked to stop.
    pub fn drain(&self) -> Duration {
        Duration::from_secs(self.drain_s)
    }
}
