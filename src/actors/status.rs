//! What the instance says about itself: health and the table of models.
//!
//! Written by the gateway (and the drain), read by anybody without a message: health
//! through a watch channel, the table through a lock that is held for a copy.

use std::sync::RwLock;
use std::time::SystemTime;

use tokio::sync::watch;

/// State of the whole instance.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Health {
    /// A model is being loaded for the first time.
    Loading,
    /// Every model answers.
    Ready,
    /// An engine was lost and is being rebuilt.
    Restarting,
    /// Going down: nothing new is accepted.
    Draining,
    /// A model cannot be brought up (again), or a step hangs. A server should drain and exit.
    Failed {
        /// Why, for the operator.
        message: String,
    },
}

/// State of one model.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ModelState {
    /// Being loaded for the first time.
    Loading,
    /// Answers.
    Ready,
    /// Its engine was lost and is being rebuilt.
    Restarting,
    /// It cannot be brought up.
    Failed {
        /// Why, for the operator.
        message: String,
    },
}

/// A model as `/v1/models` lists it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct ModelStatus {
    /// Its id in the API.
    pub id: String,
    /// Whether it answers.
    pub state: ModelState,
    /// Most tokens of prompt and answer together; known once loaded.
    pub context: Option<u32>,
    /// Facts for people: family, format, device and so on, in order.
    pub facts: Vec<(String, String)>,
    /// When it was registered.
    pub created: SystemTime,
}

/// The board on which state is written for everybody to read.
#[derive(Debug)]
pub(crate) struct Board {
    models: RwLock<Vec<ModelStatus>>,
    draining: watch::Sender<bool>,
    health: watch::Sender<Health>,
    /// What the watchdog says.
    hung: RwLock<Option<String>>,
}

impl Board {
    pub(crate) fn new(ids: &[String], created: SystemTime) -> Self {
        let models: Vec<_> = ids
            .iter()
            .map(|id| ModelStatus {
                id: id.clone(),
                state: ModelState::Loading,
                context: None,
                facts: Vec::new(),
                created,
            })
            .collect();
        // Without chat models nothing is waited for: a speech model loads when it is needed.
        let health = derive(false, &models);
        Self {
            models: RwLock::new(models),
            draining: watch::Sender::new(false),
            health: watch::Sender::new(health),
            hung: RwLock::new(None),
        }
    }

    pub(crate) fn models(&self) -> Vec<ModelStatus> {
        self.models.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    pub(crate) fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    pub(crate) fn watch_health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    pub(crate) fn set_draining(&self) {
        self.draining.send_replace(true);
        self.publish();
    }

    /// Changes one model's entry and derives health anew.
    pub(crate) fn update(&self, id: &str, change: impl FnOnce(&mut ModelStatus)) {
        {
            let mut models = self.models.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(model) = models.iter_mut().find(|model| model.id == id) {
                change(model);
            }
        }
        self.publish();
    }

    /// A step hangs, or moves on after all.
    pub(crate) fn set_hung(&self, message: Option<String>) {
        *self.hung.write().unwrap_or_else(std::sync::PoisonError::into_inner) = message;
        self.publish();
    }

    fn publish(&self) {
        let hung = self.hung.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let health = match hung {
            Some(message) => Health::Failed { message },
            None => derive(self.is_draining(), &self.models()),
        };
        self.health.send_if_modified(|old| {
            let changed = *old != health;
            *old = health;
            changed
        });
    }
}

/// The worst of all models, draining before everything but a failure.
fn derive(draining: bool, models: &[ModelStatus]) -> Health {
    let failed = models.iter().find_map(|model| match &model.state {
        ModelState::Failed { message } => Some(message.clone()),
        _ => None,
    });
    if let Some(message) = failed {
        return Health::Failed { message };
    }
    if draining {
        return Health::Draining;
    }
    let any = |state: ModelState| models.iter().any(|model| model.state == state);
    if any(ModelState::Restarting) {
        Health::Restarting
    } else if any(ModelState::Loading) {
        Health::Loading
    } else {
        Health::Ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_the_worst_of_all_models() {
        let board = Board::new(&["a".into(), "b".into()], SystemTime::UNIX_EPOCH);
        assert_eq!(board.health(), Health::Loading);
        board.update("a", |model| model.state = ModelState::Ready);
        assert_eq!(board.health(), Health::Loading);
        board.update("b", |model| model.state = ModelState::Ready);
        assert_eq!(board.health(), Health::Ready);
        board.update("a", |model| model.state = ModelState::Restarting);
        assert_eq!(board.health(), Health::Restarting);
        board.set_draining();
        assert_eq!(board.health(), Health::Draining);
        board.update("a", |model| model.state = ModelState::Failed { message: "gone".into() });
        assert_eq!(board.health(), Health::Failed { message: "gone".into() });
    }
}
