//! Where a model folder's text side may lie: templates, special and added tokens, ends, defaults.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::path::Path;
use std::time::SystemTime;

use common::{data, edit_json, tiny_copy};
use greenroom::model::load;
use greenroom::model::text::TextModel;
use greenroom::types::{ChatMessage, ChatRequest, LoadError, Role, TokenId};
use serde_json::{Value, json as value};

/// A copy of a tiny checkpoint without templates.
fn folder() -> tempfile::TempDir {
    let folder = tiny_copy("llama");
    change(folder.path(), "tokenizer_config.json", |settings| {
        settings.as_object_mut().expect("a map").remove("chat_template");
    });
    folder
}

fn change(folder: &Path, name: &str, edit: impl FnOnce(&mut Value)) {
    edit_json(&folder.join(name), edit);
}

fn write(folder: &Path, name: &str, content: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    std::fs::write(path, content).expect("writes");
}

fn open(folder: &Path) -> Result<TextModel, LoadError> {
    load::open_text(folder)
}

/// What the plain template says, and the one for tools.
fn says(folder: &Path) -> (Option<String>, Option<String>) {
    let text = open(folder).expect("opens");
    let render = |tools: Vec<Value>| {
        let messages = vec![ChatMessage::text(Role::User, "hi")];
        let request = ChatRequest { messages, tools, ..ChatRequest::default() };
        text.render(&request, SystemTime::UNIX_EPOCH).ok().map(|rendered| rendered.text())
    };
    (render(vec![]), render(vec![value!({"type": "function"})]))
}

#[test]
fn a_template_is_found_in_any_of_its_places() {
    let both = |plain: &str, tools: &str| (Some(format!("{plain}hi")), Some(format!("{tools}hi")));
    let folder = folder();
    let at = folder.path();
    assert_eq!(says(at), (None, None));
    change(at, "tokenizer_config.json", |settings| {
        settings["chat_template"] = "one{{ messages[0].content }}".into()
    });
    assert_eq!(says(at), both("one", "one"));
    change(at, "tokenizer_config.json", |settings| {
        settings["chat_template"] = value!([
            {"name": "tool_use", "template": "tools{{ messages[0].content }}"}, {"name": "rag", "template": "rag{{ messages[0].content }}"}, {"name": "default", "template": "default{{ messages[0].content }}"}
        ]);
    });
    assert_eq!(says(at), both("default", "tools"));
    change(at, "tokenizer_config.json", |settings| {
        settings["chat_template"] =
            value!({"default": "d{{ messages[0].content }}", "tool_use": "t{{ messages[0].content }}"});
    });
    assert_eq!(says(at), both("d", "t"));
    write(
        at,
        "chat_template.json",
        &value!({"chat_template": "from json{{ messages[0].content }}"}).to_string(),
    );
    assert_eq!(says(at), both("from json", "from json"));
    write(at, "chat_template.jinja", "from jinja{{ messages[0].content }}");
    assert_eq!(says(at), both("from jinja", "from jinja"));
    write(at, "additional_chat_templates/tool_use.jinja", "additional{{ messages[0].content }}");
    assert_eq!(says(at), both("from jinja", "additional"));
    for malformed in [value!(5), value!(true), value!([]), value!({"default": 1})] {
        let folder = self::folder();
        change(folder.path(), "tokenizer_config.json", |settings| settings["chat_template"] = malformed);
        assert!(open(folder.path()).is_err());
    }
}

#[test]
fn a_template_that_does_not_compile_is_refused_at_load_with_its_line_and_model() {
    let folder = folder();
    write(folder.path(), "chat_template.jinja", "fine\nfine\n{% if x %}");
    let error = open(folder.path()).expect_err("is refused").to_string();
    let name = folder.path().file_name().expect("a name").to_string_lossy().into_owned();
    assert!(error.contains(":3") && error.contains(&name), "{error}");
    write(folder.path(), "chat_template.jinja", "fine{{ messages[0].content }}");
    write(folder.path(), "additional_chat_templates/tool_use.jinja", "{{ oops");
    assert!(open(folder.path()).expect_err("is refused").to_string().contains(":1"));
}

#[test]
fn special_tokens_are_texts_or_objects_in_either_file() {
    let folder = folder();
    let at = folder.path();
    write(
        at,
        "chat_template.jinja",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages[0].content }}",
    );
    change(at, "tokenizer_config.json", |settings| {
        let map = settings.as_object_mut().expect("a map");
        map.insert("bos_token".into(), value!({"content": "<|im_start|>", "special": true}));
        map.remove("eos_token");
        map.remove("pad_token");
    });
    write(
        at,
        "special_tokens_map.json",
        &value!({"eos_token": "<|im_end|>", "pad_token": {"content": "<pad>"}}).to_string(),
    );
    assert_eq!(says(at).0.as_deref(), Some("<|im_start|>|<|im_end|>|<pad>|hi"));
}

#[test]
fn added_tokens_of_the_other_files_are_tokens() {
    let folder = folder();
    let at = folder.path();
    let size = open(at).expect("opens").tokenizer.vocab_size();
    change(at, "config.json", |config| config["vocab_size"] = (size + 2).into());
    change(at, "tokenizer_config.json", |settings| {
        settings["added_tokens_decoder"] =
            value!({size.to_string(): {"content": "<|extra|>", "special": true}});
    });
    write(at, "added_tokens.json", &value!({"<plain_one>": size + 1}).to_string());
    let text = open(at).expect("opens");
    assert_eq!(text.tokenizer.control_id("<|extra|>"), Some(TokenId(size)));
    let ids = text.tokenizer.encode_with_specials("<|extra|><plain_one>").expect("encodes");
    assert_eq!(ids, [TokenId(size), TokenId(size + 1)]);
    assert!(!text.tokenizer.is_control(TokenId(size + 1)));
    // An id that the vocabulary gives to another is a contradiction, not a guess.
    write(at, "added_tokens.json", &value!({"<plain_one>": 5}).to_string());
    let error = open(at).expect_err("is refused").to_string();
    assert!(error.contains("<plain_one>") && error.contains('5'), "{error}");
    write(at, "added_tokens.json", &value!({"<plain_one>": -5}).to_string());
    assert!(open(at).is_err());
}

#[test]
fn generation_config_gives_several_ends_and_greedy_defaults() {
    let folder = folder();
    write(
        folder.path(),
        "generation_config.json",
        &value!({"eos_token_id": [3, 7], "do_sample": false, "temperature": 0.9}).to_string(),
    );
    let text = open(folder.path()).expect("opens");
    assert!(text.end_tokens.contains(&TokenId(3)) && text.end_tokens.contains(&TokenId(7)));
    assert_eq!(text.defaults.temperature, Some(0.0));
}

#[test]
fn a_sentencepiece_model_alone_is_refused_with_what_to_do() {
    let folder = folder();
    std::fs::remove_file(folder.path().join("tokenizer.json")).expect("removes");
    write(folder.path(), "tokenizer.model", "x");
    let error = open(folder.path()).expect_err("is refused").to_string();
    assert!(error.contains("tokenizer.json") && error.contains("save_pretrained"), "{error}");
}

#[test]
fn what_a_template_can_do_is_among_the_models_facts() {
    let facts = load::open(&data("tiny/qwen3")).expect("opens").text.facts;
    let names: Vec<&str> = facts.iter().map(|(name, _)| name.as_str()).collect();
    for name in
        ["system role", "tools", "tool results", "thinking switch", "generation prompt", "strict alternation"]
    {
        assert!(names.contains(&name), "{names:?}");
    }
}
