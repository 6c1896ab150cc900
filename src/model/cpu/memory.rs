//! Zeroed, aligned memory that the system maps only when it is touched, on huge pages where it has them.
//!
//! Used for packed weights and key-value slabs. A step reads all of a model once, so what counts is how
//! far a read runs without a page's end: weights of small models are smaller than a huge page, so
//! neighbours share a [`Region`]. It goes back to the system when its last piece does.
//!
//! No element types here: users cast, and every bit pattern is valid for the integers and floats they use.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::MmapMut;

/// Alignment: a cache line.
const ALIGN: usize = 64;
/// A huge page of x86-64 and of most ARM systems.
const HUGE: usize = 2 << 20;
/// Address space taken at once; pages of it that nobody touches cost nothing.
const REGION: usize = 64 << 20;

/// Memory that pieces are cut from, first to last.
#[derive(Debug)]
struct Region {
    /// On a huge page's boundary, inside the map. Pieces are written through it by their owners.
    start: NonNull<u8>,
    room: usize,
    /// Unmapped with the region; never touched through this name.
    _map: MmapMut,
}

// SAFETY: the bytes behind `start` belong to the pieces cut from it, which rule over their own.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// The region that small pieces come from, and its first free byte.
static CURRENT: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));

impl Region {
    /// Room for `len` bytes on whole huge pages.
    fn new(len: usize) -> Option<Arc<Self>> {
        let room = len.checked_next_multiple_of(HUGE)?;
        let mut map = MmapMut::map_anon(room.checked_add(HUGE)?).ok()?;
        // A wish: a system without huge pages gives its own.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_mut_ptr();
        let start = NonNull::new(start.wrapping_add(start.align_offset(HUGE)))?;
        Some(Arc::new(Self { start, room, _map: map }))
    }

    /// The byte at `at`, which is inside.
    fn place(&self, at: usize) -> NonNull<u8> {
        assert!(at < self.room, "a byte of the region");
        // SAFETY: the map is a huge page longer than `room`, and `start` less than one from its beginning.
        unsafe { self.start.add(at) }
    }
}

/// A block of bytes, zeroed at first, on a cache-line boundary.
#[derive(Debug)]
pub struct ZeroedBytes {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the memory; `None` for no bytes.
    _region: Option<Arc<Region>>,
}

// SAFETY: owns its bytes like a Vec<u8>; shared access only reads.
unsafe impl Send for ZeroedBytes {}
// SAFETY: as above.
unsafe impl Sync for ZeroedBytes {}

impl ZeroedBytes {
    /// `len` zero bytes, or `None` when the system has no room.
    pub fn new(len: usize) -> Option<Self> {
        if len == 0 {
            return Some(Self { start: NonNull::dangling(), len, _region: None });
        }
        if len > REGION / 2 {
            let region = Region::new(len)?;
            return Some(Self { start: region.place(0), len, _region: Some(region) });
        }
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, used) = &mut *current;
        let region = match region.upgrade() {
            Some(region) if region.room - *used >= len => region,
            _ => {
                let fresh = Region::new(REGION)?;
                (*region, *used) = (Arc::downgrade(&fresh), 0);
                fresh
            }
        };
        let start = region.place(*used);
        *used = (*used + len).next_multiple_of(ALIGN).min(region.room);
        Some(Self { start, len, _region: Some(region) })
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
