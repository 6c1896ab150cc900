//! A scripted engine for tests of everything above the engine (feature `fake`).
//!
//! No floats in its contract: the next token follows from the committed tokens and the
//! script alone, so a lost, doubled or misplaced token changes the text. Bytes, blocks,
//! shared prefixes, epochs and the rules of a plan are those of a real engine. Faults,
//! times and pauses are data; nobody sleeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::model::text::TextModel;
use crate::model::{Engine, LoadedModel, ModelSource, PreparedEngine};
use crate::types::{EngineError, Epoch, LoadError, ManualClock};

mod control;
mod engine;

pub use control::{FakeControl, StepRecord};

use engine::FakeEngine;

/// What goes wrong in a step or with a row.
#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// The step panics.
    Panic(String),
    /// The step panics, and so does dropping the engine after it.
    PanicTwice(String),
    /// The step fails as a whole.
    Fail(EngineError),
    /// One row of the step fails alone, by its place in the plan.
    FailRow(usize, EngineError),
}

/// What goes wrong in a load.
#[derive(Clone, PartialEq, Debug)]
pub enum LoadFault {
    /// It ends with this message.
    Fail(String),
    /// It panics.
    Panic(String),
}

/// What a prompt is answered with.
#[derive(Clone, PartialEq, Debug)]
enum Reply {
    /// The text, then the end of the turn.
    Say(String),
    /// The text again and again.
    Repeat(String),
}

/// What the engine does. Prompts without a rule get a text that follows from all their tokens.
#[derive(Clone, Debug)]
pub struct Script {
    replies: Vec<(String, Reply)>,
    row_faults: Vec<(String, EngineError)>,
    step_faults: BTreeMap<u64, Fault>,
    poisons: Vec<(String, Fault)>,
    load_faults: BTreeMap<u64, LoadFault>,
    kv_blocks: u32,
    block_tokens: u32,
    step_time: Duration,
    token_time: Duration,
    position_time: Duration,
    clock: Option<Arc<ManualClock>>,
    gated: bool,
    batches: bool,
    overlaps: bool,
    survives_panics: bool,
    trims: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            replies: Vec::new(),
            row_faults: Vec::new(),
            step_faults: BTreeMap::new(),
            poisons: Vec::new(),
            load_faults: BTreeMap::new(),
            kv_blocks: 4096,
            block_tokens: 16,
            step_time: Duration::ZERO,
            token_time: Duration::ZERO,
            position_time: Duration::ZERO,
            clock: None,
            gated: false,
            batches: true,
            overlaps: false,
            survives_panics: true,
            trims: true,
        }
    }
}

impl Script {
    /// An engine without faults and with plenty of memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// A prompt that contains `when` is answered with `text`; the rule found last in it counts.
    #[must_use]
    pub fn say(mut self, when: &str, text: &str) -> Self {
        self.replies.push((when.into(), Reply::Say(text.into())));
        self
    }

    /// A prompt that contains `when` is answered with `text` again and again, without end.
    #[must_use]
    pub fn repeat(mut self, when: &str, text: &str) -> Self {
        self.replies.push((when.into(), Reply::Repeat(text.into())));
        self
    }

    /// A row whose tokens contain `when` fails alone.
    #[must_use]
    pub fn fail_rows(mut self, when: &str, error: EngineError) -> Self {
        self.row_faults.push((when.into(), error));
        self
    }

    /// Step `number` (from 1, counted over all lives) goes wrong.
    #[must_use]
    pub fn at_step(mut self, number: u64, fault: Fault) -> Self {
        self.step_faults.insert(number, fault);
        self
    }

    /// Every step with a row whose tokens contain `when` goes wrong.
    #[must_use]
    pub fn poison(mut self, when: &str, fault: Fault) -> Self {
        self.poisons.push((when.into(), fault));
        self
    }

    /// Load `number` (from 1) goes wrong.
    #[must_use]
    pub fn at_load(mut self, number: u64, fault: LoadFault) -> Self {
        self.load_faults.insert(number, fault);
        self
    }

    /// Key-value memory: so many blocks of so many tokens.
    #[must_use]
    pub fn memory(mut self, blocks: u32, block_tokens: u32) -> Self {
        (self.kv_blocks, self.block_tokens) = (blocks, block_tokens.max(1));
        self
    }

    /// Each step moves the clock by `step` and by `token` for each token.
    #[must_use]
    pub fn takes(mut self, step: Duration, token: Duration, clock: Arc<ManualClock>) -> Self {
        (self.step_time, self.token_time, self.clock) = (step, token, Some(clock));
        self
    }

    /// Rows cannot share a step.
    #[must_use]
    pub fn one_row_a_step(mut self) -> Self {
        self.batches = false;
        self
    }

    /// A step may begin before the one before it is collected; only greedy tokens can be drawn then.
    #[must_use]
    pub fn overlaps(mut self) -> Self {
        self.overlaps = true;
        self
    }

    /// After a panic the engine says that it must be rebuilt.
    #[must_use]
    pub fn dies_of_panics(mut self) -> Self {
        self.survives_panics = false;
        self
    }

    /// Sequences cannot be cut back: each can be forked at its own length alone.
    #[must_use]
    pub fn keeps_whole_states(mut self) -> Self {
        self.trims = false;
        self
    }

    /// Each position that a token attends to moves the clock by so much as well.
    #[must_use]
    pub fn attends(mut self, position: Duration) -> Self {
        self.position_time = position;
        self
    }

    /// Steps wait for [`FakeControl::allow`].
    #[must_use]
    pub fn gated(mut self) -> Self {
        self.gated = true;
        self
    }
}

/// A model whose engine follows a [`Script`].
#[derive(Debug)]
pub struct FakeModel {
    id: String,
    script: Arc<Script>,
    text: Arc<TextModel>,
    control: FakeControl,
}

impl FakeModel {
    /// A model called `id`.
    pub fn new(id: &str, script: Script) -> Self {
        Self {
            id: id.into(),
            control: FakeControl::new(script.gated),
            script: Arc::new(script),
            text: Arc::new(TextModel::scripted()),
        }
    }

    /// The test's hand on the engine, through all its lives.
    pub fn control(&self) -> FakeControl {
        self.control.clone()
    }

    /// An engine without loading, for tests that drive one directly.
    pub fn engine(&self, epoch: Epoch) -> Box<dyn Engine> {
        let (script, text) = (Arc::clone(&self.script), Arc::clone(&self.text));
        Box::new(FakeEngine::new(script, text, self.control.clone(), epoch))
    }

    /// The text side.
    pub fn text(&self) -> Arc<TextModel> {
        Arc::clone(&self.text)
    }
}

impl ModelSource for FakeModel {
    fn id(&self) -> &str {
        &self.id
    }

    fn load(&self) -> Result<LoadedModel, LoadError> {
        match self.script.load_faults.get(&self.control.count_load()) {
            None => {}
            Some(LoadFault::Fail(message)) => return Err(LoadError::NotFound { message: message.clone() }),
            // PANIC: the script asks for it.
            Some(LoadFault::Panic(message)) => std::panic::panic_any(message.clone()),
        }
        let engine = FakePrepared {
            script: Arc::clone(&self.script),
            text: Arc::clone(&self.text),
            control: self.control.clone(),
        };
        let fingerprint = Some(format!("fake {}", self.id));
        Ok(LoadedModel { text: Arc::clone(&self.text), engine: Box::new(engine), fingerprint })
    }
}

struct FakePrepared {
    script: Arc<Script>,
    text: Arc<TextModel>,
    control: FakeControl,
}

impl PreparedEngine for FakePrepared {
    fn adopt(self: Box<Self>, epoch: Epoch) -> Result<Box<dyn Engine>, EngineError> {
        Ok(Box::new(FakeEngine::new(self.script, self.text, self.control, epoch)))
    }
}
