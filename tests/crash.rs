//! The real binary with a small model and a folder that is too small for it, killed at any moment under
//! load and started again: every segment that is left is whole, and every answer is what a server
//! without a cache gives. And disks that are full or cannot be written.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails"
)]
#![cfg(all(feature = "cpu", target_os = "linux"))]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use greenroom::cache::ssd::{inspect, verify};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
/// Conversations that clients have; each begins with a part of another.
const PROMPTS: usize = 24;
/// Clients that ask at once.
const CLIENTS: usize = 4;

struct Server {
    child: Child,
    address: String,
    errors: std::thread::JoinHandle<String>,
}

impl Server {
    fn start(home: &Path, args: &[&str]) -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
        let mut child = Command::new(env!("CARGO_BIN_EXE_greenroom"))
            .arg("serve")
            .arg(model)
            .args(["--port", "0", "--device", "cpu"])
            .args(args)
            .env("GREENROOM_HOME", home)
            // So slow that a kill finds files half written.
            .env("GREENROOM__CACHE__SSD_WRITE_MIB_S", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut said = String::new();
            let _ = errors.read_to_string(&mut said);
            said
        });
        let mut address = None;
        for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
            address =
                address.or_else(|| line.split_once("http://").map(|(_, address)| address.trim().to_owned()));
            if line.starts_with("ready") {
                break;
            }
        }
        Self { child, address: address.expect("it listens"), errors }
    }

    /// An answer, or nothing where the server went away meanwhile.
    fn ask(&self, prompt: &str) -> Option<(String, Value)> {
        ask(&self.address, prompt)
    }

    fn kill(mut self) -> String {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.errors.join().unwrap()
    }

    fn stop(mut self) -> String {
        Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(self.child.wait().unwrap().success());
        self.errors.join().unwrap()
    }
}

fn ask(address: &str, prompt: &str) -> Option<(String, Value)> {
    let body = json!({
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 12, "temperature": 0, "ignore_eos": true,
    });
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8(answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    if !head.starts_with("HTTP/1.1 200") {
        // A server that is not killed answers.
        return None;
    }
    let document: Value = serde_json::from_str(body).ok()?;
    let text = document["choices"][0]["message"]["content"].as_str()?.to_owned();
    Some((text, document["usage"]["prompt_tokens_details"].clone()))
}

fn prompt(number: usize) -> String {
    let begins = ["shared beginning of some ", "quite another one, which "][number % 2];
    format!("{}{}", begins.repeat(12 + number % 5 * 7), "tail ".repeat(number * 9))
}

fn expected(home: &Path) -> Vec<String> {
    let server = Server::start(home, &[]);
    let answers = (0..PROMPTS).map(|number| server.ask(&prompt(number)).expect("it answers").0).collect();
    server.stop();
    answers
}

/// Pseudo-random numbers below `most`.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % most
    }
}

fn kill_and_restart(kills: u32) {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    println!("seed {seed}");
    let mut dice = Dice(seed);
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("cache");
    let expected = expected(home.path());
    // Room for a part of what is asked.
    let args = ["--cache-dir", dir.to_str().unwrap(), "--cache-ssd-gb", "0.002"];
    let (mut whole, mut answers, mut from_disk, mut unfinished) = (0, 0, 0, 0);
    for _ in 0..kills {
        let server = Server::start(home.path(), &args);
        // What the scan left is whole, to the last byte.
        let (heads, report) = inspect(&dir).unwrap();
        assert!(report.bad.is_empty() && report.unread.is_empty(), "{report:?}");
        for head in &heads {
            verify(&dir, head).unwrap_or_else(|error| panic!("{}: {error}", head.id));
            whole += 1;
        }
        for _ in 0..3 {
            let number = dice.roll(PROMPTS as u64) as usize;
            let (text, details) = server.ask(&prompt(number)).expect("it answers");
            assert_eq!(text, expected[number], "prompt {number}, {details}");
            answers += 1;
            from_disk += u32::from(details["ssd_cached_tokens"].as_u64().unwrap_or(0) > 0);
        }
        let ends = AtomicBool::new(false);
        let moment = Duration::from_micros(dice.roll(400_000));
        let seeds: Vec<u64> = (0..CLIENTS).map(|_| dice.roll(u64::MAX) | 1).collect();
        let address = server.address.clone();
        std::thread::scope(|scope| {
            for seed in seeds {
                let (ends, expected, address) = (&ends, &expected, &address);
                scope.spawn(move || {
                    let mut dice = Dice(seed);
                    while !ends.load(Ordering::Relaxed) {
                        let number = dice.roll(PROMPTS as u64) as usize;
                        if let Some((text, details)) = ask(address, &prompt(number)) {
                            assert_eq!(text, expected[number], "prompt {number}, {details}");
                        }
                    }
                });
            }
            // The moment is the test: nothing is waited for.
            std::thread::sleep(moment);
            server.kill();
            ends.store(true, Ordering::Relaxed);
        });
        unfinished += inspect(&dir).unwrap().1.unfinished;
    }
    println!(
        "{kills} kills: {whole} segments whole, {answers} answers right, {from_disk} of them from disk, \
         {unfinished} files were being written"
    );
    assert!(whole > 0 && from_disk > 0, "the folder was of use");
}

#[test]
fn a_kill_at_any_moment_costs_no_answer() {
    kill_and_restart(10);
}

#[test]
#[ignore = "minutes; `make test-full` runs it"]
fn two_hundred_kills_cost_no_answer() {
    kill_and_restart(200);
}

/// A file system of so many bytes, if this machine lets us make one.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn mount(at: &Path, options: &str) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
        mounted.is_ok_and(|output| output.status.success()).then(|| Self(at.to_owned()))
    }

    fn make_read_only(&self) {
        assert!(Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_turns_writing_off_with_one_warning_and_a_read_only_one_is_no_tier_at_all() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("disk");
    let Some(disk) = SmallDisk::mount(&dir, "size=400k") else {
        println!("skipped: this user may not mount a small disk");
        return;
    };
    let expected = expected(home.path());
    let args = ["--cache-dir", dir.to_str().unwrap(), "--cache-ssd-gb", "1"];
    let server = Server::start(home.path(), &args);
    for (number, right) in expected.iter().enumerate() {
        assert_eq!(&server.ask(&prompt(number)).expect("it answers").0, right);
    }
    let said = server.stop();
    assert_eq!(said.matches("cannot be written any more").count(), 1, "{said}");
    let (heads, report) = inspect(&dir).unwrap();
    assert!(report.bad.is_empty() && report.unfinished == 0, "{report:?}");
    heads.iter().for_each(|head| verify(&dir, head).unwrap());
    // What is there is used by the next one, which finds the disk as full.
    let server = Server::start(home.path(), &args);
    let served: Vec<bool> = (0..PROMPTS)
        .map(|number| {
            let (text, details) = server.ask(&prompt(number)).expect("it answers");
            assert_eq!(text, expected[number]);
            details["ssd_cached_tokens"].as_u64().unwrap_or(0) > 0
        })
        .collect();
    assert!(served.contains(&true), "{} segments", heads.len());
    server.stop();
    disk.make_read_only();
    let server = Server::start(home.path(), &args);
    assert_eq!(server.ask(&prompt(0)).expect("it answers").0, expected[0]);
    let said = server.stop();
    assert_eq!(said.matches("keeps nothing on disk").count(), 1, "{said}");
}
