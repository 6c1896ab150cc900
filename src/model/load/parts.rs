//! Names of the files that a model is split into: `STEM-00002-of-00005.EXTENSION`,
//! in GGUF and safetensors, on disk and in a repository of the hub.

/// A file's name taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartName<'a> {
    /// Before the numbers; may hold folders.
    pub stem: &'a str,
    /// As it is written, not checked against `count`.
    pub number: u64,
    /// How many parts there are.
    pub count: u64,
    /// After the last dot.
    pub extension: &'a str,
}

impl<'a> PartName<'a> {
    /// `None` for a name that does not have this form.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (front, extension) = name.rsplit_once('.')?;
        let (front, count) = front.rsplit_once("-of-")?;
        let (stem, number) = front.rsplit_once('-')?;
        let digits = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        Some(Self { stem, number: digits(number)?, count: digits(count)?, extension })
    }

    /// The name of another part.
    pub fn part(&self, number: u64) -> String {
        format!("{}-{number:05}-of-{:05}.{}", self.stem, self.count, self.extension)
    }
}
