//! HTTP: routes and pure translators between the wire and [`crate::types`].
pub mod api_error;
pub mod chat_request;
pub mod dto;
pub mod fields;
pub mod messages;
