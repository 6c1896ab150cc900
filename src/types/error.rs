//! Errors, one enum a layer. Status codes are the HTTP layer's matter.

use std::path::PathBuf;
use std::time::Duration;

use super::ids::SequenceId;
use super::size::ByteSize;

/// A request that was not accepted. Nothing has been computed for it.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Refusal {
    /// No such model here.
    #[error("the model `{asked}` does not exist here; available: {}", known.join(", "))]
    UnknownModel {
        /// As asked for.
        asked: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// Rows and queue are full.
    #[error("the server is at capacity; try again in {} s", retry_after.as_secs().max(1))]
    Busy {
        /// When a place is likely.
        retry_after: Duration,
    },
    /// As many live sessions are open as may be.
    #[error("{limit} live sessions are open, which is the limit (speech.max_sessions); finish or delete one, or try again in {} s", retry_after.as_secs().max(1))]
    SessionLimit {
        /// Sessions that may be open.
        limit: usize,
        /// When to try again.
        retry_after: Duration,
    },
    /// The model is still being loaded, or its engine is being rebuilt.
    #[error("the model `{model}` is still loading; try again in {} s", retry_after.as_secs().max(1))]
    Loading {
        /// Which.
        model: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The engine could not be brought up (again).
    #[error("the model `{model}` is not available: {message}")]
    EngineFailed {
        /// Which.
        model: String,
        /// Why, without paths.
        message: String,
    },
    /// The queue is longer than the request is willing to wait.
    #[error(
        "about {:.1} s would pass before this request is computed, its timeout is {:.1} s; try again in {} s",
        wait.as_secs_f64(), timeout.as_secs_f64(), retry_after.as_secs().max(1)
    )]
    WouldExpire {
        /// Expected time in the queue.
        wait: Duration,
        /// What the request allows in all.
        timeout: Duration,
        /// When the queue is likely short enough.
        retry_after: Duration,
    },
    /// The server is going down.
    #[error("the server is shutting down")]
    Draining,
    /// Something other than chat was asked of a part that is not there.
    #[error("{message}")]
    NotAvailable {
        /// What is missing and how to get it.
        message: String,
    },
    /// The request's own fault, found while preparing it.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// An actor was gone or a bound was broken: ours to mend.
    #[error("internal error: {message}")]
    Internal {
        /// One sentence.
        message: String,
    },
}

impl Refusal {
    /// A recording, where nobody can hear it.
    pub fn no_speech_model() -> Self {
        Self::NotAvailable {
            message: "no speech model is loaded: start the server with --speech-model".into(),
        }
    }
}

/// A request that cannot be turned into a prompt.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PrepareError {
    /// The template refused this conversation.
    #[error("the model's chat template refused the messages: {message}")]
    Template {
        /// The template's own words.
        message: String,
    },
    /// The model has no chat template.
    #[error(
        "the model `{model}` has no chat template: it is a base model; have it continue a text (POST /v1/completions)"
    )]
    NoTemplate {
        /// Which.
        model: String,
    },
    /// The prompt does not fit.
    #[error(
        "the prompt has {prompt} tokens, the context is {limit}: shorten it by at least {} tokens",
        prompt.saturating_sub(*limit) + 1
    )]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: u32,
        /// Tokens of the context; the prompt must be shorter.
        limit: u32,
    },
    /// The prompt is so long that its tokens need not be counted to know that it does not fit.
    #[error("the prompt has at least {least} tokens, the context is {limit}: shorten it")]
    PromptTooLong {
        /// Tokens of the prompt at the very least, judged by its bytes.
        least: u32,
        /// Tokens of the context; the prompt must be shorter.
        limit: u32,
    },
    /// The prompt fits the context, but not the memory for keys and values, even alone.
    #[error(
        "the prompt's {prompt} tokens need {need} of key-value memory with room to answer, there are {have}: \
         shorten it to at most {most} tokens, or raise engine.kv_memory_mib"
    )]
    MemoryExceeded {
        /// Tokens of the prompt.
        prompt: u32,
        /// Bytes that it needs.
        need: ByteSize,
        /// Bytes there are in all.
        have: ByteSize,
        /// Tokens of the longest prompt that fits.
        most: u32,
    },
    /// A field's value makes no sense for this model.
    #[error("{field}: {message}")]
    Field {
        /// The request's field.
        field: String,
        /// What is wrong and what would be right.
        message: String,
    },
    /// The tokenizer failed.
    #[error("the prompt could not be tokenized: {message}")]
    Tokenize {
        /// Why.
        message: String,
    },
}

/// A model that cannot be loaded. Messages name file, tensor and figure.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file system said no.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that is not what it should be.
    #[error("{}: {message}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong, with the figures.
        message: String,
    },
    /// A tensor that is missing, or has the wrong shape or type.
    #[error("tensor `{name}`: {message}")]
    Tensor {
        /// Its name in the file.
        name: String,
        /// What is wrong, with the figures.
        message: String,
    },
    /// Something that is right but that we do not support (yet).
    #[error("not supported: {message}")]
    Unsupported {
        /// What, and what is supported instead.
        message: String,
    },
    /// More memory is needed than there is.
    #[error("does not fit: {message}")]
    DoesNotFit {
        /// What is needed, what there is, what would fit.
        message: String,
    },
    /// Nothing usable at this place.
    #[error("{message}")]
    NotFound {
        /// What was looked for and how to get it.
        message: String,
    },
    /// The backend could not take the weights.
    #[error("the backend refused the model: {source}")]
    Backend {
        /// Why.
        source: EngineError,
    },
}

/// A failure inside an engine.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum EngineError {
    /// More key-value memory is needed than is free: a normal case for the scheduler.
    #[error("{need} bytes of key-value memory needed, {free} free")]
    KvFull {
        /// Bytes asked for.
        need: u64,
        /// Bytes there are.
        free: u64,
    },
    /// A sequence of an engine that is gone.
    #[error("sequence {sequence:?} belongs to an earlier engine")]
    StaleEpoch {
        /// Which.
        sequence: SequenceId,
    },
    /// A sequence that was never opened or is closed.
    #[error("sequence {sequence:?} is not open")]
    UnknownSequence {
        /// Which.
        sequence: SequenceId,
    },
    /// A plan that breaks a rule: our own fault.
    #[error("invalid plan: {message}")]
    InvalidPlan {
        /// Which rule.
        message: String,
    },
    /// The computation gave NaN or infinity.
    #[error("the model produced a value that is not a number")]
    NotANumber,
    /// The device or its library failed: every array is suspect.
    #[error("device error: {message}")]
    Device {
        /// The library's words.
        message: String,
    },
    /// A step panicked.
    #[error("the engine panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}
