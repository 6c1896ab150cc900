//! From the bytes of a recording to 16 kHz mono: formats, damage, limits, exactness.

// Decoders compiled without optimisation take minutes.
#![cfg(feature = "cpu")]

#[path = "audio_in/common.rs"]
mod common;
#[path = "audio_in/damage.rs"]
mod damage;
#[path = "audio_in/exact.rs"]
mod exact;
#[path = "audio_in/formats.rs"]
mod formats;
#[path = "audio_in/live.rs"]
mod live;
#[path = "audio_in/raw.rs"]
mod raw;
#[path = "audio_in/wav.rs"]
mod wav;
