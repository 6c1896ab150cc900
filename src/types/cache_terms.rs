//! What a request says of the prompt cache.

/// Longest name of a session and longest salt, bytes.
pub const MAX_NAME_BYTES: usize = 256;
/// Most messages that a client may mark.
pub const MAX_BREAKPOINTS: usize = 4;

/// See the module. All of it is a hint but the salt.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheTerms {
    /// The conversation's name: its newest state is kept longer than others'.
    pub session: Option<String>,
    /// Computed state is shared with requests of the same salt alone.
    pub salt: Option<String>,
    /// Indexes of messages up to which the prompt is worth keeping, ascending.
    pub breakpoints: Vec<usize>,
    /// Where the parts of the first message's content end, bytes; none where it came as one text.
    pub first_parts: Vec<usize>,
    /// Put the tools in the order of their names before the template sees them.
    pub sort_tools: bool,
}
