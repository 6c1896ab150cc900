//! A browser for tests: child processes that announce their address, a minimal HTTP/1.1 client, and
//! as much of the WebDriver protocol as the page's tests need.
//!
//! Not a general client: one session, no redirects, bodies as text; whatever fails, panics.
//! Invariant: dropping a value ends what it started and removes the files that it made.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "every test binary uses a part of this")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long anything that involves the model may take, on a slow and busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Chromium's driver and Chromium, where both are installed. Else says so, loudly; with
/// `GREENROOM_REQUIRE_BROWSER` set it fails.
pub fn chromium(what: &str) -> Option<(PathBuf, PathBuf)> {
    let driver = program(&["chromedriver"]);
    let found = driver.zip(program(&["chromium", "chromium-browser", "google-chrome"]));
    if found.is_none() {
        let why = "chromium is not installed (Debian: apt-get install chromium chromium-driver)";
        assert!(
            std::env::var_os("GREENROOM_REQUIRE_BROWSER").is_none(),
            "the browser test cannot run: {why}"
        );
        // Not `eprintln!`: the harness captures that of a test which passes.
        let _ = writeln!(
            std::io::stderr(),
            "\n*** SKIPPED: {why}. The {what} was NOT tested in a browser. ***\n"
        );
    }
    found
}

fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain([PathBuf::from("/usr/bin")]).collect();
    names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|file| file.is_file())
}

/// A child that announces its address; killed when dropped.
pub struct Process {
    child: Child,
    pub address: String,
}

impl Process {
    /// Starts it and waits for a line with `mark` followed by the port.
    pub fn start(command: &mut Command, mark: &'static str) -> Self {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = mpsc::channel();
        let outputs: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for output in outputs {
            let send = send.clone();
            // Reads to the end, so that the child never blocks on a full pipe.
            std::thread::spawn(move || {
                for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                    let _ = send.send(String::from_utf8_lossy(&line).into_owned());
                }
            });
        }
        drop(send);
        let mut process = Self { child, address: String::new() };
        let mut said = String::new();
        let deadline = Instant::now() + PATIENCE;
        while process.address.is_empty() {
            let line = lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
                .unwrap_or_else(|_| panic!("no line with {mark:?} and a port; it said:\n{said}"));
            if let Some((_, rest)) = line.split_once(mark) {
                let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
                process.address = format!("127.0.0.1:{port}");
            }
            let _ = writeln!(said, "{line}");
        }
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// One HTTP/1.1 request on its own connection: the status and the body as text.
pub fn http(address: &str, method: &str, path: &str, body: Option<&Value>) -> std::io::Result<(u16, String)> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let broken = || std::io::Error::other("not an HTTP response");
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|word| word.parse().ok()).ok_or_else(broken)?;
    let (mut length, mut chunked) = (None, false);
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse::<u64>().ok(),
            "transfer-encoding" => chunked = value.trim().eq_ignore_ascii_case("chunked"),
            _ => {}
        }
    }
    let mut bytes = Vec::new();
    if chunked {
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let size =
                u64::from_str_radix(line.trim().split(';').next().unwrap_or(""), 16).map_err(|_| broken())?;
            reader.by_ref().take(size).read_to_end(&mut bytes)?;
            reader.read_line(&mut line)?;
            if size == 0 {
                break;
            }
        }
    } else {
        reader.take(length.unwrap_or(u64::MAX)).read_to_end(&mut bytes)?;
    }
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

/// A WebDriver session with its driver and its own empty profile.
pub struct Browser {
    session: String,
    profile: PathBuf,
    driver: Process,
}

impl Browser {
    pub fn open(driver: &Path, chromium: &Path) -> Self {
        Self::open_with(driver, chromium, &[])
    }

    /// With more arguments for Chromium.
    pub fn open_with(driver: &Path, chromium: &Path, more: &[String]) -> Self {
        static OPENED: AtomicUsize = AtomicUsize::new(0);
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        let profile = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("browser-profile-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&profile);
        std::fs::create_dir_all(&profile).unwrap();
        let driver = Process::start(Command::new(driver).arg("--port=0"), "successfully on port ");
        let mut browser = Self { session: String::new(), profile, driver };
        let profile = format!("--user-data-dir={}", browser.profile.display());
        let mut arguments: Vec<&str> = vec![
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--window-size=1200,900",
            &profile,
        ];
        arguments.extend(more.iter().map(String::as_str));
        let capabilities = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": { "browser": "ALL" },
            "goog:chromeOptions": { "binary": chromium, "args": arguments },
        } } });
        let opened = browser.call("POST", "/session", &capabilities).unwrap();
        browser.session = format!("/session/{}", opened["sessionId"].as_str().unwrap());
        browser
    }

    /// A WebDriver command; its `value`, or the driver's error.
    fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value, Value> {
        let body = (method == "POST").then_some(body);
        let (status, text) = http(&self.driver.address, method, path, body).unwrap();
        let mut answer: Value =
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("{method} {path}: {text}"));
        if status == 200 { Ok(answer["value"].take()) } else { Err(answer["value"].take()) }
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value, Value> {
        self.call("POST", &format!("{}{path}", self.session), body)
    }

    pub fn go(&self, url: &str) {
        self.post("/url", &json!({ "url": url })).unwrap();
    }

    pub fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": [] })).unwrap()
    }

    pub fn run_async(&self, script: &str, args: Value) -> Value {
        self.post("/execute/async", &json!({ "script": script, "args": args })).unwrap()
    }

    pub fn text(&self, script: &str) -> String {
        self.run(script).as_str().unwrap_or_default().to_owned()
    }

    pub fn number(&self, script: &str) -> i64 {
        self.run(script).as_i64().unwrap()
    }

    pub fn truth(&self, script: &str) -> bool {
        self.run(script) == json!(true)
    }

    pub fn wait_until(&self, what: &str, condition: &str) {
        wait_for(what, || self.truth(&format!("return {condition}")));
    }

    fn element(&self, selector: &str) -> String {
        let found = self.post("/element", &json!({ "using": "css selector", "value": selector })).unwrap();
        found.as_object().unwrap().values().next().unwrap().as_str().unwrap().to_owned()
    }

    pub fn try_click(&self, selector: &str) -> Result<Value, Value> {
        self.post(&format!("/element/{}/click", self.element(selector)), &json!({}))
    }

    pub fn click(&self, selector: &str) {
        self.try_click(selector).unwrap();
    }

    pub fn type_into(&self, selector: &str, text: &str) {
        self.post(&format!("/element/{}/value", self.element(selector)), &json!({ "text": text })).unwrap();
    }

    pub fn devtools(&self, command: &str, parameters: Value) {
        self.post("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters })).unwrap();
    }

    pub fn log_lines(&self, word: &str) -> Vec<String> {
        let log = self.post("/se/log", &json!({ "type": "browser" })).unwrap();
        let lines = log.as_array().unwrap().iter().map(|entry| entry["message"].to_string());
        lines.filter(|line| line.contains(word)).collect()
    }

    pub fn screenshot(&self, name: &str) {
        let picture = self.call("GET", &format!("{}/screenshot", self.session), &Value::Null).unwrap();
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(file, from_base64(picture.as_str().unwrap())).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Ends Chromium; the driver itself goes with its `Process`.
        if !self.session.is_empty() {
            let _ = http(&self.driver.address, "DELETE", &self.session, None);
        }
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().filter_map(|byte| DIGITS.iter().position(|&other| other == byte)) {
        bits = (bits << 6) | digit as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
