//! The text side of a model: tokenizer, chat template, ends, defaults.
//!
//! Cheap to share (`Arc`), usable from any thread, no tensors. Preparation
//! threads render and encode with it, the scheduler detokenizes with it.
//!
//! Invariant: the text of a control token in a request's strings reaches the
//! model as ordinary text; only the template's own become control ids.

mod conversation;
mod normalise;
mod scripted;
mod shape;
mod spelling;

use std::collections::HashSet;
use std::sync::OnceLock;
use std::time::SystemTime;

use serde_json::{Map, Value};

use crate::model::output::OutputFormat;
use crate::model::template::{Capabilities, ChatTemplate, TemplateInput};
use crate::model::tokenizer::Tokenizer;
pub use normalise::{Stripped, strip_nonce_lines};
pub use spelling::Spelled;

use crate::types::{ChatMessage, ChatRequest, PrepareError, Role, SamplingOptions, TokenId};

/// Everything about a model that is text.
#[derive(Debug)]
pub struct TextModel {
    /// The model's name, for errors.
    pub name: String,
    /// Encoder and decoder.
    pub tokenizer: Tokenizer,
    /// `None` for a base model.
    pub template: Option<ChatTemplate>,
    /// Every id that ends a turn, not only the one in the metadata.
    pub end_tokens: Vec<TokenId>,
    /// The model's own limit in tokens.
    pub context: u32,
    /// The author's sampling defaults (`generation_config`).
    pub defaults: SamplingOptions,
    /// Facts for people: family, format, parameter count and so on, in order.
    pub facts: Vec<(String, String)>,
    /// How its answers are read, once that was found out.
    pub answers: OnceLock<AnswerForm>,
}

/// How a model's answers are read.
#[derive(Debug)]
pub struct AnswerForm {
    /// Markers and forms.
    pub format: OutputFormat,
    /// Control tokens whose text says something in an answer.
    spelled: HashSet<TokenId>,
}

impl AnswerForm {
    /// Whether the reader of an answer wants this control token's text.
    pub fn spells(&self, token: TokenId) -> bool {
        self.spelled.contains(&token)
    }
}

/// A conversation as the template wrote it, not yet tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendered {
    text: String,
    /// Marks what only looks like a control token.
    sentinel: Option<char>,
}

impl Rendered {
    /// The prompt as text, for people.
    pub fn text(&self) -> String {
        match self.sentinel {
            Some(mark) => self.text.replace(mark, ""),
            None => self.text.clone(),
        }
    }
}

/// The request's variables, with the template's own switch for thinking where the request says whether to.
fn variables(request: &ChatRequest, switch: Option<&str>) -> Map<String, Value> {
    let mut variables = request.template_kwargs.clone();
    if let (Some(on), Some(switch)) = (request.thinking, switch) {
        variables.entry(switch).or_insert(on.into());
    }
    variables
}

impl TextModel {
    /// How answers are read: found by what the template renders, the first time that somebody asks.
    pub fn answer_form(&self) -> &AnswerForm {
        self.answers.get_or_init(|| {
            let format = self.template.as_ref().map(OutputFormat::detect).unwrap_or_default();
            let controls = (0..self.tokenizer.vocab_size()).map(TokenId);
            let is_marker = |id: &TokenId| {
                self.tokenizer.is_control(*id)
                    && std::str::from_utf8(self.tokenizer.piece(*id))
                        .is_ok_and(|text| format.has_marker(text))
            };
            AnswerForm { spelled: controls.filter(is_marker).collect(), format }
        })
    }

    /// Writes a conversation as the model's prompt, up to the beginning of its answer.
    /// `now` is what a template that asks for the date gets.
    ///
    /// # Errors
    /// `NoTemplate` for a base model, `Template` with the template's words where it refuses the
    /// messages, `Field` where a variable or a text cannot be taken, or where it would lose a call or
    /// what a tool answered.
    pub fn render(&self, request: &ChatRequest, now: SystemTime) -> Result<Rendered, PrepareError> {
        self.render_messages(request, &request.messages, true, now)
    }

    /// The same with other messages in place of the request's; `begins_answer`: up to the beginning
    /// of an answer, else up to the end of the last message.
    ///
    /// # Errors
    /// See [`TextModel::render`].
    pub fn render_messages(
        &self,
        request: &ChatRequest,
        messages: &[ChatMessage],
        begins_answer: bool,
        now: SystemTime,
    ) -> Result<Rendered, PrepareError> {
        let template =
            self.template.as_ref().ok_or_else(|| PrepareError::NoTemplate { model: self.name.clone() })?;
        let has_tools = !request.tools.is_empty();
        let has_calls =
            messages.iter().any(|message| !message.tool_calls.is_empty() || message.role == Role::Tool);
        let template = template.of(has_tools || has_calls);
        let can = template.own_capabilities();
        let ends_with_user = messages.last().is_some_and(|last| last.role == Role::User);
        let folding = (!ends_with_user && !can.system_before_results)
            .then(|| Capabilities { system_role: false, ..can.clone() });
        let can = folding.as_ref().unwrap_or(can);
        shape::refuse_lost(messages, has_tools, can)?;
        let messages = shape::shaped(messages, can);
        let mut input = TemplateInput {
            messages: conversation::messages(&messages, can)?,
            tools: conversation::tools(&request.tools),
            add_generation_prompt: begins_answer,
            variables: variables(request, can.thinking.as_deref()),
        };
        let sentinel = conversation::disarm(&mut input, self.tokenizer.controls(), &template.source)?;
        let text = template.render(&input, now)?;
        Ok(Rendered { text, sentinel })
    }

    /// A prompt that is no conversation: it goes to the model as it stands.
    pub fn raw(prompt: &str) -> Rendered {
        Rendered { text: prompt.to_owned(), sentinel: None }
    }

    /// Facts about the chat template for people: what it can do, or that there is none.
    pub fn chat_facts(&self) -> Vec<(String, String)> {
        match &self.template {
            Some(template) => template.capabilities().facts(),
            None => vec![("chat template".into(), "none: a base model".into())],
        }
    }

    /// Tokens that the prompt has at the very least, known without encoding it.
    pub fn least_tokens(&self, rendered: &Rendered) -> u32 {
        let marks = rendered
            .sentinel
            .map_or(0, |mark| rendered.text.matches(mark).count().saturating_mul(mark.len_utf8()));
        self.tokenizer.least_tokens(rendered.text.len().saturating_sub(marks))
    }

    /// The prompt's ids. One BOS at most, and one exactly where the model wants it.
    ///
    /// # Errors
    /// `Tokenize` where the encoder fails.
    pub fn encode(&self, rendered: &Rendered) -> Result<Vec<TokenId>, PrepareError> {
        let mut ids = self.tokenizer.encode_marked(&rendered.text, rendered.sentinel)?;
        if let Some(bos) = self.tokenizer.bos() {
            let leading = ids.iter().take_while(|&&id| id == bos).count();
            if leading > 1 {
                ids.drain(1..leading);
            } else if leading == 0 && self.tokenizer.wants_bos() {
                ids.insert(0, bos);
            }
        }
        Ok(ids)
    }
}
