//! `PromptCache`: the voice of prompt reuse, and the head of its tier on disk. On the compute thread.
//!
//! The tree itself is plain data that each model's scheduler shares, because matching, opening and
//! keeping must be single acts inside a step; so is the index of what is on disk. Here they are
//! asked about and cleared; what is kept is written behind, one segment at a time: the scheduler
//! copies it out, the folder's thread writes it, and only then is it known to be there.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use actix::WeakAddr;
use actix::prelude::*;
use tokio::sync::oneshot;

use crate::actors::messages::{
    CacheReport, CacheStatistics, ClearCache, CloseReleased, ExportSegment, FlushDisk, OrderDisk, Reset,
    SegmentRead, SsdAnswer, SsdEvent,
};
use crate::actors::scheduler::BatchScheduler;
use crate::actors::scheduler::core::SharedTree;
use crate::actors::scheduler::disk::{DiskOrder, ReadId, SharedSegments, name_on_disk};
use crate::actors::ssd_writer::{SsdJob, SsdSettings, SsdWriter};
use crate::cache::ssd::{ScanReport, SegmentHead, SegmentId, SegmentIndex};
use crate::cache::{Namespace, TokenHistory};
use crate::observe::{Gauges, fields};
use crate::types::{Clock, TokenId};

/// Fewer new tokens are not worth a file.
const LEAST_WRITE_TOKENS: u32 = 16;
/// Most tokens of a segment: what is read and given up at once.
const SEGMENT_TOKENS: u32 = 512;
/// Prefixes that wait to be written; beyond it the oldest is given up.
const MOST_PENDING: usize = 256;

/// One model's part.
pub(crate) struct CacheOf {
    pub(crate) tree: SharedTree,
    /// Who has the engine.
    pub(crate) scheduler: WeakAddr<BatchScheduler>,
    /// What its state is called on disk.
    pub(crate) namespace: Option<Arc<str>>,
}

/// A prefix that is to be on disk.
#[derive(Clone)]
struct Pending {
    model: usize,
    namespace: Namespace,
    tokens: Arc<[TokenId]>,
}

/// A segment on its way to the disk.
struct Writing {
    of: Pending,
    head: SegmentHead,
}

/// The tier on disk.
pub(crate) struct Ssd {
    pub(crate) settings: SsdSettings,
    pub(crate) segments: SharedSegments,
    pub(crate) writer: SsdWriter,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) clock: Arc<dyn Clock>,
    pending: VecDeque<Pending>,
    writing: Option<Writing>,
    /// The disk took a write badly: nothing is written any more.
    is_read_only: bool,
    /// Who waits for all to be written.
    flushing: Vec<oneshot::Sender<()>>,
    said_bytes: u64,
}

impl Ssd {
    pub(crate) fn new(
        settings: SsdSettings,
        segments: SharedSegments,
        writer: SsdWriter,
        gauges: Arc<Gauges>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            settings,
            segments,
            writer,
            gauges,
            clock,
            pending: VecDeque::new(),
            writing: None,
            is_read_only: false,
            flushing: Vec::new(),
            said_bytes: 0,
        }
    }

    fn opened(&mut self, heads: Vec<SegmentHead>, report: &ScanReport) {
        let dir = self.settings.dir.display();
        for (file, reason) in &report.bad {
            tracing::warn!(target: fields::CACHE, %dir, file, reason, "a file of the prompt cache was removed");
        }
        if report.is_open_to_others {
            tracing::warn!(
                target: fields::CACHE, %dir,
                "others may look into the prompt cache's folder: it holds what was said; chmod 700 closes it"
            );
        }
        let mut index = SegmentIndex::new(self.settings.budget_bytes);
        let count = heads.len();
        let gone = index.restore(heads);
        tracing::info!(
            target: fields::CACHE, %dir, segments = count, bytes = index.bytes(), unfinished = report.unfinished,
            "the prompt cache's folder is open"
        );
        *self.segments.borrow_mut() = Some(index);
        self.remove(gone);
    }

    /// Removes files, and says how many bytes are left.
    fn remove(&mut self, gone: Vec<SegmentId>) {
        for id in gone {
            self.writer.order(SsdJob::Remove { id });
        }
        let bytes = self.segments.borrow().as_ref().map_or(0, SegmentIndex::bytes);
        self.gauges.ssd_bytes.shift(self.said_bytes, bytes);
        self.said_bytes = bytes;
    }

    fn add(&mut self, pending: Pending) {
        if self.is_read_only {
            return;
        }
        // What it goes on from is part of it.
        self.pending.retain(|other| {
            let is_part = other.model == pending.model
                && other.namespace == pending.namespace
                && pending.tokens.starts_with(&other.tokens);
            !is_part
        });
        self.pending.push_back(pending);
        if self.pending.len() > MOST_PENDING {
            self.pending.pop_front();
            self.gauges.ssd_dropped.up();
        }
    }

    /// The next segment of what is pending, if there is one and nothing else is under way.
    fn next(&mut self, models: &[CacheOf]) -> Option<ExportSegment> {
        while self.writing.is_none()
            && let Some(of) = self.pending.pop_front()
        {
            let Some((head, range)) = self.plan(&of, models) else { continue };
            let Pending { namespace, tokens, .. } = of.clone();
            self.writing = Some(Writing { of, head });
            return Some(ExportSegment { namespace, tokens, range });
        }
        None
    }

    /// What the disk lacks of a prefix, a segment at most.
    fn plan(&self, of: &Pending, models: &[CacheOf]) -> Option<(SegmentHead, Range<u32>)> {
        let base = models.get(of.model)?.namespace.as_deref()?;
        let namespace = name_on_disk(base, &of.namespace);
        let segments = self.segments.borrow();
        let chain = segments.as_ref()?.longest(&namespace, &of.tokens);
        let (start, parent) =
            chain.map_or((0, None), |chain| (chain.covered, chain.links.last().map(|link| link.id)));
        let end = u32::try_from(of.tokens.len()).ok()?;
        if end < start + LEAST_WRITE_TOKENS {
            return None;
        }
        let range = start..end.min(start + SEGMENT_TOKENS);
        let head = SegmentHead {
            id: SegmentId(new_id()?),
            namespace,
            parent,
            start,
            tokens: of.tokens.get(range.start as usize..range.end as usize)?.to_vec(),
            created: self
                .clock
                .wall()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            bytes: 0,
        };
        Some((head, range))
    }

    fn exported(&mut self, pieces: Option<Vec<Vec<u8>>>) {
        let Some(writing) = &self.writing else { return };
        let ordered = match pieces {
            Some(pieces) => self.writer.order(SsdJob::Write { head: writing.head.clone(), pieces }),
            None => false,
        };
        if !ordered {
            self.gauges.ssd_dropped.up();
            self.writing = None;
        }
    }

    fn written(&mut self, head: SegmentHead) {
        self.gauges.ssd_written_bytes.add(head.bytes);
        let gone = self.segments.borrow_mut().as_mut().map(|index| index.insert(head)).unwrap_or_default();
        self.remove(gone);
        // There may be more of it.
        if let Some(writing) = self.writing.take() {
            self.pending.push_front(writing.of);
        }
    }

    fn not_written(&mut self, message: &str) {
        tracing::warn!(
            target: fields::CACHE, dir = %self.settings.dir.display(), message,
            "the prompt cache cannot be written any more; what is there is still read"
        );
        self.is_read_only = true;
        self.gauges.ssd_dropped.add(1 + self.pending.len() as u64);
        self.pending.clear();
        self.writing = None;
    }

    /// Orders a read; false where it cannot be had.
    fn read(&mut self, model: usize, read: ReadId, segment: SegmentId, upto: u32) -> bool {
        let mut segments = self.segments.borrow_mut();
        let Some(index) = segments.as_mut() else { return false };
        let Some(head) = index.head(segment).cloned() else { return false };
        index.pin(segment);
        self.writer.order(SsdJob::Read { model, read, head, upto })
    }

    /// A read is over. A file that is no good goes.
    fn was_read(&mut self, id: SegmentId, is_bad: bool, message: Option<String>) {
        let mut gone = Vec::new();
        if let Some(index) = self.segments.borrow_mut().as_mut() {
            index.unpin(id);
            if is_bad {
                gone = index.remove(id);
            }
        }
        if let Some(reason) = message {
            let dir = self.settings.dir.display();
            tracing::warn!(target: fields::CACHE, %dir, segment = %id, reason, "state on disk could not be read");
            self.gauges.ssd_bad.add(u64::from(is_bad));
        }
        self.remove(gone);
    }

    fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.writing.is_none()
    }
}

impl Drop for Ssd {
    fn drop(&mut self) {
        self.gauges.ssd_bytes.shift(self.said_bytes, 0);
    }
}

/// A name that no segment has had; `None` where the system gives no random numbers.
fn new_id() -> Option<u64> {
    getrandom::u64().ok()
}

/// See the module.
pub(crate) struct PromptCache {
    pub(crate) models: Vec<CacheOf>,
    pub(crate) ssd: Option<Ssd>,
    pub(crate) history: Arc<TokenHistory>,
}

impl PromptCache {
    fn report(&self) -> CacheReport {
        let mut report = CacheReport { kind: self.kind().into(), ..CacheReport::default() };
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
        if let Some(ssd) = &self.ssd
            && let Some(index) = ssd.segments.borrow().as_ref()
        {
            report.ssd_segments = index.len() as u64;
            report.ssd_bytes = index.bytes();
            report.ssd_budget_bytes = index.budget();
        }
        report
    }

    fn kind(&self) -> &'static str {
        match &self.ssd {
            None => "prefixes in memory; nothing on disk",
            Some(ssd) if ssd.segments.borrow().is_none() => {
                "prefixes in memory; the folder on disk is not open"
            }
            Some(ssd) if ssd.is_read_only => "prefixes in memory and on disk; nothing more is written there",
            Some(_) => "prefixes in memory and on disk",
        }
    }

    /// Goes on with writing, and tells those who wait for the end of it.
    fn go_on(&mut self) {
        let Some(ssd) = self.ssd.as_mut() else { return };
        while let Some(export) = ssd.next(&self.models) {
            let model = ssd.writing.as_ref().and_then(|writing| self.models.get(writing.of.model));
            match model.and_then(|model| model.scheduler.upgrade()) {
                // BOUND: one at a time.
                Some(scheduler) => scheduler.do_send(export),
                None => ssd.exported(None),
            }
        }
        if ssd.is_idle() {
            for done in ssd.flushing.drain(..) {
                let _gone = done.send(());
            }
        }
    }

    fn answer_read(&self, model: usize, answer: SegmentRead) {
        if let Some(scheduler) = self.models.get(model).and_then(|model| model.scheduler.upgrade()) {
            // BOUND: one a segment that was asked for.
            scheduler.do_send(answer);
        }
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

    /// The scheduler emptied the tree when the engine was lost; what its bytes are called is known
    /// from the new one.
    fn handle(&mut self, reset: Reset, _: &mut Self::Context) {
        if let Some(model) = self.models.get_mut(reset.model) {
            model.namespace = reset.namespace;
        }
        self.go_on();
    }
}

impl Handler<OrderDisk> for PromptCache {
    type Result = ();

    fn handle(&mut self, message: OrderDisk, _: &mut Self::Context) {
        let OrderDisk { model, order } = message;
        let Some(ssd) = self.ssd.as_mut() else { return };
        match order {
            DiskOrder::Kept { namespace, tokens } => ssd.add(Pending { model, namespace, tokens }),
            DiskOrder::Exported { pieces } => ssd.exported(pieces),
            DiskOrder::Read { read, segment, upto } => {
                if !ssd.read(model, read, segment, upto) {
                    self.answer_read(model, SegmentRead { read, pieces: None });
                }
                return;
            }
        }
        self.go_on();
    }
}

impl Handler<SsdAnswer> for PromptCache {
    type Result = ();

    fn handle(&mut self, SsdAnswer(event): SsdAnswer, _: &mut Self::Context) {
        let Some(ssd) = self.ssd.as_mut() else { return };
        match event {
            SsdEvent::Opened(Ok((heads, report))) => ssd.opened(heads, &report),
            SsdEvent::Opened(Err(message)) => {
                tracing::warn!(target: fields::CACHE, message, "the prompt cache keeps nothing on disk");
                ssd.is_read_only = true;
                ssd.pending.clear();
            }
            SsdEvent::Written { head } => ssd.written(head),
            SsdEvent::NotWritten { message } => ssd.not_written(&message),
            SsdEvent::Read { model, read, id, pieces, message, is_bad } => {
                ssd.was_read(id, is_bad, message);
                let bytes = pieces.iter().flat_map(|read| &read.pieces).map(|piece| piece.len() as u64).sum();
                ssd.gauges.ssd_read_bytes.add(bytes);
                self.answer_read(model, SegmentRead { read, pieces });
            }
            SsdEvent::Removed { message: None } => {}
            SsdEvent::Removed { message: Some(message) } => {
                tracing::warn!(target: fields::CACHE, message, "a file of the prompt cache could not be removed");
            }
        }
        self.go_on();
    }
}

impl Handler<FlushDisk> for PromptCache {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: FlushDisk, _: &mut Self::Context) -> Self::Result {
        let (done, wait) = oneshot::channel();
        if let Some(ssd) = self.ssd.as_mut().filter(|ssd| !ssd.is_idle()) {
            ssd.flushing.push(done);
        }
        // Whoever is not told because all is gone has nothing left to wait for.
        Box::pin(async move { drop(wait.await) })
    }
}
