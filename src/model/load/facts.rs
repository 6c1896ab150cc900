//! Facts about a model for people.

use super::TensorTable;

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
        ("parameters", scaled(tensors.parameters(), 1000.0, &["", " k", " M", " billion"])),
        ("context", format!("{context} tokens")),
        ("file size", scaled(tensors.file_bytes(), 1024.0, &[" B", " KiB", " MiB", " GiB"])),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

fn scaled(value: u64, base: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (value as f64, 0);
    while value >= base && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$}{}", units.get(unit).copied().unwrap_or_default())
}
