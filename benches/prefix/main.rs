//! What finding a prefix costs: a prompt of 10,000 tokens among a million cached ones, in memory and on
//! disk's index, beside the least that it can cost: comparing as many tokens once.

use std::hint::black_box;

use criterion::{Criterion, criterion_main};
use greenroom::cache::ssd::{SegmentHead, SegmentId, SegmentIndex};
use greenroom::cache::{Namespace, PrefixTree, Terms};
use greenroom::types::TokenId;

/// Tokens of the prompt that is looked up.
const PROMPT: u32 = 10_000;
/// What all conversations begin with.
const SHARED: u32 = 2_000;
/// Conversations of so many tokens of their own: a million tokens in all.
const CONVERSATIONS: u32 = 330;
const OWN: u32 = 3_000;
/// Tokens of a segment on disk.
const SEGMENT: usize = 512;

fn conversation(number: u32, own: u32) -> Vec<TokenId> {
    let shared = (0..SHARED).map(|at| TokenId(at % 5_000));
    shared.chain((0..own).map(|at| TokenId((at * 31 + number * 7_919) % 49_000))).collect()
}

fn prefixes(criterion: &mut Criterion) {
    let name = Namespace::from("");
    let (mut tree, mut index) = (PrefixTree::new(true), SegmentIndex::new(u64::MAX));
    let prompt = conversation(1_000_000, PROMPT - SHARED);
    let mut id = 0;
    for number in 0..=CONVERSATIONS {
        let tokens = if number == CONVERSATIONS { prompt.clone() } else { conversation(number, OWN) };
        let _kept = tree.insert(&name, &tokens, number, Terms::default());
        let (mut start, mut parent) = (0, None);
        if let Some(chain) = index.longest("model", &tokens) {
            (start, parent) = (chain.covered as usize, chain.links.last().map(|link| link.id));
        }
        for part in tokens[start..].chunks(SEGMENT) {
            id += 1;
            let head = SegmentHead {
                id: SegmentId(id),
                namespace: "model".into(),
                parent,
                start: start as u32,
                tokens: part.to_vec(),
                created: 0,
                bytes: 1,
            };
            let _gone = index.insert(head);
            (start, parent) = (start + part.len(), Some(SegmentId(id)));
        }
    }
    let cached = tree.statistics().tokens;
    assert!(cached >= 990_000 && tree.find(&name, &prompt).equal == PROMPT);
    let mut group = criterion.benchmark_group(format!("{PROMPT} tokens among {cached}"));
    let copy = prompt.clone();
    group.bench_function("comparing them once", |bencher| {
        bencher.iter(|| black_box(&copy).iter().zip(black_box(&prompt)).take_while(|(a, b)| a == b).count());
    });
    group.bench_function("in memory", |bencher| bencher.iter(|| tree.find(&name, black_box(&prompt)).equal));
    group.bench_function("in the index of the disk", |bencher| {
        bencher.iter(|| index.longest("model", black_box(&prompt)).map(|chain| chain.covered));
    });
    group.finish();
}

#[allow(missing_docs, reason = "what the macro makes has none")]
mod group {
    criterion::criterion_group!(benches, super::prefixes);
}
use group::benches;
criterion_main!(benches);
