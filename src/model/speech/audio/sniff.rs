//! What a file is, by its content, and what to call what it is not.

use super::source::Input;
use super::{AudioError, riff};

/// What is needed to tell, bytes.
const NEEDED: usize = 64;

/// How far to look for the samples of a WAV file, bytes.
const HEADER: usize = 64 * 1024;

/// What the first bytes say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sniffed {
    /// The container's short name; none where only a search can tell.
    pub(super) container: Option<&'static str>,
    /// Whether the header leaves open how long the file is, so that just stopping is normal.
    pub(super) unbounded: bool,
    /// Bytes that the header promises and that are missing.
    pub(super) missing: u64,
    /// Where everything ends, as the header says, if it does.
    pub(super) end: Option<u64>,
    /// Channels of a WAV file.
    pub(super) channels: Option<u16>,
    /// Seconds of a WAV file that is all there.
    pub(super) seconds: Option<f64>,
}

/// What can be read, by the bytes at a place.
const READ: &[(usize, &[u8], &str)] = &[
    (4, b"ftyp", "mp4"),
    (4, b"moov", "mp4"),
    (0, b"caff", "caf"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xfa", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (0, b"\xff\xe3", "mp3"),
    (0, b"\xff\xe2", "mp3"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
    (0, b"\x1aE\xdf\xa3", "webm"),
];

/// What cannot, by the bytes at a place.
const KNOWN: &[(usize, &[u8], &str)] = &[
    (0, b"%PDF", "a PDF document"),
    (0, b"PK\x03\x04", "a ZIP archive or office document"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"Rar!", "a RAR archive"),
    (0, b"7z\xbc\xaf", "a 7z archive"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WebP image"),
    (4, b"ftypheic", "a HEIC image"),
    (4, b"ftypavif", "an AVIF image"),
    (8, b"AVI ", "an AVI video"),
    (0, b"FLV\x01", "an FLV video"),
    (0, b"\x00\x00\x01\xba", "an MPEG program stream"),
    (0, b"#!AMR-WB", "AMR-WB"),
    (0, b"#!AMR", "AMR"),
    (0, b"#!SILK", "SILK"),
    (1, b"#!SILK", "SILK"),
    (0, b".snd", "AU (Sun audio)"),
    (0, b"RF64", "RF64 (WAV over 4 GB)"),
    (0, b"riff\x2e\x91", "Wave64"),
    (0, b"wvpk", "WavPack"),
    (0, b"MAC ", "Monkey's Audio"),
    (0, b"TTA1", "True Audio"),
    (0, b"DSD ", "DSD"),
    (0, b"MThd", "a MIDI file"),
    (0, b"\x30\x26\xb2\x75", "WMA (ASF)"),
    (0, b"\x0b\x77", "AC-3"),
    (0, b"\xff\xfc", "MPEG layer II"),
    (0, b"\xff\xfd", "MPEG layer II"),
    (0, b"\x7fELF", "a program"),
    (0, b"SQLite format 3", "a database"),
    (0, b"GGUF", "a model file"),
];

/// Tells what `input` is, and corrects its header where that is needed to read it.
///
/// # Errors
/// `Empty`; `Unsupported` for what is known not to be read; `Broken` where the stream fails.
pub(super) fn sniff(input: &mut Input) -> Result<Sniffed, AudioError> {
    let unreadable = |error: std::io::Error| AudioError::Broken {
        found: "the stream".to_owned(),
        at: 0,
        why: error.to_string(),
    };
    let head = input.head(NEEDED).map_err(unreadable)?;
    if head.is_empty() {
        return Err(AudioError::Empty);
    }
    let unsupported = |found: &str| Err(AudioError::Unsupported { found: found.to_owned(), at: 0 });
    if let Some(name) = lookup(KNOWN, head) {
        return unsupported(name);
    }
    let form = head.get(8..12).unwrap_or_default();
    let mut sniffed = Sniffed {
        container: lookup(READ, head),
        unbounded: false,
        missing: 0,
        end: None,
        channels: None,
        seconds: None,
    };
    if head.starts_with(b"RIFF") && form == b"WAVE" {
        sniffed.container = Some("wav");
        wav(input, &mut sniffed).map_err(unreadable)?;
        let format = riff::data(input.head(HEADER).map_err(unreadable)?).and_then(|data| data.format);
        if let Some(codec) = format.and_then(riff::unread_codec) {
            return unsupported(&format!("{codec} in WAV"));
        }
    } else if head.starts_with(b"FORM") && (form == b"AIFF" || form == b"AIFC") {
        sniffed.container = Some("aiff");
    } else if sniffed.container == Some("webm") {
        sniffed.end = matroska_end(head);
        sniffed.unbounded = sniffed.end.is_none();
        let is_webm = !contains(head, b"matroska");
        sniffed.container = Some(if is_webm { "webm" } else { "matroska" });
        // With the whole file at hand the reader would look for an index behind its end, and give up.
        let there = input.whole().map(|bytes| bytes.len() as u64);
        if sniffed.end.zip(there).is_some_and(|(end, there)| end > there) {
            input.insert(0, &[]);
        }
    } else if sniffed.container.is_none() && is_text(head) {
        return unsupported("text");
    }
    Ok(sniffed)
}

/// Names bytes that nothing is known about.
pub(super) fn unknown(head: &[u8]) -> String {
    let shown: Vec<String> = head.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("unknown bytes {}", shown.join(" "))
}

/// Sizes that are missing or wrong become what there is.
fn wav(input: &mut Input, sniffed: &mut Sniffed) -> std::io::Result<()> {
    let mut length = input.whole().map(|bytes| bytes.len());
    // G.711 without the (empty) extension of its format is common, but refused by the reader.
    if let Some(riff::Data { format: Some(6 | 7), lacks_extension: Some(at), .. }) =
        riff::data(input.head(HEADER)?)
    {
        input.insert(at, &[0, 0]);
        input.overwrite(at - 20, 18u32.to_le_bytes());
        length = length.map(|length| length + 2);
    }
    let head = input.head(HEADER)?;
    let declared = head.get(4..8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
    let Some(data) = riff::data(head) else {
        return Ok(());
    };
    sniffed.channels = data.channels;
    if let Some(at) = data.speakers {
        // They play no part, and a wrong one is too much for the reader.
        input.patch(at, [0; 4]);
    }
    let unknown = riff::is_unknown(data.size);
    // An empty chunk behind which nothing follows is just that.
    let there = length.map(|length| length.saturating_sub(data.start));
    let samples = there.map(|there| if unknown { there } else { there.min(data.size as usize) });
    sniffed.seconds = samples.zip(data.bytes_per_second).map(|(samples, rate)| samples as f64 / rate as f64);
    sniffed.unbounded = unknown;
    let beyond = there.is_some_and(|there| data.size as usize > there);
    if unknown || beyond {
        let size = there.and_then(|there| u32::try_from(there).ok()).unwrap_or(u32::MAX);
        sniffed.missing = if unknown { 0 } else { u64::from(data.size.saturating_sub(size)) };
        input.patch(data.start - 4, size.to_le_bytes());
        input.patch(4, u32::MAX.to_le_bytes());
    } else if (declared as usize) < data.start.saturating_add(data.size as usize).saturating_sub(8) {
        input.patch(4, u32::MAX.to_le_bytes());
    }
    Ok(())
}

/// Where the segment of a Matroska file ends. None where it has no size, as browsers record it.
fn matroska_end(head: &[u8]) -> Option<u64> {
    let at = head.windows(4).position(|window| window == b"\x18\x53\x80\x67")? + 4;
    let first = *head.get(at)?;
    let length = first.leading_zeros() as usize + 1;
    let rest = head.get(at + 1..at.checked_add(length)?)?;
    let most = (1u64 << (7 * length.min(8))) - 1;
    let size = rest.iter().fold(u64::from(first), |size, byte| size << 8 | u64::from(*byte)) & most;
    (size != most).then(|| (at + length) as u64 + size)
}

fn lookup(table: &[(usize, &[u8], &'static str)], head: &[u8]) -> Option<&'static str> {
    let is_at = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    table.iter().find(|(at, magic, _)| is_at(*at, magic)).map(|(.., name)| *name)
}

fn contains(head: &[u8], name: &[u8]) -> bool {
    head.get(..NEEDED.min(head.len())).unwrap_or_default().windows(name.len()).any(|window| window == name)
}

/// Printable from the start on, in UTF-8 (which may be cut at the end).
fn is_text(head: &[u8]) -> bool {
    let head = head.get(..4096.min(head.len())).unwrap_or_default();
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(head.get(..error.valid_up_to()).unwrap_or_default()).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty()
        && !text.chars().any(|letter| letter.is_control() && !matches!(letter, '\n' | '\r' | '\t'))
}
