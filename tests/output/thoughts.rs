//! Thoughts apart from answers, for each family's markers.

use super::parts::{Part, call, check, format, text, thought};

/// Reads an answer of a model with these thoughts, cut anywhere.
fn reads(kind: &str, is_thinking: bool, answer: &str, expected: &[Part]) {
    check(&format("hermes", kind), is_thinking, answer, expected);
}

#[test]
fn each_familys_markers_part_thought_from_answer() {
    for (kind, answer) in [
        ("think", "<think>\nplan é\n</think>\n\nAnswer"),
        ("thinking", "<thinking>plan é</thinking>Answer"),
        ("reasoning", "<reasoning>plan é</reasoning>\nAnswer"),
        ("seed", "<seed:think>plan é</seed:think>Answer"),
        ("minimax", "<mm:think>plan é</mm:think>\n\nAnswer"),
        ("magistral", "[THINK]plan é[/THINK]Answer"),
        ("gemma", "<|channel>thought\nplan é\n<channel|>Answer"),
        ("command", "<|START_THINKING|>plan é<|END_THINKING|><|START_RESPONSE|>Answer<|END_RESPONSE|>"),
        ("granite", "<think>plan é</think>\n<response>Answer</response>"),
        ("solar", "<|think|>plan é<|end|><|begin|>assistant<|content|>Answer<|end|>"),
        (
            "apriel",
            "Here are my reasoning steps:\nplan é\n[BEGIN FINAL RESPONSE]\nAnswer\n[END FINAL RESPONSE]\n",
        ),
    ] {
        reads(kind, false, answer, &[thought("plan é"), text("Answer")]);
    }
}

#[test]
fn a_thought_that_the_prompt_opened_needs_no_opener() {
    let expected = [thought("plan"), text("Answer")];
    reads("think", true, "plan\n</think>\n\nAnswer", &expected);
    reads("think", true, "\nplan\n</think>\n\nAnswer", &expected);
    reads("think", true, "\n<think>\nplan\n</think>Answer", &expected);
    reads("think", true, "plan, cut </thi", &[thought("plan, cut </thi")]);
    reads("think", true, "</think>Answer", &[text("Answer")]);
}

#[test]
fn prompts_tell_whether_a_thought_is_open() {
    let think = format("hermes", "think");
    assert!(think.opens_thought("<|im_start|>assistant\n<think>\n"));
    assert!(!think.opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!think.opens_thought("<think>\n<|im_start|>assistant\n"));
    assert!(format("hermes", "gemma").opens_thought("<|turn>model\n<|channel>thought\n"));
}

#[test]
fn stray_and_repeated_closers_are_dropped_where_an_answer_begins() {
    reads("think", false, "\n</think>\n\nAnswer", &[text("Answer")]);
    reads("think", false, "<think>plan</think>\n</think>Answer", &[thought("plan"), text("Answer")]);
    reads("think", false, "a </think> b", &[text("a </think> b")]);
    // A control token is no text.
    reads("gemma", false, "a<channel|> b", &[text("ab")]);
}

#[test]
fn tags_in_an_answer_are_text() {
    let code = "Use:\n```html\n<think>x</think>\n```\nand <thi";
    reads("think", false, code, &[text(code)]);
    reads("think", false, &format!("<think>plan</think>{code}"), &[thought("plan"), text(code)]);
}

#[test]
fn empty_thoughts_say_nothing() {
    reads("think", false, "<think>\n\n</think>\n\nAnswer", &[text("Answer")]);
    reads("think", false, "<think></think>", &[]);
    reads("gemma", false, "<|channel>thought\n<channel|>Answer", &[text("Answer")]);
}

#[test]
fn thoughts_may_follow_calls() {
    let one = "<tool_call>{\"name\": \"search\", \"arguments\": {}}</tool_call>";
    let expected = [thought("a"), call("search", "{}"), thought("b"), text("c"), call("search", "{}")];
    reads("think", false, &format!("<think>a</think>\n{one}\n<think>b</think>\nc {one}"), &expected);
}

#[test]
fn a_bracket_that_begins_a_call_hides_no_marker() {
    let expected = [thought("plan"), call("search", "{\"zip\": \"1\"}")];
    let answer = "[THINK]plan[/THINK][search(zip='1')]";
    check(&format("lfm", "magistral"), false, answer, &expected);
    let answer = "Here are my reasoning steps: plan [BEGIN FINAL RESPONSE] [search(zip='1')]";
    check(&format("lfm", "apriel"), false, answer, &expected);
}

#[test]
fn a_call_ends_a_thought_only_where_its_marker_is_a_control_token() {
    let kimi = "<think>plan <|tool_calls_section_begin|><|tool_call_begin|>search:0<|tool_call_argument_begin|>{}<|tool_call_end|>Answer";
    check(&format("kimi", "think"), false, kimi, &[thought("plan"), call("search", "{}"), text("Answer")]);
    let hermes = "<think>I use <tool_call>{\"name\": \"search\", \"arguments\": {}}</tool_call> now";
    reads("think", false, hermes, &[thought(&hermes["<think>".len()..])]);
    // What is no call goes on as thought.
    let broken = "<think>a <|tool_call_begin|>? b</think>c";
    check(&format("kimi", "think"), false, broken, &[thought("a <|tool_call_begin|>? b"), text("c")]);
}

#[test]
fn harmonys_channels_are_thought_and_answer() {
    let harmony = format("harmony", "think");
    let answer =
        "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>Answer";
    check(&harmony, false, answer, &[thought("plan"), text("Answer")]);
    let twice =
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>";
    check(&harmony, false, twice, &[thought("ab")]);
    check(&harmony, false, "<|channel|>ana", &[]);
    assert!(!harmony.opens_thought("<think>"));
}

#[test]
fn space_is_kept_where_no_marker_is() {
    reads("think", false, " An answer \n", &[text(" An answer \n")]);
    let long = format!("a{}b", "\n".repeat(2000));
    check(&format("hermes", "think"), false, &long[..600], &[text(&long[..600])]);
    let answer = format!("a{}<tool_call>{{\"name\": \"search\"}}</tool_call>", "\n".repeat(300));
    reads("think", false, &answer, &[text(&format!("a{}", "\n".repeat(44))), call("search", "{}")]);
}
