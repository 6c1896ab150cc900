//! Log-mel features, exactly as Whisper computes them.
//!
//! Frames of 400 samples (25 ms) every 160 (10 ms), centred, a periodic Hann window, power of the 201
//! bins, Slaney's mel filters of 0 to 8000 Hz, then log10 of at least 1e-10. The last two steps need the
//! loudest of all frames: see [`normalise`].

use std::sync::Arc;

use realfft::{RealFftPlanner, RealToComplex};

use super::HOP;

/// Samples of a frame.
const FRAME: usize = 400;
/// Bins of its spectrum.
const BINS: usize = FRAME / 2 + 1;
/// Samples before a frame's middle.
const HALF: usize = FRAME / 2;
/// The quietest power that is told apart.
const FLOOR: f32 = 1e-10;
/// Log-mel of nothing.
pub const SILENCE: f32 = -10.0;

/// Slaney's mel scale, in f64.
fn mel_of(hz: f64) -> f64 {
    if hz < 1000.0 { hz * 3.0 / 200.0 } else { 15.0 + (hz / 1000.0).ln() * 27.0 / 6.4_f64.ln() }
}

fn hz_of(mel: f64) -> f64 {
    if mel < 15.0 { mel * 200.0 / 3.0 } else { 1000.0 * ((mel - 15.0) * 6.4_f64.ln() / 27.0).exp() }
}

/// One mel band: its first bin and the weights from there on.
#[derive(Clone, Debug, PartialEq)]
pub struct Band {
    /// First bin with a weight.
    pub first: usize,
    /// Weights of this and the following bins.
    pub weights: Vec<f32>,
}

/// Slaney's triangles with Slaney's norm: `min(rise, fall) · 2 / (f[i + 2] − f[i])`, computed in f64.
pub fn filters(mels: usize) -> Vec<Band> {
    let top = mel_of(8000.0);
    let points: Vec<f64> = (0..mels + 2).map(|i| hz_of(top * i as f64 / (mels + 1) as f64)).collect();
    let band = |i: usize| {
        let [low, middle, high] = [points[i], points[i + 1], points[i + 2]];
        let weight = |bin: usize| {
            let hz = bin as f64 * 40.0;
            let triangle = ((hz - low) / (middle - low)).min((high - hz) / (high - middle)).max(0.0);
            (triangle * 2.0 / (high - low)) as f32
        };
        let first = (0..BINS).find(|bin| weight(*bin) > 0.0).unwrap_or(0);
        let weights = (first..BINS).map(weight).take_while(|weight| *weight > 0.0).collect();
        Band { first, weights }
    };
    (0..mels).map(band).collect()
}

/// Turns samples into frames as they come. Knows nothing of loudness: frames are plain log10.
pub struct MelStream {
    bands: Vec<Band>,
    window: Vec<f32>,
    fft: Arc<dyn RealToComplex<f32>>,
    frame: Vec<f32>,
    spectrum: Vec<realfft::num_complex::Complex<f32>>,
    scratch: Vec<realfft::num_complex::Complex<f32>>,
    power: Vec<f32>,
    /// Samples from the next frame's first on; before the first frame's real samples, none.
    pending: Vec<f32>,
    /// Samples that came.
    samples: usize,
    /// Frames that went.
    frames: usize,
    begun: bool,
}

impl MelStream {
    /// For so many mel bins.
    pub fn new(mels: usize) -> Self {
        let fft = RealFftPlanner::new().plan_fft_forward(FRAME);
        let turn = 2.0 * std::f64::consts::PI / FRAME as f64;
        Self {
            bands: filters(mels),
            window: (0..FRAME).map(|k| (0.5 - 0.5 * (turn * k as f64).cos()) as f32).collect(),
            frame: vec![0.0; FRAME],
            spectrum: fft.make_output_vec(),
            scratch: fft.make_scratch_vec(),
            power: vec![0.0; BINS],
            fft,
            pending: Vec::new(),
            samples: 0,
            frames: 0,
            begun: false,
        }
    }

    /// Mel bins.
    pub fn mels(&self) -> usize {
        self.bands.len()
    }

    /// Frames given so far.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Takes samples, appends the frames that they complete: `[frames][mels]`.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        self.samples += samples.len();
        self.pending.extend_from_slice(samples);
        self.advance(out);
    }

    fn advance(&mut self, out: &mut Vec<f32>) {
        if !self.begun {
            // The first frame's middle is the first sample; before it the audio is mirrored.
            if self.pending.len() <= HALF {
                return;
            }
            let mirrored: Vec<f32> = (1..=HALF).rev().map(|i| self.pending[i]).collect();
            self.pending.splice(0..0, mirrored);
            self.begun = true;
        }
        let mut at = 0;
        while at + FRAME <= self.pending.len() {
            self.compute(at, out);
            at += HOP;
        }
        self.pending.drain(..at.min(self.pending.len()));
    }

    /// The end: silence follows. Gives the frames of the real samples, `samples / 160` in all, and after them
    /// those of `silence` more samples.
    pub fn finish(&mut self, silence: usize, out: &mut Vec<f32>) {
        let total = (self.samples + silence) / HOP;
        let mels = self.mels();
        let before = out.len();
        let due = total.saturating_sub(self.frames);
        self.pending.resize(self.pending.len() + silence + FRAME + HALF, 0.0);
        self.advance(out);
        out.truncate(before + due * mels);
        self.frames = total;
        self.pending.clear();
    }

    fn compute(&mut self, at: usize, out: &mut Vec<f32>) {
        for ((to, x), weight) in self.frame.iter_mut().zip(&self.pending[at..]).zip(&self.window) {
            *to = x * weight;
        }
        let done = self.fft.process_with_scratch(&mut self.frame, &mut self.spectrum, &mut self.scratch);
        debug_assert!(done.is_ok(), "buffers were made by the plan");
        for (power, x) in self.power.iter_mut().zip(&self.spectrum) {
            *power = x.re * x.re + x.im * x.im;
        }
        for band in &self.bands {
            let bins = &self.power[band.first..];
            let sum: f32 = band.weights.iter().zip(bins).map(|(weight, power)| weight * power).sum();
            out.push(sum.max(FLOOR).log10());
        }
        self.frames += 1;
    }
}

/// Whisper's last steps: at least the loudest less 8, then `(x + 4) / 4`.
pub fn normalise(frames: &mut [f32], loudest: f32) {
    let floor = loudest - 8.0;
    frames.iter_mut().for_each(|x| *x = (x.max(floor) + 4.0) / 4.0);
}

/// The loudest of some frames.
pub fn loudest(frames: &[f32]) -> f32 {
    frames.iter().copied().fold(SILENCE, f32::max)
}

/// All features of a recording with 30 s of silence behind it, of which the first window is taken:
/// `[3000][mels]`.
pub fn single_window(samples: &[f32], mels: usize) -> Vec<f32> {
    let mut stream = MelStream::new(mels);
    let mut frames = Vec::new();
    stream.push(samples, &mut frames);
    stream.finish(super::WINDOW_FRAMES * HOP, &mut frames);
    let top = loudest(&frames);
    frames.truncate(super::WINDOW_FRAMES * mels);
    normalise(&mut frames, top);
    frames
}
