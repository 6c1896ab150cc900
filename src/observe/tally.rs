//! Counters of one kind, told apart by a word of ours.

use super::gauges::Counter;

/// Counters by label; what has no label of its own goes to the last.
#[derive(Debug)]
pub struct Tally {
    labels: &'static [&'static str],
    counters: Vec<Counter>,
}

impl Tally {
    /// One counter a label, all at zero.
    pub fn new(labels: &'static [&'static str]) -> Self {
        Self { labels, counters: labels.iter().map(|_| Counter::default()).collect() }
    }

    /// Adds one.
    pub fn up(&self, label: &str) {
        let known = self.labels.iter().position(|known| *known == label);
        if let Some(counter) = known.map_or(self.counters.last(), |index| self.counters.get(index)) {
            counter.up();
        }
    }

    /// Labels and sums, in the order of the labels.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.labels.iter().zip(&self.counters).map(|(label, counter)| (*label, counter.get()))
    }
}

/// Requests that were admitted, by their priority.
#[derive(Debug)]
pub struct Admitted(Tally);

impl Default for Admitted {
    fn default() -> Self {
        Self(Tally::new(&["interactive", "normal", "background"]))
    }
}

/// Requests that were not accepted, by the reason.
#[derive(Debug)]
pub struct Refusals(Tally);

impl Default for Refusals {
    fn default() -> Self {
        Self(Tally::new(&[
            "busy",
            "would_expire",
            "loading",
            "engine_failed",
            "draining",
            "unknown_model",
            "prompt",
            "internal",
        ]))
    }
}

impl std::ops::Deref for Admitted {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        &self.0
    }
}

impl std::ops::Deref for Refusals {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_label_has_its_sum_and_an_unknown_one_is_not_lost() {
        let tally = Tally::new(&["a", "other"]);
        tally.up("a");
        tally.up("b");
        tally.up("a");
        assert_eq!(tally.all().collect::<Vec<_>>(), [("a", 2), ("other", 1)]);
    }
}
