//! `TranscriptionService`: speech, once there is a speech model. On the compute thread.
//!
//! There is none yet: it says so to everyone who asks.

use actix::prelude::*;

use crate::actors::messages::{Transcribe, Transcript};
use crate::types::Refusal;

/// See the module.
pub(crate) struct TranscriptionService;

impl Actor for TranscriptionService {
    type Context = Context<Self>;
}

impl Handler<Transcribe> for TranscriptionService {
    type Result = Result<Transcript, Refusal>;

    fn handle(&mut self, _: Transcribe, _: &mut Self::Context) -> Self::Result {
        Err(Refusal::NotAvailable {
            message: "no speech model is loaded: this version answers chat requests only".into(),
        })
    }
}
