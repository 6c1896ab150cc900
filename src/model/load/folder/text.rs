//! Tokenizer, template, ends and defaults of a model folder.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use super::super::{ends, malformed, model_id};
use super::{optional_bytes, optional_json};
use crate::model::families;
use crate::model::template::ChatTemplate;
use crate::model::text::TextModel;
use crate::model::tokenizer::Tokenizer;
use crate::types::{LoadError, TokenId};

const SPECIAL: &[&str] =
    &["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The name of the template for requests that offer tools.
const TOOL_USE: &str = "tool_use";

/// The text side; `facts` are filled in by the caller.
pub(super) fn text_model(folder: &Path, config: &Value) -> Result<TextModel, LoadError> {
    let config_path = folder.join("config.json");
    let generation = optional_json(&folder.join("generation_config.json"))?.unwrap_or(Value::Null);
    let settings = optional_json(&folder.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
    let map = optional_json(&folder.join("special_tokens_map.json"))?.unwrap_or(Value::Null);
    let special = special_texts(&settings, &map);
    let tokenizer = tokenizer(folder, &settings, &special)?;

    // A model that was made for more than text describes its text part apart.
    let text = |key: &str| config.get("text_config").and_then(|text| text.get(key));
    // Published configurations leave out what their family has as a default.
    let family_default = |key: &str| {
        let is_absent = config.get(key).or_else(|| text(key)).is_none();
        let sizes = is_absent.then(|| families::sizes_of(&config_path, config).ok()).flatten()?;
        Some(if key == "vocab_size" { sizes.vocab as u64 } else { sizes.context.into() })
    };
    let number = |key: &str| {
        let value = config
            .get(key)
            .or_else(|| text(key))
            .and_then(Value::as_u64)
            .or_else(|| family_default(key))
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
    let template = template(folder, &settings, &special)?;
    Ok(TextModel {
        name: model_id(folder),
        tokenizer,
        template,
        end_tokens,
        context,
        defaults: ends::defaults(&generation),
        facts: Vec::new(),
        answers: OnceLock::new(),
    })
}

fn tokenizer(folder: &Path, settings: &Value, special: &Map<String, Value>) -> Result<Tokenizer, LoadError> {
    let path = folder.join("tokenizer.json");
    let Some(json) = optional_bytes(&path)? else {
        let message = if folder.join("tokenizer.model").is_file() {
            format!(
                "{} has tokenizer.model alone; tokenizer.json is needed: load the folder with transformers' AutoTokenizer \
                 and save it again with save_pretrained, or use the model's GGUF file",
                folder.display()
            )
        } else {
            format!("{} is missing", path.display())
        };
        return Err(LoadError::NotFound { message });
    };
    let added = added_tokens(folder, settings)?;
    let json = with_added(json, &added, &path)?;
    let bos = special.get("bos_token").and_then(Value::as_str);
    let add_bos = settings.get("add_bos_token").and_then(Value::as_bool);
    let eos = special.get("eos_token").and_then(Value::as_str);
    let tokenizer = Tokenizer::from_json(&json, bos, eos, add_bos, &path)?;
    for (id, token) in &added {
        let text = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let bytes = tokenizer.token_bytes(TokenId(*id));
        if bytes != text.as_bytes() && bytes != text.replace('\u{2581}', " ").as_bytes() {
            let message = format!("the added token `{text}` should have the id {id}, which is another's");
            return Err(malformed(&path, message));
        }
    }
    Ok(tokenizer)
}

/// Tokens that the folder's other files add, by id: `added_tokens_decoder` of the tokenizer's
/// settings, and `added_tokens.json`.
fn added_tokens(folder: &Path, settings: &Value) -> Result<BTreeMap<u32, Value>, LoadError> {
    let mut added = BTreeMap::new();
    let path = folder.join("added_tokens.json");
    let older = optional_json(&path)?.unwrap_or(Value::Null);
    for (text, id) in older.as_object().into_iter().flatten() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| malformed(&path, format!("the id of `{text}` is not a token id")))?;
        // Nothing else is said about these; what steers is known by its form.
        added.insert(id, json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false}));
    }
    let path = folder.join("tokenizer_config.json");
    for (id, token) in settings.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
        let number = id.parse::<u32>();
        let number = number
            .map_err(|_| malformed(&path, format!("added_tokens_decoder: `{id}` is not a token id")))?;
        let text = token.get("content").and_then(Value::as_str);
        let text = text
            .ok_or_else(|| malformed(&path, format!("added_tokens_decoder: token {id} has no `content`")))?;
        let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
        let whole = json!({
            "id": number,
            "content": text,
            "single_word": flag("single_word"),
            "lstrip": flag("lstrip"),
            "rstrip": flag("rstrip"),
            "normalized": flag("normalized"),
            "special": flag("special"),
        });
        added.insert(number, whole);
    }
    Ok(added)
}

/// The `tokenizer.json` with those added tokens that it lacks.
fn with_added(json: Vec<u8>, added: &BTreeMap<u32, Value>, path: &Path) -> Result<Vec<u8>, LoadError> {
    if added.is_empty() {
        return Ok(json);
    }
    let mut document: Value =
        serde_json::from_slice(&json).map_err(|error| malformed(path, error.to_string()))?;
    let Some(whole) = document.as_object_mut() else { return Err(malformed(path, "is not an object")) };
    let listed = whole.entry("added_tokens").or_insert_with(|| Value::Array(Vec::new()));
    let Some(listed) = listed.as_array_mut() else {
        return Err(malformed(path, "`added_tokens` is not a list"));
    };
    let known: HashSet<String> =
        listed.iter().filter_map(|token| Some(token.get("content")?.as_str()?.to_owned())).collect();
    let missing = added.values().filter(|token| {
        token.get("content").and_then(Value::as_str).is_some_and(|text| !known.contains(text))
    });
    let before = listed.len();
    listed.extend(missing.cloned());
    if listed.len() == before {
        return Ok(json);
    }
    serde_json::to_vec(&document).map_err(|error| malformed(path, error.to_string()))
}

/// The template's variables for special tokens: texts, however they are written.
fn special_texts(settings: &Value, map: &Value) -> Map<String, Value> {
    let mut special = Map::new();
    for name in SPECIAL {
        let text = |file: &Value| {
            let value = file.get(*name)?;
            value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
        };
        if let Some(text) = text(settings).or_else(|| text(map)) {
            special.insert((*name).to_owned(), text.into());
        }
    }
    special
}

/// A model's templates by their purpose.
#[derive(Default)]
struct Sources {
    plain: Option<String>,
    /// For requests that offer tools.
    tools: Option<String>,
}

fn template(
    folder: &Path,
    settings: &Value,
    special: &Map<String, Value>,
) -> Result<Option<ChatTemplate>, LoadError> {
    let sources = template_sources(folder, settings)?;
    let compile = |source: String| {
        ChatTemplate::load(source, special.clone()).map_err(|message| malformed(folder, message))
    };
    let plain = sources.plain.map(compile).transpose()?;
    let tools = sources.tools.map(compile).transpose()?;
    Ok(match (plain, tools) {
        (Some(plain), Some(tools)) => Some(plain.with_tools_template(tools)),
        (plain, tools) => plain.or(tools),
    })
}

/// The templates: files of their own, else in the tokenizer's settings, there perhaps several.
fn template_sources(folder: &Path, settings: &Value) -> Result<Sources, LoadError> {
    let file = |path: &Path| match optional_bytes(path)? {
        Some(bytes) => String::from_utf8(bytes).map(Some).map_err(|_| malformed(path, "is not UTF-8")),
        None => Ok(None),
    };
    let tools = file(&folder.join("additional_chat_templates").join(format!("{TOOL_USE}.jinja")))?;
    if let Some(plain) = file(&folder.join("chat_template.jinja"))? {
        return Ok(Sources { plain: Some(plain), tools });
    }
    let separate = optional_json(&folder.join("chat_template.json"))?;
    let value = separate
        .as_ref()
        .and_then(|json| json.get("chat_template"))
        .or_else(|| settings.get("chat_template"));
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut sources = match value {
        Some(Value::Array(named)) => {
            let is = |item: &Value, name: &str| item.get("name").and_then(Value::as_str) == Some(name);
            let source = |item: &Value| item.get("template").and_then(text);
            let plain = named.iter().find(|item| is(item, "default"));
            let plain = plain.or_else(|| named.iter().find(|item| !is(item, TOOL_USE)));
            let tools = named.iter().find(|item| is(item, TOOL_USE));
            Sources { plain: plain.and_then(source), tools: tools.and_then(source) }
        }
        Some(Value::Object(named)) => {
            Sources { plain: named.get("default").and_then(text), tools: named.get(TOOL_USE).and_then(text) }
        }
        Some(Value::String(source)) => Sources { plain: Some(source.clone()), tools: None },
        Some(_) | None => Sources::default(),
    };
    if sources.plain.is_none() && sources.tools.is_none() && value.is_some_and(|value| !value.is_null()) {
        return Err(malformed(folder, "`chat_template` is neither a text nor templates by name"));
    }
    sources.tools = tools.or(sources.tools);
    Ok(sources)
}
