//! Pulling from a hub: layout, resuming, checksums, refusals, with a hub on this machine.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod cli;
mod pull;
mod server;
