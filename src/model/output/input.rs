//! An answer's text on its way through a reader: what came and was not used yet.

/// White space as it stands around markers.
pub(super) const SPACE: [char; 4] = [' ', '\n', '\r', '\t'];

/// Text in three stretches: kept (read, but it may have to be given back), rest (unread), and what
/// was committed, which is forgotten.
#[derive(Debug, Default)]
pub(super) struct Input {
    text: String,
    /// Where the kept stretch begins.
    start: usize,
    /// Where the rest begins.
    at: usize,
}

impl Input {
    /// Takes more text.
    pub fn push(&mut self, text: &str) {
        self.text.drain(..self.start);
        self.at -= self.start;
        self.start = 0;
        self.text.push_str(text);
    }

    /// Bytes that may still become anything.
    pub fn held(&self) -> usize {
        self.text.len() - self.start
    }

    /// What was not read yet.
    pub fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// What was read since the last commit.
    pub fn kept(&self) -> &str {
        &self.text[self.start..self.at]
    }

    /// Reads so many bytes of the rest.
    pub fn skip(&mut self, bytes: usize) {
        self.at += bytes;
    }

    /// Reads white space; the first character after it, if it has come.
    pub fn skip_space(&mut self) -> Option<char> {
        let rest = self.rest();
        let space = rest.len() - rest.trim_start_matches(SPACE).len();
        self.skip(space);
        self.rest().chars().next()
    }

    /// What was read will not be given back.
    pub fn commit(&mut self) {
        self.start = self.at;
    }

    /// What was read since the last commit becomes unread.
    pub fn rewind(&mut self) {
        self.at = self.start;
    }

    /// Reads all of the rest, for good.
    pub fn use_up(&mut self) {
        self.at = self.text.len();
        self.commit();
    }

    /// Everything that was not committed.
    pub fn take(&mut self) -> String {
        let left = self.text.split_off(self.start);
        (self.start, self.at) = (0, 0);
        self.text.clear();
        left
    }
}
