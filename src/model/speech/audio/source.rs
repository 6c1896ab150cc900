//! Bytes to read audio from: in memory (seekable) or as they arrive (not), with corrections of the
//! header laid over them.

use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use symphonia::core::io::MediaSource;

use super::Source;

/// How far something has been read, in bytes from the start.
pub(super) type Position = Arc<AtomicU64>;

/// A source that has been looked into.
pub(super) struct Input {
    kind: Kind,
    patches: Vec<(u64, [u8; 4])>,
    at: u64,
    reached: Position,
}

enum Kind {
    Memory(Bytes),
    /// The first bytes, already read, and the rest.
    Stream(Vec<u8>, Box<dyn Read + Send + Sync>),
}

impl Input {
    /// Nothing read yet.
    pub(super) fn new(source: Source) -> Self {
        let kind = match source {
            Source::Memory(bytes) => Kind::Memory(bytes),
            Source::Stream(reader) => Kind::Stream(Vec::new(), reader),
        };
        Self { kind, patches: Vec::new(), at: 0, reached: Position::default() }
    }

    /// The first bytes: at least `wanted` of them where there are so many. Blocks on streams. To be
    /// called before anything is read.
    ///
    /// # Errors
    /// Those of the stream.
    pub(super) fn head(&mut self, wanted: usize) -> io::Result<&[u8]> {
        match &mut self.kind {
            Kind::Memory(bytes) => Ok(bytes),
            Kind::Stream(head, reader) => {
                if let Some(missing) = wanted.checked_sub(head.len()) {
                    reader.take(missing as u64).read_to_end(head)?;
                }
                Ok(head)
            }
        }
    }

    /// The whole file, if it is in memory.
    pub(super) fn whole(&self) -> Option<&Bytes> {
        match &self.kind {
            Kind::Memory(bytes) => Some(bytes),
            Kind::Stream(..) => None,
        }
    }

    /// From now on the four bytes from `at` on read as `bytes`.
    pub(super) fn patch(&mut self, at: usize, bytes: [u8; 4]) {
        self.patches.push((at as u64, bytes));
    }

    /// Puts `extra` in at byte `at` of the first bytes. The input cannot go back any more then.
    pub(super) fn insert(&mut self, at: usize, extra: &[u8]) {
        if let Kind::Memory(bytes) = &mut self.kind {
            let head = bytes.split_to(at.min(bytes.len())).to_vec();
            self.kind = Kind::Stream(head, Box::new(io::Cursor::new(std::mem::take(bytes))));
        }
        if let Kind::Stream(head, _) = &mut self.kind {
            let at = at.min(head.len());
            head.splice(at..at, extra.iter().copied());
        }
    }

    /// The four bytes from `at` on become `bytes`, also for [`Self::head`], after [`Self::insert`].
    pub(super) fn overwrite(&mut self, at: usize, bytes: [u8; 4]) {
        if let Kind::Stream(head, _) = &mut self.kind
            && let Some(target) = head.get_mut(at..at + 4)
        {
            target.copy_from_slice(&bytes);
        }
    }

    /// Tells how far has been read, also when the input itself is owned by a reader.
    pub(super) fn position(&self) -> Position {
        Arc::clone(&self.reached)
    }

    /// Lays the corrections over `buffer`, which was read at `start`.
    fn correct(&self, start: u64, buffer: &mut [u8]) {
        for (at, bytes) in &self.patches {
            for (index, byte) in bytes.iter().enumerate() {
                let place =
                    (at + index as u64).checked_sub(start).and_then(|place| usize::try_from(place).ok());
                if let Some(target) = place.and_then(|place| buffer.get_mut(place)) {
                    *target = *byte;
                }
            }
        }
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let start = self.at;
        let place = usize::try_from(start).unwrap_or(usize::MAX);
        let read = match &mut self.kind {
            Kind::Memory(bytes) => bytes.get(place..).unwrap_or_default().read(buffer)?,
            Kind::Stream(head, reader) => match head.get(place..) {
                Some(mut rest) if !rest.is_empty() => rest.read(buffer)?,
                _ => loop {
                    match reader.read(buffer) {
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        other => break other?,
                    }
                },
            },
        };
        self.correct(start, buffer.get_mut(..read).unwrap_or_default());
        self.at += read as u64;
        self.reached.fetch_max(self.at, Ordering::Relaxed);
        Ok(read)
    }
}

impl Seek for Input {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let Kind::Memory(bytes) = &self.kind else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "a stream cannot go back"));
        };
        let target = match to {
            SeekFrom::Start(place) => Some(place),
            SeekFrom::End(offset) => (bytes.len() as u64).checked_add_signed(offset),
            SeekFrom::Current(offset) => self.at.checked_add_signed(offset),
        };
        self.at = target.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

impl MediaSource for Input {
    fn is_seekable(&self) -> bool {
        self.whole().is_some()
    }

    fn byte_len(&self) -> Option<u64> {
        self.whole().map(|bytes| bytes.len() as u64)
    }
}
