//! How a pull looks: a bar on a terminal, plain lines elsewhere.

use std::cell::RefCell;
use std::io::IsTerminal;

use greenroom::model::hub::Progress;
use greenroom::types::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};

use super::terminal;

const BAR: &str = "{msg:.bold} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
/// Longest file name beside a bar.
const NAME_COLUMNS: usize = 32;

/// Progress on stderr.
pub(super) struct Report {
    on_terminal: bool,
    current: RefCell<Option<Current>>,
}

struct Current {
    file: String,
    bytes: u64,
    /// Quarters that were reported.
    quarters: u64,
    bar: Option<ProgressBar>,
}

impl Report {
    pub(super) fn new() -> Self {
        Self { on_terminal: std::io::stderr().is_terminal(), current: RefCell::new(None) }
    }
}

impl Progress for Report {
    fn note(&self, text: &str) {
        match self.current.borrow().as_ref().and_then(|current| current.bar.as_ref()) {
            Some(bar) => bar.println(text),
            None => terminal::note(&format!("{text}\n")),
        }
    }

    fn begin(&self, file: &str, bytes: u64) {
        let bar = self.on_terminal.then(|| {
            let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(bytes).with_style(style);
            let mut name: String = file.chars().take(NAME_COLUMNS).collect();
            if name.len() < file.len() {
                name.push('…');
            }
            bar.with_message(name)
        });
        if bar.is_none() {
            terminal::note(&format!("{file}  {}\n", ByteSize(bytes)));
        }
        *self.current.borrow_mut() = Some(Current { file: file.to_owned(), bytes, quarters: 0, bar });
    }

    fn at(&self, bytes: u64) {
        let mut current = self.current.borrow_mut();
        let Some(current) = current.as_mut() else { return };
        if let Some(bar) = &current.bar {
            bar.set_position(bytes);
            return;
        }
        let quarters = bytes.saturating_mul(4).checked_div(current.bytes).unwrap_or(4);
        // Small files are done before anybody has read a line about them.
        if quarters > current.quarters && quarters < 4 && current.bytes > 32 << 20 {
            terminal::note(&format!("{}  {} %\n", current.file, quarters * 25));
        }
        current.quarters = quarters;
    }

    fn end(&self) {
        if let Some(current) = self.current.borrow_mut().take()
            && let Some(bar) = current.bar
        {
            bar.finish();
        }
    }
}
