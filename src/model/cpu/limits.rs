//! What the machine can do at best: bytes that threads read from memory, products that they do in registers.
//!
//! Yardsticks of the benches, measured in the same run as the kernels; nothing that serves uses them. Each loop does nothing
//! else, so a kernel's ratio to it says how much of the machine it uses. A figure is the best of several short runs.

use std::hint::black_box;
use std::time::Instant;

use super::simd::{Kernel, LANES, Simd, SimdPath, dispatch};

/// Measurements, of which the best counts.
const RUNS: usize = 7;
/// Values that are read: far more than any cache holds.
const READ: usize = 32 << 20;
/// Turns of a loop of products: some ten milliseconds.
const TURNS: usize = 400_000;
/// Sums at a time: more than the multipliers' latency asks for, fewer than there are registers.
const SUMS: usize = 12;

/// Bytes a second that so many threads read from memory, one stretch each.
pub fn memory_read(threads: usize) -> f64 {
    let values: Vec<u64> = (0..READ as u64).collect();
    let share = READ.div_ceil(threads.max(1));
    let stretches: Vec<&[u64]> = values.chunks(share).collect();
    let read = |thread: usize| {
        let stretch = stretches.get(thread).copied().unwrap_or(&[]);
        // Sixteen sums: the reads must not wait for one.
        let mut sums = [0_u64; 16];
        for values in stretch.as_chunks::<16>().0 {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum ^= value;
            }
        }
        black_box(sums);
    };
    best(threads, size_of_val(&values[..]), read)
}

/// Multiply-adds of f32 a second, fused where the path has that.
pub fn f32_products(path: SimdPath, threads: usize) -> f64 {
    let work = threads.max(1) * TURNS * SUMS * LANES;
    best(threads, work, |_| {
        black_box(dispatch(path, F32Loop));
    })
}

/// Multiply-adds of int8 a second, by the instructions that the path has for them; `None` where no loop was written for these.
pub fn int8_products(path: SimdPath, threads: usize) -> Option<f64> {
    let work = |bytes: usize| threads.max(1) * TURNS * SUMS * bytes;
    Some(match path {
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx512 if path.is_supported() => best(threads, work(64), |_| {
            // SAFETY: the processor was asked for AVX-512 F and VNNI just now.
            black_box(unsafe { x86::vnni() });
        }),
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx2 if path.is_supported() => best(threads, work(32), |_| {
            // SAFETY: the processor was asked for AVX2 just now.
            black_box(unsafe { x86::avx2() });
        }),
        SimdPath::Portable => best(threads, work(32), |_| {
            black_box(plain());
        }),
        _ => return None,
    })
}

/// Work a second when every thread does `body`, which is all of `work` together.
fn best(threads: usize, work: usize, body: impl Fn(usize) + Sync) -> f64 {
    let run = || {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for thread in 1..threads {
                let body = &body;
                scope.spawn(move || body(thread));
            }
            body(0);
        });
        work as f64 / began.elapsed().as_secs_f64()
    };
    (0..RUNS).map(|_| run()).fold(0.0, f64::max)
}

/// Sums of products of f32, in registers.
struct F32Loop;

impl Kernel for F32Loop {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let (w, x) = (s.splat(black_box(1e-3)), s.splat(black_box(0.5)));
        let mut sums = [s.splat(0.0); SUMS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = s.fma(w, x, *sum);
            }
        }
        let mut total = 0.0;
        for sum in sums {
            total += s.total(sum);
        }
        total
    }
}

/// The same of int8, as the compiler sees fit.
fn plain() -> i32 {
    let w = black_box([5_i8; 32]);
    let mut sums = [0_i32; 32];
    for turn in 0..TURNS * SUMS {
        for lane in 0..32 {
            // An operand of its own in each turn, or one product would do for all.
            sums[lane] = sums[lane].wrapping_add(i32::from(w[lane]) * i32::from(turn as i8));
        }
    }
    sums.iter().fold(0, |total, sum| total.wrapping_add(*sum))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{SUMS, TURNS};

    /// Pairs are summed in 16 bits, as the kernels for narrow weights do it: the fewest instructions a product.
    #[target_feature(enable = "avx2")]
    pub(super) fn avx2() -> i32 {
        let w = _mm256_set1_epi8(black_box(5));
        let mut sums = [_mm256_setzero_si256(); SUMS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                // The sum is an operand as well, or one product would do for all turns.
                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(w, *sum));
            }
        }
        let mut total = sums[0];
        for sum in &sums[1..] {
            total = _mm256_add_epi16(total, *sum);
        }
        _mm256_extract_epi32::<0>(total)
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn vnni() -> i32 {
        let (w, x) = (_mm512_set1_epi8(black_box(5)), _mm512_set1_epi8(black_box(3)));
        let mut sums = [_mm512_setzero_si512(); SUMS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, w, x);
            }
        }
        let mut total = sums[0];
        for sum in &sums[1..] {
            total = _mm512_add_epi32(total, *sum);
        }
        _mm512_reduce_add_epi32(total)
    }
}
