//! `PreparationExecutor`: template, tokens and limits, on threads of their own.
//!
//! Text only and short; nothing here waits. A panic costs its job, never the thread.

mod boundary;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use actix::prelude::*;
use serde_json::Value;

use crate::actors::messages::{Prepare, Prepared};
pub(crate) use crate::actors::preparation::boundary::Primers;
use crate::actors::preparation::boundary::breakpoints;
use crate::actors::scheduler::core::panic_message;
use crate::cache::TokenHistory;
use crate::config::SamplingConfig;
use crate::model::text::{Rendered, TextModel, strip_nonce_lines};
use crate::types::{
    Clock, PrepareError, PreparedPrompt, ReadAnswer, Refusal, SamplingOptions, SamplingParams, StopRules,
    TokenId, ToolChoice,
};

/// See the module.
pub(crate) struct PreparationExecutor {
    /// The operator's defaults.
    pub(crate) defaults: Arc<SamplingConfig>,
    /// Patterns of lines that are taken out.
    pub(crate) nonce_lines: Arc<[String]>,
    /// What earlier answers were made of.
    pub(crate) history: Arc<TokenHistory>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) primers: Primers,
    /// Never used: its last clone's drop tells that all threads have ended.
    pub(crate) _alive: tokio::sync::mpsc::Sender<()>,
}

impl Actor for PreparationExecutor {
    type Context = SyncContext<Self>;
}

impl Handler<Prepare> for PreparationExecutor {
    type Result = Result<Prepared, Refusal>;

    fn handle(&mut self, mut job: Prepare, _: &mut Self::Context) -> Self::Result {
        let prompt = catch_unwind(AssertUnwindSafe(|| self.prepare(&mut job)))
            .map_err(|payload| {
                let message = panic_message(&*payload);
                tracing::error!(%message, "a preparation panicked");
                Refusal::Internal { message: "the prompt could not be prepared".into() }
            })?
            .map_err(Refusal::Prepare)?;
        Ok(Prepared { ticket: job.ticket, prompt })
    }
}

impl PreparationExecutor {
    /// Template, ids, limits, sampling, ends, and what the prompt cache is to know.
    fn prepare(&mut self, job: &mut Prepare) -> Result<PreparedPrompt, PrepareError> {
        // The HTTP side has checked its fields; an application that embeds us has not.
        job.request.check()?;
        if job.request.tool_choice != ToolChoice::Auto {
            let message = "a call cannot be forced yet".to_owned();
            return Err(PrepareError::Field { field: "tool_choice".to_owned(), message });
        }
        let stripped = strip_nonce_lines(&mut job.request, &self.nonce_lines);
        if let Some(pattern) = &stripped.pattern {
            let attributes = [("lines", stripped.lines.into()), ("pattern", pattern.as_str().into())];
            job.ticket.trace.mark("prompt.normalized", self.clock.now(), &attributes);
        }
        if job.request.cache.sort_tools {
            sort_tools(&mut job.request.tools);
        }
        let (rendered, mut prompt) = prepare(job, &self.defaults, &self.history)?;
        let (text, request) = (&job.text, &job.request);
        if request.prompt.is_none() {
            prompt.stable = self.primers.stable(text, request, &rendered, &prompt.tokens, job.now);
            prompt.breakpoints = breakpoints(text, request, &rendered, &prompt.tokens, job.now);
        }
        prompt.stripped = stripped.lines;
        Ok(prompt)
    }
}

/// By name; only where the client asks for it.
fn sort_tools(tools: &mut [Value]) {
    let name = |tool: &Value| tool.pointer("/function/name").and_then(Value::as_str).unwrap_or("").to_owned();
    tools.sort_by_key(name);
}

/// Ids of the prompt: those that earlier answers were made of as far as they spell it.
fn encode(
    text: &TextModel,
    rendered: &Rendered,
    history: &TokenHistory,
    salt: Option<&str>,
) -> Result<Vec<TokenId>, PrepareError> {
    let spelled = text.spell(rendered);
    let of = TokenHistory::of(&text.name, salt);
    let known = history.candidates(&of, spelled.text.as_bytes(), |ids| text.text_of(ids));
    for ids in known {
        if let Some(ids) = text.encode_behind(&ids, &spelled, rendered)? {
            return Ok(ids);
        }
    }
    text.encode(rendered)
}

/// Template, ids, limits, sampling, ends. Pure.
fn prepare(
    job: &Prepare,
    defaults: &SamplingConfig,
    history: &TokenHistory,
) -> Result<(Rendered, PreparedPrompt), PrepareError> {
    let request = &job.request;
    let rendered = match &request.prompt {
        Some(prompt) => TextModel::raw(prompt),
        None => job.text.render(request, job.now)?,
    };
    // Encoding takes long where a text is long, and others wait: what cannot fit is not begun.
    let least = job.text.least_tokens(&rendered);
    if least >= job.context {
        return Err(PrepareError::PromptTooLong { least, limit: job.context });
    }
    let tokens = encode(&job.text, &rendered, history, request.cache.salt.as_deref())?;
    let prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    if prompt == 0 {
        return Err(PrepareError::Field {
            field: if request.prompt.is_some() { "prompt" } else { "messages" }.into(),
            message: "the prompt has no tokens: write something".into(),
        });
    }
    if prompt >= job.context {
        return Err(PrepareError::ContextExceeded { prompt, limit: job.context });
    }
    let sampling = resolve(&request.sampling, defaults, &job.text.defaults, job.seed);
    check_bias(&sampling.logit_bias, &job.text)?;
    let room = job.context - prompt;
    let asked = request.max_tokens.or(defaults.max_tokens).unwrap_or(room);
    let prompt = PreparedPrompt {
        tokens,
        sampling: Arc::new(sampling),
        stop: StopRules {
            strings: request.stop.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            tokens: if request.ignore_eos { Vec::new() } else { job.text.end_tokens.clone() },
        },
        max_new_tokens: asked.clamp(1, room),
        scores: request.scores,
        read: request.prompt.is_none().then(|| ReadAnswer {
            tools: request.tools.clone().into(),
            is_thinking: job.text.answer_form().format.opens_thought(&rendered.text()),
            seed: job.seed,
        }),
        stable: prompt,
        breakpoints: Vec::new(),
        stripped: 0,
        session: request.cache.session.clone(),
        salt: request.cache.salt.clone(),
    };
    Ok((rendered, prompt))
}

/// Where nobody says a temperature: lively, but small models keep their thread.
const TEMPERATURE: f32 = 0.7;

/// The request's values, else the operator's, else the model's, else neutral ones.
fn resolve(
    asked: &SamplingOptions,
    operator: &SamplingConfig,
    model: &SamplingOptions,
    seed: u64,
) -> SamplingParams {
    let temperature = asked.temperature.or(operator.temperature).or(model.temperature);
    let top_k = asked.top_k.or(operator.top_k).or(model.top_k);
    let top_p = asked.top_p.or(operator.top_p).or(model.top_p);
    let min_p = asked.min_p.or(operator.min_p).or(model.min_p);
    let repetition = asked.repetition_penalty.or(operator.repetition_penalty).or(model.repetition_penalty);
    SamplingParams {
        temperature: temperature.unwrap_or(TEMPERATURE),
        top_k: top_k.unwrap_or(0),
        top_p: top_p.unwrap_or(1.0),
        min_p: min_p.unwrap_or(0.0),
        repetition_penalty: repetition.unwrap_or(1.0),
        presence_penalty: asked.presence_penalty.or(model.presence_penalty).unwrap_or(0.0),
        frequency_penalty: asked.frequency_penalty.or(model.frequency_penalty).unwrap_or(0.0),
        penalty_window: asked.penalty_window.or(model.penalty_window),
        logit_bias: asked.logit_bias.clone(),
        seed: asked.seed.unwrap_or(seed),
    }
}

fn check_bias(bias: &[(TokenId, f32)], text: &TextModel) -> Result<(), PrepareError> {
    let vocab = text.tokenizer.vocab_size();
    match bias.iter().find(|(token, _)| token.0 >= vocab) {
        None => Ok(()),
        Some((token, _)) => Err(PrepareError::Field {
            field: format!("logit_bias.{token}"),
            message: format!("no such token: the vocabulary has ids 0 to {}", vocab.saturating_sub(1)),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::types::{ChatMessage, ChatRequest, LiveCount, RequestId, Role, TicketOffice};

    fn job(request: ChatRequest, context: u32) -> Prepare {
        let office = TicketOffice::new(1, LiveCount::default());
        Prepare {
            ticket: office.try_take(RequestId(1), Duration::ZERO).unwrap(),
            request,
            text: Arc::new(TextModel::scripted()),
            context,
            seed: 7,
            now: SystemTime::UNIX_EPOCH,
        }
    }

    fn executor() -> PreparationExecutor {
        PreparationExecutor {
            defaults: Arc::default(),
            nonce_lines: crate::config::CacheConfig::default().nonce_lines.into(),
            history: Arc::default(),
            clock: Arc::new(crate::types::ManualClock::new()),
            primers: Primers::default(),
            _alive: tokio::sync::mpsc::channel(1).0,
        }
    }

    fn prepared(mut job: Prepare) -> Result<PreparedPrompt, PrepareError> {
        executor().prepare(&mut job)
    }

    fn request() -> ChatRequest {
        ChatRequest { messages: vec![ChatMessage::text(Role::User, "hello")], ..ChatRequest::default() }
    }

    #[test]
    fn values_come_from_the_request_then_the_operator_then_the_model() {
        let asked = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
        let operator = SamplingConfig { temperature: Some(0.5), top_k: Some(5), ..SamplingConfig::default() };
        let model =
            SamplingOptions { top_k: Some(9), top_p: Some(0.9), seed: None, ..SamplingOptions::default() };
        let got = resolve(&asked, &operator, &model, 7);
        assert_eq!((got.temperature, got.top_k, got.top_p, got.seed), (0.0, 5, 0.9, 7));
        assert_eq!((got.min_p, got.repetition_penalty), (0.0, 1.0));
        let silent = resolve(&SamplingOptions::default(), &SamplingConfig::default(), &model, 7);
        assert_eq!((silent.temperature, silent.top_k), (TEMPERATURE, 9));
    }

    #[test]
    fn a_prompt_that_fills_the_context_is_refused_with_both_numbers() {
        let fits = prepared(job(request(), 4096)).unwrap();
        let length = u32::try_from(fits.tokens.len()).unwrap();
        assert_eq!(fits.max_new_tokens, 4096 - length);
        let error = prepared(job(request(), length)).unwrap_err();
        assert_eq!(error, PrepareError::ContextExceeded { prompt: length, limit: length });
        let tight = prepared(job(request(), length + 1)).unwrap();
        assert_eq!(tight.max_new_tokens, 1);
    }

    #[test]
    fn a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded() {
        // The longest token, `<|im_start|>`, has twelve bytes; all others have one.
        let long = ChatRequest {
            messages: vec![ChatMessage::text(Role::User, "x".repeat(12 * 100))],
            ..ChatRequest::default()
        };
        let error = prepared(job(long.clone(), 100)).unwrap_err();
        let PrepareError::PromptTooLong { least, limit: 100 } = error else { panic!("{error:?}") };
        assert!((100..=110).contains(&least), "{least}");
        assert!(error.to_string().contains(&format!("at least {least} tokens")), "{error}");
        let counted = prepared(job(long, 200)).unwrap_err();
        assert!(matches!(counted, PrepareError::ContextExceeded { limit: 200, .. }), "{counted:?}");
    }

    #[test]
    fn limits_are_clamped_and_ends_can_be_ignored() {
        let asked = ChatRequest { max_tokens: Some(100_000), ignore_eos: true, ..request() };
        let got = prepared(job(asked, 100)).unwrap();
        assert_eq!(got.max_new_tokens as usize, 100 - got.tokens.len());
        assert!(got.stop.tokens.is_empty());
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_name_wherever_they_come_from() {
        type Change = fn(&mut ChatRequest);
        let wrong = |change: Change| {
            let mut asked = request();
            change(&mut asked);
            prepared(job(asked, 4096)).map(drop)
        };
        let cases: [(Change, &str); 16] = [
            (|r| r.sampling.temperature = Some(f32::NAN), "temperature"),
            (|r| r.sampling.temperature = Some(-3.0), "temperature"),
            (|r| r.sampling.temperature = Some(f32::INFINITY), "temperature"),
            (|r| r.sampling.top_p = Some(7.0), "top_p"),
            (|r| r.sampling.top_p = Some(f32::NAN), "top_p"),
            (|r| r.sampling.min_p = Some(-0.1), "min_p"),
            (|r| r.sampling.repetition_penalty = Some(1e-40), "repetition_penalty"),
            (|r| r.sampling.repetition_penalty = Some(0.0), "repetition_penalty"),
            (|r| r.sampling.repetition_penalty = Some(101.0), "repetition_penalty"),
            (|r| r.sampling.presence_penalty = Some(2.1), "presence_penalty"),
            (|r| r.sampling.frequency_penalty = Some(f32::NEG_INFINITY), "frequency_penalty"),
            (|r| r.sampling.penalty_window = Some(0), "penalty_window"),
            (|r| r.sampling.logit_bias = vec![(TokenId(3), f32::NAN)], "logit_bias.3"),
            (|r| r.sampling.logit_bias = vec![(TokenId(3), 1.0), (TokenId(4), -101.0)], "logit_bias.4"),
            (|r| r.max_tokens = Some(0), "max_tokens"),
            (|r| r.sampling.top_p = Some(-f32::MIN_POSITIVE), "top_p"),
        ];
        for (change, name) in cases {
            let error = wrong(change).unwrap_err();
            assert!(matches!(&error, PrepareError::Field { field, .. } if field == name), "{error}");
        }
        let ends: [Change; 4] = [
            |r| r.sampling.temperature = Some(0.0),
            |r| r.sampling.top_p = Some(1.0),
            |r| r.sampling.repetition_penalty = Some(0.01),
            |r| r.max_tokens = Some(1),
        ];
        for change in ends {
            assert_eq!(wrong(change), Ok(()));
        }
    }

    #[test]
    fn a_bias_on_a_token_that_does_not_exist_names_it() {
        let mut asked = request();
        asked.sampling.logit_bias = vec![(TokenId(9999), 1.0)];
        let error = prepared(job(asked, 4096)).unwrap_err();
        assert!(error.to_string().starts_with("logit_bias.9999: no such token"), "{error}");
    }
}
