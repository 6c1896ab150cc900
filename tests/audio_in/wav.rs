//! WAV in every encoding, and with the headers that recorders leave behind.

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
