//! What an unloaded model leaves in the allocator.

/// Has the allocator return to the system what nobody uses. glibc keeps what was freed in pieces, which
/// after a model's weights is most of what they took; other allocators need no asking.
#[allow(unsafe_code, reason = "a C function without arguments that could be wrong")]
pub fn give_memory_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: takes no pointer, and may be called from any thread at any time.
        let _whether_anything_went = unsafe { libc::malloc_trim(0) };
    }
}
