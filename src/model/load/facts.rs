//! Facts about a model for people.

use super::TensorTable;
use crate::types::ByteSize;

/// Family, format, types, parameters, context and size, in this order.
pub(super) fn facts(
    family: &str,
    format: &str,
    tensors: &TensorTable,
    context: u32,
) -> Vec<(String, String)> {
    [
        ("family", family.to_owned()),
        ("format", format.to_owned()),
        ("weights", tensors.weight_types().join(", ")),
        ("parameters", counted(tensors.parameters())),
        ("context", format!("{context} tokens")),
        ("file size", ByteSize(tensors.file_bytes()).to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// A count in steps of a thousand.
fn counted(count: u64) -> String {
    const UNITS: [&str; 4] = ["", " k", " M", " billion"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$}{}", UNITS[unit])
}
