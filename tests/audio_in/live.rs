//! Streams that cannot go back, and recordings without sizes.

use crate::common::*;
use bytes::Bytes;
use greenroom::model::speech::audio::{AudioError, AudioLimits, Decoder, Source};

#[test]
fn a_stream_gives_what_the_file_gives() {
    for name in ["jfk.wav", "jfk.mp3", "jfk-stereo-44k.mp3", "jfk.flac", "jfk.ogg", "jfk.opus", "jfk.webm"] {
        let (wanted, info, _) = decode(clip(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        for step in [37, 4096, 1 << 20] {
            let (heard, same, warning) =
                decode_stream(clip(name), step).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(same, info, "{name}");
            assert_eq!(warning, None, "{name}");
            assert_eq!(heard.len(), wanted.len(), "{name}");
            assert!(heard == wanted, "{name}");
        }
    }
}

#[test]
fn mp4_with_its_index_at_the_end_needs_the_whole_file() {
    let error = decode_stream(clip("jfk.m4a"), 4096).err();
    assert!(matches!(error, Some(AudioError::Broken { .. } | AudioError::Unsupported { .. })), "{error:?}");
}

/// The elements of a level of a Matroska file: where each begins, its contents, and its end.
fn elements(file: &[u8], start: usize, end: usize) -> Vec<(u32, usize, usize, usize)> {
    let mut found = Vec::new();
    let mut at = start;
    while at < end {
        let id_length = file[at].leading_zeros() as usize + 1;
        let id = file[at..at + id_length].iter().fold(0u32, |id, byte| id << 8 | u32::from(*byte));
        let size_at = at + id_length;
        let size_length = file[size_at].leading_zeros() as usize + 1;
        let first = u64::from(file[size_at]) & ((1 << (8 - size_length)) - 1);
        let size = file[size_at + 1..size_at + size_length]
            .iter()
            .fold(first, |size, byte| size << 8 | u64::from(*byte));
        let body = size_at + size_length;
        let unknown = size == (1 << (7 * size_length)) - 1;
        let stop = if unknown { end } else { (body + size as usize).min(end) };
        found.push((id, at, body, stop));
        at = stop;
    }
    found
}

/// As a browser records it: no duration, and neither segment nor clusters have a size.
fn live_webm(file: &[u8]) -> Vec<u8> {
    const UNKNOWN: [u8; 8] = [1, 255, 255, 255, 255, 255, 255, 255];
    let mut live = Vec::new();
    for (id, at, body, stop) in elements(file, 0, file.len()) {
        if id != 0x1853_8067 {
            live.extend(&file[at..stop]);
            continue;
        }
        live.extend(b"\x18\x53\x80\x67");
        live.extend(UNKNOWN);
        for (id, at, body, stop) in elements(file, body, stop) {
            match id {
                // Information: all but the duration.
                0x1549_a966 => {
                    let kept: Vec<u8> = elements(file, body, stop)
                        .into_iter()
                        .filter(|(id, ..)| *id != 0x4489)
                        .flat_map(|(_, at, _, stop)| file[at..stop].to_vec())
                        .collect();
                    live.extend(b"\x15\x49\xa9\x66");
                    live.push(0x80 | kept.len() as u8);
                    live.extend(kept);
                }
                0x1654_ae6b => live.extend(&file[at..stop]),
                0x1f43_b675 => {
                    live.extend(b"\x1f\x43\xb6\x75");
                    live.extend(UNKNOWN);
                    live.extend(&file[body..stop]);
                }
                _ => {}
            }
        }
    }
    live
}

#[test]
fn webm_as_browsers_record_it() {
    let file = clip("jfk.webm");
    let (wanted, ..) = decode(file.clone()).unwrap_or_else(|error| panic!("{error}"));
    let live = Bytes::from(live_webm(&file));
    assert!(live.len() < file.len() + 200);
    for result in [decode(live.clone()), decode_stream(live.clone(), 300)] {
        let (heard, info, warning) = result.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((info.container, warning), ("webm", None));
        assert!(heard == wanted, "{} and {}", heard.len(), wanted.len());
    }
    // Stopped at any byte, it is still no error and no warning.
    let (heard, _, warning) =
        decode(live.slice(..live.len() * 2 / 3)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(warning, None);
    assert!(heard.len() > 90_000 && heard[..80_000] == wanted[..80_000]);
}

#[test]
fn decoding_stops_at_the_limits() {
    let limits = AudioLimits { max_seconds: 2.0, max_channels: 8 };
    for name in ["jfk.wav", "jfk.flac", "jfk.opus", "jfk.m4a"] {
        let mut decoder = Decoder::open(Source::Memory(clip(name)), limits)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut samples = Vec::new();
        let error = loop {
            match decoder.read(&mut samples) {
                Ok(true) => {}
                other => break other,
            }
        };
        assert_eq!(error, Err(AudioError::TooLong { limit_s: 2.0 }), "{name}");
        assert!(samples.len() < 16_000 * 4, "{name}");
        assert_eq!(decoder.read(&mut samples), Ok(false));
    }
    let many = float_wav(&[0.0; 1200], 12, 16_000);
    let error = decode(many).err();
    assert_eq!(error, Some(AudioError::TooManyChannels { channels: 12, limit: 8 }));
}

#[test]
fn audio_comes_in_small_pieces() {
    let mut decoder = Decoder::open(Source::Memory(clip("long-60s.wav")), AudioLimits::default())
        .unwrap_or_else(|error| panic!("{error}"));
    let mut samples = Vec::new();
    while decoder.read(&mut samples).unwrap_or_else(|error| panic!("{error}")) {
        assert!(samples.len() <= 16_000);
        samples.clear();
    }
    assert!(decoder.seconds() > 59.0);
}

#[test]
fn decoders_can_move_between_threads() {
    fn is_send<T: Send>(_: &T) {}
    let decoder = Decoder::open(Source::Memory(clip("jfk.opus")), AudioLimits::default());
    is_send(&decoder);
}

struct Failing(usize, Bytes);

impl std::io::Read for Failing {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.0 == 0 {
            return Err(std::io::Error::other("the line was cut"));
        }
        self.0 -= 1;
        Drip { bytes: self.1.split_to(self.1.len().min(1000)), step: 1000 }.read(buffer)
    }
}

#[test]
fn a_stream_that_fails_is_an_error() {
    for reads in [0, 1, 20] {
        let source = Source::Stream(Box::new(Failing(reads, clip("jfk.wav"))));
        let mut samples = Vec::new();
        let mut result = Decoder::open(source, AudioLimits::default()).map(|mut decoder| {
            loop {
                match decoder.read(&mut samples) {
                    Ok(true) => {}
                    other => break other,
                }
            }
        });
        let error = result.as_mut().err().cloned().or_else(|| result.ok().and_then(Result::err));
        assert!(
            matches!(&error, Some(AudioError::Broken { why, .. }) if why.contains("line was cut")),
            "{error:?}"
        );
    }
}

#[test]
#[ignore = "prints speeds"]
fn speed() {
    for name in CLIPS {
        let (file, start) = (clip(name), std::time::Instant::now());
        for _ in 0..5 {
            audio(file.clone());
        }
        println!("{name}: {:.0} times as fast as it is spoken", 55.0 / start.elapsed().as_secs_f64());
    }
}
