//! `PromptCache`: the voice of prompt reuse, and the head of its tier on disk. On the compute thread.
//!
//! The tree itself is plain data that each model's scheduler shares, because matching, opening and
//! keeping must be single acts inside a step; so is the index of what is on disk. Here they are
//! asked about and cleared; what is kept is written behind, one segment at a time: the scheduler
//! copies it out, the folder's thread writes it, and only then is it known to be there.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use actix::WeakAddr;
use actix::prelude::*;
use tokio::sync::oneshot;

use crate::actors::messages::{
    CacheReport, CacheStatistics, ChangeSession, ClearCache, CloseReleased, ExportSegment, FlushDisk,
    ListSessions, OrderDisk, Reset, SegmentRead, SessionChange, SessionReport, SsdAnswer, SsdEvent,
};
use crate::actors::scheduler::BatchScheduler;
use crate::actors::scheduler::core::{SharedSessions, SharedTree};
use crate::actors::scheduler::disk::{DiskOrder, ReadId, Segments, SharedSegments, name_on_disk};
use crate::actors::scheduler::reuse::tell_tree;
use crate::actors::ssd_writer::{SsdJob, SsdSettings, SsdWriter};
use crate::cache::ssd::{Codec, ScanReport, SegmentHead, SegmentId, SegmentIndex};
use crate::cache::{Namespace, Session, SessionKey, TokenHistory};
use crate::observe::{Gauges, fields};
use crate::types::{Clock, TokenId};

/// How often idle conversations are looked for.
const EXPIRY: Duration = Duration::from_secs(60);
/// Fewer new tokens are not worth a file.
const LEAST_WRITE_TOKENS: u32 = 16;
/// Most tokens of a segment: what is read and given up at once.
const SEGMENT_TOKENS: u32 = 512;
/// Conversations of earlier lives whose ids are remembered.
const MOST_REMEMBERED: usize = 200;
/// Prefixes that wait to be written; beyond it the oldest is given up.
const MOST_PENDING: usize = 256;

/// One model's part.
pub(crate) struct CacheOf {
    /// The model's id.
    pub(crate) name: String,
    pub(crate) tree: SharedTree,
    pub(crate) sessions: SharedSessions,
    /// Who has the engine.
    pub(crate) scheduler: WeakAddr<BatchScheduler>,
    /// What its state is called on disk.
    pub(crate) namespace: Option<Arc<str>>,
    /// What its tokenizer is called, until earlier lives' answers are remembered.
    pub(crate) forgetful: Option<String>,
    /// How its state is written.
    pub(crate) codec: Codec,
}

impl CacheOf {
    /// Has the sequences of what was given up closed.
    fn close_released(&self) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            // BOUND: one an order from outside.
            scheduler.do_send(CloseReleased);
        }
    }

    fn pin(&self, key: &SessionKey, is_on: bool) -> bool {
        let changes = self.sessions.borrow_mut().pin(key, is_on);
        changes.map(|changes| tell_tree(&mut self.tree.borrow_mut(), changes)).is_some()
    }
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
    /// It is to be forgotten before it is there.
    is_void: bool,
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
        for (file, reason) in &report.unread {
            tracing::warn!(target: fields::CACHE, %dir, file, reason, "a file of the prompt cache is left as it is");
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
        *self.segments.borrow_mut() = Segments::Open(index);
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
        // What the disk lacks is known once the folder is open.
        self.segments.borrow().as_ref()?;
        while self.writing.is_none()
            && let Some(of) = self.pending.pop_front()
        {
            let Some((head, range)) = self.plan(&of, models) else { continue };
            let Pending { namespace, tokens, .. } = of.clone();
            self.writing = Some(Writing { of, head, is_void: false });
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

    fn exported(&mut self, pieces: Option<Vec<Vec<u8>>>, codec: Codec) {
        let Some(writing) = &self.writing else { return };
        let ordered = match pieces {
            Some(pieces) if !writing.is_void => {
                self.writer.order(SsdJob::Write { head: writing.head.clone(), pieces, codec })
            }
            _ => false,
        };
        if !ordered {
            self.gauges.ssd_dropped.up();
            self.writing = None;
        }
    }

    fn written(&mut self, head: SegmentHead) {
        self.gauges.ssd_written_bytes.add(head.bytes);
        if self.writing.take_if(|writing| writing.is_void).is_some() {
            return self.remove(vec![head.id]);
        }
        let id = head.id;
        let gone = self.segments.borrow_mut().as_mut().map(|index| index.insert(head)).unwrap_or_default();
        let found_no_room = gone.contains(&id);
        self.remove(gone);
        // There may be more of it, but none that finds room where this did not.
        if let Some(writing) = self.writing.take().filter(|_| !found_no_room) {
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
    fn read(&mut self, model: usize, read: ReadId, segment: SegmentId, upto: u32, codec: Codec) -> bool {
        let mut segments = self.segments.borrow_mut();
        let Some(index) = segments.as_mut() else { return false };
        let Some(head) = index.head(segment).cloned() else { return false };
        index.pin(segment);
        self.writer.order(SsdJob::Read { model, read, head, upto, codec })
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

    /// Forgets all that is there, and what is about to be.
    fn clear(&mut self) {
        self.pending.clear();
        self.writing.iter_mut().for_each(|writing| writing.is_void = true);
        let mut gone = Vec::new();
        if let Some(index) = self.segments.borrow_mut().as_mut() {
            let all: Vec<SegmentId> = index.heads().map(|head| head.id).collect();
            gone = all.into_iter().flat_map(|id| index.remove(id)).collect();
        }
        self.remove(gone);
    }

    /// Forgets a path as far as nothing else builds on it.
    fn drop_path(&mut self, base: &str, namespace: &Namespace, tokens: &[TokenId]) {
        self.pending
            .retain(|pending| pending.namespace != *namespace || !tokens.starts_with(&pending.tokens));
        let is_part = |writing: &&mut Writing| {
            writing.of.namespace == *namespace && tokens.starts_with(&writing.of.tokens)
        };
        self.writing.iter_mut().filter(is_part).for_each(|writing| writing.is_void = true);
        let name = name_on_disk(base, namespace);
        let gone = self.segments.borrow_mut().as_mut().map(|index| index.remove_path(&name, tokens));
        self.remove(gone.unwrap_or_default());
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
    pub(crate) clock: Arc<dyn Clock>,
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
            Some(ssd) if ssd.segments.borrow().as_ref().is_none() => {
                "prefixes in memory; the folder on disk is not open"
            }
            Some(ssd) if ssd.is_read_only => "prefixes in memory and on disk; nothing more is written there",
            Some(_) if self.models.iter().any(|model| model.codec != Codec::Stored) => {
                "prefixes in memory and, rounded to 8 bits, on disk: answers may differ from those computed anew"
            }
            Some(_) => "prefixes in memory and on disk",
        }
    }

    /// Remembers what answers of earlier lives were made of, once both folder and model are there.
    fn remember(&mut self) {
        let Some(ssd) = &self.ssd else { return };
        let segments = ssd.segments.borrow();
        let Some(index) = segments.as_ref() else { return };
        for model in &mut self.models {
            let Some(namespace) = model.namespace.as_deref() else { continue };
            let Some(text) = model.forgetful.take() else { continue };
            let paths: Vec<_> = index.ends(namespace).take(MOST_REMEMBERED).collect();
            // Of salted ones the salt is not known here.
            let of = TokenHistory::of(&text, None);
            // The latest last: it is the last to be forgotten.
            paths.into_iter().rev().for_each(|path| self.history.remember(&of, path));
        }
    }

    /// Goes on with writing, and tells those who wait for the end of it.
    fn go_on(&mut self) {
        self.remember();
        let Some(ssd) = self.ssd.as_mut() else { return };
        while let Some(export) = ssd.next(&self.models) {
            let model = ssd.writing.as_ref().and_then(|writing| self.models.get(writing.of.model));
            match model.and_then(|model| model.scheduler.upgrade()) {
                // BOUND: one at a time.
                Some(scheduler) => scheduler.do_send(export),
                None => ssd.exported(None, Codec::Stored),
            }
        }
        if ssd.is_idle() {
            for done in ssd.flushing.drain(..) {
                let _gone = done.send(());
            }
        }
    }

    fn expire_sessions(&mut self) {
        let now = self.clock.now();
        for model in &self.models {
            let changes = model.sessions.borrow_mut().expire(now);
            tell_tree(&mut model.tree.borrow_mut(), changes);
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

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(EXPIRY, |me, _| me.expire_sessions());
    }
}

impl Handler<CacheStatistics> for PromptCache {
    type Result = CacheReport;

    fn handle(&mut self, _: CacheStatistics, _: &mut Self::Context) -> Self::Result {
        self.report()
    }
}

impl Handler<ClearCache> for PromptCache {
    type Result = CacheReport;

    fn handle(&mut self, clear: ClearCache, _: &mut Self::Context) -> Self::Result {
        self.history.clear();
        for model in &self.models {
            model.sessions.borrow_mut().forget_all();
            model.tree.borrow_mut().release_all();
            model.close_released();
        }
        if let Some(ssd) = self.ssd.as_mut().filter(|_| clear.disk) {
            ssd.clear();
        }
        self.report()
    }
}

impl Handler<ListSessions> for PromptCache {
    type Result = MessageResult<ListSessions>;

    fn handle(&mut self, ask: ListSessions, _: &mut Self::Context) -> Self::Result {
        self.expire_sessions();
        let now = self.clock.now();
        let of = |model: &CacheOf| {
            let tree = model.tree.borrow();
            let report = |(id, session): (String, Session)| SessionReport {
                model: model.name.clone(),
                id,
                tokens: tree.tokens_of(session.tail),
                turns: session.turns,
                idle: now.saturating_sub(session.used),
                pinned: session.pinned,
            };
            model.sessions.borrow().list(&ask.owner).into_iter().map(report).collect::<Vec<_>>()
        };
        MessageResult(self.models.iter().flat_map(of).collect())
    }
}

impl Handler<ChangeSession> for PromptCache {
    type Result = bool;

    fn handle(&mut self, order: ChangeSession, _: &mut Self::Context) -> Self::Result {
        let key = SessionKey { owner: order.owner, id: order.id };
        let mut is_done = false;
        for model in &self.models {
            is_done |= match order.change {
                SessionChange::Pin => model.pin(&key, true),
                SessionChange::Unpin => model.pin(&key, false),
                SessionChange::Drop => {
                    let forgotten = model.sessions.borrow_mut().forget(&key);
                    let Some((session, changes)) = forgotten else { continue };
                    let mut tree = model.tree.borrow_mut();
                    tell_tree(&mut tree, changes);
                    tree.release(&session.namespace, &session.path);
                    drop(tree);
                    model.close_released();
                    if let (Some(ssd), Some(base)) = (self.ssd.as_mut(), model.namespace.as_deref()) {
                        ssd.drop_path(base, &session.namespace, &session.path);
                    }
                    true
                }
            };
        }
        is_done
    }
}

impl Handler<Reset> for PromptCache {
    type Result = ();

    /// The scheduler emptied the tree when the engine was lost; what its bytes are called is known
    /// from the new one.
    fn handle(&mut self, reset: Reset, _: &mut Self::Context) {
        if let Some(model) = self.models.get_mut(reset.model) {
            let is_new = model.namespace.is_none();
            model.namespace = reset.namespace;
            model.codec = reset.codec;
            model.forgetful = is_new.then_some(reset.text);
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
            DiskOrder::Exported { pieces } => {
                let codec = self.models.get(model).map_or(Codec::Stored, |model| model.codec);
                ssd.exported(pieces, codec);
            }
            DiskOrder::Read { read, segment, upto } => {
                let codec = self.models.get(model).map_or(Codec::Stored, |model| model.codec);
                if !ssd.read(model, read, segment, upto, codec) {
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
                *ssd.segments.borrow_mut() = Segments::Off;
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
