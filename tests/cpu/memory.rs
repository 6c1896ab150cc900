//! Memory of weights and key-value slabs: zeroed, aligned, nobody else's.

use greenroom::model::cpu::memory::ZeroedBytes;
use proptest::prelude::*;

/// More than half of a region: such a piece has one of its own.
const LARGE: usize = 40 << 20;

#[test]
fn no_bytes_need_no_memory() {
    let none = ZeroedBytes::new(0).unwrap();
    assert!(none.is_empty() && none.as_slice().is_empty());
}

#[test]
fn a_size_that_no_machine_has_is_refused() {
    assert!(ZeroedBytes::new(usize::MAX).is_none());
    assert!(ZeroedBytes::new(usize::MAX / 2).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn pieces_are_zeroed_and_keep_what_their_owner_wrote(
        steps in prop::collection::vec((prop_oneof![8 => 1..70_000_usize, 1 => Just(LARGE)], any::<bool>()), 1..24),
    ) {
        let mut kept: Vec<(ZeroedBytes, u8)> = Vec::new();
        for (index, (len, drops)) in steps.into_iter().enumerate() {
            let mut piece = ZeroedBytes::new(len).unwrap();
            prop_assert_eq!(piece.len(), len);
            prop_assert_eq!(piece.as_ptr().align_offset(64), 0);
            // The ends alone of a large one: that is where a neighbour would be.
            let ends = [0, len / 2, len - 1];
            prop_assert!(ends.iter().all(|at| piece.as_slice()[*at] == 0));
            if len < LARGE {
                prop_assert!(piece.as_slice().iter().all(|byte| *byte == 0));
            }
            let mark = index as u8 + 1;
            if len < LARGE {
                piece.as_mut_slice().fill(mark);
            } else {
                ends.iter().for_each(|at| piece.as_mut_slice()[*at] = mark);
            }
            if drops && !kept.is_empty() {
                kept.remove(index % kept.len());
            }
            kept.push((piece, mark));
            for (piece, mark) in &kept {
                let (first, last) = (piece.as_slice()[0], piece.as_slice()[piece.len() - 1]);
                prop_assert_eq!((first, last), (*mark, *mark));
            }
        }
    }
}
