//! Every message, in the order of the table in [`crate::actors`].
//!
//! Values only: no closures, no shared locks. What is not a message, on purpose:
//! tokens (a bounded channel), cancellation (a dropped receiver), liveness and
//! metrics (atomics), configuration.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use actix::Message;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::actors::scheduler::disk::{DiskOrder, ReadId, ReadPieces};
use crate::actors::scheduler::fill::Fill;
use crate::actors::scheduler::native::NativeJob;
use crate::actors::stream::EventSink;
use crate::actors::transcription::SpeechSession;
use crate::cache::Namespace;
use crate::cache::ssd::{Codec, ScanReport, SegmentHead, SegmentId};
use crate::model::LoadedModel;
use crate::model::text::TextModel;
use crate::types::speech::{SessionSpec, SpeechEvent, SpeechFailure, SpeechOptions, Transcription};
use crate::types::{
    ChatEvent, ChatRequest, Epoch, PreparedPrompt, Refusal, RequestId, Terms, Ticket, TokenId, Trace,
};

/// Asks for an answer. From an HTTP handler, or a host's own actor, to the gateway.
///
/// Dropping the request's future before the reply cancels it.
#[derive(Message, Debug)]
#[rtype(result = "Result<ChatStream, Refusal>")]
pub struct OpenChat {
    /// What is asked.
    pub request: ChatRequest,
}

/// An accepted request's stream. Dropping it cancels the request within a step.
#[derive(Debug)]
pub struct ChatStream {
    /// Identity in logs and responses.
    pub id: RequestId,
    /// The model that answers.
    pub model: String,
    /// When it was accepted.
    pub created: SystemTime,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The seed in use, so that any answer can be replayed.
    pub seed: u64,
    /// Events; exactly one terminal one, last.
    pub events: mpsc::Receiver<ChatEvent>,
}

/// How many tokens a request's prompt has. From handlers to the gateway; nothing is generated.
#[derive(Message, Clone, Debug)]
#[rtype(result = "Result<u32, Refusal>")]
#[non_exhaustive]
pub struct CountTokens {
    /// The request whose prompt is meant.
    pub request: ChatRequest,
}

impl CountTokens {
    /// Of this request.
    pub fn new(request: ChatRequest) -> Self {
        Self { request }
    }
}

/// Turns a request into ids and resolved parameters. From the gateway to the preparation pool.
#[derive(Message)]
#[rtype(result = "Result<Prepared, Refusal>")]
pub(crate) struct Prepare {
    /// With the job: a queue whose requesters are gone holds no more jobs than there are places.
    pub(crate) ticket: Ticket,
    pub(crate) request: ChatRequest,
    pub(crate) text: Arc<TextModel>,
    /// Most tokens of prompt and answer together.
    pub(crate) context: u32,
    /// Used where the request names none.
    pub(crate) seed: u64,
    /// The date that templates may print.
    pub(crate) now: SystemTime,
}

/// Reply of [`Prepare`].
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The request's, on its way on.
    pub(crate) ticket: Ticket,
    pub(crate) prompt: PreparedPrompt,
}

/// Puts a prepared request into a model's queue. From the gateway to the scheduler.
#[derive(Message)]
#[rtype(result = "Result<Accepted, Refusal>")]
pub(crate) struct Admit {
    pub(crate) ticket: Ticket,
    pub(crate) terms: Terms,
    pub(crate) prompt: PreparedPrompt,
    /// Where tokens come from that need not be drawn.
    pub(crate) fill: Option<Box<dyn Fill>>,
    pub(crate) events: EventSink,
}

/// The request is in the queue.
#[derive(Debug)]
pub(crate) struct Accepted;

/// A model's load has ended. From the loader thread to the scheduler.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Loaded {
    /// The life that this load was asked for; others are ignored.
    pub(crate) epoch: Epoch,
    /// The model, or why not, for the operator.
    pub(crate) result: Result<LoadedModel, String>,
}

/// Work that needs a model's weights and is no row; runs in slices between steps. From
/// anybody who holds a ticket.
#[derive(Message)]
#[rtype(result = "Result<Accepted, Refusal>")]
#[cfg_attr(not(test), allow(dead_code, reason = "its first senders come with embeddings and media"))]
pub(crate) struct RunNative {
    pub(crate) ticket: Ticket,
    pub(crate) job: Box<dyn NativeJob>,
}

/// A recording to be written down. From a handler or a host's own actor to the transcription service.
#[derive(Message, Clone, Debug, Default)]
#[rtype(result = "Result<TranscriptStream, Refusal>")]
#[non_exhaustive]
pub struct Transcribe {
    /// The file, of any kind that is supported, whatever it is called.
    pub audio: Bytes,
    /// What is asked.
    pub options: SpeechOptions,
    /// Id of the speech model; `None`: the one there is.
    pub model: Option<String>,
    /// Where its way is recorded; `None`: in one of its own.
    pub trace: Option<Trace>,
}

impl Transcribe {
    /// A recording, with these options.
    pub fn new(audio: Bytes, options: SpeechOptions) -> Self {
        Self { audio, options, model: None, trace: None }
    }
}

/// Events of a recording. Dropping it cancels the work.
#[derive(Debug)]
#[non_exhaustive]
pub struct TranscriptStream {
    /// Of the request.
    pub id: RequestId,
    /// Who hears.
    pub model: String,
    pub(crate) events: mpsc::UnboundedReceiver<SpeechEvent>,
}

impl TranscriptStream {
    /// The next event; `None` after the last one.
    ///
    /// # Cancellation
    /// Safe.
    pub async fn next(&mut self) -> Option<SpeechEvent> {
        self.events.recv().await
    }

    /// All of it.
    ///
    /// # Errors
    /// See [`SpeechFailure`].
    pub async fn whole(mut self) -> Result<Transcription, SpeechFailure> {
        while let Some(event) = self.next().await {
            match event {
                SpeechEvent::Done(transcription) => return Ok(transcription),
                SpeechEvent::Failed(failure) => return Err(failure),
                SpeechEvent::Started { .. } | SpeechEvent::Segment(_) => {}
            }
        }
        Err(SpeechFailure::ShuttingDown)
    }
}

/// A live session is to begin. From a handler or a host's own actor to the transcription service.
#[derive(Message, Clone, Debug, Default)]
#[rtype(result = "Result<SpeechSession, Refusal>")]
pub struct OpenSession {
    /// What is asked.
    pub spec: SessionSpec,
}

/// How the transcription service is. To it from anybody.
#[derive(Message, Clone, Copy, Debug, Default)]
#[rtype(result = "Option<SpeechStatus>")]
pub struct SpeechStatistics;

/// See [`SpeechStatistics`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpeechStatus {
    /// Id of the model.
    pub model: String,
    /// Its weights are in memory.
    pub is_resident: bool,
    /// Bytes of them.
    pub weight_bytes: u64,
    /// Bytes of what is being heard.
    pub state_bytes: u64,
    /// Recordings that are worked on.
    pub running: u64,
    /// Recordings that wait.
    pub queued: u64,
    /// Live sessions that are open.
    pub sessions: u64,
    /// Since the start.
    pub requests: u64,
    /// Given up by their clients.
    pub cancelled: u64,
    /// Loads since the start.
    pub loads: u64,
    /// Unloads since the start.
    pub unloads: u64,
    /// How long the latest load took.
    pub last_load_ms: u64,
}

/// Gives the speech model's weights back, unless somebody needs them: whether it did.
#[derive(Message, Clone, Copy, Debug, Default)]
#[rtype(result = "bool")]
pub struct UnloadSpeech;

/// What became of a model's engine. From the scheduler to the gateway, one a change.
#[derive(Message, Clone)]
#[rtype(result = "()")]
pub(crate) struct EngineState {
    pub(crate) model: String,
    /// Reports of an older life are ignored.
    pub(crate) epoch: Epoch,
    pub(crate) state: EngineCondition,
}

/// See [`EngineState`].
#[derive(Clone)]
pub(crate) enum EngineCondition {
    /// It answers.
    Ready {
        text: Arc<TextModel>,
        /// Most tokens a row can hold.
        context: u32,
        facts: Vec<(String, String)>,
    },
    /// It was lost and is being rebuilt.
    Restarting,
    /// It stays away.
    Failed { message: String },
}

/// A model's engine has a new life; everything of older ones is void. From the
/// scheduler to the prompt cache, one an epoch.
#[derive(Message, Clone, Debug)]
#[rtype(result = "()")]
pub(crate) struct Reset {
    /// Index of the model in the instance.
    pub(crate) model: usize,
    /// What the state of this engine is called on disk, where there is such a tier.
    pub(crate) namespace: Option<Arc<str>>,
    /// What its tokenizer is called.
    pub(crate) text: String,
    /// How its state is written.
    pub(crate) codec: Codec,
}

/// The prompt cache gave rows up: close their sequences. From the prompt cache to the
/// scheduler, which owns the engine.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub(crate) struct CloseReleased;

/// These tokens' state is in the tree of a model; see that it is on disk. From the scheduler to the
/// prompt cache.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub(crate) struct OrderDisk {
    /// Index of the model in the instance.
    pub(crate) model: usize,
    pub(crate) order: DiskOrder,
}

/// Copy the state of `tokens[range]` out. From the prompt cache to the scheduler, which answers with
/// [`DiskOrder::Exported`]; one at a time a model.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub(crate) struct ExportSegment {
    pub(crate) namespace: Namespace,
    pub(crate) tokens: Arc<[TokenId]>,
    pub(crate) range: Range<u32>,
}

/// A segment that was asked for, or `None` where it cannot be had. From the prompt cache to the
/// scheduler.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub(crate) struct SegmentRead {
    pub(crate) read: ReadId,
    pub(crate) pieces: Option<ReadPieces>,
}

/// What the thread that owns the folder has to say. From there to the prompt cache.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub(crate) struct SsdAnswer(pub(crate) SsdEvent);

/// See [`SsdAnswer`].
#[derive(Debug)]
pub(crate) enum SsdEvent {
    /// What the folder holds, or why it cannot be used.
    Opened(Result<(Vec<SegmentHead>, ScanReport), String>),
    Written {
        head: SegmentHead,
    },
    NotWritten {
        message: String,
    },
    Read {
        model: usize,
        read: ReadId,
        id: SegmentId,
        pieces: Option<ReadPieces>,
        message: Option<String>,
        /// The file is no good.
        is_bad: bool,
    },
    Removed {
        message: Option<String>,
    },
}

/// Waits until what is kept is on disk. From the end of an instance.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub(crate) struct FlushDisk;

/// Asks what prompt reuse did so far. From anybody to the prompt cache.
#[derive(Message, Clone, Copy, Debug, Default)]
#[rtype(result = "CacheReport")]
pub struct CacheStatistics;

/// Forgets all that is kept. From anybody to the prompt cache; the reply is the state after.
#[derive(Message, Clone, Copy, Debug, Default)]
#[rtype(result = "CacheReport")]
pub struct ClearCache {
    /// On disk as well, not only in memory.
    pub disk: bool,
}

/// Asks for conversations with kept state. From anybody to the prompt cache.
#[derive(Message, Clone, Debug, Default)]
#[rtype(result = "Vec<SessionReport>")]
pub struct ListSessions {
    /// Whose: an identity made of an API key, or empty.
    pub owner: String,
}

/// A conversation with kept state.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct SessionReport {
    /// The model's id.
    pub model: String,
    /// The client's name for it.
    pub id: String,
    /// Tokens of its newest state; 0 where that was given up meanwhile.
    pub tokens: u32,
    /// Requests so far.
    pub turns: u32,
    /// Time since the last one ended.
    pub idle: Duration,
    /// Neither given up nor forgotten.
    pub pinned: bool,
}

/// Changes a conversation, in all models that know it. From anybody to the prompt cache, which
/// answers whether there is one, and for a pin whether there was room for it.
#[derive(Message, Clone, Debug)]
#[rtype(result = "bool")]
pub struct ChangeSession {
    /// Whose: an identity made of an API key, or empty.
    pub owner: String,
    /// The client's name for it.
    pub id: String,
    /// What is to become of it.
    pub change: SessionChange,
}

/// See [`ChangeSession`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionChange {
    /// Keep its state until it is unpinned, or memory runs out otherwise.
    Pin,
    /// Keep it as long as any other's.
    Unpin,
    /// Give its state up, in memory and on disk, as far as no other conversation shares it.
    Drop,
}

/// Reply of [`CacheStatistics`]: sums over all models of the instance.
#[derive(Clone, PartialEq, Eq, Debug, Default, actix::MessageResponse)]
#[non_exhaustive]
pub struct CacheReport {
    /// What this cache is and is not, in one sentence.
    pub kind: String,
    /// Whether prefixes are kept at all.
    pub enabled: bool,
    /// Ends of kept prefixes.
    pub entries: u64,
    /// Tokens of them, common beginnings once.
    pub tokens: u64,
    /// Requests that found a prefix.
    pub hits: u64,
    /// Requests that found none.
    pub misses: u64,
    /// Prompt tokens that did not have to be computed.
    pub hit_tokens: u64,
    /// Tails given up for newer ones, or for memory.
    pub evicted: u64,
    /// Segments on disk.
    pub ssd_segments: u64,
    /// Bytes of their files.
    pub ssd_bytes: u64,
    /// Most bytes that they may have; 0 without such a tier.
    pub ssd_budget_bytes: u64,
}

/// Refuses new work, waits for what is under way, then ends it. From the drain.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "Drained")]
pub(crate) struct Drain {
    /// How long streams may go on.
    pub(crate) deadline: Duration,
}

/// Nothing is under way any more.
#[derive(Clone, Copy, Debug, actix::MessageResponse)]
pub(crate) struct Drained;

/// Ends an actor of the system's arbiter. From [`crate::actors::Greenroom::stop`].
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub(crate) struct Halt;
