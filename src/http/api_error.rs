//! Every error as it goes over the wire: status, type, code, param, retry.
//!
//! The only place that knows status codes of errors. Messages name the field
//! and the fix; they hold no paths, no prompt text, no causes from inside.
//! Codes are stable: clients switch on them.

use std::fmt;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::{HttpResponse, ResponseError};

use super::dto::{ErrorBody, ErrorDetail};
use crate::types::{Failure, FailureReason, PrepareError, Refusal};

/// Seconds after which a stopping server's successor may be there.
const RESTART_RETRY: Duration = Duration::from_secs(5);

/// Says to OpenAI's clients whether they should try again by themselves.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// An error in OpenAI's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// Status of the response.
    pub status: StatusCode,
    /// Class: `invalid_request_error`, `rate_limit_error`, `server_error`.
    pub kind: &'static str,
    /// Stable name of the situation.
    pub code: &'static str,
    /// The request's field, where there is one.
    pub param: Option<String>,
    /// What is wrong and what would be right.
    pub message: String,
    /// When to try again; `None` = not by itself.
    pub retry_after: Option<Duration>,
    /// Whether the connection ends after this response.
    pub close: bool,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: String) -> Self {
        Self { status, kind, code, param: None, message, retry_after: None, close: false }
    }

    /// The client's fault.
    pub fn invalid(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", code, message.into())
    }

    /// The client's fault in one field; the message begins with its path.
    pub fn field(path: &str, code: &'static str, message: impl fmt::Display) -> Self {
        let mut error = Self::invalid(StatusCode::BAD_REQUEST, code, format!("{path}: {message}"));
        error.param = Some(path.to_owned());
        error
    }

    /// Our fault, or our state.
    pub fn server(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::new(status, "server_error", code, message.into())
    }

    fn retry(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Ends the connection after the response.
    pub fn closing(mut self) -> Self {
        self.close = true;
        self
    }

    /// The body.
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorDetail {
                message: &self.message,
                r#type: self.kind,
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status);
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            response.insert_header((header::RETRY_AFTER, seconds.max(1).to_string()));
        } else if self.status.is_server_error() {
            response.insert_header((SHOULD_RETRY, HeaderValue::from_static("false")));
        }
        if self.close {
            response.force_close();
        }
        response.json(self.body())
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let unavailable = StatusCode::SERVICE_UNAVAILABLE;
        match refusal {
            Refusal::UnknownModel { .. } => {
                Self::invalid(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
            }
            Refusal::Busy { retry_after } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded", message)
                    .retry(retry_after)
            }
            Refusal::SessionLimit { retry_after, .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "session_limit", message)
                    .retry(retry_after)
            }
            Refusal::Loading { retry_after, .. } => {
                Self::server(unavailable, "model_loading", message).retry(retry_after)
            }
            Refusal::WouldExpire { retry_after, .. } => {
                Self::server(unavailable, "queue_timeout", message).retry(retry_after)
            }
            Refusal::EngineFailed { .. } => Self::server(unavailable, "engine_failed", message),
            Refusal::Draining => {
                Self::server(unavailable, "shutting_down", message).retry(RESTART_RETRY).closing()
            }
            Refusal::NotAvailable { .. } => {
                Self::server(StatusCode::NOT_IMPLEMENTED, "not_available", message)
            }
            Refusal::Prepare(error) => error.into(),
            Refusal::Internal { .. } => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
        }
    }
}

impl From<PrepareError> for ApiError {
    fn from(error: PrepareError) -> Self {
        let message = error.to_string();
        let (code, param) = match error {
            PrepareError::Template { .. } => ("template_error", "messages".to_owned()),
            PrepareError::NoTemplate { .. } => ("no_chat_template", "model".to_owned()),
            PrepareError::ContextExceeded { .. } | PrepareError::PromptTooLong { .. } => {
                ("context_length_exceeded", "messages".to_owned())
            }
            PrepareError::MemoryExceeded { .. } => ("memory_exceeded", "messages".to_owned()),
            PrepareError::Field { field, .. } => ("invalid_value", field),
            PrepareError::Tokenize { .. } => ("tokenize_error", "messages".to_owned()),
        };
        Self::invalid(StatusCode::BAD_REQUEST, code, message).param(param)
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.message;
        let unavailable = StatusCode::SERVICE_UNAVAILABLE;
        let mut error = match failure.reason {
            FailureReason::EngineRestarted => {
                Self::server(unavailable, "engine_restarted", message).retry(Duration::from_secs(1))
            }
            FailureReason::RowFailed => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "generation_failed", message)
            }
            FailureReason::ShuttingDown => {
                Self::server(unavailable, "shutting_down", message).retry(RESTART_RETRY).closing()
            }
            FailureReason::StreamStalled => {
                Self::invalid(StatusCode::REQUEST_TIMEOUT, "stream_stalled", message)
            }
            FailureReason::OutOfMemory => Self::server(unavailable, "insufficient_memory", message),
            FailureReason::QueueTimeout => Self::server(unavailable, "queue_timeout", message),
            FailureReason::DeadlineExceeded => {
                Self::server(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
            }
        };
        error.retry_after = failure.retry_after.or(error.retry_after);
        error
    }
}

#[cfg(test)]
mod tests;
