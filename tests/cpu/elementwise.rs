//! Norms, gated units, `exp`, and what the operators report.

use greenroom::config::{Activations, CpuConfig, KvType};
use greenroom::model::cpu::math::exp;
use greenroom::model::cpu::simd::{Kernel, LANES, Simd, dispatch};
use greenroom::model::cpu::{CpuOps, SimdPath};
use greenroom::model::load::TensorType;
use greenroom::model::ops::{Act, LogitShape, Logits, Norm, Ops};
use greenroom::types::EngineError;

use super::matrix::Matrix;
use super::{Random, bits, ops, paths};

struct Exponentials<'a>(&'a mut [f32]);

impl Kernel for Exponentials<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for chunk in self.0.as_chunks_mut::<LANES>().0 {
            s.store(exp(s, s.load(chunk)), chunk);
        }
    }
}

#[test]
fn exp_is_right_to_two_units_in_the_last_place_and_equal_on_all_paths() {
    let inputs: Vec<f32> = (-8800..8800).map(|i| i as f32 * 0.01 + 0.000_37).collect();
    let mut first: Option<Vec<u32>> = None;
    for path in paths() {
        let mut values = inputs.clone();
        dispatch(path, Exponentials(&mut values));
        for (x, y) in inputs.iter().zip(&values) {
            let exact = f64::from(*x).exp();
            if *x < -87.0 {
                assert_eq!(*y, 0.0, "{x}");
            } else {
                assert!((f64::from(*y) - exact).abs() <= 2.4e-7 * exact, "{x}: {y} {exact}");
            }
        }
        let got = bits(&values);
        assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{path:?}");
    }
    let mut ends = [f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, 1000.0, -1000.0, 88.0, -87.0];
    for path in paths() {
        dispatch(path, Exponentials(&mut ends));
        assert_eq!(ends[0], 0.0);
        assert!(ends[1].is_nan());
        assert_eq!((ends[2], ends[3], ends[5]), (1.0, 1.0, 0.0));
        assert!(ends[4].is_finite() && ends[4] > 1e38);
        ends = [f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, 1000.0, -1000.0, 88.0, -87.0];
    }
}

#[test]
fn gated_units_match_their_formulas_on_every_path() {
    let mut random = Random(3);
    for (tokens, width) in [(1, 8), (2, 13), (5, 64), (70, 96)] {
        let x: Vec<f32> = random.vector(tokens * 2 * width).iter().map(|x| x * 6.0).collect();
        for act in [Act::Silu, Act::GeluTanh, Act::Gelu] {
            let mut first: Option<Vec<u32>> = None;
            for path in paths() {
                let (mut ops, _kv) = ops(&CpuConfig::default(), path);
                let input = ops.tensor(tokens, &x);
                let got = ops.glu(input, act).unwrap();
                assert_eq!((got.tokens(), got.width()), (tokens, width));
                for (token, row) in x.chunks(2 * width).enumerate() {
                    for i in 0..width {
                        let (gate, up) = (f64::from(row[i]), f64::from(row[width + i]));
                        let want = match act {
                            Act::Silu => gate / (1.0 + (-gate).exp()) * up,
                            Act::GeluTanh => {
                                let inner =
                                    (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
                                0.5 * gate * (1.0 + inner.tanh()) * up
                            }
                            Act::Gelu => 0.5 * gate * (1.0 + erf(gate / 2.0f64.sqrt())) * up,
                        };
                        let error = (f64::from(got.row(token)[i]) - want).abs();
                        assert!(error < 3e-6 * want.abs().max(1.0), "{act:?} {gate} {up}");
                    }
                }
                let got = bits(got.data());
                assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{path:?}");
            }
        }
    }
}

/// The error function by summing its integral.
fn erf(x: f64) -> f64 {
    let steps = 4000;
    let width = x / f64::from(steps);
    let middle = |i: i32| (f64::from(i) + 0.5) * width;
    let area: f64 = (0..steps).map(|i| (-middle(i).powi(2)).exp()).sum::<f64>() * width;
    area * 2.0 / std::f64::consts::PI.sqrt()
}

#[test]
fn residuals_biases_and_scales_match_their_formulas_on_every_path() {
    let mut random = Random(31);
    let (tokens, width) = (40, 77);
    let (x, residual) = (random.vector(tokens * width), random.vector(tokens * width));
    let (weight, bias) = (random.vector(width), random.vector(width));
    for (normed, by) in [(false, 0.3f32), (true, 1.0), (true, 0.3)] {
        let mut first: Option<Vec<u32>> = None;
        for path in paths() {
            let (mut ops, _kv) = ops(&CpuConfig::default(), path);
            let norm = Norm { weight: ops.vector(&weight).unwrap(), eps: 1e-5 };
            let (x, residual) = (ops.tensor(tokens, &x), ops.tensor(tokens, &residual));
            let bias = ops.vector(&bias).unwrap();
            let x = ops.add_bias(x, &bias).unwrap();
            let x = ops.scale(x, 3.5).unwrap();
            let before = (x.data().to_vec(), residual.data().to_vec());
            let got = ops.add_residual(x, normed.then_some(&norm), by, residual).unwrap();
            for (token, got) in got.data().chunks(width).enumerate() {
                let range = token * width..(token + 1) * width;
                let (x, residual) = (&before.0[range.clone()], &before.1[range]);
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                let scale = if normed { 1.0 / (mean + 1e-5).sqrt() } else { 1.0 };
                for i in 0..width {
                    let weight = if normed { f64::from(weight[i]) } else { 1.0 };
                    let want = f64::from(residual[i]) + f64::from(x[i]) * scale * weight * f64::from(by);
                    assert!((f64::from(got[i]) - want).abs() < 3e-6, "{got:?} {want}");
                }
            }
            let got = bits(got.data());
            assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{path:?}");
        }
    }
    let (mut ops, _kv) = ops(&CpuConfig::default(), SimdPath::Portable);
    let (short, long) = (ops.tensor(1, &[1.0; 4]), ops.tensor(1, &[1.0; 5]));
    assert!(ops.add_residual(short, None, 1.0, long).is_err());
    let (short, bias) = (ops.tensor(1, &[1.0; 4]), ops.vector(&[1.0; 3]).unwrap());
    assert!(ops.add_bias(short, &bias).is_err());
}

#[test]
fn capped_logits_are_those_of_the_plain_loop() {
    let data: Vec<f32> = (-500..503).map(|i| i as f32 * 0.37).collect();
    for shape in [
        LogitShape { scale: 1.0, softcap: Some(30.0) },
        LogitShape { scale: 0.25, softcap: None },
        LogitShape { scale: 0.7, softcap: Some(2.5) },
    ] {
        let logits = Logits { vocab: data.len(), data: data.clone() };
        let mut want = logits.clone();
        want.shape(&shape);
        for path in paths() {
            let mut got = logits.clone();
            ops(&CpuConfig::default(), path).0.shape_logits(&mut got, &shape);
            let worst = got.data.iter().zip(&want.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 2e-5, "{shape:?} on {path:?}: {worst}");
        }
    }
    assert!(data.iter().any(|x| x.abs() > 100.0));
}

#[test]
fn norm_and_product_in_one_is_the_norm_then_the_product() {
    let mut random = Random(9);
    let mut config = CpuConfig::default();
    config.activations = Activations::F32;
    for (tokens, cols) in [(1, 64), (3, 576), (40, 100), (2, 7)] {
        let matrix = Matrix::random(&mut random, TensorType::F32, 33, cols);
        let w = CpuOps::pack(&config, &[matrix.tensor()]).unwrap();
        let (x, weight) = (random.vector(tokens * cols), random.vector(cols));
        let mut first: Option<Vec<u32>> = None;
        for path in paths() {
            let (mut ops, _kv) = ops(&config, path);
            let norm = Norm { weight: ops.vector(&weight).unwrap(), eps: 1e-5 };
            let input = ops.tensor(tokens, &x);
            let got = ops.norm_linear(&input, &norm, &w).unwrap();
            let wanted: Vec<usize> = (0..tokens).rev().step_by(2).collect();
            let logits = ops.head(&input, &norm, &w, &wanted).unwrap();
            for (token, x) in x.chunks(cols).enumerate() {
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / cols as f64;
                let scale = 1.0 / (mean + 1e-5).sqrt();
                let normed: Vec<f32> = x
                    .iter()
                    .zip(&weight)
                    .map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32)
                    .collect();
                for (got, want) in got.row(token).iter().zip(matrix.times(&normed)) {
                    assert!((f64::from(*got) - want).abs() < 1e-4, "{tokens}×{cols}: {got} {want}");
                }
            }
            for (index, token) in wanted.iter().enumerate() {
                assert_eq!(bits(logits.row(index)), bits(got.row(*token)), "the head's rows");
            }
            assert!(ops.head(&input, &norm, &w, &[tokens]).is_err());
            let got = bits(got.data());
            assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{path:?}");
        }
    }
}

#[test]
fn a_path_is_chosen_by_name_or_refused_with_the_reason() {
    assert_eq!(SimdPath::choose(Some("portable")), Ok(SimdPath::Portable));
    assert_eq!(SimdPath::choose(None).ok(), paths().last().copied());
    let message = |forced| match SimdPath::choose(Some(forced)) {
        Err(EngineError::Device { message }) => message,
        other => panic!("{other:?}"),
    };
    assert!(message("sse9").contains("GREENROOM_CPU=sse9"));
    assert!(message("sse9").contains("portable, avx2, avxvnni, avx512 or neon"));
    for path in SimdPath::ALL {
        match SimdPath::choose(Some(path.name())) {
            Ok(chosen) => assert_eq!(chosen, path),
            Err(error) => {
                assert!(!path.is_supported());
                assert!(error.to_string().contains("lacks"), "{error}");
            }
        }
    }
}

#[test]
fn the_numerics_name_the_modes_and_not_the_path() {
    let mut config = CpuConfig::default();
    let names: Vec<_> = paths().into_iter().map(|path| ops(&config, path).0.numerics_id()).collect();
    assert!(names.iter().all(|name| *name == names[0]));
    config.kv = KvType::F32;
    let other_kv = ops(&config, SimdPath::Portable).0.numerics_id();
    config.activations = Activations::F32;
    let other_both = ops(&config, SimdPath::Portable).0.numerics_id();
    assert!(names[0] != other_kv && other_kv != other_both);
}

#[test]
fn no_threads_is_an_error_that_names_the_setting() {
    let mut config = CpuConfig::default();
    config.threads = Some(0);
    let start = super::start(greenroom::model::ops::KvShape { layers: 1, kv_heads: 1, head_dim: 8 }, 2);
    let error = CpuOps::with_path(&config, &start, SimdPath::Portable).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("cpu.threads"), "{error}");
}
