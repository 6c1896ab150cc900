//! Packing: file rows into panels, on loader threads, without a device.
//!
//! Each panel is packed straight from the mapped file by one of a few scoped
//! threads, so memory holds the packed weight and a row's codes, never a second
//! copy. The layout is [`super::weight`]'s.

use super::memory::ZeroedBytes;
use super::pool::physical_cores;
use super::weight::{Format, GROUP, PANEL_ROWS, PackedWeight, Part, Quantised, Scales, factor_at};
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
    let scales = match tensor.kind {
        TensorType::F32 => return Ok(Format::F32),
        TensorType::F16 => return Ok(Format::F16),
        TensorType::BF16 => return Ok(Format::Bf16),
        TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q5_0 | TensorType::Q5_1 | TensorType::Q8_0 => {
            Scales::F16
        }
        TensorType::Q4K | TensorType::Q5K => Scales::Factors32,
        TensorType::Q6K => Scales::Factors16,
        TensorType::Affine { meta, .. } => narrowest(meta, [tensor.scales, tensor.biases]),
    };
    let Some(shape) = tensor.affine() else {
        return Err(refused(tensor, format!("{:?} gives no codes", tensor.kind)));
    };
    // A block of a K type is one of ours.
    let group = if tensor.kind.has_factors() { tensor.kind.block() } else { shape.group };
    // Kernels for 2 and 3 bits would save memory that few models are stored in.
    let bits = shape.bits.max(4);
    if !matches!(bits, 4 | 5 | 6 | 8)
        || !group.is_multiple_of(GROUP)
        || !matches!(group / GROUP, 1 | 2 | 4 | 8)
    {
        return Err(refused(
            tensor,
            format!(
                "{} bits in groups of {group}: 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64, 128 are supported",
                shape.bits
            ),
        ));
    }
    if !tensor.cols.is_multiple_of(group) {
        return Err(refused(
            tensor,
            format!("{} columns are not a multiple of the group of {group}", tensor.cols),
        ));
    }
    Ok(Format::Quantised(Quantised { bits, spans: group / GROUP, scales, zero: tensor.kind.zero_point() }))
}

/// Half where every scale and bias is exactly one, else single: rounding them would change the model.
fn narrowest(meta: MetaType, values: [&[u8]; 2]) -> Scales {
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
    if exact { Scales::F16 } else { Scales::F32 }
}

fn pack_panels(tensor: &HostTensor<'_>, format: Format, first: usize, out: &mut [u8], panel_bytes: usize) {
    let mut codes = vec![0; tensor.cols];
    for (index, panel) in out.chunks_exact_mut(panel_bytes).enumerate() {
        let rows = (first + index) * PANEL_ROWS..tensor.rows.min((first + index + 1) * PANEL_ROWS);
        for (lane, row) in rows.enumerate() {
            match format {
                Format::Quantised(q) => {
                    tensor.codes_row(row, &mut codes);
                    put_codes(&q, &codes, lane, panel);
                    match q.scales {
                        Scales::F16 | Scales::F32 => put_scales(&q, tensor, row, lane, panel),
                        Scales::Factors32 | Scales::Factors16 => put_factors(&q, tensor, row, lane, panel),
                    }
                }
                Format::F32 => put_dense::<4>(tensor.row_bytes(row), lane, panel),
                Format::F16 | Format::Bf16 => put_dense::<2>(tensor.row_bytes(row), lane, panel),
            }
        }
    }
}

fn put_dense<const BYTES: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (from, _) = row.as_chunks::<BYTES>();
    let (to, _) = panel.as_chunks_mut::<BYTES>();
    for (element, column) in from.iter().zip(to.chunks_exact_mut(PANEL_ROWS)) {
        column[lane] = *element;
    }
}

fn put_codes(q: &Quantised, row: &[u8], lane: usize, panel: &mut [u8]) {
    let blocks = panel.chunks_exact_mut(q.block_bytes()).zip(row.chunks_exact(q.block_cols()));
    for (block, codes) in blocks {
        for (packed, codes) in block.chunks_exact_mut(q.code_bytes()).zip(codes.chunks_exact(GROUP)) {
            put_group(q.bits, codes, lane, packed);
        }
    }
}

/// 32 codes of a row; the layout is [`super::weight`]'s.
fn put_group(bits: u8, codes: &[u8], lane: usize, packed: &mut [u8]) {
    let (low, high) = codes.split_at(GROUP / 2);
    for (chunk, bytes) in packed.chunks_exact_mut(4 * PANEL_ROWS).enumerate() {
        let quad = &mut bytes[4 * lane..4 * lane + 4];
        for (t, byte) in quad.iter_mut().enumerate() {
            // Upper bits of the chunks from `first` on, `width` for each, from the lowest up.
            let upper = |first: usize, count: usize, width: u8| {
                (0..count).rev().fold(0, |bits: u8, c| bits << width | codes[4 * (first + c) + t] >> 4)
            };
            *byte = match (bits, chunk) {
                (8, _) => codes[4 * chunk + t],
                (_, 0..4) => (low[4 * chunk + t] & 15) | high[4 * chunk + t] << 4,
                (5, _) => upper(0, 8, 1),
                (_, _) => upper(4 * (chunk - 4), 4, 2),
            };
        }
    }
}

fn put_scales(q: &Quantised, tensor: &HostTensor<'_>, row: usize, lane: usize, panel: &mut [u8]) {
    let groups = tensor.cols / q.block_cols();
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    tensor.scales_row(row, &mut scales, &mut biases);
    let blocks = panel.chunks_exact_mut(q.block_bytes()).zip(scales.iter().zip(&biases));
    for (block, (scale, bias)) in blocks {
        let (_, scales) = block.split_at_mut(q.spans * q.code_bytes());
        put_scale(q.scales, *scale, lane, scales);
        if q.zero.is_none() {
            put_scale(q.scales, *bias, PANEL_ROWS + lane, scales);
        }
    }
}

fn put_scale(kind: Scales, value: f32, index: usize, scales: &mut [u8]) {
    if kind == Scales::F16 {
        scales[2 * index..2 * index + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
    } else {
        scales[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes());
    }
}

fn put_factors(q: &Quantised, tensor: &HostTensor<'_>, row: usize, lane: usize, panel: &mut [u8]) {
    let [first, mins] = q.factors_at();
    for (block, factors) in panel.chunks_exact_mut(q.block_bytes()).zip(tensor.factors_row(row)) {
        let (_, scales) = block.split_at_mut(q.spans * q.code_bytes());
        scales[2 * lane..2 * lane + 2].copy_from_slice(&factors.d);
        match q.scales {
            Scales::Factors16 => {
                for (group, scale) in factors.scales.iter().enumerate() {
                    scales[first + factor_at(lane, group)] = scale ^ 0x80;
                }
            }
            _ => {
                scales[2 * (PANEL_ROWS + lane)..][..2].copy_from_slice(&factors.dmin);
                for group in 0..q.spans {
                    scales[first + factor_at(lane, group)] = factors.scales[group];
                    scales[mins + factor_at(lane, group)] = factors.mins[group];
                }
            }
        }
    }
}
