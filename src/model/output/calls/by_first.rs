//! Formats that models mix: JSON where a bracket comes first, else the other form.

use super::{JsonCalls, Reader, Step, Work};

/// Chooses by the first character that is no space.
#[derive(Debug)]
pub(in crate::model::output) struct ByFirst {
    brackets: &'static [char],
    json: JsonCalls,
    other: Box<dyn Reader>,
    /// Whether it is JSON, once that is known.
    is_json: Option<bool>,
}

impl ByFirst {
    /// JSON where one of the brackets comes first.
    pub fn new(brackets: &'static [char], json: JsonCalls, other: Box<dyn Reader>) -> Self {
        Self { brackets, json, other, is_json: None }
    }
}

impl Reader for ByFirst {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        if self.is_json.is_none() {
            let Some(first) = work.input.skip_space() else { return Step::Wait };
            self.is_json = Some(self.brackets.contains(&first));
        }
        if self.is_json == Some(true) { self.json.read(work) } else { self.other.read(work) }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        match self.is_json {
            Some(true) => self.json.finish(work),
            Some(false) => self.other.finish(work),
            None => {}
        }
    }
}
