//! When a client that found no place should come back. Pure: times come in as arguments.
//!
//! Places become free as requests leave. How fast they do is measured while more requests
//! are here than are computed together, which is when it is limited by the engine and not
//! by what is asked; before that, from how long requests take. Clients that were told to
//! come back keep their turn: each gets a place further, however often it asks again.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::types::ClientId;

/// What a client is told before anything is known.
const FIRST: Duration = Duration::from_secs(2);
/// No client is told to wait less.
const SHORTEST: Duration = Duration::from_secs(1);
/// No client is told to wait longer.
const LONGEST: Duration = Duration::from_secs(60);
/// How far back the rate is measured.
const WINDOW: Duration = Duration::from_secs(60);
/// Time between two samples, and the shortest that a rate is worth anything over.
const SAMPLE: Duration = Duration::from_secs(1);
/// Most clients whose turn is remembered.
const MAX_CLIENTS: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct RetryAdvice {
    /// When, and how many had left by then; the oldest first.
    samples: VecDeque<(Duration, u64)>,
    /// When clients were told to come back.
    told: HashMap<ClientId, Duration>,
}

impl RetryAdvice {
    /// Notes that `left` requests have left so far. `full`: some wait that are not computed.
    pub(crate) fn note(&mut self, now: Duration, full: bool, left: u64) {
        if !full {
            self.samples.clear();
        }
        while self.samples.get(1).is_some_and(|(at, _)| now.saturating_sub(*at) >= WINDOW) {
            self.samples.pop_front();
        }
        if self.samples.back().is_none_or(|(at, _)| now.saturating_sub(*at) >= SAMPLE) {
            self.samples.push_back((now, left));
        }
    }

    /// How long a client should wait that was refused with `live` requests here.
    pub(crate) fn refuse(
        &mut self,
        client: &ClientId,
        now: Duration,
        live: usize,
        left: u64,
        average: Option<Duration>,
    ) -> Duration {
        self.told.retain(|_, due| *due > now);
        if let Some(due) = self.told.get(client) {
            return due.saturating_sub(now).clamp(SHORTEST, LONGEST);
        }
        // In steady state, `live` requests leave in the time that one takes.
        let live = u32::try_from(live.max(1)).unwrap_or(u32::MAX);
        let known = self.measured(now, left).or(average.map(|average| average / live));
        let ahead = u32::try_from(self.told.len()).unwrap_or(u32::MAX);
        let wait = known.map_or(FIRST, |gap| gap.saturating_mul(ahead.saturating_add(1)));
        let wait = wait.clamp(SHORTEST, LONGEST);
        if self.told.len() < MAX_CLIENTS {
            self.told.insert(client.clone(), now.saturating_add(wait));
        }
        wait
    }

    /// A client got a place: others move up.
    pub(crate) fn accept(&mut self, client: &ClientId) {
        self.told.remove(client);
    }

    /// Time between two that leave, over the window.
    fn measured(&self, now: Duration, left: u64) -> Option<Duration> {
        let (since, before) = self.samples.front()?;
        let (time, count) = (now.saturating_sub(*since), left.saturating_sub(*before));
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        (time >= SAMPLE && count > 0).then(|| time / count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn client(name: &str) -> ClientId {
        ClientId(name.into())
    }

    #[test]
    fn the_wait_follows_the_measured_rate_and_not_the_time_of_a_request() {
        let mut advice = RetryAdvice::default();
        assert_eq!(advice.refuse(&client("a"), s(0), 16, 0, None), FIRST);
        assert_eq!(advice.refuse(&client("b"), s(3), 16, 0, Some(s(64))), s(4), "16 leave in 64 s");
        advice.note(s(10), true, 100);
        advice.note(s(40), true, 106);
        assert_eq!(advice.refuse(&client("c"), s(40), 16, 106, Some(s(640))), s(5), "6 left in 30 s");
        assert_eq!(advice.refuse(&client("d"), s(100), 16, 1_000_000, None), SHORTEST);
    }

    #[test]
    fn only_what_left_lately_and_while_some_waited_counts() {
        let mut advice = RetryAdvice::default();
        for (at, full, left) in [(0, true, 0), (1, true, 1000), (61, true, 1020)] {
            advice.note(s(at), full, left);
        }
        assert_eq!(advice.refuse(&client("a"), s(61), 4, 1020, None), s(3), "20 in a minute");
        advice.note(s(200), false, 1020);
        advice.note(s(210), true, 1022);
        assert_eq!(advice.refuse(&client("a"), s(210), 4, 1022, None), s(5), "2 since it was not full");
    }

    #[test]
    fn each_client_gets_its_turn_and_keeps_it_however_often_it_asks() {
        let mut advice = RetryAdvice::default();
        let ask =
            |advice: &mut RetryAdvice, name: &str, now| advice.refuse(&client(name), now, 1, 0, Some(s(10)));
        assert_eq!(ask(&mut advice, "a", s(0)), s(10));
        assert_eq!(ask(&mut advice, "b", s(0)), s(20));
        assert_eq!(ask(&mut advice, "a", s(4)), s(6));
        assert_eq!(ask(&mut advice, "c", s(4)), s(30));
        advice.accept(&client("a"));
        assert_eq!(ask(&mut advice, "d", s(4)), s(30), "one less is before it");
        for number in 0..5000 {
            assert!(ask(&mut advice, &number.to_string(), s(5)) <= LONGEST);
        }
        assert!(advice.told.len() <= MAX_CLIENTS);
    }
}
