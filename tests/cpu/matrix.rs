//! Random matrices in every storage type, as a file would hold them.

use greenroom::model::load::{HostTensor, MetaType, RowOrder, TensorType};
use half::{bf16, f16};

use super::Random;

/// A matrix that owns its bytes.
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub kind: TensorType,
    data: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

/// Every type that weights come in.
pub const KINDS: [TensorType; 12] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q8_0,
    TensorType::Affine { bits: 4, group: 32, meta: MetaType::F16 },
    TensorType::Affine { bits: 4, group: 64, meta: MetaType::BF16 },
    TensorType::Affine { bits: 4, group: 128, meta: MetaType::F32 },
    TensorType::Affine { bits: 8, group: 32, meta: MetaType::F32 },
    TensorType::Affine { bits: 8, group: 64, meta: MetaType::F16 },
    TensorType::Affine { bits: 8, group: 128, meta: MetaType::BF16 },
];

fn small(random: &mut Random) -> [u8; 2] {
    f16::from_f32(0.02 * random.signed() + 0.03).to_le_bytes()
}

fn meta(kind: MetaType, value: f32) -> Vec<u8> {
    match kind {
        MetaType::F32 => value.to_le_bytes().to_vec(),
        MetaType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        MetaType::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

impl Matrix {
    pub fn random(random: &mut Random, kind: TensorType, rows: usize, cols: usize) -> Self {
        let mut matrix = Self { rows, cols, kind, data: vec![], scales: vec![], biases: vec![] };
        let count = rows * cols;
        let data = &mut matrix.data;
        match kind {
            TensorType::F32 => (0..count).for_each(|_| data.extend(random.signed().to_le_bytes())),
            TensorType::F16 => {
                (0..count).for_each(|_| data.extend(f16::from_f32(random.signed()).to_le_bytes()));
            }
            TensorType::BF16 => {
                (0..count).for_each(|_| data.extend(bf16::from_f32(random.signed()).to_le_bytes()));
            }
            TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q8_0 => {
                for _ in 0..count / 32 {
                    data.extend(small(random));
                    if kind == TensorType::Q4_1 {
                        data.extend(f16::from_f32(-0.3 * random.signed()).to_le_bytes());
                    }
                    let bytes = if kind == TensorType::Q8_0 { 32 } else { 16 };
                    data.extend((0..bytes).map(|_| random.bits() as u8));
                }
            }
            TensorType::Affine { bits, group, meta: kind } => {
                data.extend((0..count * usize::from(bits) / 8).map(|_| random.bits() as u8));
                for _ in 0..count / usize::from(group) {
                    matrix.scales.extend(meta(kind, 0.02 * random.signed() + 0.03));
                    matrix.biases.extend(meta(kind, -0.3 * random.signed()));
                }
            }
        }
        matrix
    }

    pub fn tensor(&self) -> HostTensor<'_> {
        HostTensor {
            name: "random",
            rows: self.rows,
            cols: self.cols,
            kind: self.kind,
            data: &self.data,
            scales: &self.scales,
            biases: &self.biases,
            order: RowOrder::Plain,
        }
    }

    pub fn row(&self, row: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.cols];
        self.tensor().dequantize_row(row, &mut out);
        out
    }

    /// `x · wᵀ` of one token, in f64.
    pub fn times(&self, x: &[f32]) -> Vec<f64> {
        let dot = |row: Vec<f32>| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        (0..self.rows).map(|row| dot(self.row(row))).collect()
    }

    pub fn is_dense(&self) -> bool {
        self.tensor().affine().is_none()
    }
}

impl Matrix {
    /// All codes made of one byte; scales and biases random. Quantised types only.
    pub fn filled(random: &mut Random, kind: TensorType, rows: usize, cols: usize, byte: u8) -> Self {
        let mut matrix = Self::random(random, kind, rows, cols);
        let (block, header) = match kind {
            TensorType::Q4_0 => (18, 2),
            TensorType::Q4_1 => (20, 4),
            TensorType::Q8_0 => (34, 2),
            _ => (matrix.data.len(), 0),
        };
        for block in matrix.data.chunks_exact_mut(block) {
            block[header..].fill(byte);
        }
        matrix
    }
}
