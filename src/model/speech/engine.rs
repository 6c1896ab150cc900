//! [`SpeechEngine`] over a backend's operators.

use std::collections::HashMap;

use crate::model::ops::speech::SpeechOps;
use crate::model::ops::{KvShape, KvStore, StartOps, Step, StepRow};
use crate::types::{EngineError, Epoch, SequenceId};

use super::whisper::{Encoding, Heard, PackedWhisper, Whisper};
use super::{LogitsOf, SpeechEngine, SpeechOut, SpeechRow, WINDOW_FRAMES, WhisperDims, WindowId};

/// Rows that may be alive at once: beams and candidates of some windows.
const MOST_ROWS: u64 = 96;

/// A loaded model that waits to be taken over by the compute thread.
pub trait PreparedSpeech: Send {
    /// Takes the weights over. Compute thread.
    ///
    /// # Errors
    /// `Device`.
    fn start(self: Box<Self>) -> Result<Box<dyn SpeechEngine>, EngineError>;
}

/// See [`PreparedSpeech`].
pub struct Prepared<O: SpeechOps> {
    /// Of the backend.
    pub config: O::Config,
    /// The weights.
    pub packed: PackedWhisper<O>,
    /// Bytes of a key or value.
    pub element_bytes: u64,
}

impl<O: SpeechOps + 'static> PreparedSpeech for Prepared<O> {
    fn start(self: Box<Self>) -> Result<Box<dyn SpeechEngine>, EngineError> {
        let Self { config, packed, element_bytes } = *self;
        let dims = packed.dims;
        let kv =
            KvShape { layers: dims.decoder_layers, kv_heads: dims.heads, head_dim: dims.width / dims.heads };
        let token = 2 * (kv.layers * dims.width) as u64 * element_bytes;
        // Beyond the positions: a row's last block, and a copy while it grows.
        let context = u32::try_from(dims.text_context).unwrap_or(u32::MAX);
        let kv_budget_bytes = token * (u64::from(context) + 64) * MOST_ROWS;
        let start = StartOps { epoch: Epoch::default(), kv, kv_budget_bytes, context };
        let (mut ops, kv) = O::start(&config, &start)?;
        let model = Whisper::adopt(&mut ops, packed)?;
        Ok(Box::new(OpsEngine { ops, kv, model, windows: HashMap::new(), next: 0 }))
    }
}

enum Window<O: SpeechOps> {
    Encoding(Box<Encoding<O>>),
    Ready(Vec<O::Memory>),
}

struct OpsEngine<O: SpeechOps> {
    // In this order: a backend goes when nothing of its own is left.
    windows: HashMap<WindowId, Window<O>>,
    model: Whisper<O>,
    kv: O::Kv,
    ops: O,
    next: u64,
}

fn invalid(message: String) -> EngineError {
    EngineError::InvalidPlan { message }
}

impl<O: SpeechOps> OpsEngine<O> {
    /// Packed indices whose logits a row wants.
    fn wanted(row: &SpeechRow<'_>, first: usize) -> Vec<usize> {
        let last = first + row.tokens.len() - 1;
        match row.logits {
            LogitsOf::Nothing => Vec::new(),
            LogitsOf::Last => vec![last],
            LogitsOf::Ends if last == first => vec![last],
            LogitsOf::Ends => vec![first, last],
            LogitsOf::All => (first..=last).collect(),
        }
    }

    /// Logits of some packed indices, each `[vocabulary]`.
    fn logits(
        &mut self,
        hidden: &O::T,
        tokens: usize,
        picked: &[usize],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        if picked.is_empty() {
            self.ops.settle(&[hidden], None)?;
            return Ok(Vec::new());
        }
        let all = picked.len() == tokens;
        let few = match all {
            true => None,
            false => {
                let rows =
                    picked.iter().map(|at| self.ops.slice(hidden, *at..*at + 1)).collect::<Result<_, _>>()?;
                Some(self.ops.join(rows)?)
            }
        };
        let logits = self.model.logits(&mut self.ops, few.as_ref().unwrap_or(hidden))?;
        let values = self.ops.download(&logits)?;
        Ok(values.chunks_exact(self.model.dims().vocabulary).map(<[f32]>::to_vec).collect())
    }
}

impl<O: SpeechOps> SpeechEngine for OpsEngine<O> {
    fn dims(&self) -> WhisperDims {
        self.model.dims()
    }

    fn alignment_heads(&self) -> usize {
        self.model.alignment_heads()
    }

    fn begin(&mut self, mel: Vec<f32>) -> Result<WindowId, EngineError> {
        let wanted = WINDOW_FRAMES * self.model.dims().mels;
        if mel.len() != wanted {
            return Err(invalid(format!("a window of {} values, {wanted} are needed", mel.len())));
        }
        let id = WindowId(self.next);
        self.next += 1;
        self.windows.insert(id, Window::Encoding(Box::new(Encoding::new(mel))));
        Ok(id)
    }

    fn encode(&mut self, window: WindowId, more: &mut dyn FnMut() -> bool) -> Result<bool, EngineError> {
        match self.windows.get_mut(&window) {
            None => return Err(invalid(format!("{window:?} is not there"))),
            Some(Window::Ready(_)) => return Ok(true),
            Some(Window::Encoding(encoding)) => {
                while !self.model.encode_piece(&mut self.ops, encoding)? {
                    if !more() {
                        return Ok(false);
                    }
                }
            }
        }
        if let Some(Window::Encoding(encoding)) = self.windows.remove(&window)
            && let Some(memories) = encoding.finish()
        {
            self.windows.insert(window, Window::Ready(memories));
        }
        Ok(true)
    }

    fn forget(&mut self, window: WindowId) {
        self.windows.remove(&window);
    }

    fn open(&mut self, from: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        self.kv.open(from)
    }

    fn close(&mut self, sequence: SequenceId) {
        self.kv.close(sequence);
    }

    fn decode(&mut self, rows: &[SpeechRow<'_>]) -> Result<Vec<SpeechOut>, EngineError> {
        let (mut tokens, mut positions, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut picked = Vec::new();
        for row in rows {
            let first = tokens.len();
            let len = u32::try_from(row.tokens.len()).unwrap_or(u32::MAX);
            let end = row.start.saturating_add(len);
            if row.tokens.is_empty() || end as usize > self.model.dims().text_context {
                return Err(invalid(format!(
                    "{len} tokens at {} of {}",
                    row.start,
                    self.model.dims().text_context
                )));
            }
            self.kv.reserve(row.sequence, end)?;
            tokens.extend_from_slice(row.tokens);
            positions.extend(row.start..end);
            places.push(StepRow { sequence: row.sequence, first, len: row.tokens.len(), start: row.start });
            picked.push(Self::wanted(row, first));
        }
        let step = Step { tokens: &tokens, positions: &positions, rows: &places };
        self.ops.begin(&step, None)?;
        let mut heard = Vec::with_capacity(rows.len());
        for row in rows {
            let Some(Window::Ready(memory)) = self.windows.get(&row.window) else {
                return Err(invalid(format!("{:?} is not ready", row.window)));
            };
            heard.push(Heard { tokens: row.tokens.len(), memory, scores: row.scores });
        }
        let (hidden, scores) = self.model.decode(&mut self.ops, &mut self.kv, &step, &heard)?;
        let mut logits = self.logits(&hidden, tokens.len(), &picked.concat())?.into_iter();
        for row in rows {
            self.kv.commit(row.sequence, row.start + u32::try_from(row.tokens.len()).unwrap_or(u32::MAX))?;
        }
        let outs = picked.iter().zip(scores);
        Ok(outs
            .map(|(picked, scores)| SpeechOut {
                logits: logits.by_ref().take(picked.len()).collect(),
                scores,
            })
            .collect())
    }

    fn weight_bytes(&self) -> u64 {
        self.ops.weight_bytes()
    }

    fn state_bytes(&self) -> u64 {
        let of = |window: &Window<O>| match window {
            Window::Encoding(_) => 0,
            Window::Ready(memories) => memories.iter().map(|memory| self.ops.memory_bytes(memory)).sum(),
        };
        self.windows.values().map(of).sum::<u64>() + self.kv.stats().used_bytes
    }

    fn device(&self) -> String {
        self.ops.device()
    }
}
