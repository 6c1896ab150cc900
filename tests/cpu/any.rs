//! Any shape, format, number of threads, batch and chunk: products, attention's
//! neighbours and row-wise operators against plain loops, with equal bits everywhere.

use greenroom::config::{Activations, CpuConfig};
use greenroom::model::cpu::{CpuOps, PackedWeight, SimdPath};
use greenroom::model::load::{MetaType, TensorType};
use greenroom::model::ops::{Act, Norm, Ops};
use proptest::prelude::*;
use proptest::sample::select;

use super::matrix::{KINDS, Matrix};
use super::{Random, bits, ops, paths};

/// Numbers of threads that must not show.
const THREADS: [usize; 4] = [1, 2, 3, 7];

fn config(activations: Activations, threads: usize) -> CpuConfig {
    let mut config = CpuConfig::default();
    (config.activations, config.threads) = (activations, Some(threads));
    config
}

/// Every type, and every MLX type by bits, group and metadata.
fn kinds() -> impl Strategy<Value = TensorType> {
    let bits = select(vec![4_u8, 5, 6, 8]);
    let meta = select(vec![MetaType::F32, MetaType::F16, MetaType::BF16]);
    let affine = (bits, select(vec![32_u16, 64, 128]), meta)
        .prop_map(|(bits, group, meta)| TensorType::Affine { bits, group, meta });
    prop_oneof![select(KINDS.to_vec()), affine]
}

/// Tokens of a decode step, around blocks' edges, and a few times a large number.
fn token_counts() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1..=9_usize, 3 => 10..=70_usize, 2 => 120..=200_usize]
}

fn multiply(config: &CpuConfig, path: SimdPath, w: &PackedWeight, x: &[f32]) -> Vec<f32> {
    let (mut ops, _kv) = ops(config, path);
    let x = ops.tensor(x.len() / w.cols, x);
    ops.linear(&x, w).unwrap().data().to_vec()
}

/// A token as the mode sees it; groups of 32 as the int8 mode rounds them.
fn seen(x: &[f32], rounds: bool) -> Vec<f64> {
    if !rounds {
        return x.iter().map(|x| f64::from(*x)).collect();
    }
    let group = |x: &[f32]| {
        let largest = x.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        // Numbers so small that their factor is none: whatever is made of them, it is next to nothing.
        if !inverse.is_finite() {
            return x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        }
        let codes = x.iter().map(|x| f64::from((x * inverse).round_ties_even()));
        codes.map(|code| code * f64::from(largest / 127.0)).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(group).collect()
}

/// Checks every output of `got` against a loop over the matrix's rows.
fn close(matrix: &Matrix, x: &[f32], got: &[f32], rounds: bool) -> Result<(), TestCaseError> {
    let rows: Vec<Vec<f32>> = (0..matrix.rows).map(|row| matrix.row(row)).collect();
    for (token, (x, got)) in x.chunks(matrix.cols).zip(got.chunks(matrix.rows)).enumerate() {
        let x = seen(x, rounds);
        for (row, (w, got)) in rows.iter().zip(got).enumerate() {
            let products = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x);
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p: f64| (sum + p, size + p.abs()));
            let error = (f64::from(*got) - sum).abs();
            // Codes and biases are summed apart, so what cancels in `size` may not in the chain.
            prop_assert!(error < 1e-5 * (size + 1.0), "token {token}, row {row}: {got} for {sum}");
        }
    }
    Ok(())
}

/// The same bits on every path, with any number of threads, and for any cut of the tokens.
fn equal_however_computed(
    activations: Activations,
    w: &PackedWeight,
    x: &[f32],
    whole: &[f32],
    random: &mut Random,
) -> Result<(), TestCaseError> {
    for path in paths() {
        for threads in THREADS {
            let again = multiply(&config(activations, threads), path, w, x);
            prop_assert_eq!(bits(&again), bits(whole), "{:?}, {} threads", path, threads);
        }
        let (tokens, mut done) = (x.len() / w.cols, 0);
        while done < tokens {
            let size = [1, 2, 3, 4, 5, 8, 9, 17, 65][random.below(9)].min(tokens - done);
            let part = &x[done * w.cols..(done + size) * w.cols];
            let part = multiply(&config(activations, 2), path, w, part);
            let same = &whole[done * w.rows..(done + size) * w.rows];
            prop_assert_eq!(bits(&part), bits(same), "{:?}, {} tokens from {}", path, size, done);
            done += size;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_product_is_the_plain_loop_and_the_same_bits_however_it_is_computed(
        kind in kinds(),
        tokens in token_counts(),
        rows in 1..=90_usize,
        groups in 1..=9_usize,
        int8 in any::<bool>(),
        seed in 1..u64::MAX,
    ) {
        let mut random = Random(seed);
        let cols = (32 * groups).next_multiple_of(kind.block().max(1));
        // Dense weights have any width.
        let cols = if matches!(kind, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
            cols - random.below(32)
        } else {
            cols
        };
        let matrix = Matrix::random(&mut random, kind, rows, cols);
        let w = CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()]).unwrap();
        let x = random.vector(tokens * cols);
        let activations = if int8 { Activations::Int8 } else { Activations::F32 };
        let whole = multiply(&config(activations, 2), SimdPath::Portable, &w, &x);
        close(&matrix, &x, &whole, int8 && !matrix.is_dense())?;
        equal_however_computed(activations, &w, &x, &whole, &mut random)?;
    }

    #[test]
    fn activations_at_their_ends_are_the_same_on_every_path(
        kind in kinds(),
        tokens in 1..=12_usize,
        int8 in any::<bool>(),
        seed in 1..u64::MAX,
    ) {
        let mut random = Random(seed);
        let (rows, cols) = (20, 256);
        let matrix = Matrix::random(&mut random, kind, rows, cols);
        let w = CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()]).unwrap();
        let ends = [0.0, -0.0, 1e30, -1e30, 1e-40, -1e-45, f32::MIN_POSITIVE, 1.0, -1e-20];
        let mut x: Vec<f32> = (0..tokens * cols).map(|_| ends[random.below(ends.len())]).collect();
        // Whole groups of zeros and of numbers too small to be normal.
        x[..32].fill(0.0);
        x[32..64].fill(1e-42);
        let activations = if int8 { Activations::Int8 } else { Activations::F32 };
        let whole = multiply(&config(activations, 1), SimdPath::Portable, &w, &x);
        prop_assert!(whole.iter().all(|y| y.is_finite()), "numbers give numbers");
        for token in 0..tokens {
            let x = seen(&x[token * cols..(token + 1) * cols], int8 && !matrix.is_dense());
            for row in 0..rows {
                let products = matrix.row(row).into_iter().zip(&x).map(|(w, x)| f64::from(w) * x);
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p: f64| (sum + p, size + p.abs()));
                let got = f64::from(whole[token * rows + row]);
                prop_assert!((got - sum).abs() <= 3e-5 * size + 1e-30, "{} for {}", got, sum);
            }
        }
        equal_however_computed(activations, &w, &x, &whole, &mut random)?;
        // One token that is not finite spoils its own outputs, and no other's.
        let bad = random.below(tokens);
        x[bad * cols + random.below(cols)] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][random.below(3)];
        for path in paths() {
            let got = multiply(&config(activations, 2), path, &w, &x);
            for (token, (got, before)) in got.chunks(rows).zip(whole.chunks(rows)).enumerate() {
                if token == bad {
                    let spoilt = got.iter().filter(|y| !y.is_finite()).count();
                    // A weight of zero times infinity is no number either, so every output shows it.
                    prop_assert_eq!(spoilt, rows, "{:?}", path);
                } else {
                    prop_assert_eq!(bits(got), bits(before), "{:?}", path);
                }
            }
        }
    }

    #[test]
    fn rowwise_operators_do_not_know_threads_batches_or_paths(
        tokens in prop_oneof![1..=5_usize, 300..=420_usize],
        half in 1..=100_usize,
        seed in 1..u64::MAX,
    ) {
        let mut random = Random(seed);
        let width = 2 * half;
        let x: Vec<f32> = random.vector(tokens * width).iter().map(|x| 5.0 * x).collect();
        let residual = random.vector(tokens * width);
        let weight = random.vector(width);
        let act = [Act::Silu, Act::GeluTanh, Act::Gelu][random.below(3)];
        let run = |path, threads, range: std::ops::Range<usize>| {
            let (mut ops, _kv) = ops(&config(Activations::Int8, threads), path);
            let norm = Norm { weight: ops.vector(&weight).unwrap(), eps: 1e-5 };
            let part = range.start * width..range.end * width;
            let gated = ops.glu(ops.tensor(range.len(), &x[part.clone()]), act).unwrap();
            let (x, residual) =
                (ops.tensor(range.len(), &x[part.clone()]), ops.tensor(range.len(), &residual[part]));
            let added = ops.add_residual(x, Some(&norm), 0.7, residual).unwrap();
            (bits(gated.data()), bits(added.data()))
        };
        let whole = run(SimdPath::Portable, 1, 0..tokens);
        for path in paths() {
            for threads in THREADS {
                prop_assert!(run(path, threads, 0..tokens) == whole, "{:?}, {} threads", path, threads);
            }
            let token = random.below(tokens);
            let (gated, added) = run(path, 2, token..token + 1);
            prop_assert_eq!(&gated[..], &whole.0[token * half..(token + 1) * half], "{:?}", path);
            prop_assert_eq!(&added[..], &whole.1[token * width..(token + 1) * width], "{:?}", path);
        }
    }
}

#[test]
fn thousands_of_tokens_are_those_of_each_alone() {
    let mut random = Random(77);
    for kind in [TensorType::Q4_1, TensorType::Q6K, TensorType::BF16] {
        let (tokens, rows, cols) = (2501, 37, 256);
        let matrix = Matrix::random(&mut random, kind, rows, cols);
        let w = CpuOps::pack(&CpuConfig::default(), &[matrix.tensor()]).unwrap();
        let x = random.vector(tokens * cols);
        for path in paths() {
            let whole = multiply(&config(Activations::Int8, 3), path, &w, &x);
            for _ in 0..40 {
                let token = random.below(tokens);
                let x = &x[token * cols..(token + 1) * cols];
                let alone = multiply(&config(Activations::Int8, 1), path, &w, x);
                assert_eq!(bits(&alone), bits(&whole[token * rows..(token + 1) * rows]), "{kind:?} {path:?}");
                close(&matrix, x, &alone, kind != TensorType::BF16).unwrap();
            }
        }
    }
}
