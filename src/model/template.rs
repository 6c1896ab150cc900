//! Chat templates: minijinja with Hugging Face's environment, untrusted input.

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Its source.
    pub source: String,
}
