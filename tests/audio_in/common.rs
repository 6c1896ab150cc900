//! Clips, a WAV writer, and how alike two recordings are.

use bytes::Bytes;
use greenroom::model::speech::audio::{AudioError, AudioInfo, AudioLimits, Decoder, Source, decode_all};

/// Every form of the same eleven seconds.
pub const CLIPS: [&str; 9] = [
    "jfk-22k-f32.wav",
    "jfk-8k-mulaw.wav",
    "jfk-stereo-44k.mp3",
    "jfk.flac",
    "jfk.m4a",
    "jfk.mp3",
    "jfk.ogg",
    "jfk.opus",
    "jfk.webm",
];

pub type Decoded = (Vec<f32>, AudioInfo, Option<String>);

pub fn clip(name: &str) -> Bytes {
    let path = format!("{}/tests/data/audio/{name}", env!("CARGO_MANIFEST_DIR"));
    Bytes::from(std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}")))
}

pub fn decode(bytes: impl Into<Bytes>) -> Result<Decoded, AudioError> {
    decode_all(bytes.into(), AudioLimits { max_seconds: 600.0, max_channels: 8 })
}

pub fn audio(bytes: impl Into<Bytes>) -> Vec<f32> {
    decode(bytes).unwrap_or_else(|error| panic!("{error}")).0
}

/// Hands out at most `step` bytes at a time and cannot go back.
pub struct Drip {
    pub bytes: Bytes,
    pub step: usize,
}

impl std::io::Read for Drip {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let part = self.bytes.split_to(self.step.min(self.bytes.len()).min(buffer.len()));
        buffer[..part.len()].copy_from_slice(&part);
        Ok(part.len())
    }
}

pub fn decode_stream(bytes: Bytes, step: usize) -> Result<Decoded, AudioError> {
    let source = Source::Stream(Box::new(Drip { bytes, step }));
    let mut decoder = Decoder::open(source, AudioLimits::default())?;
    let mut samples = Vec::new();
    while decoder.read(&mut samples)? {}
    assert!((decoder.seconds() - samples.len() as f64 / 16_000.0).abs() < 1e-9);
    Ok((samples, decoder.info().clone(), decoder.warning().map(str::to_owned)))
}

/// A WAV file: the format chunk's body and the bytes of the samples.
pub fn riff(format: &[u8], data: &[u8]) -> Vec<u8> {
    let mut file = b"RIFF".to_vec();
    file.extend(((12 + format.len() + 8 + data.len()) as u32).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend((format.len() as u32).to_le_bytes());
    file.extend(format);
    file.extend(b"data");
    file.extend((data.len() as u32).to_le_bytes());
    file.extend(data);
    file
}

/// The body of a format chunk.
pub fn format(tag: u16, channels: u16, rate: u32, bits: u16) -> Vec<u8> {
    let align = channels.wrapping_mul(bits) / 8;
    let mut body = Vec::new();
    body.extend(tag.to_le_bytes());
    body.extend(channels.to_le_bytes());
    body.extend(rate.to_le_bytes());
    body.extend(rate.wrapping_mul(u32::from(align)).to_le_bytes());
    body.extend(align.to_le_bytes());
    body.extend(bits.to_le_bytes());
    body
}

/// A WAV of 32-bit floats, interleaved.
pub fn float_wav(samples: &[f32], channels: u16, rate: u32) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    riff(&format(3, channels, rate, 32), &data)
}

/// A WAV of 16-bit samples, mono.
pub fn short_wav(samples: &[f32], rate: u32) -> Vec<u8> {
    let data: Vec<u8> =
        samples.iter().flat_map(|sample| ((sample * 32767.0).round() as i16).to_le_bytes()).collect();
    riff(&format(1, 1, rate, 16), &data)
}

/// The lag within `most` samples at which `heard` is most like three seconds of `wanted`, and the
/// correlation there.
pub fn best_lag(wanted: &[f32], heard: &[f32], most: usize) -> (i64, f64) {
    let part = &wanted[16_000..(64_000).min(wanted.len() - most)];
    let at_lag = |lag: i64| {
        let start = (16_000 + lag) as usize;
        let other = &heard[start..(start + part.len()).min(heard.len())];
        let (mut cross, mut own, mut theirs) = (0f64, 0f64, 0f64);
        for (a, b) in part.iter().zip(other) {
            cross += f64::from(a * b);
            own += f64::from(a * a);
            theirs += f64::from(b * b);
        }
        cross / (own * theirs).sqrt().max(1e-12)
    };
    let most = most as i64;
    (-most..=most)
        .map(|lag| (lag, at_lag(lag)))
        .fold((0, -1.0), |best, now| if now.1 > best.1 { now } else { best })
}

/// Where the largest sample is.
pub fn peak(samples: &[f32]) -> usize {
    let largest =
        |best: usize, next: usize| if samples[next].abs() > samples[best].abs() { next } else { best };
    (0..samples.len()).fold(0, largest)
}

pub fn rms(samples: &[f32]) -> f64 {
    let sum: f64 = samples.iter().map(|sample| f64::from(*sample).powi(2)).sum();
    (sum / samples.len().max(1) as f64).sqrt()
}

pub fn sine(hertz: f64, rate: u32, seconds: f64) -> Vec<f32> {
    let turn = std::f64::consts::TAU * hertz / f64::from(rate);
    (0..(seconds * f64::from(rate)) as usize)
        .map(|index| ((index as f64 * turn).sin() * 0.5) as f32)
        .collect()
}

/// How often a property is tried: `default` times, or as `PROPTEST_CASES` says.
pub fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}
