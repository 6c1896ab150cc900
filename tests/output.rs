//! Answers' text to typed parts, through the public interface.

#![allow(clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "common/mod.rs"]
mod common;
#[path = "output/detection.rs"]
mod detection;
#[path = "output/formats.rs"]
mod formats;
#[path = "output/malformed.rs"]
mod malformed;
#[path = "output/parts.rs"]
mod parts;
#[path = "output/random.rs"]
mod random;
#[path = "output/thoughts.rs"]
mod thoughts;
