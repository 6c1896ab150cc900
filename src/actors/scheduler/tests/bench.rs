//! A core, an engine and clients in a test's hands.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;

use crate::actors::messages::Admit;
use crate::actors::scheduler::core::{Core, Progress, Settings};
use crate::actors::scheduler::fill::Fill;
use crate::actors::stream::channel;
use crate::cache::PrefixTree;
use crate::config::Config;
use crate::model::fake::{FakeModel, Script};
use crate::observe::Gauges;
use crate::types::{
    ChatEvent, ClientId, Clock, Epoch, FinishReason, LiveCount, ManualClock, PreparedPrompt, Priority,
    Refusal, RequestId, SamplingParams, StopRules, Terms, TicketOffice, TokenId, Usage,
};

pub(super) struct Client {
    pub(super) rx: Option<Receiver<ChatEvent>>,
    pub(super) text: String,
    pub(super) ends: Vec<ChatEvent>,
}

impl Client {
    /// Takes everything that is there.
    pub(super) fn read(&mut self) {
        let Some(rx) = &mut self.rx else { return };
        loop {
            match rx.try_recv() {
                Ok(ChatEvent::Text(text)) => {
                    assert!(!text.is_empty(), "no empty pieces");
                    assert!(self.ends.is_empty(), "text after the end");
                    self.text.push_str(&text);
                }
                Ok(end) => self.ends.push(end),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
            }
        }
    }

    pub(super) fn done(&self) -> Option<(FinishReason, Usage)> {
        match self.ends.as_slice() {
            [ChatEvent::Done { finish, usage, .. }] => Some((*finish, *usage)),
            _ => None,
        }
    }
}

/// What a test asks for.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) prompt: String,
    pub(super) max_new: u32,
    pub(super) stop: Vec<String>,
    pub(super) slots: usize,
    pub(super) terms: Terms,
    pub(super) salt: Option<String>,
    pub(super) stable: u32,
}

impl Ask {
    pub(super) fn of(mut self, client: &str, priority: Priority) -> Self {
        self.terms = Terms { client: ClientId(client.into()), priority, ..self.terms };
        self
    }

    pub(super) fn new(prompt: &str, max_new: u32) -> Self {
        let (terms, stop) = (Terms::default(), Vec::new());
        Self { prompt: prompt.into(), max_new, stop, slots: 64, terms, salt: None, stable: 0 }
    }
}

pub(super) struct Bench {
    pub(super) core: Core,
    pub(super) model: FakeModel,
    pub(super) clock: Arc<ManualClock>,
    pub(super) gauges: Arc<Gauges>,
    pub(super) live: LiveCount,
    pub(super) clients: Vec<Client>,
    /// What the next request brings.
    pub(super) next_fill: Option<Box<dyn Fill>>,
    office: TicketOffice,
}

impl Bench {
    pub(super) fn new(script: Script, change: impl FnOnce(&mut Config)) -> Self {
        Self::timed(script, Arc::new(ManualClock::new()), change)
    }

    /// With a clock that the script moves.
    pub(super) fn timed(script: Script, clock: Arc<ManualClock>, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::default();
        change(&mut config);
        let gauges = Arc::new(Gauges::default());
        let shared: Arc<dyn Clock> = clock.clone();
        let settings = Settings::new("fake", &config, &shared, &gauges);
        let model = FakeModel::new("fake", script);
        let mut core = Core::new(settings, Rc::new(RefCell::new(PrefixTree::new(config.cache.enabled))));
        core.attach(model.engine(Epoch(0)), model.text());
        let live = LiveCount::default();
        let office = TicketOffice::new(10_000, live.clone());
        Self { core, model, clock, gauges, live, clients: Vec::new(), next_fill: None, office }
    }

    /// Number of the new client, which must be accepted.
    pub(super) fn submit(&mut self, ask: &Ask) -> usize {
        self.try_submit(ask).unwrap()
    }

    pub(super) fn try_submit(&mut self, ask: &Ask) -> Result<usize, Refusal> {
        let (events, rx) = channel(ask.slots);
        let number = self.clients.len();
        let ticket = self.office.try_take(RequestId(number as u128), self.clock.now()).unwrap();
        let prompt = PreparedPrompt {
            tokens: ask.prompt.bytes().map(|byte| TokenId(u32::from(byte))).collect(),
            sampling: Arc::new(SamplingParams::greedy()),
            stop: StopRules { strings: ask.stop.clone(), tokens: vec![TokenId(257)] },
            max_new_tokens: ask.max_new,
            scores: None,
            read: None,
            stable: ask.stable,
            breakpoints: Vec::new(),
            stripped: 0,
            session: None,
            salt: ask.salt.clone(),
        };
        let fill = self.next_fill.take();
        self.core.enqueue(Admit { ticket, terms: ask.terms.clone(), prompt, fill, events })?;
        self.clients.push(Client { rx: Some(rx), text: String::new(), ends: Vec::new() });
        Ok(number)
    }

    /// One step, with a new engine if the old one broke.
    pub(super) fn step(&mut self) -> Progress {
        let progress = self.core.step(None);
        if let Progress::Broken(_) = progress {
            let _whose = self.core.lose_engine();
            self.core.attach(self.model.engine(self.core.epoch), self.model.text());
        }
        self.check();
        progress
    }

    /// Steps until nothing is left; every client that is there reads.
    pub(super) fn finish(&mut self) {
        for _ in 0..20_000 {
            self.clients.iter_mut().for_each(Client::read);
            if self.step() == Progress::Idle {
                self.clients.iter_mut().for_each(Client::read);
                return;
            }
        }
        panic!(
            "rows are still there: {} waiting, {} running",
            self.core.waiting.len(),
            self.core.running.len()
        );
    }

    /// What must hold between any two steps.
    pub(super) fn check(&self) {
        let core = &self.core;
        let mut orders: Vec<u64> = core.waiting.iter().map(|row| row.order).collect();
        assert!(orders.is_sorted(), "the queue is in order of arrival");
        assert!(core.waiting.iter().all(|row| row.sequence.is_some() || row.computed == 0));
        assert!(core.running.iter().all(|row| row.sequence.is_some() && row.owed() > 0));
        assert!(core.ending.iter().all(|row| row.sequence.is_none() && row.is_parked()));
        assert!(core.running.len() <= core.settings.max_rows);
        orders.extend(core.running.iter().chain(&core.ending).map(|row| row.order));
        let rows = orders.len();
        orders.sort_unstable();
        orders.dedup();
        assert_eq!(orders.len(), rows, "every row is in one list");
        assert_eq!(self.live.get(), rows, "a ticket for every row");
        let memory = core.engine.as_ref().unwrap().memory();
        assert!(memory.kv_used_bytes <= memory.kv_capacity_bytes);
        assert_eq!(self.gauges.kv_used_bytes.get(), memory.kv_used_bytes);
    }

    /// After everything has ended: nothing is held but the kept rows, and those can go.
    pub(super) fn check_empty(&mut self) {
        assert!(self.core.is_empty());
        assert_eq!(self.live.get(), 0);
        for level in [&self.gauges.rows_running, &self.gauges.rows_waiting, &self.gauges.rows_parked] {
            assert_eq!(level.get(), 0);
        }
        self.core.tree.borrow_mut().release_all();
        assert_eq!(self.core.step(None), Progress::Idle);
        assert_eq!(self.core.engine.as_ref().unwrap().memory().kv_used_bytes, 0);
        assert_eq!(self.gauges.cache_entries.get(), 0);
    }
}

/// What a request is answered with when nobody else is there and memory is plenty.
pub(super) fn alone(ask: &Ask) -> (String, FinishReason, u32) {
    let mut bench = Bench::new(Script::new(), |config| config.cache.enabled = false);
    bench.submit(&Ask { slots: 64, ..ask.clone() });
    bench.finish();
    let (finish, usage) = bench.clients[0].done().expect("a lone request is finished");
    assert_eq!(usage.cached_tokens, 0);
    (bench.clients[0].text.clone(), finish, usage.completion_tokens)
}

/// So that a pause in the policy's time is a pause in the clock's.
pub(super) fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}
