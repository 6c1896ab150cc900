//! Who computes what recognising asks for: windows and decoder steps.
//!
//! Recognising is written as futures over [`Compute`]. The service's implementation queues the asks of
//! all recordings and sessions and computes them together, in turns with chat; [`Direct`] computes at once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::types::speech::AudioFault;
use crate::types::{EngineError, SequenceId, TokenId};

use super::{LogitsOf, SpeechEngine, SpeechOut, SpeechRow, WindowId};

/// Why recognising stopped.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpeechError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model is gone.
    #[error("the speech model was unloaded")]
    Unloaded,
    /// The audio ended with an error.
    #[error(transparent)]
    Audio(AudioFault),
}

/// An engine that several futures of one thread use, while it is there.
#[derive(Clone, Default)]
pub struct EngineCell(Rc<RefCell<Option<Box<dyn SpeechEngine>>>>, Rc<Cell<u64>>);

impl EngineCell {
    /// With an engine.
    pub fn new(engine: Box<dyn SpeechEngine>) -> Self {
        Self(Rc::new(RefCell::new(Some(engine))), Rc::default())
    }

    /// Calls `act` with the engine.
    ///
    /// # Errors
    /// `Unloaded` without one; what `act` says.
    pub fn with<R>(
        &self,
        act: impl FnOnce(&mut dyn SpeechEngine) -> Result<R, EngineError>,
    ) -> Result<R, SpeechError> {
        let mut engine = self.0.borrow_mut();
        let engine = engine.as_deref_mut().ok_or(SpeechError::Unloaded)?;
        Ok(act(engine)?)
    }

    /// Takes an engine in, or out.
    pub fn replace(&self, engine: Option<Box<dyn SpeechEngine>>) -> Option<Box<dyn SpeechEngine>> {
        self.1.set(self.1.get() + 1);
        std::mem::replace(&mut *self.0.borrow_mut(), engine)
    }

    /// The same for what an engine of this life gave: ids mean nothing to the next one.
    fn with_its_own(&self, life: u64, act: impl FnOnce(&mut dyn SpeechEngine)) {
        if self.1.get() == life {
            // A model that is gone has forgotten it already.
            let _gone = self.with(|engine| {
                act(engine);
                Ok(())
            });
        }
    }

    /// Whether there is an engine.
    pub fn is_loaded(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Takes a window's features.
    ///
    /// # Errors
    /// See [`SpeechEngine::begin`].
    pub fn begin(&self, mel: Vec<f32>) -> Result<Window, SpeechError> {
        let id = self.with(|engine| engine.begin(mel))?;
        Ok(Rc::new(WindowHandle { id, life: self.1.get(), cell: self.clone() }))
    }

    /// A decoder sequence, empty or forked.
    ///
    /// # Errors
    /// See [`SpeechEngine::open`].
    pub fn open(&self, from: Option<(&Sequence, u32)>) -> Result<Sequence, SpeechError> {
        let from = from.map(|(sequence, at)| (sequence.id, at));
        let id = self.with(|engine| engine.open(from))?;
        Ok(Rc::new(SequenceHandle { id, life: self.1.get(), cell: self.clone() }))
    }
}

/// A window that is forgotten with its last holder.
pub struct WindowHandle {
    /// Of the engine.
    pub id: WindowId,
    life: u64,
    cell: EngineCell,
}

/// See [`WindowHandle`].
pub type Window = Rc<WindowHandle>;

impl Drop for WindowHandle {
    fn drop(&mut self) {
        self.cell.with_its_own(self.life, |engine| engine.forget(self.id));
    }
}

/// A decoder sequence that is closed with its last holder.
pub struct SequenceHandle {
    /// Of the engine.
    pub id: SequenceId,
    life: u64,
    cell: EngineCell,
}

/// See [`SequenceHandle`].
pub type Sequence = Rc<SequenceHandle>;

impl Drop for SequenceHandle {
    fn drop(&mut self) {
        self.cell.with_its_own(self.life, |engine| engine.close(self.id));
    }
}

/// One row that is asked for; see [`SpeechRow`].
pub struct AskedRow {
    /// What it hears.
    pub window: Window,
    /// Its state.
    pub sequence: Sequence,
    /// What is computed of it.
    pub start: u32,
    /// Tokens to compute.
    pub tokens: Vec<u32>,
    /// Logits that are wanted.
    pub logits: LogitsOf,
    /// Scores are wanted.
    pub scores: bool,
}

/// Computes rows in one step.
///
/// # Errors
/// See [`SpeechEngine::decode`].
pub fn decode_now(cell: &EngineCell, rows: &[AskedRow]) -> Result<Vec<SpeechOut>, SpeechError> {
    let life = cell.1.get();
    if rows.iter().any(|row| row.window.life != life || row.sequence.life != life) {
        return Err(SpeechError::Unloaded);
    }
    let tokens: Vec<Vec<TokenId>> =
        rows.iter().map(|row| row.tokens.iter().map(|id| TokenId(*id)).collect()).collect();
    let asked = rows.iter().zip(&tokens).map(|(row, tokens)| SpeechRow {
        window: row.window.id,
        sequence: row.sequence.id,
        start: row.start,
        tokens,
        logits: row.logits,
        scores: row.scores,
    });
    let asked: Vec<SpeechRow<'_>> = asked.collect();
    cell.with(|engine| engine.decode(&asked))
}

/// See the module. On one thread.
#[allow(async_fn_in_trait, reason = "futures stay on the compute thread")]
pub trait Compute {
    /// The engine that is asked.
    fn cell(&self) -> &EngineCell;

    /// Encodes a window of `[3000][mels]` features.
    ///
    /// # Errors
    /// See [`SpeechError`].
    async fn encode(&self, mel: Vec<f32>) -> Result<Window, SpeechError>;

    /// Computes rows.
    ///
    /// # Errors
    /// See [`SpeechError`].
    async fn decode(&self, rows: Vec<AskedRow>) -> Result<Vec<SpeechOut>, SpeechError>;
}

/// Computes at once.
pub struct Direct(pub EngineCell);

impl Compute for Direct {
    fn cell(&self) -> &EngineCell {
        &self.0
    }

    async fn encode(&self, mel: Vec<f32>) -> Result<Window, SpeechError> {
        let window = self.0.begin(mel)?;
        self.0.with(|engine| engine.encode(window.id, &mut || true))?;
        Ok(window)
    }

    async fn decode(&self, rows: Vec<AskedRow>) -> Result<Vec<SpeechOut>, SpeechError> {
        decode_now(&self.0, &rows)
    }
}
