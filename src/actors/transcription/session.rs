//! A live session as its clients see it: audio goes in, text comes out, from any thread.
//!
//! The board behind it is written by the session's task. Readers follow it with cursors, so a slow one
//! costs no memory: it is told each event once and only the newest text under way.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use dashmap::DashMap;
use tokio::sync::watch;

use crate::config::SpeechConfig;
use crate::model::speech::live::{Inlet, InletError, Mark};
use crate::model::speech::seconds;
use crate::types::Clock;
use crate::types::speech::{
    AppendError, LiveInput, Partial, SessionEnd, SessionEvent, SessionNews, SessionSpec, SessionState,
    SessionStatus, SpeechOptions,
};

/// Bytes of a file that a mark needs: about a tenth of a second.
const LEAST_OF_FILE: u64 = 256;
/// Bytes of a file that may wait.
const WAITING_FILE: usize = 8 << 20;
/// Bytes of raw audio that may wait.
const WAITING_PCM: usize = 32 << 20;
/// Seconds of raw audio that may wait.
const WAITING_SECONDS: usize = 30;

/// Those that are open, and those that ended lately, by their ids.
pub(crate) type Sessions = Arc<DashMap<String, SpeechSession>>;

/// See the module. Clones are the same session; dropping them all ends nothing.
#[derive(Clone)]
pub struct SpeechSession {
    inner: Arc<Inner>,
}

struct Inner {
    id: String,
    model: String,
    spec: SessionSpec,
    max_duration: Duration,
    idle: Duration,
    created: SystemTime,
    clock: Arc<dyn Clock>,
    inlet: Arc<Inlet>,
    board: Mutex<Board>,
    /// The board's revision.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct Board {
    status: SessionStatus,
    revision: u64,
    options: SpeechOptions,
    /// With the revisions that they came with.
    log: Vec<(u64, Arc<SessionEvent>)>,
    partial: Option<Partial>,
    /// Of all utterances.
    committed: String,
    /// The latest utterance that has some of it, and how many bytes.
    of_utterance: (usize, usize),
    /// Its length after each revision that made it grow.
    growth: Vec<(u64, usize)>,
    next_seq: u64,
    received_bytes: u64,
    /// As many, when a mark was taken last.
    marked_bytes: u64,
    heard_s: f64,
    processed_s: f64,
    /// When the client was heard of last.
    touched: Duration,
    /// When it began.
    begun: Duration,
    is_too_long: bool,
    /// Nobody is to find it any more.
    is_deleted: bool,
    end: Option<SessionEnd>,
}

impl fmt::Debug for SpeechSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpeechSession").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

impl SpeechSession {
    pub(super) fn new(
        id: String,
        model: String,
        spec: SessionSpec,
        config: &SpeechConfig,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let waiting = match spec.input {
            LiveInput::Pcm(format) => (WAITING_SECONDS * format.bytes_per_second()).min(WAITING_PCM),
            LiveInput::Container => WAITING_FILE,
        };
        let most = Duration::from_secs(config.session_max_s);
        let board = Board {
            options: spec.options.clone(),
            touched: clock.now(),
            begun: clock.now(),
            ..Board::default()
        };
        Self {
            inner: Arc::new(Inner {
                id,
                model,
                max_duration: spec.max_duration.map_or(most, |own| own.min(most)),
                idle: spec.idle.unwrap_or(Duration::from_secs(config.session_idle_s)),
                spec,
                created: clock.wall(),
                clock,
                inlet: Arc::new(Inlet::new(waiting)),
                board: Mutex::new(board),
                changes: watch::Sender::new(0),
            }),
        }
    }

    /// `sess_…`.
    pub fn id(&self) -> &str {
        &self.inner.id
    }

    /// Who hears.
    pub fn model(&self) -> &str {
        &self.inner.model
    }

    /// What was asked.
    pub fn spec(&self) -> &SessionSpec {
        &self.inner.spec
    }

    /// When it began.
    pub fn created(&self) -> SystemTime {
        self.inner.created
    }

    /// Longest audio.
    pub fn max_duration(&self) -> Duration {
        self.inner.max_duration
    }

    /// Without audio for so long, it finishes by itself.
    pub fn idle(&self) -> Duration {
        self.inner.idle
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.inner.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a chunk of audio, cut anywhere. With `seq` (0, 1, 2, …) a chunk that was taken already is
    /// passed over, so that it can be sent again without harm: whether this one was new.
    ///
    /// # Errors
    /// See [`AppendError`].
    pub fn append(&self, seq: Option<u64>, bytes: Bytes) -> Result<bool, AppendError> {
        let mut board = self.lock();
        board.touched = self.inner.clock.now();
        if bytes.is_empty() || seq.is_some_and(|seq| seq < board.next_seq) {
            return Ok(false);
        }
        board.check_open()?;
        if seq.is_some_and(|seq| seq > board.next_seq) {
            return Err(AppendError::OutOfOrder { expected: board.next_seq });
        }
        let count = bytes.len() as u64;
        self.inner.inlet.push(bytes).map_err(|error| board.not_taken(error))?;
        board.next_seq += 1;
        board.received_bytes += count;
        Ok(true)
    }

    /// Waits until a chunk of this size would be taken, or refused for good.
    ///
    /// # Cancellation
    /// Safe.
    pub async fn room(&self, size: usize) {
        self.inner.inlet.room(size).await;
    }

    /// Ends the turn here, whatever was said: whether there was audio since the last mark. Without a
    /// tenth of a second of it there is nothing to end.
    ///
    /// # Errors
    /// See [`AppendError`].
    pub fn commit(&self) -> Result<bool, AppendError> {
        self.mark(Mark::Commit)
    }

    /// Forgets what was said in this turn; committed text stays told. Else as [`Self::commit`].
    ///
    /// # Errors
    /// See [`AppendError`].
    pub fn clear(&self) -> Result<bool, AppendError> {
        self.mark(Mark::Clear)
    }

    fn mark(&self, mark: Mark) -> Result<bool, AppendError> {
        let mut board = self.lock();
        board.touched = self.inner.clock.now();
        board.check_open()?;
        let least = match self.inner.spec.input {
            LiveInput::Pcm(format) => format.bytes_per_second() as u64 / 10,
            LiveInput::Container => LEAST_OF_FILE,
        };
        // What is marked costs memory and work: no more marks than audio.
        if board.received_bytes < board.marked_bytes + least {
            return Ok(false);
        }
        self.inner.inlet.mark(mark).map_err(|error| board.not_taken(error))?;
        board.marked_bytes = board.received_bytes;
        Ok(true)
    }

    /// From the next utterance on, these options hold, but for `vad`.
    pub fn configure(&self, options: SpeechOptions) {
        self.lock().options = options;
    }

    /// The client is still there.
    pub fn touch(&self) {
        self.lock().touched = self.inner.clock.now();
    }

    /// No more audio comes. What came is written down.
    pub fn finish(&self) {
        let mut board = self.lock();
        if board.status == SessionStatus::Open {
            board.status = SessionStatus::Finishing;
            self.inner.inlet.finish();
            self.changed(board);
        }
    }

    /// Gives it up: computing stops at the next piece.
    pub fn cancel(&self) {
        self.end(SessionEnd::Cancelled);
    }

    /// Gives it up, and what was written down as well: it is found no more.
    pub fn delete(&self) {
        self.cancel();
        let mut board = self.lock();
        board.is_deleted = true;
        self.changed(board);
    }

    /// Where it is in its life.
    pub fn status(&self) -> SessionStatus {
        self.lock().status
    }

    /// How it is, and what was committed after `since`, a revision.
    pub fn state(&self, since: u64) -> SessionState {
        let board = self.lock();
        let grown = board.growth.partition_point(|(revision, _)| *revision <= since);
        let from = grown.checked_sub(1).map_or(0, |last| board.growth[last].1);
        let received_s = match self.inner.spec.input {
            LiveInput::Pcm(format) => board.received_bytes as f64 / format.bytes_per_second().max(1) as f64,
            LiveInput::Container => board.heard_s,
        };
        SessionState {
            status: board.status,
            revision: board.revision,
            received_s,
            processed_s: board.processed_s,
            committed: board.committed[from..].to_owned(),
            tentative: board.partial.as_ref().map(|partial| partial.tentative.clone()).unwrap_or_default(),
        }
    }

    /// Waits for a revision above `since`, or the end.
    ///
    /// # Cancellation
    /// Safe.
    pub async fn changed_since(&self, since: u64) {
        let mut changes = self.inner.changes.subscribe();
        // The sender lives as long as this does.
        let is_new = |board: &Board| board.revision > since || board.end.is_some();
        let _alive = changes.wait_for(|_| is_new(&self.lock())).await;
    }

    /// Waits for the end.
    ///
    /// # Cancellation
    /// Safe.
    pub async fn ended(&self) -> SessionEnd {
        let mut changes = self.inner.changes.subscribe();
        loop {
            if let Some(end) = self.lock().end.clone() {
                return end;
            }
            if changes.changed().await.is_err() {
                return SessionEnd::Cancelled;
            }
        }
    }

    /// How it ended, if it has.
    pub fn end_now(&self) -> Option<SessionEnd> {
        self.lock().end.clone()
    }

    /// Follows it from its beginning.
    pub fn reader(&self) -> SessionReader {
        SessionReader {
            session: self.clone(),
            changes: self.inner.changes.subscribe(),
            read: 0,
            partial: 0,
            is_over: false,
        }
    }

    /// Says that the board changed, after letting it go.
    fn changed(&self, mut board: MutexGuard<'_, Board>) {
        board.revision += 1;
        let revision = board.revision;
        drop(board);
        self.inner.changes.send_replace(revision);
    }
}

/// For the session's task.
impl SpeechSession {
    pub(super) fn inlet(&self) -> &Arc<Inlet> {
        &self.inner.inlet
    }

    pub(super) fn options(&self) -> SpeechOptions {
        self.lock().options.clone()
    }

    /// Writes something down that happened.
    pub(super) fn event(&self, event: SessionEvent) {
        let mut board = self.lock();
        if matches!(event, SessionEvent::Cleared { .. }) {
            board.partial = None;
        }
        board.record(event);
        self.changed(board);
    }

    /// An utterance's committed text has grown to its end, as the event says.
    pub(super) fn conclude(&self, utterance: usize, committed: &str, event: SessionEvent) {
        let mut board = self.lock();
        board.grow(utterance, committed);
        board.partial = None;
        board.record(event);
        self.changed(board);
    }

    /// The present utterance's text as it is now; committed text only grows.
    pub(super) fn text(&self, utterance: usize, committed: &str, tentative: &str, audio_s: f64) {
        let mut board = self.lock();
        board.grow(utterance, committed);
        let revision = board.revision + 1;
        let plain = |text: &str| text.trim().to_owned();
        let (committed, tentative) = (plain(committed), plain(tentative));
        board.partial = Some(Partial { revision, utterance, committed, tentative, audio_s });
        self.changed(board);
    }

    pub(crate) fn is_deleted(&self) -> bool {
        self.lock().is_deleted
    }

    /// Waits until it is deleted.
    pub(super) async fn deleted(&self) {
        let mut changes = self.inner.changes.subscribe();
        // The sender lives as long as this does.
        let _alive = changes.wait_for(|_| self.is_deleted()).await;
    }

    /// How far audio was heard and is done with, in samples.
    pub(super) fn progress(&self, heard: usize, processed: usize) {
        let mut board = self.lock();
        (board.heard_s, board.processed_s) = (seconds(heard), seconds(processed));
    }

    /// As much was heard as may be.
    pub(super) fn is_too_long(&self) {
        self.lock().is_too_long = true;
    }

    /// The end, unless there was one.
    pub(super) fn end(&self, end: SessionEnd) {
        let mut board = self.lock();
        if board.end.is_some() {
            return;
        }
        board.status = match &end {
            SessionEnd::Done(_) => SessionStatus::Done,
            SessionEnd::Failed(_) => SessionStatus::Failed,
            SessionEnd::Cancelled => SessionStatus::Cancelled,
        };
        board.end = Some(end);
        board.partial = None;
        self.inner.inlet.close();
        self.changed(board);
    }

    /// How long until it has been idle, or there, for too long; zero where it has. While audio waits to be
    /// heard its client is not idle, however long that takes.
    pub(super) fn time_left(&self) -> Duration {
        let now = self.inner.clock.now();
        let board = self.lock();
        let idle = match self.inner.inlet.is_empty() {
            true => now.saturating_sub(board.touched),
            false => Duration::ZERO,
        };
        let life = self.inner.max_duration.saturating_add(self.inner.idle);
        self.inner.idle.saturating_sub(idle).min(life.saturating_sub(now.saturating_sub(board.begun)))
    }
}

impl Board {
    /// Appends an event, which comes with the next revision.
    fn record(&mut self, event: SessionEvent) {
        self.log.push((self.revision + 1, Arc::new(event)));
    }

    /// Takes an utterance's committed text in, which begins with what was taken of it before.
    fn grow(&mut self, utterance: usize, committed: &str) {
        if self.of_utterance.0 != utterance {
            self.of_utterance = (utterance, 0);
        }
        let new = committed.get(self.of_utterance.1..).unwrap_or_default();
        if new.is_empty() {
            return;
        }
        self.committed.push_str(if self.committed.is_empty() { new.trim_start() } else { new });
        self.of_utterance.1 = committed.len();
        self.growth.push((self.revision + 1, self.committed.len()));
    }

    fn check_open(&self) -> Result<(), AppendError> {
        match self.status {
            SessionStatus::Open => Ok(()),
            _ if self.is_too_long => Err(AppendError::DurationLimit),
            status => Err(AppendError::Closed { status }),
        }
    }

    fn not_taken(&self, error: InletError) -> AppendError {
        match error {
            InletError::Full => AppendError::Full,
            InletError::Closed if self.is_too_long => AppendError::DurationLimit,
            InletError::Closed => AppendError::Closed { status: self.status },
        }
    }
}

/// Follows a session: see [`SpeechSession::reader`].
pub struct SessionReader {
    session: SpeechSession,
    changes: watch::Receiver<u64>,
    /// Events that were told.
    read: usize,
    /// Revision of the text under way that was told last.
    partial: u64,
    is_over: bool,
}

impl SessionReader {
    /// What comes next; `None` after the end.
    ///
    /// # Cancellation
    /// Safe.
    pub async fn next(&mut self) -> Option<SessionNews> {
        loop {
            if self.is_over {
                return None;
            }
            if let Some(news) = self.now() {
                return Some(news);
            }
            if self.changes.changed().await.is_err() {
                return None;
            }
        }
    }

    /// What there is now.
    fn now(&mut self) -> Option<SessionNews> {
        self.changes.borrow_and_update();
        let board = self.session.lock();
        let event = board.log.get(self.read);
        let partial = board.partial.as_ref().filter(|partial| partial.revision > self.partial);
        match (event, partial) {
            (event, Some(partial)) if event.is_none_or(|(revision, _)| partial.revision < *revision) => {
                self.partial = partial.revision;
                Some(SessionNews::Partial(partial.clone()))
            }
            (Some((_, event)), _) => {
                self.read += 1;
                Some(SessionNews::Event(Arc::clone(event)))
            }
            _ => {
                let end = board.end.clone()?;
                self.is_over = true;
                Some(SessionNews::End(end))
            }
        }
    }
}
