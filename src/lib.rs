//! Greenroom: an actor-model inference runtime on MLX.
//!
//! This is the embedding API. [`Greenroom::builder`] starts an instance inside
//! a running actix `System`; [`http::configure`] mounts its routes in the
//! host's own server; [`Greenroom::open_chat`] is the recipient to which the
//! host's actors send [`actors::OpenChat`]. The library installs no signal
//! handler, no subscriber and no panic hook, never stops the `System` and never
//! ends the process. `examples/embed.rs` is a whole host.

#![allow(rustdoc::private_intra_doc_links, reason = "module docs are read in the source as well")]

pub mod actors;
pub mod cache;
pub mod config;
pub mod http;
pub mod model;
pub mod observe;
pub mod types;

pub use actors::{Greenroom, GreenroomBuilder, Handles, Health, StartError};
pub use config::Config;
