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
pub const KINDS: [TensorType; 22] = [
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
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
    TensorType::Affine { bits: 2, group: 64, meta: MetaType::F16 },
    TensorType::Affine { bits: 3, group: 32, meta: MetaType::BF16 },
    TensorType::Affine { bits: 5, group: 128, meta: MetaType::F16 },
    TensorType::Affine { bits: 6, group: 64, meta: MetaType::F32 },
    TensorType::Affine { bits: 6, group: 32, meta: MetaType::F16 },
];

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
            TensorType::Q4_0
            | TensorType::Q4_1
            | TensorType::Q5_0
            | TensorType::Q5_1
            | TensorType::Q8_0
            | TensorType::Q4K
            | TensorType::Q5K
            | TensorType::Q6K => {
                for _ in 0..count / kind.block() {
                    let first = data.len();
                    data.extend((0..kind.block_bytes()).map(|_| random.bits() as u8));
                    let block = &mut data[first..];
                    // Integer factors go up to 63 and 128, so their halves are as much smaller.
                    let (scale, minimum) = match kind {
                        TensorType::Q4K | TensorType::Q5K => (0.001, 0.005),
                        TensorType::Q6K => (0.0005, 0.0),
                        _ => (0.02, 0.3),
                    };
                    let scale = f16::from_f32(scale * (random.signed() + 1.5)).to_le_bytes();
                    let minimum = f16::from_f32(-minimum * random.signed()).to_le_bytes();
                    match kind {
                        TensorType::Q6K => block[208..210].copy_from_slice(&scale),
                        _ => block[0..2].copy_from_slice(&scale),
                    }
                    if matches!(kind, TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K)
                    {
                        block[2..4].copy_from_slice(&minimum);
                    }
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
        // Of the K types everything but the two halves.
        let (block, codes) = match kind {
            TensorType::Q4_0 => (18, 2..18),
            TensorType::Q4_1 => (20, 4..20),
            TensorType::Q5_0 => (22, 2..22),
            TensorType::Q5_1 => (24, 4..24),
            TensorType::Q8_0 => (34, 2..34),
            TensorType::Q4K => (144, 4..144),
            TensorType::Q5K => (176, 4..176),
            TensorType::Q6K => (210, 0..208),
            _ => (matrix.data.len(), 0..matrix.data.len()),
        };
        for block in matrix.data.chunks_exact_mut(block) {
            block[codes.clone()].fill(byte);
        }
        matrix
    }
}
