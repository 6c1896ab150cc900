//! WAV in every encoding, and with the headers that recorders leave behind.

use greenroom::model::speech::audio::AudioError;

use crate::common::*;

fn tone() -> Vec<f32> {
    sine(440.0, 16_000, 1.0)
}

fn assert_close(heard: &[f32], wanted: &[f32], most: f32, what: &str) {
    assert_eq!(heard.len(), wanted.len(), "{what}");
    let worst = heard.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= most, "{what}: off by {worst}");
}

fn g711(samples: &[f32], decode: impl Fn(u8) -> f32) -> Vec<u8> {
    let table: Vec<f32> = (0..=255u8).map(decode).collect();
    let nearest = |sample: f32| {
        (0..256).fold(0usize, |best, next| {
            if (table[next] - sample).abs() < (table[best] - sample).abs() { next } else { best }
        })
    };
    samples.iter().map(|sample| nearest(*sample) as u8).collect()
}

#[test]
fn every_encoding_is_read() {
    let tone = tone();
    let scaled =
        |scale: f32| tone.iter().map(move |sample| (sample * scale).round() as i32).collect::<Vec<_>>();
    let bytes = |scale: f32, width: usize| -> Vec<u8> {
        scaled(scale).iter().flat_map(|sample| sample.to_le_bytes()[..width].to_vec()).collect()
    };
    let u8s: Vec<u8> = scaled(127.0).iter().map(|sample| (sample + 128) as u8).collect();
    let floats: Vec<u8> = tone.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let doubles: Vec<u8> = tone.iter().flat_map(|sample| f64::from(*sample).to_le_bytes()).collect();
    assert_close(&audio(riff(&format(1, 1, 16_000, 8), &u8s)), &tone, 0.01, "u8");
    assert_close(&audio(riff(&format(1, 1, 16_000, 16), &bytes(32767.0, 2))), &tone, 1e-4, "s16");
    assert_close(&audio(riff(&format(1, 1, 16_000, 24), &bytes(8_388_607.0, 3))), &tone, 1e-6, "s24");
    assert_close(&audio(riff(&format(1, 1, 16_000, 32), &bytes(2_147_483_000.0, 4))), &tone, 1e-6, "s32");
    assert_close(&audio(riff(&format(3, 1, 16_000, 32), &floats)), &tone, 0.0, "f32");
    assert_close(&audio(riff(&format(3, 1, 16_000, 64), &doubles)), &tone, 1e-7, "f64");
    let mut extensible = format(0xfffe, 1, 16_000, 16);
    extensible.extend([22, 0, 16, 0, 4, 0, 0, 0]);
    extensible.extend(b"\x01\x00\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71");
    assert_close(&audio(riff(&extensible, &bytes(32767.0, 2))), &tone, 1e-4, "extensible");
    let mu = riff(&format(7, 1, 16_000, 8), &g711(&tone, crate::raw::mu_law));
    assert_close(&audio(mu), &tone, 0.02, "mu-law");
    let a = riff(&format(6, 1, 16_000, 8), &g711(&tone, crate::raw::a_law));
    assert_close(&audio(a), &tone, 0.02, "A-law");
}

#[test]
fn sizes_that_were_never_filled_in() {
    let whole = short_wav(&tone(), 16_000);
    let wanted = audio(whole.clone());
    for (riff_size, data_size) in [
        (0, 0),
        (u32::MAX, u32::MAX),
        (36, 0),
        (0, u32::MAX),
        (u32::MAX, 0),
        (0x7fff_ffff, 0x7fff_ffdb),
        (4, 32_000),
    ] {
        let mut file = whole.clone();
        file[4..8].copy_from_slice(&u32::to_le_bytes(riff_size));
        file[40..44].copy_from_slice(&u32::to_le_bytes(data_size));
        for (samples, _, warning) in [decode(file.clone()), decode_stream(file.clone().into(), 1000)]
            .map(|result| result.unwrap_or_else(|error| panic!("{riff_size} {data_size}: {error}")))
        {
            assert_eq!(samples, wanted, "{riff_size} {data_size}");
            assert_eq!(warning, None, "{riff_size} {data_size}");
        }
    }
}

#[test]
fn sizes_beyond_the_end_are_a_warning() {
    let mut file = short_wav(&tone(), 16_000);
    file[40..44].copy_from_slice(&100_000u32.to_le_bytes());
    let (samples, _, warning) = decode(file.clone()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(samples.len(), 16_000);
    assert_eq!(warning.as_deref(), Some("the file ends early: 68000 bytes are missing"));
    let (samples, _, warning) = decode_stream(file.into(), 4096).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(samples.len(), 16_000);
    assert!(warning.unwrap_or_default().starts_with("the file ends early"));
}

#[test]
fn a_header_alone_is_no_audio_and_no_error() {
    let header = short_wav(&[], 16_000);
    let (samples, _, warning) = decode(header).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((samples.len(), warning), (0, None));
}

#[test]
fn codecs_that_are_not_read_are_named() {
    for (tag, name) in [(0x31, "GSM 6.10 in WAV"), (0x28f, "G.722 in WAV"), (0x55, "MP3 in WAV")] {
        let error = decode(riff(&format(tag, 1, 16_000, 8), &[0; 400])).err().map(|error| error.to_string());
        assert!(error.clone().unwrap_or_default().contains(name), "{error:?}");
    }
}

#[test]
fn strange_values_do_not_spread() {
    let mut samples = sine(440.0, 44_100, 1.0);
    samples[10_000] = f32::NAN;
    samples[20_000] = f32::INFINITY;
    samples[20_001] = f32::NEG_INFINITY;
    let heard = audio(float_wav(&samples, 1, 44_100));
    assert!(heard.iter().all(|sample| sample.is_finite() && sample.abs() < 1.0));
    assert!(rms(&heard[12_000..]) > 0.3);
}

#[test]
fn absurd_headers_are_refused_before_anything_is_decoded() {
    for channels in [0, 9, 257, u16::MAX] {
        let error = decode(riff(&format(1, channels, 16_000, 16), &[0; 64_000])).unwrap_err().to_string();
        assert!(error.contains(&format!("{channels} channels")), "{error}");
    }
    // Four hours in bytes that are there: nothing of it has to be decoded to know that.
    let long = riff(&format(7, 1, 1000, 8), &vec![0xff; 601_000]);
    assert!(matches!(decode(long), Err(AudioError::TooLong { .. })));
}

#[test]
fn any_word_on_speakers_is_passed_over() {
    for (channels, speakers) in [(2_u16, 0x8000_0000_u32), (2, u32::MAX), (8, 0x8000_0001), (1, 0), (1, 7)] {
        let mut extensible = format(0xfffe, channels, 16_000, 16);
        extensible.extend(22_u16.to_le_bytes());
        extensible.extend(16_u16.to_le_bytes());
        extensible.extend(speakers.to_le_bytes());
        extensible.extend(b"\x01\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71");
        let frames = 16_000;
        let samples = audio(riff(&extensible, &vec![0; frames * usize::from(channels) * 2]));
        assert_eq!(samples.len(), frames, "{channels} channels for {speakers:#x}");
    }
}

#[test]
fn a_sample_that_cannot_be_one_does_not_drown_the_others() {
    let tone: Vec<f32> = (0..16_000).map(|i| (i as f32 * 0.1).sin() * 0.5).collect();
    let bytes = |samples: &[f32]| -> Vec<u8> { samples.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let clean = audio(riff(&format(3, 1, 16_000, 32), &bytes(&tone)));
    for wrong in [3e38_f32, -3e38, f32::INFINITY, f32::NAN, 1e9] {
        let mut spoilt = tone.clone();
        spoilt[8000] = wrong;
        let heard = audio(riff(&format(3, 1, 16_000, 32), &bytes(&spoilt)));
        let differ = heard.iter().zip(&clean).filter(|(a, b)| (*a - *b).abs() > 1e-6).count();
        assert!(differ <= 1, "{wrong}: {differ}");
    }
}
