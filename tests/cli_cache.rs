//! `greenroom cache ls|stats|verify|rm` over a folder that the library wrote.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Output};

use greenroom::cache::ssd::{Folder, SegmentHead, SegmentId, pieces};
use greenroom::types::TokenId;
use serde_json::Value;

fn cache(args: &[&str], dir: &Path) -> Output {
    let (command, rest) = args.split_first().unwrap();
    Command::new(env!("CARGO_BIN_EXE_greenroom"))
        .args(["cache", command])
        .arg(dir)
        .args(rest)
        .env("GREENROOM_HOME", dir.join("nowhere"))
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(args: &[&str], dir: &Path) -> Value {
    serde_json::from_str(&said(&cache(args, dir))).unwrap()
}

/// Two conversations: a root, two that build on it, and another model's.
fn filled() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _, _) = Folder::open(dir.path()).unwrap();
    let put = |id: u64, namespace: &str, parent: Option<u64>, start: u32, count: u32| {
        let head = SegmentHead {
            id: SegmentId(id),
            namespace: namespace.into(),
            parent: parent.map(SegmentId),
            start,
            tokens: (0..count).map(|token| TokenId(token + 10 * id as u32)).collect(),
            created: 1,
            bytes: 0,
        };
        let state: Vec<Vec<u8>> = pieces(&(start..head.end())).map(|piece| vec![7; piece.len()]).collect();
        folder.write(&head, &state, &mut |_| {}).unwrap();
    };
    put(1, "one", None, 0, 100);
    put(2, "one", Some(1), 100, 50);
    put(3, "one", Some(1), 40, 5);
    put(4, "two", None, 0, 10);
    drop(folder);
    dir
}

#[test]
fn what_is_there_is_listed_and_summed_up() {
    let dir = filled();
    let list = said(&cache(&["ls"], dir.path()));
    assert!(
        list.contains("0000000000000002") && list.contains("100..150") && list.contains("4 segments"),
        "{list}"
    );
    let list = json(&["ls", "--json"], dir.path());
    assert_eq!(list.as_array().unwrap().len(), 4);
    assert_eq!(list[0]["id"], "0000000000000001");
    assert_eq!(list[1]["parent"], "0000000000000001");
    let stats = json(&["stats", "--json"], dir.path());
    assert_eq!((&stats["segments"], &stats["namespaces"][0]["longest_tokens"]), (&4.into(), &150.into()));
    assert!(said(&cache(&["stats"], dir.path())).contains("two"));
}

#[test]
fn a_damaged_file_is_found_and_left_where_it_is() {
    let dir = filled();
    assert!(said(&cache(&["verify"], dir.path())).contains("4 segments are whole, 0 are not"));
    let file = dir.path().join("0000000000000002.gkv");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let output = cache(&["verify"], dir.path());
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("0000000000000002.gkv: a piece of it is damaged"), "{text}");
    let output = cache(&["verify", "--json"], dir.path());
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["good"], told["bad"].as_array().unwrap().len()), (&3.into(), 1));
    assert!(file.is_file());
}

#[test]
fn what_is_removed_takes_what_builds_on_it_along() {
    let dir = filled();
    let count = || json(&["ls", "--json"], dir.path()).as_array().unwrap().len();
    assert!(said(&cache(&["rm", "2"], dir.path())).contains("removed 1 segments"));
    assert!(said(&cache(&["rm", "0000000000000001"], dir.path())).contains("removed 2 segments"));
    assert_eq!(count(), 1);
    assert_eq!(cache(&["rm", "99"], dir.path()).status.code(), Some(1));
    assert_eq!(cache(&["rm", "xyz"], dir.path()).status.code(), Some(64));
    assert_eq!(cache(&["rm"], dir.path()).status.code(), Some(64), "what to remove must be said");
    assert_eq!(
        cache(&["rm", "--namespace", ""], dir.path()).status.code(),
        Some(64),
        "nothing named is not all"
    );
    assert_eq!(cache(&["rm", "--all", "4"], dir.path()).status.code(), Some(64));
    assert!(said(&cache(&["rm", "--namespace", "tw"], dir.path())).contains("removed 1 segments"));
    assert_eq!(count(), 0);
    let dir = filled();
    assert!(said(&cache(&["rm", "--all"], dir.path())).contains("removed 4 segments"));
}

#[test]
fn a_folder_that_a_server_has_is_looked_at_and_not_touched() {
    let dir = filled();
    let server = Folder::open(dir.path()).unwrap();
    assert!(said(&cache(&["ls"], dir.path())).contains("4 segments"));
    let refused = cache(&["rm", "--all"], dir.path());
    assert_eq!(refused.status.code(), Some(69));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("DELETE /v1/cache?disk=true"));
    drop(server);
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = dir.path().join("elsewhere");
    for args in [&["ls"][..], &["stats"], &["verify"], &["rm", "--all"]] {
        let output = cache(args, &elsewhere);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8(output.stderr).unwrap().contains("elsewhere"));
    }
    assert!(!elsewhere.exists(), "nor is it made");
}
