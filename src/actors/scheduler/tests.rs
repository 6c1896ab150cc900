//! The scheduler's core, driven step by step against the scripted engine, without actors.
#![cfg(feature = "fake")]

mod bench;
mod memory;
mod random;
mod streams;
