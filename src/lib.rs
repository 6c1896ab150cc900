//! Greenroom: an actor-model inference runtime on MLX.

pub mod actors;
pub mod cache;
pub mod config;
pub mod http;
pub mod model;
pub mod observe;
pub mod types;
