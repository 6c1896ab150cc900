//! What can be seen from outside: gauges as atomics, names of tracing fields.
//!
//! A leaf. Nobody installs a subscriber here; that is the binary's matter.

pub mod fields;
pub mod gauges;
pub mod pulse;
mod speech;
pub mod tally;

pub use gauges::{Counter, Gauges, Level, Outcome, Seconds};
pub use pulse::Pulse;
pub use speech::{Held, SpeechGauges};
pub use tally::Tally;
