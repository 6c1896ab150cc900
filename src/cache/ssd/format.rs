//! A segment's file.
//!
//! `GRKVSEG1`, the head's length and its CRC-32 (u32, little endian), the head as JSON, the pieces.
//! The head says how long each piece is and what its CRC is, so that a file that was cut off or
//! changed anywhere is known for what it is. JSON, because a head is small, read once, and people
//! look at it.

use std::io::{self, Read};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{MOST_TOKENS, SegmentHead, SegmentId, pieces};
use crate::types::TokenId;

/// What every file begins with; the digit is the format's version.
const MAGIC: [u8; 8] = *b"GRKVSEG1";
/// Bytes before the head.
const LEAD: usize = 16;
/// Longest head.
const MOST_HEAD_BYTES: usize = 4 << 20;
/// Longest namespace.
const MOST_NAMESPACE_BYTES: usize = 1024;

/// The head as it is written.
#[derive(Serialize, Deserialize)]
struct Written {
    id: SegmentId,
    namespace: String,
    parent: Option<SegmentId>,
    start: u32,
    tokens: Vec<TokenId>,
    created: u64,
    /// Of each piece: bytes, and their CRC-32.
    pieces: Vec<(u64, u32)>,
}

/// A file's head, and what it says of the pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Opening {
    pub head: SegmentHead,
    pub pieces: Vec<(u64, u32)>,
}

/// The bytes before the pieces.
pub(super) fn opening(head: &SegmentHead, all: &[impl AsRef<[u8]>]) -> io::Result<Vec<u8>> {
    let checked = |piece: &[u8]| (piece.len() as u64, crc32fast::hash(piece));
    let written = Written {
        id: head.id,
        namespace: head.namespace.to_string(),
        parent: head.parent,
        start: head.start,
        tokens: head.tokens.clone(),
        created: head.created,
        pieces: all.iter().map(|piece| checked(piece.as_ref())).collect(),
    };
    let text = serde_json::to_vec(&written)?;
    let mut bytes = Vec::with_capacity(LEAD + text.len());
    bytes.extend(MAGIC);
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(crc32fast::hash(&text).to_le_bytes());
    bytes.extend(text);
    match read_opening(&mut bytes.as_slice()) {
        Ok(Ok(_)) => Ok(bytes),
        Ok(Err(reason)) => Err(io::Error::new(io::ErrorKind::InvalidInput, reason)),
        Err(error) => Err(error),
    }
}

/// Reads up to the pieces. The inner error is what is wrong with the bytes; the head's `bytes` is
/// what the file's length must be.
pub(super) fn read_opening(from: &mut impl Read) -> io::Result<Result<Opening, String>> {
    let mut lead = [0; LEAD];
    if !fill(from, &mut lead)? {
        return Ok(Err("it is cut off".into()));
    }
    let word = |at: usize| u32::from_le_bytes([lead[at], lead[at + 1], lead[at + 2], lead[at + 3]]);
    if lead[..8] != MAGIC {
        return Ok(Err("it is of another format, or none".into()));
    }
    let length = word(8) as usize;
    if length > MOST_HEAD_BYTES {
        return Ok(Err("its head is damaged".into()));
    }
    let mut text = vec![0; length];
    if !fill(from, &mut text)? {
        return Ok(Err("it is cut off".into()));
    }
    if crc32fast::hash(&text) != word(12) {
        return Ok(Err("its head is damaged".into()));
    }
    Ok(parse(&text, (LEAD + length) as u64))
}

fn parse(text: &[u8], before: u64) -> Result<Opening, String> {
    let written: Written =
        serde_json::from_slice(text).map_err(|error| format!("its head is wrong: {error}"))?;
    let Written { id, namespace, parent, start, tokens, created, pieces: sizes } = written;
    let end = u32::try_from(tokens.len()).ok().and_then(|count| start.checked_add(count));
    let bytes = sizes.iter().try_fold(before, |sum, (bytes, _)| sum.checked_add(*bytes));
    let (Some(end), Some(bytes)) = (end, bytes) else { return Err("its sizes are wrong".into()) };
    let is_whole = !tokens.is_empty()
        && tokens.len() <= MOST_TOKENS
        && namespace.len() <= MOST_NAMESPACE_BYTES
        && (start == 0) == parent.is_none()
        && pieces(&(start..end)).count() == sizes.len();
    if !is_whole {
        return Err("its head contradicts itself".into());
    }
    let head = SegmentHead { id, namespace: Arc::from(namespace), parent, start, tokens, created, bytes };
    Ok(Opening { head, pieces: sizes })
}

/// Fills the buffer; false where the file ends before.
pub(super) fn fill(from: &mut impl Read, into: &mut [u8]) -> io::Result<bool> {
    match from.read_exact(into) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
