//! Messages and orchestration, no tensor code.
//!
//! # Messages
//!
//! `→` is a `send` whose reply is awaited, `⇢` is fire and forget.
//!
//! | from → to | message | reply | bounded by |
//! |---|---|---|---|
//! | handler or host → gateway | [`CountTokens`] | `Result<u32, Refusal>` | a place, while the prompt is made |
//! | handler or host → gateway | [`OpenChat`] | `Result<ChatStream, Refusal>` | tickets: rows + queue, taken without waiting |
//! | gateway → preparation pool | `Prepare` | `Result<Prepared, Refusal>` | ticket moves in, and back with the reply |
//! | gateway → scheduler | `Admit` | `Result<Accepted, Refusal>`, at once | ticket moves in |
//! | anybody with a ticket → scheduler | `RunNative` | `Result<Accepted, Refusal>`, at once | ticket moves in |
//! | loader thread ⇢ scheduler | `Loaded` | – | one a load |
//! | handler or host → transcription | [`Transcribe`] | `Result<TranscriptStream, Refusal>`, at once | places: running + queue, taken without waiting |
//! | handler or host → transcription | [`OpenSession`] | [`SpeechSession`], at once | open sessions; a session bounds the audio that waits |
//! | anybody → transcription | [`SpeechStatistics`], [`UnloadSpeech`] | at once | – |
//! | scheduler ⇢ gateway | `EngineState` | – | one a change |
//! | scheduler ⇢ prompt cache | `Reset` | – | one an epoch |
//! | prompt cache ⇢ scheduler | `CloseReleased` | – | one an order to clear |
//! | scheduler ⇢ prompt cache | `OrderDisk` | – | two a read under way, one a deposit or half a thousand tokens of a prompt |
//! | prompt cache ⇢ scheduler | `ExportSegment`, `SegmentRead` | – | one at a time a model; one a segment asked for |
//! | folder's thread ⇢ prompt cache | `SsdAnswer` | – | one a job |
//! | stop → prompt cache | `FlushDisk` | `()`, once all is written | one |
//! | anybody → prompt cache | [`CacheStatistics`], [`ClearCache`] | `CacheReport`, at once | – |
//! | anybody → prompt cache | [`ListSessions`], [`ChangeSession`] | at once | – |
//! | drain → gateway, schedulers, transcription | `Drain` | `Drained` | one |
//! | stop → gateway | `Halt` | `()` | one |
//!
//! Not messages: tokens (a bounded channel a request with one slot reserved for the
//! terminal event), cancellation (a dropped receiver), liveness and metrics (atomics),
//! configuration.

pub(crate) mod gateway;
pub(crate) mod loader;
pub mod messages;
pub(crate) mod preparation;
pub(crate) mod prompt_cache;
pub(crate) mod retry;
pub(crate) mod scheduler;
pub(crate) mod ssd_writer;
pub mod status;
pub(crate) mod stream;
pub(crate) mod threads;
pub(crate) mod transcription;
pub(crate) mod turns;
pub(crate) mod watchdog;
pub mod wiring;

pub use messages::{
    CacheReport, CacheStatistics, ChangeSession, ChatStream, ClearCache, CountTokens, ListSessions, OpenChat,
    OpenSession, SessionChange, SessionReport, SpeechStatistics, SpeechStatus, Transcribe, TranscriptStream,
    UnloadSpeech,
};
pub use scheduler::restart::RestartPolicy;
pub use status::{Health, ModelState, ModelStatus};
pub use transcription::{SessionReader, SpeechSession};
pub use wiring::{Greenroom, GreenroomBuilder, Handles, StartError};
