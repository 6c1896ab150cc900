//! Silero's network, one frame of 512 samples at a time.
//!
//! A short Fourier transform by a stored basis, four convolutions, an LSTM cell, one output. Weights are
//! kept input by input, so that inner loops run over outputs and compilers make vectors of them.

use std::path::Path;
use std::sync::OnceLock;

use crate::model::load::whisper::floats_of;

/// Samples of a frame: 32 ms.
pub const FRAME: usize = 512;
/// Samples of the frame before that are seen again.
const CONTEXT: usize = 64;
/// Samples and step of a column of the spectrum, and columns of a frame.
const COLUMN: usize = 256;
const STEP: usize = 128;
const COLUMNS: usize = 4;
const BINS: usize = 129;
/// Width of the cell.
const HIDDEN: usize = 128;

static WEIGHTS: &[u8] = include_bytes!("silero-v6.safetensors");

/// `[inputs][outputs]` with a bias.
struct Layer {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Layer {
    /// `out += x · weight`.
    fn add(&self, x: &[f32], out: &mut [f32]) {
        for (x, row) in x.iter().zip(self.weight.chunks_exact(out.len())) {
            out.iter_mut().zip(row).for_each(|(out, weight)| *out += x * weight);
        }
    }
}

/// A convolution of three taps as a layer a tap.
struct Convolution {
    taps: [Layer; 3],
    stride: usize,
    outputs: usize,
}

impl Convolution {
    /// Columns of inputs to columns of outputs, padded by one, then negative values to 0.
    fn run(&self, columns: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let count = columns.len().div_ceil(self.stride);
        let column = |at: usize| {
            let mut out = self.taps[0].bias.clone();
            out.resize(self.outputs, 0.0);
            for (tap, layer) in self.taps.iter().enumerate() {
                if let Some(x) = (at * self.stride + tap).checked_sub(1).and_then(|at| columns.get(at)) {
                    layer.add(x, &mut out);
                }
            }
            out.iter_mut().for_each(|x| *x = x.max(0.0));
            out
        };
        (0..count).map(column).collect()
    }
}

/// See the module.
pub struct SpeechNet {
    basis: Layer,
    convolutions: [Convolution; 4],
    input: Layer,
    hidden: Layer,
    last: Vec<f32>,
    last_bias: f32,
}

/// What a stream remembers.
#[derive(Clone, Debug)]
pub struct SpeechState {
    hidden: Vec<f32>,
    cell: Vec<f32>,
    context: [f32; CONTEXT],
}

impl Default for SpeechState {
    fn default() -> Self {
        Self { hidden: vec![0.0; HIDDEN], cell: vec![0.0; HIDDEN], context: [0.0; CONTEXT] }
    }
}

/// `[outputs][inputs]` the other way round; of each input `stride` apart, from `first`.
fn turned(weight: &[f32], outputs: usize, stride: usize, first: usize) -> Vec<f32> {
    let inputs = weight.len() / outputs / stride;
    let at = |index: usize| {
        let (input, output) = (index / outputs, index % outputs);
        weight[(output * inputs + input) * stride + first]
    };
    (0..inputs * outputs).map(at).collect()
}

impl SpeechNet {
    /// The network, read once a process.
    pub fn get() -> Option<&'static Self> {
        static NET: OnceLock<Option<SpeechNet>> = OnceLock::new();
        NET.get_or_init(Self::read).as_ref()
    }

    fn read() -> Option<Self> {
        let weights = floats_of(WEIGHTS, Path::new("silero-v6.safetensors"))?;
        let floats = |name: &str, len: usize| {
            weights.get(name).filter(|values| values.len() == len).map(Vec::as_slice)
        };
        let convolution = |name: &str, inputs: usize, outputs: usize, stride: usize| {
            let weight = floats(&format!("{name}.weight"), outputs * inputs * 3)?;
            let bias = floats(&format!("{name}.bias"), outputs)?;
            let tap = |tap: usize| Layer { weight: turned(weight, outputs, 3, tap), bias: bias.to_vec() };
            Some(Convolution { taps: [tap(0), tap(1), tap(2)], stride, outputs })
        };
        let gates = |kind: &str| {
            let weight = floats(&format!("lstm_cell.weight_{kind}"), 4 * HIDDEN * HIDDEN)?;
            let bias = floats(&format!("lstm_cell.bias_{kind}"), 4 * HIDDEN)?;
            Some(Layer { weight: turned(weight, 4 * HIDDEN, 1, 0), bias: bias.to_vec() })
        };
        Some(Self {
            basis: Layer {
                weight: turned(floats("stft_conv.weight", 2 * BINS * COLUMN)?, 2 * BINS, 1, 0),
                bias: Vec::new(),
            },
            convolutions: [
                convolution("conv1", BINS, 128, 1)?,
                convolution("conv2", 128, 64, 2)?,
                convolution("conv3", 64, 64, 2)?,
                convolution("conv4", 64, 128, 1)?,
            ],
            input: gates("ih")?,
            hidden: gates("hh")?,
            last: floats("final_conv.weight", HIDDEN)?.to_vec(),
            last_bias: *floats("final_conv.bias", 1)?.first()?,
        })
    }

    /// How likely it is that somebody speaks in this frame of [`FRAME`] samples.
    pub fn probability(&self, frame: &[f32], state: &mut SpeechState) -> f32 {
        let mut x = Vec::with_capacity(CONTEXT + FRAME + CONTEXT);
        x.extend_from_slice(&state.context);
        x.extend_from_slice(frame);
        state.context.copy_from_slice(&x[x.len() - CONTEXT..]);
        // Mirrored at its end.
        let end = x.len() - 1;
        (1..=CONTEXT).for_each(|i| x.push(x[end - i]));
        let column = |column: usize| {
            let mut both = vec![0.0; 2 * BINS];
            self.basis.add(&x[column * STEP..column * STEP + COLUMN], &mut both);
            let (real, imaginary) = both.split_at(BINS);
            real.iter().zip(imaginary).map(|(re, im)| (re * re + im * im).sqrt()).collect()
        };
        let spectrum: Vec<Vec<f32>> = (0..COLUMNS).map(column).collect();
        let columns = self.convolutions.iter().fold(spectrum, |x, convolution| convolution.run(&x));
        let mut gates: Vec<f32> = self.input.bias.iter().zip(&self.hidden.bias).map(|(a, b)| a + b).collect();
        if let Some(x) = columns.first() {
            self.input.add(x, &mut gates);
        }
        self.hidden.add(&state.hidden, &mut gates);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let mut sum = self.last_bias;
        for i in 0..HIDDEN {
            let gate = |kind: usize| gates[kind * HIDDEN + i];
            let cell = sigmoid(gate(1)) * state.cell[i] + sigmoid(gate(0)) * gate(2).tanh();
            state.cell[i] = cell;
            state.hidden[i] = sigmoid(gate(3)) * cell.tanh();
            sum += state.hidden[i].max(0.0) * self.last[i];
        }
        sigmoid(sum)
    }
}
