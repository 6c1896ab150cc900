//! The printable alphabet of byte-level vocabularies: one character a byte.

/// The character that stands for a byte.
pub(crate) fn char_of(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    // The others follow from U+0100 on, in order.
    let rank = (0..byte).filter(|&b| !is_printable(b)).count() as u32;
    char::from_u32(256 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a character stands for.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = c as u32;
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => (0..=255u8).filter(|&b| !is_printable(b)).nth((code - 256) as usize),
    }
}

/// A token's bytes, or `None` where it holds a character outside the alphabet.
pub(super) fn decode(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte_of).collect()
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}
