//! The scheduler's part in the tier on disk: what is read for a waiting row, and what is copied out
//! to be written. Bytes come and go piece by piece, in slices between steps.
//!
//! A row whose prompt goes on further on disk than in memory waits for that part to be read: the
//! state is put together in a sequence of its own, which becomes part of the tree, pinned until the
//! row joins. Memory for it is set aside before anything is read. What fails or takes too long is
//! computed instead. Nothing here knows files: orders go out ([`DiskOrder`]), bytes come in.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::actors::scheduler::core::Core;
use crate::actors::scheduler::row::Row;
use crate::cache::ssd::{Codec, Link, PIECE_TOKENS, SegmentId, SegmentIndex, pieces};
use crate::cache::{Namespace, Terms, shared};
use crate::model::ops::EXPORT_TOKENS;
use crate::types::{EngineError, SequenceId, TokenId};

/// Tokens that a read must bring at least.
const LEAST_READ_TOKENS: u32 = 16;
/// Reads under way at once: each holds memory for what it brings.
const MOST_READS: usize = 2;
/// Segments of a read that are asked for ahead of the one being taken in.
const READ_AHEAD: usize = 2;
/// A read may take so long at least, and as long as computing would.
const LEAST_PATIENCE: Duration = Duration::from_secs(2);
/// Waiting rows without a slot for whom something is read ahead.
const MOST_READ_AHEAD: usize = 2;
/// How long a disk that was too slow is not asked.
const DISTRUST: Duration = Duration::from_secs(30);
/// Tokens of a running row's prompt after which they are written, before it ends.
const WRITE_EVERY_TOKENS: u32 = 512;

const _: () = assert!(PIECE_TOKENS == EXPORT_TOKENS, "what an engine gives is what a segment holds");

/// What is on disk, as the two actors of the compute thread share it.
pub(crate) type SharedSegments = Rc<RefCell<Segments>>;

/// See [`SharedSegments`].
#[derive(Debug, Default)]
pub(crate) enum Segments {
    /// There is no such tier, or it cannot be used.
    #[default]
    Off,
    /// The folder is being looked through.
    Opening,
    Open(SegmentIndex),
}

impl Segments {
    pub(crate) fn as_ref(&self) -> Option<&SegmentIndex> {
        match self {
            Self::Open(index) => Some(index),
            Self::Off | Self::Opening => None,
        }
    }

    pub(crate) fn as_mut(&mut self) -> Option<&mut SegmentIndex> {
        match self {
            Self::Open(index) => Some(index),
            Self::Off | Self::Opening => None,
        }
    }
}

/// Names a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadId(u64);

/// What the scheduler wants of the prompt cache's actor.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum DiskOrder {
    /// Read the first tokens of a segment, up to position `upto`.
    Read { read: ReadId, segment: SegmentId, upto: u32 },
    /// These tokens' state is in the tree: see that it is on disk.
    Kept { namespace: Namespace, tokens: Arc<[TokenId]> },
    /// A copy that was ordered is made, or cannot be made any more.
    Exported { pieces: Option<Vec<Vec<u8>>> },
}

/// A segment as it came from the disk.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ReadPieces {
    /// Position of the first token.
    pub(crate) start: u32,
    /// Tokens of the segment.
    pub(crate) tokens: u32,
    pub(crate) pieces: Vec<Vec<u8>>,
}

/// State that is being put together from the disk.
#[derive(Debug)]
struct Reading {
    id: ReadId,
    namespace: Namespace,
    tokens: Vec<TokenId>,
    /// What is to be taken in, root first.
    links: VecDeque<Link>,
    /// How many of them are asked for.
    asked: usize,
    arrived: VecDeque<ReadPieces>,
    sequence: SequenceId,
    /// Tokens that it holds.
    held: u32,
    /// Tokens that memory had.
    from: u32,
    bytes: u64,
    begun: Duration,
    patience: Duration,
}

/// State that is being copied out.
#[derive(Debug)]
struct Exporting {
    sequence: SequenceId,
    range: Range<u32>,
    pieces: Vec<Vec<u8>>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    pub(crate) segments: SharedSegments,
    /// Names all that makes this engine's bytes differ from another's; `None` without the tier.
    pub(crate) namespace: Option<Arc<str>>,
    /// How this engine's state is written.
    pub(crate) codec: Codec,
    pub(crate) orders: Vec<DiskOrder>,
    reading: Vec<Reading>,
    exporting: Option<Exporting>,
    reads: u64,
    /// The disk was too slow: it is asked again from then on.
    trusted_from: Duration,
}

/// The name on disk of a namespace of the tree.
pub(crate) fn name_on_disk(base: &str, namespace: &Namespace) -> Arc<str> {
    if namespace.is_empty() { base.into() } else { format!("{base} salt {}", hashed(namespace)).into() }
}

/// Salts are secrets: a hash of one names it.
fn hashed(salt: &str) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(salt.as_bytes()).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

impl Disk {
    /// The engine is gone, and with it every sequence.
    pub(crate) fn forget_sequences(&mut self) {
        self.reading.clear();
        if self.exporting.take().is_some() {
            self.orders.push(DiskOrder::Exported { pieces: None });
        }
    }

    /// Whether a slice of reading can be done.
    pub(crate) fn has_read(&self) -> bool {
        self.reading.iter().any(|reading| !reading.arrived.is_empty())
    }

    /// Blocks set aside for what is being read.
    pub(crate) fn blocks_held(&self, block_tokens: u32) -> u64 {
        let blocks = |reading: &Reading| u64::from(room_for(reading).div_ceil(block_tokens.max(1)));
        self.reading.iter().map(blocks).sum()
    }

    /// Whether something is to be copied out.
    pub(crate) fn has_export(&self) -> bool {
        self.exporting.is_some()
    }
}

/// Tokens that a read needs room for: whole pieces come in, and are cut afterwards.
fn room_for(reading: &Reading) -> u32 {
    (reading.tokens.len() as u32).next_multiple_of(EXPORT_TOKENS)
}

/// What became of the wish to read for a row.
enum Begun {
    /// It waits for a read.
    Waits,
    /// There is nothing to read, or no room for it.
    Nothing,
    /// It is not its turn to have something read.
    Later,
}

impl Core {
    /// Whether the waiting row waits for a read; begins one where the disk has more than memory.
    pub(crate) fn must_read(&mut self, order: u64, has_slot: bool) -> bool {
        if self.disk.namespace.is_none() {
            return false;
        }
        let now = self.now();
        let Some(row) = self.waiting.iter().find(|row| row.order == order) else { return false };
        if row.reuse.has_read || row.sequence.is_some() || !row.placement.prompt_cache {
            return false;
        }
        let waited = now.saturating_sub(row.reuse.waits_to_read.unwrap_or(now));
        let at =
            row.reuse.reading.and_then(|id| self.disk.reading.iter().position(|reading| reading.id == id));
        let patience = at.map_or(LEAST_PATIENCE, |at| self.disk.reading[at].patience);
        let waits = if waited > patience {
            if let Some(at) = at {
                // A disk that takes longer than computing would is not asked for a while.
                self.disk.trusted_from = now + DISTRUST;
                self.end_read(at, true);
            }
            Begun::Nothing
        } else if at.is_some() {
            Begun::Waits
        } else if matches!(*self.disk.segments.borrow(), Segments::Opening) {
            // What is there is known in a moment.
            Begun::Waits
        } else {
            self.begin_read(order, has_slot)
        };
        let Some(row) = self.waiting.iter_mut().find(|row| row.order == order) else { return false };
        match waits {
            Begun::Waits => {
                row.reuse.waits_to_read.get_or_insert(now);
            }
            Begun::Nothing => row.reuse.has_read = true,
            Begun::Later => {}
        }
        matches!(waits, Begun::Waits)
    }

    /// Begins to read what the disk has beyond memory, or joins a read under way.
    fn begin_read(&mut self, order: u64, has_slot: bool) -> Begun {
        let Some(row) = self.waiting.iter().find(|row| row.order == order) else { return Begun::Nothing };
        let Some(base) = self.disk.namespace.as_deref().filter(|_| self.now() >= self.disk.trusted_from)
        else {
            return Begun::Nothing;
        };
        let namespace = Arc::clone(&row.reuse.namespace);
        let wanted = row.reusable();
        let found = self.tree.borrow().find(&namespace, wanted).found;
        let kept = found.map_or(0, |found| found.length);
        let chain = self
            .disk
            .segments
            .borrow()
            .as_ref()
            .and_then(|segments| segments.longest(&name_on_disk(base, &namespace), wanted));
        let Some(chain) = chain.filter(|chain| chain.covered >= kept + LEAST_READ_TOKENS) else {
            return Begun::Nothing;
        };
        let target = wanted.get(..chain.covered as usize).unwrap_or(&[]).to_vec();
        let same = |reading: &&Reading| {
            reading.namespace == namespace
                && shared(&reading.tokens, &target) as u32 + LEAST_READ_TOKENS > chain.covered
        };
        let joined = self.disk.reading.iter().find(same).map(|reading| reading.id);
        if let Some(id) = joined {
            return self.set_reading(order, id);
        }
        if self.disk.reading.len() >= MOST_READS {
            // Its turn comes soon: nothing takes as long as computing.
            return if has_slot { Begun::Waits } else { Begun::Later };
        }
        // What is read for others who wait is pinned: rows far from their turn would fill the memory.
        let ahead = self.waiting.iter().filter(|row| row.reuse.pinned.is_some() && row.sequence.is_none());
        if !has_slot && ahead.count() >= MOST_READ_AHEAD {
            return Begun::Later;
        }
        // Whole pieces are taken in: what memory has of the first one is read once more.
        let links: VecDeque<Link> =
            chain.links.iter().filter(|link| link.range.end > kept).cloned().collect();
        let Some(first) = links.front() else { return Begun::Nothing };
        let from = pieces(&first.range).map(|piece| piece.start).take_while(|start| *start <= kept).last();
        let from = from.unwrap_or(first.range.start).min(kept);
        let source = found.filter(|_| from > 0).map(|found| (found.payload, from));
        let Some(sequence) = self.open_for_read(source, chain.covered) else { return Begun::Nothing };
        if let Some(segments) = self.disk.segments.borrow_mut().as_mut() {
            segments.touch(&chain);
        }
        self.disk.reads += 1;
        let id = ReadId(self.disk.reads);
        let estimate = Duration::from_millis(self.milliseconds(kept, chain.covered - kept));
        let reading = Reading {
            id,
            namespace,
            tokens: target,
            links,
            asked: 0,
            arrived: VecDeque::new(),
            sequence,
            held: from,
            from: kept,
            bytes: 0,
            begun: self.now(),
            patience: estimate.max(LEAST_PATIENCE),
        };
        self.disk.reading.push(reading);
        self.ask_ahead(id);
        self.set_reading(order, id)
    }

    fn set_reading(&mut self, order: u64, id: ReadId) -> Begun {
        if let Some(row) = self.waiting.iter_mut().find(|row| row.order == order) {
            row.reuse.reading = Some(id);
        }
        Begun::Waits
    }

    /// A sequence with room for what is read; live rows do not give way for it.
    fn open_for_read(&mut self, from: Option<(SequenceId, u32)>, tokens: u32) -> Option<SequenceId> {
        let engine = self.engine.as_mut()?;
        let (info, memory) = (engine.info(), engine.memory());
        let room = tokens.next_multiple_of(EXPORT_TOKENS).min(info.context);
        let block = info.kv_block_tokens.max(1);
        let block_bytes = u64::from(block) * info.kv_bytes_per_token;
        let free = memory.kv_capacity_bytes.saturating_sub(memory.kv_used_bytes);
        let evictable = self.tree.borrow().evictable_blocks().saturating_mul(block_bytes);
        // What cannot have its memory gives nobody's away in vain.
        if u64::from(room.div_ceil(block)).saturating_mul(block_bytes) > free.saturating_add(evictable) {
            return None;
        }
        let sequence = engine.open(from).ok()?;
        loop {
            match self.engine.as_mut()?.reserve(sequence, room) {
                Ok(()) => return Some(sequence),
                Err(EngineError::KvFull { .. }) if self.evict() => {}
                Err(_) => {
                    self.close_sequence(sequence);
                    return None;
                }
            }
        }
    }

    fn ask_ahead(&mut self, id: ReadId) {
        let Disk { reading, orders, .. } = &mut self.disk;
        let Some(reading) = reading.iter_mut().find(|reading| reading.id == id) else { return };
        while reading.asked < READ_AHEAD
            && let Some(link) = reading.links.get(reading.asked)
        {
            reading.asked += 1;
            orders.push(DiskOrder::Read { read: id, segment: link.id, upto: link.range.end });
        }
    }

    /// A segment came, or cannot come.
    pub(crate) fn segment_arrived(&mut self, read: ReadId, pieces: Option<ReadPieces>) {
        let Some(at) = self.disk.reading.iter().position(|reading| reading.id == read) else { return };
        match pieces {
            Some(pieces) => self.disk.reading[at].arrived.push_back(pieces),
            // What was taken in so far is good.
            None => self.end_read(at, true),
        }
    }

    /// Takes bytes in, for about as long as `budget`.
    ///
    /// # Errors
    /// The engine is lost.
    pub(crate) fn read_slice(&mut self, budget: Duration) -> Result<(), EngineError> {
        let begun = Instant::now();
        while let Some(at) = self.disk.reading.iter().position(|reading| !reading.arrived.is_empty()) {
            match self.take_in(at) {
                Ok(true) => {}
                Ok(false) => self.end_read(at, true),
                Err(error @ EngineError::Device { .. }) => return Err(error),
                Err(error) => {
                    tracing::warn!(target: crate::observe::fields::ENGINE, %error, "state from disk was not taken");
                    self.end_read(at, true);
                }
            }
            if begun.elapsed() >= budget {
                break;
            }
        }
        Ok(())
    }

    /// Takes one piece in; false when the read is at its end.
    fn take_in(&mut self, at: usize) -> Result<bool, EngineError> {
        let (Some(engine), Some(reading)) = (self.engine.as_mut(), self.disk.reading.get_mut(at)) else {
            return Ok(false);
        };
        let (Some(link), Some(segment)) = (reading.links.front(), reading.arrived.front()) else {
            return Ok(!reading.links.is_empty());
        };
        let all = segment.start..segment.start + segment.tokens;
        let room = (reading.tokens.len() as u32).next_multiple_of(EXPORT_TOKENS).min(engine.info().context);
        let next = pieces(&all).zip(&segment.pieces).find(|(piece, _)| piece.end > reading.held);
        if let Some((piece, bytes)) = next.filter(|(piece, _)| piece.start < link.range.end) {
            if reading.held > piece.start {
                reading.held = piece.start;
                engine.truncate(reading.sequence, piece.start)?;
                engine.reserve(reading.sequence, room)?;
            }
            engine.import(reading.sequence, piece.clone(), bytes)?;
            reading.bytes += bytes.len() as u64;
            reading.held = piece.end;
            if reading.held < link.range.end {
                return Ok(true);
            }
        }
        if reading.held > link.range.end {
            // The rest of the piece belongs to another prompt.
            reading.held = link.range.end;
            engine.truncate(reading.sequence, link.range.end)?;
            engine.reserve(reading.sequence, room)?;
        }
        reading.links.pop_front();
        reading.arrived.pop_front();
        reading.asked -= 1;
        let (id, more) = (reading.id, !reading.links.is_empty());
        self.ask_ahead(id);
        Ok(more)
    }

    /// What was read becomes part of the tree, and whoever waited for it goes on.
    /// `joins`: it is kept for those who wait for it.
    fn end_read(&mut self, at: usize, joins: bool) {
        let Reading { id, namespace, tokens, sequence, held, from, bytes, begun, .. } =
            self.disk.reading.remove(at);
        let now = self.now();
        let held = held.min(tokens.len() as u32);
        let is_good =
            held > from && self.engine.as_mut().is_some_and(|engine| engine.truncate(sequence, held).is_ok());
        let mut node = None;
        if is_good {
            let tokens = tokens.get(..held as usize).unwrap_or(&[]);
            let mut tree = self.tree.borrow_mut();
            let given_up = tree.insert(&namespace, tokens, sequence, Terms::default());
            node = tree.node_of(&namespace, tokens);
            drop(tree);
            given_up.into_iter().for_each(|sequence| self.close_sequence(sequence));
        } else {
            self.close_sequence(sequence);
        }
        for row in self.waiting.iter_mut().filter(|row| row.reuse.reading == Some(id)) {
            row.reuse.reading = None;
            row.reuse.has_read = true;
            row.reuse.from_disk = if is_good { from..held } else { 0..0 };
            let attributes = [
                ("tokens", held.saturating_sub(from).into()),
                ("bytes", bytes.into()),
                ("complete", (held as usize == tokens.len()).into()),
            ];
            row.ticket.trace.span("cache.ssd_read", begun, now, &attributes);
            if let Some(node) = node.filter(|_| joins && row.reuse.pinned.is_none()) {
                self.tree.borrow_mut().pin(node);
                row.reuse.pinned = Some(node);
            }
        }
        self.keep_budget();
    }

    /// Ends reads that nobody waits for any more.
    pub(crate) fn end_idle_reads(&mut self) {
        while let Some(at) = self.disk.reading.iter().position(|reading| {
            let waits = |row: &Row| row.reuse.reading == Some(reading.id);
            !self.waiting.iter().any(waits)
        }) {
            self.end_read(at, false);
        }
    }

    /// Gives up the latest read: what it has becomes part of the tree, and its memory can be taken. False
    /// where there is none.
    pub(crate) fn give_up_read(&mut self) -> bool {
        let Some(last) = self.disk.reading.len().checked_sub(1) else { return false };
        self.end_read(last, false);
        true
    }

    /// Says that a row's first tokens are in the tree.
    pub(crate) fn tell_disk(&mut self, namespace: &Namespace, tokens: &[TokenId]) {
        if self.disk.namespace.is_some() {
            let order = DiskOrder::Kept { namespace: Arc::clone(namespace), tokens: tokens.into() };
            self.disk.orders.push(order);
        }
    }

    /// The same for a running row, now and then.
    pub(crate) fn tell_disk_of_running(&mut self, order: u64) {
        if self.disk.namespace.is_none() {
            return;
        }
        let Some(row) = self.find_running(order) else { return };
        if row.computed < row.reuse.told + WRITE_EVERY_TOKENS {
            return;
        }
        row.reuse.told = row.computed;
        let tokens: Vec<TokenId> = row.tokens.get(..row.computed as usize).unwrap_or(&[]).to_vec();
        let namespace = Arc::clone(&row.reuse.namespace);
        self.tell_disk(&namespace, &tokens);
    }

    /// Begins to copy out the state of `tokens[range]`; false where it is not there any more.
    pub(crate) fn begin_export(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        range: Range<u32>,
    ) -> bool {
        let Some(wanted) = tokens.get(..range.end as usize) else { return false };
        let found = self.tree.borrow().find(namespace, wanted).found;
        let Some(found) = found.filter(|found| found.length == range.end) else { return false };
        let Some(engine) = self.engine.as_mut().filter(|_| self.disk.exporting.is_none()) else {
            return false;
        };
        // A handle of its own: what is copied stays there, whatever the tree gives up.
        let Ok(sequence) = engine.open(Some((found.payload, range.end))) else { return false };
        self.disk.exporting = Some(Exporting { sequence, range, pieces: Vec::new() });
        true
    }

    /// Copies out, for about as long as `budget`.
    ///
    /// # Errors
    /// The engine is lost.
    pub(crate) fn export_slice(&mut self, budget: Duration) -> Result<(), EngineError> {
        let begun = Instant::now();
        while let Some(exporting) = self.disk.exporting.as_mut() {
            let Some(engine) = self.engine.as_mut() else { return Ok(()) };
            let next = pieces(&exporting.range).nth(exporting.pieces.len());
            match next.map(|piece| engine.export(exporting.sequence, piece)) {
                Some(Ok(bytes)) => exporting.pieces.push(bytes),
                Some(Err(error @ EngineError::Device { .. })) => return Err(error),
                Some(Err(_)) => {
                    self.drop_export();
                }
                None => {
                    let pieces = Some(std::mem::take(&mut exporting.pieces));
                    engine.close(exporting.sequence);
                    self.disk.exporting = None;
                    self.disk.orders.push(DiskOrder::Exported { pieces });
                }
            }
            if begun.elapsed() >= budget {
                break;
            }
        }
        Ok(())
    }

    /// Gives up a copy that is being made: false where there is none.
    pub(crate) fn drop_export(&mut self) -> bool {
        let Some(exporting) = self.disk.exporting.take() else { return false };
        self.close_sequence(exporting.sequence);
        self.disk.orders.push(DiskOrder::Exported { pieces: None });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_is_not_written_down() {
        let name = name_on_disk("base", &"secret".into());
        assert!(name.starts_with("base salt ") && !name.contains("secret"), "{name}");
        assert_eq!(&*name_on_disk("base", &"".into()), "base");
    }
}
