//! Files that are cut off, changed, foreign or somebody else's; the index beside a plain list.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId).collect()
}

fn head(id: u64, parent: Option<u64>, start: u32, tokens: &[u32]) -> SegmentHead {
    SegmentHead {
        id: SegmentId(id),
        namespace: "model".into(),
        parent: parent.map(SegmentId),
        start,
        tokens: ids(tokens),
        created: 7,
        bytes: 0,
    }
}

/// Bytes for each piece of a segment.
fn state(head: &SegmentHead) -> Vec<Vec<u8>> {
    pieces(&(head.start..head.end())).map(|piece| vec![piece.start as u8; piece.len() * 3]).collect()
}

fn put(folder: &Folder, head: &SegmentHead) -> SegmentHead {
    let bytes = folder.write(head, &state(head), &mut |_| {}).unwrap();
    SegmentHead { bytes, ..head.clone() }
}

fn file(dir: &Path, id: u64) -> PathBuf {
    dir.join(format!("{}.gkv", SegmentId(id)))
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_segment_comes_back_as_it_was_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("cache");
    let tokens: Vec<u32> = (0..150).collect();
    let (first, second) = (head(1, None, 0, &tokens), head(2, Some(1), 130, &[7, 8]));
    let (folder, found, report) = Folder::open(&dir).unwrap();
    assert!(found.is_empty() && report == ScanReport::default());
    let written = [put(&folder, &first), put(&folder, &second)];
    assert_eq!(names(&dir), ["0000000000000001.gkv", "0000000000000002.gkv", "lock"]);
    drop(folder);
    let (folder, mut found, report) = Folder::open(&dir).unwrap();
    found.sort_by_key(|head| head.id);
    assert_eq!(report, ScanReport::default());
    assert_eq!(found, written);
    assert_eq!(folder.read(&found[0], u32::MAX).unwrap(), state(&first));
    assert_eq!(folder.read(&found[0], 65).unwrap(), state(&first)[..2], "whole pieces that cover them");
    assert_eq!(folder.read(&found[1], 2).unwrap(), state(&second));
    folder.remove(SegmentId(2)).unwrap();
    folder.remove(SegmentId(2)).unwrap();
    assert!(matches!(folder.read(&found[1], 2), Err(ReadError::Missing)));
}

#[cfg(unix)]
#[test]
fn nobody_else_may_look_into_it() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("made/cache");
    let (folder, _, report) = Folder::open(&dir).unwrap();
    put(&folder, &head(1, None, 0, &[1]));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&dir), mode(&file(&dir, 1)), mode(&dir.join("lock"))), (0o700, 0o600, 0o600));
    assert!(!report.is_open_to_others);
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(
        inspect(&dir).unwrap().1.is_open_to_others,
        "a folder that was there is left as it is, and told of"
    );
}

#[test]
fn a_folder_has_one_server() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _, _) = Folder::open(dir.path()).unwrap();
    let refused = Folder::open(dir.path()).unwrap_err();
    assert!(matches!(&refused, OpenError::InUse(path) if path == dir.path()), "{refused}");
    assert!(refused.to_string().contains("another process"));
    // Looking is allowed.
    put(&folder, &head(1, None, 0, &[1]));
    assert_eq!(inspect(dir.path()).unwrap().0.len(), 1);
    drop(folder);
    assert!(Folder::open(dir.path()).is_ok());
}

#[test]
fn a_folder_that_cannot_be_one_is_an_error_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "").unwrap();
    for wrong in [path.clone(), path.join("below")] {
        let error = Folder::open(&wrong).unwrap_err();
        assert!(matches!(error, OpenError::Io { .. }) && error.to_string().contains("file"), "{error}");
    }
}

#[test]
fn a_file_cut_off_anywhere_is_removed_and_nothing_else_is() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _, _) = Folder::open(dir.path()).unwrap();
    let good = put(&folder, &head(1, None, 0, &[1, 2, 3]));
    drop(folder);
    fs::write(dir.path().join("notes.gkv"), "not ours by its name").unwrap();
    fs::write(dir.path().join("00000000000000AB.gkv"), "nor this").unwrap();
    let whole = fs::read(file(dir.path(), 1)).unwrap();
    for length in (0..whole.len()).chain([whole.len() + 1]) {
        let mut bytes = whole.clone();
        bytes.resize(length, 0);
        fs::write(file(dir.path(), 1), &bytes).unwrap();
        let (folder, found, report) = Folder::open(dir.path()).unwrap();
        assert_eq!((found.len(), report.bad.len()), (0, 1), "{length} bytes: {report:?}");
        assert!(matches!(folder.read(&good, 3), Err(ReadError::Missing)));
    }
    assert_eq!(names(dir.path()), ["00000000000000AB.gkv", "lock", "notes.gkv"]);
}

#[test]
fn no_changed_byte_is_ever_taken_for_state() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _, _) = Folder::open(dir.path()).unwrap();
    let good = put(&folder, &head(1, None, 0, &[1, 2, 3]));
    drop(folder);
    let whole = fs::read(file(dir.path(), 1)).unwrap();
    let mut found_later = 0;
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x20;
        fs::write(file(dir.path(), 1), &bytes).unwrap();
        let (folder, found, _) = Folder::open(dir.path()).unwrap();
        let read = folder.read(&good, 3);
        assert!(matches!(read, Err(ReadError::Corrupt { .. } | ReadError::Missing)), "byte {at}: {read:?}");
        found_later += found.len();
    }
    assert_eq!(
        found_later, 9,
        "a scan looks at heads alone: nine bytes of state are checked when they are read"
    );
}

#[test]
fn heads_that_lie_are_no_reason_to_take_memory() {
    let dir = tempfile::tempdir().unwrap();
    let lie = |text: &str| {
        let mut bytes = b"GRKVSEG1".to_vec();
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(crc32fast::hash(text.as_bytes()).to_le_bytes());
        bytes.extend(text.as_bytes());
        fs::write(file(dir.path(), 1), bytes).unwrap();
        let (_, found, report) = Folder::open(dir.path()).unwrap();
        assert!(found.is_empty() && report.bad.len() == 1, "{text}");
    };
    let with = |start: u64, parent: &str, tokens: &str, pieces: &str| {
        format!(
            r#"{{"id":1,"namespace":"n","parent":{parent},"start":{start},"tokens":[{tokens}],"created":0,"pieces":[{pieces}]}}"#
        )
    };
    lie(&with(0, "null", "1", "[18446744073709551615,0]"));
    lie(&with(0, "null", "1", "[1099511627776,0]"));
    lie(&with(0, "null", "1", "[1,0],[18446744073709551615,0]"));
    lie(&with(0, "null", "", ""));
    lie(&with(0, "9", "1", "[0,0]"));
    lie(&with(4_294_967_295, "9", "1,2", "[0,0]"));
    lie(&with(5, "null", "1", "[0,0]"));
    lie("[]");
    lie(&"[".repeat(100_000));
    let mut bytes = b"GRKVSEG1".to_vec();
    bytes.extend(u32::MAX.to_le_bytes());
    bytes.extend([0; 4]);
    fs::write(file(dir.path(), 1), bytes).unwrap();
    assert_eq!(Folder::open(dir.path()).unwrap().2.bad.len(), 1);
}

#[test]
fn what_was_being_written_is_cleared_away() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("00000000000000aa.tmp"), "half").unwrap();
    fs::write(dir.path().join("mine.tmp"), "left alone").unwrap();
    let (_, found, report) = Folder::open(dir.path()).unwrap();
    assert_eq!((found.len(), report.unfinished), (0, 1));
    assert_eq!(names(dir.path()), ["lock", "mine.tmp"]);
}

#[test]
fn what_builds_on_nothing_goes_too() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _, _) = Folder::open(dir.path()).unwrap();
    let heads = [
        head(1, None, 0, &[1, 2, 3]),
        head(2, Some(1), 3, &[4]),
        head(3, Some(2), 4, &[5]),
        head(4, Some(1), 2, &[9]),
        head(5, Some(1), 4, &[9]),
        head(6, Some(6), 4, &[9]),
        SegmentHead { namespace: "another".into(), ..head(7, Some(1), 3, &[4]) },
    ];
    heads.iter().for_each(|head| drop(put(&folder, head)));
    fs::remove_file(file(dir.path(), 2)).unwrap();
    drop(folder);
    let (_, mut found, report) = Folder::open(dir.path()).unwrap();
    found.sort_by_key(|head| head.id);
    assert_eq!(found.iter().map(|head| head.id.0).collect::<Vec<_>>(), [1, 4]);
    assert_eq!(report.bad.len(), 4, "{report:?}");
}

#[test]
fn a_write_that_fails_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _, _) = Folder::open(dir.path()).unwrap();
    let head = head(1, None, 0, &[1]);
    // More pieces than the head can have.
    assert!(folder.write(&head, &[vec![0; 3], vec![0; 3]], &mut |_| {}).is_err());
    // A folder stands where the file is to be.
    fs::create_dir(file(dir.path(), 1)).unwrap();
    assert!(folder.write(&head, &state(&head), &mut |_| {}).is_err());
    assert_eq!(names(dir.path()), ["0000000000000001.gkv", "lock"]);
}

/// Every way to put together a prefix, looked at one by one.
fn longest(heads: &[SegmentHead], tokens: &[TokenId]) -> u32 {
    let covers = |head: &SegmentHead| {
        let (mut at, mut end) = (Some(head.clone()), u32::MAX);
        let mut good = u32::MAX;
        while let Some(head) = at {
            let count = end.min(head.end()) - head.start;
            let rest = tokens.get(head.start as usize..).unwrap_or(&[]);
            let own =
                head.tokens[..count as usize].iter().zip(rest).take_while(|(a, b)| a == b).count() as u32;
            if own < count {
                good = head.start + own;
            }
            if end == u32::MAX && own == count {
                good = head.end();
            }
            end = head.start;
            at = head.parent.and_then(|parent| heads.iter().find(|head| head.id == parent).cloned());
        }
        good
    };
    heads.iter().map(covers).max().unwrap_or(0)
}

#[derive(Clone, Debug)]
enum Op {
    /// Continue what is there of these tokens.
    Add(Vec<u32>),
    Find(Vec<u32>),
    Remove(usize),
    Pin(usize),
    Unpin(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = || prop::collection::vec(0u32..2, 1..10);
    prop_oneof![
        5 => tokens().prop_map(Op::Add),
        2 => tokens().prop_map(Op::Find),
        1 => any::<usize>().prop_map(Op::Remove),
        1 => any::<usize>().prop_map(Op::Pin),
        1 => any::<usize>().prop_map(Op::Unpin),
    ]
}

proptest! {
    #[test]
    fn the_index_finds_what_a_list_would(ops in prop::collection::vec(op(), 1..60), budget in 3u64..30) {
        let mut index = SegmentIndex::new(budget);
        let mut list: Vec<SegmentHead> = Vec::new();
        let mut pins: Vec<SegmentId> = Vec::new();
        for (number, op) in ops.into_iter().enumerate() {
            match op {
                Op::Add(tokens) => {
                    let tokens = ids(&tokens);
                    let chain = index.longest("model", &tokens);
                    let start = chain.as_ref().map_or(0, |chain| chain.covered);
                    let Some(new) = tokens.get(start as usize..).filter(|new| !new.is_empty()) else { continue };
                    let parent = chain.and_then(|chain| Some(chain.links.last()?.id));
                    let id = SegmentId(number as u64);
                    let head = SegmentHead {
                        id,
                        namespace: "model".into(),
                        parent,
                        start,
                        tokens: new.to_vec(),
                        created: 0,
                        bytes: new.len() as u64,
                    };
                    list.push(head.clone());
                    for gone in index.insert(head) {
                        prop_assert!(!pins.contains(&gone));
                        prop_assert!(!list.iter().any(|head| head.parent == Some(gone)), "somebody builds on it");
                        list.retain(|head| head.id != gone);
                    }
                    prop_assert!(index.bytes() <= budget || !pins.is_empty());
                }
                Op::Find(tokens) => {
                    if let Some(chain) = index.longest("model", &ids(&tokens)) {
                        index.touch(&chain);
                    }
                }
                Op::Remove(which) => {
                    if list.is_empty() { continue }
                    let id = list[which % list.len()].id;
                    for gone in index.remove(id) {
                        list.retain(|head| head.id != gone);
                        pins.retain(|pin| *pin != gone);
                    }
                    prop_assert!(list.iter().all(|head| head.parent.is_none_or(|parent| index.head(parent).is_some())));
                }
                Op::Pin(which) => {
                    if list.is_empty() { continue }
                    let id = list[which % list.len()].id;
                    index.pin(id);
                    pins.push(id);
                }
                Op::Unpin(which) => {
                    if pins.is_empty() { continue }
                    let id = pins.swap_remove(which % pins.len());
                    index.unpin(id);
                }
            }
            prop_assert_eq!(index.len(), list.len());
            prop_assert_eq!(index.bytes(), list.iter().map(|head| head.bytes).sum::<u64>());
            for mask in 0u32..64 {
                let probe: Vec<TokenId> = (0..6).map(|bit| TokenId(mask >> bit & 1)).collect();
                let chain = index.longest("model", &probe);
                let covered = chain.as_ref().map_or(0, |chain| chain.covered);
                prop_assert_eq!(covered, longest(&list, &probe), "{:?} {:?}", probe, list);
                let mut at = 0;
                for link in chain.iter().flat_map(|chain| &chain.links) {
                    prop_assert_eq!(link.range.start, at);
                    let head = index.head(link.id).unwrap();
                    let own = &head.tokens[..link.range.len()];
                    prop_assert_eq!(own, &probe[link.range.start as usize..link.range.end as usize]);
                    at = link.range.end;
                }
                prop_assert_eq!(at, covered);
            }
        }
    }
}

#[test]
fn namespaces_and_twins_do_not_mix() {
    let mut index = SegmentIndex::new(1000);
    let sized = |head: SegmentHead| SegmentHead { bytes: 10, ..head };
    assert!(index.insert(sized(head(1, None, 0, &[1, 2, 3]))).is_empty());
    assert!(index.longest("another", &ids(&[1, 2, 3])).is_none());
    assert_eq!(index.insert(sized(head(2, None, 0, &[1, 2]))), [SegmentId(2)], "all of it is there");
    assert_eq!(index.insert(sized(head(3, Some(9), 2, &[5]))), [SegmentId(3)], "it builds on nothing");
    let twin = SegmentHead { namespace: Arc::from("another"), ..sized(head(4, Some(1), 3, &[5])) };
    assert_eq!(index.insert(twin), [SegmentId(4)], "nor on another's");
    assert!(
        index.insert(sized(head(1, None, 0, &[1, 2, 3]))).is_empty(),
        "the same once more changes nothing"
    );
    assert_eq!((index.len(), index.bytes()), (1, 10));
}

/// All tokens up to a segment's end, from a plain list.
fn path_of(list: &[SegmentHead], head: &SegmentHead) -> Vec<TokenId> {
    let above = head.parent.and_then(|parent| list.iter().find(|other| other.id == parent));
    let mut path = above.map(|above| path_of(list, above)).unwrap_or_default();
    path.truncate(head.start as usize);
    path.extend_from_slice(&head.tokens);
    path
}

proptest! {
    /// Conversations are written before the index knows of each other, so that segments overlap, and any
    /// of them may go first.
    #[test]
    fn overlapping_segments_hide_nothing(
        ops in prop::collection::vec((0u8..8, any::<prop::sample::Index>(), any::<prop::sample::Index>(),
            prop::collection::vec(0u32..2, 1..6)), 1..60),
        budget in 3u64..40,
    ) {
        let mut index = SegmentIndex::new(budget);
        let mut list: Vec<SegmentHead> = Vec::new();
        for (number, (kind, which, cut, tokens)) in ops.into_iter().enumerate() {
            if kind == 0 && !list.is_empty() {
                for gone in index.remove(which.get(&list).id) {
                    prop_assert!(!list.iter().any(|head| head.parent == Some(gone)));
                    list.retain(|head| head.id != gone);
                }
            } else {
                let parent = if kind < 4 && !list.is_empty() { Some(which.get(&list).clone()) } else { None };
                let start = parent.as_ref().map_or(0, |parent| parent.start + 1 + cut.index(parent.tokens.len()) as u32);
                let head = SegmentHead {
                    bytes: tokens.len() as u64,
                    ..head(number as u64, parent.map(|parent| parent.id.0), start, &tokens)
                };
                list.push(head.clone());
                for gone in index.insert(head) {
                    prop_assert!(!list.iter().any(|head| head.parent == Some(gone)));
                    list.retain(|head| head.id != gone);
                }
                prop_assert!(index.bytes() <= budget);
            }
            prop_assert_eq!(index.len(), list.len());
            index.check();
            for mask in 0u32..128 {
                let probe: Vec<TokenId> = (0..7).map(|bit| TokenId(mask >> bit & 1)).collect();
                let common = |head: &SegmentHead| {
                    path_of(&list, head).iter().zip(&probe).take_while(|(a, b)| a == b).count() as u32
                };
                let most = list.iter().map(common).max().unwrap_or(0);
                let chain = index.longest("model", &probe);
                prop_assert_eq!(chain.as_ref().map_or(0, |chain| chain.covered), most, "{:?} {:?}", probe, list);
                let mut at = 0;
                for link in chain.iter().flat_map(|chain| &chain.links) {
                    prop_assert_eq!(link.range.start, at);
                    let head = index.head(link.id).unwrap();
                    prop_assert_eq!(head.start, at);
                    let probe = &probe[link.range.start as usize..link.range.end as usize];
                    prop_assert_eq!(&head.tokens[..link.range.len()], probe);
                    at = link.range.end;
                }
                prop_assert_eq!(at, most);
            }
        }
    }
}

#[test]
fn a_longer_twin_that_goes_leaves_the_shorter_one() {
    let mut index = SegmentIndex::new(1000);
    let sized = |head: SegmentHead| SegmentHead { bytes: 10, ..head };
    assert!(index.insert(sized(head(1, None, 0, &[1, 2, 3]))).is_empty());
    assert!(index.insert(sized(head(2, None, 0, &[1, 2, 3, 4, 5]))).is_empty());
    assert_eq!(index.remove(SegmentId(2)), [SegmentId(2)]);
    assert_eq!(index.longest("model", &ids(&[1, 2, 3, 9])).unwrap().covered, 3);
    assert!(index.remove(SegmentId(2)).is_empty(), "what is not there has no file to remove");
}

#[test]
#[cfg(unix)]
fn what_is_no_file_is_left_alone_and_stops_nobody() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(file(dir.path(), 1)).unwrap();
    fs::create_dir(dir.path().join("0000000000000002.tmp")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", file(dir.path(), 3)).unwrap();
    // Whoever opens a socket fails, and who opens a pipe waits for ever.
    let _socket = std::os::unix::net::UnixListener::bind(file(dir.path(), 4)).unwrap();
    let before = names(dir.path());
    let (folder, found, report) = Folder::open(dir.path()).unwrap();
    assert!(found.is_empty() && report.bad.is_empty() && report.unread.is_empty());
    drop(folder);
    fs::remove_file(dir.path().join("lock")).unwrap();
    assert_eq!(names(dir.path()), before);
}

#[test]
fn an_id_is_never_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, ..) = Folder::open(dir.path()).unwrap();
    let first = put(&folder, &head(1, None, 0, &[1, 2]));
    let second = head(1, None, 0, &[3, 4]);
    let error = folder.write(&second, &state(&second), &mut |_| {}).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(folder.read(&first, 2).unwrap(), state(&first));
    assert_eq!(names(dir.path()), ["0000000000000001.gkv", "lock"]);
}

#[test]
fn a_clock_that_goes_backwards_only_changes_who_goes_first() {
    use std::time::{Duration, SystemTime};
    let dir = tempfile::tempdir().unwrap();
    let (folder, ..) = Folder::open(dir.path()).unwrap();
    let ahead = Duration::from_secs(1 << 33);
    let times = [(1, SystemTime::now() + ahead), (2, SystemTime::UNIX_EPOCH), (3, SystemTime::now())];
    for (id, time) in times {
        let parent = (id > 1).then_some(1);
        let start = if id > 1 { 1 } else { 0 };
        put(&folder, &SegmentHead { created: u64::MAX / id, ..head(id, parent, start, &[id as u32]) });
        let written = fs::File::options().write(true).open(file(dir.path(), id)).unwrap();
        written.set_modified(time).unwrap();
    }
    drop(folder);
    let (folder, found, report) = Folder::open(dir.path()).unwrap();
    assert!(report.bad.is_empty() && report.unread.is_empty(), "{report:?}");
    assert_eq!(found.iter().map(|head| head.id.0).collect::<Vec<_>>(), [2, 3, 1], "by their times");
    for head in &found {
        assert_eq!(folder.read(head, 1).unwrap(), state(head));
    }
    let mut index = SegmentIndex::new(found.iter().map(|head| head.bytes).sum::<u64>() - 1);
    assert_eq!(index.restore(found), [SegmentId(2)], "what others build on stays, whatever its time");
    assert!(index.longest("model", &ids(&[1, 3])).is_some_and(|chain| chain.covered == 2));
}
