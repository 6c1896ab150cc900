//! Samples without a container.

use crate::common::*;
use greenroom::model::speech::audio::{AudioError, PcmEncoding, PcmFormat, PcmReader};
use proptest::prelude::*;

/// What G.711 says, the slow way.
pub fn mu_law(code: u8) -> f32 {
    let code = !code;
    let (sign, exponent, step) = (code & 0x80 != 0, (code >> 4) & 7, code & 15);
    let magnitude = f32::from(step * 2 + 33) * 2f32.powi(i32::from(exponent)) - 33.0;
    (if sign { -magnitude } else { magnitude }) * 4.0 / 32768.0
}

/// What G.711 says, the slow way.
pub fn a_law(code: u8) -> f32 {
    let code = code ^ 0x55;
    let (sign, exponent, step) = (code & 0x80 != 0, (code >> 4) & 7, code & 15);
    let magnitude = match exponent {
        0 => f32::from(step * 2 + 1),
        _ => f32::from(step * 2 + 33) * 2f32.powi(i32::from(exponent) - 1),
    };
    (if sign { magnitude } else { -magnitude }) * 8.0 / 32768.0
}

fn read(format: PcmFormat, chunks: &[&[u8]]) -> Vec<f32> {
    let mut reader = PcmReader::new(format).unwrap_or_else(|error| panic!("{error}"));
    let mut out = Vec::new();
    chunks.iter().for_each(|chunk| reader.push(chunk, &mut out));
    reader.finish(&mut out);
    out
}

#[test]
fn every_code_of_g711_is_right() {
    let all: Vec<u8> = (0..=255).collect();
    for (encoding, wanted) in [(PcmEncoding::MuLaw, mu_law as fn(u8) -> f32), (PcmEncoding::ALaw, a_law)] {
        let heard = read(PcmFormat { encoding, rate: 16_000, channels: 1 }, &[&all]);
        assert_eq!(heard, all.iter().map(|code| wanted(*code)).collect::<Vec<_>>(), "{encoding:?}");
    }
}

#[test]
fn raw_samples_give_what_their_wav_gives() {
    for rate in [16_000, 44_100, 8_000] {
        let tone = sine(440.0, rate, 1.0);
        let file = short_wav(&tone, rate);
        let format = PcmFormat { encoding: PcmEncoding::S16, rate, channels: 1 };
        assert_eq!(read(format, &[&file[44..]]), audio(file.clone()));
        let floats: Vec<u8> = tone.iter().flat_map(|sample| sample.to_le_bytes()).collect();
        let format = PcmFormat { encoding: PcmEncoding::F32, rate, channels: 1 };
        assert_eq!(read(format, &[&floats]), audio(float_wav(&tone, 1, rate)));
    }
}

#[test]
fn strange_values_and_formats() {
    let bytes: Vec<u8> =
        [f32::NAN, 0.5, f32::INFINITY, -0.5].iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let format = PcmFormat { encoding: PcmEncoding::F32, rate: 16_000, channels: 1 };
    assert_eq!(read(format, &[&bytes]), [0.0, 0.5, 0.0, -0.5]);
    assert_eq!(read(format, &[&bytes[..7]]), [0.0], "part of a sample is none");
    assert_eq!(read(format, &[]), [0f32; 0]);
    let error = |rate, channels| PcmReader::new(PcmFormat { rate, channels, ..format }).err();
    assert_eq!(error(16_000, 0), Some(AudioError::TooManyChannels { channels: 0, limit: 8 }));
    assert_eq!(error(16_000, 9), Some(AudioError::TooManyChannels { channels: 9, limit: 8 }));
    assert!(matches!(error(0, 1), Some(AudioError::Unsupported { .. })));
    assert!(matches!(error(1_000_000, 1), Some(AudioError::Unsupported { .. })));
}

#[test]
fn a_reader_can_be_used_again() {
    let format = PcmFormat { encoding: PcmEncoding::MuLaw, rate: 8_000, channels: 2 };
    let bytes: Vec<u8> = (0..20_001u32).map(|index| ((index * 7919) >> 3) as u8).collect();
    let mut reader = PcmReader::new(format).unwrap_or_else(|error| panic!("{error}"));
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for out in [&mut first, &mut second] {
        reader.push(&bytes, out);
        reader.finish(out);
    }
    assert_eq!(first.len(), 20_000);
    assert_eq!(first, second);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(40), failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn it_does_not_matter_how_bytes_are_cut(
        bytes in proptest::collection::vec(any::<u8>(), 0..40_000),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..40),
        encoding in proptest::sample::select(vec![
            PcmEncoding::S16, PcmEncoding::F32, PcmEncoding::MuLaw, PcmEncoding::ALaw,
        ]),
        rate in proptest::sample::select(vec![8_000u32, 16_000, 44_100, 48_000, 11_111]),
        channels in 1u16..=3,
    ) {
        let format = PcmFormat { encoding, rate, channels };
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        let chunks: Vec<&[u8]> = places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let whole = read(format, &[&bytes]);
        let frames = bytes.len() / encoding.width() / usize::from(channels);
        prop_assert_eq!(whole.len(), (frames as f64 * 16_000.0 / f64::from(rate)).round() as usize);
        prop_assert!(whole.iter().all(|sample| sample.is_finite()));
        prop_assert_eq!(read(format, &chunks), whole);
    }
}
