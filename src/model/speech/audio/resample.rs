//! Any rate to 16 kHz, as a stream, without delay and with the exact length.

use rubato::audioadapter_buffers::direct::SequentialSlice;
use rubato::{Fft, FixedSync, Indexing, Resampler as _, WindowFunction};

use super::SAMPLE_RATE;

/// Output samples of one block of the Fourier transform: long enough for a steep filter (flat to
/// 7.2 kHz, nothing above 8.5), short enough for live input (64 ms).
const BLOCK: usize = 1024;

/// Lowest and highest rate that is read, samples a second.
pub(super) const RATES: std::ops::RangeInclusive<u32> = 1_000..=384_000;

/// Resamples one channel.
pub(super) struct Resampler {
    rate: u32,
    /// None where the rate is right already.
    engine: Option<Engine>,
    taken: u64,
    given: u64,
}

struct Engine {
    fft: Fft<f32>,
    waiting: Vec<f32>,
    block: Vec<f32>,
    /// Output samples still to be dropped: the filter's delay.
    delay: usize,
}

impl Resampler {
    /// From `rate` samples a second. None for rates that make no sense.
    pub(super) fn new(rate: u32) -> Option<Self> {
        if !RATES.contains(&rate) {
            return None;
        }
        let engine = if rate == SAMPLE_RATE { None } else { Some(Engine::new(rate)?) };
        Some(Self { rate, engine, taken: 0, given: 0 })
    }

    /// Takes `samples` and appends what can be given already.
    pub(super) fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        self.taken += samples.len() as u64;
        let before = out.len();
        match &mut self.engine {
            None => out.extend_from_slice(samples),
            Some(engine) => engine.push(samples, out),
        }
        self.given += (out.len() - before) as u64;
    }

    /// Appends the rest, so that there are round(n · 16000 / rate) in all, and starts afresh.
    pub(super) fn finish(&mut self, out: &mut Vec<f32>) {
        let (rate, target) = (u128::from(self.rate), u128::from(SAMPLE_RATE));
        let total = ((2 * u128::from(self.taken) * target + rate) / (2 * rate)) as u64;
        if let Some(engine) = &mut self.engine {
            let wanted = out.len() + usize::try_from(total.saturating_sub(self.given)).unwrap_or(0);
            engine.flush(wanted, out);
            out.truncate(wanted.min(out.len()));
            engine.reset();
        }
        (self.taken, self.given) = (0, 0);
    }
}

impl Engine {
    fn new(rate: u32) -> Option<Self> {
        let (from, to) = (rate as usize, SAMPLE_RATE as usize);
        let fft = Fft::new_custom(
            from,
            to,
            (BLOCK * from).div_ceil(to),
            1,
            1,
            WindowFunction::BlackmanHarris2,
            FixedSync::Both,
        )
        .ok()?;
        let block = vec![0.0; fft.output_frames_max()];
        let delay = fft.output_delay();
        Some(Self { fft, waiting: Vec::new(), block, delay })
    }

    fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        self.waiting.extend_from_slice(samples);
        let size = self.fft.input_frames_next().max(1);
        let mut used = 0;
        while let Some(part) = self.waiting.get(used..used + size) {
            let given = step(&mut self.fft, part, None, &mut self.block);
            give(self.block.get(..given).unwrap_or_default(), &mut self.delay, out);
            used += size;
        }
        self.waiting.drain(..used);
    }

    /// Pushes silence through until `out` holds `wanted` samples.
    fn flush(&mut self, wanted: usize, out: &mut Vec<f32>) {
        let size = self.fft.input_frames_next();
        let mut valid = self.waiting.len();
        self.waiting.resize(size.max(valid), 0.0);
        while out.len() < wanted {
            let given = step(&mut self.fft, &self.waiting, Some(valid), &mut self.block);
            if given == 0 {
                break;
            }
            give(self.block.get(..given).unwrap_or_default(), &mut self.delay, out);
            valid = 0;
        }
    }

    fn reset(&mut self) {
        self.fft.reset();
        self.waiting.clear();
        self.delay = self.fft.output_delay();
    }
}

/// One block through the resampler: how many samples of `block` are filled.
fn step(fft: &mut Fft<f32>, input: &[f32], valid: Option<usize>, block: &mut [f32]) -> usize {
    let room = block.len();
    let (Ok(source), Ok(mut target)) =
        (SequentialSlice::new(input, 1, input.len()), SequentialSlice::new_mut(block, 1, room))
    else {
        return 0;
    };
    let indexing = Indexing { partial_len: valid, ..Indexing::default() };
    fft.process_into_buffer(&source, &mut target, Some(&indexing)).map_or(0, |(_, given)| given)
}

/// Appends `samples` without the first `delay` of all.
fn give(samples: &[f32], delay: &mut usize, out: &mut Vec<f32>) {
    let dropped = (*delay).min(samples.len());
    *delay -= dropped;
    out.extend_from_slice(samples.get(dropped..).unwrap_or_default());
}
