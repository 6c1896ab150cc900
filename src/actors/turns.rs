//! Turns on the compute thread: who may use it now, and for how long.
//!
//! One [`ComputeTurns`] a thread, one [`Lane`] for each kind of work: a model's steps, its native
//! jobs, speech. A lane that has work asks for a turn, gets it when it has used the least **measured
//! time for its weight** among those that ask (stride scheduling by virtual time), and is charged
//! when the turn is dropped. A lane that was idle begins at the least virtual time of those in use,
//! or without any where the last ones were, so it neither saved time up nor is it ever behind by
//! what it used before. Before each turn the runtime polls its driver: timers, mail and neighbours
//! are never locked out.
//!
//! A turn says how long it may last: about as long as the others' turns do, so that work in slices
//! never holds a stream up for longer than one of its own steps; without others, any time.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::types::Clock;

/// A lane counts as in use for so long after its last turn.
const IN_USE: Duration = Duration::from_millis(250);
/// No budget is shorter or longer than these, while others are in use.
const LEAST_BUDGET: Duration = Duration::from_millis(2);
const MOST_BUDGET: Duration = Duration::from_millis(100);
/// Weight of the latest turn in the moving average of a lane's turns.
const NEWEST: f64 = 0.25;

#[derive(Debug, Default)]
struct Seat {
    open: bool,
    /// Nobody waits for it: others' turns are not cut short for its sake.
    is_background: bool,
    weight: f64,
    /// Seconds used, divided by the weight.
    used: f64,
    /// Moving average of its turns, seconds.
    typical: f64,
    last: Option<Duration>,
    asking: Option<Waker>,
}

#[derive(Debug)]
struct State {
    clock: Arc<dyn Clock>,
    seats: Vec<Seat>,
    taken: bool,
    /// Turns that ended.
    ended: u64,
    /// The most that a lane had used when it got a turn: where one begins when no other is in use.
    virtual_time: f64,
}

impl State {
    /// The asking lane whose turn it is.
    fn next(&self) -> Option<usize> {
        let asking = self.seats.iter().enumerate().filter(|(_, seat)| seat.asking.is_some());
        asking.min_by(|(_, one), (_, other)| one.used.total_cmp(&other.used)).map(|(index, _)| index)
    }

    fn in_use(&self, index: usize, now: Duration) -> bool {
        let seat = &self.seats[index];
        seat.open
            && (seat.asking.is_some() || seat.last.is_some_and(|last| now.saturating_sub(last) < IN_USE))
    }

    /// A lane asks after a while without turns.
    fn catch_up(&mut self, index: usize, now: Duration) {
        if self.in_use(index, now) {
            return;
        }
        let others = (0..self.seats.len()).filter(|other| *other != index && self.in_use(*other, now));
        let least = others.map(|other| self.seats[other].used).min_by(f64::total_cmp);
        let seat = &mut self.seats[index];
        seat.used = seat.used.max(least.unwrap_or(self.virtual_time));
    }

    fn budget(&self, index: usize, now: Duration) -> Option<Duration> {
        let waits = |other: &usize| *other != index && !self.seats[*other].is_background;
        let others = (0..self.seats.len()).filter(|other| waits(other) && self.in_use(*other, now));
        let longest = others.map(|other| self.seats[other].typical).max_by(f64::total_cmp)?;
        let typical = Duration::try_from_secs_f64(longest).unwrap_or(MOST_BUDGET);
        Some(typical.clamp(LEAST_BUDGET, MOST_BUDGET))
    }

    fn wake_next(&self) {
        if !self.taken
            && let Some(waker) = self.next().and_then(|index| self.seats[index].asking.as_ref())
        {
            waker.wake_by_ref();
        }
    }
}

/// See the module. Clones share one state; it stays on its thread.
#[derive(Clone, Debug)]
pub(crate) struct ComputeTurns {
    state: Rc<RefCell<State>>,
}

impl ComputeTurns {
    /// Turns by this clock; no lane yet.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            state: Rc::new(RefCell::new(State {
                clock,
                seats: Vec::new(),
                taken: false,
                ended: 0,
                virtual_time: 0.0,
            })),
        }
    }

    /// One more kind of work. With twice the weight it gets twice the time while all ask.
    pub(crate) fn lane(&self, weight: f64) -> Lane {
        self.seat(weight, false)
    }

    /// The same for what nobody waits for, in turns that are short by themselves: others' turns are as
    /// long as without it.
    pub(crate) fn background(&self, weight: f64) -> Lane {
        self.seat(weight, true)
    }

    fn seat(&self, weight: f64, is_background: bool) -> Lane {
        let mut state = self.state.borrow_mut();
        let seat = Seat { open: true, is_background, weight: weight.max(0.01), ..Seat::default() };
        let index = state.seats.iter().position(|seat| !seat.open).unwrap_or(state.seats.len());
        if index == state.seats.len() {
            state.seats.push(seat);
        } else {
            state.seats[index] = seat;
        }
        Lane { turns: self.clone(), index }
    }
}

/// A kind of work on the compute thread. It asks for one turn at a time.
#[derive(Debug)]
pub(crate) struct Lane {
    turns: ComputeTurns,
    index: usize,
}

impl Lane {
    /// The lane's next turn, when it comes.
    ///
    /// # Cancellation
    /// Safe: it asks no more.
    pub(crate) fn turn(&self) -> Asking {
        Asking { turns: self.turns.clone(), index: self.index, yielding: None, seen: 0, asked: false }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = self.turns.state.borrow_mut();
        state.seats[self.index] = Seat::default();
        state.wake_next();
    }
}

/// Lets the runtime poll its driver and everything else once. The future of `yield_now` itself
/// is done at its second poll, whoever polls it: an actor polls all of its futures in a loop.
#[derive(Debug)]
struct Yielding {
    over: AtomicBool,
    task: Waker,
}

impl Yielding {
    fn begin(task: &Waker) -> Arc<Self> {
        let yielding = Arc::new(Self { over: AtomicBool::new(false), task: task.clone() });
        let waker = Waker::from(Arc::clone(&yielding));
        // Its first poll is never ready, and asks the runtime to wake this.
        let _pending = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
        yielding
    }
}

impl Wake for Yielding {
    fn wake(self: Arc<Self>) {
        self.over.store(true, Ordering::Relaxed);
        self.task.wake_by_ref();
    }
}

/// A lane that waits for its turn.
pub(crate) struct Asking {
    turns: ComputeTurns,
    index: usize,
    /// It yields to the runtime.
    yielding: Option<Arc<Yielding>>,
    /// Turns that had ended when it yielded.
    seen: u64,
    asked: bool,
}

impl Future for Asking {
    type Output = Turn;

    fn poll(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Turn> {
        let me = &mut *self;
        let index = me.index;
        let mut state = me.turns.state.borrow_mut();
        let now = state.clock.now();
        let asked = std::mem::replace(&mut me.asked, true);
        if !asked {
            state.catch_up(index, now);
        }
        // Again after each turn: whoever had it may not have asked again yet, and may be next all the same.
        if !asked || me.seen != state.ended {
            me.yielding = Some(Yielding::begin(ctx.waker()));
        }
        // From here on it counts: whoever has asked before the next turn takes part in it.
        state.seats[index].asking = Some(ctx.waker().clone());
        me.seen = state.ended;
        if let Some(yielding) = &me.yielding {
            if !yielding.over.load(Ordering::Relaxed) {
                return Poll::Pending;
            }
            me.yielding = None;
        }
        if state.taken || state.next() != Some(index) {
            state.wake_next();
            return Poll::Pending;
        }
        let budget = state.budget(index, now);
        state.seats[index].asking = None;
        state.virtual_time = state.virtual_time.max(state.seats[index].used);
        state.taken = true;
        drop(state);
        // What is asked is answered: dropping this takes nothing back.
        me.asked = false;
        Poll::Ready(Turn { turns: me.turns.clone(), index, begun: now, budget })
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.asked {
            let mut state = self.turns.state.borrow_mut();
            state.seats[self.index].asking = None;
            state.wake_next();
        }
    }
}

/// The thread is its owner's until this is dropped, which is when the time is charged.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: ComputeTurns,
    index: usize,
    begun: Duration,
    /// How long it may last; `None` = any time: nobody else is there.
    pub(crate) budget: Option<Duration>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.state.borrow_mut();
        let now = state.clock.now();
        let took = now.saturating_sub(self.begun).as_secs_f64();
        state.taken = false;
        state.ended += 1;
        let seat = &mut state.seats[self.index];
        if seat.open {
            seat.used += took / seat.weight;
            seat.typical += NEWEST * (took - seat.typical);
            seat.last = Some(now);
        }
        state.wake_next();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::types::ManualClock;

    const MS: Duration = Duration::from_millis(1);

    fn on_one_thread(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, test);
    }

    fn turns() -> (ComputeTurns, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new());
        (ComputeTurns::new(clock.clone()), clock)
    }

    /// Takes turns of `takes` until `until`; counts them.
    fn work(lane: Lane, takes: Duration, clock: &Arc<ManualClock>, until: Duration) -> Rc<Cell<Duration>> {
        let used = Rc::new(Cell::new(Duration::ZERO));
        let (count, clock) = (Rc::clone(&used), Arc::clone(clock));
        tokio::task::spawn_local(async move {
            while clock.now() < until {
                let _turn = lane.turn().await;
                clock.advance(takes);
                count.set(count.get() + takes);
            }
        });
        used
    }

    async fn settle() {
        for _ in 0..20_000 {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn lanes_get_time_by_weight_however_long_their_turns_are() {
        on_one_thread(async {
            let (turns, clock) = turns();
            let until = 6000 * MS;
            let long = work(turns.lane(1.0), 30 * MS, &clock, until);
            let short = work(turns.lane(1.0), 3 * MS, &clock, until);
            let heavy = work(turns.lane(2.0), 10 * MS, &clock, until);
            settle().await;
            let share = |used: &Cell<Duration>| used.get().as_secs_f64() / clock.now().as_secs_f64();
            assert!((share(&long) - 0.25).abs() < 0.02, "{}", share(&long));
            assert!((share(&short) - 0.25).abs() < 0.02, "{}", share(&short));
            assert!((share(&heavy) - 0.5).abs() < 0.02, "{}", share(&heavy));
        });
    }

    #[test]
    fn one_turn_at_a_time_and_a_newcomer_waits_for_one_turn_only() {
        on_one_thread(async {
            let (turns, clock) = turns();
            let old = work(turns.lane(1.0), 5 * MS, &clock, 10_000 * MS);
            while clock.now() < 1000 * MS {
                tokio::task::yield_now().await;
            }
            let newcomer = turns.lane(1.0);
            let asked = clock.now();
            let turn = newcomer.turn().await;
            assert!(clock.now() - asked <= 10 * MS, "{:?}", clock.now() - asked);
            let before = old.get();
            settle().await;
            assert_eq!(old.get(), before, "the turn is still taken");
            drop(turn);
            settle().await;
            assert!(old.get() > before);
        });
    }

    #[test]
    fn what_a_lane_used_long_ago_is_not_held_against_it() {
        on_one_thread(async {
            let (turns, clock) = turns();
            let (old, new) = (turns.lane(1.0), turns.lane(1.0));
            for _ in 0..100 {
                let _turn = old.turn().await;
                clock.advance(100 * MS);
            }
            clock.advance(2 * IN_USE);
            let _busy = work(new, 5 * MS, &clock, 60_000 * MS);
            while clock.now() < 11_000 * MS {
                tokio::task::yield_now().await;
            }
            for _ in 0..3 {
                let asked = clock.now();
                drop(old.turn().await);
                assert!(clock.now() - asked <= 15 * MS, "{:?}", clock.now() - asked);
            }
        });
    }

    #[test]
    fn a_turn_may_last_as_long_as_the_others_do_and_any_time_without_them() {
        on_one_thread(async {
            let (turns, clock) = turns();
            let speech = turns.lane(1.0);
            assert_eq!(speech.turn().await.budget, None);
            let _steps = work(turns.lane(1.0), 20 * MS, &clock, 3000 * MS);
            while clock.now() < 1000 * MS {
                tokio::task::yield_now().await;
            }
            let budget = speech.turn().await.budget.unwrap();
            assert!(budget >= 18 * MS && budget <= 21 * MS, "{budget:?}");
            settle().await;
            clock.advance(IN_USE);
            assert_eq!(speech.turn().await.budget, None, "the others are idle");
        });
    }

    #[test]
    fn a_lane_that_gives_up_asking_or_goes_holds_nobody_up() {
        on_one_thread(async {
            let (turns, _) = turns();
            let (first, second, third) = (turns.lane(1.0), turns.lane(1.0), turns.lane(1.0));
            let turn = first.turn().await;
            let mut gives_up = Box::pin(second.turn());
            let mut goes = Box::pin(third.turn());
            for _ in 0..3 {
                std::future::poll_fn(|ctx| {
                    assert!(gives_up.as_mut().poll(ctx).is_pending());
                    assert!(goes.as_mut().poll(ctx).is_pending());
                    Poll::Ready(())
                })
                .await;
            }
            drop(turn);
            drop(gives_up);
            drop(third);
            drop(goes);
            drop(first.turn().await);
            let again = turns.lane(1.0);
            drop(again.turn().await);
        });
    }
}
