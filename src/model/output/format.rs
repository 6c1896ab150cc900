//! How an answer is written: its thoughts' markers and its calls' form.

use super::calls::{ByFirst, Headed, HeadedCalls, JsonCalls, PythonicCalls, Reader, TaggedCalls, Tags};
use super::channels::Channels;
use super::ids::IdStyle;
use super::inline::Inline;
use super::known::{BARE, SYNTAXES};
use super::thought::{THINK, THOUGHTS, Thought};

/// What a call looks like in a family's answers.
#[derive(Debug)]
pub struct CallSyntax {
    /// What tests and people call it.
    pub name: &'static str,
    /// Markers behind which a call comes, wherever they stand.
    pub(super) openers: &'static [&'static str],
    /// Brackets that begin a call without a marker, where an answer begins. Such a call counts only if
    /// the tool was offered.
    pub(super) bare: &'static [&'static str],
    /// Markers around calls that say nothing.
    pub(super) ignored: &'static [&'static str],
    /// What comes behind an opener.
    pub(super) body: Body,
    /// Markers within it that the body does not name.
    pub(super) inner: &'static [&'static str],
    /// How calls' ids look.
    pub(super) ids: IdStyle,
    /// What a rendered call has, in order; `@` is the tool's name.
    pub(super) rendered: &'static [&'static str],
    /// What a template has that asks for such calls and does not render them.
    pub(super) source: &'static [&'static str],
}

/// What a call is made of.
#[derive(Debug)]
pub(super) enum Body {
    /// JSON up to one of the markers.
    Json(&'static [&'static str]),
    /// A head and arguments.
    Headed(&'static Headed),
    /// The same, or a list in JSON.
    ListOrHeaded(&'static Headed),
    /// Tags.
    Tagged(&'static Tags),
    /// Tags, or JSON up to the block's end.
    JsonOrTagged(&'static [&'static str], &'static Tags),
    /// Python up to one of the markers, or JSON.
    Pythonic(&'static [&'static str]),
    /// The whole answer is made of messages.
    Channels,
}

impl Body {
    /// The markers that it names.
    fn markers(&self) -> Vec<&'static str> {
        match self {
            Self::Json(closers) | Self::Pythonic(closers) => closers.to_vec(),
            Self::Headed(format) | Self::ListOrHeaded(format) => format.markers(),
            Self::Tagged(tags) => tags.markers(),
            Self::JsonOrTagged(closers, tags) => [closers.to_vec(), tags.markers()].concat(),
            Self::Channels => Vec::new(),
        }
    }
}

impl CallSyntax {
    /// A reader of what comes behind a marker, or with a bracket.
    pub(super) fn reader(&self, opener: &str) -> Box<dyn Reader> {
        if self.bare.contains(&opener) {
            return if opener == "[" { Box::new(PythonicCalls::bare()) } else { Box::new(JsonCalls::bare()) };
        }
        let tagged = |tags: &'static Tags| Box::new(TaggedCalls::new(tags, opener != tags.call));
        match self.body {
            Body::Json(closers) => Box::new(JsonCalls::new(closers)),
            Body::Headed(format) => Box::new(HeadedCalls::new(format)),
            Body::ListOrHeaded(format) => {
                Box::new(ByFirst::new(&['['], JsonCalls::new(&[]), Box::new(HeadedCalls::new(format))))
            }
            Body::Tagged(tags) => tagged(tags),
            Body::JsonOrTagged(_, tags) if opener == tags.call => tagged(tags),
            Body::JsonOrTagged(closers, tags) => {
                Box::new(ByFirst::new(&['{', '['], JsonCalls::new(closers), tagged(tags)))
            }
            Body::Pythonic(closers) => {
                Box::new(ByFirst::new(&['{'], JsonCalls::new(closers), Box::new(PythonicCalls::new(closers))))
            }
            // Messages are no calls within a text: their reader takes the answer from its beginning.
            Body::Channels => Box::new(Channels::new()),
        }
    }
}

/// How the answers of a model are written.
#[derive(Clone, Copy, Debug)]
pub struct OutputFormat {
    /// Its calls.
    pub calls: &'static CallSyntax,
    /// Its thoughts.
    pub thought: &'static Thought,
}

impl Default for OutputFormat {
    /// Of a model of which nothing is known: `<think>`, and calls that are nothing but JSON.
    fn default() -> Self {
        Self { calls: &BARE, thought: &THINK }
    }
}

impl OutputFormat {
    /// The format of these calls and these thoughts, by their names.
    pub fn named(calls: &str, thought: &str) -> Option<Self> {
        let calls = SYNTAXES.iter().find(|syntax| syntax.name == calls)?;
        let thought = THOUGHTS.iter().find(|known| known.name == thought)?;
        Some(Self { calls, thought })
    }

    /// The names of all kinds of calls.
    pub fn call_names() -> impl Iterator<Item = &'static str> {
        SYNTAXES.iter().map(|syntax| syntax.name)
    }

    /// Whether a control token's text says something here: it has to be spelled out in the text that
    /// a parser reads, where others are left out.
    pub fn has_marker(&self, token: &str) -> bool {
        let Thought { open, close, frame_first, frame, .. } = self.thought;
        let CallSyntax { openers, ignored, inner, body, .. } = self.calls;
        let body = body.markers();
        let lists: [&[&str]; 6] = [frame_first, frame, openers, ignored, inner, &body];
        let mut markers = lists.into_iter().flatten().chain([open, close]);
        !token.is_empty() && markers.any(|marker| marker.contains(token))
    }

    /// Whether a prompt ends within a thought, which the answer then goes on with.
    pub fn opens_thought(&self, prompt: &str) -> bool {
        !matches!(self.calls.body, Body::Channels) && self.thought.is_open_after(prompt)
    }

    /// A reader of a whole answer.
    pub(super) fn reader(&self, offered: bool, is_thinking: bool) -> Box<dyn Reader> {
        match self.calls.body {
            Body::Channels => Box::new(Channels::new()),
            _ => Box::new(Inline::new(self.calls, self.thought, offered, is_thinking)),
        }
    }
}
