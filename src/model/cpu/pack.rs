//! Packing: file rows into panels, on loader threads, without a device.
//!
//! Each panel is packed straight from the mapped file by one of a few scoped
//! threads, so memory holds the packed weight and a row's codes, never a second
//! copy. The layout is [`super::weight`]'s.

use super::memory::ZeroedBytes;
use super::pool::physical_cores;
use super::weight::{Format, GROUP, PANEL_ROWS, PackedWeight, Part, Quantised, ScaleType};
use crate::config::CpuConfig;
use crate::model::load::{HostTensor, MetaType, TensorType};
use crate::types::LoadError;

/// Bytes below which another thread is not worth its start.
const BYTES_PER_THREAD: usize = 1 << 20;

/// Packs matrices of equal width, stacked by rows.
///
/// # Errors
/// `Tensor` where a width differs, is not a multiple of the group, or the group is not one of ours;
/// `Unsupported` where there is no memory.
pub fn pack(config: &CpuConfig, tensors: &[HostTensor<'_>]) -> Result<PackedWeight, LoadError> {
    let Some(first) = tensors.first() else {
        return Err(LoadError::Unsupported { message: "a weight of no matrices".into() });
    };
    let cols = first.cols;
    let mut rows = 0;
    let mut parts = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        if tensor.cols != cols {
            let message = format!("{} columns, stacked with `{}` of {cols}", tensor.cols, first.name);
            return Err(refused(tensor, message));
        }
        let part = pack_part(config, tensor, rows)?;
        rows += part.rows;
        parts.push(part);
    }
    Ok(PackedWeight { rows, cols, parts })
}

fn refused(tensor: &HostTensor<'_>, message: String) -> LoadError {
    LoadError::Tensor { name: tensor.name.into(), message }
}

fn pack_part(config: &CpuConfig, tensor: &HostTensor<'_>, first_row: usize) -> Result<Part, LoadError> {
    let format = format_of(tensor)?;
    let panel_bytes = format.panel_bytes(tensor.cols);
    let panels = tensor.rows.div_ceil(PANEL_ROWS);
    let bytes = panels.checked_mul(panel_bytes).and_then(ZeroedBytes::new);
    let Some(mut data) = bytes else {
        let message = format!("no memory for {panels} panels of {panel_bytes} bytes of `{}`", tensor.name);
        return Err(LoadError::Unsupported { message });
    };
    let most = config.threads.unwrap_or_else(physical_cores).max(1);
    let threads = most.min(data.len() / BYTES_PER_THREAD + 1);
    let share = panels.div_ceil(threads).max(1);
    if panel_bytes > 0 {
        std::thread::scope(|scope| {
            let mut chunks = data.as_mut_slice().chunks_mut(share * panel_bytes).enumerate();
            let own = chunks.next();
            for (index, chunk) in chunks {
                scope.spawn(move || pack_panels(tensor, format, index * share, chunk, panel_bytes));
            }
            if let Some((index, chunk)) = own {
                pack_panels(tensor, format, index * share, chunk, panel_bytes);
            }
        });
    }
    Ok(Part { first_row, rows: tensor.rows, format, data, panel_bytes })
}

fn format_of(tensor: &HostTensor<'_>) -> Result<Format, LoadError> {
    let (zero, scale) = match tensor.kind {
        TensorType::F32 => return Ok(Format::F32),
        TensorType::F16 => return Ok(Format::F16),
        TensorType::BF16 => return Ok(Format::Bf16),
        TensorType::Q4_0 => (Some(8), ScaleType::F16),
        TensorType::Q8_0 => (Some(128), ScaleType::F16),
        TensorType::Q4_1 => (None, ScaleType::F16),
        TensorType::Affine { meta, .. } => (None, narrowest(meta, [tensor.scales, tensor.biases])),
    };
    let Some(shape) = tensor.affine() else {
        return Err(refused(tensor, format!("{:?} gives no codes", tensor.kind)));
    };
    let (bits, group) = (shape.bits, shape.group);
    if !matches!(bits, 4 | 8) || group == 0 || !group.is_multiple_of(GROUP) {
        return Err(refused(
            tensor,
            format!("{bits} bits in groups of {group}: 4 or 8 bits in groups of 32, 64, 128 are supported"),
        ));
    }
    if !tensor.cols.is_multiple_of(group) {
        return Err(refused(
            tensor,
            format!("{} columns are not a multiple of the group of {group}", tensor.cols),
        ));
    }
    Ok(Format::Quantised(Quantised { bits, spans: group / GROUP, scale, zero }))
}

/// Half where every scale and bias is exactly one, else single: rounding them would change the model.
fn narrowest(meta: MetaType, values: [&[u8]; 2]) -> ScaleType {
    let fits = |x: f32| half::f16::from_f32(x).to_f32().to_bits() == x.to_bits();
    let exact = match meta {
        MetaType::F16 => true,
        MetaType::BF16 => values.iter().all(|bytes| {
            bytes.as_chunks::<2>().0.iter().all(|b| fits(super::simd::widen_bf16(u16::from_le_bytes(*b))))
        }),
        MetaType::F32 => {
            values.iter().all(|bytes| bytes.as_chunks::<4>().0.iter().all(|b| fits(f32::from_le_bytes(*b))))
        }
    };
    if exact { ScaleType::F16 } else { ScaleType::F32 }
}

fn pack_panels(tensor: &HostTensor<'_>, format: Format, first: usize, out: &mut [u8], panel_bytes: usize) {
    for (index, panel) in out.chunks_exact_mut(panel_bytes).enumerate() {
        let rows = (first + index) * PANEL_ROWS..tensor.rows.min((first + index + 1) * PANEL_ROWS);
        match format {
            Format::Quantised(q) => {
                let groups = tensor.cols / q.block_cols();
                let mut row = AffineRow {
                    codes: vec![0; tensor.cols],
                    scales: vec![0.0; groups],
                    biases: vec![0.0; groups],
                };
                for (lane, index) in rows.enumerate() {
                    tensor.affine_row(index, &mut row.codes, &mut row.scales, &mut row.biases);
                    put_quantised(&q, &row, lane, panel);
                }
            }
            Format::F32 => {
                rows.enumerate().for_each(|(lane, r)| put_dense::<4>(tensor.row_bytes(r), lane, panel))
            }
            Format::F16 | Format::Bf16 => {
                rows.enumerate().for_each(|(lane, r)| put_dense::<2>(tensor.row_bytes(r), lane, panel));
            }
        }
    }
}

/// A row's codes, one a byte, and a scale and a bias a group.
struct AffineRow {
    codes: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

fn put_dense<const BYTES: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (from, _) = row.as_chunks::<BYTES>();
    let (to, _) = panel.as_chunks_mut::<BYTES>();
    for (element, column) in from.iter().zip(to.chunks_exact_mut(PANEL_ROWS)) {
        column[lane] = *element;
    }
}

fn put_quantised(q: &Quantised, row: &AffineRow, lane: usize, panel: &mut [u8]) {
    let blocks = panel.chunks_exact_mut(q.block_bytes()).zip(row.codes.chunks_exact(q.block_cols()));
    for (index, (block, codes)) in blocks.enumerate() {
        let (packed, scales) = block.split_at_mut(q.spans * q.code_bytes());
        for (packed, codes) in packed.chunks_exact_mut(q.code_bytes()).zip(codes.chunks_exact(GROUP)) {
            put_codes(q.bits, codes, lane, packed);
        }
        put_scale(q.scale, row.scales[index], lane, scales);
        if q.zero.is_none() {
            put_scale(q.scale, row.biases[index], PANEL_ROWS + lane, scales);
        }
    }
}

fn put_codes(bits: u8, codes: &[u8], lane: usize, packed: &mut [u8]) {
    for (chunk, bytes) in packed.chunks_exact_mut(4 * PANEL_ROWS).enumerate() {
        let quad = &mut bytes[4 * lane..4 * lane + 4];
        for (t, byte) in quad.iter_mut().enumerate() {
            *byte = match bits {
                4 => (codes[4 * chunk + t] & 15) | (codes[16 + 4 * chunk + t] << 4),
                _ => codes[4 * chunk + t],
            };
        }
    }
}

fn put_scale(kind: ScaleType, value: f32, index: usize, scales: &mut [u8]) {
    match kind {
        ScaleType::F16 => {
            scales[2 * index..2 * index + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        }
        ScaleType::F32 => scales[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes()),
    }
}
