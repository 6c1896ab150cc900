//! Each operator of the CPU backend, beside what the machine can do at best.
//!
//! `cargo bench --bench operators`, or a part of it: `cargo bench --bench operators -- products/Q4_1`. The limits come first: memory
//! read by all threads, multiply-adds of int8 and of f32 in registers. Below each of criterion's lines stands what the fastest sample
//! makes of them. `GREENROOM_CPU` chooses the path, as everywhere. The demo model's shapes, except where caches would
//! hide the memory: weights are other ones in each call, 96 MB in all.

#![allow(clippy::print_stdout, reason = "its figures are its output")]

mod attention;
mod elementwise;
#[path = "../../tests/cpu/matrix.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod matrix;
mod products;
#[path = "../../tests/cpu/random.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod random;

use std::error::Error;
use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode};
use greenroom::config::CpuConfig;
use greenroom::model::cpu::{CpuKv, CpuOps, SimdPath, limits};
use greenroom::model::ops::{KvShape, Ops, StartOps};
use greenroom::types::Epoch;

use random::Random;

type Failed = Box<dyn Error>;

/// Decoder layers of the demo model.
const LAYERS: usize = 30;
/// Its query heads, key-value heads, and their width.
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;

/// What an operator reads and multiplies in one call; 0 where that says nothing.
#[derive(Clone, Copy, Default)]
struct Work {
    /// Bytes from memory.
    bytes: u64,
    /// Multiply-adds of int8.
    int8: u64,
    /// Multiply-adds of f32.
    f32: u64,
}

/// The operators, and what the machine could do.
struct Bench {
    criterion: Criterion,
    ops: CpuOps,
    kv: CpuKv,
    /// Bytes a second, multiply-adds a second.
    read: f64,
    int8: Option<f64>,
    f32: f64,
}

impl Bench {
    fn new(criterion: Criterion) -> Result<Self, Failed> {
        let config = CpuConfig::default();
        let start = StartOps {
            epoch: Epoch(0),
            kv: KvShape { layers: LAYERS, kv_heads: KV_HEADS, head_dim: HEAD_DIM },
            kv_budget_bytes: 2 << 30,
            context: 8192,
        };
        let path = SimdPath::from_env()?;
        let (ops, kv) = CpuOps::with_path(&config, &start, path)?;
        let threads = config.threads.unwrap_or_else(greenroom::model::cpu::pool::physical_cores);
        println!("{}", ops.device());
        let read = limits::memory_read(threads);
        let (int8, f32) = (limits::int8_products(path, threads), limits::f32_products(path, threads));
        let known = int8.map_or("unknown".into(), |int8| format!("{:.1} G", int8 / 1e9));
        println!(
            "limits: {:.1} GB/s read, {known} int8 and {:.1} G f32 multiply-adds/s\n",
            read / 1e9,
            f32 / 1e9
        );
        Ok(Self { criterion, ops, kv, read, int8, f32 })
    }

    /// Measures `call`; what `prepare` makes is made only where the filter of the command line lets this one pass.
    fn measure<P>(
        &mut self,
        group: &str,
        name: &str,
        prepare: impl FnOnce(&mut CpuOps, &mut CpuKv) -> Result<(P, Work), Failed>,
        mut call: impl FnMut(&mut CpuOps, &mut CpuKv, &mut P) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let (mut prepare, mut prepared, mut failed) = (Some(prepare), None, None);
        let mut fastest = f64::INFINITY;
        let (ops, kv) = (&mut self.ops, &mut self.kv);
        let mut criterion_group = self.criterion.benchmark_group(group);
        criterion_group.sampling_mode(SamplingMode::Flat);
        criterion_group.bench_function(name, |bencher| {
            bencher.iter_custom(|turns| {
                if let Some(prepare) = prepare.take() {
                    match prepare(ops, kv) {
                        Ok(made) => prepared = Some(made),
                        Err(error) => failed = Some(error),
                    }
                }
                let Some((inputs, _)) = &mut prepared else { return Duration::from_nanos(turns) };
                let began = Instant::now();
                for _ in 0..turns {
                    if let Err(error) = call(ops, kv, inputs) {
                        failed = Some(error);
                    }
                }
                let took = began.elapsed();
                fastest = fastest.min(took.as_secs_f64() / turns as f64);
                took
            });
        });
        criterion_group.finish();
        if let Some(error) = failed {
            return Err(error);
        }
        if let Some((_, work)) = prepared {
            self.say(work, fastest);
        }
        Ok(())
    }

    /// The speed and its ratio to each limit that applies.
    fn say(&self, work: Work, seconds: f64) {
        let limits = [
            (work.bytes, Some(self.read), "GB/s", "of the memory's"),
            (work.int8, self.int8, "G multiply-adds/s", "of int8's"),
            (work.f32, Some(self.f32), "G multiply-adds/s", "of f32's"),
        ];
        for (amount, limit, unit, whose) in limits.into_iter().filter(|(amount, ..)| *amount > 0) {
            let speed = amount as f64 / seconds;
            let share = limit.map_or(String::new(), |limit| format!(", {:.2} {whose}", speed / limit));
            println!("{:24}{:8.1} {unit}{share}", "", speed / 1e9);
        }
    }
}

fn main() -> Result<(), Failed> {
    let criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .nresamples(1_000)
        .configure_from_args();
    let mut bench = Bench::new(criterion)?;
    products::all(&mut bench)?;
    attention::all(&mut bench)?;
    elementwise::all(&mut bench)?;
    bench.criterion.final_summary();
    Ok(())
}
