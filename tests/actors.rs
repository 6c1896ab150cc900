//! The actors on a real `System` with a scripted engine: what an application sees.
//!
//! Nothing here sleeps to be in time: steps wait for the test at a gate, everything else
//! is awaited with a deadline that only a fault reaches.
#![cfg(feature = "fake")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

#[path = "actors/cancellation.rs"]
mod cancellation;
#[path = "actors/disk.rs"]
mod disk;
#[path = "actors/drain.rs"]
mod drain;
#[path = "actors/failures.rs"]
mod failures;
#[path = "actors/harness.rs"]
mod harness;
#[path = "actors/requests.rs"]
mod requests;
#[path = "actors/reuse.rs"]
mod reuse;
