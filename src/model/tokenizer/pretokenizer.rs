//! Pre-tokenizers by the names that GGUF files use.
//!
//! A GGUF file names the rule instead of holding it. A name we do not know is
//! refused: a near miss would give other ids and quietly worse answers.

use std::path::Path;

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

use crate::types::LoadError;

/// Values of `tokenizer.ggml.pre` that are understood.
pub const KNOWN_PRETOKENIZERS: &[&str] =
    &["smollm", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "gpt-2", "default"];

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What a name stands for.
pub(super) struct Rules {
    pub pre_tokenizer: PreTokenizerWrapper,
    pub normalizer: Option<NFC>,
    /// A piece that is a whole token is taken as it is, whatever the merges say.
    pub ignore_merges: bool,
    /// Whether prompts begin with BOS where the file does not say.
    pub bos_by_default: bool,
}

/// Looks a name up.
pub(super) fn rules(name: &str, path: &Path) -> Result<Rules, LoadError> {
    let plain = |pre_tokenizer| Rules {
        pre_tokenizer,
        normalizer: None,
        ignore_merges: false,
        bos_by_default: false,
    };
    let with_regex = PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true));
    let rules = match name {
        "gpt-2" => plain(with_regex),
        "smollm" => plain(sequence(vec![PreTokenizerWrapper::Digits(Digits::new(true)), with_regex])),
        "llama-bpe" | "llama3" | "llama-v3" => {
            Rules { ignore_merges: true, bos_by_default: true, ..plain(splits(&[LLAMA3], path)?) }
        }
        "qwen2" | "deepseek-r1-qwen" => Rules { normalizer: Some(NFC), ..plain(splits(&[QWEN2], path)?) },
        // Three passes: punctuation, the classic rule, then digits by threes.
        "default" => plain(splits(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], path)?),
        other => {
            return Err(LoadError::Unsupported {
                message: format!(
                    "pre-tokenizer `{other}` (tokenizer.ggml.pre) in {}; known: {}",
                    path.display(),
                    KNOWN_PRETOKENIZERS.join(", ")
                ),
            });
        }
    };
    Ok(rules)
}

fn splits(patterns: &[&str], path: &Path) -> Result<PreTokenizerWrapper, LoadError> {
    let mut steps = Vec::with_capacity(patterns.len() + 1);
    for pattern in patterns {
        let split =
            Split::new(SplitPattern::Regex((*pattern).to_owned()), SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| LoadError::Format {
                path: path.to_owned(),
                message: format!("pre-tokenizer expression: {error}"),
            })?;
        steps.push(PreTokenizerWrapper::Split(split));
    }
    steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)));
    Ok(sequence(steps))
}

fn sequence(steps: Vec<PreTokenizerWrapper>) -> PreTokenizerWrapper {
    PreTokenizerWrapper::Sequence(Sequence::new(steps))
}
