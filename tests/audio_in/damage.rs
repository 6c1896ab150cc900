//! What is not audio, and audio that is damaged: an error or what can be read, never a panic.

use crate::common::*;
use bytes::Bytes;
use greenroom::model::speech::audio::AudioError;
use proptest::prelude::*;

/// The decoders' panics are caught; nothing may be lost to one that is not.
fn survives(bytes: impl Into<Bytes>) -> Option<Decoded> {
    let result = decode(bytes);
    if let Err(error) = &result {
        assert!(!error.to_string().is_empty());
    }
    let decoded = result.ok()?;
    assert!(decoded.0.iter().all(|sample| sample.is_finite()));
    Some(decoded)
}

fn error(bytes: impl Into<Bytes>) -> String {
    match decode(bytes) {
        Err(error) => error.to_string(),
        Ok((samples, info, _)) => panic!("{} samples of {info:?}", samples.len()),
    }
}

fn random(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    };
    (0..length).map(next).collect()
}

#[test]
fn what_is_not_audio_is_named() {
    assert_eq!(decode(Bytes::new()).err(), Some(AudioError::Empty));
    assert!(decode_stream(Bytes::new(), 10).is_err());
    assert!(error(&b"%PDF-1.7\n%....."[..]).contains("found a PDF document at byte 0"));
    assert!(error(&b"Four score and seven years ago\n"[..]).contains("found text"));
    assert!(error(&b"#!AMR\n\x3c\x00\x01\x02"[..]).contains("found AMR at"));
    assert!(error(&b"PK\x03\x04\x14\x00"[..]).contains("ZIP"));
    assert!(error(&b".snd\x00\x00\x00\x18"[..]).contains("AU"));
    assert!(error(&b"\x12\xab\x00\x01"[..]).contains("unknown bytes 12 ab 00 01"));
    assert!(error(&b"\x12"[..]).contains("unknown bytes 12"));
    assert!(error(&b"\x00"[..]).contains("WebM/Matroska are supported"));
}

#[test]
fn random_bytes_are_no_audio() {
    for seed in 1..30 {
        let length = 10 << (seed % 14);
        if let Some((samples, info, _)) = survives(random(seed * 7919, length)) {
            panic!("{length} random bytes gave {} samples of {info:?}", samples.len());
        }
    }
}

#[test]
fn headers_alone() {
    for name in CLIPS {
        for length in 1..300 {
            survives(clip(name).slice(..length));
        }
    }
    for magic in [
        &b"RIFF"[..],
        b"RIFF\0\0\0\0WAVE",
        b"fLaC",
        b"OggS",
        b"ID3",
        b"\x1aE\xdf\xa3",
        b"\0\0\0\x18ftyp",
        b"caff",
        b"FORM\0\0\0\0AIFF",
    ] {
        assert!(decode(magic).is_err(), "{magic:?}");
    }
}

#[test]
fn cut_off_at_every_tenth() {
    let wanted = audio(clip("jfk.wav"));
    for name in CLIPS.into_iter().chain(["jfk.wav", "jfk5s-stereo-48k-s24.wav"]) {
        let file = clip(name);
        for tenth in 1..10 {
            let cut = decode(file.slice(..file.len() * tenth / 10 + 1));
            // Its index is at the end.
            if name == "jfk.m4a" {
                assert!(matches!(cut, Err(AudioError::Broken { .. })), "{cut:?}");
                continue;
            }
            // The code books of Vorbis alone are longer than that.
            if name == "jfk.ogg" && tenth == 1 {
                assert!(
                    matches!(&cut, Err(AudioError::Broken { why, .. }) if why.contains("header")),
                    "{cut:?}"
                );
                continue;
            }
            let (heard, _, warning) = cut.unwrap_or_else(|error| panic!("{name} {tenth}: {error}"));
            let share = heard.len() as f64 / audio(file.clone()).len() as f64;
            assert!((share - tenth as f64 / 10.0).abs() < 0.12, "{name} {tenth}: {share}");
            if !["jfk-stereo-44k.mp3", "jfk.mp3"].contains(&name) || warning.is_some() {
                let warning = warning.unwrap_or_else(|| panic!("{name} {tenth}: no warning"));
                assert!(warning.starts_with("the file ends early"), "{name} {tenth}: {warning}");
            }
            if tenth >= 5 && !name.starts_with("jfk5s") {
                let (lag, alike) = best_lag(&wanted[..heard.len().min(80_000) - 2000], &heard, 800);
                assert!(alike > 0.9, "{name} {tenth}: {alike} at {lag}");
            }
        }
    }
}

#[test]
fn holes_are_skipped_and_counted() {
    for name in ["jfk.mp3", "jfk.flac", "jfk.opus", "jfk.webm"] {
        let mut file = clip(name).to_vec();
        let middle = file.len() / 2;
        let length = file.len();
        file[middle..middle + length / 20].fill(0x55);
        if let Some((samples, _, warning)) = survives(file) {
            println!("{name}: {} samples, {warning:?}", samples.len());
            assert!(
                samples.len() > 80_000 && warning.is_some(),
                "{name}: {} samples, {warning:?}",
                samples.len()
            );
        }
    }
}

/// `clip` with the first `from` turned into `to`.
fn replaced(name: &str, from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut file = clip(name).to_vec();
    let at = file.windows(from.len()).position(|window| window == from).unwrap_or_else(|| panic!("{from:?}"));
    file[at..at + from.len()].copy_from_slice(to);
    file
}

#[test]
fn a_video_without_audio_says_so() {
    let result = decode(replaced("jfk.webm", b"A_OPUS", b"V_VP8\0"));
    assert_eq!(result.err(), Some(AudioError::NoAudioTrack { found: "webm" }));
}

#[test]
fn codecs_without_a_decoder_are_named() {
    let text = error(replaced("jfk.webm", b"A_OPUS", b"A_AC3\0"));
    assert!(text.contains("AC-3 in webm"), "{text}");
}

#[test]
fn he_aac_is_refused() {
    // The object type in the decoder's configuration becomes SBR (5).
    let mut file = clip("jfk.m4a").to_vec();
    let at = file.windows(4).position(|window| window == b"esds").unwrap_or_default();
    let config =
        file[at..].windows(2).position(|pair| pair[0] == 5 && pair[1] & 0x80 != 0).unwrap_or_default();
    let object = (at + config..at + config + 12).find(|place| file[*place] >> 3 == 2).unwrap_or_default();
    file[object] = (5 << 3) | (file[object] & 7);
    let error = error(file);
    assert!(error.contains("AAC"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(60), failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn changed_bytes_never_panic(
        name in proptest::sample::select(CLIPS.to_vec()),
        changes in proptest::collection::vec(
            (any::<proptest::sample::Index>(), any::<u8>(), any::<bool>()), 1..40,
        ),
        length in 2_000usize..30_000,
    ) {
        let file = clip(name);
        // The index of an MP4 is at its end.
        let mut bytes = if name == "jfk.m4a" { file.to_vec() } else { file.slice(..length).to_vec() };
        let whole = bytes.len();
        for (place, byte, in_header) in changes {
            let span = if in_header { 600.min(whole) } else { whole };
            let place = place.index(span);
            let place = if in_header && name == "jfk.m4a" { whole - 1 - place } else { place };
            bytes[place] = byte;
        }
        survives(bytes.clone());
        let _ = decode_stream(bytes.into(), 1000);
    }
}
