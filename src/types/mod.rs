//! Plain data that crosses layers: ids, requests, sampling, events, errors.
//!
//! A leaf: imports no other layer, knows neither HTTP nor tensors nor the actor
//! framework. Everything here is validated once, where it enters the process.

pub mod cache_terms;
pub mod clock;
pub mod error;
pub mod event;
pub mod ids;
pub mod output;
pub mod request;
pub mod sampling;
pub mod size;
pub mod speech;
pub mod terms;
pub mod ticket;
pub mod trace;

pub use cache_terms::{CacheTerms, MAX_BREAKPOINTS, MAX_NAME_BYTES};
pub use clock::{Clock, ManualClock, SystemClock};
pub use error::{EngineError, LoadError, PrepareError, Refusal};
pub use event::{
    CallEvent, ChatEvent, Failure, FailureReason, FinishReason, ScoredToken, Timings, TokenScores, Usage,
};
pub use ids::{Epoch, RequestId, SequenceId, TokenId};
pub use output::OutputEvent;
pub use request::{
    ChatMessage, ChatRequest, ClientId, PreparedPrompt, ReadAnswer, Role, StopRules, ToolCall, ToolChoice,
};
pub use sampling::{Range, SamplingOptions, SamplingParams};
pub use size::ByteSize;
pub use terms::{Priority, Terms};
pub use ticket::{LiveCount, Ticket, TicketOffice};
pub use trace::{Trace, TraceEvent, TraceOrigin, TraceRecord, TraceRing, TraceValue};
