//! Reuse of finished rows, admission by memory, eviction, rows that are set back.

use super::bench::{Ask, Bench, alone};
use crate::model::fake::{FakeModel, Script};
use crate::types::{ChatEvent, FailureReason, FinishReason, PrepareError, Refusal};

#[test]
fn a_longer_prompt_reuses_what_a_finished_row_computed() {
    let mut bench = Bench::new(Script::new(), |_| {});
    let first = Ask::new(&"system prompt, the same for all. ".repeat(3), 20);
    bench.submit(&first);
    bench.finish();
    let answer = bench.clients[0].text.clone();
    let next = Ask::new(&format!("{}{answer} and now?", first.prompt), 20);
    let client = bench.submit(&next);
    bench.finish();
    let (_, usage) = bench.clients[client].done().unwrap();
    // The last token drawn was never computed; an end token is not part of the next prompt.
    let kept = first.prompt.len() + answer.len();
    assert!(usage.cached_tokens as usize >= kept - 1, "{usage:?} of {kept}");
    assert_eq!(bench.clients[client].text, alone(&next).0);
    let records = bench.model.control().records();
    let prefill = records.iter().filter(|record| record.start == usage.cached_tokens).count();
    assert_eq!(prefill, 1, "only the rest was computed");
    assert_eq!(bench.gauges.cache_hit_tokens.get(), u64::from(usage.cached_tokens));
    bench.check_empty();
}

#[test]
fn the_same_prompt_again_computes_one_token_of_it() {
    let mut bench = Bench::new(Script::new(), |_| {});
    let ask = Ask::new(&"the very same prompt ".repeat(4), 10);
    bench.submit(&ask);
    bench.finish();
    bench.submit(&ask);
    bench.finish();
    assert_eq!(bench.clients[0].text, bench.clients[1].text);
    let usage = bench.clients[1].done().unwrap().1;
    assert_eq!(usage.cached_tokens, usage.prompt_tokens - 1);
    bench.check_empty();
}

#[test]
fn a_cancelled_long_prefill_is_a_start_for_the_next_try() {
    let mut bench = Bench::new(Script::new(), |config| config.scheduler.max_chunk_tokens = 50);
    let ask = Ask::new(&"a long document ".repeat(20), 10);
    bench.submit(&ask);
    bench.step();
    bench.step();
    bench.clients[0].rx = None;
    bench.step();
    let again = bench.submit(&ask);
    bench.finish();
    assert_eq!(bench.clients[again].done().unwrap().1.cached_tokens, 100);
    assert_eq!(bench.clients[again].text, alone(&ask).0);
}

#[test]
fn kept_rows_make_room_for_live_ones() {
    let mut bench = Bench::new(Script::new().memory(20, 16), |_| {});
    for number in 0..6 {
        let ask = Ask::new(&format!("{number} is a prompt of more than one block"), 30);
        let client = bench.submit(&ask);
        bench.finish();
        assert_eq!(bench.clients[client].text, alone(&ask).0);
    }
    assert!(bench.core.tree.borrow().statistics().evicted > 0);
    bench.check_empty();
}

/// A finished row's blocks are room for a new one or part of it, not both.
#[test]
fn a_row_that_must_wait_keeps_the_prefix_that_it_waits_for() {
    let mut bench = Bench::new(Script::new().say("kept", "yes").memory(12, 16), |_| {});
    let kept = format!("kept {}", "k".repeat(80));
    bench.submit(&Ask::new(&kept, 10));
    bench.finish();
    bench.submit(&Ask::new("small", 30));
    bench.step();
    assert_eq!(bench.core.running.len(), 1, "three blocks");
    let next = Ask::new(&format!("{kept}{}", "n".repeat(65)), 10);
    let client = bench.submit(&next);
    bench.step();
    assert_eq!(bench.core.waiting.len(), 1, "ten blocks do not go beside three");
    assert_eq!(bench.core.tree.borrow().statistics().entries, 1);
    bench.finish();
    assert_eq!(bench.clients[client].done().unwrap().1.cached_tokens as usize, kept.len());
    assert_eq!(bench.clients[client].text, "yes");
    bench.check_empty();
}

/// Finished rows that share their beginning look like more room than they are.
#[test]
fn a_prefix_outlives_the_rows_that_were_given_up_in_vain() {
    let mut bench = Bench::new(Script::new().memory(14, 16), |_| {});
    let common = "c".repeat(80);
    for tail in ["one", "two"] {
        bench.submit(&Ask::new(&format!("{common}{tail}"), 5));
        bench.finish();
    }
    assert_eq!(bench.core.tree.borrow().statistics().entries, 2);
    bench.submit(&Ask::new("small", 30));
    bench.step();
    let next = Ask::new(&format!("{common}{}", "n".repeat(105)), 5);
    let client = bench.submit(&next);
    bench.step();
    assert_eq!(bench.core.waiting.len(), 1, "twelve blocks do not go beside three");
    bench.finish();
    assert_eq!(bench.clients[client].done().unwrap().1.cached_tokens, 80);
    assert_eq!(bench.clients[client].text, alone(&next).0);
    bench.check_empty();
}

/// Who may produce much gets its memory block by block, and must not meet a newcomer there.
#[test]
fn a_block_stays_free_for_every_row_that_may_grow() {
    for (max_new, running) in [(600, 1), (30, 2)] {
        let script = Script::new().repeat("loop", "abc").memory(24, 16);
        let mut bench = Bench::new(script, |config| config.cache.enabled = false);
        bench.submit(&Ask::new(&"loop ".repeat(8), max_new));
        bench.step();
        let set_aside = bench.gauges.kv_used_bytes.get() / (16 * 64);
        let rest = usize::try_from(24 - set_aside).unwrap() * 16;
        bench.submit(&Ask::new(&"p".repeat(rest - 10), 10));
        bench.step();
        assert_eq!(bench.core.running.len(), running, "all free blocks are asked for");
        bench.finish();
        bench.check_empty();
    }
}

#[test]
fn rows_wait_for_memory_in_order_of_arrival() {
    let mut bench = Bench::new(Script::new().memory(12, 16), |config| config.cache.enabled = false);
    let asks: Vec<Ask> = (0..5).map(|number| Ask::new(&format!("{number}{}", "p".repeat(60)), 30)).collect();
    for ask in &asks {
        bench.submit(ask);
    }
    bench.step();
    assert_eq!(bench.core.running.len(), 2, "6 blocks each are set aside");
    bench.finish();
    for (client, ask) in bench.clients.iter().zip(&asks) {
        assert_eq!(client.text, alone(ask).0);
    }
    assert_eq!(bench.gauges.preemptions.get(), 0);
    bench.check_empty();
}

/// Rows that may produce much set little aside, so memory runs out while they run.
#[test]
fn the_youngest_row_is_set_back_and_its_text_does_not_show_it() {
    let script = || Script::new().repeat("loop", "abcdefg ").memory(60, 16);
    let mut bench = Bench::new(script(), |config| config.cache.enabled = false);
    for _ in 0..2 {
        bench.submit(&Ask::new(&format!("loop {}", "p".repeat(100)), 600));
    }
    bench.finish();
    assert!(bench.gauges.preemptions.get() > 0, "memory was short");
    let expected: String = "abcdefg ".repeat(75);
    for client in &bench.clients {
        assert_eq!(client.text, expected);
        assert_eq!(client.done().unwrap().0, FinishReason::Length);
    }
    bench.check_empty();
}

#[test]
fn a_row_that_is_alone_and_too_big_ends_with_what_it_has() {
    let script = Script::new().repeat("loop", "abcdefg ").memory(20, 16);
    let mut bench = Bench::new(script, |_| {});
    bench.submit(&Ask::new("loop", 1000));
    bench.finish();
    let (finish, usage) = bench.clients[0].done().unwrap();
    assert_eq!(finish, FinishReason::Length);
    assert_eq!(usage.prompt_tokens + usage.completion_tokens, 320 + 1, "all memory, and one token drawn");
    assert_eq!(bench.clients[0].text.len(), usage.completion_tokens as usize);
    bench.check_empty();
}

#[test]
fn a_prompt_beyond_all_memory_is_refused_at_once_and_costs_nobody_anything() {
    let mut bench = Bench::new(Script::new().memory(12, 16), |_| {});
    let kept = Ask::new(&"worth keeping ".repeat(3), 5);
    bench.submit(&kept);
    bench.finish();
    let running = Ask::new("small", 30);
    let other = bench.submit(&running);
    bench.step();
    let refused = bench.try_submit(&Ask::new(&"p".repeat(192), 10)).unwrap_err();
    let Refusal::Prepare(PrepareError::MemoryExceeded { prompt: 192, need, have, most: 191 }) = refused
    else {
        panic!("{refused}");
    };
    assert_eq!((need.0, have.0), (13 * 16 * 64, 12 * 16 * 64));
    let fits = bench.submit(&Ask::new(&"q".repeat(191), 1));
    bench.step();
    assert_eq!(bench.core.tree.borrow().statistics().entries, 1, "what is kept stays kept");
    bench.finish();
    assert_eq!(bench.clients[other].text, alone(&running).0);
    assert!(bench.clients[fits].done().is_some());
    bench.check_empty();
}

/// While there is no engine nobody knows how much memory the next one has.
#[test]
fn a_prompt_beyond_all_memory_of_a_new_engine_fails_with_a_sentence() {
    let mut bench = Bench::new(Script::new(), |_| {});
    bench.core.lose_engine();
    bench.submit(&Ask::new(&"p".repeat(100), 10));
    let fits = bench.submit(&Ask::new("small", 10));
    let smaller = FakeModel::new("fake", Script::new().memory(4, 16));
    bench.core.attach(smaller.engine(bench.core.epoch), smaller.text());
    bench.finish();
    let ChatEvent::Failed(failure) = &bench.clients[0].ends[0] else { panic!("it cannot be computed") };
    assert_eq!(failure.reason, FailureReason::OutOfMemory);
    assert!(failure.message.contains("100 tokens"), "{}", failure.message);
    assert!(bench.clients[fits].done().is_some(), "the next one is served");
    bench.check_empty();
}
