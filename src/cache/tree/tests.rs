//! The tree beside whole prompts looked at one by one, and each of its rules.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId).collect()
}

fn name(text: &str) -> Namespace {
    text.into()
}

fn keep(tree: &mut PrefixTree<u32>, tokens: &[u32], payload: u32) -> Vec<u32> {
    tree.insert(&name(""), &ids(tokens), payload, Terms::default())
}

fn length(tree: &PrefixTree<u32>, tokens: &[u32]) -> u32 {
    tree.find(&name(""), &ids(tokens)).found.map_or(0, |found| found.length)
}

fn why(tree: &PrefixTree<u32>, tokens: &[u32]) -> MissReason {
    tree.find(&name(""), &ids(tokens)).why
}

#[test]
fn a_longer_row_has_what_a_shorter_one_has() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1, 2], 10).is_empty());
    assert_eq!(keep(&mut tree, &[1, 2, 3], 11), [10]);
    assert_eq!(keep(&mut tree, &[1], 12), [12], "the longer one has it all");
    let found = tree.find(&name(""), &ids(&[1, 2, 9])).found.unwrap();
    assert_eq!((found.length, found.payload, found.holds), (2, 11, 3));
    assert_eq!(length(&tree, &[7]), 0);
    assert_eq!((tree.statistics().entries, tree.statistics().tokens), (1, 3));
}

#[test]
fn a_match_ends_anywhere_and_common_beginnings_count_once() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1, 2, 3, 4, 5], 10).is_empty());
    assert!(keep(&mut tree, &[1, 2, 3, 8, 9], 11).is_empty());
    assert_eq!(tree.statistics().tokens, 7);
    assert_eq!(length(&tree, &[1, 2, 3]), 3);
    assert_eq!(length(&tree, &[1, 2]), 2);
    assert_eq!(tree.find(&name(""), &ids(&[1, 2, 3, 8, 9, 9])).found.unwrap().payload, 11);
    // The tail of one goes, what both have stays.
    let Some(Evicted::Close(first)) = tree.evict() else { panic!() };
    assert_eq!(length(&tree, &[1, 2, 3]), 3);
    assert_eq!(tree.statistics().tokens, 5);
    // The other is cut back to where the two parted, and goes in the end.
    let Some(Evicted::Truncate(second, 3)) = tree.evict() else { panic!() };
    assert_ne!(first, second);
    assert_eq!(length(&tree, &[1, 2, 3, 4]), 3);
    assert_eq!(tree.evict(), Some(Evicted::Close(second)));
    assert_eq!(tree.evict(), None);
    assert_eq!((tree.statistics().tokens, tree.statistics().blocks, tree.statistics().evicted), (0, 0, 3));
}

#[test]
fn eviction_cuts_back_to_turns_and_boundaries() {
    let mut tree = PrefixTree::new(true);
    let terms = Terms { boundaries: &[2], ..Terms::default() };
    assert!(tree.insert(&name(""), &ids(&[1, 2, 3, 4]), 1, terms).is_empty());
    assert_eq!(keep(&mut tree, &[1, 2, 3, 4, 5, 6], 2), [1]);
    assert_eq!(tree.evict(), Some(Evicted::Truncate(2, 4)));
    assert_eq!(tree.evict(), Some(Evicted::Truncate(2, 2)));
    assert_eq!(tree.evict(), Some(Evicted::Close(2)));
}

#[test]
fn what_is_used_or_costs_more_is_given_up_later() {
    let mut tree = PrefixTree::new(true);
    for (tokens, payload) in [([1, 1], 10), ([2, 2], 20), ([3, 3], 30)] {
        assert!(keep(&mut tree, &tokens, payload).is_empty());
    }
    let found = tree.find(&name(""), &ids(&[1, 1, 5])).found.unwrap();
    tree.hit(&found);
    assert_eq!(tree.evict(), Some(Evicted::Close(20)), "the one that was not used for longest");
    let favoured = tree.node_of(&name(""), &ids(&[3, 3])).unwrap();
    tree.favour(favoured, true);
    assert_eq!(tree.evict(), Some(Evicted::Close(10)), "a session's tail is worth more than a use");
    assert_eq!(tree.evict(), Some(Evicted::Close(30)));
}

#[test]
fn a_deep_tail_is_worth_more_than_a_short_one_of_the_same_age() {
    let mut tree = PrefixTree::new(true);
    let long: Vec<u32> = (0..20_000).collect();
    assert!(keep(&mut tree, &long, 1).is_empty());
    assert!(keep(&mut tree, &[70_000, 1], 2).is_empty());
    assert_eq!(tree.evict(), Some(Evicted::Close(2)));
}

#[test]
fn nothing_lives_for_ever_by_what_it_was() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1, 1], 1).is_empty());
    for _ in 0..1000 {
        let found = tree.find(&name(""), &ids(&[1, 1, 1])).found.unwrap();
        tree.hit(&found);
    }
    for number in 0..2000 {
        let _own = keep(&mut tree, &[2, 2], 2 + number);
    }
    assert_eq!(tree.evict(), Some(Evicted::Close(1)));
}

#[test]
fn pinned_ones_stay_until_nothing_else_helps() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1, 1, 1], 1).is_empty());
    assert!(keep(&mut tree, &[2, 2], 2).is_empty());
    let node = tree.find(&name(""), &ids(&[1, 1])).found.unwrap().node;
    tree.pin(node);
    assert_eq!(tree.evict(), Some(Evicted::Close(2)));
    assert_eq!(tree.evict(), None);
    assert_eq!(tree.evict_pinned(), Some(Evicted::Close(1)));
    tree.unpin(node);
    assert_eq!(tree.evict(), None);
}

#[test]
fn what_hangs_below_a_pin_may_go() {
    let mut tree = PrefixTree::new(true);
    let terms = Terms { boundaries: &[2], ..Terms::default() };
    assert!(tree.insert(&name(""), &ids(&[1, 2, 3]), 1, terms).is_empty());
    let node = tree.find(&name(""), &ids(&[1, 2])).found.unwrap().node;
    tree.pin(node);
    assert_eq!(tree.evict(), Some(Evicted::Truncate(1, 2)));
    assert_eq!(tree.evict(), None);
    assert_eq!(length(&tree, &[1, 2, 3]), 2);
}

#[test]
fn a_row_may_read_what_another_still_writes() {
    let mut tree = PrefixTree::new(true);
    let lent = Terms { lent: true, ..Terms::default() };
    for end in [2, 4] {
        assert!(tree.insert(&name(""), &ids(&[1, 2, 3, 4, 5][..end]), 7, lent).is_empty());
        assert_eq!(length(&tree, &[1, 2, 3, 4, 5]), end as u32);
        assert_eq!(tree.statistics().nodes, 2, "chunks leave no nodes behind");
    }
    assert_eq!(tree.evict(), None);
    assert_eq!(tree.evict_pinned(), None);
    // The row ends: the payload moves to its end, and is the tree's.
    assert!(keep(&mut tree, &[1, 2, 3, 4, 5, 6], 7).is_empty());
    assert_eq!(tree.evict(), Some(Evicted::Close(7)));
}

#[test]
fn what_was_lent_comes_back_as_it_was() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1, 2, 3], 7).is_empty());
    assert_eq!(tree.reclaim(8), None, "this one is not the tree's");
    tree.lend(7);
    assert_eq!((tree.evict(), length(&tree, &[1, 2, 3, 4])), (None, 3));
    assert_eq!(tree.reclaim(7), Some(3));
    tree.lend(7);
    // Somebody else got further on the same way: the lent one is its row's alone now.
    assert!(keep(&mut tree, &[1, 2, 3, 4], 9).is_empty());
    assert_eq!(tree.reclaim(7), None);
    assert_eq!(length(&tree, &[1, 2, 3, 4]), 4);
    tree.forget(9);
    assert_eq!((length(&tree, &[1, 2, 3, 4]), tree.statistics().tokens), (0, 0));
}

#[test]
fn namespaces_share_nothing_and_tell_nothing() {
    let mut tree = PrefixTree::new(true);
    assert!(tree.insert(&name("a"), &ids(&[1, 2, 3]), 1, Terms::default()).is_empty());
    let lookup = tree.find(&name("b"), &ids(&[1, 2, 3, 4]));
    assert_eq!(
        (lookup.found, lookup.equal, lookup.why),
        (None, 0, MissReason::NotSeen),
        "nobody is told of others"
    );
    assert_eq!(tree.elsewhere(&name("b"), &ids(&[1, 2, 3, 4])), 3, "but the operator");
    assert_eq!(tree.find(&name("a"), &ids(&[1, 2, 3, 4])).why, MissReason::NotSeen);
}

#[test]
fn a_miss_is_explained() {
    let mut tree = PrefixTree::new(true);
    assert_eq!(why(&tree, &[1]), MissReason::NotSeen);
    assert!(keep(&mut tree, &[1, 2, 3, 4], 1).is_empty());
    assert_eq!(why(&tree, &[1, 2, 3, 4]), MissReason::Complete);
    assert_eq!(why(&tree, &[1, 2, 9]), MissReason::OtherToken);
    assert_eq!(why(&tree, &[1, 2, 3, 4, 5]), MissReason::NotSeen);
    assert!(keep(&mut tree, &[1, 2, 3, 4, 5], 2) == [1]);
    assert_eq!(tree.evict(), Some(Evicted::Truncate(2, 4)));
    let lookup = tree.find(&name(""), &ids(&[1, 2, 3, 4, 5, 6]));
    assert_eq!((lookup.equal, lookup.why), (5, MissReason::Evicted));
}

#[test]
fn states_that_cannot_be_cut_back_serve_their_own_length() {
    let mut tree = PrefixTree::new(true);
    tree.set_storage(Storage { block_tokens: 1, shares: false, trims: false });
    assert!(keep(&mut tree, &[1, 2], 1).is_empty());
    assert!(keep(&mut tree, &[1, 2, 3, 4], 2).is_empty(), "the shorter one stays");
    assert_eq!(length(&tree, &[1, 2, 3, 4, 5]), 4);
    assert_eq!(length(&tree, &[1, 2, 3, 9]), 2);
    assert_eq!(why(&tree, &[1, 2, 3, 9]), MissReason::NotTrimmable);
    assert_eq!(keep(&mut tree, &[1, 2], 3), [3]);
    assert_eq!(tree.statistics().blocks, 6);
    let closed: Vec<_> = std::iter::from_fn(|| tree.evict()).collect();
    assert_eq!(closed, [Evicted::Close(2), Evicted::Close(1)], "the shorter one was asked for again");
}

#[test]
fn what_is_released_is_handed_back_once() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1], 1).is_empty());
    assert!(keep(&mut tree, &[2], 2).is_empty());
    tree.lend(2);
    tree.release_all();
    assert_eq!(length(&tree, &[1]), 0);
    assert_eq!(tree.take_released(), [Evicted::Close(1)], "a lent one stays with its row");
    assert!(tree.take_released().is_empty());
    assert_eq!(tree.statistics().entries, 0);
}

#[test]
fn a_disabled_tree_keeps_nothing() {
    let mut tree = PrefixTree::new(false);
    assert_eq!(keep(&mut tree, &[1], 1), [1]);
    assert_eq!(length(&tree, &[1]), 0);
}

#[test]
fn a_pin_is_about_what_was_found_and_not_about_what_hangs_on_it() {
    let mut tree = PrefixTree::new(true);
    let long: Vec<u32> = (0..400).collect();
    assert!(keep(&mut tree, &long, 1).is_empty());
    let found = tree.find(&name(""), &ids(&[&long[..20], &[9]].concat())).found.unwrap();
    let node = tree.pin_found(&found);
    assert_eq!(tree.evictable_blocks(), 380);
    assert_eq!(tree.evict(), Some(Evicted::Truncate(1, 20)));
    assert_eq!((tree.evict(), tree.evictable_blocks()), (None, 0));
    tree.unpin(node);
    assert_eq!(tree.evict(), Some(Evicted::Close(1)));
}

#[test]
fn a_pin_that_goes_leaves_no_node_behind() {
    let mut tree = PrefixTree::new(true);
    assert!(keep(&mut tree, &[1, 2, 3, 4], 1).is_empty());
    let nodes = tree.statistics().nodes;
    let found = tree.find(&name(""), &ids(&[1, 2])).found.unwrap();
    let node = tree.pin_found(&found);
    assert_eq!(tree.statistics().nodes, nodes + 1);
    tree.unpin(node);
    assert_eq!(tree.statistics().nodes, nodes);
}

#[test]
fn empty_namespaces_go() {
    let mut tree = PrefixTree::new(true);
    for number in 0..1000u32 {
        let salt = name(&format!("salt {number}"));
        assert!(tree.insert(&salt, &ids(&[1, 2, 3]), number, Terms::default()).is_empty());
        tree.forget(number);
    }
    assert_eq!((tree.statistics().nodes, tree.roots.len()), (0, 0));
}

#[test]
fn a_path_is_released_as_far_as_it_is_nobody_elses() {
    let (one, two): (Vec<u32>, Vec<u32>) = ((0..50).collect(), (0..100).collect());
    let kept = |favours: bool| {
        let mut tree = PrefixTree::new(true);
        assert!(keep(&mut tree, &one, 1).is_empty());
        let other = tree.node_of(&name(""), &ids(&one)).unwrap();
        tree.favour(other, favours);
        assert_eq!(keep(&mut tree, &two, 2), [1]);
        (tree, other)
    };
    let (mut tree, _) = kept(false);
    tree.release(&name(""), &ids(&two));
    assert_eq!(tree.take_released(), [Evicted::Close(2)]);
    assert_eq!((length(&tree, &two), tree.statistics().tokens), (0, 0));
    // Cut back meanwhile: what is left of it goes all the same.
    let (mut tree, _) = kept(false);
    assert_eq!(tree.evict(), Some(Evicted::Truncate(2, 50)));
    tree.release(&name(""), &ids(&two));
    assert_eq!(tree.take_released(), [Evicted::Close(2)]);
    // Another session ends on the way, or goes on behind.
    let (mut tree, other) = kept(true);
    tree.release(&name(""), &ids(&two));
    assert_eq!(tree.take_released(), [Evicted::Truncate(2, 50)]);
    assert_eq!(tree.tokens_of(other), 50);
    let (mut tree, _) = kept(false);
    tree.release(&name(""), &ids(&one));
    assert!(tree.take_released().is_empty());
    assert_eq!(length(&tree, &two), 100);
}

#[test]
fn ghosts_are_bounded() {
    let mut tree = PrefixTree::new(true);
    for number in 0..3000 {
        let tokens: Vec<u32> = (0..1000).map(|at| if at == 0 { number } else { at }).collect();
        assert!(keep(&mut tree, &tokens, number).is_empty());
        assert!(tree.evict().is_some());
    }
    // Nor is one kept that somebody favoured while there was something to favour.
    for number in 0..600 {
        let tokens: Vec<u32> = (0..1000).map(|at| if at == 0 { 10_000 + number } else { at }).collect();
        assert!(keep(&mut tree, &tokens, number).is_empty());
        let node = tree.node_of(&name(""), &ids(&tokens)).unwrap();
        tree.favour(node, true);
        assert!(tree.evict().is_some());
    }
    let numbers = tree.statistics();
    assert!(numbers.ghost_tokens <= 1 << 18, "{numbers:?}");
    assert!(numbers.nodes < 300 && tree.ghosts.len() < 300, "{numbers:?}");
}

/// What the tree is compared with: whole prompts, looked at one by one.
#[derive(Default)]
struct Naive {
    /// What each payload holds, the lent ones as well.
    kept: BTreeMap<u32, Vec<TokenId>>,
    lent: Vec<u32>,
}

impl Naive {
    fn longest(&self, prompt: &[TokenId]) -> usize {
        self.kept.values().map(|tokens| shared(tokens, prompt)).max().unwrap_or(0)
    }

    /// Distinct prefixes: what a tree must count.
    fn tokens(&self) -> usize {
        let mut all: Vec<&[TokenId]> =
            self.kept.values().flat_map(|tokens| (1..=tokens.len()).map(|end| &tokens[..end])).collect();
        all.sort();
        all.dedup();
        all.len()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Keep(Vec<u32>, Vec<u32>),
    Publish(Vec<u32>),
    Lend(Vec<u32>),
    Return(usize),
    Find(Vec<u32>),
    Pin(Vec<u32>),
    Unpin(usize),
    Evict,
    Shrink(u64),
    Forget(usize),
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..3, 1..12)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (tokens(), prop::collection::vec(1u32..12, 0..3)).prop_map(|(t, b)| Op::Keep(t, b)),
        1 => tokens().prop_map(Op::Publish),
        1 => tokens().prop_map(Op::Lend),
        1 => any::<usize>().prop_map(Op::Return),
        3 => tokens().prop_map(Op::Find),
        1 => tokens().prop_map(Op::Pin),
        1 => any::<usize>().prop_map(Op::Unpin),
        2 => Just(Op::Evict),
        1 => (0u64..20).prop_map(Op::Shrink),
        1 => any::<usize>().prop_map(Op::Forget),
    ]
}

proptest! {
    /// Every payload is kept or handed back, exactly once; a match is the longest that any kept
    /// payload gives; counts are those of the distinct prefixes; pinned prefixes stay.
    #[test]
    fn the_tree_is_what_whole_prompts_are(ops in prop::collection::vec(op(), 1..60), block in 1u32..5) {
        let root = name("");
        let mut tree: PrefixTree<u32> = PrefixTree::new(true);
        tree.set_storage(Storage { block_tokens: block, shares: true, trims: true });
        let mut naive = Naive::default();
        let mut pins: Vec<(NodeRef, Vec<TokenId>)> = Vec::new();
        for (number, op) in ops.into_iter().enumerate() {
            let number = number as u32;
            match op {
                Op::Keep(tokens, boundaries) => {
                    let tokens = ids(&tokens);
                    naive.kept.insert(number, tokens.clone());
                    let terms = Terms { boundaries: &boundaries, ..Terms::default() };
                    for gone in tree.insert(&root, &tokens, number, terms) {
                        prop_assert!(naive.kept.remove(&gone).is_some(), "{gone} was handed back twice");
                        prop_assert!(!naive.lent.contains(&gone), "{gone} is its row's");
                    }
                }
                Op::Publish(tokens) => {
                    let tokens = ids(&tokens);
                    let terms = Terms { lent: true, ..Terms::default() };
                    naive.kept.insert(number, tokens.clone());
                    naive.lent.push(number);
                    for gone in tree.insert(&root, &tokens, number, terms) {
                        prop_assert!(naive.kept.remove(&gone).is_some());
                    }
                }
                Op::Lend(tokens) => {
                    if let Some(found) = tree.find(&root, &ids(&tokens)).found.filter(|found| !found.lent) {
                        tree.lend(found.payload);
                        naive.lent.push(found.payload);
                    }
                }
                Op::Return(which) => {
                    if naive.lent.is_empty() { continue }
                    let payload = naive.lent.swap_remove(which % naive.lent.len());
                    match tree.reclaim(payload) {
                        Some(end) => prop_assert_eq!(Some(end as usize), naive.kept.get(&payload).map(Vec::len)),
                        None => { naive.kept.remove(&payload); }
                    }
                }
                Op::Find(tokens) => {
                    if let Some(found) = tree.find(&root, &ids(&tokens)).found {
                        tree.hit(&found);
                    }
                }
                Op::Pin(tokens) => {
                    if let Some(found) = tree.find(&root, &ids(&tokens)).found {
                        let node = tree.pin_found(&found);
                        prop_assert_eq!(tree.tokens_of(node), found.length, "no more than was found");
                        pins.push((node, ids(&tokens)[..found.length as usize].to_vec()));
                    }
                }
                Op::Unpin(which) => {
                    if !pins.is_empty() {
                        let (node, _) = pins.swap_remove(which % pins.len());
                        tree.unpin(node);
                    }
                }
                Op::Evict | Op::Shrink(_) => {
                    let most = if let Op::Shrink(most) = op { most } else { tree.blocks().saturating_sub(1) };
                    while tree.blocks() > most {
                        match tree.evict() {
                            None => break,
                            Some(Evicted::Close(payload)) => {
                                prop_assert!(!naive.lent.contains(&payload));
                                prop_assert!(naive.kept.remove(&payload).is_some());
                            }
                            Some(Evicted::Truncate(payload, end)) => {
                                prop_assert!(!naive.lent.contains(&payload));
                                let kept = naive.kept.get_mut(&payload).unwrap();
                                prop_assert!((end as usize) < kept.len());
                                kept.truncate(end as usize);
                            }
                        }
                        for (_, tokens) in &pins {
                            prop_assert!(naive.longest(tokens) == tokens.len() || naive.lent_gone(tokens));
                        }
                    }
                    if pins.is_empty() && naive.lent.is_empty() {
                        prop_assert!(tree.blocks() <= most, "over the budget by nothing");
                    }
                }
                Op::Forget(which) => {
                    let owned: Vec<u32> = naive.kept.keys().copied().filter(|key| !naive.lent.contains(key)).collect();
                    if pins.is_empty() && !owned.is_empty() {
                        let payload = owned[which % owned.len()];
                        tree.forget(payload);
                        naive.kept.remove(&payload);
                    }
                }
            }
            // What a row has and the tree does not know is nobody else's.
            let known = |payload: &u32| tree.homes.contains_key(payload);
            naive.kept.retain(|payload, _| known(payload));
            naive.lent.retain(known);
            prop_assert_eq!(tree.statistics().entries as usize, naive.kept.len());
            prop_assert_eq!(tree.statistics().tokens as usize, naive.tokens());
            for probe in naive.kept.values() {
                let mut probe = probe.clone();
                probe.push(TokenId(1));
                for end in 1..=probe.len() {
                    let found = tree.find(&root, &probe[..end]).found;
                    prop_assert_eq!(found.map_or(0, |found| found.length as usize), naive.longest(&probe[..end]));
                    if let Some(found) = found {
                        let holds = &naive.kept[&found.payload];
                        prop_assert_eq!(holds.len(), found.holds as usize);
                        prop_assert_eq!(&holds[..found.length as usize], &probe[..found.length as usize]);
                    }
                }
            }
            let blocks: u64 = tree.arena.iter().map(|(_, node)| u64::from(node.blocks)).sum();
            prop_assert_eq!(blocks, tree.blocks());
            let fast: Vec<Index> = tree
                .arena
                .iter()
                .filter(|(_, node)| node.lent || node.pins > 0)
                .map(|(index, _)| index)
                .collect();
            prop_assert_eq!(fast, tree.held_fast.iter().copied().collect::<Vec<_>>());
            prop_assert!(!naive.lent.is_empty() || !pins.is_empty() || tree.evictable_blocks() == tree.blocks());
        }
    }
}

impl Naive {
    /// A pin holds what the tree owns; a lent payload is its row's to take away.
    fn lent_gone(&self, tokens: &[TokenId]) -> bool {
        !self.kept.values().any(|kept| kept.starts_with(tokens))
    }
}
