//! What is in a container, and why it cannot be read if it cannot.

use std::any::Any;
use std::io::ErrorKind;

use symphonia::core::codecs::audio::{AudioCodecParameters, CODEC_ID_NULL_AUDIO};
use symphonia::core::errors::Error;
use symphonia::core::formats::Track;

use super::sniff::Sniffed;
use super::{AudioError, AudioLimits, codec};
use crate::observe::fields;

/// The first audio track that can be decoded, or the error that says what there is.
pub(super) fn choose<'a>(
    tracks: &'a [Track],
    container: &'static str,
    at: u64,
) -> Result<(usize, &'a Track, &'a AudioCodecParameters), AudioError> {
    let audio = || {
        tracks.iter().enumerate().filter_map(|(index, track)| {
            track.codec_params.as_ref().and_then(|params| params.audio()).map(|params| (index, track, params))
        })
    };
    let known = audio().find(|(.., params)| codec::is_known(params));
    known.ok_or_else(|| match audio().next() {
        Some((.., params)) if params.codec != CODEC_ID_NULL_AUDIO => {
            AudioError::Unsupported { found: format!("{} in {container}", codec::name(params)), at }
        }
        Some(_) => AudioError::Unsupported { found: format!("an unknown codec in {container}"), at },
        None => AudioError::NoAudioTrack { found: container },
    })
}

/// More channels than allowed, or none, are refused.
pub(super) fn check_channels(channels: u16, limits: AudioLimits) -> Result<(), AudioError> {
    if channels == 0 || channels > limits.max_channels {
        return Err(AudioError::TooManyChannels { channels, limit: limits.max_channels });
    }
    Ok(())
}

/// Why a container could not be opened.
pub(super) fn refused(error: Error, sniffed: Sniffed, unknown: String, at: u64) -> AudioError {
    let Some(container) = sniffed.container else {
        return AudioError::Unsupported { found: unknown, at: 0 };
    };
    let found = container.to_owned();
    match error {
        Error::Unsupported(what) if !what.contains("missing") => {
            AudioError::Unsupported { found: format!("{found} ({what})"), at }
        }
        Error::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => {
            AudioError::Broken { found, at, why: "it ends within the header".to_owned() }
        }
        other => AudioError::Broken { found, at, why: other.to_string() },
    }
}

/// What a caught panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    // Its words are for whoever mends it, not for whoever sent the file.
    tracing::warn!(target: fields::LIFE, text = text.unwrap_or("unknown"), "a decoder panicked");
    "the decoder failed".to_owned()
}
