//! Speech: from the bytes of a recording to text.

pub mod audio;
