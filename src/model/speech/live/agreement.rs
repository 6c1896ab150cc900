//! Text that grows while somebody speaks: what two hypotheses in a row agree on is committed and never
//! changes, the rest is tentative. (Liu et al. 2020, «Low-latency sequence-to-sequence speech recognition
//! and translation by partial hypothesis selection»; local agreement with n = 2.)

use crate::types::speech::Word;

/// A word that begins before the committed text's end by more than this belongs to it, in seconds.
const SLACK: f64 = 0.1;
/// A hypothesis that begins so near to the committed text's end may repeat its last words, in seconds.
const NEAR: f64 = 1.0;
/// Words that may be repeated.
const REPEATED: usize = 5;
/// A run of words that comes so often in a row is a loop.
const LOOP: usize = 3;
/// Longest run that is looked for.
const LONGEST_RUN: usize = 12;

/// One utterance's text; see the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Agreement {
    committed: Vec<Word>,
    tentative: Vec<Word>,
}

impl Agreement {
    /// Words that will not change.
    pub fn committed(&self) -> &[Word] {
        &self.committed
    }

    /// Words that may.
    pub fn tentative(&self) -> &[Word] {
        &self.tentative
    }

    /// Takes a hypothesis of all audio of the utterance so far, which is `seconds` long. A loop is
    /// taken for nothing heard: agreement would confirm it happily.
    pub fn step(&mut self, mut words: Vec<Word>, seconds: f64) {
        words.retain(|word| word.start < seconds);
        if has_loop(&words) {
            self.tentative.clear();
            return;
        }
        let mut words = self.beyond(words);
        let agreed = words.iter().zip(&self.tentative).take_while(|(new, old)| same(new, old)).count();
        self.tentative = words.split_off(agreed);
        self.committed.append(&mut words);
    }

    /// The utterance is over and was heard once more: commits what goes beyond the committed text.
    pub fn close(&mut self, words: Vec<Word>) {
        let mut rest = self.beyond(words);
        self.tentative.clear();
        self.committed.append(&mut rest);
    }

    /// The words of a hypothesis behind the committed ones.
    fn beyond(&self, mut words: Vec<Word>) -> Vec<Word> {
        let Some(end) = self.committed.last().map(|word| word.end) else { return words };
        words.retain(|word| word.start > end - SLACK);
        let near = words.first().is_some_and(|first| (first.start - end).abs() < NEAR);
        let most = if near { REPEATED.min(words.len()).min(self.committed.len()) } else { 0 };
        let repeated = (1..=most).rev().find(|count| {
            let last = &self.committed[self.committed.len() - count..];
            last.iter().zip(&words).all(|(old, new)| same(old, new))
        });
        words.drain(..repeated.unwrap_or(0));
        words
    }
}

/// Whether two words are the same but for case and punctuation.
fn same(a: &Word, b: &Word) -> bool {
    plain(&a.word).eq(plain(&b.word))
}

fn plain(word: &str) -> impl Iterator<Item = char> {
    word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase)
}

/// Whether some run of words comes [`LOOP`] times in a row.
fn has_loop(words: &[Word]) -> bool {
    // Short words are said three times for real («no no no»): a loop has some length.
    let long_enough = |run: &[Word]| run.iter().map(|word| word.word.trim().len()).sum::<usize>() > 5;
    (1..=LONGEST_RUN.min(words.len() / LOOP)).any(|length| {
        words.windows(length * LOOP).any(|window| {
            let (first, rest) = window.split_at(length);
            long_enough(first)
                && rest.chunks_exact(length).all(|run| run.iter().zip(first).all(|(a, b)| same(a, b)))
        })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Words half a second apart.
    fn words(text: &str) -> Vec<Word> {
        let word = |(i, word): (usize, &str)| Word {
            word: format!(" {word}"),
            start: i as f64 * 0.5,
            end: i as f64 * 0.5 + 0.4,
            ..Word::default()
        };
        text.split_whitespace().enumerate().map(word).collect()
    }

    fn text(words: &[Word]) -> String {
        words.iter().map(|word| word.word.as_str()).collect::<String>().trim().to_owned()
    }

    #[test]
    fn what_two_hypotheses_agree_on_is_committed_with_the_newer_spelling() {
        let mut text_so_far = Agreement::default();
        text_so_far.step(words("the cat sad"), 9.0);
        assert_eq!((text_so_far.committed().len(), text(text_so_far.tentative())), (0, "the cat sad".into()));
        text_so_far.step(words("The cat, sat on"), 9.0);
        assert_eq!(text(text_so_far.committed()), "The cat,");
        assert_eq!(text(text_so_far.tentative()), "sat on");
        text_so_far.close(words("The cat sat on the mat."));
        assert_eq!(text(text_so_far.committed()), "The cat, sat on the mat.");
        assert_eq!(text_so_far.tentative(), []);
    }

    #[test]
    fn words_that_slid_behind_the_committed_ones_do_not_come_twice() {
        let mut said = Agreement::default();
        said.step(words("one two three"), 9.0);
        said.step(words("one two three"), 9.0);
        // The same words, heard a bit later now.
        let late = words("one two three four").into_iter().map(|mut word| {
            (word.start, word.end) = (word.start + 0.45, word.end + 0.45);
            word
        });
        said.close(late.collect());
        assert_eq!(text(said.committed()), "one two three four");
    }

    #[test]
    fn a_loop_is_never_committed() {
        let mut said = Agreement::default();
        for _ in 0..3 {
            said.step(words("so thank you very much thank you very much thank you very much"), 99.0);
        }
        assert_eq!((said.committed(), said.tentative()), (&[][..], &[][..]));
        for _ in 0..2 {
            said.step(words("no no no"), 9.0);
        }
        assert_eq!(text(said.committed()), "no no no");
    }

    #[test]
    fn words_beyond_the_audio_are_dropped() {
        let mut said = Agreement::default();
        said.step(words("a b c d"), 1.2);
        assert_eq!(text(said.tentative()), "a b c");
    }

    proptest! {
        #[test]
        fn committed_text_only_grows(
            steps in proptest::collection::vec(proptest::collection::vec((0..6usize, 0.0..0.3f64), 0..12), 1..12)
        ) {
            let vocabulary = ["alpha", "beta", "Beta,", "gamma", "delta.", "alpha"];
            let mut said = Agreement::default();
            for step in steps {
                let mut words = words(&step.iter().map(|(i, _)| vocabulary[*i]).collect::<Vec<_>>().join(" "));
                words.iter_mut().zip(&step).for_each(|(word, (_, late))| {
                    word.start += late;
                    word.end += late;
                });
                let before = text(said.committed());
                said.step(words.clone(), 99.0);
                prop_assert!(text(said.committed()).starts_with(&before));
                let before = text(said.committed());
                let mut closed = said.clone();
                closed.close(words);
                prop_assert!(text(closed.committed()).starts_with(&before));
            }
        }
    }
}
