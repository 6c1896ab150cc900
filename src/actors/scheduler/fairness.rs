//! Who comes next. Pure: no row, no engine, no time of its own.
//!
//! The most urgent class first; a request rises by one class for each `ageing` that it has waited,
//! so every class's wait is bounded. Within a class clients take turns by **virtual token
//! counters** (Sheng et al., "Fairness in Serving Large Language Models", 2024): the client with
//! the least service is next, and one that was away begins at the least counter of those that are
//! here, so that nobody saves service up or is punished for having been alone. Within a client the
//! shortest work first, except that what has waited for [`PATIENCE`] times `ageing` goes before
//! it, in order of arrival.

use std::collections::HashMap;
use std::time::Duration;

use crate::types::{ClientId, Priority};

/// What a prompt token counts.
pub(crate) const PROMPT_SERVICE: u64 = 1;
/// What a produced token counts: it costs a pass over the weights.
pub(crate) const OUTPUT_SERVICE: u64 = 4;
/// What a client that comes back can be ahead of the one served least: one that is hardly served
/// at all, as it does not read, must not keep others out for long.
const MAX_LEAD: u64 = 32_768;
/// Clients without requests that are remembered, at most.
const MAX_REMEMBERED: usize = 1024;
/// Shortest-first ends for a request after so many times `ageing`.
const PATIENCE: u32 = 2;

/// A client that has requests here.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    served: u64,
    /// Its requests, waiting or running.
    requests: usize,
    /// Those running.
    running: usize,
}

/// What each client got so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accounts {
    clients: HashMap<ClientId, Account>,
}

impl Accounts {
    /// A request of this client has come.
    pub(crate) fn enter(&mut self, client: &ClientId) {
        let least = self.least().unwrap_or(0);
        let account = self.clients.entry(client.clone()).or_default();
        if account.requests == 0 {
            account.served = account.served.clamp(least, least.saturating_add(MAX_LEAD));
        }
        account.requests += 1;
    }

    /// A request of this client has ended. A client without requests is remembered as long as it
    /// is ahead of one that has some: whoever sends one request after the other must not begin
    /// anew with each.
    pub(crate) fn leave(&mut self, client: &ClientId) {
        if let Some(account) = self.clients.get_mut(client) {
            account.requests = account.requests.saturating_sub(1);
        }
        self.forget_idle();
    }

    /// Counts anew whose requests there are, none of them running.
    pub(crate) fn recount<'a>(&mut self, clients: impl Iterator<Item = &'a ClientId>) {
        for account in self.clients.values_mut() {
            (account.requests, account.running) = (0, 0);
        }
        for client in clients {
            self.clients.entry(client.clone()).or_default().requests += 1;
        }
        self.forget_idle();
    }

    /// The least that a client with requests was served.
    fn least(&self) -> Option<u64> {
        self.clients.values().filter(|account| account.requests > 0).map(|account| account.served).min()
    }

    fn forget_idle(&mut self) {
        let least = self.least();
        let ahead = |served: u64| least.is_some_and(|least| served > least);
        self.clients.retain(|_, account| account.requests > 0 || ahead(account.served));
        let idle = self.clients.values().filter(|account| account.requests == 0).count();
        if idle > MAX_REMEMBERED {
            self.clients.retain(|_, account| account.requests > 0);
        }
    }

    /// A request of this client begins to run, or goes on.
    pub(crate) fn start(&mut self, client: &ClientId) {
        if let Some(account) = self.clients.get_mut(client) {
            account.running += 1;
        }
    }

    /// A running request of this client has stopped.
    pub(crate) fn stop(&mut self, client: &ClientId) {
        if let Some(account) = self.clients.get_mut(client) {
            account.running = account.running.saturating_sub(1);
        }
    }

    /// Charges service; see [`PROMPT_SERVICE`] and [`OUTPUT_SERVICE`].
    pub(crate) fn charge(&mut self, client: &ClientId, service: u64) {
        if let Some(account) = self.clients.get_mut(client) {
            account.served = account.served.saturating_add(service);
        }
    }

    /// The client's counter.
    pub(crate) fn served(&self, client: &ClientId) -> u64 {
        self.clients.get(client).map_or(0, |account| account.served)
    }

    /// The client's running requests.
    pub(crate) fn running(&self, client: &ClientId) -> usize {
        self.clients.get(client).map_or(0, |account| account.running)
    }

    /// Clients that are remembered.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.clients.len()
    }
}

/// A waiting request, as far as its place depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// Arrival: greater = younger.
    pub(crate) order: u64,
    /// Its own class.
    pub(crate) priority: Priority,
    /// Time spent waiting, earlier stretches included.
    pub(crate) waited: Duration,
    /// Tokens to be computed before it produces one.
    pub(crate) owed: u32,
    /// Whose it is.
    pub(crate) client: &'a ClientId,
}

impl Candidate<'_> {
    /// Its class, with age.
    pub(crate) fn level(&self, ageing: Duration) -> Priority {
        level(self.priority, self.waited, ageing)
    }

    /// Smaller = sooner.
    pub(crate) fn place(&self, accounts: &Accounts, ageing: Duration) -> (usize, u64, bool, u64, u64) {
        let overdue = self.waited >= ageing.saturating_mul(PATIENCE);
        let length = if overdue { 0 } else { u64::from(self.owed) };
        (self.level(ageing).rank(), accounts.served(self.client), !overdue, length, self.order)
    }
}

/// A class, with age.
pub(crate) fn level(priority: Priority, waited: Duration, ageing: Duration) -> Priority {
    let steps = waited.as_nanos() / ageing.as_nanos().max(1);
    priority.raised(u64::try_from(steps).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGEING: Duration = Duration::from_secs(10);

    fn client(name: &str) -> ClientId {
        ClientId(name.into())
    }

    fn next(accounts: &Accounts, candidates: &[Candidate<'_>]) -> u64 {
        candidates.iter().min_by_key(|one| one.place(accounts, AGEING)).unwrap().order
    }

    fn candidate(order: u64, priority: Priority, client: &ClientId) -> Candidate<'_> {
        Candidate { order, priority, waited: Duration::ZERO, owed: 10, client }
    }

    #[test]
    fn urgent_ones_go_first_until_others_have_aged() {
        let (accounts, me) = (Accounts::default(), client("me"));
        let slow = candidate(1, Priority::Background, &me);
        let fast = candidate(2, Priority::Interactive, &me);
        assert_eq!(next(&accounts, &[slow, fast]), 2);
        assert_eq!(next(&accounts, &[Candidate { waited: AGEING, ..slow }, fast]), 2);
        assert_eq!(next(&accounts, &[Candidate { waited: 2 * AGEING, ..slow }, fast]), 1);
    }

    #[test]
    fn short_work_goes_first_until_long_work_is_overdue() {
        let (accounts, me) = (Accounts::default(), client("me"));
        let long = Candidate { owed: 5000, ..candidate(1, Priority::Interactive, &me) };
        let short = candidate(2, Priority::Interactive, &me);
        assert_eq!(next(&accounts, &[long, short]), 2);
        assert_eq!(next(&accounts, &[Candidate { waited: 2 * AGEING, ..long }, short]), 1);
    }

    #[test]
    fn the_client_with_least_service_is_next_and_a_newcomer_saves_nothing_up() {
        let mut accounts = Accounts::default();
        let (agent, person) = (client("agent"), client("person"));
        accounts.enter(&agent);
        accounts.charge(&agent, 1000);
        accounts.enter(&person);
        assert_eq!(accounts.served(&person), 1000, "not 1000 tokens ahead of the agent");
        accounts.charge(&agent, 1);
        let of_agent = candidate(1, Priority::Normal, &agent);
        let of_person = candidate(2, Priority::Normal, &person);
        assert_eq!(next(&accounts, &[of_agent, of_person]), 2);
        accounts.charge(&person, 2);
        assert_eq!(next(&accounts, &[of_agent, of_person]), 1);
    }

    /// One client sends long requests, each after the one before it; the other has many short ones.
    #[test]
    fn who_sends_one_request_after_the_other_pays_for_all_of_them() {
        let mut accounts = Accounts::default();
        let (long, short) = (client("long"), client("short"));
        let mut got = [0, 0];
        (0..40).for_each(|_| accounts.enter(&short));
        accounts.enter(&long);
        for _ in 0..40 {
            let mine = candidate(1, Priority::Normal, &long);
            let other = candidate(2, Priority::Normal, &short);
            let (who, service) = if next(&accounts, &[mine, other]) == 1 { (0, 1000) } else { (1, 100) };
            let served = [&long, &short][who];
            got[who] += service;
            accounts.charge(served, service);
            accounts.leave(served);
            if who == 0 {
                accounts.enter(&long);
            }
        }
        assert!(got[0] <= got[1] + 1000, "{got:?}");
    }

    #[test]
    fn what_a_client_had_before_it_left_keeps_it_out_for_a_bounded_time() {
        let mut accounts = Accounts::default();
        let (idle, heavy, new) = (client("idle"), client("heavy"), client("new"));
        accounts.enter(&idle);
        accounts.enter(&heavy);
        accounts.charge(&heavy, 10 * MAX_LEAD);
        accounts.leave(&heavy);
        accounts.enter(&heavy);
        accounts.enter(&new);
        assert_eq!(accounts.served(&heavy) - accounts.served(&new), MAX_LEAD);
    }

    #[test]
    fn what_was_lost_is_counted_anew() {
        let mut accounts = Accounts::default();
        let (here, gone) = (client("here"), client("gone"));
        accounts.enter(&here);
        accounts.enter(&here);
        accounts.start(&here);
        accounts.enter(&gone);
        accounts.charge(&here, 50);
        accounts.recount([&here].into_iter());
        assert_eq!((accounts.len(), accounts.running(&here), accounts.served(&here)), (1, 0, 50));
        accounts.leave(&here);
        assert_eq!(accounts.len(), 0);
    }

    #[test]
    fn a_client_without_requests_is_forgotten() {
        let mut accounts = Accounts::default();
        let me = client("me");
        accounts.enter(&me);
        accounts.enter(&me);
        accounts.start(&me);
        accounts.leave(&me);
        assert_eq!((accounts.len(), accounts.running(&me)), (1, 1));
        accounts.stop(&me);
        accounts.leave(&me);
        assert_eq!((accounts.len(), accounts.served(&me)), (0, 0));
    }
}
