//! Whole workloads in virtual time: chat, agents with long shared prompts, batch jobs, storms of
//! cancels, slow readers. The engine's clock moves with what it computes; nobody sleeps.
//!
//! The bound of a wait that is checked here: a request of class `c` waits at most
//!
//! > climb(c) · ageing + (Q / R + 1) · S
//!
//! where climb is the number of classes above `c`, Q the most requests that were there at once, R
//! the rows, and S the longest time that a request ran: after `climb · ageing` it is in the first
//! class, where clients take turns, and each of the Q others gets R-fold in at most once before it.

use std::sync::Arc;
use std::time::Duration;

use super::bench::{Ask, Bench};
use crate::actors::scheduler::core::Progress;
use crate::actors::scheduler::plan::LEAST_PREFILL;
use crate::actors::scheduler::row::Row;
use crate::model::fake::Script;
use crate::observe::Outcome;
use crate::types::{ChatEvent, Clock, ManualClock, Priority};

const MS: Duration = Duration::from_millis(1);
const ROWS: usize = 8;

/// xorshift64*: any seed but zero.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }
}

/// What a client does.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Habit {
    Reads,
    /// Reads only now and then.
    Slow,
    /// Goes away after so many pieces of text.
    Leaves(u64),
}

#[derive(Clone, Debug)]
struct Arrival {
    at: Duration,
    ask: Ask,
    habit: Habit,
}

/// What became of a request.
#[derive(Clone, Debug, Default)]
struct Fate {
    arrived: Duration,
    first: Option<Duration>,
    ended: Option<Duration>,
    gaps: Vec<Duration>,
    last: Option<Duration>,
    tokens: u64,
}

struct World {
    bench: Bench,
    clock: Arc<ManualClock>,
    arrivals: Vec<Arrival>,
    asked: Vec<Ask>,
    habits: Vec<Habit>,
    fates: Vec<Fate>,
    most: usize,
    /// Time of each step that had both, beside the time of its decode part alone.
    mixed: Vec<(Duration, Duration)>,
}

impl World {
    fn new(arrivals: Vec<Arrival>) -> Self {
        Self::with(arrivals, |script| script)
    }

    fn with(mut arrivals: Vec<Arrival>, change: impl FnOnce(Script) -> Script) -> Self {
        let clock = Arc::new(ManualClock::new());
        // A step of 4 ms, 1 ms a token, 1 us for each position attended to.
        let script = Script::new().takes(4 * MS, MS, clock.clone()).attends(Duration::from_micros(1));
        let bench = Bench::timed(change(script.memory(2_000, 16)), clock.clone(), |config| {
            config.scheduler.max_rows = ROWS;
            config.scheduler.stall_timeout_s = 600;
        });
        arrivals.sort_by_key(|arrival| std::cmp::Reverse(arrival.at));
        Self {
            bench,
            clock,
            arrivals,
            asked: Vec::new(),
            habits: Vec::new(),
            fates: Vec::new(),
            most: 0,
            mixed: Vec::new(),
        }
    }

    fn run(mut self) -> Self {
        let mut steps = 0;
        loop {
            let now = self.clock.now();
            while self.arrivals.last().is_some_and(|arrival| arrival.at <= now) {
                let Some(arrival) = self.arrivals.pop() else { break };
                self.bench.submit(&arrival.ask);
                self.asked.push(arrival.ask);
                self.habits.push(arrival.habit);
                self.fates.push(Fate { arrived: arrival.at, ..Fate::default() });
            }
            self.most = self.most.max(self.bench.live.get());
            let before = self.bench.model.control().records().len();
            let progress = self.bench.step();
            steps += 1;
            assert!(steps < 400_000, "it does not come to an end");
            self.note_step(before, self.clock.now() - now);
            self.read(steps);
            match (progress, self.arrivals.last()) {
                (Progress::More, _) => {}
                (Progress::Idle, None) => break,
                (Progress::Idle, Some(next)) => {
                    let pause = next.at.saturating_sub(self.clock.now());
                    self.clock.advance(pause);
                }
                _ => self.clock.advance(5 * MS),
            }
        }
        // Slow readers may have the last events still before them.
        self.habits.iter_mut().filter(|habit| **habit == Habit::Slow).for_each(|habit| *habit = Habit::Reads);
        self.read(0);
        self
    }

    fn note_step(&mut self, before: usize, took: Duration) {
        let records = &self.bench.model.control().records()[before..];
        let prompt: u32 = records.iter().filter(|record| record.tokens > 1).map(|record| record.tokens).sum();
        let decodes = || records.iter().filter(|record| record.tokens == 1 && record.sampled);
        let decoded = |row: &Row| row.terms.priority > Priority::Background && row.produced() > 1;
        let watched = self.bench.core.running.iter().any(decoded);
        if watched && prompt > LEAST_PREFILL && decodes().count() > 0 {
            let positions = decodes().map(|record| record.start).sum::<u32>();
            let alone = 4 * MS + MS * decodes().count() as u32 + Duration::from_micros(1) * positions;
            self.mixed.push((took, alone));
        }
    }

    fn read(&mut self, step: u64) {
        let now = self.clock.now();
        for (index, fate) in self.fates.iter_mut().enumerate().filter(|(_, fate)| fate.ended.is_none()) {
            let client = &mut self.bench.clients[index];
            if self.habits[index] == Habit::Slow && !step.is_multiple_of(150) {
                continue;
            }
            let before = client.text.len();
            client.read();
            let new = client.text.len() - before;
            if new > 0 {
                fate.first.get_or_insert(now);
                fate.gaps.extend(fate.last.map(|last| now - last));
                fate.last = Some(now);
                fate.tokens += new as u64;
            }
            if !client.ends.is_empty() {
                fate.ended = Some(now);
            }
            if let Habit::Leaves(after) = self.habits[index]
                && fate.tokens >= after
                && fate.ended.is_none()
            {
                client.rx = None;
                fate.ended = Some(now);
            }
        }
    }

    /// What holds after any workload.
    fn check(mut self) {
        let wait = |fate: &Fate| fate.first.or(fate.ended).map(|first| first - fate.arrived);
        let longest = |fate: &Fate| fate.ended.zip(fate.first).map(|(end, first)| end - first);
        let served = self.fates.iter().filter_map(longest).max().unwrap_or_default();
        let rounds = u32::try_from(self.most.div_ceil(ROWS) + 1).unwrap();
        for (index, fate) in self.fates.iter().enumerate() {
            let ends = &self.bench.clients[index].ends;
            match self.habits[index] {
                Habit::Leaves(_) => assert!(ends.len() <= 1),
                _ => assert!(matches!(ends[..], [ChatEvent::Done { .. }]), "{index}: {ends:?}"),
            }
            let bound = Duration::from_secs(20) + rounds * (served + Duration::from_secs(1));
            assert!(
                wait(fate).is_some_and(|wait| wait <= bound),
                "{index} waited {:?} of {bound:?}",
                wait(fate)
            );
        }
        // Learned after the first steps, and then kept.
        let late = self.mixed.iter().skip(20);
        let over = late.filter(|(took, alone)| *took > (*alone * 9 / 5 + MS) * 5 / 4).count();
        assert!(over * 50 <= self.mixed.len(), "{over} of {} steps took too long", self.mixed.len());
        assert_eq!(self.bench.gauges.requests(Outcome::Failed), 0);
        assert_eq!(self.bench.core.accounts.len(), 0);
        self.bench.check_empty();
    }
}

fn text(random: &mut Random, length: u64) -> String {
    (0..length).map(|_| char::from(b'a' + random.below(26) as u8)).collect()
}

fn arrival(at: Duration, ask: Ask) -> Arrival {
    Arrival { at, ask, habit: Habit::Reads }
}

/// People that chat: short prompts, a pause, the next one.
fn chat(random: &mut Random, people: u64, turns: u64) -> Vec<Arrival> {
    let mut arrivals = Vec::new();
    for person in 0..people {
        let mut at = MS * random.below(3000) as u32;
        for _ in 0..turns {
            let length = random.between(10, 80);
            let ask = Ask::new(&text(random, length), random.between(5, 40) as u32);
            arrivals.push(arrival(at, ask.of(&format!("person {person}"), Priority::Interactive)));
            at += MS * random.between(300, 3000) as u32;
        }
    }
    arrivals
}

/// An agent: many requests at once, all with the same long beginning.
fn agent(random: &mut Random, name: &str, rounds: u64, width: u64) -> Vec<Arrival> {
    let common = text(random, 600);
    let mut arrivals = Vec::new();
    for round in 0..rounds {
        for _ in 0..width {
            let ask = Ask::new(&format!("{common}{}", text(random, 40)), random.between(10, 60) as u32);
            arrivals.push(arrival(MS * (2000 * round) as u32, ask.of(name, Priority::Normal)));
        }
    }
    arrivals
}

/// Jobs that nobody waits for.
fn batch(random: &mut Random, jobs: u64) -> Vec<Arrival> {
    let mut job = |_| {
        let length = random.between(100, 1000);
        let ask = Ask::new(&text(random, length), random.between(20, 100) as u32);
        arrival(MS * random.below(2000) as u32, ask.of("batch", Priority::Background))
    };
    (0..jobs).map(&mut job).collect()
}

#[test]
fn a_mix_of_everything_is_served_within_its_bounds() {
    for seed in [1, 2] {
        let mut random = Random(seed);
        let mut arrivals = chat(&mut random, 12, 20);
        arrivals.extend(agent(&mut random, "agent", 12, 20));
        arrivals.extend(batch(&mut random, 60));
        for (index, arrival) in arrivals.iter_mut().enumerate() {
            match index % 11 {
                3 => arrival.habit = Habit::Leaves(random.below(8)),
                7 => arrival.habit = Habit::Slow,
                _ => {}
            }
        }
        World::new(arrivals).run().check();
    }
}

#[test]
fn a_storm_of_cancels_leaves_nothing_behind() {
    let mut random = Random(7);
    let mut arrivals = Vec::new();
    for round in 0..40u32 {
        for number in 0..40u64 {
            let length = random.between(5, 300);
            let ask = Ask::new(&text(&mut random, length), 50)
                .of(&format!("{}", number % 5), Priority::ALL[number as usize % 3]);
            let habit = if number % 8 == 0 { Habit::Reads } else { Habit::Leaves(random.below(3)) };
            arrivals.push(Arrival { at: MS * (round * 400), ask, habit });
        }
    }
    World::with(arrivals.clone(), Script::overlaps).run().check();
    World::new(arrivals).run().check();
}

#[test]
fn a_person_does_not_wait_behind_an_agents_twenty_requests() {
    let mut random = Random(3);
    let mut arrivals = agent(&mut random, "agent", 6, 20);
    let people = chat(&mut random, 1, 12);
    let me: Vec<Duration> = people.iter().map(|arrival| arrival.at).collect();
    arrivals.extend(people);
    let world = World::new(arrivals).run();
    let waits: Vec<Duration> = world
        .fates
        .iter()
        .zip(&world.bench.clients)
        .filter(|(fate, _)| me.contains(&fate.arrived))
        .filter_map(|(fate, _)| Some(fate.first? - fate.arrived))
        .collect();
    assert!(waits.iter().all(|wait| *wait < Duration::from_secs(2)), "{waits:?}");
    world.check();
}

#[test]
fn equal_clients_are_served_equally_however_much_they_ask() {
    let mut random = Random(5);
    let mut arrivals = Vec::new();
    for (client, requests) in [("a", 60), ("b", 30), ("c", 200), ("d", 30)] {
        for _ in 0..requests {
            let ask = Ask::new(&text(&mut random, 60), 40).of(client, Priority::Normal);
            arrivals.push(arrival(Duration::ZERO, ask));
        }
    }
    let world = World::new(arrivals).run();
    let names: Vec<String> = world.asked.iter().map(|ask| ask.terms.client.0.clone()).collect();
    // As long as all four have requests: until the first of them has got all.
    let end = |name: &str| {
        let mine = world.fates.iter().zip(&names).filter(|(_, client)| *client == name);
        mine.filter_map(|(fate, _)| fate.ended).max().unwrap_or_default()
    };
    let together = ["a", "b", "c", "d"].map(end).into_iter().min().unwrap();
    let service = ["a", "b", "c", "d"].map(|name| {
        let mine = world.fates.iter().zip(&names).filter(|(_, client)| *client == name);
        mine.filter(|(fate, _)| fate.ended.is_some_and(|end| end <= together))
            .map(|(fate, _)| fate.tokens as f64)
            .sum::<f64>()
    });
    let (sum, squares) = (service.iter().sum::<f64>(), service.iter().map(|x| x * x).sum::<f64>());
    let jain = sum * sum / (4.0 * squares);
    eprintln!("Jain's index of four clients: {jain:.4}");
    assert!(jain > 0.97, "{jain}: {service:?}");
    world.check();
}
