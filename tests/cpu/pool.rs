//! The thread pool: every item once, panics carried to the caller, no deadlock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use greenroom::model::cpu::pool::{ThreadPool, physical_cores};

#[test]
fn every_item_is_computed_once() {
    let pool = ThreadPool::shared(4).unwrap();
    for (items, grain) in [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 7), (5, 100)] {
        for threads in [1, 2, 4, 9] {
            let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.run(threads, items, grain, &|range| {
                assert!(range.len() <= grain);
                for item in range {
                    counts[item].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(
                counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                "{items} {grain} {threads}"
            );
        }
    }
}

#[test]
fn many_short_jobs_in_a_row_all_finish() {
    let pool = ThreadPool::shared(3).unwrap();
    let total = AtomicUsize::new(0);
    for _ in 0..3000 {
        pool.run(3, 8, 1, &|range| {
            total.fetch_add(range.len(), Ordering::Relaxed);
        });
    }
    assert_eq!(total.load(Ordering::Relaxed), 24_000);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = ThreadPool::shared(3).unwrap();
    for bad in [0, 17, 63] {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(3, 64, 1, &|range| assert!(!range.contains(&bad), "item {bad} is bad"));
        }));
        let payload = outcome.unwrap_err();
        let message = payload.downcast_ref::<String>().unwrap();
        assert!(message.contains("is bad"), "{message}");
        let total = AtomicUsize::new(0);
        pool.run(3, 64, 1, &|range| {
            total.fetch_add(range.len(), Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 64);
    }
}

#[test]
fn two_callers_and_a_job_inside_a_job_do_not_wait_for_each_other() {
    let pool = ThreadPool::shared(3).unwrap();
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(3, 4, 1, &|outer| {
                        pool.run(3, 4, 1, &|inner| {
                            total.fetch_add(outer.len() * inner.len(), Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 3 * 200 * 16);
}

#[test]
fn one_pool_serves_the_process() {
    let first = ThreadPool::shared(2).unwrap();
    let second = ThreadPool::shared(3).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert!(physical_cores() >= 1);
}
