//! What is read from disk for waiting rows: whose memory it may take, whom it may hold up.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use super::bench::{Ask, Bench, Client, alone};
use crate::actors::scheduler::disk::{DiskOrder, ReadPieces, Segments};
use crate::cache::ssd::{SegmentHead, SegmentId, SegmentIndex};
use crate::model::fake::Script;
use crate::types::{FinishReason, Priority, TokenId};

/// A disk that has these prompts, each as one segment.
struct Disk {
    prompts: Vec<String>,
}

impl Disk {
    fn of(bench: &mut Bench, prompts: &[String]) -> Self {
        let mut index = SegmentIndex::new(1 << 40);
        for (number, prompt) in prompts.iter().enumerate() {
            let head = SegmentHead {
                id: SegmentId(number as u64),
                namespace: "ns".into(),
                parent: None,
                start: 0,
                tokens: prompt.bytes().map(|byte| TokenId(u32::from(byte))).collect(),
                created: 0,
                bytes: 10,
            };
            assert!(index.insert(head).is_empty());
        }
        bench.core.disk.segments = Rc::new(RefCell::new(Segments::Open(index)));
        bench.core.disk.namespace = Some("ns".into());
        Self { prompts: prompts.to_vec() }
    }

    /// Answers what was asked of it; gives how much that was.
    fn answer(&self, bench: &mut Bench) -> usize {
        let mut reads = 0;
        for order in std::mem::take(&mut bench.core.disk.orders) {
            let DiskOrder::Read { read, segment, .. } = order else { continue };
            let tokens = self.prompts[segment.0 as usize].as_bytes();
            let piece = |bytes: &[u8]| bytes.iter().flat_map(|byte| u32::from(*byte).to_le_bytes()).collect();
            let pieces = tokens.chunks(64).map(piece).collect();
            let read_pieces = ReadPieces { start: 0, tokens: tokens.len() as u32, pieces };
            bench.core.segment_arrived(read, Some(read_pieces));
            reads += 1;
        }
        bench.core.read_slice(Duration::from_secs(1)).unwrap();
        bench.core.publish();
        reads
    }

    /// Steps until all have ended.
    fn finish(&self, bench: &mut Bench) {
        for _ in 0..5_000 {
            bench.clients.iter_mut().for_each(Client::read);
            bench.step();
            self.answer(bench);
            if bench.core.is_empty() {
                return bench.clients.iter_mut().for_each(Client::read);
            }
        }
        panic!("rows are still there");
    }
}

#[test]
fn a_prompt_that_is_on_disk_is_read_and_not_computed() {
    let mut bench = Bench::new(Script::new(), |_| {});
    let kept = "k".repeat(300);
    let disk = Disk::of(&mut bench, std::slice::from_ref(&kept));
    let ask = Ask::new(&format!("{kept} and a question"), 8);
    let client = bench.submit(&ask);
    disk.finish(&mut bench);
    let usage = bench.clients[client].done().unwrap().1;
    assert_eq!((usage.cached_tokens, usage.ssd_cached_tokens), (300, 300));
    assert_eq!(bench.clients[client].text, alone(&ask).0);
    bench.check_empty();
}

#[test]
fn memory_of_a_read_is_taken_back_before_anybody_is_refused() {
    let mut bench = Bench::new(Script::new().memory(16, 16), |_| {});
    let kept = "b".repeat(160);
    let disk = Disk::of(&mut bench, std::slice::from_ref(&kept));
    let reads = bench.submit(&Ask::new(&format!("{kept}x"), 8));
    bench.step();
    let other = bench.submit(&Ask::new(&"c".repeat(160), 8));
    bench.step();
    bench.step();
    disk.finish(&mut bench);
    assert!(bench.clients[other].done().is_some(), "{:?}", bench.clients[other].ends);
    assert!(bench.clients[reads].done().is_some());
    bench.check_empty();
}

#[test]
fn no_running_answer_is_cut_short_for_a_read() {
    let mut bench = Bench::new(Script::new().repeat("loop", "abc").memory(40, 16), |_| {});
    let kept = "b".repeat(300);
    let disk = Disk::of(&mut bench, std::slice::from_ref(&kept));
    let long = bench.submit(&Ask { slots: 1000, ..Ask::new("loop loo", 600) });
    bench.step();
    bench.submit(&Ask::new(&format!("{kept}x"), 8));
    // The disk does not answer.
    for _ in 0..700 {
        bench.clients.iter_mut().for_each(Client::read);
        bench.step();
    }
    let (finish, usage) = bench.clients[long].done().unwrap();
    assert_eq!((finish, usage.completion_tokens), (FinishReason::Length, 600));
    disk.finish(&mut bench);
    bench.check_empty();
}

#[test]
fn a_read_that_cannot_have_its_memory_takes_nothing_from_anybody() {
    let mut bench = Bench::new(Script::new().repeat("loop", "abc").memory(60, 16), |_| {});
    let kept = "b".repeat(700);
    let disk = Disk::of(&mut bench, std::slice::from_ref(&kept));
    for number in 0..3 {
        bench.submit(&Ask::new(&format!("{number}{}", "k".repeat(100)), 4));
        disk.finish(&mut bench);
    }
    bench.submit(&Ask { slots: 1000, ..Ask::new("loop loo", 300) });
    bench.step();
    let before = bench.core.tree.borrow().statistics().entries;
    bench.submit(&Ask::new(&format!("{kept}x"), 8));
    bench.step();
    assert_eq!(bench.core.tree.borrow().statistics().entries, before);
    disk.finish(&mut bench);
    bench.check_empty();
}

#[test]
fn a_disk_that_does_not_answer_holds_everybody_up_once() {
    let mut bench = Bench::new(Script::new(), |_| {});
    let prompts: Vec<String> = (0..8).map(|number| format!("{number}{}", "b".repeat(100))).collect();
    Disk::of(&mut bench, &prompts);
    let asked: Vec<usize> =
        prompts.iter().map(|prompt| bench.submit(&Ask::new(&format!("{prompt}x"), 2))).collect();
    let mut waited = 0;
    while asked.iter().any(|client| bench.clients[*client].done().is_none()) {
        bench.step();
        bench.clients.iter_mut().for_each(Client::read);
        bench.clock.advance(Duration::from_millis(100));
        waited += 1;
        assert!(waited < 30, "more than three seconds");
    }
    // And the next ones not at all, for a while.
    let next = bench.submit(&Ask::new(&format!("{}y", prompts[0].replace('b', "c")), 2));
    bench.finish();
    assert!(bench.clients[next].done().is_some());
}

#[test]
fn a_queue_does_not_fill_the_memory_with_what_is_read_for_it() {
    let script = Script::new().repeat("loop", "abc").memory(120, 16);
    let mut bench = Bench::new(script, |config| config.scheduler.max_rows = 2);
    let prompts: Vec<String> =
        (0..12u8).map(|number| format!("{}{}", char::from(b'A' + number), "b".repeat(127))).collect();
    let disk = Disk::of(&mut bench, &prompts);
    for client in ["one", "two"] {
        let long = Ask { slots: 1000, ..Ask::new(&format!("loop {client}"), 600) };
        bench.submit(&long.of(client, Priority::Normal));
    }
    bench.step();
    for (number, prompt) in prompts.iter().enumerate() {
        let ask = Ask::new(&format!("{prompt}x"), 2).of(&format!("client {number}"), Priority::Normal);
        bench.submit(&ask);
    }
    for _ in 0..50 {
        bench.clients.iter_mut().for_each(Client::read);
        bench.step();
        disk.answer(&mut bench);
        let ahead = bench.core.waiting.iter().filter(|row| row.reuse.pinned.is_some()).count();
        assert!(ahead <= 3, "{ahead} are pinned for rows that wait");
    }
    disk.finish(&mut bench);
    assert_eq!(bench.gauges.preemptions.get(), 0);
    for client in 2..14 {
        assert!(bench.clients[client].done().unwrap().1.ssd_cached_tokens > 100);
    }
    bench.check_empty();
}
