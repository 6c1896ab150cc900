//! Zeroed, aligned memory that the system maps only when it is touched.
//!
//! Used for packed weights and key-value slabs. No element types here: users
//! cast, and every bit pattern is valid for the integers and floats they use.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Alignment: a cache line.
const ALIGN: usize = 64;

/// A block of bytes, zeroed at first, on a cache-line boundary.
#[derive(Debug)]
pub struct ZeroedBytes {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: owns its memory like a Vec<u8>; shared access only reads.
unsafe impl Send for ZeroedBytes {}
// SAFETY: as above.
unsafe impl Sync for ZeroedBytes {}

impl ZeroedBytes {
    /// `len` zero bytes, or `None` when the system has no room.
    pub fn new(len: usize) -> Option<Self> {
        if len == 0 {
            return Some(Self { start: NonNull::dangling(), len });
        }
        let layout = Layout::from_size_align(len, ALIGN).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, len })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte, for reading.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The first byte. Writing through it while others read or write the same bytes is a data race
    /// that the owner must rule out.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes are owned; writers hold `&mut self` or have ruled out overlap.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// All bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes are owned, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for ZeroedBytes {
    fn drop(&mut self) {
        if self.len > 0
            && let Ok(layout) = Layout::from_size_align(self.len, ALIGN)
        {
            // SAFETY: allocated in `new` with this very layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}
