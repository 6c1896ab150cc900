//! Every quantised type against the values that its own libraries give: GGUF's reference
//! reader, MLX's own quantiser.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::collections::BTreeMap;

use greenroom::model::load::{HostTensor, MetaType, RowOrder, TensorType};
use serde_json::Value;

/// Rows of one type and what they stand for.
struct Golden {
    name: String,
    kind: TensorType,
    data: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Golden {
    fn tensor(&self) -> HostTensor<'_> {
        HostTensor {
            name: &self.name,
            rows: self.rows,
            cols: self.cols,
            kind: self.kind,
            data: &self.data,
            scales: &self.scales,
            biases: &self.biases,
            order: RowOrder::Plain,
        }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }
}

fn kind_of(name: &str) -> TensorType {
    let mut parts = name.split('-');
    match parts.next().expect("a name") {
        "Q4_0" => TensorType::Q4_0,
        "Q4_1" => TensorType::Q4_1,
        "Q5_0" => TensorType::Q5_0,
        "Q5_1" => TensorType::Q5_1,
        "Q8_0" => TensorType::Q8_0,
        "Q4_K" => TensorType::Q4K,
        "Q5_K" => TensorType::Q5K,
        "Q6_K" => TensorType::Q6K,
        other => {
            assert_eq!(other, "mlx");
            let mut part = || parts.next().expect("a part");
            let (bits, group) = (part().parse().expect("bits"), part().parse().expect("a group"));
            let meta = match part() {
                "f32" => MetaType::F32,
                "f16" => MetaType::F16,
                _ => MetaType::BF16,
            };
            TensorType::Affine { bits, group, meta }
        }
    }
}

fn goldens() -> Vec<Golden> {
    let bytes = std::fs::read(common::data("quantised/golden.safetensors")).expect("test data");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).expect("is JSON");
    let part = |name: &str| {
        let info = header.get(name)?;
        let at = |key: &str, i: usize| info[key][i].as_u64().expect("a number") as usize;
        let span = 8 + length + at("data_offsets", 0)..8 + length + at("data_offsets", 1);
        Some((bytes[span].to_vec(), at("shape", 0), at("shape", 1)))
    };
    let names = header.keys().filter_map(|name| name.strip_suffix(".data"));
    names
        .map(|name| {
            let (values, rows, cols) = part(&format!("{name}.values")).expect("values");
            let data =
                |kind: &str| part(&format!("{name}.{kind}")).map(|(bytes, ..)| bytes).unwrap_or_default();
            let value = |b: &[u8]| f32::from_le_bytes(b.try_into().expect("four"));
            Golden {
                name: name.to_owned(),
                kind: kind_of(name),
                data: data("data"),
                scales: data("scales"),
                biases: data("biases"),
                rows,
                cols,
                values: values.chunks_exact(4).map(value).collect(),
            }
        })
        .collect()
}

#[test]
fn every_type_gives_the_values_of_its_own_library() {
    let goldens = goldens();
    assert_eq!(goldens.len(), 8 + 18);
    for golden in &goldens {
        let mut values = vec![0.0; golden.cols];
        for row in 0..golden.rows {
            golden.tensor().dequantize_row(row, &mut values);
            assert_eq!(values, golden.row(row), "{} row {row}", golden.name);
        }
        assert!(golden.values.iter().all(|value| value.is_finite()));
        assert!(golden.values.iter().any(|value| *value < 0.0), "{}", golden.name);
    }
}

#[test]
fn codes_scales_and_biases_stand_for_the_same_values() {
    for golden in goldens() {
        let tensor = golden.tensor();
        let shape = tensor.affine().expect("is quantised");
        let groups = golden.cols / shape.group;
        let (mut codes, mut scales, mut biases) =
            (vec![0; golden.cols], vec![0.0; groups], vec![0.0; groups]);
        for row in 0..golden.rows {
            tensor.affine_row(row, &mut codes, &mut scales, &mut biases);
            assert!(codes.iter().all(|code| u16::from(*code) < 1 << shape.bits), "{}", golden.name);
            for (at, value) in golden.row(row).iter().enumerate() {
                let g = at / shape.group;
                let exact = f64::from(scales[g]) * f64::from(codes[at]) + f64::from(biases[g]);
                let size = f64::from(biases[g].abs()) + f64::from(value.abs());
                assert!((exact - f64::from(*value)).abs() <= 1.2e-7 * size, "{} {row} {at}", golden.name);
            }
        }
    }
}

#[cfg(feature = "cpu")]
#[test]
fn packed_rows_give_the_same_values() {
    use greenroom::config::CpuConfig;
    use greenroom::model::cpu::CpuOps;
    use greenroom::model::ops::Ops;

    for golden in goldens() {
        let packed = CpuOps::pack(&CpuConfig::default(), &[golden.tensor()]).expect("packs");
        let mut values = vec![0.0; golden.cols];
        for row in 0..golden.rows {
            assert!(packed.dequantize_row(row, &mut values));
            for (at, (got, want)) in values.iter().zip(golden.row(row)).enumerate() {
                // Single-precision scales make the product round, here once with the sum.
                let rounds = golden.name.ends_with("f32") || golden.name.ends_with("bf16");
                let allowed = if rounds { 3e-7 * want.abs().max(1.0) } else { 0.0 };
                assert!((got - want).abs() <= allowed, "{} {row} {at}: {got} {want}", golden.name);
            }
        }
    }
}

#[cfg(feature = "mlx")]
mod mlx {
    use greenroom::model::mlx::{MlxConfig, MlxDevice, MlxOps, MlxType};
    use greenroom::model::ops::{KvShape, Ops, StartOps};
    use greenroom::types::Epoch;
    use half::{bf16, f16};
    use mlx_rs::{Array, Dtype};

    use super::{Golden, goldens};

    /// Numbers in −1..1 that all three types hold.
    fn input(cols: usize) -> Vec<f32> {
        (0..cols).map(|i| ((i * 37) % 129) as f32 / 64.0 - 1.0).map(|x| bf16::from_f32(x).to_f32()).collect()
    }

    fn product(golden: &Golden, config: MlxConfig, x: &[f32]) -> Vec<f32> {
        let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 8 };
        let start = StartOps { epoch: Epoch(1), kv, kv_budget_bytes: 1 << 20, context: 64 };
        let (mut ops, _kv) = MlxOps::start(&config, &start).expect("starts");
        let w = ops.adopt(MlxOps::pack(&config, &[golden.tensor()]).expect("packs")).expect("adopts");
        let kind = config.activations.dtype();
        let array = |values: &[f32]| {
            Array::from_slice(values, &[1, values.len() as i32]).as_dtype(kind).expect("casts")
        };
        let out = ops.linear_add(array(x), &w, array(&vec![0.0; golden.rows])).expect("computes");
        assert_eq!(out.dtype(), kind, "{}: activations keep their type", golden.name);
        out.as_dtype(Dtype::Float32).expect("casts").as_slice::<f32>().to_vec()
    }

    #[test]
    fn products_of_every_type_equal_a_plain_loop() {
        for golden in goldens() {
            let x = input(golden.cols);
            for dequantize in [true, false] {
                let config = MlxConfig { device: MlxDevice::Cpu, activations: MlxType::F32, dequantize };
                let got = product(&golden, config, &x);
                for (row, got) in got.iter().enumerate() {
                    let terms = golden.row(row).iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                    let error = (f64::from(*got) - sum).abs();
                    assert!(error <= 1e-5 * (size + 1.0), "{} {row} {dequantize}: {got} {sum}", golden.name);
                }
            }
        }
    }

    /// The products that Metal runs: with half-precision activations K types keep f32 scales, so
    /// that only the result is rounded.
    #[test]
    fn scales_of_k_types_are_not_rounded_to_the_activations() {
        let k_types = goldens().into_iter().filter(|golden| ["Q4_K", "Q5_K"].contains(&golden.name.as_str()));
        for golden in k_types {
            let x = input(golden.cols);
            for (activations, step) in [(MlxType::F16, 1.0 / 2048.0), (MlxType::BF16, 1.0 / 256.0)] {
                let config = MlxConfig { device: MlxDevice::Cpu, activations, dequantize: false };
                let got = product(&golden, config, &x);
                for (row, got) in got.iter().enumerate() {
                    let terms = golden.row(row).iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                    let error = (f64::from(*got) - sum).abs();
                    assert!(error <= step * sum.abs() + 1e-5 * size, "{} {row}: {got} {sum}", golden.name);
                }
            }
        }
        // What rounding would do to such a scale: the test above is not idle.
        let scale = f16::from_f32(0.0123).to_f32() * 61.0;
        assert_ne!(f16::from_f32(scale).to_f32(), scale);
    }
}
