//! The whole table, as clients see it. A change here is a change of the API.

use super::*;
use crate::types::ByteSize;

/// `status type code param retry-after` of an error.
fn row(error: ApiError) -> String {
    let response = error.error_response();
    let retry = response.headers().get(header::RETRY_AFTER).map(|value| value.to_str().unwrap().to_owned());
    let should = response.headers().get(SHOULD_RETRY).map(|value| value.to_str().unwrap().to_owned());
    format!(
        "{} {} {} {} retry={} should={}",
        error.status.as_u16(),
        error.kind,
        error.code,
        error.param.as_deref().unwrap_or("-"),
        retry.as_deref().unwrap_or("-"),
        should.as_deref().unwrap_or("-"),
    )
}

#[test]
fn refusals() {
    let model = || "m".to_owned();
    let message = || "why".to_owned();
    let after = Duration::from_millis(2500);
    let table = [
        (
            Refusal::UnknownModel { asked: model(), known: vec![model()] },
            "404 invalid_request_error model_not_found model retry=- should=-",
        ),
        (Refusal::Busy { retry_after: after }, "429 rate_limit_error rate_limit_exceeded - retry=3 should=-"),
        (
            Refusal::Busy { retry_after: Duration::ZERO },
            "429 rate_limit_error rate_limit_exceeded - retry=1 should=-",
        ),
        (
            Refusal::Loading { model: model(), retry_after: after },
            "503 server_error model_loading - retry=3 should=-",
        ),
        (
            Refusal::EngineFailed { model: model(), message: message() },
            "503 server_error engine_failed - retry=- should=false",
        ),
        (
            Refusal::WouldExpire { wait: after, timeout: Duration::from_secs(1), retry_after: after },
            "503 server_error queue_timeout - retry=3 should=-",
        ),
        (Refusal::Draining, "503 server_error shutting_down - retry=5 should=-"),
        (
            Refusal::NotAvailable { message: message() },
            "501 server_error not_available - retry=- should=false",
        ),
        (Refusal::Internal { message: message() }, "500 server_error internal_error - retry=- should=false"),
    ];
    for (refusal, expected) in table {
        assert_eq!(row(refusal.clone().into()), expected, "{refusal:?}");
    }
}

#[test]
fn preparation() {
    let message = || "why".to_owned();
    let table = [
        (PrepareError::Template { message: message() }, "template_error messages"),
        (PrepareError::NoTemplate { model: "m".into() }, "no_chat_template model"),
        (PrepareError::ContextExceeded { prompt: 9, limit: 8 }, "context_length_exceeded messages"),
        (PrepareError::PromptTooLong { least: 9, limit: 8 }, "context_length_exceeded messages"),
        (PrepareError::Field { field: "tools[0]".into(), message: message() }, "invalid_value tools[0]"),
        (PrepareError::Tokenize { message: message() }, "tokenize_error messages"),
        (
            PrepareError::MemoryExceeded { prompt: 9, need: ByteSize(4096), have: ByteSize(1024), most: 2 },
            "memory_exceeded messages",
        ),
    ];
    for (error, expected) in table {
        let expected = format!("400 invalid_request_error {expected} retry=- should=-");
        assert_eq!(row(Refusal::Prepare(error).into()), expected);
    }
    let overlong = ApiError::from(PrepareError::ContextExceeded { prompt: 110, limit: 100 });
    for figure in ["110", "100", "11 tokens"] {
        assert!(overlong.message.contains(figure), "{}", overlong.message);
    }
}

#[test]
fn failures() {
    let table = [
        (FailureReason::EngineRestarted, "503 server_error engine_restarted - retry=1 should=-"),
        (FailureReason::RowFailed, "500 server_error generation_failed - retry=- should=false"),
        (FailureReason::ShuttingDown, "503 server_error shutting_down - retry=5 should=-"),
        (FailureReason::StreamStalled, "408 invalid_request_error stream_stalled - retry=- should=-"),
        (FailureReason::OutOfMemory, "503 server_error insufficient_memory - retry=- should=false"),
        (FailureReason::QueueTimeout, "503 server_error queue_timeout - retry=- should=false"),
        (FailureReason::DeadlineExceeded, "504 server_error deadline_exceeded - retry=- should=false"),
    ];
    for (reason, expected) in table {
        assert_eq!(row(Failure::new(reason, "why").into()), expected);
        // A failure that knows when to try again says so, whatever is usual for its kind.
        let known = Failure { retry_after: Some(Duration::from_secs(9)), ..Failure::new(reason, "why") };
        assert!(row(known.into()).ends_with(" retry=9 should=-"), "{reason:?}");
    }
}

#[test]
fn the_body_has_openais_shape() {
    let error = ApiError::field("messages[0].role", "invalid_value", "is wrong");
    assert_eq!(
        serde_json::to_string(&error.body()).unwrap(),
        r#"{"error":{"message":"messages[0].role: is wrong","type":"invalid_request_error","param":"messages[0].role","code":"invalid_value"}}"#
    );
}
