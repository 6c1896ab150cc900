//! Where recognisers ask for computation, and the loop that computes it.
//!
//! All recordings' asks meet here: decoder rows that are asked for meanwhile go into one step, windows
//! are encoded in order, in pieces that fit a turn. Both kinds get about the same time while both wait.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use crate::actors::scheduler::core::panic_message;
use crate::actors::turns::Lane;
use crate::model::speech::compute::{AskedRow, Compute, EngineCell, SpeechError, Window, decode_now};
use crate::model::speech::{SpeechEngine, SpeechOut};
use crate::observe::{Gauges, fields};
use crate::types::{Clock, EngineError};

/// Rows of one step at most.
const MOST_ROWS: usize = 64;

struct EncodeAsk {
    window: Window,
    reply: oneshot::Sender<Result<Window, SpeechError>>,
}

struct DecodeAsk {
    rows: Vec<AskedRow>,
    reply: oneshot::Sender<Result<Vec<SpeechOut>, SpeechError>>,
}

#[derive(Default)]
struct Asks {
    encodes: RefCell<VecDeque<EncodeAsk>>,
    decodes: RefCell<VecDeque<DecodeAsk>>,
    come: Notify,
    /// Seconds that either kind has used while both waited.
    encoded: Cell<f64>,
    decoded: Cell<f64>,
}

/// See the module. Clones share one queue; it stays on its thread.
#[derive(Clone)]
pub(super) struct Desk {
    cell: EngineCell,
    gauges: Arc<Gauges>,
    asks: Rc<Asks>,
}

impl Desk {
    /// Without an engine.
    pub(super) fn new(gauges: Arc<Gauges>) -> Self {
        Self { cell: EngineCell::default(), gauges, asks: Rc::default() }
    }

    /// Takes an engine in, or out.
    pub(super) fn replace(&self, engine: Option<Box<dyn SpeechEngine>>) -> Option<Box<dyn SpeechEngine>> {
        let bytes = |engine: &Option<Box<dyn SpeechEngine>>| {
            engine.as_ref().map_or(0, |engine| engine.weight_bytes())
        };
        let now = bytes(&engine);
        let before = self.cell.replace(engine);
        self.gauges.speech.weight_bytes.shift(bytes(&before), now);
        before
    }

    /// The engine's place.
    pub(super) fn engine(&self) -> &EngineCell {
        &self.cell
    }

    /// Computes what is asked for, for ever.
    pub(super) async fn serve(self, lane: Lane, clock: Arc<dyn Clock>) {
        loop {
            self.forget_the_gone();
            if self.is_idle() {
                self.asks.come.notified().await;
                continue;
            }
            let turn = lane.turn().await;
            let begun = clock.now();
            let budget = turn.budget;
            let encodes = self.encodes_next();
            let mut more = || budget.is_none_or(|budget| clock.now().saturating_sub(begun) < budget);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| match encodes {
                true => self.encode(&mut more),
                false => self.decode(),
            })) {
                self.lost("panicked", &panic_message(&*panic));
            }
            self.charge(encodes, clock.now().saturating_sub(begun));
            drop(turn);
        }
    }

    fn is_idle(&self) -> bool {
        self.asks.encodes.borrow().is_empty() && self.asks.decodes.borrow().is_empty()
    }

    /// Nobody waits for these any more.
    fn forget_the_gone(&self) {
        let (gone, kept): (VecDeque<_>, VecDeque<_>) =
            self.asks.encodes.take().into_iter().partition(|ask| ask.reply.is_closed());
        *self.asks.encodes.borrow_mut() = kept;
        let (gone_rows, kept): (VecDeque<_>, VecDeque<_>) =
            self.asks.decodes.take().into_iter().partition(|ask| ask.reply.is_closed());
        *self.asks.decodes.borrow_mut() = kept;
        // Dropped here, when nothing is borrowed: their windows and sequences go with them.
        drop((gone, gone_rows));
    }

    fn encodes_next(&self) -> bool {
        let (encodes, decodes) =
            (self.asks.encodes.borrow().is_empty(), self.asks.decodes.borrow().is_empty());
        match (encodes, decodes) {
            (true, _) => false,
            (_, true) => true,
            _ => self.asks.encoded.get() <= self.asks.decoded.get(),
        }
    }

    fn charge(&self, encoded: bool, took: Duration) {
        let used = if encoded { &self.asks.encoded } else { &self.asks.decoded };
        used.set(used.get() + took.as_secs_f64());
        if self.asks.encodes.borrow().is_empty() || self.asks.decodes.borrow().is_empty() {
            // Who comes later begins as the other does.
            self.asks.encoded.set(0.0);
            self.asks.decoded.set(0.0);
        }
    }

    /// Goes on with the first window.
    fn encode(&self, more: &mut dyn FnMut() -> bool) {
        let id = self.asks.encodes.borrow().front().map(|ask| ask.window.id);
        let Some(id) = id else { return };
        let done = match self.cell.with(|engine| engine.encode(id, more)) {
            Ok(false) => return,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        let ask = self.asks.encodes.borrow_mut().pop_front();
        let broken = done.as_ref().err().and_then(broken_device);
        if let Some(EncodeAsk { window, reply }) = ask {
            // Nobody waits any more: the window goes.
            let _gone = reply.send(done.map(|()| window));
        }
        self.lose(broken);
    }

    /// One step for all rows that are asked for.
    fn decode(&self) {
        let mut batch = Vec::new();
        let mut rows = Vec::new();
        while let Some(ask) = self.asks.decodes.borrow_mut().pop_front() {
            if !rows.is_empty() && rows.len() + ask.rows.len() > MOST_ROWS {
                self.asks.decodes.borrow_mut().push_front(ask);
                break;
            }
            batch.push((ask.rows.len(), ask.reply));
            rows.extend(ask.rows);
        }
        let computed = catch_unwind(AssertUnwindSafe(|| decode_now(&self.cell, &rows)));
        let computed = computed.unwrap_or_else(|panic| {
            let message = panic_message(&*panic);
            self.lost("panicked", &message);
            Err(SpeechError::Engine(EngineError::Panicked { message }))
        });
        match computed {
            Ok(outs) => {
                let mut outs = outs.into_iter();
                for (count, reply) in batch {
                    let _gone = reply.send(Ok(outs.by_ref().take(count).collect()));
                }
            }
            Err(error) => {
                for (_, reply) in batch {
                    let _gone = reply.send(Err(error.clone()));
                }
                self.lose(broken_device(&error));
            }
        }
    }

    fn lose(&self, broken: Option<String>) {
        if let Some(message) = broken {
            self.lost("failed", &message);
        }
    }

    /// After a panic, or a device's error: what the engine holds is not trusted any more. The next request
    /// loads it anew.
    fn lost(&self, how: &str, message: &str) {
        tracing::error!(target: fields::ENGINE, message, "the speech engine {how}; it is loaded anew");
        // Boxed state may be half written, but is only dropped.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(self.replace(None))));
        if dropped.is_err() {
            tracing::error!(target: fields::ENGINE, "the speech engine panicked again while it was dropped");
        }
        for ask in self.asks.encodes.take() {
            let _gone = ask.reply.send(Err(SpeechError::Unloaded));
        }
        for ask in self.asks.decodes.take() {
            let _gone = ask.reply.send(Err(SpeechError::Unloaded));
        }
    }
}

/// The device's words, where it was its error: all its arrays may be void.
fn broken_device(error: &SpeechError) -> Option<String> {
    match error {
        SpeechError::Engine(EngineError::Device { message }) => Some(message.clone()),
        _ => None,
    }
}

impl Compute for Desk {
    fn cell(&self) -> &EngineCell {
        &self.cell
    }

    async fn encode(&self, mel: Vec<f32>) -> Result<Window, SpeechError> {
        let window = self.cell.begin(mel)?;
        let (reply, done) = oneshot::channel();
        self.asks.encodes.borrow_mut().push_back(EncodeAsk { window, reply });
        self.asks.come.notify_one();
        done.await.unwrap_or(Err(SpeechError::Unloaded))
    }

    async fn decode(&self, rows: Vec<AskedRow>) -> Result<Vec<SpeechOut>, SpeechError> {
        let (reply, done) = oneshot::channel();
        self.asks.decodes.borrow_mut().push_back(DecodeAsk { rows, reply });
        self.asks.come.notify_one();
        done.await.unwrap_or(Err(SpeechError::Unloaded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::speech::{SpeechEngine, SpeechRow, WindowId};
    use crate::types::{Epoch, SequenceId};
    use futures_util::FutureExt;

    /// Fails at everything that is computed.
    struct Failing(EngineError);

    impl SpeechEngine for Failing {
        fn dims(&self) -> crate::model::speech::WhisperDims {
            unreachable!("nobody asks")
        }
        fn alignment_heads(&self) -> usize {
            0
        }
        fn begin(&mut self, _: Vec<f32>) -> Result<WindowId, EngineError> {
            Ok(WindowId(0))
        }
        fn encode(&mut self, _: WindowId, _: &mut dyn FnMut() -> bool) -> Result<bool, EngineError> {
            Err(self.0.clone())
        }
        fn forget(&mut self, _: WindowId) {}
        fn open(&mut self, _: Option<(SequenceId, u32)>) -> Result<SequenceId, EngineError> {
            Ok(SequenceId { epoch: Epoch::default(), number: 0 })
        }
        fn close(&mut self, _: SequenceId) {}
        fn decode(&mut self, _: &[SpeechRow<'_>]) -> Result<Vec<SpeechOut>, EngineError> {
            Err(self.0.clone())
        }
        fn weight_bytes(&self) -> u64 {
            0
        }
        fn state_bytes(&self) -> u64 {
            0
        }
        fn device(&self) -> String {
            String::new()
        }
    }

    /// What an ask gets, and whether the engine is there afterwards.
    fn after(error: &EngineError, encodes: bool) -> (SpeechError, bool) {
        let desk = Desk::new(Arc::default());
        desk.engine().replace(Some(Box::new(Failing(error.clone()))));
        let failure = if encodes {
            let mut asked = std::pin::pin!(Compute::encode(&desk, Vec::new()));
            assert!(asked.as_mut().now_or_never().is_none());
            Desk::encode(&desk, &mut || true);
            asked.now_or_never().unwrap().err()
        } else {
            let mut asked = std::pin::pin!(Compute::decode(&desk, Vec::new()));
            assert!(asked.as_mut().now_or_never().is_none());
            Desk::decode(&desk);
            asked.now_or_never().unwrap().err()
        };
        (failure.unwrap(), desk.engine().is_loaded())
    }

    #[test]
    fn a_broken_device_takes_its_engine_along_and_a_wrong_plan_does_not() {
        let device = EngineError::Device { message: "lost".into() };
        let plan = EngineError::InvalidPlan { message: "wrong".into() };
        for encodes in [true, false] {
            for (error, stays) in [(&device, false), (&plan, true)] {
                assert_eq!(after(error, encodes), (SpeechError::Engine(error.clone()), stays), "{encodes}");
            }
        }
    }
}
