//! A text model without a model: bytes as tokens, ChatML as template.
//!
//! For the scripted engine, and wherever a test needs text but no weights.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::Map;

use super::TextModel;
use crate::model::template::ChatTemplate;
use crate::model::tokenizer::{BpeParts, BpeToken, TokenKind, Tokenizer};
use crate::types::{SamplingOptions, TokenId};

const TEMPLATE: &str = "\
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}\n\
{{ message.content or '' }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{{ call.id or '' }}{% endfor %}\
<|im_end|>\n{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}";

impl TextModel {
    /// The text side of the scripted engine: ids 0 to 255 are bytes, 256 is `<|im_start|>`,
    /// 257 is `<|im_end|>` and ends a turn; a context of 4096 tokens.
    pub fn scripted() -> Self {
        // PANIC: vocabulary and template are constants, and a test builds them.
        Self::try_scripted().unwrap_or_else(|message| unreachable!("scripted text model: {message}"))
    }

    fn try_scripted() -> Result<Self, String> {
        let mut tokens: Vec<BpeToken> = (0..=255)
            .map(|byte| BpeToken {
                text: crate::model::tokenizer::byte_char(byte).to_string(),
                kind: TokenKind::Normal,
            })
            .collect();
        for text in ["<|im_start|>", "<|im_end|>"] {
            tokens.push(BpeToken { text: text.into(), kind: TokenKind::Control });
        }
        let parts =
            BpeParts { tokens, merges: Vec::new(), pre: "gpt-2".into(), bos: None, add_bos: Some(false) };
        let tokenizer =
            Tokenizer::from_bpe(parts, Path::new("scripted")).map_err(|error| error.to_string())?;
        Ok(Self {
            name: "scripted".into(),
            tokenizer,
            template: Some(ChatTemplate::compile(TEMPLATE.into(), Map::new())?),
            end_tokens: vec![TokenId(257)],
            context: 4096,
            defaults: SamplingOptions::default(),
            facts: vec![("family".into(), "scripted".into())],
            answers: OnceLock::new(),
        })
    }
}
