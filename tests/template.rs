//! Chat templates: published ones byte for byte, and hostile ones within bounds.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::time::{Duration, SystemTime};

use common::{data, json};
use greenroom::model::template::{ChatTemplate, TemplateInput};
use greenroom::types::PrepareError;
use serde_json::{Map, Value};

/// 2026-01-15T12:34:56Z, which the goldens were made at.
fn golden_now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_768_480_496)
}

fn input(case: &Value) -> TemplateInput {
    let mut variables = case.as_object().expect("a case is an object").clone();
    let mut take = |name: &str| variables.shift_remove(name).unwrap_or(Value::Null);
    let (messages, tools) = (take("messages"), take("tools"));
    let add_generation_prompt = take("add_generation_prompt").as_bool().expect("a flag");
    TemplateInput { messages, tools, add_generation_prompt, variables }
}

fn compile(source: &str) -> ChatTemplate {
    ChatTemplate::compile(source.to_owned(), Map::new()).expect("the template compiles")
}

fn render(source: &str, messages: Value) -> Result<String, PrepareError> {
    let input =
        TemplateInput { messages, tools: Value::Null, add_generation_prompt: true, variables: Map::new() };
    compile(source).render(&input, golden_now())
}

/// Template, beginning of the case's name, why it differs.
const DIFFERENCES: &[(&str, &str, &str)] = &[
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "", NONE),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "", NONE),
    ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "documents", NONE),
    (
        "llama-cpp-deepseek-r1",
        "tool",
        "it prints a `map` without `list`: Python refuses a generator, here it is the list that was meant",
    ),
    (
        "meetkai-functionary-medium-v3.1",
        "tool",
        "it adds texts to `|safe` ones: Python then writes HTML entities (&lt;) into the prompt, here the texts stay",
    ),
];

const NONE: &str =
    "a loop over none: Python refuses it, here there is nothing in it, which serves those who send no tools";

/// Renders every conversation with a published template and compares: what differs, how many
/// cases there are, and how many of them differ for a listed reason.
fn differences(name: &str, conversations: &Value) -> (Vec<String>, usize, usize) {
    let golden = json(&format!("chat-templates/golden/{name}.json"));
    let source = std::fs::read_to_string(data(&format!("chat-templates/{name}.jinja"))).expect("a template");
    let special = golden["special_tokens"].as_object().expect("special tokens").clone();
    let template = ChatTemplate::compile(source, special).expect("a published template compiles");
    let results = golden["results"].as_object().expect("results");
    let (mut faults, mut listed) = (Vec::new(), 0);
    for (case, expected) in results {
        let got = template.render(&input(&conversations[case]), golden_now());
        let refused = |message: &str| Err(PrepareError::Template { message: message.to_owned() });
        let is_right = match (expected["ok"].as_str(), expected["raised"].as_str()) {
            (Some(text), _) => got.as_deref() == Ok(text),
            (_, Some(words)) => got == refused(words),
            // Python itself failed, in its own words.
            _ => got.is_err(),
        };
        let has_reason =
            DIFFERENCES.iter().any(|(template, begin, _)| *template == name && case.starts_with(begin));
        if has_reason && !is_right && got.is_ok() {
            listed += 1;
        } else if !is_right {
            faults.push(format!("{name}, {case}:\n  expected {expected}\n  got      {got:?}"));
        }
    }
    (faults, results.len(), listed)
}

#[test]
fn all_published_templates_render_as_their_reference() {
    let conversations = json("chat-templates/conversations.json");
    let mut names: Vec<String> = std::fs::read_dir(data("chat-templates"))
        .expect("a folder")
        .filter_map(|entry| {
            entry.expect("an entry").file_name().to_str()?.strip_suffix(".jinja").map(str::to_owned)
        })
        .collect();
    names.sort();
    let (mut faults, mut compared, mut listed) = (Vec::new(), 0, 0);
    for name in &names {
        let (wrong, cases, known) = differences(name, &conversations);
        faults.extend(wrong);
        compared += cases;
        listed += known;
    }
    assert_eq!((names.len(), compared, listed), (57, 1710, 57));
    assert!(faults.is_empty(), "{} of {compared} differ\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn the_date_is_formatted_as_asked() {
    let source = "{{ strftime_now('%d %b %Y|%A %B %-d|%H:%M:%S|%I %p|%j|%y-%m|%%|%Q|%a %e') }}";
    let text = render(source, Value::Null).expect("renders");
    assert_eq!(text, "15 Jan 2026|Thursday January 15|12:34:56|12 PM|015|26-01|%|%Q|Thu 15");
}

#[test]
fn dates_are_right_over_leap_years_and_before_1970() {
    let template = compile("{{ strftime_now('%F %a %j') }}");
    let input = TemplateInput {
        messages: Value::Null,
        tools: Value::Null,
        add_generation_prompt: true,
        variables: Map::new(),
    };
    let at = |days: i64| {
        let span = Duration::from_secs(days.unsigned_abs() * 86_400);
        let epoch = SystemTime::UNIX_EPOCH;
        template.render(&input, if days < 0 { epoch - span } else { epoch + span }).expect("renders")
    };
    assert_eq!(at(0), "1970-01-01 Thu 001");
    assert_eq!(at(-1), "1969-12-31 Wed 365");
    assert_eq!(at(11_016), "2000-02-29 Tue 060");
    assert_eq!(at(11_017), "2000-03-01 Wed 061");
    assert_eq!(at(20_819), "2027-01-01 Fri 001");
}

#[test]
fn tojson_writes_as_python_does() {
    let value = serde_json::json!({
        "b": [1, 2.0, 1e16, 1.5e-7, true, null], "a": "<é \"\n\u{1}", "e": {}, "l": []
    });
    let plain = render("{{ messages | tojson }}", value.clone()).expect("renders");
    assert_eq!(
        plain,
        "{\"b\": [1, 2.0, 1e+16, 1.5e-07, true, null], \"a\": \"<é \\\"\\n\\u0001\", \"e\": {}, \"l\": []}"
    );
    let indented = render("{{ messages.b[:2] | tojson(indent=2) }}", value.clone()).expect("renders");
    assert_eq!(indented, "[\n  1,\n  2.0\n]");
    let options = "{{ messages | tojson(sort_keys=true, ensure_ascii=true, separators=[',', ':']) }}";
    assert!(render(options, value).expect("renders").starts_with("{\"a\":\"<\\u00e9 \\\""));
}

#[test]
fn a_refusal_carries_the_templates_own_words_even_from_a_macro() {
    let source =
        "{% macro check() %}{{ raise_exception('Only one\nsystem message.') }}{% endmacro %}{{ check() }}";
    let refused = render(source, Value::Null);
    assert_eq!(refused, Err(PrepareError::Template { message: "Only one\nsystem message.".into() }));
}

#[test]
fn loops_can_be_left_and_generation_blocks_are_transparent() {
    let source = "\
{%- for m in messages -%}
    {%- if m == 3 -%}{%- break -%}{%- endif -%}
    {%- if m == 1 -%}{%- continue -%}{%- endif -%}
    {% generation %}[{{ m }}]{% endgeneration %}
{%- endfor -%}";
    assert_eq!(render(source, serde_json::json!([0, 1, 2, 3, 4])).as_deref(), Ok("[0][2]"));
}

#[test]
fn a_template_that_does_not_compile_says_where() {
    let error = ChatTemplate::compile("fine\n{% if x %}".into(), Map::new()).expect_err("is refused");
    assert!(error.contains(":2"), "{error}");
}

#[test]
fn endless_and_huge_templates_are_stopped() {
    let deep = format!("{}{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000));
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'abc' * 99999999999 }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ [1] * 99999999999 }}",
        "{% include 'secret' %}",
        "{% import 'x' as y %}",
        "{{ '%99999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999999999) }}{{ raise_exception('no nested widths') }}",
        "{{ 'a\nb' | indent(999999999) }}",
        "{{ [1] | batch(999999999, 'x') }}",
        "{{ [1] | slice(999999999, 'x') | list }}",
        "{{ range(99999999999) | list }}",
        "{{ 'ab' | list | join('c' * 50000000) * 50 }}",
        "{{ 'a'.replace('', 'b' * 1000) * 100000 * 1000 }}",
        &deep,
    ] {
        let Ok(template) = ChatTemplate::compile(source.to_owned(), Map::new()) else { continue };
        let input = TemplateInput {
            messages: Value::Null,
            tools: Value::Null,
            add_generation_prompt: true,
            variables: Map::new(),
        };
        let started = std::time::Instant::now();
        let refused = template.render(&input, golden_now());
        assert!(started.elapsed() < Duration::from_secs(10), "{source:.60}: {:?}", started.elapsed());
        assert!(
            matches!(refused, Err(PrepareError::Template { .. })),
            "{:.60}: {:?}",
            source,
            refused.map(|t| t.len())
        );
    }
}

#[test]
fn the_servers_own_variables_cannot_be_replaced() {
    let mut variables = Map::new();
    variables.insert("messages".into(), Value::Null);
    let input =
        TemplateInput { messages: Value::Null, tools: Value::Null, add_generation_prompt: true, variables };
    let refused = compile("x").render(&input, golden_now());
    assert!(matches!(refused, Err(PrepareError::Field { .. })), "{refused:?}");
}

/// Lists in lists that share their parts: far larger written than held.
#[test]
fn no_nesting_makes_tojson_build_more_than_it_may_print() {
    let levels = |wrap: &str, count: usize| {
        format!(
            "{{% set n = namespace(v=[0]) %}}{{% for i in range({count}) %}}{{% set n.v = {wrap} %}}{{% endfor %}}"
        )
    };
    for (set, option) in [
        (levels("[n.v, n.v, n.v, n.v]", 30), ""),
        (levels("[n.v, n.v, n.v, n.v]", 30), "(indent=4)"),
        (levels("{'a': n.v, 'b': n.v}", 100), ""),
        (levels("{'a': n.v, 'b': n.v}", 100), "(sort_keys=true)"),
    ] {
        // Not even printed: what is thrown away costs memory too.
        let refused = render(&format!("{set}{{% set t = n.v | tojson{option} %}}done"), Value::Null);
        assert!(matches!(refused, Err(PrepareError::Template { .. })), "{option}: {refused:?}");
    }
    // The same for a request's own value, deep and wide.
    let mut deep = serde_json::json!(vec![0; 100_000]);
    for _ in 0..100 {
        deep = serde_json::json!([deep]);
    }
    assert!(matches!(render("{{ messages | tojson(indent=64) }}", deep), Err(PrepareError::Template { .. })));
}
