//! The server and its tools.
fn main() {}
