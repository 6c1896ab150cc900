//! Tokenizer, template, ends and defaults of a model folder.

use std::path::Path;

use serde_json::{Map, Value};

use super::super::{ends, malformed, model_id};
use super::{optional_bytes, optional_json};
use crate::model::template::ChatTemplate;
use crate::model::text::TextModel;
use crate::model::tokenizer::Tokenizer;
use crate::types::LoadError;

const SPECIAL: &[&str] =
    &["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The text side; `facts` are filled in by the caller.
pub(super) fn text_model(folder: &Path, config: &Value) -> Result<TextModel, LoadError> {
    let config_path = folder.join("config.json");
    let generation = optional_json(&folder.join("generation_config.json"))?.unwrap_or(Value::Null);
    let settings = optional_json(&folder.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
    let special = special_texts(&settings);
    let tokenizer = tokenizer(folder, &settings, &special)?;

    // A model that was made for more than text describes its text part apart.
    let text = |key: &str| config.get("text_config").and_then(|text| text.get(key));
    let number = |key: &str| {
        let value = config
            .get(key)
            .or_else(|| text(key))
            .and_then(Value::as_u64)
            .and_then(|value| u32::try_from(value).ok());
        value
            .filter(|value| *value > 0)
            .ok_or_else(|| malformed(&config_path, format!("`{key}` is missing or out of range")))
    };
    let (rows, context) = (number("vocab_size")?, number("max_position_embeddings")?);
    // Embeddings are often padded, but an id without a row would read beyond them.
    if tokenizer.vocab_size() > rows {
        let message = format!("{} token ids, but `vocab_size` is {rows}", tokenizer.vocab_size());
        return Err(malformed(&config_path, message));
    }
    let eos = special.get("eos_token").and_then(Value::as_str).and_then(|text| tokenizer.control_id(text));
    let declared = ends::ids(generation.get("eos_token_id"))
        .into_iter()
        .chain(ends::ids(config.get("eos_token_id")))
        .chain(eos);
    let end_tokens = ends::end_tokens(&tokenizer, declared);
    let template = template_source(folder, &settings)?
        .map(|source| ChatTemplate::compile(source, special))
        .transpose()
        .map_err(|message| malformed(folder, format!("the chat template does not compile: {message}")))?;
    Ok(TextModel {
        name: model_id(folder),
        tokenizer,
        template,
        end_tokens,
        context,
        defaults: ends::defaults(&generation),
        facts: Vec::new(),
    })
}

fn tokenizer(folder: &Path, settings: &Value, special: &Map<String, Value>) -> Result<Tokenizer, LoadError> {
    let path = folder.join("tokenizer.json");
    let Some(json) = optional_bytes(&path)? else {
        let message = if folder.join("tokenizer.model").is_file() {
            format!("{} has tokenizer.model alone; tokenizer.json is needed", folder.display())
        } else {
            format!("{} is missing", path.display())
        };
        return Err(LoadError::NotFound { message });
    };
    let bos = special.get("bos_token").and_then(Value::as_str);
    let add_bos = settings.get("add_bos_token").and_then(Value::as_bool);
    let eos = special.get("eos_token").and_then(Value::as_str);
    Tokenizer::from_json(&json, bos, eos, add_bos, &path)
}

/// The template's variables for special tokens: texts, however they are written.
fn special_texts(settings: &Value) -> Map<String, Value> {
    let mut special = Map::new();
    for name in SPECIAL {
        let value = settings.get(*name);
        let text = value.and_then(|value| value.as_str().or_else(|| value.get("content")?.as_str()));
        if let Some(text) = text {
            special.insert((*name).to_owned(), text.into());
        }
    }
    special
}

/// The template: a file of its own, else in the tokenizer's settings, there perhaps one of several.
fn template_source(folder: &Path, settings: &Value) -> Result<Option<String>, LoadError> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = optional_bytes(&path)? {
        return String::from_utf8(bytes).map(Some).map_err(|_| malformed(&path, "is not UTF-8"));
    }
    let separate = optional_json(&folder.join("chat_template.json"))?;
    let value = separate
        .as_ref()
        .and_then(|json| json.get("chat_template"))
        .or_else(|| settings.get("chat_template"));
    let text = |value: &Value| value.as_str().map(str::to_owned);
    match value {
        Some(Value::Array(named)) => {
            let is_default = |item: &&Value| item.get("name").and_then(Value::as_str) == Some("default");
            let chosen = named.iter().find(is_default).or_else(|| named.first());
            Ok(chosen.and_then(|item| item.get("template")).and_then(text))
        }
        Some(value) => Ok(text(value)),
        None => Ok(None),
    }
}
