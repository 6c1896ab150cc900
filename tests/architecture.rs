//! Reads the sources and fails where they break the map in ARCHITECTURE.md:
//! imports against the arrows, `unsafe` in the wrong place, panics that input could
//! reach, messages missing from the table.
//!
//! Plain text scanning: it sees what a reviewer sees, and needs no extra crate. Each rule
//! is a function over text, and is itself tested on a sample that breaks it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// A source file: its path under `src/` with `/` between parts, and its text.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn sample(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into() }
    }

    /// The part of the file that is compiled outside tests.
    fn product_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let all_test = self.path.ends_with("/tests.rs") || self.path.contains("/tests/");
        let lines: Vec<&str> = self.text.lines().collect();
        let end = lines
            .iter()
            .enumerate()
            .position(|(index, line)| {
                line.trim() == "#[cfg(test)]"
                    && lines.get(index + 1).is_some_and(|next| next.trim_start().starts_with("mod "))
            })
            .unwrap_or(lines.len());
        let end = if all_test { 0 } else { end };
        lines.into_iter().take(end).enumerate().map(|(index, line)| (index + 1, line))
    }

    fn layer(&self) -> &str {
        match self.path.split_once('/') {
            Some((layer, _)) => layer,
            None => self.path.trim_end_matches(".rs"),
        }
    }
}

fn sources() -> Vec<Source> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    assert!(paths.len() > 20, "found only {} source files", paths.len());
    paths
        .into_iter()
        .map(|path| Source {
            text: fs::read_to_string(&path).unwrap(),
            path: path
                .strip_prefix(&root)
                .unwrap()
                .components()
                .map(|part| part.as_os_str().to_string_lossy().into_owned())
                .collect::<Vec<_>>()
                .join("/"),
        })
        .collect()
}

fn code(line: &str) -> &str {
    let trimmed = line.trim_start();
    if trimmed.starts_with("//") { "" } else { line }
}

const LAYERS: [&str; 8] = ["types", "config", "observe", "cache", "model", "actors", "http", "cli"];
const LEAVES: [&str; 3] = ["types", "config", "observe"];

/// Which layers a layer may name with `crate::`.
fn allowed(layer: &str) -> Vec<&'static str> {
    let own = LAYERS.iter().find(|known| **known == layer).copied();
    let mut list: Vec<&str> = LEAVES.into_iter().chain(own).collect();
    match layer {
        "actors" => list.extend(["cache", "model"]),
        "http" => list.push("actors"),
        "lib" => list.extend(LAYERS),
        _ => {}
    }
    list
}

fn against_the_arrows(source: &Source) -> Vec<String> {
    let allowed = allowed(source.layer());
    let mut faults = Vec::new();
    for (number, line) in source.product_lines() {
        for (at, _) in code(line).match_indices("crate::") {
            if line[..at].ends_with('$') {
                continue;
            }
            let rest = &line[at + "crate::".len()..];
            let names: Vec<&str> = match rest.strip_prefix('{') {
                Some(group) => group
                    .split(['{', '}', ','])
                    .map(|part| part.trim().split("::").next().unwrap_or(""))
                    .collect(),
                None => vec![rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("")],
            };
            for name in names {
                if LAYERS.contains(&name) && !allowed.contains(&name) {
                    faults.push(format!("{}:{number}: {} must not use {name}", source.path, source.layer()));
                }
            }
        }
    }
    faults
}

fn misplaced_unsafe(source: &Source) -> Vec<String> {
    let home = ["model/cpu/", "model/mlx/native", "model/load/"];
    if home.iter().any(|place| source.path.starts_with(place)) {
        return Vec::new();
    }
    let is_unsafe = |line: &str| {
        ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"].iter().any(|form| code(line).contains(form))
            || line.contains("allow(unsafe_code)")
    };
    source
        .product_lines()
        .filter(|(_, line)| is_unsafe(line))
        .map(|(number, line)| format!("{}:{number}: unsafe outside its home: {}", source.path, line.trim()))
        .collect()
}

fn reachable_panics(source: &Source) -> Vec<String> {
    let forms = [".unwrap()", ".expect(", "panic!(", "todo!(", "unimplemented!(", "unreachable!("];
    let lines: Vec<(usize, &str)> = source.product_lines().collect();
    let mut faults = Vec::new();
    for (index, (number, line)) in lines.iter().enumerate() {
        if !forms.iter().any(|form| code(line).contains(form)) {
            continue;
        }
        let excused =
            lines[index.saturating_sub(3)..=index].iter().any(|(_, above)| above.contains("// PANIC:"));
        if !excused {
            faults.push(format!(
                "{}:{number}: may panic without a `// PANIC:` reason: {}",
                source.path,
                line.trim()
            ));
        }
    }
    faults
}

fn nameless_places(source: &Source) -> Vec<String> {
    let vague = ["utils", "util", "helpers", "helper", "common", "misc"];
    source
        .path
        .trim_end_matches(".rs")
        .split('/')
        .filter(|part| vague.contains(part))
        .map(|part| format!("{}: `{part}` says nothing about what lives there", source.path))
        .collect()
}

fn missing_module_docs(source: &Source) -> Vec<String> {
    if source.text.trim_start().starts_with("//!") {
        return Vec::new();
    }
    vec![format!("{}: does not begin with `//!`", source.path)]
}

/// `do_send` never waits for room, so each use needs something else that bounds it.
fn unbounded_sends(source: &Source) -> Vec<String> {
    let lines: Vec<(usize, &str)> = source.product_lines().collect();
    let mut faults = Vec::new();
    for (index, (number, line)) in lines.iter().enumerate() {
        if !code(line).contains(".do_send(") {
            continue;
        }
        let bounded =
            lines[index.saturating_sub(4)..=index].iter().any(|(_, above)| above.contains("// BOUND:"));
        if !bounded {
            faults.push(format!("{}:{number}: `do_send` without a `// BOUND:` reason", source.path));
        }
    }
    faults
}

fn messages_without_a_row(table: &str, messages: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    let mut is_message = false;
    for (number, line) in messages.product_lines() {
        is_message |= line.contains("derive(") && line.contains("Message");
        let line = line.trim_start();
        let declared = ["pub struct ", "pub(crate) struct "].iter().find_map(|form| line.strip_prefix(form));
        let Some(rest) = declared else { continue };
        let name = rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or("");
        if std::mem::take(&mut is_message)
            && !table.contains(&format!("`{name}`"))
            && !table.contains(&format!("[`{name}`"))
        {
            faults.push(format!("{}:{number}: message {name} has no row in actors/mod.rs", messages.path));
        }
    }
    faults
}

fn check(rule: fn(&Source) -> Vec<String>) {
    let faults: Vec<String> = sources().iter().flat_map(rule).collect();
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn imports_follow_the_arrows() {
    check(against_the_arrows);
}

#[test]
fn unsafe_stays_at_home() {
    check(misplaced_unsafe);
}

#[test]
fn nothing_panics_without_a_reason() {
    check(reachable_panics);
}

#[test]
fn modules_are_named_after_what_they_hold() {
    check(nameless_places);
}

#[test]
fn every_file_says_what_it_is() {
    check(missing_module_docs);
}

#[test]
fn every_do_send_has_a_bound() {
    check(unbounded_sends);
}

#[test]
fn every_message_is_in_the_table() {
    let all = sources();
    let find = |path: &str| all.iter().find(|source| source.path == path).unwrap();
    let faults = messages_without_a_row(&find("actors/mod.rs").text, find("actors/messages.rs"));
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn the_rules_catch_what_breaks_them() {
    let bad =
        Source::sample("http/chat.rs", "use crate::{model::ops, types};\nlet x = crate::cache::Tree;\n");
    assert_eq!(against_the_arrows(&bad).len(), 2);
    let good = Source::sample(
        "http/chat.rs",
        "use crate::actors::Handles;\n// crate::model\nuse crate::types::X;\n",
    );
    assert!(against_the_arrows(&good).is_empty());
    assert_eq!(against_the_arrows(&Source::sample("model/a.rs", "use crate::cache::Tree;")).len(), 1);
    assert_eq!(misplaced_unsafe(&Source::sample("actors/a.rs", "unsafe { x() }")).len(), 1);
    assert!(misplaced_unsafe(&Source::sample("model/cpu/a.rs", "unsafe { x() }")).is_empty());
    assert_eq!(reachable_panics(&Source::sample("actors/a.rs", "let x = y.unwrap();")).len(), 1);
    assert!(reachable_panics(&Source::sample("a.rs", "// PANIC: n is 1\nlet x = y.unwrap();")).is_empty());
    let in_test = "fn a() {}\n#[cfg(test)]\nmod tests {\n fn b() { c.unwrap() }\n}";
    assert!(reachable_panics(&Source::sample("a.rs", in_test)).is_empty());
    assert_eq!(nameless_places(&Source::sample("actors/utils.rs", "")).len(), 1);
    assert_eq!(missing_module_docs(&Source::sample("a.rs", "fn a() {}")).len(), 1);
    assert_eq!(unbounded_sends(&Source::sample("actors/a.rs", "x.do_send(Y);")).len(), 1);
    let messages = Source::sample("actors/messages.rs", "#[derive(Message)]\npub struct Foo {\n");
    assert_eq!(messages_without_a_row("", &messages).len(), 1);
    assert!(messages_without_a_row("`Foo`", &messages).is_empty());
    let internal = Source::sample("actors/messages.rs", "#[derive(Message)]\npub(crate) struct Bar;\n");
    assert_eq!(messages_without_a_row("`Foo`", &internal).len(), 1);
}
