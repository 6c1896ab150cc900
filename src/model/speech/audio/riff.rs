//! What is wrong with the headers of WAV files: sizes that recorders never came back to fill in, and
//! codecs that are not read.

/// The data chunk of a WAV file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Data {
    /// Byte of the first sample.
    pub(super) start: usize,
    /// Bytes of samples, as the header says.
    pub(super) size: u32,
    /// The codec's number.
    pub(super) format: Option<u16>,
    /// Where the format chunk begins to say what follows it, if it is so short that it does not.
    pub(super) lacks_extension: Option<usize>,
}

/// Finds the data chunk in the first bytes of a file. None if it lies further on, or there is none.
pub(super) fn data(head: &[u8]) -> Option<Data> {
    let mut at = 12usize;
    let (mut format, mut lacks_extension) = (None, None);
    loop {
        let name = head.get(at..at.checked_add(4)?)?;
        let size = u32_at(head, at + 4)?;
        let start = at + 8;
        match name {
            b"data" => return Some(Data { start, size, format, lacks_extension }),
            b"fmt " => {
                format = format_of(head.get(start..)?, size);
                lacks_extension = (size == 16).then_some(start + 16);
            }
            _ => {}
        }
        // Chunks start at even bytes.
        at = start.checked_add(size as usize)?.checked_add((size & 1) as usize)?;
    }
}

/// Whether a size means that nobody knew: left empty, or as much as there can be.
pub(super) fn is_unknown(size: u32) -> bool {
    size == 0 || size >= 0x7fff_0000
}

fn format_of(chunk: &[u8], size: u32) -> Option<u16> {
    let tag = |at: usize| Some(u16::from_le_bytes([*chunk.get(at)?, *chunk.get(at + 1)?]));
    // An extensible header has the number at the front of its sub-format.
    match tag(0)? {
        0xfffe if size >= 40 => tag(24),
        other => Some(other),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_le_bytes)
}

/// The name of a codec that WAV files can hold and that is not read.
pub(super) fn unread_codec(format: u16) -> Option<&'static str> {
    match format {
        0x0001 | 0x0002 | 0x0003 | 0x0006 | 0x0007 | 0x0011 => None,
        0x0022 => Some("TrueSpeech"),
        0x0031 => Some("GSM 6.10"),
        0x0040 | 0x0064 => Some("G.726"),
        0x0042 => Some("G.723.1"),
        0x0050 => Some("MPEG layer II"),
        0x0055 => Some("MP3"),
        0x0065 | 0x028f => Some("G.722"),
        0x0083 => Some("G.729"),
        0x00ff | 0x1610 => Some("AAC"),
        0x0160..=0x0163 => Some("WMA"),
        0x2000 => Some("AC-3"),
        0xa109 => Some("Speex"),
        _ => Some("an unknown codec"),
    }
}
