//! HTTP: routes, and pure translators between the wire and [`crate::types`].
//!
//! The only place that knows status codes and OpenAI's shapes. Sees the actors'
//! messages and handles, never the model or the cache.
//!
//! [`configure`] mounts the routes in any actix application; [`HttpFront`] is
//! the server of the binary: listeners, limits, its part of the drain.

mod answer;
mod anthropic;
mod api_error;
mod audio;
mod body;
mod cache;
mod cache_terms;
mod chat;
mod chat_request;
mod client;
mod completion_request;
mod dictation;
mod dto;
mod edge;
mod fields;
mod front;
mod guard;
mod health;
mod identity;
mod listen;
mod messages;
mod models;
mod options;
mod page;
mod realtime;
mod recorder;
mod requests;
mod responses;
mod routes;
mod scores;
mod session_request;
mod socket;
mod speech_request;
mod speech_sessions;
mod state;
mod terms;
mod upload;

pub use chat_request::read_chat_request;
pub use front::{HttpFront, Listeners, Serving};
pub use listen::ListenError;
pub use routes::configure;
