//! Ranges of the settings. Reports every problem, not the first.
//!
//! Types and unknown keys are the loader's matter; where a value came from is too.

use std::fmt;

use super::Config;

/// Words for how much is logged.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// A setting with a value that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted name, as `http.port`.
    pub key: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

/// Collects problems.
#[derive(Default)]
struct Check(Vec<Problem>);

impl Check {
    fn that(&mut self, holds: bool, key: &str, message: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Problem { key: key.to_owned(), message: message() });
        }
    }

    fn within<T: PartialOrd + fmt::Display + Copy>(&mut self, key: &str, value: T, low: T, high: T) {
        self.that(value >= low && value <= high, key, || format!("{value} is not within {low} to {high}"));
    }

    fn within_option<T: PartialOrd + fmt::Display + Copy>(
        &mut self,
        key: &str,
        value: Option<T>,
        low: T,
        high: T,
    ) {
        if let Some(value) = value {
            self.within(key, value, low, high);
        }
    }
}

impl Config {
    /// Checks every range.
    ///
    /// # Errors
    /// All problems, in the order of the struct.
    pub fn validate(&self) -> Result<(), Vec<Problem>> {
        let mut check = Check::default();
        self.check_http(&mut check);
        self.check_compute(&mut check);
        self.check_sampling(&mut check);
        self.check_log(&mut check);
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }

    fn check_http(&self, check: &mut Check) {
        let http = &self.http;
        check.that(!http.host.trim().is_empty(), "http.host", || {
            "must not be empty; 127.0.0.1 is the loopback address".into()
        });
        check.that(http.tcp || http.unix_socket.is_some(), "http.tcp", || {
            "is off and http.unix_socket is not set: there would be nothing to listen on".into()
        });
        if let Some(path) = &http.unix_socket {
            let length = path.as_os_str().len();
            check.that(length > 0, "http.unix_socket", || "must not be empty".into());
            // The kernel's sockaddr_un holds 108 bytes on Linux and 104 on a Mac, the end included.
            check.that(length <= 103, "http.unix_socket", || {
                format!("the path has {length} bytes, the system's limit is 103")
            });
        }
        check.within("http.max_json_bytes", http.max_json_bytes, 1024, 4 << 30);
        check.within("http.workers", http.workers, 1, 64);
        check.within("http.heartbeat_s", http.heartbeat_s, 1, 3600);
        check.within("http.drain_s", http.drain_s, 0, 3600);
        check.within("http.body_timeout_s", http.body_timeout_s, 1, 86_400);
        check.within("http.keep_alive_s", http.keep_alive_s, 1, 86_400);
        for host in &http.allowed_hosts {
            check.that(is_host_name(host), "http.allowed_hosts", || {
                format!(
                    "`{host}` is not a host name; write it without scheme, port and path, as `box.example`"
                )
            });
        }
        for origin in &http.allowed_origins {
            check.that(is_origin(origin), "http.allowed_origins", || {
                format!("`{origin}` is not an origin; write scheme and host, as `https://chat.example`")
            });
        }
    }

    fn check_compute(&self, check: &mut Check) {
        check.within_option("engine.context", self.engine.context, 16, 1 << 24);
        check.within_option("engine.kv_memory_mib", self.engine.kv_memory_mib, 1, 1 << 24);
        check.within_option("engine.memory_mib", self.engine.memory_mib, 1, 1 << 30);
        check.within_option("cpu.threads", self.cpu.threads, 1, 1024);
        let scheduler = &self.scheduler;
        check.within("scheduler.max_rows", scheduler.max_rows, 1, 1024);
        check.within("scheduler.max_queue", scheduler.max_queue, 0, 100_000);
        check.within("scheduler.max_chunk_tokens", scheduler.max_chunk_tokens, 1, 65_536);
        check.within("scheduler.max_itl_ms", scheduler.max_itl_ms, 1, 60_000);
        check.within("scheduler.max_itl_growth", scheduler.max_itl_growth, 1.0, 1000.0);
        check.within("scheduler.hang_timeout_s", scheduler.hang_timeout_s, 1, 86_400);
        check.within("scheduler.ageing_s", scheduler.ageing_s, 1, 86_400);
        check.within("scheduler.stall_timeout_s", scheduler.stall_timeout_s, 1, 86_400);
        check.within_option("cache.memory_mib", self.cache.memory_mib, 1, 1 << 24);
        check.within("cache.ssd_gb", self.cache.ssd_gb, 0.00001, 1_000_000.0);
        check.within("cache.ssd_write_mib_s", self.cache.ssd_write_mib_s, 1, 1 << 20);
        let speech = &self.speech;
        check.within("speech.idle_unload_s", speech.idle_unload_s, 0, 31_536_000);
        check.within("speech.max_running", speech.max_running, 1, 64);
        check.within("speech.max_queue", speech.max_queue, 0, 10_000);
        check.within("speech.max_file_mib", speech.max_file_mib, 1, 4096);
        check.within("speech.max_seconds", speech.max_seconds, 1, 86_400);
        check.within("speech.max_sessions", speech.max_sessions, 1, 1024);
        check.within("speech.session_idle_s", speech.session_idle_s, 1, 86_400);
        check.within("speech.session_max_s", speech.session_max_s, 1, 86_400);
        check.within("speech.session_keep_s", speech.session_keep_s, 1, 86_400);
        check.within("speech.weight", speech.weight, 0.01, 100.0);
        check.within("trace.ring", self.trace.ring, 0, 4096);
    }

    fn check_sampling(&self, check: &mut Check) {
        let sampling = &self.sampling;
        check.within_option("sampling.temperature", sampling.temperature, 0.0, 100.0);
        check.within_option("sampling.top_p", sampling.top_p, 0.0, 1.0);
        check.within_option("sampling.min_p", sampling.min_p, 0.0, 1.0);
        check.within_option("sampling.max_tokens", sampling.max_tokens, 1, u32::MAX);
        check.within_option("sampling.repetition_penalty", sampling.repetition_penalty, 0.01, 100.0);
    }

    fn check_log(&self, check: &mut Check) {
        let level = self.log.level.trim();
        let levels = LEVELS.join(", ");
        check.that(!level.is_empty(), "log.level", || format!("must not be empty; one of {levels}"));
        // Directives about spans have commas of their own: those are left to the filter.
        let parts: Vec<&str> = if level.contains('[') { Vec::new() } else { level.split(',').collect() };
        let is_level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level));
        // The filter would take an unknown word for a target, and silence all others.
        for word in parts.into_iter().map(str::trim).filter(|part| !part.is_empty() && !part.contains('=')) {
            check.that(is_level(word), "log.level", || format!("`{word}` is not one of {levels}"));
        }
    }
}

/// Whether this is `*`, or a name or address without scheme, port or path.
fn is_host_name(text: &str) -> bool {
    text == "*"
        || text.parse::<std::net::Ipv6Addr>().is_ok()
        || (!text.is_empty()
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_')))
}

/// Whether this is `*`, `null`, or `scheme://host[:port]`.
fn is_origin(text: &str) -> bool {
    if text == "*" || text == "null" {
        return true;
    }
    text.split_once("://").is_some_and(|(scheme, rest)| {
        !scheme.is_empty()
            && !rest.is_empty()
            && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'))
            && !rest.contains(['/', ' ', '?', '#', '@'])
    })
}
