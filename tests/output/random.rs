//! Random calls, random chunks: what was written is what is read.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::parts::{Part, format, parser, read};

/// A call: its tool and its arguments.
type Written = (&'static str, Map<String, Value>);

/// How a format writes a call.
struct Writer {
    calls: &'static str,
    before: &'static str,
    between: &'static str,
    after: &'static str,
    write: fn(&Written) -> String,
}

const WRITERS: [Writer; 14] = [
    Writer { calls: "hermes", before: "", between: "\n", after: "", write: hermes },
    Writer { calls: "llama", before: "", between: "; ", after: "", write: llama },
    Writer {
        calls: "apriel",
        before: "<tool_calls>[",
        between: ", ",
        after: "]</tool_calls>",
        write: openai,
    },
    Writer { calls: "mistral", before: "[TOOL_CALLS][", between: ",", after: "]", write: openai },
    Writer { calls: "mistral", before: "", between: "", after: "", write: mistral },
    Writer {
        calls: "deepseek",
        before: "<｜tool▁calls▁begin｜>",
        between: "",
        after: "<｜tool▁calls▁end｜>",
        write: deepseek,
    },
    Writer { calls: "kimi", before: "", between: "", after: "", write: kimi },
    Writer { calls: "qwen-xml", before: "", between: "\n", after: "", write: qwen },
    Writer { calls: "glm", before: "", between: "\n", after: "", write: glm },
    Writer {
        calls: "dsml",
        before: "<｜DSML｜function_calls>\n",
        between: "\n",
        after: "\n</｜DSML｜function_calls>",
        write: dsml,
    },
    Writer { calls: "gemma4", before: "", between: "", after: "", write: gemma },
    Writer {
        calls: "lfm",
        before: "<|tool_call_start|>[",
        between: ", ",
        after: "]<|tool_call_end|>",
        write: python,
    },
    Writer { calls: "harmony", before: "", between: "", after: "", write: harmony },
    Writer { calls: "functionary", before: "", between: "", after: "", write: functionary },
];

fn arguments(call: &Written) -> String {
    Value::Object(call.1.clone()).to_string()
}

fn openai(call: &Written) -> String {
    format!("{{\"name\": \"{}\", \"arguments\": {}}}", call.0, arguments(call))
}

fn hermes(call: &Written) -> String {
    format!("<tool_call>\n{}\n</tool_call>", openai(call))
}

fn llama(call: &Written) -> String {
    format!("{{\"name\": \"{}\", \"parameters\": {}}}", call.0, arguments(call))
}

fn mistral(call: &Written) -> String {
    format!("[TOOL_CALLS]{}[ARGS]{}", call.0, arguments(call))
}

fn deepseek(call: &Written) -> String {
    format!("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>", call.0, arguments(call))
}

fn kimi(call: &Written) -> String {
    format!(
        "<|tool_call_begin|>functions.{}:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
        call.0,
        arguments(call)
    )
}

fn functionary(call: &Written) -> String {
    format!("<function={}>{}</function>", call.0, arguments(call))
}

fn harmony(call: &Written) -> String {
    format!(
        "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>",
        call.0,
        arguments(call)
    )
}

/// A value as it stands between tags: texts bare, all else as JSON.
fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn each(call: &Written, write: impl Fn(&str, &Value) -> String) -> String {
    call.1.iter().map(|(key, value)| write(key, value)).collect()
}

fn qwen(call: &Written) -> String {
    let inner = each(call, |key, value| format!("<parameter={key}>\n{}\n</parameter>\n", bare(value)));
    format!("<tool_call>\n<function={}>\n{inner}</function>\n</tool_call>", call.0)
}

fn glm(call: &Written) -> String {
    let inner = each(call, |key, value| {
        format!("\n<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>", bare(value))
    });
    format!("<tool_call>{}{inner}\n</tool_call>", call.0)
}

fn dsml(call: &Written) -> String {
    let inner = each(call, |key, value| {
        let is_text = value.is_string();
        format!(
            "<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">{}</｜DSML｜parameter>\n",
            bare(value)
        )
    });
    format!("<｜DSML｜invoke name=\"{}\">\n{inner}</｜DSML｜invoke>", call.0)
}

fn gemma_value(value: &Value) -> String {
    let list = |values: Vec<String>| values.join(",");
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(values) => format!("[{}]", list(values.iter().map(gemma_value).collect())),
        Value::Object(entries) => {
            let entries =
                entries.iter().map(|(key, value)| format!("{key}:{}", gemma_value(value))).collect();
            format!("{{{}}}", list(entries))
        }
        other => other.to_string(),
    }
}

fn gemma(call: &Written) -> String {
    format!("<|tool_call>call:{}{}<tool_call|>", call.0, gemma_value(&Value::Object(call.1.clone())))
}

fn python_value(value: &Value) -> String {
    let list = |values: Vec<String>| values.join(", ");
    match value {
        Value::Null => "None".into(),
        Value::Bool(flag) => if *flag { "True" } else { "False" }.into(),
        Value::String(text) => {
            let escaped = text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n");
            format!("'{escaped}'")
        }
        Value::Array(values) => format!("[{}]", list(values.iter().map(python_value).collect())),
        Value::Object(entries) => {
            let entries =
                entries.iter().map(|(key, value)| format!("'{key}': {}", python_value(value))).collect();
            format!("{{{}}}", list(entries))
        }
        other => other.to_string(),
    }
}

fn python(call: &Written) -> String {
    let arguments: Vec<String> =
        call.1.iter().map(|(key, value)| format!("{key}={}", python_value(value))).collect();
    format!("{}({})", call.0, arguments.join(", "))
}

/// Texts full of what formats are made of.
fn words() -> impl Strategy<Value = String> {
    prop::collection::vec(
        prop::sample::select(vec![
            "a", "é", "😀", " ", "\n", "\"", "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "<", ">",
            "|", "</", "=", "12", "true", "null", "<tool", "<think>", "[ARGS]", "```", "None",
        ]),
        0..8,
    )
    .prop_map(|pieces| pieces.concat())
}

fn call_strategy() -> impl Strategy<Value = Written> {
    let deep = (words(), any::<Option<bool>>()).prop_map(|(text, flag)| json!({"x": text, "flag": flag}));
    (
        prop::sample::select(vec!["get_weather", "search"]),
        prop::option::of(words()),
        prop::option::of(any::<i32>()),
        prop::option::of(any::<bool>()),
        prop::option::of(prop::collection::vec(words(), 0..3)),
        prop::option::of(deep),
    )
        .prop_map(|(name, city, days, exact, tags, deep)| {
            let mut arguments = Map::new();
            let mut add = |key: &str, value: Option<Value>| {
                if let Some(value) = value {
                    arguments.insert(key.to_owned(), value);
                }
            };
            add("city", city.map(Value::from));
            add("days", days.map(Value::from));
            add("exact", exact.map(Value::from));
            add("tags", tags.map(Value::from));
            add("where", deep);
            (name, arguments)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn calls_are_read_as_they_were_written_in_any_chunks(
        writer in 0..WRITERS.len(),
        calls in prop::collection::vec(call_strategy(), 1..4),
        tail in "[a-z]{0,3}",
        sizes in prop::collection::vec(1..9_usize, 1..40),
    ) {
        let writer = &WRITERS[writer];
        let written: Vec<String> = calls.iter().map(writer.write).collect();
        // Messages have their own form, and a bare call is a whole answer.
        let tail = if ["harmony", "llama"].contains(&writer.calls) { "" } else { tail.as_str() };
        let answer = format!("{}{}{}{tail}", writer.before, written.join(writer.between), writer.after);
        let mut expected: Vec<Value> =
            calls.iter().map(|(name, arguments)| json!([name, arguments])).collect();
        if !tail.is_empty() {
            expected.push(json!(tail));
        }
        let parts = read(parser(&format(writer.calls, "think"), false), chunks(&answer, &sizes));
        let given: Vec<Value> = parts
            .iter()
            .map(|part| match part {
                Part::Thought(text) | Part::Text(text) => json!(text),
                Part::Call { name, arguments, complete: true } => {
                    json!([name, serde_json::from_str::<Value>(arguments).unwrap_or_else(|_| json!(arguments))])
                }
                Part::Call { .. } => json!("cut"),
            })
            .collect();
        prop_assert_eq!(given, expected, "{}: {}", writer.calls, answer);
    }

    #[test]
    fn any_text_gives_the_same_in_any_chunks(
        calls in 0..25_usize,
        thought in prop::sample::select(vec!["think", "gemma", "granite", "solar", "apriel", "command"]),
        is_thinking in any::<bool>(),
        pieces in prop::collection::vec(prop::sample::select(SHREDS.to_vec()), 0..14),
        sizes in prop::collection::vec(1..7_usize, 1..20),
    ) {
        let calls = greenroom::model::output::OutputFormat::call_names().nth(calls).expect("a name");
        let (format, answer) = (format(calls, thought), pieces.concat());
        let whole = read(parser(&format, is_thinking), [answer.as_str()]);
        let chunked = read(parser(&format, is_thinking), chunks(&answer, &sizes));
        prop_assert_eq!(chunked, whole, "{}, {}: {}", calls, thought, answer);
    }
}

const SHREDS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "text",
    "é",
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "{\"name\": \"search\"",
    ", \"arguments\": {\"a\": 1}}",
    "<function=search>",
    "<parameter=zip>",
    "</parameter>",
    "</function>",
    "[TOOL_CALLS]",
    "search",
    "[ARGS]",
    "<|tool_call>call:search{",
    "<tool_call|>",
    "<|\"|>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<|channel|>",
    "final",
    "<|message|>",
    "<|end|>",
    " to=functions.search",
    "<|start|>assistant",
    "search(",
    "zip=",
    "'1'",
    ")",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜DSML｜invoke name=\"search\">",
    "<response>",
    "<|channel>thought",
    "<channel|>",
    "\\",
    "null",
    "1",
    "analysis",
];

/// A text in chunks of so many characters, over and over.
fn chunks<'a>(text: &'a str, sizes: &'a [usize]) -> Vec<&'a str> {
    let mut rest = text;
    let mut found = Vec::new();
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let end = rest.char_indices().nth(*size).map_or(rest.len(), |(at, _)| at);
        let (chunk, left) = rest.split_at(end);
        found.push(chunk);
        rest = left;
    }
    found
}
