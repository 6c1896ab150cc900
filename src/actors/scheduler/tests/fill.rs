//! Known and proposed tokens: the answers of single steps, in fewer of them.

use proptest::prelude::*;

use super::bench::{Ask, Bench, alone};
use crate::actors::scheduler::fill::{Fill, Policy, Proposal};
use crate::model::fake::Script;
use crate::types::{FinishReason, TokenId};

fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId(u32::from(byte))).collect()
}

/// Proposes a text's rest whenever what was produced is a beginning of it.
pub(super) struct Knows {
    prompt: usize,
    text: Vec<TokenId>,
    policy: Policy,
    most: usize,
    open: bool,
}

impl Knows {
    pub(super) fn new(prompt: &str, text: &str, policy: Policy) -> Box<Self> {
        Box::new(Self { prompt: prompt.len(), text: ids(text), policy, most: 5, open: false })
    }
}

impl Fill for Knows {
    fn propose(&mut self, tokens: &[TokenId], most: usize) -> Option<Proposal> {
        assert!(!self.open, "the last proposal was not answered");
        let rest = self.text.strip_prefix(tokens.get(self.prompt..)?)?;
        let tokens = rest[..rest.len().min(most).min(self.most)].to_vec();
        self.open = !tokens.is_empty();
        self.open.then_some(Proposal { tokens, policy: self.policy })
    }

    fn commit(&mut self, _: usize) {
        assert!(self.open, "an answer without a proposal");
        self.open = false;
    }
}

#[test]
fn known_tokens_are_delivered_in_order_and_cost_no_steps() {
    let answer = "{\"name\": \"search\"}";
    let mut bench = Bench::new(Script::new().say("call", answer), |_| {});
    bench.next_fill = Some(Knows::new("call", answer, Policy::Assert));
    bench.submit(&Ask::new("call", 100));
    bench.finish();
    assert_eq!(bench.clients[0].text, answer);
    let (finish, usage) = bench.clients[0].done().unwrap();
    assert_eq!((finish, usage.completion_tokens), (FinishReason::Stop, answer.len() as u32 + 1));
    assert!(bench.model.control().begun() < 8, "{} steps", bench.model.control().begun());
    bench.check_empty();
}

#[test]
fn known_tokens_stop_at_the_limit_and_at_stop_strings() {
    for (max_new, stop, text, finish) in
        [(7, "never", "abcdefg", FinishReason::Length), (100, "ef", "abcd", FinishReason::Stop)]
    {
        let mut bench = Bench::new(Script::new().say("call", "abcdefghijk"), |_| {});
        bench.next_fill = Some(Knows::new("call", "abcdefghijk", Policy::Assert));
        bench.submit(&Ask { stop: vec![stop.into()], ..Ask::new("call", max_new) });
        bench.finish();
        assert_eq!((bench.clients[0].text.as_str(), bench.clients[0].done().unwrap().0), (text, finish));
        bench.check_empty();
    }
}

#[test]
fn wrong_proposals_are_rolled_back_and_right_ones_save_steps() {
    for (proposed, most_steps) in [("the same words again", 8), ("the sane wards agaim", 18)] {
        let answer = "the same words again";
        let mut bench = Bench::new(Script::new().say("q", answer), |_| {});
        bench.next_fill = Some(Knows::new("q", proposed, Policy::Verify));
        bench.submit(&Ask::new("q", 100));
        bench.finish();
        assert_eq!(bench.clients[0].text, answer);
        assert!(bench.model.control().begun() <= most_steps, "{} steps", bench.model.control().begun());
        assert!(bench.gauges.proposed_tokens.get() >= bench.gauges.proposed_right_tokens.get());
        bench.check_empty();
    }
}

#[test]
fn an_answer_that_repeats_its_prompt_takes_fewer_steps_with_lookup() {
    let prompt = "repeat: the quick brown fox jumps over the lazy dog";
    let answer = "the quick brown fox jumps over the lazy dog";
    let steps = |lookup: bool| {
        let mut bench = Bench::new(Script::new().say("repeat", answer), |config| {
            config.scheduler.prompt_lookup = lookup;
        });
        bench.submit(&Ask::new(prompt, 100));
        bench.finish();
        assert_eq!(bench.clients[0].text, answer);
        bench.check_empty();
        bench.model.control().begun()
    };
    assert!(steps(true) * 2 < steps(false), "{} of {}", steps(true), steps(false));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn lookup_never_changes_an_answer(
        prompts in prop::collection::vec("[ab]{3,60}", 1..6),
        max_new in 1u32..80, rows in 1usize..5, blocks in 14u32..80,
    ) {
        let mut bench = Bench::new(Script::new().memory(blocks, 16), |config| {
            config.scheduler.prompt_lookup = true;
            config.scheduler.max_rows = rows;
        });
        let asks: Vec<Ask> = prompts.iter().map(|prompt| Ask::new(prompt, max_new)).collect();
        for ask in &asks {
            bench.submit(ask);
        }
        bench.finish();
        for (client, ask) in bench.clients.iter().zip(&asks) {
            prop_assert_eq!(&client.text, &alone(ask).0);
        }
        bench.check_empty();
    }
}
