//! Ids of tool calls.

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// What ids look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IdStyle {
    /// `call_` and 24 letters and digits, as OpenAI makes them.
    Call,
    /// Nine letters and digits: Mistral's templates refuse anything else.
    Nine,
}

/// A source of ids: an answer's seed decides them all.
#[derive(Debug)]
pub(super) struct CallIds {
    state: u64,
    style: IdStyle,
}

impl CallIds {
    /// Ids that differ from those of another seed.
    pub fn new(seed: u64, style: IdStyle) -> Self {
        Self { state: seed, style }
    }

    /// The next one.
    pub fn draw(&mut self) -> String {
        let (prefix, length) = match self.style {
            IdStyle::Call => ("call_", 24),
            IdStyle::Nine => ("", 9),
        };
        let mut id = String::from(prefix);
        id.extend((0..length).map(|_| self.letter()));
        id
    }

    /// SplitMix64: its output is spread evenly, so a remainder is even enough for ids.
    fn letter(&mut self) -> char {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        char::from(ALPHABET[(mixed % 62) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_their_style_and_differ() {
        let mut call = CallIds::new(7, IdStyle::Call);
        let (first, second) = (call.draw(), call.draw());
        assert_ne!(first, second);
        assert!(first.starts_with("call_") && first.len() == 29, "{first}");
        let nine = CallIds::new(7, IdStyle::Nine).draw();
        assert!(nine.len() == 9 && nine.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{nine}");
        assert_ne!(nine, CallIds::new(8, IdStyle::Nine).draw());
    }
}
