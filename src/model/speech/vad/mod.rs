//! Where somebody speaks: Silero's network (version 6, 16 kHz, MIT; see `LICENSE-silero`) in plain loops,
//! and the rules that make stretches of speech of its probabilities.

mod net;
mod stretches;

pub use net::{FRAME, SpeechNet, SpeechState};
pub use stretches::Stretches;

/// Probabilities of speech, frame by frame, as samples come.
pub struct VadStream {
    net: &'static SpeechNet,
    state: SpeechState,
    pending: Vec<f32>,
}

impl VadStream {
    /// `None` where the network cannot be read, which would be a fault of the program.
    pub fn new() -> Option<Self> {
        Some(Self { net: SpeechNet::get()?, state: SpeechState::default(), pending: Vec::new() })
    }

    /// Takes samples; appends the probability of each whole frame of 512.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        self.pending.extend_from_slice(samples);
        let whole = self.pending.len() / FRAME * FRAME;
        for frame in self.pending[..whole].chunks_exact(FRAME) {
            out.push(self.net.probability(frame, &mut self.state));
        }
        self.pending.drain(..whole);
    }

    /// The end: what is left of a frame, with silence behind it.
    pub fn finish(&mut self, out: &mut Vec<f32>) {
        if !self.pending.is_empty() {
            self.pending.resize(FRAME, 0.0);
            let rest = std::mem::take(&mut self.pending);
            out.push(self.net.probability(&rest, &mut self.state));
        }
    }
}
