//! On what terms a request is served: for whom, how urgently, by when.

use std::time::Duration;

use super::request::ClientId;

/// How urgent a request is. Greater = sooner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// Work that nobody waits for: gives way to all others, may be paused or set back.
    Background,
    /// The usual.
    #[default]
    Normal,
    /// Somebody sits in front of it.
    Interactive,
}

impl Priority {
    /// All of them, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Interactive, Self::Normal, Self::Background];

    /// Its name in requests and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Normal => "normal",
            Self::Background => "background",
        }
    }

    /// The priority of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.as_str() == name)
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Terms {
    /// Whom it is charged to: clients of one priority take turns.
    pub client: ClientId,
    /// Its class.
    pub priority: Priority,
    /// When it must have ended, on the clock's scale; then it is given up.
    pub deadline: Option<Duration>,
}
