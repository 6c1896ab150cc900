//! What templates are found to do, and conversations that they cannot take as they are.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::time::SystemTime;

use common::{data, json};
use greenroom::model::template::{Capabilities, ChatTemplate};
use greenroom::model::text::TextModel;
use greenroom::types::{ChatMessage, ChatRequest, PrepareError, Role, ToolCall};
use serde_json::{Map, Value, json as value};

/// Neither a system role nor neighbours of one role, as early instruction models have it.
const STRICT: &str = "{% for m in messages %}\
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant.') }}{% endif %}\
    {% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}";

fn published(name: &str) -> ChatTemplate {
    let golden = json(&format!("chat-templates/golden/{name}.json"));
    let source = std::fs::read_to_string(data(&format!("chat-templates/{name}.jinja"))).expect("a template");
    let special = golden["special_tokens"].as_object().expect("special tokens").clone();
    ChatTemplate::compile(source, special).expect("compiles")
}

fn with(template: ChatTemplate) -> TextModel {
    let mut text = TextModel::scripted();
    text.template = Some(template);
    text
}

fn own(source: &str) -> TextModel {
    with(ChatTemplate::compile(source.into(), Map::new()).expect("compiles"))
}

fn say(role: Role, content: &str) -> ChatMessage {
    ChatMessage::text(role, content)
}

fn render(text: &TextModel, messages: Vec<ChatMessage>) -> Result<String, PrepareError> {
    let request = ChatRequest { messages, ..ChatRequest::default() };
    text.render(&request, SystemTime::UNIX_EPOCH).map(|rendered| rendered.text())
}

use Role::{Assistant, System, Tool, User};

#[test]
fn published_templates_are_found_to_do_what_they_do() {
    let facts = |name: &str| -> Vec<String> {
        published(name).capabilities().facts().into_iter().map(|(_, value)| value).collect()
    };
    // System role, tools, tool results, thinking switch, generation prompt, strict alternation.
    assert_eq!(facts("Qwen-Qwen3-0.6B"), ["yes", "yes", "yes", "enable_thinking", "yes", "no"]);
    assert_eq!(facts("SmolLM2-135M-Instruct-gguf"), ["yes", "no", "yes", "none", "yes", "no"]);
    assert_eq!(facts("google-gemma-2-2b-it"), ["no", "no", "no", "none", "yes", "yes"]);
    assert_eq!(facts("lenml-gemma3"), ["yes", "no", "no", "none", "yes", "yes"]);
    assert_eq!(facts("deepseek-ai-DeepSeek-V3.1"), ["yes", "no", "yes", "enable_thinking", "yes", "no"]);
    assert_eq!(facts("mistralai-Mistral-Nemo-Instruct-2407"), ["yes", "yes", "yes", "none", "no", "yes"]);
}

/// Whatever order people send: no template of the list refuses it, and no text is lost.
#[test]
fn no_published_template_refuses_or_loses_a_system_message_in_the_middle() {
    let words = ["passphrase-one", "question-two", "answer-three", "passphrase-four", "question-five"];
    for entry in std::fs::read_dir(data("chat-templates")).expect("a folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("a name");
        let Some(name) = name.strip_suffix(".jinja") else { continue };
        let text = with(published(name));
        if render(&text, vec![say(User, "Hi")]).is_err() {
            // It cannot do without a variable of its own.
            assert_eq!(name, "fireworks-ai-llama-3-firefunction-v2");
            continue;
        }
        let roles = [System, User, Assistant, System, User];
        let messages = roles.iter().zip(words).map(|(&role, word)| say(role, word)).collect();
        let got = render(&text, messages).unwrap_or_else(|error| panic!("{name}: {error}"));
        let places: Vec<_> = words.iter().map(|word| got.matches(word).count()).collect();
        assert!(places.iter().all(|count| *count >= 1), "{name}: {places:?}\n{got}");
    }
}

#[test]
fn a_strict_template_gets_system_text_in_the_first_turn_and_neighbours_as_one() {
    let text = own(STRICT);
    let can = text.template.as_ref().expect("a template").capabilities();
    assert!(!can.system_role && !can.system_anywhere && can.strict_alternation && !can.tools);
    let got = render(&text, vec![say(System, "Be brief."), say(User, "Hi"), say(User, "there")]);
    assert_eq!(got.as_deref(), Ok("[INST] Be brief.\n\nHi\n\nthere [/INST]"));
    let got = render(
        &text,
        vec![
            say(System, "A"),
            say(System, "B"),
            say(User, "c"),
            say(Assistant, "d"),
            say(System, "E"),
            say(User, "f"),
        ],
    );
    assert_eq!(got.as_deref(), Ok("[INST] A\n\nB\n\nc [/INST] d</s>[INST] E\n\nf [/INST]"));
    let got = render(&text, vec![say(System, "A"), say(Assistant, "b"), say(Assistant, "c"), say(User, "d")]);
    assert_eq!(got.as_deref(), Ok("[INST] A [/INST] b\n\nc</s>[INST] d [/INST]"));
    // What still does not alternate is refused in the template's own words.
    let refused = render(&text, vec![say(Assistant, "a"), say(User, "b")]);
    assert_eq!(
        refused,
        Err(PrepareError::Template { message: "Roles must alternate user/assistant.".into() })
    );
}

#[test]
fn a_template_that_can_print_a_conversation_gets_it_unchanged() {
    let text = own("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}");
    let messages = vec![
        say(System, "A"),
        say(System, "B"),
        say(User, "c"),
        say(User, "d"),
        say(System, "E"),
        say(User, "f"),
    ];
    assert_eq!(render(&text, messages).as_deref(), Ok("system:A;system:B;user:c;user:d;system:E;user:f;"));
    // Nor does one of which nothing can be found out.
    let odd = own(
        "{% if messages | length != 3 %}{{ raise_exception('three') }}{% endif %}{% for m in messages %}{{ m.role }};{% endfor %}",
    );
    let got = render(&odd, vec![say(System, "A"), say(User, "b"), say(User, "c")]);
    assert_eq!(got.as_deref(), Ok("system;user;user;"));
}

#[test]
fn an_empty_answer_at_the_end_is_absent_and_one_with_calls_is_not() {
    let text = with(published("Qwen-Qwen3-0.6B"));
    let asked = vec![say(User, "Hi")];
    let plain = render(&text, asked.clone());
    for empty in ["", " \n"] {
        let mut messages = asked.clone();
        messages.push(say(Assistant, empty));
        assert_eq!(render(&text, messages), plain);
    }
    let mut calling = say(Assistant, "");
    calling.content = None;
    calling.tool_calls = vec![ToolCall { id: None, name: "look_up".into(), arguments: value!({"q": "x"}) }];
    let got = render(&text, vec![say(User, "Hi"), calling]).expect("renders");
    assert!(got.contains("\"look_up\""), "{got}");
    assert!(got.ends_with("<|im_end|>\n<|im_start|>assistant\n"), "a new turn begins: {got}");
    // Alone it is all there is.
    assert!(render(&text, vec![say(Assistant, "")]).is_ok());
}

#[test]
fn calls_and_results_are_never_merged() {
    let text = own(STRICT);
    let mut calling = say(Assistant, "a");
    calling.tool_calls = vec![ToolCall { id: None, name: "f".into(), arguments: value!({}) }];
    let refused = render(&text, vec![say(User, "u"), calling.clone(), calling, say(Tool, "r")]);
    assert!(matches!(refused, Err(PrepareError::Field { .. })), "{refused:?}");
}

#[test]
fn probing_is_bounded_and_a_template_that_always_refuses_loads() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    for source in [endless, "{{ raise_exception('never') }}", "{{ nothing.at.all }}"] {
        let template = ChatTemplate::compile(source.into(), Map::new()).expect("compiles");
        let can: &Capabilities = template.capabilities();
        assert!(can.system_role && !can.tools && can.thinking.is_none(), "{source}: {can:?}");
    }
}

#[test]
fn the_template_for_tools_is_used_where_tools_are_offered() {
    let template = |source: &str| ChatTemplate::compile(source.into(), Map::new()).expect("compiles");
    let both = template("plain {{ messages[0].content }}")
        .with_tools_template(template("with {{ tools | tojson }} {{ messages[0].content }}"));
    assert!(both.capabilities().tools);
    let text = with(both);
    assert_eq!(render(&text, vec![say(User, "hi")]).as_deref(), Ok("plain hi"));
    let tools: Vec<Value> = vec![value!({"type": "function"})];
    let request = ChatRequest { messages: vec![say(User, "hi")], tools, ..ChatRequest::default() };
    let got = text.render(&request, SystemTime::UNIX_EPOCH).expect("renders").text();
    assert_eq!(got, "with [{\"type\": \"function\"}] hi");
}

fn calls(content: Option<&str>, names: &[(&str, &str)]) -> ChatMessage {
    let mut message = say(Assistant, "");
    message.content = content.map(str::to_owned);
    let ids = ["call00001", "call00002"];
    let call = |((name, argument), id): (&(&str, &str), &str)| ToolCall {
        id: Some(id.into()),
        name: (*name).into(),
        arguments: value!({"q": argument}),
    };
    message.tool_calls = names.iter().zip(ids).map(call).collect();
    message
}

fn result(id: &str, content: &str) -> ChatMessage {
    ChatMessage { tool_call_id: Some(id.into()), ..say(Tool, content) }
}

/// Whatever is sent with calls and results: every text is in the prompt, or the request is refused.
#[test]
fn no_published_template_loses_a_call_a_result_or_a_text_silently() {
    let one: &[_] = &[("markcallone", "markargone")];
    let two: &[_] = &[("markcallone", "markargone"), ("markcalltwo", "markargtwo")];
    let ask = || vec![say(System, "marksystem"), say(User, "markuser")];
    let histories: Vec<Vec<ChatMessage>> = vec![
        [ask(), vec![calls(None, one), result("call00001", "markresult")]].concat(),
        [ask(), vec![calls(Some(""), one), result("call00001", "markresult")]].concat(),
        [ask(), vec![calls(Some("marktext"), one), result("call00001", "markresult")]].concat(),
        [
            ask(),
            vec![
                calls(None, one),
                result("call00001", "markresult"),
                say(Assistant, "marksaid"),
                say(User, "marknext"),
            ],
        ]
        .concat(),
        [ask(), vec![calls(None, two), result("call00001", "markresult"), result("call00002", "marksecond")]]
            .concat(),
        [
            ask(),
            vec![
                say(Assistant, "marksaid"),
                say(User, "marknext"),
                calls(None, one),
                result("call00001", "markresult"),
            ],
        ]
        .concat(),
    ];
    let offered: Vec<Value> = vec![value!({"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {}, "required": []}}})];
    let (mut faults, mut taken, mut names) = (Vec::new(), 0, 0);
    for entry in std::fs::read_dir(data("chat-templates")).expect("a folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("a name");
        let Some(name) = name.strip_suffix(".jinja") else { continue };
        names += 1;
        let text = with(published(name));
        for (index, history) in histories.iter().enumerate() {
            for tools in [&offered[..], &[]] {
                let request = ChatRequest {
                    messages: history.clone(),
                    tools: tools.to_vec(),
                    ..ChatRequest::default()
                };
                let Ok(got) = text.render(&request, SystemTime::UNIX_EPOCH) else { continue };
                taken += 1;
                let sent = format!("{history:?}");
                let marks = [
                    "marksystem",
                    "markuser",
                    "marktext",
                    "markcallone",
                    "markargone",
                    "markcalltwo",
                    "markargtwo",
                    "markresult",
                    "marksecond",
                    "marksaid",
                    "marknext",
                ];
                let lost: Vec<_> = marks
                    .iter()
                    .filter(|mark| sent.contains(**mark) && !got.text().contains(**mark))
                    .collect();
                if !lost.is_empty() {
                    faults.push(format!("{name}, history {index}, {} tools: {lost:?}", tools.len()));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(names, 57);
    assert!(taken > 400, "only {taken} are taken at all");
}

#[test]
fn calls_reach_templates_that_want_arguments_as_text() {
    for name in ["deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "lenml-deepseek_v3"] {
        let text = with(published(name));
        for content in [None, Some("")] {
            let got = render(
                &text,
                vec![say(User, "u"), calls(content, &[("look", "x")]), result("call00001", "r")],
            );
            let got = got.expect("renders");
            assert!(
                got.contains("look\n```json\n{\"q\": \"x\"}\n```")
                    || got.contains("look\\n```json\\n{\"q\": \"x\"}\\n```"),
                "{name}: {got}"
            );
        }
    }
}

#[test]
fn calls_and_results_that_a_template_would_lose_are_refused_by_name() {
    let text = own("{% for m in messages if m.role != 'tool' %}{{ m.role }}:{{ m.content }};{% endfor %}");
    let field = |messages| match render(&text, messages) {
        Err(PrepareError::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(vec![say(User, "u"), calls(None, &[("f", "x")])]), "messages[1].tool_calls");
    assert_eq!(field(vec![say(User, "u"), say(Assistant, "a"), result("c", "r")]), "messages[2]");
}

#[test]
fn a_template_that_takes_only_parts_gets_parts_and_one_that_loses_the_question_is_refused_at_load() {
    let text = own(
        "{% for m in messages %}{{ m.role }}:{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %};{% endfor %}",
    );
    let got = render(&text, vec![say(System, "S"), say(User, "hello"), say(Assistant, "a"), say(User, "b")]);
    assert_eq!(got.as_deref(), Ok("system:S;user:hello;assistant:a;user:b;"));
    let lost = "{% for m in messages %}{{ m.role }};{% endfor %}";
    let error = ChatTemplate::load(lost.into(), Map::new()).expect_err("is refused");
    assert!(error.contains("cannot be used"), "{error}");
    // One that refuses by itself does so when it is asked.
    assert!(ChatTemplate::load("{{ raise_exception('no') }}".into(), Map::new()).is_ok());
}
