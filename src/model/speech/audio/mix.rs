//! Several channels to one, as a stream.

/// Blocks a second in which it is decided what the mix is.
const BLOCKS: u32 = 50;

/// How much of the energies survives a block: after 0.4 seconds what was before no longer counts.
const MEMORY: f64 = 0.8;

/// A mean with less than this share of the louder channel's energy is cancelled out.
const CANCELLED: f64 = 0.01;

/// Another channel must be so much louder to replace the one that is taken.
const LOUDER: f64 = 2.0;

/// Mixes interleaved samples down to their mean, or to the loudest channel while channels of opposite
/// phase cancel each other. The result does not depend on how the input is cut.
pub(super) struct Mixer {
    channels: usize,
    /// Samples (all channels) in a block.
    block: usize,
    waiting: Vec<f32>,
    /// Leaky energy of the mean and of each channel.
    mean: f64,
    energies: Vec<f64>,
    chosen: Option<usize>,
    /// Whether anything was given: the very first block has nothing to fade from.
    started: bool,
}

impl Mixer {
    /// For frames of `channels` samples, `rate` frames a second.
    pub(super) fn new(channels: u16, rate: u32) -> Self {
        let channels = usize::from(channels.max(1));
        Self {
            channels,
            block: channels * (rate / BLOCKS).max(1) as usize,
            waiting: Vec::new(),
            mean: 0.0,
            energies: vec![0.0; channels],
            chosen: None,
            started: false,
        }
    }

    /// Takes interleaved samples (whole frames) and appends what is mixed already, one a frame.
    pub(super) fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        if self.channels == 1 {
            out.extend(samples.iter().copied().map(super::finite));
            return;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.extend(samples.iter().copied().map(super::finite));
        let blocks = waiting.chunks_exact(self.block);
        let rest = blocks.remainder().len();
        blocks.for_each(|block| self.mix(block, out));
        waiting.drain(..waiting.len() - rest);
        self.waiting = waiting;
    }

    /// Appends the rest and starts afresh.
    pub(super) fn finish(&mut self, out: &mut Vec<f32>) {
        let rest = std::mem::take(&mut self.waiting);
        if !rest.is_empty() {
            self.mix(&rest, out);
        }
        self.energies.fill(0.0);
        (self.mean, self.chosen, self.started) = (0.0, None, false);
    }

    fn mix(&mut self, block: &[f32], out: &mut Vec<f32>) {
        self.energies.iter_mut().for_each(|energy| *energy *= MEMORY);
        self.mean *= MEMORY;
        for frame in block.chunks_exact(self.channels) {
            for (energy, sample) in self.energies.iter_mut().zip(frame) {
                *energy += f64::from(*sample) * f64::from(*sample);
            }
            self.mean += f64::from(mean(frame)).powi(2);
        }
        let before = self.chosen;
        self.choose();
        let frames = (block.len() / self.channels).max(1) as f32;
        for (index, frame) in block.chunks_exact(self.channels).enumerate() {
            let new = pick(frame, self.chosen);
            // A change at once would click.
            out.push(if self.started && before != self.chosen {
                let share = index as f32 / frames;
                pick(frame, before) * (1.0 - share) + new * share
            } else {
                new
            });
        }
        self.started = true;
    }

    fn choose(&mut self) {
        let loudest = (0..self.channels)
            .map(|channel| (channel, self.energies.get(channel).copied().unwrap_or(0.0)))
            .fold((0, 0.0), |best, next| if next.1 > best.1 { next } else { best });
        if self.mean >= CANCELLED * loudest.1 {
            self.chosen = None;
            return;
        }
        let current = self.chosen.and_then(|channel| self.energies.get(channel).copied());
        if current.is_none_or(|energy| loudest.1 > LOUDER * energy) {
            self.chosen = Some(loudest.0);
        }
    }
}

fn mean(frame: &[f32]) -> f32 {
    (frame.iter().copied().map(f64::from).sum::<f64>() / frame.len().max(1) as f64) as f32
}

fn pick(frame: &[f32], chosen: Option<usize>) -> f32 {
    chosen.and_then(|channel| frame.get(channel).copied()).unwrap_or_else(|| mean(frame))
}
