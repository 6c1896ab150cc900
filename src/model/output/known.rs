//! The call syntaxes that are known, as data. Detection takes the first that fits, so a form that is
//! part of another's comes after it.
//!
//! Not among them: tags named after parameters (MiniMax M3), a name on a line of its own (functionary
//! 3.2). Heads of messages that are not gpt-oss's (`atem`) are content.

use super::calls::{Arguments, Headed, Tags};
use super::format::{Body, CallSyntax};
use super::ids::IdStyle;
use super::literal::Quotes;

/// Nothing marks a call: a message that is JSON with an offered tool's name.
pub(super) static BARE: CallSyntax = CallSyntax { name: "bare", bare: &["{"], ..NONE };

/// What rows leave out.
const NONE: CallSyntax = CallSyntax {
    name: "",
    openers: &[],
    bare: &[],
    ignored: &[],
    body: Body::Json(&[]),
    inner: &[],
    ids: IdStyle::Call,
    rendered: &[],
    source: &[],
};

/// All of them.
pub(super) static SYNTAXES: [&CallSyntax; 25] = [
    &CallSyntax {
        name: "harmony",
        body: Body::Channels,
        inner: &[
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        rendered: &["to=functions.@", "<|message|>"],
        source: &["<|channel|>", "functions."],
        ..NONE
    },
    &CallSyntax {
        name: "gemma4",
        openers: &["<|tool_call>"],
        body: Body::Headed(&Headed {
            name: gemma_name,
            arguments: Arguments::Literal(Quotes { marks: &["<|\"|>"], escapes: false }),
            closers: &["<tool_call|>"],
        }),
        rendered: &["<|tool_call>call:@{"],
        source: &["<|tool_call>call:"],
        ..NONE
    },
    &CallSyntax {
        name: "functiongemma",
        openers: &["<start_function_call>"],
        body: Body::Headed(&Headed {
            name: gemma_name,
            arguments: Arguments::Literal(Quotes { marks: &["<escape>"], escapes: false }),
            closers: &["<end_function_call>"],
        }),
        rendered: &["<start_function_call>call:@{"],
        source: &["<start_function_call>"],
        ..NONE
    },
    &CallSyntax {
        name: "dsml",
        openers: &["<｜DSML｜invoke name=\""],
        ignored: &[
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
        ],
        body: Body::Tagged(&Tags {
            call: "<｜DSML｜invoke name=\"",
            parameter: ("<｜DSML｜parameter name=\"", ">"),
            value_end: "</｜DSML｜parameter>",
            call_end: "</｜DSML｜invoke>",
            ..ATTRIBUTES
        }),
        rendered: &["<｜DSML｜invoke name=\"@\">"],
        source: &["｜DSML｜", "invoke name="],
        ..NONE
    },
    &CallSyntax {
        name: "atem",
        openers: &["<atem:invoke name=\""],
        ignored: &["<atem:function_calls>", "</atem:function_calls>"],
        body: Body::Tagged(&Tags {
            call: "<atem:invoke name=\"",
            parameter: ("<atem:parameter name=\"", ">"),
            value_end: "</atem:parameter>",
            call_end: "</atem:invoke>",
            ..ATTRIBUTES
        }),
        rendered: &["<atem:invoke name=\"@\">"],
        source: &["<atem:invoke"],
        ..NONE
    },
    &CallSyntax {
        name: "minimax",
        openers: &["<minimax:tool_call>"],
        body: Body::Tagged(&Tags {
            block: Some(("<minimax:tool_call>", "</minimax:tool_call>")),
            call: "<invoke name=\"",
            parameter: ("<parameter name=\"", ">"),
            ..ATTRIBUTES
        }),
        rendered: &["<minimax:tool_call>", "<invoke name=\"@\">"],
        source: &["<minimax:tool_call>", "<invoke name="],
        ..NONE
    },
    &CallSyntax {
        name: "minicpm",
        openers: &["<function name=\""],
        bare: &["{"],
        body: Body::Tagged(&Tags {
            call: "<function name=\"",
            parameter: ("<param name=\"", ">"),
            value_end: "</param>",
            character_data_end: Some("]]></param>"),
            call_end: "</function>",
            ..ATTRIBUTES
        }),
        rendered: &["<function name=\"@\">"],
        source: &["<function name=", "<param name="],
        ..NONE
    },
    &CallSyntax {
        name: "seed",
        openers: &["<seed:tool_call>"],
        body: Body::Tagged(&Tags { block: Some(("<seed:tool_call>", "</seed:tool_call>")), ..FUNCTION }),
        rendered: &["<seed:tool_call>", "<function=@>"],
        source: &["<seed:tool_call>"],
        ..NONE
    },
    &CallSyntax {
        name: "qwen-xml",
        openers: &["<tool_call>", "<function="],
        bare: &["{"],
        body: Body::JsonOrTagged(&["</tool_call>"], &FUNCTION),
        rendered: &["<tool_call>", "<function=@>", "</function>"],
        source: &["<tool_call>", "<function=", "<parameter="],
        ..NONE
    },
    &CallSyntax {
        name: "functionary",
        openers: &["<function="],
        body: Body::Headed(&Headed {
            name: |head| head.strip_suffix('>'),
            arguments: Arguments::Json,
            closers: &["</function>"],
        }),
        rendered: &["<function=@>{"],
        source: &["<function=", "</function>"],
        ..NONE
    },
    &CallSyntax {
        name: "glm",
        openers: &["<tool_call>"],
        body: Body::Tagged(&Tags {
            block: None,
            call: "<tool_call>",
            name_end: None,
            parameter: ("<arg_key>", "</arg_key>"),
            value: Some("<arg_value>"),
            value_end: "</arg_value>",
            character_data_end: None,
            call_end: "</tool_call>",
            is_framed: false,
        }),
        rendered: &["<tool_call>@", "<arg_key>", "<arg_value>"],
        source: &["<tool_call>", "<arg_key>", "<arg_value>"],
        ..NONE
    },
    &CallSyntax {
        name: "hermes",
        openers: &["<tool_call>"],
        bare: &["{"],
        body: Body::JsonOrTagged(&["</tool_call>"], &FUNCTION),
        rendered: &["<tool_call>", "{", "\"@\"", "</tool_call>"],
        source: &["<tool_call>", "{\"name\":", "</tool_call>"],
        ..NONE
    },
    &CallSyntax {
        name: "apriel",
        openers: &["<tool_calls>"],
        bare: &["{"],
        body: Body::Json(&["</tool_calls>"]),
        rendered: &["<tool_calls>", "\"@\""],
        source: &["<tool_calls>", "</tool_calls>"],
        ..NONE
    },
    &CallSyntax {
        name: "command",
        openers: &["<|START_ACTION|>"],
        body: Body::Json(&["<|END_ACTION|>"]),
        rendered: &["<|START_ACTION|>", "\"@\""],
        source: &["<|START_ACTION|>"],
        ..NONE
    },
    &CallSyntax {
        name: "mistral",
        openers: &["[TOOL_CALLS]"],
        body: Body::ListOrHeaded(&Headed { name: mistral_name, arguments: Arguments::Json, closers: &[] }),
        ids: IdStyle::Nine,
        inner: &["[ARGS]", "[CALL_ID]"],
        rendered: &["[TOOL_CALLS]", "@"],
        source: &["[TOOL_CALLS]"],
        ..NONE
    },
    &CallSyntax {
        name: "deepseek",
        openers: &["<｜tool▁call▁begin｜>"],
        ignored: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
        body: Body::Headed(&Headed {
            name: deepseek_name,
            arguments: Arguments::Json,
            closers: &["<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>"],
        }),
        inner: &["<｜tool▁sep｜>"],
        rendered: &["<｜tool▁call▁begin｜>", "@"],
        source: &["<｜tool▁call▁begin｜>"],
        ..NONE
    },
    &CallSyntax {
        name: "kimi",
        openers: &["<|tool_call_begin|>"],
        ignored: &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
        body: Body::Headed(&Headed {
            name: kimi_name,
            arguments: Arguments::Json,
            closers: &["<|tool_call_end|>"],
        }),
        inner: &["<|tool_call_argument_begin|>"],
        rendered: &["<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
        source: &["<|tool_call_begin|>"],
        ..NONE
    },
    &CallSyntax {
        name: "solar",
        openers: &["<|tool_call:begin|>"],
        ignored: &["<|tool_calls|>", "<|calls|>"],
        body: Body::Headed(&Headed {
            name: |head| head.split_once("<|tool_call:name|>")?.1.strip_suffix("<|tool_call:args|>"),
            arguments: Arguments::Json,
            closers: &["<|tool_call:end|>"],
        }),
        inner: &["<|tool_call:name|>", "<|tool_call:args|>"],
        rendered: &["<|tool_call:begin|>", "@"],
        source: &["<|tool_call:begin|>"],
        ..NONE
    },
    &CallSyntax {
        name: "lfm",
        openers: &["<|tool_call_start|>"],
        bare: &["["],
        body: Body::Pythonic(&["<|tool_call_end|>"]),
        rendered: &["<|tool_call_start|>", "@("],
        // Templates of this family say how tools are listed, not how they are called.
        source: &["\"List of tools: "],
        ..NONE
    },
    &CallSyntax {
        name: "granite",
        openers: &["<|tool_call|>"],
        bare: &["{"],
        // Phi-4 closes its lists, Granite does not.
        body: Body::Json(&["<|/tool_call|>"]),
        rendered: &["<|tool_call|>", "\"@\""],
        source: &["<|tool_call|>"],
        ..NONE
    },
    &CallSyntax {
        name: "gigachat",
        openers: &["function call<|role_sep|>"],
        bare: &["{"],
        ignored: &["<|message_sep|>"],
        inner: &["<|role_sep|>"],
        rendered: &["function call<|role_sep|>", "\"@\""],
        source: &["function call<|role_sep|>"],
        ..NONE
    },
    &CallSyntax {
        name: "functools",
        openers: &["functools"],
        bare: &["{"],
        rendered: &["functools[", "@"],
        source: &["functools["],
        ..NONE
    },
    &CallSyntax {
        name: "llama",
        openers: &["<|python_tag|>"],
        bare: &["{", "["],
        rendered: &["{\"name\": \"@\", \"parameters\":"],
        source: &["<|python_tag|>"],
        ..NONE
    },
    &CallSyntax { name: "pythonic", bare: &["["], body: Body::Pythonic(&[]), rendered: &["[@("], ..NONE },
    &BARE,
];

/// Qwen's tags.
const FUNCTION: Tags = Tags {
    block: Some(("<tool_call>", "</tool_call>")),
    call: "<function=",
    name_end: Some(">"),
    parameter: ("<parameter=", ">"),
    value: None,
    value_end: "</parameter>",
    character_data_end: None,
    call_end: "</function>",
    is_framed: true,
};

/// Tags with names in attributes.
const ATTRIBUTES: Tags = Tags {
    block: None,
    call: "<invoke name=\"",
    name_end: Some("\">"),
    parameter: ("<parameter name=\"", ">"),
    value: None,
    value_end: "</parameter>",
    character_data_end: None,
    call_end: "</invoke>",
    is_framed: false,
};

fn gemma_name(head: &str) -> Option<&str> {
    head.trim().strip_prefix("call:")
}

/// `name`, `name[ARGS]`, `name[CALL_ID]id[ARGS]`.
fn mistral_name(head: &str) -> Option<&str> {
    let end = head.find("[CALL_ID]").or_else(|| head.find("[ARGS]")).unwrap_or(head.len());
    Some(head[..end].trim())
}

/// `name<｜tool▁sep｜>`, and the older `function<｜tool▁sep｜>name` with a fence around the arguments.
fn deepseek_name(head: &str) -> Option<&str> {
    let (first, second) = head.split_once("<｜tool▁sep｜>")?;
    let second = second.trim().trim_end_matches("```json").trim_end();
    Some(if second.is_empty() { first.trim() } else { second })
}

/// `functions.name:0<|tool_call_argument_begin|>`.
fn kimi_name(head: &str) -> Option<&str> {
    let id = head.trim().strip_suffix("<|tool_call_argument_begin|>").unwrap_or(head).trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let number = name.rsplit_once(':').filter(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit()));
    Some(number.map_or(name, |(name, _)| name))
}
