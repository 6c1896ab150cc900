//! What every route gets: the instance's handles, the settings, the rules for pages.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::body::LARGE_BODIES;
use super::guard::Guard;
use super::responses::Store;
use crate::actors::Handles;
use crate::config::HttpConfig;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(super) struct State {
    pub(super) handles: Handles,
    pub(super) config: Arc<HttpConfig>,
    pub(super) guard: Arc<Guard>,
    /// Places for large bodies, of all connections together.
    pub(super) large_bodies: Arc<Semaphore>,
    /// Responses that can be gone on from.
    pub(super) responses: Arc<Store>,
}

impl State {
    pub(super) fn new(handles: Handles, config: &HttpConfig) -> Self {
        Self {
            handles,
            config: Arc::new(config.clone()),
            guard: Arc::new(Guard::new(config)),
            large_bodies: Arc::new(Semaphore::new(LARGE_BODIES)),
            responses: Arc::default(),
        }
    }
}
