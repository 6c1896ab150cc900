//! What a template can do, found by rendering small conversations with it when it is loaded.
//!
//! Reads nothing into a template's source but the names of its variables: what counts is whether a
//! text that went in comes out. A template that cannot even render a user's question is taken as
//! able to do everything, so that nobody's messages are rearranged on a guess.

use serde_json::{Map, Value, json};

use super::TemplateInput;

/// Variables tried as a thinking switch, at most.
const MAX_SWITCHES: usize = 4;
/// Words that come out where their message does.
const SYSTEM: &str = "greenroomprobesystem";
const USER: &str = "greenroomprobeuser";
const SECOND: &str = "greenroomprobesecond";
const ASSISTANT: &str = "greenroomprobeassistant";
const TOOL: &str = "greenroomprobetool";
const CALL: &str = "greenroomprobecall";
const OTHER_CALL: &str = "greenroomprobeother";
const ARGUMENT: &str = "greenroomprobeargument";
const RESULT: &str = "greenroomproberesult";

/// What a template can do.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// It prints what a user says; false where it renders a question and loses it.
    pub user_text: bool,
    /// It takes contents only as lists of parts, `[{"type": "text", "text": …}]`.
    pub content_parts: bool,
    /// It prints a system message that comes first.
    pub system_role: bool,
    /// It prints that also where a conversation does not end with a user's message.
    pub system_before_results: bool,
    /// It prints several system messages that come first.
    pub system_neighbours: bool,
    /// It prints a system message in the middle of a conversation, and the first one as well.
    pub system_anywhere: bool,
    /// It refuses or loses neighbours of one role: user and assistant must alternate.
    pub strict_alternation: bool,
    /// It prints tool definitions.
    pub tools: bool,
    /// It prints the assistant's calls, names and arguments, in the form that the next three give.
    pub tool_calls: bool,
    /// It takes an assistant's call without content as null; else it gets an empty text.
    pub null_content: bool,
    /// It prints a call whose content is an empty text; else such a content is sent as null.
    pub empty_content: bool,
    /// It takes a call's arguments as JSON text; else they are an object.
    pub string_arguments: bool,
    /// It prints calls where no tools are offered, too.
    pub calls_without_tools: bool,
    /// It prints several calls of one message.
    pub parallel_calls: bool,
    /// It prints a call's content beside it.
    pub text_beside_calls: bool,
    /// It prints a call's content as a message of its own before the call.
    pub text_before_calls: bool,
    /// It prints what tools answered.
    pub tool_results: bool,
    /// It prints that where no tools are offered, too.
    pub results_without_tools: bool,
    /// It can end with the beginning of the assistant's turn.
    pub generation_prompt: bool,
    /// The variable that turns thinking on and off.
    pub thinking: Option<String>,
}

impl Capabilities {
    /// Those of a template of which nothing is known.
    pub(super) fn unknown() -> Self {
        Self {
            user_text: true,
            content_parts: false,
            system_role: true,
            system_before_results: true,
            system_neighbours: true,
            system_anywhere: true,
            strict_alternation: false,
            tools: false,
            tool_calls: false,
            null_content: true,
            empty_content: true,
            string_arguments: false,
            calls_without_tools: false,
            parallel_calls: false,
            text_beside_calls: false,
            text_before_calls: false,
            tool_results: false,
            results_without_tools: false,
            generation_prompt: false,
            thinking: None,
        }
    }

    /// Renders and looks. `names` are the template's free variables.
    pub(super) fn probe(
        render: &dyn Fn(TemplateInput) -> Option<String>,
        names: impl IntoIterator<Item = String>,
    ) -> Self {
        let Some((probe, plain)) = Probe::new(render) else { return Self::unknown() };
        let prints = |messages: &[Value], words: &[&str]| {
            probe.render(messages, None).is_some_and(|text| words.iter().all(|word| text.contains(word)))
        };
        let said = message("assistant", ASSISTANT);
        let system = message("system", SYSTEM);
        let tools = probe.render(&[user(USER)], Some(tools()));
        let mut found = Self {
            user_text: plain.contains(USER),
            content_parts: probe.parts,
            system_role: prints(&[system.clone(), user(USER)], &[SYSTEM, USER]),
            system_neighbours: prints(
                &[system.clone(), message("system", SECOND), user(USER)],
                &[SYSTEM, SECOND, USER],
            ),
            system_anywhere: prints(
                &[system, user(USER), said, message("system", SECOND), user(USER)],
                &[SYSTEM, USER, SECOND, ASSISTANT],
            ),
            strict_alternation: !prints(&[user(USER), user(SECOND)], &[USER, SECOND]),
            tools: tools.is_some_and(|text| text.contains(TOOL)),
            generation_prompt: probe
                .without_generation_prompt(&[user(USER)])
                .is_some_and(|text| text != plain),
            thinking: names
                .into_iter()
                .filter(|name| name.contains("think") || name == "reasoning")
                .take(MAX_SWITCHES)
                .find(|name| probe.switches(name)),
            ..Self::unknown()
        };
        found.probe_calls(&probe);
        found
    }

    /// What becomes of calls and of what tools answer; where no form of a call is printed, results alone.
    fn probe_calls(&mut self, probe: &Probe<'_>) {
        let prints =
            |messages: &[Value], words: &[&str], offered| probe.prints(messages, words, offered).is_some();
        let Some(form) = Form::find(probe) else {
            let talk = [user(USER), message("assistant", ASSISTANT), answer()];
            self.tool_results = prints(&talk, &[RESULT], true);
            self.results_without_tools = self.tool_results && prints(&talk, &[RESULT], false);
            return;
        };
        let plain = [user(USER), form.asked(None), answer()];
        let empty = Form { null_content: false, ..form };
        let mut several = form.asked(None);
        if let Some(calls) = several.get_mut("tool_calls").and_then(Value::as_array_mut) {
            calls.push(form.call(OTHER_CALL, "probe0002"));
        }
        let said = message("assistant", ASSISTANT);
        self.tool_calls = true;
        self.null_content = form.null_content;
        self.string_arguments = form.string_arguments;
        self.empty_content = prints(&[user(USER), empty.asked(None), answer()], &[CALL, ARGUMENT], true);
        self.calls_without_tools = prints(&plain, &[CALL, ARGUMENT], false);
        self.parallel_calls =
            prints(&[user(USER), several, answer(), second_answer()], &[CALL, ARGUMENT, OTHER_CALL], true);
        self.text_beside_calls =
            prints(&[user(USER), form.asked(Some(ASSISTANT)), answer()], &[ASSISTANT, CALL, ARGUMENT], true);
        self.text_before_calls =
            prints(&[user(USER), said, form.asked(None), answer()], &[ASSISTANT, CALL, ARGUMENT], true);
        self.tool_results = prints(&plain, &[RESULT], true);
        self.results_without_tools = prints(&plain, &[RESULT], false);
        self.system_before_results = prints(
            &[message("system", SYSTEM), user(USER), form.asked(None), answer()],
            &[SYSTEM, USER, CALL],
            true,
        );
    }

    /// For people: name and value, in order.
    pub fn facts(&self) -> Vec<(String, String)> {
        let said = |flag| String::from(if flag { "yes" } else { "no" });
        [
            ("system role", said(self.system_role)),
            ("tools", said(self.tools)),
            ("tool results", said(self.tool_results)),
            ("thinking switch", self.thinking.clone().unwrap_or_else(|| "none".into())),
            ("generation prompt", said(self.generation_prompt)),
            ("strict alternation", said(self.strict_alternation)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
}

/// How an assistant's call is written for the template.
#[derive(Clone, Copy)]
struct Form {
    null_content: bool,
    string_arguments: bool,
}

impl Form {
    /// The form in which a call's name and argument are printed.
    fn find(probe: &Probe<'_>) -> Option<Self> {
        [false, true].into_iter().find_map(|string_arguments| {
            let written = |null_content| {
                let form = Self { null_content, string_arguments };
                probe
                    .prints(&[user(USER), form.asked(None), answer()], &[CALL, ARGUMENT], true)
                    .map(|text| (form, text))
            };
            match (written(true), written(false)) {
                // Python prints a null as a word.
                (Some((_, null)), Some((form, empty))) if nones(&null) != nones(&empty) => Some(form),
                (null, empty) => null.or(empty).map(|(form, _)| form),
            }
        })
    }

    fn call(self, name: &str, id: &str) -> Value {
        let arguments = json!({ARGUMENT: ARGUMENT});
        let arguments = if self.string_arguments { arguments.to_string().into() } else { arguments };
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    }

    /// An assistant's message with one call.
    fn asked(self, content: Option<&str>) -> Value {
        let missing = if self.null_content { Value::Null } else { "".into() };
        let content = content.map_or(missing, Value::from);
        // Some templates ask for ids of nine letters and digits.
        json!({"role": "assistant", "content": content, "tool_calls": [self.call(CALL, "probe0001")]})
    }
}

struct Probe<'a> {
    render: &'a dyn Fn(TemplateInput) -> Option<String>,
    /// Write contents as lists of parts.
    parts: bool,
}

impl<'a> Probe<'a> {
    /// With the form of content in which a question is printed, and what is printed then. Contents
    /// that are lost in both forms stay texts; none where the template refuses both.
    fn new(render: &'a dyn Fn(TemplateInput) -> Option<String>) -> Option<(Self, String)> {
        let written = |parts| {
            let probe = Self { render, parts };
            probe.render(&[user(USER)], None).map(|text| (probe, text))
        };
        let is_kept = |found: &(Self, String)| found.1.contains(USER);
        let plain = written(false);
        if plain.as_ref().is_some_and(is_kept) {
            return plain;
        }
        written(true).filter(is_kept).or(plain)
    }

    fn input(&self, messages: &[Value], tools: Option<Value>) -> TemplateInput {
        let mut messages = messages.to_vec();
        if self.parts {
            messages.iter_mut().for_each(as_parts);
        }
        TemplateInput {
            messages: messages.into(),
            tools: tools.unwrap_or(Value::Null),
            add_generation_prompt: true,
            variables: Map::new(),
        }
    }

    fn render(&self, messages: &[Value], tools: Option<Value>) -> Option<String> {
        (self.render)(self.input(messages, tools))
    }

    /// What is printed, if all the words are in it.
    fn prints(&self, messages: &[Value], words: &[&str], offered: bool) -> Option<String> {
        let text = self.render(messages, offered.then(tools))?;
        words.iter().all(|word| text.contains(word)).then_some(text)
    }

    fn without_generation_prompt(&self, messages: &[Value]) -> Option<String> {
        (self.render)(TemplateInput { add_generation_prompt: false, ..self.input(messages, None) })
    }

    /// Whether a variable's truth changes the prompt.
    fn switches(&self, name: &str) -> bool {
        let with = |value: bool| {
            let mut input = self.input(&[user(USER)], None);
            input.variables.insert(name.to_owned(), value.into());
            (self.render)(input)
        };
        matches!((with(true), with(false)), (Some(on), Some(off)) if on != off)
    }
}

/// What a tool answered.
fn answer() -> Value {
    json!({"role": "tool", "content": RESULT, "tool_call_id": "probe0001", "name": CALL})
}

fn second_answer() -> Value {
    json!({"role": "tool", "content": RESULT, "tool_call_id": "probe0002", "name": OTHER_CALL})
}

/// Makes a message's content a list of one part, if it is a text.
pub(crate) fn as_parts(message: &mut Value) {
    if let Some(content) = message.get_mut("content")
        && content.is_string()
    {
        *content = json!([{"type": "text", "text": content.take()}]);
    }
}

/// How often a text says "none".
fn nones(text: &str) -> usize {
    text.matches("None").count() + text.matches("none").count()
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn user(content: &str) -> Value {
    message("user", content)
}

/// One tool.
fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {}, "required": []});
    let function = json!({"name": TOOL, "description": "Probes.", "parameters": parameters});
    json!([{"type": "function", "function": function}])
}
