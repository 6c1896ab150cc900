//! `PromptCache`: the voice of prompt reuse. On the compute thread.
//!
//! The tree itself is plain data that each model's scheduler shares, because matching,
//! opening and keeping must be single acts inside a step. Here it is asked about and
//! cleared. Whole finished rows in memory; nothing on disk, no shared inner prefixes
//! kept apart, no sessions yet: [`CacheReport::kind`] says so to whoever asks.

use actix::WeakRecipient;
use actix::prelude::*;

use crate::actors::messages::{CacheReport, CacheStatistics, ClearCache, CloseReleased, Reset};
use crate::actors::scheduler::core::SharedTree;

const KIND: &str =
    "whole finished rows in memory, matched by their longest common beginning; nothing on disk";

/// One model's part.
pub(crate) struct CacheOf {
    pub(crate) tree: SharedTree,
    /// Who closes what is given up.
    pub(crate) scheduler: WeakRecipient<CloseReleased>,
}

/// See the module.
pub(crate) struct PromptCache {
    pub(crate) models: Vec<CacheOf>,
}

impl PromptCache {
    fn report(&self) -> CacheReport {
        let mut report = CacheReport { kind: KIND.into(), ..CacheReport::default() };
        for model in &self.models {
            let tree = model.tree.borrow();
            let numbers = tree.statistics();
            report.enabled |= tree.is_enabled();
            report.entries += numbers.entries;
            report.tokens += numbers.tokens;
            report.hits += numbers.hits;
            report.misses += numbers.misses;
            report.hit_tokens += numbers.hit_tokens;
            report.evicted += numbers.evicted;
        }
        report
    }
}

impl Actor for PromptCache {
    type Context = Context<Self>;
}

impl Handler<CacheStatistics> for PromptCache {
    type Result = CacheReport;

    fn handle(&mut self, _: CacheStatistics, _: &mut Self::Context) -> Self::Result {
        self.report()
    }
}

impl Handler<ClearCache> for PromptCache {
    type Result = CacheReport;

    fn handle(&mut self, _: ClearCache, _: &mut Self::Context) -> Self::Result {
        for model in &self.models {
            model.tree.borrow_mut().release_all();
            if let Some(scheduler) = model.scheduler.upgrade() {
                // BOUND: one an order to clear.
                scheduler.do_send(CloseReleased);
            }
        }
        self.report()
    }
}

impl Handler<Reset> for PromptCache {
    type Result = ();

    /// The scheduler emptied the tree when the engine was lost.
    fn handle(&mut self, _: Reset, _: &mut Self::Context) {}
}
