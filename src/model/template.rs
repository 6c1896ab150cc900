//! Chat templates: Jinja in the environment that models' authors write for.
//!
//! Templates come with models, so they are untrusted: instructions and memory
//! are bounded by fuel, output and recursion by limits, and nothing can be
//! loaded or included. What a template prints is text; which of it is control
//! tokens is decided by [`crate::model::text`].
//!
//! What is not bounded: adding lists (`l + l`) costs one instruction and makes a view, so a loop can
//! hold 2^n items in n views. What walks such a list inside one instruction (`in`, `==`, `| list`,
//! `~`, other filters) is charged afterwards or not at all, and so is `~` over lists that share their
//! parts. A template made for that can take a thread and memory without end, already when it is
//! loaded; loops over such a list, `tojson` and printing are bounded. Load templates from people
//! whom you trust not to do that.

mod calendar;
mod capabilities;
mod environment;
mod json;

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Serde;
use minijinja::{Environment, Value};
use serde_json::Map;

use crate::types::PrepareError;
pub use capabilities::Capabilities;
pub(crate) use capabilities::as_parts;

/// Instructions and, 64 bytes each, memory that one rendering may use.
const FUEL: u64 = 8 << 20;
/// Most bytes that one rendering may print.
const MAX_OUTPUT: usize = 64 << 20;
/// The same for each of the renderings that find out what a template can do.
const PROBE_FUEL: u64 = 256 << 10;
/// Longest template accepted, bytes.
const MAX_SOURCE: usize = 4 << 20;
/// Nesting of calls and blocks.
const RECURSION: usize = 200;
/// The one template's name in its environment, and in messages.
const NAME: &str = "chat_template";
/// What the server sets itself.
const RESERVED: &[&str] = &["messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"];

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Its source.
    pub source: String,
    environment: Environment<'static>,
    special: Map<String, serde_json::Value>,
    /// What it can do itself.
    own: Capabilities,
    /// What it and the one for tools can do together.
    together: Capabilities,
    /// The one to use where tools are offered, if there is one of its own.
    for_tools: Option<Box<ChatTemplate>>,
}

/// What a template is rendered with.
#[derive(Clone, Debug)]
pub struct TemplateInput {
    /// Messages as the template sees them.
    pub messages: serde_json::Value,
    /// Tool definitions, or null.
    pub tools: serde_json::Value,
    /// End with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// More variables; may replace `bos_token` and `eos_token`.
    pub variables: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles a template and finds out what it can do, by a few renderings within bounds.
    /// `special` holds its variables for special tokens, such as `bos_token`.
    ///
    /// # Errors
    /// The compiler's message with the line.
    pub fn compile(source: String, special: Map<String, serde_json::Value>) -> Result<Self, String> {
        if source.len() > MAX_SOURCE {
            return Err(format!("{} bytes long; at most {MAX_SOURCE} are accepted", source.len()));
        }
        let mut environment = environment::hugging_face(PROBE_FUEL, RECURSION)?;
        environment
            .add_template_owned(NAME, environment::without_generation_blocks(&source))
            .map_err(|error| error.to_string())?;
        let own = Capabilities::unknown();
        let together = Capabilities::unknown();
        let mut template = Self { source, environment, special, own, together, for_tools: None };
        template.own = template.probe();
        template.together = template.own.clone();
        template.environment.set_fuel(Some(FUEL));
        Ok(template)
    }

    /// Adds the template to use where a request offers tools.
    pub fn with_tools_template(mut self, other: Self) -> Self {
        let theirs = &other.own;
        self.together.tools = theirs.tools;
        self.together.tool_calls = theirs.tool_calls;
        self.together.tool_results = theirs.tool_results;
        self.for_tools = Some(Box::new(other));
        self
    }

    /// As [`ChatTemplate::compile`], for a model that is going to answer with it.
    ///
    /// # Errors
    /// Besides the compiler's: a template that renders a question and loses it, however its content
    /// is written.
    pub fn load(source: String, special: Map<String, serde_json::Value>) -> Result<Self, String> {
        let template = Self::compile(source, special)
            .map_err(|message| format!("the chat template does not compile: {message}"))?;
        if template.own.user_text {
            return Ok(template);
        }
        Err("the chat template cannot be used: it does not print what the user says, neither a content that is a \
             text nor one that is a list of parts"
            .into())
    }

    /// The template for a request with or without tools, or calls among its messages.
    pub fn of(&self, has_tools: bool) -> &Self {
        match &self.for_tools {
            Some(other) if has_tools => other,
            _ => self,
        }
    }

    /// What it can do, the one for tools included.
    pub fn capabilities(&self) -> &Capabilities {
        &self.together
    }

    /// What it can do by itself.
    pub(crate) fn own_capabilities(&self) -> &Capabilities {
        &self.own
    }

    fn probe(&self) -> Capabilities {
        let template = self.environment.get_template(NAME);
        let names = template.map(|template| template.undeclared_variables(false)).unwrap_or_default();
        // In order, so that every load finds the same.
        let names: std::collections::BTreeSet<String> = names.into_iter().collect();
        Capabilities::probe(&|input| self.render(&input, UNIX_EPOCH).ok(), names)
    }

    /// Renders. `now` is what `strftime_now` sees, as UTC.
    ///
    /// # Errors
    /// `Template` with the template's own words when it refuses, else with the engine's;
    /// `Field` for a variable that is the server's own.
    pub fn render(&self, input: &TemplateInput, now: SystemTime) -> Result<String, PrepareError> {
        if let Some(name) = RESERVED.iter().find(|name| input.variables.contains_key(**name)) {
            return Err(PrepareError::Field {
                field: "chat_template_kwargs".into(),
                message: format!("`{name}` is set by the server; leave it out"),
            });
        }
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), Value::from(Serde(&input.messages))),
            ("tools".into(), Value::from(Serde(&input.tools))),
            ("add_generation_prompt".into(), Value::from(input.add_generation_prompt)),
            ("strftime_now".into(), environment::strftime_now(now)),
        ];
        for (name, value) in self.special.iter().filter(|(name, _)| !input.variables.contains_key(*name)) {
            context.push((name.clone(), Value::from(Serde(value))));
        }
        if !input.variables.contains_key("documents") {
            context.push(("documents".into(), Value::from(())));
        }
        for (name, value) in &input.variables {
            context.push((name.clone(), Value::from(Serde(value))));
        }
        let template = self.environment.get_template(NAME).map_err(|error| refusal(&error))?;
        let mut output = environment::BoundedOutput::new(MAX_OUTPUT);
        template
            .render_captured_to(Value::from_pairs(context), &mut output)
            .map_err(|error| refusal(&error))?;
        output.into_text().map_err(|message| PrepareError::Template { message })
    }
}

/// A value as Python's `json.dumps` writes it, which is how models write their calls' arguments.
///
/// # Errors
/// `Template` for a value that is nested too deep or too long.
pub(crate) fn python_json(value: &serde_json::Value) -> Result<String, PrepareError> {
    json::write(&Value::from(Serde(value)), &json::Style::default(), MAX_OUTPUT, &mut |_| Ok(()))
        .map_err(|error| refusal(&error))
}

/// The template's own words, if it raised, else the engine's.
fn refusal(error: &minijinja::Error) -> PrepareError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(step) = cause {
        if let Some(raised) = step.downcast_ref::<environment::Raised>() {
            return PrepareError::Template { message: raised.0.clone() };
        }
        cause = step.source();
    }
    PrepareError::Template { message: error.to_string() }
}
