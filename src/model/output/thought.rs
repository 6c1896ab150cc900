//! What models put around their thoughts, and around the answer then.

/// The markers of a family's thoughts.
#[derive(PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Thought {
    /// What tests and people call it.
    pub name: &'static str,
    /// What comes before a thought; the prompt may end with it.
    pub open: &'static str,
    /// What comes behind it.
    pub close: &'static str,
    /// What may come before the answer besides.
    pub(super) frame_first: &'static [&'static str],
    /// What may stand anywhere in it and says nothing.
    pub(super) frame: &'static [&'static str],
    /// The markers are control tokens: they mean what they say wherever they stand. Others do where an
    /// answer, or what follows a thought or a call, begins; elsewhere they are text.
    pub(super) anywhere: bool,
}

/// The one of most families, and of a template of which nothing is known.
pub(super) static THINK: Thought = tags("think", "<think>", "</think>");

/// All, most particular first.
pub(super) static THOUGHTS: [&Thought; 11] = [
    &tags("seed", "<seed:think>", "</seed:think>"),
    &tags("minimax", "<mm:think>", "</mm:think>"),
    &controls("magistral", "[THINK]", "[/THINK]", &[]),
    &controls(
        "command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        &["<|START_RESPONSE|>", "<|END_RESPONSE|>"],
    ),
    &controls("gemma", "<|channel>thought", "<channel|>", &[]),
    &controls("solar", "<|think|>", "<|end|>", &["<|begin|>assistant", "<|content|>"]),
    &Thought {
        frame: &["[END FINAL RESPONSE]"],
        ..tags("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
    },
    &Thought {
        frame_first: &["<response>"],
        frame: &["</response>"],
        ..tags("granite", "<think>", "</think>")
    },
    &tags("thinking", "<thinking>", "</thinking>"),
    &tags("reasoning", "<reasoning>", "</reasoning>"),
    &THINK,
];

const fn tags(name: &'static str, open: &'static str, close: &'static str) -> Thought {
    Thought { name, open, close, frame_first: &[], frame: &[], anywhere: false }
}

const fn controls(
    name: &'static str,
    open: &'static str,
    close: &'static str,
    frame: &'static [&'static str],
) -> Thought {
    Thought { name, open, close, frame_first: &[], frame, anywhere: true }
}

impl Thought {
    /// Whether a template's text speaks of it.
    pub(super) fn is_in(&self, source: &str) -> bool {
        source.contains(self.close) && self.frame.iter().all(|marker| source.contains(marker))
    }

    /// Whether a prompt ends within a thought that has no text yet.
    pub(super) fn is_open_after(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }
}
