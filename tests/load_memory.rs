//! Loading the demo model: its file's pages go back while its weights are packed, so memory never holds
//! both, and what stays is little more than the file.
//!
//! Alone in its binary, because it reads the process' memory and its highest mark.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints its figures"
)]

#[allow(dead_code, reason = "each test program uses a part")]
mod checkpoints;
mod common;

use greenroom::config::CpuConfig;
use greenroom::model::Engine;
use greenroom::model::cpu::CpuOps;

/// A line of the process' status, bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    1024 * line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
}

#[test]
fn weights_are_never_in_memory_twice() {
    let path = common::demo_model();
    let file = std::fs::metadata(&path).unwrap().len();
    let (before, mapped) = (status("VmRSS"), status("RssFile"));
    let engine = checkpoints::engine::<CpuOps>(&path, &CpuConfig::default(), 1024);
    let (peak, now) = (status("VmHWM") - before, status("VmRSS") - before);
    // Code that was not run before is mapped too; a tenth of the file is far from all of it.
    let still_mapped = status("RssFile").saturating_sub(mapped);
    let weights = engine.memory().weight_bytes;
    println!(
        "file {file}, weights {weights}; peak {:.2} × file, now {:.2}, mapped {still_mapped}",
        peak as f64 / file as f64,
        now as f64 / file as f64
    );
    assert!(now > file / 2, "weights are touched when they are packed");
    assert!(weights <= file + file / 10, "packed, weights are {weights} bytes");
    assert!(now <= file + file / 5, "{now} bytes stay of a file of {file}");
    assert!(peak <= 2 * file - file / 4, "{peak} bytes at the most for a file of {file}");
    assert!(still_mapped <= file / 10, "{still_mapped} bytes of files are still mapped");
}
