//! Tokenizer and incremental detokenizer.

/// Text to ids and back.
#[derive(Debug)]
pub struct Tokenizer {}
