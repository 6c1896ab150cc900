//! An engine that costs nothing: it keeps no tokens and draws the same letter for everybody. It can be told to take its time,
//! asleep: then each token goes out by itself, as with a real engine, while a free-running one fills every channel.
//!
//! Unlike the scripted engine of the tests it looks at no prompt, so its time does not grow with a sequence.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use greenroom::model::text::TextModel;
use greenroom::model::{
    Engine, EngineInfo, EngineMemory, KvNumbers, LoadedModel, ModelSource, PreparedEngine, RowOutcome,
    StepHandle, StepOutcome, StepPlan, Want,
};
use greenroom::types::{EngineError, Epoch, LoadError, SequenceId, TokenId};

/// Most tokens of prompt and answer together: the scripted text model's.
pub const CONTEXT: u32 = 4096;
/// Key-value memory that is never short: bytes.
const KV_BYTES: u64 = 1 << 40;
/// What is drawn: a letter, by the scripted text model's ids.
const LETTER: TokenId = TokenId(b'a' as u32);

/// How long a step takes; shared by a model, its engine and whoever measures.
#[derive(Clone, Default)]
pub struct StepTime(Arc<AtomicU64>);

impl StepTime {
    /// From the next step on.
    pub fn set(&self, time: Duration) {
        self.0.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn wait(&self) {
        let time = self.0.load(Ordering::Relaxed);
        if time > 0 {
            std::thread::sleep(Duration::from_nanos(time));
        }
    }
}

/// A model that is always there.
#[derive(Default)]
pub struct InstantModel {
    /// Zero at first.
    pub step_time: StepTime,
}

impl ModelSource for InstantModel {
    fn id(&self) -> &str {
        "instant"
    }

    fn load(&self) -> Result<LoadedModel, LoadError> {
        Ok(LoadedModel {
            text: Arc::new(TextModel::scripted()),
            engine: Box::new(Prepared(self.step_time.clone())),
            fingerprint: None,
        })
    }
}

struct Prepared(StepTime);

impl PreparedEngine for Prepared {
    fn adopt(self: Box<Self>, epoch: Epoch) -> Result<Box<dyn Engine>, EngineError> {
        let info = EngineInfo {
            epoch,
            vocab: TextModel::scripted().tokenizer.vocab_size(),
            context: CONTEXT,
            kv_bytes_per_token: 1,
            kv_block_tokens: 16,
            numerics_id: "instant".into(),
            device: "none".into(),
            batches: true,
            pipelined: false,
            kv_format: "none".into(),
            kv_numbers: KvNumbers::Opaque,
            survives_panics: true,
            shares_prefixes: true,
            trims: true,
        };
        Ok(Box::new(InstantEngine { info, step_time: self.0, sequences: 0, pending: StepOutcome::default() }))
    }
}

struct InstantEngine {
    info: EngineInfo,
    step_time: StepTime,
    /// Numbers given so far.
    sequences: u64,
    pending: StepOutcome,
}

impl Engine for InstantEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn memory(&self) -> EngineMemory {
        EngineMemory { weight_bytes: 0, kv_capacity_bytes: KV_BYTES, kv_used_bytes: 0 }
    }

    fn open(&mut self, _: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
        self.sequences += 1;
        Ok(SequenceId { epoch: self.info.epoch, number: self.sequences })
    }

    fn reserve(&mut self, _: SequenceId, _: u32) -> Result<(), EngineError> {
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, _: u32) -> Result<(), EngineError> {
        Ok(())
    }

    fn close(&mut self, _: SequenceId) {}

    fn export(&mut self, _: SequenceId, _: Range<u32>) -> Result<Vec<u8>, EngineError> {
        Ok(Vec::new())
    }

    fn import(&mut self, _: SequenceId, _: Range<u32>, _: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }

    fn submit(&mut self, plan: &StepPlan<'_>) -> Result<StepHandle, EngineError> {
        let outcome = |want: &Want<'_>| match want {
            Want::Sample(_) => RowOutcome::Sampled { token: LETTER, scores: None },
            _ => RowOutcome::Advanced,
        };
        self.pending.rows = plan.rows.iter().map(|row| outcome(&row.want)).collect();
        Ok(StepHandle(0))
    }

    fn collect(&mut self, _: StepHandle) -> Result<StepOutcome, EngineError> {
        self.step_time.wait();
        Ok(std::mem::take(&mut self.pending))
    }
}
