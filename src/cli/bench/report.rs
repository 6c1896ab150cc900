//! The figures for people and for scripts.

use std::fmt::Write;

use serde::Serialize;

use super::figures::{Burst, Prefill};

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Who was measured.
    pub(super) target: String,
    /// Tokens of the prompts of the prefill, about.
    pub(super) prompt: u32,
    /// Tokens of the clients' prompts, about.
    pub(super) context: u32,
    /// Tokens asked of each client.
    pub(super) generate: u32,
    /// How often each figure was measured.
    pub(super) rounds: u32,
    /// Median of the rounds.
    pub(super) prefill: Option<Prefill>,
    /// Medians of the rounds, one for each number of clients.
    pub(super) decode: Vec<Burst>,
    /// Most memory that this process held, bytes; `None` for another's.
    pub(super) peak_memory: Option<u64>,
    /// Rows that this process computes at once; `None` for another's.
    pub(super) rows: Option<usize>,
    /// Load average of the machine before.
    pub(super) load_before: Option<String>,
    /// And after.
    pub(super) load_after: Option<String>,
}

impl Report {
    pub(super) fn json(&self) -> String {
        // Our own types: nothing that could refuse to be written.
        serde_json::to_string_pretty(self)
            .map_or_else(|error| format!("{{\"error\": \"{error}\"}}\n"), |text| text + "\n")
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}, {} rounds, medians", self.target, self.rounds);
        let load = |load: &Option<String>| load.clone().unwrap_or_else(|| "unknown".to_owned());
        let _ = writeln!(
            text,
            "load average {} before, {} after",
            load(&self.load_before),
            load(&self.load_after)
        );
        if let Some(prefill) = &self.prefill {
            let _ = writeln!(
                text,
                "prefill  {:>8.1} tokens/s   {} tokens, first token after {:.0} ms",
                prefill.tokens_per_second, prefill.tokens, prefill.first_token_ms
            );
        }
        let _ = writeln!(
            text,
            "\n{} tokens for each client, after a prompt of about {}:",
            self.generate, self.context
        );
        let _ =
            writeln!(text, "clients  total tok/s  each tok/s  first token ms  gap p50 ms     p95     p99");
        for burst in &self.decode {
            let _ = writeln!(
                text,
                "{:>7}  {:>11.1}  {:>10.1}  {:>14.0}  {:>10.1}  {:>6.1}  {:>6.1}",
                burst.clients,
                burst.total_tokens_per_second,
                burst.client_tokens_per_second,
                burst.first_token_ms,
                burst.gap_p50_ms,
                burst.gap_p95_ms,
                burst.gap_p99_ms
            );
        }
        for burst in self.decode.iter().filter(|burst| burst.least_tokens < self.generate) {
            let _ = writeln!(
                text,
                "with {} clients an answer ended after {} of {} tokens",
                burst.clients, burst.least_tokens, self.generate
            );
        }
        if let Some(rows) = self.rows {
            let _ = writeln!(text, "up to {rows} rows at once");
        }
        if let Some(bytes) = self.peak_memory {
            let _ = writeln!(text, "\npeak memory {:.1} MiB", bytes as f64 / (1024.0 * 1024.0));
        }
        text
    }
}
