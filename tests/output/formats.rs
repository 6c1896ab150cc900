//! Each format's calls: two of them with text around, cut anywhere, and cut off anywhere.

use greenroom::model::output::OutputFormat;

use super::parts::{
    Part, call, characters, check, cut_call, cuts, format, parser, read, text, thought, tools,
};

/// Arguments as JSON, with nested brackets, escapes and marker look-alikes.
const FIRST: &str = r#"{"city": "Zürich \"<b>\" }]\n", "where": {"folder": ["in", {"x": null}]}}"#;
const SECOND: &str = r#"{"days": -2.5e3,"exact":true}"#;

/// An answer in a format and what it says.
struct Sample {
    calls: &'static str,
    thought: &'static str,
    answer: String,
    parts: Vec<Part>,
}

fn sample(calls: &'static str, thought: &'static str, answer: String, parts: Vec<Part>) -> Sample {
    Sample { calls, thought, answer, parts }
}

/// Both calls, as JSON writes them.
fn two_calls() -> Vec<Part> {
    vec![call("get_weather", FIRST), call("search", SECOND)]
}

fn around(calls: Vec<Part>) -> Vec<Part> {
    [vec![thought("plan"), text("Let me look.")], calls, vec![text("Done é.")]].concat()
}

/// Formats whose arguments are JSON, passed through.
fn json_samples() -> Vec<Sample> {
    let one = |name: &str, arguments: &str| format!("{{\"name\": \"{name}\", \"arguments\": {arguments}}}");
    let (first, second) = (one("get_weather", FIRST), one("search", SECOND));
    let list = format!("[{first}, {second}]");
    let llama =
        |name: &str, arguments: &str| format!("{{\"name\": \"{name}\", \"parameters\": {arguments}}}");
    let command = |name: &str, arguments: &str| {
        format!("    {{\"tool_call_id\": \"0\", \"tool_name\": \"{name}\", \"parameters\": {arguments}}}")
    };
    let think = |calls: String| format!("<think>\nplan\n</think>\n\nLet me look.\n{calls}\nDone é.");
    vec![
        sample(
            "hermes",
            "think",
            think(format!("<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call>")),
            around(two_calls()),
        ),
        sample("apriel", "think", think(format!("<tool_calls>{list}</tool_calls>")), around(two_calls())),
        sample("granite", "granite", think(format!("<|tool_call|>{list}")), around(two_calls())),
        sample("granite", "think", think(format!("<|tool_call|>{list}<|/tool_call|>")), around(two_calls())),
        sample("functools", "think", think(format!(" functools{list}")), around(two_calls())),
        sample("mistral", "think", think(format!("[TOOL_CALLS]{list}")), around(two_calls())),
        sample(
            "gigachat",
            "think",
            think(format!(
                "<|message_sep|>\n\nfunction call<|role_sep|>\n{first}<|message_sep|>\nfunction call<|role_sep|>\n{second}"
            )),
            around(two_calls()),
        ),
        sample(
            "command",
            "command",
            format!(
                "<|START_THINKING|>plan<|END_THINKING|><|START_RESPONSE|>Let me look.<|END_RESPONSE|><|START_ACTION|>[\n{},\n{}\n]<|END_ACTION|>Done é.",
                command("get_weather", FIRST),
                command("search", SECOND)
            ),
            around(two_calls()),
        ),
        sample(
            "bare",
            "think",
            format!("<think>plan</think>{first}\n{second}"),
            [vec![thought("plan")], two_calls()].concat(),
        ),
        sample(
            "llama",
            "think",
            format!("{}; {}", llama("get_weather", FIRST), llama("search", SECOND)),
            two_calls(),
        ),
        sample(
            "llama",
            "think",
            format!("Look:<|python_tag|>{}", llama("search", SECOND)),
            vec![text("Look:"), call("search", SECOND)],
        ),
    ]
}

/// Formats with a head before arguments in JSON.
fn headed_samples() -> Vec<Sample> {
    let think = |calls: String| format!("<think>plan</think>Let me look.{calls} Done é.");
    let two = |one: &dyn Fn(&str, &str) -> String, between: &str| {
        format!("{}{between}{}", one("get_weather", FIRST), one("search", SECOND))
    };
    let make = |calls, thought, answer| sample(calls, thought, answer, around(two_calls()));
    let mistral = |name: &str, arguments: &str| format!("[TOOL_CALLS]{name}[ARGS]{arguments}");
    let with_id =
        |name: &str, arguments: &str| format!("[TOOL_CALLS]{name}[CALL_ID]abc123xyz[ARGS]{arguments}");
    let deepseek = |name: &str, arguments: &str| {
        format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    };
    let older = |name: &str, arguments: &str| {
        format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        )
    };
    let kimi = |name: &str, arguments: &str| {
        format!(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        )
    };
    let solar = |name: &str, arguments: &str| {
        format!(
            "<|tool_call:begin|>id1<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
        )
    };
    let functionary = |name: &str, arguments: &str| format!("<function={name}>{arguments}</function>");
    vec![
        make("mistral", "magistral", format!("[THINK]plan[/THINK]Let me look.{}Done é.", two(&mistral, ""))),
        make("mistral", "think", think(two(&with_id, ""))),
        make(
            "deepseek",
            "think",
            think(format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", two(&deepseek, ""))),
        ),
        make(
            "deepseek",
            "think",
            think(format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", two(&older, "\n"))),
        ),
        make(
            "kimi",
            "think",
            think(format!("<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", two(&kimi, ""))),
        ),
        make(
            "solar",
            "solar",
            format!(
                "<|think|>plan<|end|><|begin|>assistant<|content|>Let me look.<|tool_calls|>{}<|calls|>Done é.",
                two(&solar, "")
            ),
        ),
        make("functionary", "think", think(two(&functionary, ""))),
        make(
            "harmony",
            "think",
            format!(
                "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>\
                 <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{FIRST}<|call|>\
                 <|start|>assistant to=functions.search<|channel|>commentary json<|message|>{SECOND}<|call|>\
                 <|start|>assistant<|channel|>final<|message|>Done é.<|return|>"
            ),
        ),
    ]
}

/// Formats whose arguments become JSON.
fn converted_samples() -> Vec<Sample> {
    let think = |calls: &str| format!("<think>plan</think>\nLet me look.\n{calls}\nDone é.");
    let first = r#"{"city": "Zü \"<b>\"\n x", "zip": "01234", "days": 3, "where": {"x": [1]}, "note": null}"#;
    let expected = || around(vec![call("get_weather", first), call("search", "{}")]);
    let function = "<function=get_weather>\n<parameter=city>\nZü \"<b>\"\n x\n</parameter>\n<parameter=zip>\n01234\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=where>\n{\"x\": [1]}\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>";
    let empty = "<function=search>\n</function>";
    let attributes = |call: &str, parameter: &str| {
        let one = |key: &str, value: &str| format!("<{parameter} name=\"{key}\">{value}</{parameter}>\n");
        format!(
            "<{call} name=\"get_weather\">\n{}{}{}{}{}</{call}>\n<{call} name=\"search\">\n</{call}>",
            one("city", "Zü \"<b>\"\n x"),
            one("zip", "01234"),
            one("days", "3"),
            one("where", "{'x': [1]}"),
            one("note", "None"),
        )
    };
    let glm = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zü \"<b>\"\n x</arg_value>\n<arg_key>zip</arg_key><arg_value>01234</arg_value><arg_key>days</arg_key><arg_value>3</arg_value><arg_key>where</arg_key><arg_value>{\"x\": [1]}</arg_value><arg_key>note</arg_key><arg_value>null</arg_value>\n</tool_call>\n<tool_call>search</tool_call>";
    let dsml = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Zü \"<b>\"\n x</｜DSML｜parameter>\n<｜DSML｜parameter name=\"zip\" string=\"true\">01234</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n<｜DSML｜parameter name=\"where\" string=\"false\">{\"x\": [1]}</｜DSML｜parameter>\n<｜DSML｜parameter name=\"note\" string=\"false\">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"search\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>";
    let pythonic =
        r#"[get_weather(city='Zü "<b>"\n x', zip="01234", days=3, where={'x': [1]}, note=None), search()]"#;
    let gemma = |open: &str, quote: &str, close: &str| {
        format!(
            "{open}call:get_weather{{city:{quote}Zü \"<b>\"\n x{quote},zip:{quote}01234{quote},days:3,where:{{x:[1]}},note:null}}{close}{open}call:search{{}}{close}"
        )
    };
    vec![
        sample(
            "qwen-xml",
            "think",
            think(&format!("<tool_call>\n{function}\n</tool_call>\n<tool_call>\n{empty}\n</tool_call>")),
            expected(),
        ),
        sample("qwen-xml", "think", think(&format!("{function}\n</tool_call>\n{empty}")), expected()),
        sample(
            "seed",
            "seed",
            format!(
                "<seed:think>plan</seed:think>Let me look.\n<seed:tool_call>\n{function}\n{empty}\n</seed:tool_call>Done é."
            ),
            expected(),
        ),
        sample("minicpm", "think", think(&attributes("function", "param")), expected()),
        sample(
            "minimax",
            "think",
            think(&format!(
                "<minimax:tool_call>\n{}\n</minimax:tool_call>",
                attributes("invoke", "parameter")
            )),
            expected(),
        ),
        sample(
            "atem",
            "think",
            think(&format!(
                "<atem:function_calls>\n{}\n</atem:function_calls>",
                attributes("atem:invoke", "atem:parameter")
            )),
            expected(),
        ),
        sample("glm", "think", think(glm), expected()),
        sample("dsml", "think", think(dsml), expected()),
        sample("lfm", "think", think(&format!("<|tool_call_start|>{pythonic}<|tool_call_end|>")), expected()),
        sample(
            "pythonic",
            "think",
            pythonic.to_owned(),
            vec![call("get_weather", first), call("search", "{}")],
        ),
        sample(
            "gemma4",
            "gemma",
            format!(
                "<|channel>thought\nplan\n<channel|>Let me look.{}Done é.",
                gemma("<|tool_call>", "<|\"|>", "<tool_call|>")
            ),
            expected(),
        ),
        sample(
            "functiongemma",
            "think",
            think(&gemma("<start_function_call>", "<escape>", "<end_function_call>")),
            expected(),
        ),
    ]
}

fn samples() -> Vec<Sample> {
    [json_samples(), headed_samples(), converted_samples()].into_iter().flatten().collect()
}

#[test]
fn every_format_reads_its_calls_however_they_are_cut() {
    for sample in samples() {
        check(&format(sample.calls, sample.thought), false, &sample.answer, &sample.parts);
    }
}

#[test]
fn every_format_has_a_sample() {
    let known: Vec<&str> = samples().iter().map(|sample| sample.calls).collect();
    let missing: Vec<&str> = OutputFormat::call_names().filter(|name| !known.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Words of the samples that are nobody's markup.
const WORDS: [&str; 8] = ["plan", "look", "Done", "Zü", "folder", "01234", "<b>", "city"];

#[test]
fn an_answer_that_breaks_off_anywhere_loses_no_word() {
    for sample in samples() {
        let format = format(sample.calls, sample.thought);
        for cut in cuts(&sample.answer) {
            let head = &sample.answer[..cut];
            let parts = read(parser(&format, false), [head]);
            assert_eq!(read(parser(&format, false), characters(head)), parts, "{}: {head}", sample.calls);
            let given: String = parts
                .iter()
                .map(|part| match part {
                    Part::Thought(text) | Part::Text(text) => text.clone(),
                    Part::Call { name, arguments, .. } => format!("{name} {arguments} "),
                })
                .collect();
            for word in WORDS {
                let (came, gave) = (head.matches(word).count(), given.matches(word).count());
                assert!(
                    gave == came,
                    "{}: {word} came {came} times, {gave} in {parts:?} of {head}",
                    sample.calls
                );
            }
        }
    }
}

#[test]
fn arguments_stream_as_they_come() {
    for sample in samples() {
        let mut parser = parser(&format(sample.calls, sample.thought), false);
        let Some(at) = sample.answer.find("Zü") else { continue };
        let at = at + "Zü".len();
        let mut events: Vec<_> = parser.push(&sample.answer[..at]);
        events.extend(parser.finish());
        let parts = super::parts::join(&events);
        let told =
            parts.iter().any(|part| matches!(part, Part::Call { arguments, .. } if arguments.contains("Zü")));
        assert!(told, "{}: {parts:?}", sample.calls);
    }
}

#[test]
fn without_tools_nothing_is_a_call() {
    use greenroom::model::output::{OutputParser, OutputTerms};
    let answer = "<tool_call>{\"name\": \"search\", \"arguments\": {}}</tool_call> ";
    let parser = OutputParser::new(&format("hermes", "think"), OutputTerms::default());
    assert_eq!(read(parser, characters(answer)), [text(answer)]);
    assert!(!tools().is_empty());
}

#[test]
fn ids_are_as_the_family_wants_them() {
    use greenroom::types::{CallEvent, OutputEvent};
    let id = |calls: &str, answer: &str| {
        parser(&format(calls, "think"), false).push(answer).into_iter().find_map(|event| match event {
            OutputEvent::Call(CallEvent::Started { id, .. }) => Some(id),
            _ => None,
        })
    };
    let mistral = id("mistral", "[TOOL_CALLS]search[ARGS]{}").expect("a call");
    assert!(mistral.len() == 9 && mistral.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{mistral}");
    let hermes = id("hermes", "<tool_call>{\"name\": \"search\", \"arguments\": {").expect("a call");
    assert!(hermes.starts_with("call_") && hermes.len() == 29, "{hermes}");
}

#[test]
fn values_keep_the_types_of_the_schema() {
    let value = |key: &str, value: &str| {
        format!(
            "<tool_call>\n<function=search>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    for (key, raw, json) in [
        ("zip", "8001", "\"8001\""),
        ("zip", "true", "\"true\""),
        ("zip", "", "\"\""),
        ("zip", "<parameter=x>", "\"<parameter=x>\""),
        ("days", "8001", "8001"),
        ("days", "many", "\"many\""),
        ("exact", "True", "true"),
        ("tags", "['a', \"b\"]", "[\"a\", \"b\"]"),
        ("where", "{\"a\":1}", "{\"a\":1}"),
        ("note", "null", "null"),
        ("note", "nullify 1", "\"nullify 1\""),
        ("unheard_of", "5", "5"),
        ("unheard_of", "five", "\"five\""),
    ] {
        let expected = [call("search", &format!("{{\"{key}\": {json}}}"))];
        check(&format("qwen-xml", "think"), false, &value(key, raw), &expected);
    }
    let data =
        "<function name=\"search\"><param name=\"city\"><![CDATA[a </param> <b> & c]]></param></function>";
    check(&format("minicpm", "think"), false, data, &[call("search", "{\"city\": \"a </param> <b> & c\"}")]);
}

#[test]
fn arguments_may_come_before_the_name_or_in_a_string() {
    let hermes = format("hermes", "think");
    for body in [
        r#"{"arguments": {"a": 1}, "name": "search"}"#,
        r#"{"id": 3, "name": "search", "arguments": {"a": 1}, "more": [{}]}"#,
        r#"{"name": "search", "arguments": "{\"a\": 1}"}"#,
        r#"[{"name": "search", "arguments": {"a": 1}}]"#,
        // Without its last bracket.
        r#"{"name": "search", "arguments": {"a": 1}"#,
    ] {
        let answer = format!("<tool_call>\n{body}\n</tool_call>");
        check(&hermes, false, &answer, &[call("search", "{\"a\": 1}")]);
    }
    for body in [
        r#"{"name": "search"}"#,
        r#"{"name": "search", "arguments": null}"#,
        r#"{"name": "search", "arguments": ""}"#,
    ] {
        check(&hermes, false, &format!("<tool_call>{body}</tool_call>"), &[call("search", "{}")]);
    }
    let spaced = "<|channel|>commentary to=functions.search<|message|> \n{\"a\": 1}\n<|call|>";
    check(&format("harmony", "think"), false, spaced, &[call("search", "{\"a\": 1}")]);
    check(
        &format("mistral", "think"),
        false,
        "[TOOL_CALLS]search{\"a\": 1}",
        &[call("search", "{\"a\": 1}")],
    );
    check(
        &format("kimi", "think"),
        false,
        "<|tool_call_begin|>search:1<|tool_call_end|>",
        &[call("search", "{}")],
    );
}

#[test]
fn a_call_without_arguments_hides_none_of_the_next() {
    let answer = "<tool_call>{\"name\": \"search\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"search\", \"arguments\": {\"a\":1}}</tool_call>";
    check(&format("hermes", "think"), false, answer, &[call("search", "{}"), call("search", "{\"a\":1}")]);
}

#[test]
fn an_answer_cut_within_arguments_has_their_beginning() {
    let hermes = format("hermes", "think");
    let answer = "<tool_call>{\"name\": \"search\", \"arguments\": {\"a\": [1";
    check(&hermes, false, answer, &[cut_call("search", "{\"a\": [1")]);
    let answer = "<tool_call><function=search><parameter=city>Zü</para";
    check(&format("qwen-xml", "think"), false, answer, &[cut_call("search", "{\"city\": \"Zü</para")]);
    let answer = "<|channel|>commentary to=functions.search<|message|>{\"a\": 1}";
    check(&format("harmony", "think"), false, answer, &[call("search", "{\"a\": 1}")]);
    check(
        &format("harmony", "think"),
        false,
        &answer[..answer.len() - 1],
        &[cut_call("search", "{\"a\": 1")],
    );
}

#[test]
fn control_tokens_that_say_something_are_known() {
    for (calls, thought, token) in [
        ("gemma4", "gemma", "<|channel>"),
        ("gemma4", "gemma", "<|\"|>"),
        ("mistral", "magistral", "[ARGS]"),
        ("deepseek", "think", "<｜tool▁sep｜>"),
        ("deepseek", "think", "<｜tool▁calls▁begin｜>"),
        ("glm", "think", "<arg_value>"),
        ("dsml", "think", "｜DSML｜"),
        ("harmony", "think", "<|message|>"),
        ("hermes", "think", "</tool_call>"),
        ("qwen-xml", "think", "</think>"),
        ("solar", "solar", "<|content|>"),
    ] {
        assert!(format(calls, thought).has_marker(token), "{calls}, {thought}: {token}");
    }
    for token in ["<|im_start|>", "[TOOL_CALLS]", "<pad>", ""] {
        assert!(!format("hermes", "think").has_marker(token), "{token}");
    }
}
