//! What looks like a call and is none stays text; what breaks off in a call says so.

use super::parts::{call, characters, check, cut_call, cuts, format, parser, read, text, thought};

/// An answer without a call: it comes out as it went in.
fn stays(calls: &str, answer: &str) {
    check(&format(calls, "think"), false, answer, &[text(answer)]);
}

#[test]
fn prose_about_markers_is_text() {
    stays("hermes", "Use <tool_call> tags, or <tool, or <tool_call>.\n\n  Bye <");
    stays("hermes", "<tool_call>\n[1, 2]\n</tool_call>");
    stays("hermes", "<tool_call> <tool_call");
    stays("qwen-xml", "In C, <function=name> is not valid; <function=> neither.");
    stays("qwen-xml", "<tool_call>\n<function=a b>\n</function>");
    stays("glm", "The <tool_call> tag, and <tool_call>name stands for it.");
    stays("mistral", "[TOOL_CALLS] is a token {");
    stays("lfm", "<|tool_call_start|>[link](x)");
    stays("llama", "[link](http://x) and [1, 2]");
    stays("llama", "{\"a\": 1}");
    stays("dsml", "<｜DSML｜ is not <｜DSML｜invoke");
    stays("gemma4", "<|tool_call>name:f{}");
    stays("harmony", "no channel at all <b>");
    stays("functools", "functools.wraps(f)");
}

#[test]
fn json_in_prose_is_no_call() {
    let example = "{\"name\": \"search\", \"arguments\": {\"a\": 1}}";
    stays("bare", &format!("For example {example} calls it."));
    stays("hermes", &format!("```json\n{example}\n```"));
    stays("bare", "{\"name\": \"unknown\", \"arguments\": {\"a\": 1}}");
    stays("bare", "{\"name\": \"search\", \"population\": 3}");
    stays("llama", "[unknown(a=1)]");
    // With a marker the name is the client's matter.
    let marked = "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>";
    check(&format("hermes", "think"), false, marked, &[call("unknown", "{}")]);
}

#[test]
fn a_whole_message_that_is_json_with_an_offered_name_is_a_call() {
    let answer = "\n{\"name\": \"search\", \"arguments\": {\"a\": 1}}\n";
    for calls in ["bare", "hermes", "qwen-xml", "llama"] {
        check(&format(calls, "think"), false, answer, &[call("search", "{\"a\": 1}")]);
    }
}

#[test]
fn a_call_after_one_that_is_none_is_found() {
    let answer = "<tool_call> <tool_call>{\"name\": \"search\", \"arguments\": {}}</tool_call>";
    check(&format("hermes", "think"), false, answer, &[text("<tool_call>"), call("search", "{}")]);
    let answer = "Say [TOOL_CALLS] or [TOOL_CALLS]search[ARGS]{}";
    check(&format("mistral", "think"), false, answer, &[text("Say [TOOL_CALLS] or"), call("search", "{}")]);
}

#[test]
fn what_breaks_within_arguments_goes_on_as_text() {
    let hermes = format("hermes", "think");
    let answer = "<tool_call>{\"name\": \"search\", \"arguments\": {\"a\": ]} oops";
    check(&hermes, false, answer, &[cut_call("search", "{\"a\": "), text("]} oops")]);
    let answer = "<tool_call>{\"name\": \"search\", \"arguments\": {\"a\": 1}} oops";
    check(&hermes, false, answer, &[call("search", "{\"a\": 1}"), text("oops")]);
    let answer = "<tool_call><function=search><parameter=zip>1</parameter> oops <b>";
    let expected = [cut_call("search", "{\"zip\": \"1\""), text("oops <b>")];
    check(&format("qwen-xml", "think"), false, answer, &expected);
    let answer = "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"search\" oops";
    check(&hermes, false, answer, &[call("search", "{\"a\": 1}"), text("oops")]);
    let answer = "[search(zip='1' 2)] end";
    let expected = [cut_call("search", "{\"zip\": \"1\""), text("2)] end")];
    check(&format("pythonic", "think"), false, answer, &expected);
    let answer = "<|channel|>final to=functions.search<|message|>{\"a\": 1} and more<|end|>";
    check(&format("harmony", "think"), false, answer, &[call("search", "{\"a\": 1}"), text("and more")]);
}

#[test]
fn a_list_that_breaks_keeps_its_first_call() {
    let answer = "[TOOL_CALLS][{\"name\": \"search\", \"arguments\": {}}, {\"nome\": 3}] x";
    let expected = [call("search", "{}"), text(", {\"nome\": 3}] x")];
    check(&format("mistral", "think"), false, answer, &expected[..]);
}

#[test]
fn a_call_ends_the_thought_that_it_stands_in_even_where_it_breaks() {
    let answer = "<think>a <|tool_call_begin|>search:0<|tool_call_argument_begin|>{]} b";
    let expected = [thought("a"), cut_call("search", "{"), text("]} b")];
    check(&format("kimi", "think"), false, answer, &expected);
}

/// Text like the formats' own, in an order that means nothing.
const SHREDS: &str = "<tool_call>{\"name\": \"<tool_call>\"[TOOL_CALLS]search[ARGS]}{\"a\"]<function=search><parameter=zip>\
    <｜tool▁call▁begin｜>x<|tool_call>call:search{a:<|\"|>b<tool_call|><|channel|>final<|message|>é</parameter>[search(a='";

#[test]
fn shreds_of_all_formats_break_none_of_them() {
    for calls in greenroom::model::output::OutputFormat::call_names() {
        let format = format(calls, "think");
        for cut in cuts(SHREDS) {
            let tail = &SHREDS[cut..];
            let whole = read(parser(&format, false), [tail]);
            assert_eq!(read(parser(&format, false), characters(tail)), whole, "{calls}: {tail}");
            assert!(!whole.is_empty() || tail.is_empty(), "{calls}: {tail}");
        }
    }
}

#[test]
fn little_is_held_back_of_text() {
    let mut parser = parser(&format("hermes", "think"), false);
    let prose = "plain words without end ".repeat(50);
    let given: usize = parser
        .push(&prose)
        .iter()
        .map(|event| match event {
            greenroom::types::OutputEvent::Content(text) => text.len(),
            other => panic!("{other:?}"),
        })
        .sum();
    assert_eq!(given, prose.len() - 1, "all but the space at the end");
}
