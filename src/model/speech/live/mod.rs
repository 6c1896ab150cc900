//! Live audio: a queue of bytes, a thread that hears utterances in them, and the text that grows with them.
//!
//! Where utterances begin and end depends on the audio alone, not on how it was cut into chunks or how
//! fast it came: what is finally written down for the same audio is always the same. Only text *under
//! way* depends on time.

mod agreement;
mod ear;
mod inlet;
mod utterances;

pub(crate) use agreement::Agreement;
pub(crate) use ear::{Heard, listen};
pub(crate) use inlet::{Inlet, InletError, Mark};
