//! Decode steps of the demo model beside busy threads of the same process: printed, and held to a
//! loose bound. Wants a quiet machine and a release build:
//! `cargo test --release --test contention -- --ignored --nocapture`.
#![cfg(feature = "cpu")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints its figures"
)]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use greenroom::config::CpuConfig;
use greenroom::model::cpu::CpuOps;
use greenroom::model::cpu::pool::{ThreadPool, physical_cores};
use greenroom::model::{Engine, PlanRow, Want};
use greenroom::types::TokenId;

/// Steps of a measurement: its 99th percentile is the third longest.
const STEPS: usize = 300;

/// What a web worker does with a request, and how long it waits for the next.
const BUSY: Duration = Duration::from_micros(300);

/// Computes until told to stop, pausing after each `BUSY` where `pauses` is set.
fn work(stop: &AtomicBool, pauses: bool) {
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        while begun.elapsed() < BUSY {
            std::hint::black_box(begun.elapsed().as_nanos().pow(2));
        }
        if pauses {
            std::thread::sleep(BUSY);
        }
    }
}

/// Milliseconds of each step, ascending, with `workers` threads beside.
fn steps(engine: &mut dyn Engine, workers: usize, pauses: bool) -> Vec<f64> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| work(&stop, pauses));
        }
        let sequence = engine.open(None).expect("a sequence");
        engine.reserve(sequence, STEPS as u32).expect("there is room");
        let step = |start: usize| {
            let begun = Instant::now();
            let row =
                PlanRow { sequence, input: &[TokenId(17)], start: start as u32, want: Want::LastLogits };
            checkpoints::step(engine, vec![row]);
            begun.elapsed().as_secs_f64() * 1e3
        };
        let mut times: Vec<f64> = (0..STEPS).map(step).collect();
        stop.store(true, Ordering::Relaxed);
        engine.close(sequence);
        times.sort_by(f64::total_cmp);
        times
    })
}

#[test]
#[ignore = "prints timings; wants a quiet machine and a release build"]
fn a_step_beside_busy_workers_stays_near_its_median() {
    let mut engine =
        checkpoints::engine::<CpuOps>(&common::demo_model(), &CpuConfig::default(), STEPS as u32);
    let cores = physical_cores();
    println!("{cores} compute threads, {STEPS} decode steps");
    steps(&mut engine, 0, false);
    for (workers, pauses) in
        [(0, false), (1, true), (cores, true), (2 * cores, true), (1, false), (cores, false)]
    {
        let times = steps(&mut engine, workers, pauses);
        let [median, p99, longest] = [STEPS / 2, STEPS * 99 / 100, STEPS - 1].map(|index| times[index]);
        let ratio = p99 / median;
        let kind = if pauses { "half-busy" } else { "spinning" };
        println!(
            "{workers} {kind} workers: median {median:.2} ms, p99 {p99:.2}, longest {longest:.2}; p99 {ratio:.2} × median"
        );
        // Three times the median is the aim; a machine that others use as well does not decide whether the code is right.
        assert!(ratio < 10.0, "a step waits for somebody");
    }
}

#[test]
#[ignore = "prints timings; wants a quiet machine and a release build"]
fn an_empty_job_costs_little() {
    let pool = ThreadPool::shared(2).unwrap();
    let mut times: Vec<f64> = (0..20_000)
        .map(|_| {
            let begun = Instant::now();
            for _ in 0..100 {
                pool.run(2, 2, 1, &|range| {
                    std::hint::black_box(range);
                });
            }
            begun.elapsed().as_secs_f64() * 1e4
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!(
        "an empty job on two threads: {:.2} µs median, {:.2} least, {:.2} p99",
        times[10_000], times[0], times[19_800]
    );
    assert!(times[10_000] < 100.0, "a job waits for somebody");
}
