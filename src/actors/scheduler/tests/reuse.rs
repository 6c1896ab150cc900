//! Prefixes that are shared while they are computed, waited for, lent, kept within a budget.

use super::bench::{Ask, Bench, alone};
use crate::actors::scheduler::core::Progress;
use crate::model::fake::Script;
use crate::types::{Priority, Terms};

fn computed(bench: &Bench) -> u32 {
    bench.model.control().records().iter().map(|record| record.tokens).sum()
}

fn long(tail: &str) -> Ask {
    Ask::new(&format!("{}{tail}", "a system prompt that all begin with. ".repeat(10)), 8)
}

#[test]
fn a_prefix_that_many_ask_for_at_once_is_computed_once() {
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 50);
    let asks: Vec<Ask> = ["one", "two", "three", "four"].map(long).into();
    let clients: Vec<usize> = asks.iter().map(|ask| bench.submit(ask)).collect();
    bench.finish();
    let produced: u32 =
        clients.iter().map(|client| bench.clients[*client].done().unwrap().1.completion_tokens).sum();
    let prompts = long("").prompt.len() as u32 + 3 + 3 + 5 + 4;
    assert!(computed(&bench) <= prompts + produced, "{} of {prompts} and {produced}", computed(&bench));
    for (client, ask) in clients.iter().zip(&asks) {
        assert_eq!(bench.clients[*client].text, alone(ask).0);
    }
    bench.check_empty();
}

#[test]
fn who_waited_for_a_leader_that_goes_away_takes_over_where_it_was() {
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 50);
    let leader = bench.submit(&long("one"));
    let follower = bench.submit(&long("two"));
    bench.step();
    bench.step();
    assert_eq!((bench.core.running.len(), bench.core.waiting.len()), (1, 1));
    bench.clients[leader].rx = None;
    bench.finish();
    assert_eq!(bench.clients[follower].done().unwrap().1.cached_tokens, 100);
    assert_eq!(bench.clients[follower].text, alone(&long("two")).0);
    bench.check_empty();
}

#[test]
fn who_shares_little_with_a_running_prompt_waits_for_nobody() {
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 20);
    bench.submit(&Ask::new(&format!("{}{}", "s".repeat(40), "x".repeat(100)), 4));
    bench.submit(&Ask::new(&format!("{}{}", "s".repeat(40), "y".repeat(100)), 4));
    bench.step();
    assert_eq!(bench.core.running.len(), 2);
    bench.finish();
    bench.check_empty();
}

#[test]
fn a_leader_is_as_urgent_as_who_waits_for_it() {
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 50);
    let background = Terms { priority: Priority::Background, ..Terms::default() };
    bench.submit(&Ask { terms: background.clone(), ..long("one") });
    bench.submit(&Ask { terms: background, ..Ask::new(&"another document. ".repeat(30), 4) });
    bench.step();
    let urgent = Terms { priority: Priority::Interactive, ..Terms::default() };
    let client = bench.submit(&Ask { terms: urgent, ..long("two") });
    bench.step();
    let raised: Vec<_> = bench.core.running.iter().map(|row| row.raised).collect();
    assert_eq!(raised, [Some(Priority::Interactive), None]);
    bench.finish();
    assert!(bench.clients[client].done().unwrap().1.cached_tokens > 300);
    bench.check_empty();
}

#[test]
fn salts_share_nothing_and_do_not_wait_for_each_other() {
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 50);
    let salted = |salt: &str| Ask { salt: Some(salt.into()), ..long("one") };
    bench.submit(&salted("a"));
    let other = bench.submit(&salted("b"));
    bench.step();
    assert_eq!(bench.core.running.len(), 2);
    bench.finish();
    assert_eq!(bench.clients[other].done().unwrap().1.cached_tokens, 0);
    let again = bench.submit(&salted("b"));
    bench.finish();
    assert!(bench.clients[again].done().unwrap().1.cached_tokens > 300);
    bench.check_empty();
}

#[test]
fn a_turn_that_goes_on_from_the_last_ones_end_takes_its_state_along() {
    let mut bench = Bench::new(Script::new().say("first", "an answer of some length").memory(8, 16), |_| {});
    let first = Ask::new("first question, which is long", 40);
    bench.submit(&first);
    bench.finish();
    let used = bench.gauges.kv_used_bytes.get();
    let next = Ask::new(&format!("{}an answer of some length...", first.prompt), 4);
    let client = bench.submit(&next);
    bench.step();
    let blocks = |bytes: u64| bytes / (16 * 64);
    // The tail is the row's now: nothing was copied, and the row's own room came on top.
    assert_eq!(blocks(bench.gauges.kv_used_bytes.get()), blocks(used).max(4));
    assert!(!bench.core.evict(), "what is in use is not given up");
    bench.clients[client].rx = None;
    bench.step();
    assert_eq!(bench.core.tree.borrow().statistics().entries, 1, "and it came back");
    bench.check_empty();
}

#[test]
fn what_is_kept_stays_within_its_budget() {
    let mut bench = Bench::new(Script::new().memory(4096, 16), |config| config.cache.memory_mib = Some(1));
    // 64 bytes a token: 16384 tokens are a MiB.
    for number in 0..40 {
        bench.submit(&Ask::new(&format!("{number:04}{}", "x".repeat(1000)), 4));
        bench.finish();
        assert!(bench.gauges.kv_used_bytes.get() <= 1 << 20, "{}", bench.gauges.kv_used_bytes.get());
    }
    assert!(bench.core.tree.borrow().statistics().evicted >= 20);
    bench.check_empty();
}

#[test]
fn a_state_that_cannot_be_cut_back_is_kept_where_the_next_turn_begins() {
    let mut bench =
        Bench::new(Script::new().keeps_whole_states(), |config| config.scheduler.max_chunk_tokens = 50);
    let prompt = "a conversation so far, with some words in it. ".repeat(4);
    let stable = prompt.len() as u32 - 7;
    let first = Ask { stable, ..Ask::new(&prompt, 8) };
    bench.submit(&first);
    bench.finish();
    let next = Ask::new(&format!("{}and then another turn", &prompt[..stable as usize]), 8);
    let client = bench.submit(&next);
    bench.finish();
    assert_eq!(bench.clients[client].done().unwrap().1.cached_tokens, stable);
    assert_eq!(bench.clients[client].text, alone(&next).0);
    bench.check_empty();
}

#[test]
fn a_row_that_ran_out_of_time_is_a_start_for_the_next_try() {
    use std::time::Duration;
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 50);
    let hurried = Terms { deadline: Some(Duration::from_secs(5)), ..Terms::default() };
    bench.submit(&Ask { terms: hurried, ..long("one") });
    bench.step();
    bench.step();
    bench.clock.advance(Duration::from_secs(6));
    assert_eq!(bench.step(), Progress::Idle);
    let again = bench.submit(&long("one"));
    bench.finish();
    assert_eq!(bench.clients[again].done().unwrap().1.cached_tokens, 100);
    bench.check_empty();
}

#[test]
fn a_full_pool_gives_up_something_else_than_the_prefix_that_is_asked_for() {
    let mut bench = Bench::new(Script::new().memory(12, 16), |_| {});
    let kept = "o".repeat(80);
    bench.submit(&Ask::new(&kept, 1));
    bench.finish();
    bench.submit(&Ask::new(&"t".repeat(111), 1));
    bench.finish();
    assert_eq!(bench.gauges.kv_used_bytes.get(), bench.gauges.kv_capacity_bytes.get());
    let client = bench.submit(&Ask::new(&format!("{}zzzzz", &kept[..70]), 4));
    bench.finish();
    assert_eq!(bench.clients[client].done().unwrap().1.cached_tokens, 70);
    bench.check_empty();
}

#[test]
fn a_short_common_beginning_keeps_nobodys_long_tail() {
    let tail = Ask::new(&format!("{}{}", "s".repeat(20), "l".repeat(400)), 1);
    let script = || Script::new().repeat("loop", "abc").memory(80, 16);
    let mut bench = Bench::new(script(), |_| {});
    bench.submit(&tail);
    bench.finish();
    let one = Ask { slots: 1000, ..Ask::new(&format!("{}loop", "s".repeat(20)), 600) };
    bench.submit(&one);
    bench.submit(&Ask { slots: 1000, ..Ask::new("loop", 600) });
    bench.finish();
    assert_eq!(bench.gauges.preemptions.get(), 0, "the tail was nobody's, and gave way");
    bench.check_empty();
}
