//! Sizes for people.

use std::fmt;

/// A number of bytes, shown in binary units: `93.8 MiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let (mut value, mut unit) = (self.0 as f64, 0);
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let digits = usize::from(unit > 0 && value < 100.0);
        let text = format!("{value:.digits$} {}", UNITS[unit]);
        // Widths are for tables.
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_grows_with_the_size() {
        let shown = |bytes: u64| ByteSize(bytes).to_string();
        assert_eq!([shown(0), shown(1023), shown(1536)], ["0 B", "1023 B", "1.5 KiB"]);
        assert_eq!(shown(98_362_432), "93.8 MiB");
        assert_eq!(shown(u64::MAX), "16.0 EiB");
        assert_eq!(format!("{:>10}", ByteSize(1536)), "   1.5 KiB");
    }
}
