//! Processor time of this process's threads, by Linux' /proc. Elsewhere nothing is known and nothing is printed.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// What the client's thread is called.
pub const CLIENT: &str = "bench-client";
/// Threads that took less than this share of all are not printed.
const WORTH_PRINTING: f64 = 0.01;

/// How long each thread has run, by number.
pub struct ThreadTimes {
    threads: BTreeMap<u32, (String, Duration)>,
}

impl ThreadTimes {
    /// Until now.
    pub fn now() -> Self {
        // PORTABLE: Linux alone has it.
        let entries = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let threads = entries.filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(entry.path().join("comm")).ok()?.trim().to_owned();
            let times = fs::read_to_string(entry.path().join("schedstat")).ok()?;
            let nanoseconds = times.split_whitespace().next()?.parse().ok()?;
            Some((number, (name, Duration::from_nanos(nanoseconds))))
        });
        Self { threads: threads.collect() }
    }

    /// What was added since then.
    pub fn since(mut self, before: &Self) -> Self {
        for (number, (_, took)) in &mut self.threads {
            if let Some((_, earlier)) = before.threads.get(number) {
                *took = took.saturating_sub(*earlier);
            }
        }
        self
    }

    /// All threads but the client's, and the client's.
    pub fn of_server_and_client(&self) -> (Duration, Duration) {
        let sum = |client: bool| {
            self.threads.values().filter(|(name, _)| (name == CLIENT) == client).map(|(_, took)| *took).sum()
        };
        (sum(false), sum(true))
    }

    /// Names and times, the busiest first.
    pub fn busiest(&self) -> Vec<(&str, Duration)> {
        let all: Duration = self.threads.values().map(|(_, took)| *took).sum();
        let mut found: Vec<_> = self
            .threads
            .values()
            .filter(|(_, took)| took.as_secs_f64() >= WORTH_PRINTING * all.as_secs_f64() && !took.is_zero())
            .map(|(name, took)| (name.as_str(), *took))
            .collect();
        found.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        found
    }
}

/// Of 1, 5 and 15 minutes, where the system says it.
pub fn load_average() -> String {
    // PORTABLE: Linux alone has it.
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let said: Vec<&str> = text.split_whitespace().take(3).collect();
    if said.is_empty() { "unknown".to_owned() } else { said.join(" ") }
}
