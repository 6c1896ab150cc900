//! Which part of an MP4 track is to be heard: its edit list. AAC encoders put 1024 to 2112 samples of
//! nothing in front, and only the edit list says so.

/// A part of a track.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Edit {
    /// Seconds to be dropped in front.
    pub(super) skip: f64,
    /// Seconds to be heard then, if that is said.
    pub(super) keep: Option<f64>,
}

/// The edit of the track `index` (counted from 0) of a whole file. None where there is no edit list,
/// or one that does more than cut off both ends.
pub(super) fn edit(file: &[u8], index: usize) -> Option<Edit> {
    let moov = find(file, b"moov")?;
    let movie_scale = scale(find(moov, b"mvhd")?)?;
    let track = boxes(moov).filter(|(name, _)| name == b"trak").nth(index)?.1;
    let media_scale = scale(find(find(track, b"mdia")?, b"mdhd")?)?;
    let list = find(find(track, b"edts")?, b"elst")?;
    let wide = *list.first()? == 1;
    let count = u32_at(list, 4)?;
    let mut found = None;
    for entry in 0..count.min(16) as usize {
        let (duration, start) = if wide {
            let at = 8 + entry * 20;
            (u64_at(list, at)?, u64_at(list, at + 8)? as i64)
        } else {
            let at = 8 + entry * 12;
            (u64::from(u32_at(list, at)?), i64::from(u32_at(list, at + 4)? as i32))
        };
        // -1 is a pause before the track begins: nothing to cut.
        if start < 0 {
            continue;
        }
        if found.is_some() {
            return None;
        }
        let keep = (duration > 0).then(|| duration as f64 / movie_scale);
        found = Some(Edit { skip: start as f64 / media_scale, keep });
    }
    found
}

/// Units a second of a `mvhd` or `mdhd` box.
fn scale(header: &[u8]) -> Option<f64> {
    let at = if *header.first()? == 1 { 20 } else { 12 };
    u32_at(header, at).filter(|scale| *scale > 0).map(f64::from)
}

fn find<'a>(bytes: &'a [u8], wanted: &[u8; 4]) -> Option<&'a [u8]> {
    boxes(bytes).find(|(name, _)| name == wanted).map(|(_, body)| body)
}

/// The boxes of a box: names and contents. Ends at the first that makes no sense.
fn boxes(mut bytes: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let name: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
        let (header, size) = match u32_at(bytes, 0)? {
            0 => (8, bytes.len()),
            1 => (16, usize::try_from(u64_at(bytes, 8)?).ok()?),
            size => (8, size as usize),
        };
        let body = bytes.get(header..size)?;
        bytes = bytes.get(size..)?;
        Some((name, body))
    })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes)
}
