//! What is wrong with the headers of WAV files: sizes that recorders never came back to fill in, and
//! codecs that are not read.

/// The format whose real one comes later.
const EXTENSIBLE: u16 = 0xfffe;

/// The data chunk of a WAV file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Data {
    /// Byte of the first sample.
    pub(super) start: usize,
    /// Bytes of samples, as the header says.
    pub(super) size: u32,
    /// The codec's number.
    pub(super) format: Option<u16>,
    /// Channels.
    pub(super) channels: Option<u16>,
    /// Bytes a second, where samples are as they are and all of one length.
    pub(super) bytes_per_second: Option<u64>,
    /// Where the format chunk says which speakers the channels are for.
    pub(super) speakers: Option<usize>,
    /// Where the format chunk begins to say what follows it, if it is so short that it does not.
    pub(super) lacks_extension: Option<usize>,
}

/// Finds the data chunk in the first bytes of a file. None if it lies further on, or there is none.
pub(super) fn data(head: &[u8]) -> Option<Data> {
    let mut at = 12usize;
    let mut found = Data {
        start: 0,
        size: 0,
        format: None,
        channels: None,
        bytes_per_second: None,
        speakers: None,
        lacks_extension: None,
    };
    loop {
        let name = head.get(at..at.checked_add(4)?)?;
        let size = u32_at(head, at + 4)?;
        let start = at + 8;
        match name {
            b"data" => return Some(Data { start, size, ..found }),
            b"fmt " => {
                let chunk = head.get(start..)?;
                found.format = format_of(chunk, size);
                found.channels = u16_at(chunk, 2);
                found.bytes_per_second = rate(chunk).filter(|_| matches!(found.format, Some(1 | 3 | 6 | 7)));
                found.speakers = (u16_at(chunk, 0) == Some(EXTENSIBLE) && size >= 40).then_some(start + 20);
                found.lacks_extension = (size == 16).then_some(start + 16);
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
    // An extensible header has the number at the front of its sub-format.
    match u16_at(chunk, 0)? {
        EXTENSIBLE if size >= 40 => u16_at(chunk, 24),
        other => Some(other),
    }
}

/// Bytes a second, by rate, channels and bits: what the header says of the product is often wrong.
fn rate(chunk: &[u8]) -> Option<u64> {
    let frame = u64::from(u16_at(chunk, 2)?) * u64::from(u16_at(chunk, 14)?.div_ceil(8));
    Some(u64::from(u32_at(chunk, 4)?) * frame).filter(|rate| *rate > 0)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at.checked_add(2)?)?.try_into().ok().map(u16::from_le_bytes)
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
