//! `greenroom cache ls|stats|verify|rm`: the prompt cache's folder, without a server or beside one.
//!
//! Looking changes nothing and needs no lock. Removing takes the folder, which a server that runs has
//! to itself: such a server is asked over its API instead.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use greenroom::cache::ssd::{
    Folder, ReadError, ScanReport, SegmentHead, SegmentId, SegmentIndex, inspect, verify,
};
use greenroom::types::ByteSize;
use serde_json::json;

use super::models::shown;
use super::{FolderArgs, ListArgs, RemoveArgs, Stop, settings, terminal};
use crate::exit::Exit;

/// Longest namespace in a table.
const SHOWN_NAMESPACE: usize = 48;

/// Lists segments.
pub(super) fn list(args: &ListArgs) -> Result<Exit, Stop> {
    let (dir, (mut heads, report)) = look(&args.folder)?;
    heads.sort_by(|a, b| (&a.namespace, a.start, a.id).cmp(&(&b.namespace, b.start, b.id)));
    if args.json {
        let one = |head: &SegmentHead| {
            json!({
                "id": head.id.to_string(),
                "parent": head.parent.map(|id| id.to_string()),
                "start": head.start,
                "end": head.end(),
                "bytes": head.bytes,
                "created": head.created,
                "namespace": &*head.namespace,
            })
        };
        return print(&format!("{:#}\n", heads.iter().map(one).collect::<serde_json::Value>()));
    }
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{:16}  {:>15}  {:>9}  {:16}  NAMESPACE", "SEGMENT", "TOKENS", "SIZE", "BUILDS ON");
    for head in &heads {
        let parent = head.parent.map_or_else(|| "-".to_owned(), |id| id.to_string());
        let range = format!("{}..{}", head.start, head.end());
        let namespace: String = shown(&head.namespace).chars().take(SHOWN_NAMESPACE).collect();
        let _ =
            writeln!(out, "{}  {range:>15}  {:>9}  {parent:16}  {namespace}", head.id, ByteSize(head.bytes));
    }
    out.push_str(&summary(&dir, &heads, &report));
    print(&out)
}

/// Sums up by namespace.
pub(super) fn stats(args: &ListArgs) -> Result<Exit, Stop> {
    let (dir, (heads, report)) = look(&args.folder)?;
    let mut by_namespace: BTreeMap<&str, (u64, u64, u64, u32)> = BTreeMap::new();
    for head in &heads {
        let sums = by_namespace.entry(&head.namespace).or_default();
        sums.0 += 1;
        sums.1 += head.tokens.len() as u64;
        sums.2 += head.bytes;
        sums.3 = sums.3.max(head.end());
    }
    if args.json {
        let one = |(name, (segments, tokens, bytes, longest)): (&&str, &(u64, u64, u64, u32))| {
            json!({
                "namespace": name, "segments": segments, "tokens": tokens, "bytes": bytes,
                "longest_tokens": longest,
            })
        };
        let document = json!({
            "dir": dir,
            "segments": heads.len(),
            "bytes": heads.iter().map(|head| head.bytes).sum::<u64>(),
            "unfinished": report.unfinished,
            "bad": report.bad.len() + report.unread.len(),
            "namespaces": by_namespace.iter().map(one).collect::<Vec<_>>(),
        });
        return print(&format!("{document:#}\n"));
    }
    let mut out = String::new();
    let _ = writeln!(out, "{:>8}  {:>10}  {:>9}  {:>9}  NAMESPACE", "SEGMENTS", "TOKENS", "SIZE", "LONGEST");
    for (name, (segments, tokens, bytes, longest)) in &by_namespace {
        let size = ByteSize(*bytes);
        let _ = writeln!(out, "{segments:>8}  {tokens:>10}  {size:>9}  {longest:>9}  {}", shown(name));
    }
    out.push_str(&summary(&dir, &heads, &report));
    print(&out)
}

/// Reads every byte.
pub(super) fn check(args: &ListArgs) -> Result<Exit, Stop> {
    let (dir, (heads, report)) = look(&args.folder)?;
    let mut bad: Vec<(String, String)> = report.bad.iter().chain(&report.unread).cloned().collect();
    let mut good = 0;
    for head in &heads {
        match verify(&dir, head) {
            Ok(()) => good += 1,
            // A server that runs gives segments up.
            Err(ReadError::Missing) => {}
            Err(error) => bad.push((format!("{}.gkv", head.id), error.to_string())),
        }
    }
    let text = if args.json {
        let bad: Vec<_> = bad.iter().map(|(file, reason)| json!({"file": file, "reason": reason})).collect();
        format!("{:#}\n", json!({"dir": dir, "good": good, "unfinished": report.unfinished, "bad": bad}))
    } else {
        let mut out = String::new();
        for (file, reason) in &bad {
            let _ = writeln!(out, "{}: {}", shown(file), shown(reason));
        }
        let _ = writeln!(out, "{good} segments are whole, {} are not", bad.len());
        out
    };
    print(&text)?;
    Ok(if bad.is_empty() { Exit::Ok } else { Exit::Failure })
}

/// Removes segments, and what builds on them.
pub(super) fn remove(args: &RemoveArgs) -> Result<Exit, Stop> {
    let dir = folder(&args.folder)?;
    if !dir.is_dir() {
        return Err(failed(format!("{}: there is no such folder", dir.display())));
    }
    let ids: Vec<SegmentId> = args.segments.iter().map(|text| id(text)).collect::<Result<_, _>>()?;
    let (folder, heads, report) = Folder::open(&dir).map_err(|error| {
        Stop::new(
            Exit::Unavailable,
            format!("{error}; a server that runs forgets by DELETE /v1/cache?disk=true"),
        )
    })?;
    let meant = |head: &&SegmentHead| {
        args.all
            || ids.contains(&head.id)
            || args.namespace.as_ref().is_some_and(|text| head.namespace.contains(text))
    };
    let chosen: Vec<SegmentId> = heads.iter().filter(meant).map(|head| head.id).collect();
    if let Some(missing) = ids.iter().find(|id| !heads.iter().any(|head| head.id == **id)) {
        return Err(failed(format!("there is no segment {missing} in {}", dir.display())));
    }
    let mut index = SegmentIndex::new(u64::MAX);
    let mut gone = index.restore(heads.clone());
    gone.extend(chosen.into_iter().flat_map(|id| index.remove(id)));
    let bytes: u64 = heads.iter().filter(|head| gone.contains(&head.id)).map(|head| head.bytes).sum();
    for id in &gone {
        folder.remove(*id).map_err(|error| failed(format!("{id}.gkv: {error}")))?;
    }
    let cleared = report.bad.len() + report.unfinished;
    let also = if cleared > 0 { format!(", and {cleared} files that were no good") } else { String::new() };
    print(&format!("removed {} segments, {}{also}\n", gone.len(), ByteSize(bytes)))
}

fn id(text: &str) -> Result<SegmentId, Stop> {
    u64::from_str_radix(text, 16)
        .map(SegmentId)
        .map_err(|_| Stop::new(Exit::Usage, format!("{text} is no segment: `greenroom cache ls` shows them")))
}

type Looked = (Vec<SegmentHead>, ScanReport);

fn look(args: &FolderArgs) -> Result<(PathBuf, Looked), Stop> {
    let dir = folder(args)?;
    let looked = inspect(&dir).map_err(|error| failed(format!("{}: {error}", dir.display())))?;
    Ok((dir, looked))
}

/// The folder that was named, else the settings'.
fn folder(args: &FolderArgs) -> Result<PathBuf, Stop> {
    if let Some(dir) = &args.dir {
        return Ok(dir.clone());
    }
    let config = settings::plain(args.settings.config.as_deref())?;
    config.cache.dir.ok_or_else(|| Stop::new(Exit::Usage, "name the folder: cache.dir is not set either"))
}

fn summary(dir: &Path, heads: &[SegmentHead], report: &ScanReport) -> String {
    let tokens: usize = heads.iter().map(|head| head.tokens.len()).sum();
    let bytes: u64 = heads.iter().map(|head| head.bytes).sum();
    let mut out =
        format!("{}: {} segments, {tokens} tokens, {}\n", dir.display(), heads.len(), ByteSize(bytes));
    let bad = report.bad.len() + report.unread.len();
    if bad + report.unfinished > 0 {
        let _ = writeln!(out, "{bad} files are no good, {} were being written", report.unfinished);
    }
    out
}

fn print(text: &str) -> Result<Exit, Stop> {
    terminal::say(text).map_err(|error| failed(format!("cannot write: {error}")))?;
    Ok(Exit::Ok)
}

fn failed(message: String) -> Stop {
    Stop::new(Exit::Failure, message)
}
