//! Names of tracing targets and fields, so that logs can be searched by one spelling.

/// Target of the one line that every request gets.
pub const REQUEST: &str = "greenroom::request";
/// Target of what happens to engines: loaded, broken, rebuilt.
pub const ENGINE: &str = "greenroom::engine";
/// Target of the prompt cache.
pub const CACHE: &str = "greenroom::cache";
/// Target of start and stop.
pub const LIFE: &str = "greenroom::life";
