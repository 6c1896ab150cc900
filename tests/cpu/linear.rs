//! Products: every storage type, path, shape; one token alone and in a batch.

use greenroom::config::{Activations, CpuConfig};
use greenroom::model::cpu::{CpuOps, PackedWeight, SimdPath};
use greenroom::model::load::TensorType;
use greenroom::model::ops::{Ops, Step, StepRow};
use greenroom::types::{Epoch, LoadError, SequenceId, TokenId};

use super::matrix::{KINDS, Matrix};
use super::{Random, bits, ops, paths};

fn config(activations: Activations, threads: usize) -> CpuConfig {
    let mut config = CpuConfig::default();
    config.activations = activations;
    config.threads = Some(threads);
    config
}

fn pack(matrices: &[&Matrix]) -> PackedWeight {
    let tensors: Vec<_> = matrices.iter().map(|matrix| matrix.tensor()).collect();
    CpuOps::pack(&CpuConfig::default(), &tensors).unwrap()
}

/// `x · wᵀ`, `[tokens][rows]`, through the public operator with a residual of zeros.
fn multiply(config: &CpuConfig, path: SimdPath, w: &PackedWeight, x: &[f32]) -> Vec<f32> {
    let (mut ops, _kv) = ops(config, path);
    let tokens = x.len() / w.cols;
    let x = ops.tensor(tokens, x);
    let zeros = ops.tensor(tokens, &vec![0.0; tokens * w.rows]);
    ops.linear_add(x, w, zeros).unwrap().data().to_vec()
}

/// A token as the int8 mode sees it: by groups of 32, codes `round(x · 127 / largest)` of `largest / 127`.
fn rounded(x: &[f32]) -> Vec<f64> {
    let group = |x: &[f32]| {
        let largest = x.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
        let code = |x: &f32| f64::from((x * (127.0 / largest)).round_ties_even());
        x.iter().map(|x| code(x) * f64::from(largest / 127.0)).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(group).collect()
}

/// Tokens and rows that hit every kernel width, tails and padded panels.
const SHAPES: [(usize, usize, usize); 11] = [
    (1, 16, 128),
    (1, 33, 256),
    (2, 7, 128),
    (3, 50, 384),
    (4, 16, 128),
    (5, 1, 128),
    (9, 31, 128),
    (17, 64, 256),
    (300, 19, 128),
    (1, 17, 32),
    (6, 5, 96),
];

#[test]
fn products_match_a_plain_loop_in_every_format_on_every_path() {
    let mut random = Random(11);
    for kind in KINDS {
        for (tokens, rows, cols) in SHAPES {
            let cols = cols.next_multiple_of(kind.block());
            let matrix = Matrix::random(&mut random, kind, rows, cols);
            let w = pack(&[&matrix]);
            let x = random.vector(tokens * cols);
            for activations in [Activations::F32, Activations::Int8] {
                let results: Vec<_> = paths()
                    .into_iter()
                    .map(|path| (path, multiply(&config(activations, 2), path, &w, &x)))
                    .collect();
                let rounds = activations == Activations::Int8 && !matrix.is_dense();
                for (x, got) in x.chunks(cols).zip(results[0].1.chunks(rows)) {
                    let x = if rounds { rounded(x) } else { x.iter().map(|x| f64::from(*x)).collect() };
                    for (row, got) in got.iter().enumerate() {
                        let products = matrix.row(row).into_iter().zip(&x).map(|(w, x)| f64::from(w) * x);
                        let (sum, size) =
                            products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                        // f32 chains, of codes and biases apart where there are biases.
                        let error = (f64::from(*got) - sum).abs();
                        assert!(
                            error < 1e-5 * (size + 1.0),
                            "{kind:?} {tokens}×{rows}×{cols} {activations:?}: {got} {sum}"
                        );
                    }
                }
                for (path, result) in &results[1..] {
                    assert_eq!(bits(result), bits(&results[0].1), "{kind:?} {path:?} {activations:?}");
                }
            }
        }
    }
}

#[test]
fn a_token_alone_and_in_any_batch_gives_the_same_bits() {
    let mut random = Random(5);
    let (rows, cols) = (49, 256);
    for kind in KINDS {
        let matrix = Matrix::random(&mut random, kind, rows, cols);
        let w = pack(&[&matrix]);
        for activations in [Activations::Int8, Activations::F32] {
            for path in paths() {
                let tokens = 141;
                let x = random.vector(tokens * cols);
                let whole = multiply(&config(activations, 2), path, &w, &x);
                let single = multiply(&config(activations, 1), path, &w, &x);
                assert_eq!(bits(&whole), bits(&single), "threads: {kind:?}");
                let mut done = 0;
                for size in [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 64, 31] {
                    let part =
                        multiply(&config(activations, 2), path, &w, &x[done * cols..(done + size) * cols]);
                    assert_eq!(
                        bits(&part),
                        bits(&whole[done * rows..(done + size) * rows]),
                        "{kind:?} {size}"
                    );
                    done += size;
                }
                assert_eq!(done, tokens);
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    // All codes and activations at their ends: sums of pairs at their largest.
    for kind in KINDS.into_iter().filter(|kind| !kind.is_dense()) {
        for byte in [0x00, 0xff, 0x80, 0x7f] {
            let mut random = Random(1);
            let matrix = Matrix::filled(&mut random, kind, 16, 256, byte);
            let w = pack(&[&matrix]);
            for value in [1.0, -1.0] {
                let x = vec![value; 256];
                let exact = matrix.times(&x);
                for path in paths() {
                    let got = multiply(&config(Activations::Int8, 1), path, &w, &x);
                    for (got, exact) in got.iter().zip(&exact) {
                        let error = (f64::from(*got) - exact).abs();
                        assert!(
                            error <= 1e-4 * exact.abs().max(1.0),
                            "{kind:?} {byte} {path:?} {got} {exact}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn stacked_parts_of_different_formats_give_the_rows_of_each() {
    let mut random = Random(21);
    let cols = 128;
    let parts = [
        Matrix::random(&mut random, TensorType::Q4_1, 20, cols),
        Matrix::random(&mut random, TensorType::Q8_0, 3, cols),
        Matrix::random(&mut random, TensorType::BF16, 17, cols),
    ];
    let stacked = pack(&[&parts[0], &parts[1], &parts[2]]);
    assert_eq!(stacked.rows, 40);
    let x = random.vector(3 * cols);
    for path in paths() {
        let config = config(Activations::Int8, 2);
        let whole = multiply(&config, path, &stacked, &x);
        let mut first = 0;
        for part in &parts {
            let alone = multiply(&config, path, &pack(&[part]), &x);
            for token in 0..3 {
                let got = &whole[token * 40 + first..token * 40 + first + part.rows];
                assert_eq!(bits(got), bits(&alone[token * part.rows..(token + 1) * part.rows]));
            }
            first += part.rows;
        }
    }
}

#[test]
fn a_residual_is_added_once() {
    let mut random = Random(31);
    let matrix = Matrix::random(&mut random, TensorType::Q4_0, 24, 64);
    let (w, config) = (pack(&[&matrix]), config(Activations::Int8, 2));
    let (x, residual) = (random.vector(2 * 64), random.vector(2 * 24));
    for path in paths() {
        let plain = multiply(&config, path, &w, &x);
        let (mut ops, _kv) = ops(&config, path);
        let (x, added) = (ops.tensor(2, &x), ops.tensor(2, &residual));
        let got = ops.linear_add(x, &w, added).unwrap();
        let want: Vec<f32> = plain.iter().zip(&residual).map(|(a, b)| b + a).collect();
        assert_eq!(bits(got.data()), bits(&want));
    }
}

#[test]
fn embedding_rows_are_the_exact_rows() {
    let mut random = Random(41);
    for kind in KINDS {
        let matrix = Matrix::random(&mut random, kind, 37, 256);
        let w = pack(&[&matrix]);
        let (mut ops, _kv) = ops(&CpuConfig::default(), SimdPath::Portable);
        let tokens: Vec<TokenId> = [36, 0, 15, 16, 17].map(TokenId).to_vec();
        let sequence = SequenceId { epoch: Epoch(3), number: 0 };
        let rows = [StepRow { sequence, first: 0, len: 5, start: 0 }];
        let step = Step { tokens: &tokens, positions: &[0, 1, 2, 3, 4], rows: &rows };
        let got = ops.embed(&w, &step).unwrap();
        for (index, token) in tokens.iter().enumerate() {
            for (got, want) in got.row(index).iter().zip(matrix.row(token.0 as usize)) {
                // Scales wider than a half make `scale · code + bias` round; once here, perhaps twice there.
                assert!((got - want).abs() <= 2e-7 * want.abs().max(0.5), "{kind:?} {got} {want}");
            }
        }
        let beyond = [TokenId(37)];
        let step = Step { tokens: &beyond, positions: &[0], rows: &rows };
        assert!(ops.embed(&w, &step).is_err());
    }
}

#[test]
fn a_value_that_is_not_finite_is_not_hidden_by_rounding() {
    let mut random = Random(51);
    let matrix = Matrix::random(&mut random, TensorType::Q4_1, 16, 64);
    let w = pack(&[&matrix]);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = random.vector(64);
        x[40] = bad;
        for path in paths() {
            let got = multiply(&config(Activations::Int8, 1), path, &w, &x);
            assert!(got.iter().all(|y| !y.is_finite()), "{bad} {path:?}");
        }
    }
}

#[test]
fn widths_that_cannot_be_packed_are_refused_by_name() {
    let mut random = Random(61);
    let matrix = Matrix::random(&mut random, KINDS[8], 4, 128);
    let mut tensor = matrix.tensor();
    tensor.cols = 96;
    let error = CpuOps::pack(&CpuConfig::default(), &[tensor]).unwrap_err();
    assert!(matches!(&error, LoadError::Tensor { name, .. } if name == "random"), "{error}");
    let other = Matrix::random(&mut random, TensorType::F32, 4, 64);
    assert!(CpuOps::pack(&CpuConfig::default(), &[matrix.tensor(), other.tensor()]).is_err());
    assert!(CpuOps::pack(&CpuConfig::default(), &[]).is_err());
}
