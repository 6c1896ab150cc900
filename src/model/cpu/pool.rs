//! Compute threads: one pool a process, shared by every instance in it.
//!
//! A job is a count of items and a function over ranges of them; threads claim
//! ranges from an atomic counter, the caller among them, so that a thread the
//! system has taken away holds nobody up for long. Between jobs threads spin for
//! some tens of microseconds, then sleep: an idle server uses no processor.
//!
//! Invariants: [`ThreadPool::run`] returns (or unwinds) only after every thread
//! has left the job, so the job may borrow from the caller's stack. A panic
//! inside a job is carried to the caller; it ends no thread. A job that finds
//! the pool busy runs on its caller alone: results never depend on threads.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

/// Turns of the spin loop before a thread sleeps: some tens of microseconds.
const SPINS: u32 = 2_000;
/// Set in [`Shared::gate`] while threads may enter the job; the rest counts those inside.
const OPEN: usize = 1;
/// One thread inside.
const INSIDE: usize = 2;

/// A range of items, computed by whoever claimed it.
type Body<'a> = dyn Fn(Range<usize>) + Sync + 'a;

/// What is to be done. Valid while the gate is open or someone is inside.
#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    items: usize,
    grain: usize,
}

struct Shared {
    job: UnsafeCell<Option<Job>>,
    gate: AtomicUsize,
    /// Grows with each job, so that a thread enters each at most once.
    generation: AtomicU64,
    next: AtomicUsize,
    /// Threads that may still enter this job.
    places: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

// SAFETY: `job` is written only by the caller of `run` that holds `ThreadPool::turn`, while the gate is
// closed and nobody is inside; it is read only by threads that came in through the open gate.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer inside is only followed under the rule above; everything else is Send.
unsafe impl Send for Shared {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn enter(&self) -> bool {
        let mut gate = self.gate.load(Ordering::Acquire);
        while gate & OPEN != 0 {
            match self.gate.compare_exchange_weak(gate, gate + INSIDE, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => gate = now,
            }
        }
        false
    }

    /// Claims ranges until none is left. A panic stops the claiming and is kept.
    fn work(&self, job: Job) {
        let claim = || {
            loop {
                let start = self.next.fetch_add(job.grain, Ordering::Relaxed);
                if start >= job.items {
                    return;
                }
                // SAFETY: this thread is inside the job (or is its caller), so `run` has not returned
                // and the body it borrows is alive.
                unsafe { (*job.body)(start..job.items.min(start + job.grain)) };
            }
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(claim)) {
            self.next.store(job.items, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    fn attend_to_jobs(&self) {
        let mut seen = 0;
        while !self.stop.load(Ordering::Acquire) {
            let generation = self.wait_for_other_than(seen);
            seen = generation;
            if !self.enter() {
                continue;
            }
            let place = self.places.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
            if place.is_ok() {
                // SAFETY: inside an open gate the job is set and nobody writes it.
                if let Some(job) = unsafe { *self.job.get() } {
                    self.work(job);
                }
            }
            self.gate.fetch_sub(INSIDE, Ordering::AcqRel);
        }
    }

    /// Spins, then sleeps, until the generation changes or the pool stops.
    fn wait_for_other_than(&self, seen: u64) -> u64 {
        for _ in 0..SPINS {
            let now = self.generation.load(Ordering::Acquire);
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let generation = loop {
            let now = self.generation.load(Ordering::SeqCst);
            if now != seen || self.stop.load(Ordering::SeqCst) {
                break now;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        generation
    }

    fn announce(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // A thread that counted itself holds this lock until it waits, so the notice cannot be missed.
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
    }
}

/// The threads. Stopped and joined when the last owner goes.
pub struct ThreadPool {
    shared: Arc<Shared>,
    /// Held for the length of a job.
    turn: Mutex<()>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

static PROCESS_POOL: Mutex<Weak<ThreadPool>> = Mutex::new(Weak::new());

impl ThreadPool {
    /// The process's pool, started or grown so that `threads` can compute, the caller included.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn shared(threads: usize) -> std::io::Result<Arc<Self>> {
        let mut current = lock(&PROCESS_POOL);
        let pool = match current.upgrade() {
            Some(pool) => pool,
            None => {
                let pool = Arc::new(Self::empty());
                *current = Arc::downgrade(&pool);
                pool
            }
        };
        pool.grow(threads)?;
        Ok(pool)
    }

    fn empty() -> Self {
        let shared = Shared {
            job: UnsafeCell::new(None),
            gate: AtomicUsize::new(0),
            generation: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            places: AtomicUsize::new(0),
            panic: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), turn: Mutex::new(()), threads: Mutex::new(Vec::new()) }
    }

    fn grow(&self, threads: usize) -> std::io::Result<()> {
        let mut running = lock(&self.threads);
        while running.len() + 1 < threads {
            let shared = Arc::clone(&self.shared);
            let name = format!("greenroom-cpu-{}", running.len() + 1);
            running.push(std::thread::Builder::new().name(name).spawn(move || shared.attend_to_jobs())?);
        }
        Ok(())
    }

    /// Computes `body` over `0..items` in ranges of at most `grain`, on at most `threads` threads.
    ///
    /// # Panics
    /// With the first panic of `body`, after every thread has left it.
    pub fn run(&self, threads: usize, items: usize, grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        let grain = grain.max(1);
        if threads <= 1 || items <= grain {
            return run_alone(items, grain, body);
        }
        let Ok(turn) = self.turn.try_lock() else {
            return run_alone(items, grain, body);
        };
        // SAFETY: only the lifetime is changed; the pointer is followed only until the gate is closed
        // and empty, which is waited for below before this function ends in any way.
        let body: *const Body<'static> = unsafe { std::mem::transmute(std::ptr::from_ref::<Body<'_>>(body)) };
        let job = Job { body, items, grain };
        let shared = &*self.shared;
        // SAFETY: `turn` is held, the gate is closed and the last job was left by all: no other access.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.store(0, Ordering::Relaxed);
        shared.places.store(threads - 1, Ordering::Relaxed);
        shared.gate.fetch_or(OPEN, Ordering::AcqRel);
        shared.announce();
        shared.work(job);
        shared.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut turns = 0_u32;
        while shared.gate.load(Ordering::Acquire) != 0 {
            turns = turns.saturating_add(1);
            if turns < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panic = lock(&shared.panic).take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

fn run_alone(items: usize, grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
    let mut start = 0;
    while start < items {
        let end = items.min(start + grain);
        body(start..end);
        start = end;
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.announce();
        for thread in lock(&self.threads).drain(..) {
            // A thread only ends by returning: its jobs' panics are caught.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool").field("threads", &(lock(&self.threads).len() + 1)).finish()
    }
}

/// Physical cores that this process may use.
pub fn physical_cores() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    match cores_of_sysfs() {
        Some(cores) => cores.min(usable),
        None => usable,
    }
}

/// Linux: distinct sets of sibling threads. `None` elsewhere.
fn cores_of_sysfs() -> Option<usize> {
    let mut siblings = std::collections::BTreeSet::new();
    for cpu in std::fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        if let Ok(list) = std::fs::read_to_string(cpu.path().join("topology/thread_siblings_list")) {
            siblings.insert(list);
        }
    }
    (!siblings.is_empty()).then_some(siblings.len())
}
