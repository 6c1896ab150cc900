//! NumPy's `.npz`: a zip of `.npy` arrays, stored without compression, as MLX writes them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::super::folder::{Quantization, safetensors::Dtype, safetensors::Stored};
use super::super::malformed;
use super::super::mapping::Mapping;
use super::table::WhisperTensors;
use crate::types::LoadError;

/// Opens the archive.
pub(super) fn open(path: &Path, quantization: &Quantization) -> Result<WhisperTensors, LoadError> {
    let mapping = Mapping::open(path)?;
    let mut stored = BTreeMap::new();
    for (name, range) in entries(mapping.bytes(), path)? {
        let wrong = || malformed(path, format!("`{name}` is no array that is known"));
        let array = array(mapping.bytes(), range).ok_or_else(wrong)?;
        stored.insert(name.strip_suffix(".npy").unwrap_or(&name).to_owned(), (0, array));
    }
    WhisperTensors::from_stored(vec![mapping], &stored, quantization)
}

fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let mut wide = [0; 8];
    wide[..len].copy_from_slice(bytes.get(at..at.checked_add(len)?)?);
    usize::try_from(u64::from_le_bytes(wide)).ok()
}

/// Names and places of the archive's files, by its central directory (with the 64-bit fields of big archives).
fn entries(bytes: &[u8], path: &Path) -> Result<Vec<(String, Range<usize>)>, LoadError> {
    let cut = || malformed(path, "is no whole zip archive".to_owned());
    // The end record is the last thing, but for a comment of at most 64 KiB.
    let from = bytes.len().saturating_sub(65_557);
    let tail = &bytes[from..];
    let end = tail.windows(4).rposition(|four| four == b"PK\x05\x06").map(|at| from + at).ok_or_else(cut)?;
    let (mut count, mut at) = number(bytes, end + 10, 2).zip(number(bytes, end + 16, 4)).ok_or_else(cut)?;
    if let Some(locator) = end.checked_sub(20).filter(|at| bytes[*at..].starts_with(b"PK\x06\x07")) {
        let wide = number(bytes, locator + 8, 8)
            .filter(|at| bytes.get(*at..).is_some_and(|b| b.starts_with(b"PK\x06\x06")));
        let wide = wide.ok_or_else(cut)?;
        (count, at) = number(bytes, wide + 32, 8).zip(number(bytes, wide + 48, 8)).ok_or_else(cut)?;
    }
    let mut entries = Vec::new();
    for _ in 0..count {
        let (entry, next) = entry(bytes, at).ok_or_else(cut)?;
        let (name, method, range) = entry;
        if method != 0 {
            let message =
                format!("`{name}` in {} is compressed: save the archive without compression", path.display());
            return Err(LoadError::Unsupported { message });
        }
        entries.push((name, range));
        at = next;
    }
    Ok(entries)
}

type Entry = (String, usize, Range<usize>);

/// One entry of the central directory, and where the next one is.
fn entry(bytes: &[u8], at: usize) -> Option<(Entry, usize)> {
    if !bytes.get(at..)?.starts_with(b"PK\x01\x02") {
        return None;
    }
    let method = number(bytes, at + 10, 2)?;
    let mut size = number(bytes, at + 24, 4)?;
    let (name_len, extra_len, comment) =
        (number(bytes, at + 28, 2)?, number(bytes, at + 30, 2)?, number(bytes, at + 32, 2)?);
    let mut header = number(bytes, at + 42, 4)?;
    let name = std::str::from_utf8(bytes.get(at + 46..at + 46 + name_len)?).ok()?.to_owned();
    let mut extra = bytes.get(at + 46 + name_len..at + 46 + name_len + extra_len)?;
    while extra.len() >= 4 {
        let (id, len) = (number(extra, 0, 2)?, number(extra, 2, 2)?);
        if id == 1 {
            // Only those that do not fit into 32 bits, in this order.
            let mut place = 4;
            let narrow = number(bytes, at + 20, 4)?;
            if size == 0xffff_ffff {
                size = number(extra, place, 8)?;
                place += 8;
            }
            place += if narrow == 0xffff_ffff { 8 } else { 0 };
            if header == 0xffff_ffff {
                header = number(extra, place, 8)?;
            }
        }
        extra = extra.get(4 + len..)?;
    }
    if !bytes.get(header..)?.starts_with(b"PK\x03\x04") {
        return None;
    }
    let start = header + 30 + number(bytes, header + 26, 2)? + number(bytes, header + 28, 2)?;
    bytes.get(start..start.checked_add(size)?)?;
    Some(((name, method, start..start + size), at + 46 + name_len + extra_len + comment))
}

/// An array by its header: `{'descr': '<f2', 'fortran_order': False, 'shape': (3, 4), }`.
fn array(bytes: &[u8], range: Range<usize>) -> Option<Stored> {
    let file = bytes.get(range.clone())?;
    let rest = file.strip_prefix(b"\x93NUMPY")?;
    let (length, head): (usize, usize) = match *rest.first()? {
        1 => (number(rest, 2, 2)?, 4),
        _ => (number(rest, 2, 4)?, 6),
    };
    let header = std::str::from_utf8(rest.get(head..head.checked_add(length)?)?).ok()?;
    if header.contains("'fortran_order': True") {
        return None;
    }
    let after = |key: &str| header.split_once(key).map(|(_, rest)| rest);
    let descr = after("'descr':")?.split('\'').nth(1)?;
    let shape = after("'shape':")?.split_once('(')?.1.split_once(')')?.0;
    let shape = shape.split(',').map(str::trim).filter(|n| !n.is_empty()).map(|n| n.parse().ok());
    let shape = shape.collect::<Option<Vec<usize>>>()?;
    let dtype = match descr {
        "<f2" => Dtype::F16,
        "<f4" => Dtype::F32,
        "<u4" => Dtype::U32,
        "|V2" => Dtype::BF16,
        _ => Dtype::Other,
    };
    let start = range.start + 6 + head + length;
    Some(Stored { dtype, dtype_name: descr.to_owned(), shape, bytes: start..range.end })
}
