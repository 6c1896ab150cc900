//! The events of an answer's choices, as they come.

use std::future::poll_fn;
use std::task::{Context, Poll};

use tokio::sync::mpsc;

use super::{Answer, broken_off};
use crate::types::{ChatEvent, Failure, Timings, Usage};

/// The streams of all choices as one. Dropping it drops them, which cancels what is not finished.
#[derive(Debug)]
pub struct Choices {
    /// `None` where the end has come.
    streams: Vec<Option<mpsc::Receiver<ChatEvent>>>,
    /// Who is asked first: nobody's events wait behind another's for ever.
    turn: usize,
}

impl Choices {
    /// In the order of their numbers.
    pub fn new(streams: Vec<mpsc::Receiver<ChatEvent>>) -> Self {
        Self { streams: streams.into_iter().map(Some).collect(), turn: 0 }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether the end of each has come.
    pub fn is_over(&self) -> bool {
        self.streams.iter().all(Option::is_none)
    }

    /// The next event and whose it is; `None` once all are over. A stream without an end fails.
    ///
    /// # Cancellation
    /// Loses nothing.
    pub async fn next(&mut self) -> Option<(usize, ChatEvent)> {
        poll_fn(|context| self.poll(context)).await
    }

    /// An event that is there already.
    pub fn try_next(&mut self) -> Option<(usize, ChatEvent)> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        match self.poll(&mut context) {
            Poll::Ready(next) => next,
            Poll::Pending => None,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, ChatEvent)>> {
        let count = self.streams.len();
        let mut open = false;
        for choice in (0..count).map(|step| (self.turn + step) % count) {
            let Some(stream) = &mut self.streams[choice] else { continue };
            let Poll::Ready(event) = stream.poll_recv(context) else {
                open = true;
                continue;
            };
            let event = event.unwrap_or_else(|| ChatEvent::Failed(broken_off()));
            if event.is_terminal() {
                self.streams[choice] = None;
            }
            self.turn = choice + 1;
            return Poll::Ready(Some((choice, event)));
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

/// Token counts and times of several choices with one prompt: the prompt counts once, as the first
/// choice saw it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Total {
    /// Of all that are done.
    pub usage: Usage,
    /// The first choice's.
    pub timings: Option<Timings>,
}

impl Total {
    /// A choice is done.
    pub fn add(&mut self, choice: usize, usage: Usage, timings: Timings) {
        let completion_tokens = self.usage.completion_tokens.saturating_add(usage.completion_tokens);
        let reasoning_tokens = self.usage.reasoning_tokens.saturating_add(usage.reasoning_tokens);
        if choice == 0 {
            (self.usage, self.timings) = (usage, Some(timings));
        }
        self.usage = Usage { completion_tokens, reasoning_tokens, ..self.usage };
    }
}

/// Waits for all of the answer.
///
/// # Errors
/// The first choice's failure that comes; the others are given up.
pub async fn collect(mut choices: Choices) -> Result<(Vec<Answer>, Usage, Option<Timings>), Failure> {
    let mut answers = vec![Answer::default(); choices.len()];
    let mut total = Total::default();
    while let Some((choice, event)) = choices.next().await {
        match event {
            ChatEvent::Done { finish, stop_string, usage, timings } => {
                answers[choice].finish = finish;
                answers[choice].stop_string = stop_string;
                total.add(choice, usage, timings);
            }
            ChatEvent::Failed(failure) => return Err(failure),
            piece => answers[choice].push(piece),
        }
    }
    Ok((answers, total.usage, total.timings))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::FinishReason;

    fn done(completion_tokens: u32, cached_tokens: u32) -> ChatEvent {
        let usage = Usage { prompt_tokens: 5, cached_tokens, completion_tokens, ..Usage::default() };
        ChatEvent::Done { finish: FinishReason::Stop, stop_string: None, usage, timings: Timings::default() }
    }

    fn stream(events: Vec<ChatEvent>) -> mpsc::Receiver<ChatEvent> {
        let (send, events_out) = mpsc::channel(events.len().max(1));
        events.into_iter().for_each(|event| send.try_send(event).unwrap());
        events_out
    }

    fn text(text: &str) -> ChatEvent {
        ChatEvent::Text(text.into())
    }

    #[tokio::test]
    async fn choices_are_collected_each_for_itself_and_the_prompt_counts_once() {
        let streams =
            vec![stream(vec![text("a"), text("b"), done(2, 0)]), stream(vec![text("c"), done(1, 4)])];
        let (answers, usage, timings) = collect(Choices::new(streams)).await.unwrap();
        let texts: Vec<&str> = answers.iter().map(|answer| answer.text.as_str()).collect();
        assert_eq!(texts, ["ab", "c"]);
        assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (5, 0, 3));
        assert!(timings.is_some());
    }

    #[tokio::test]
    async fn nobody_waits_behind_another_for_ever() {
        let busy = stream((0..10).map(|_| text("x")).collect());
        let mut choices = Choices::new(vec![busy, stream(vec![text("y"), done(1, 0)])]);
        let mut whose = Vec::new();
        for _ in 0..4 {
            whose.push(choices.next().await.unwrap().0);
        }
        assert_eq!(whose, [0, 1, 0, 1]);
    }

    #[tokio::test]
    async fn a_stream_without_an_end_fails_and_what_is_over_is_over() {
        let mut choices = Choices::new(vec![stream(vec![text("x")])]);
        assert_eq!(choices.try_next(), Some((0, text("x"))));
        assert_eq!(choices.try_next(), Some((0, ChatEvent::Failed(broken_off()))));
        assert!(choices.is_over());
        assert_eq!((choices.try_next(), choices.next().await), (None, None));
    }
}
