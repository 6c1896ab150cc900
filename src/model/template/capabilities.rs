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
const RESULT: &str = "greenroomproberesult";

/// What a template can do.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// It prints a system message that comes first.
    pub system_role: bool,
    /// It prints several system messages that come first.
    pub system_neighbours: bool,
    /// It prints a system message in the middle of a conversation, and the first one as well.
    pub system_anywhere: bool,
    /// It refuses or loses neighbours of one role: user and assistant must alternate.
    pub strict_alternation: bool,
    /// It prints tool definitions.
    pub tools: bool,
    /// It prints the assistant's calls.
    pub tool_calls: bool,
    /// It takes an assistant's call without content as null; else it gets an empty text.
    pub null_content: bool,
    /// It prints what tools answered.
    pub tool_results: bool,
    /// It can end with the beginning of the assistant's turn.
    pub generation_prompt: bool,
    /// The variable that turns thinking on and off.
    pub thinking: Option<String>,
}

impl Capabilities {
    /// Those of a template of which nothing is known.
    pub(super) fn unknown() -> Self {
        Self {
            system_role: true,
            system_neighbours: true,
            system_anywhere: true,
            strict_alternation: false,
            tools: false,
            tool_calls: false,
            null_content: true,
            tool_results: false,
            generation_prompt: false,
            thinking: None,
        }
    }

    /// Renders and looks. `names` are the template's free variables.
    pub(super) fn probe(
        render: &dyn Fn(TemplateInput) -> Option<String>,
        names: impl IntoIterator<Item = String>,
    ) -> Self {
        let probe = Probe { render };
        let Some(plain) = probe.render(&[user(USER)], None) else { return Self::unknown() };
        let prints = |messages: &[Value], words: &[&str]| {
            probe.render(messages, None).is_some_and(|text| words.iter().all(|word| text.contains(word)))
        };
        let said = message("assistant", ASSISTANT);
        let system = message("system", SYSTEM);
        let calls = probe.calls("".into());
        let calls_print = |word: &str| calls.as_ref().is_some_and(|text| text.contains(word));
        let tools = probe.render(&[user(USER)], Some(tools()));
        Self {
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
            tool_calls: calls_print(TOOL),
            null_content: match (&calls, probe.calls(Value::Null)) {
                // Python prints a null as a word.
                (Some(empty), Some(null)) => nones(&null) == nones(empty),
                (None, _) => true,
                (Some(_), None) => false,
            },
            tool_results: calls_print(RESULT),
            generation_prompt: probe
                .without_generation_prompt(&[user(USER)])
                .is_some_and(|text| text != plain),
            thinking: names
                .into_iter()
                .filter(|name| name.contains("think") || name == "reasoning")
                .take(MAX_SWITCHES)
                .find(|name| probe.switches(name)),
        }
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

struct Probe<'a> {
    render: &'a dyn Fn(TemplateInput) -> Option<String>,
}

impl Probe<'_> {
    fn input(messages: &[Value], tools: Option<Value>) -> TemplateInput {
        TemplateInput {
            messages: messages.to_vec().into(),
            tools: tools.unwrap_or(Value::Null),
            add_generation_prompt: true,
            variables: Map::new(),
        }
    }

    fn render(&self, messages: &[Value], tools: Option<Value>) -> Option<String> {
        (self.render)(Self::input(messages, tools))
    }

    fn without_generation_prompt(&self, messages: &[Value]) -> Option<String> {
        (self.render)(TemplateInput { add_generation_prompt: false, ..Self::input(messages, None) })
    }

    /// A call with such a content, and its answer.
    fn calls(&self, content: Value) -> Option<String> {
        // Some templates ask for ids of nine letters and digits.
        let call =
            json!({"id": "probe0001", "type": "function", "function": {"name": TOOL, "arguments": {}}});
        let asked = json!({"role": "assistant", "content": content, "tool_calls": [call]});
        let answer = json!({"role": "tool", "content": RESULT, "tool_call_id": "probe0001", "name": TOOL});
        self.render(&[user(USER), asked, answer], Some(tools()))
    }

    /// Whether a variable's truth changes the prompt.
    fn switches(&self, name: &str) -> bool {
        let with = |value: bool| {
            let mut input = Self::input(&[user(USER)], None);
            input.variables.insert(name.to_owned(), value.into());
            (self.render)(input)
        };
        matches!((with(true), with(false)), (Some(on), Some(off)) if on != off)
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
