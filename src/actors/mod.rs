//! Messages and orchestration, no tensor code.

pub mod messages;
