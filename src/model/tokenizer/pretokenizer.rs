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
pub const KNOWN_PRETOKENIZERS: &[&str] = &[
    "chatglm-bpe",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "glm4",
    "gpt-2",
    "gpt-4o",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "llama4",
    "olmo",
    "phi-2",
    "qwen2",
    "qwen35",
    "refact",
    "smaug-bpe",
    "smollm",
    "starcoder",
    "tekken",
];

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &[&str] = &[
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
/// By code points, for editors may normalise such letters. The look-behind changes nothing but the time: a run of spaces is tried from its beginning alone.
const DEEPSEEK_LLM: &[&str] = &[
    r"[\r\n]",
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"(?<!\s)\s+$",
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}+",
];
const DEEPSEEK_CODER: &[&str] = &[
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
];
/// Three passes: punctuation, the classic rule, then digits by threes.
const DEFAULT: &[&str] = &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

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
    let classic = || PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true));
    let digits = || plain(sequence(vec![PreTokenizerWrapper::Digits(Digits::new(true)), classic()]));
    let rules = match name {
        "gpt-2" | "phi-2" => plain(classic()),
        "olmo" => Rules { normalizer: Some(NFC), ..plain(classic()) },
        "smollm" | "starcoder" | "refact" => digits(),
        "command-r" => Rules { normalizer: Some(NFC), bos_by_default: true, ..digits() },
        "llama-bpe" | "llama3" | "llama-v3" => {
            Rules { ignore_merges: true, bos_by_default: true, ..plain(splits(&[LLAMA3], path)?) }
        }
        "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" => plain(splits(&[LLAMA3], path)?),
        "qwen2" | "deepseek-r1-qwen" => Rules { normalizer: Some(NFC), ..plain(splits(&[QWEN2], path)?) },
        "qwen35" => Rules { normalizer: Some(NFC), ..plain(splits(&[QWEN35], path)?) },
        "gpt-4o" | "llama4" => Rules { ignore_merges: true, ..plain(splits(&[GPT4O], path)?) },
        "tekken" => Rules { ignore_merges: true, bos_by_default: true, ..plain(splits(&[TEKKEN], path)?) },
        "deepseek-v3" => plain(splits(DEEPSEEK_V3, path)?),
        "deepseek-llm" => plain(splits(DEEPSEEK_LLM, path)?),
        "deepseek-coder" => plain(splits(DEEPSEEK_CODER, path)?),
        "default" => plain(splits(DEFAULT, path)?),
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
