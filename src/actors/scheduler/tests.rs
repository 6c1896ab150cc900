//! The scheduler's core, driven step by step against the scripted engine, without actors.
#![cfg(feature = "fake")]

mod ahead;
mod bench;
mod broken;
mod disk;
mod fill;
mod loops;
mod memory;
mod native;
mod random;
mod reuse;
mod simulator;
mod streams;
mod turns;
