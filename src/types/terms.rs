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

    /// Its place in [`Self::ALL`]: 0 = the most urgent.
    pub fn rank(self) -> usize {
        2 - self as usize
    }

    /// The class that a request of this one counts as after so many steps of ageing.
    #[must_use]
    pub fn raised(self, steps: u64) -> Self {
        let rank = self.rank().saturating_sub(usize::try_from(steps).unwrap_or(usize::MAX));
        Self::ALL[rank]
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_ordered_named_and_rise_with_age() {
        assert!(Priority::ALL.is_sorted_by(|more, less| more > less));
        for (rank, priority) in Priority::ALL.into_iter().enumerate() {
            assert_eq!((priority.rank(), Priority::named(priority.as_str())), (rank, Some(priority)));
        }
        let raised = |steps| Priority::Background.raised(steps);
        assert_eq!(
            [raised(0), raised(1), raised(2)],
            [Priority::Background, Priority::Normal, Priority::Interactive]
        );
        assert_eq!(raised(u64::MAX), Priority::Interactive);
    }
}
