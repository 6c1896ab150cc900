//! The text side of a model: tokenizer, chat template, ends, defaults.
//!
//! Cheap to share (`Arc`), usable from any thread, no tensors. Preparation
//! threads render and encode with it, the scheduler detokenizes with it.

use crate::model::template::ChatTemplate;
use crate::model::tokenizer::Tokenizer;
use crate::types::{SamplingOptions, TokenId};

/// Everything about a model that is text.
#[derive(Debug)]
pub struct TextModel {
    /// Encoder and decoder.
    pub tokenizer: Tokenizer,
    /// `None` for a base model.
    pub template: Option<ChatTemplate>,
    /// Every id that ends a turn, not only the one in the metadata.
    pub end_tokens: Vec<TokenId>,
    /// The model's own limit in tokens.
    pub context: u32,
    /// The author's sampling defaults (`generation_config`).
    pub defaults: SamplingOptions,
    /// Facts for people: family, format, parameter count and so on, in order.
    pub facts: Vec<(String, String)>,
}
