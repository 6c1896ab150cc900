//! On what terms a request asks to be served: `priority`, `service_tier`, `timeout`, in the
//! body or as headers. Pure.
//!
//! The body wins over a header, and a priority that is named as such over a tier.

use std::time::Duration;

use actix_web::http::header::HeaderMap;
use serde_json::Value;

use super::api_error::ApiError;
use super::fields::{Fields, wrong_type};
use super::messages::short;
use crate::types::{ChatRequest, Priority};

/// The header beside the field `priority`.
const PRIORITY: &str = "X-Priority";
/// The header beside the field `timeout`.
const TIMEOUT: &str = "X-Request-Timeout";
/// Most seconds that a request may allow: a day.
const MAX_TIMEOUT_S: f64 = 86_400.0;
/// Values of `service_tier`, with the priority that each stands for.
const TIERS: [(&str, Priority); 4] = [
    ("auto", Priority::Normal),
    ("default", Priority::Normal),
    ("flex", Priority::Background),
    ("priority", Priority::Interactive),
];

/// What a body says of its terms.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AskedTerms {
    priority: Option<Priority>,
    tier: Option<Priority>,
    timeout: Option<Duration>,
}

impl AskedTerms {
    /// Takes the fields out of a body.
    ///
    /// # Errors
    /// The first one that is wrong.
    pub fn read(body: &mut Fields) -> Result<Self, ApiError> {
        let priority = body.string("priority")?.map(|name| read_priority("priority", &name)).transpose()?;
        let tier = body.string("service_tier")?.map(|name| read_tier(&name)).transpose()?;
        let timeout = body.value("timeout").map(|value| read_timeout(&value)).transpose()?;
        Ok(Self { priority, tier, timeout })
    }

    /// Settles the request's terms; gives the tier to name in the answer, if one was asked for.
    ///
    /// # Errors
    /// A header that counts and is wrong.
    pub fn settle(
        &self,
        headers: &HeaderMap,
        request: &mut ChatRequest,
    ) -> Result<Option<&'static str>, ApiError> {
        let priority = match self.priority {
            Some(priority) => Some(priority),
            None => text(headers, PRIORITY).map(|name| read_priority(PRIORITY, &name)).transpose()?,
        };
        request.priority = priority.or(self.tier).unwrap_or_default();
        request.timeout = match self.timeout {
            Some(timeout) => Some(timeout),
            None => text(headers, TIMEOUT).map(|text| parse_timeout(&text)).transpose()?,
        };
        Ok(self.tier.map(|_| tier_name(request.priority)))
    }
}

/// A header's value; what is not text is no value that could be right.
fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).trim().to_owned())
}

fn read_priority(path: &str, name: &str) -> Result<Priority, ApiError> {
    Priority::named(name).ok_or_else(|| {
        let known = Priority::ALL.map(Priority::as_str).join(", ");
        ApiError::field(path, "invalid_value", format!("`{}` is not one of {known}", short(name)))
    })
}

fn read_tier(name: &str) -> Result<Priority, ApiError> {
    TIERS.into_iter().find(|(known, _)| *known == name).map(|(_, priority)| priority).ok_or_else(|| {
        let known = TIERS.map(|(known, _)| known).join(", ");
        ApiError::field("service_tier", "invalid_value", format!("`{}` is not one of {known}", short(name)))
    })
}

/// The tier that a priority is, in the words of answers, which know no `auto`.
fn tier_name(priority: Priority) -> &'static str {
    match priority {
        Priority::Interactive => "priority",
        Priority::Normal => "default",
        Priority::Background => "flex",
    }
}

fn read_timeout(value: &Value) -> Result<Duration, ApiError> {
    let seconds = value.as_f64().ok_or_else(|| wrong_type("timeout", "a number of seconds", value))?;
    timeout("timeout", seconds, &value.to_string())
}

fn parse_timeout(text: &str) -> Result<Duration, ApiError> {
    // What is no number is out of range as well, and told so in the same words.
    timeout(TIMEOUT, text.parse().unwrap_or(f64::NAN), text)
}

fn timeout(path: &str, seconds: f64, said: &str) -> Result<Duration, ApiError> {
    let allowed = seconds > 0.0 && seconds <= MAX_TIMEOUT_S;
    // Beyond a nanosecond nothing is left to wait for, and that is what was asked.
    allowed.then(|| Duration::from_secs_f64(seconds)).ok_or_else(|| {
        let message =
            format!("`{}` is not a number of seconds above 0 and at most {MAX_TIMEOUT_S}", short(said));
        ApiError::field(path, "invalid_value", message)
    })
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::{HeaderName, HeaderValue};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn settle(
        body: Value,
        headers: &[(&'static str, &[u8])],
    ) -> Result<(ChatRequest, Option<&'static str>), ApiError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap());
        }
        let mut request = ChatRequest::default();
        let tier = AskedTerms::read(&mut Fields::new("", body)?)?.settle(&map, &mut request)?;
        Ok((request, tier))
    }

    #[test]
    fn the_body_wins_over_the_header_and_a_priority_over_a_tier() {
        use Priority::{Background, Interactive, Normal};
        let header: &[(&str, &[u8])] = &[("x-priority", b"background"), ("x-request-timeout", b" 2.5 ")];
        let none: &[(&str, &[u8])] = &[];
        let table = [
            (json!({}), none, Normal, None, None),
            (json!({}), header, Background, Some(2.5), None),
            (json!({"priority": "interactive", "timeout": 9}), header, Interactive, Some(9.0), None),
            (
                json!({"priority": null, "timeout": null, "service_tier": null}),
                header,
                Background,
                Some(2.5),
                None,
            ),
            (json!({"service_tier": "auto"}), none, Normal, None, Some("default")),
            (json!({"service_tier": "default"}), none, Normal, None, Some("default")),
            (json!({"service_tier": "flex"}), none, Background, None, Some("flex")),
            (json!({"service_tier": "priority"}), none, Interactive, None, Some("priority")),
            (json!({"service_tier": "priority"}), header, Background, Some(2.5), Some("flex")),
            (json!({"service_tier": "flex", "priority": "normal"}), none, Normal, None, Some("default")),
        ];
        for (body, headers, priority, seconds, tier) in table {
            let (request, said) = settle(body.clone(), headers).unwrap();
            let timeout = request.timeout.map(|timeout| timeout.as_secs_f64());
            assert_eq!((request.priority, timeout, said), (priority, seconds, tier), "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        let bodies = [
            (json!({"priority": "high"}), "priority", "interactive, normal, background"),
            (json!({"priority": 3}), "priority", "must be a string"),
            (json!({"service_tier": "scale"}), "service_tier", "auto, default, flex, priority"),
            (json!({"timeout": 0}), "timeout", "at most 86400"),
            (json!({"timeout": -1.5}), "timeout", "at most 86400"),
            (json!({"timeout": 86_400.5}), "timeout", "at most 86400"),
            (json!({"timeout": "30"}), "timeout", "must be a number of seconds"),
        ];
        for (body, param, part) in bodies {
            let error = settle(body, &[]).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)));
            assert!(error.message.contains(part), "{}", error.message);
        }
        let headers: [(&str, &[u8], &str); 7] = [
            ("x-priority", b"", "X-Priority"),
            ("x-priority", b"urgent", "X-Priority"),
            ("x-priority", b"\xff", "X-Priority"),
            ("x-request-timeout", b"", "X-Request-Timeout"),
            ("x-request-timeout", b"nan", "X-Request-Timeout"),
            ("x-request-timeout", b"inf", "X-Request-Timeout"),
            ("x-request-timeout", b"5 s", "X-Request-Timeout"),
        ];
        for (name, value, param) in headers {
            let error = settle(json!({}), &[(name, value)]).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)));
        }
    }

    proptest! {
        #[test]
        fn a_timeout_is_what_was_said_or_an_error(seconds in any::<f64>(), text in "\\PC{0,20}") {
            let allowed = seconds > 0.0 && seconds <= MAX_TIMEOUT_S;
            prop_assert_eq!(timeout("timeout", seconds, "").is_ok(), allowed);
            if let Ok(timeout) = parse_timeout(&text) {
                prop_assert!(timeout.as_secs_f64() <= MAX_TIMEOUT_S);
            }
        }
    }
}
