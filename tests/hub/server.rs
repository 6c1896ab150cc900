//! A hub and its content host on this machine: just enough of the protocol, and faults on order.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit that every revision means.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong once, at the next request that it fits.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The file's connection ends after so many bytes.
    Cut(&'static str, usize),
    /// So many bytes come, then nothing until the client hangs up.
    Stall(&'static str, usize),
    /// Other bytes of the same length.
    Wrong(&'static str),
    /// More bytes than promised.
    Longer(&'static str),
    /// A range is not understood: all comes.
    NoRange(&'static str),
    /// A status, with an error code, for paths that contain a text.
    Status(&'static str, u16, &'static str),
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub on_content_host: bool,
    pub authorization: Option<String>,
    pub range: Option<u64>,
}

struct File {
    name: String,
    bytes: Vec<u8>,
    is_large: bool,
    claimed: Option<u64>,
}

#[derive(Default)]
struct State {
    files: Vec<File>,
    faults: Vec<Fault>,
    requests: Vec<Request>,
}

/// The two servers. Their threads end with the process.
#[derive(Clone)]
pub struct HubServer {
    state: Arc<Mutex<State>>,
    pub address: SocketAddr,
    content: SocketAddr,
}

impl HubServer {
    pub fn start() -> Self {
        let (main, content) = (listener(), listener());
        let server = Self {
            state: Arc::default(),
            address: main.local_addr().unwrap(),
            content: content.local_addr().unwrap(),
        };
        for (socket, on_content_host) in [(main, false), (content, true)] {
            let server = server.clone();
            std::thread::spawn(move || {
                for stream in socket.incoming().flatten() {
                    let server = server.clone();
                    std::thread::spawn(move || server.answer(stream, on_content_host));
                }
            });
        }
        server
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A small file, which the hub sends itself.
    pub fn small(&self, name: &str, text: &str) {
        self.add(name, text.into(), false, None);
    }

    /// A large file, which lies on the content host.
    pub fn large(&self, name: &str, bytes: Vec<u8>) {
        self.add(name, bytes, true, None);
    }

    /// A file that claims another size than it has.
    pub fn claiming(&self, name: &str, size: u64) {
        self.add(name, vec![0], true, Some(size));
    }

    fn add(&self, name: &str, bytes: Vec<u8>, is_large: bool, claimed: Option<u64>) {
        self.state.lock().unwrap().files.push(File { name: name.into(), bytes, is_large, claimed });
    }

    pub fn fail(&self, fault: Fault) {
        self.state.lock().unwrap().faults.push(fault);
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state.lock().unwrap().requests.clone()
    }

    /// GET requests for a file's bytes on the host that has them.
    pub fn fetches(&self, file: &str) -> Vec<Request> {
        let is_fetch = |request: &Request| {
            request.method == "GET"
                && request.path.ends_with(file)
                && (request.on_content_host || !file.contains("model"))
        };
        self.requests().into_iter().filter(is_fetch).collect()
    }

    fn take_fault(&self, fits: impl Fn(&Fault) -> bool) -> Option<Fault> {
        let mut state = self.state.lock().unwrap();
        let at = state.faults.iter().position(fits)?;
        Some(state.faults.remove(at))
    }

    fn answer(&self, mut stream: TcpStream, on_content_host: bool) {
        let Some(request) = read_request(&stream, on_content_host) else { return };
        self.state.lock().unwrap().requests.push(request.clone());
        let status =
            self.take_fault(|fault| matches!(fault, Fault::Status(text, ..) if request.path.contains(text)));
        if let Some(Fault::Status(_, status, code)) = status {
            let head = format!(
                "HTTP/1.1 {status} X\r\nX-Error-Code: {code}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
            let _ = stream.write_all(head.as_bytes());
            return;
        }
        let path = request.path.split('?').next().unwrap_or_default().to_owned();
        if path.starts_with("/api/models/") {
            let body = self.listing();
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
            return;
        }
        let marker = format!("/resolve/{COMMIT}/");
        let Some((_, name)) = path.split_once(&marker) else {
            let _ = stream.write_all(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        };
        self.send_file(&mut stream, &request, &name.replace("%20", " "));
    }

    fn listing(&self) -> String {
        let state = self.state.lock().unwrap();
        let siblings: Vec<_> = state
            .files
            .iter()
            .map(|file| {
                let size = file.claimed.unwrap_or(file.bytes.len() as u64);
                serde_json::json!({"rfilename": file.name, "size": size, "blobId": git_hash(&file.bytes)})
            })
            .collect();
        serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string()
    }

    fn send_file(&self, stream: &mut TcpStream, request: &Request, name: &str) {
        let found = {
            let state = self.state.lock().unwrap();
            let file = state.files.iter().find(|file| file.name == name);
            file.map(|file| (file.bytes.clone(), file.is_large, file.claimed))
        };
        let Some((mut bytes, is_large, claimed)) = found else {
            let _ = stream.write_all(
                b"HTTP/1.1 404 X\r\nX-Error-Code: EntryNotFound\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            );
            return;
        };
        let size = claimed.unwrap_or(bytes.len() as u64);
        if is_large && !request.on_content_host {
            let head = format!(
                "HTTP/1.1 302 Found\r\nLocation: http://{}{}\r\nX-Linked-Etag: \"{}\"\r\nX-Linked-Size: {size}\r\n\
                 X-Repo-Commit: {COMMIT}\r\nETag: \"other\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                self.content,
                request.path,
                sha256(&bytes)
            );
            let _ = stream.write_all(head.as_bytes());
            return;
        }
        let etag = git_hash(&bytes);
        let of = |fault: &Fault, file: &str| match fault {
            Fault::Cut(name, _)
            | Fault::Stall(name, _)
            | Fault::Wrong(name)
            | Fault::Longer(name)
            | Fault::NoRange(name) => *name == file,
            Fault::Status(..) => false,
        };
        let fault = (request.method == "GET").then(|| self.take_fault(|fault| of(fault, name))).flatten();
        match fault {
            Some(Fault::Wrong(_)) => bytes.iter_mut().for_each(|byte| *byte ^= 1),
            Some(Fault::Longer(_)) => bytes.extend([0; 100]),
            _ => {}
        }
        let from = request.range.filter(|_| !matches!(fault, Some(Fault::NoRange(_)))).unwrap_or(0) as usize;
        let ranged = match request.range {
            Some(_) if from > 0 => {
                format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len())
            }
            _ => String::new(),
        };
        let status = if ranged.is_empty() { "200 OK" } else { "206 Partial" };
        let body = bytes.get(from..).unwrap_or(&[]);
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{ranged}ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n\
             Connection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all(head.as_bytes());
        if request.method == "HEAD" {
            return;
        }
        let until = match fault {
            Some(Fault::Cut(_, after) | Fault::Stall(_, after)) => after.min(body.len()),
            _ => body.len(),
        };
        let _ = stream.write_all(&body[..until]);
        if matches!(fault, Some(Fault::Stall(..))) {
            // Until the client hangs up.
            let _ = stream.read(&mut [0; 16]);
        }
    }
}

fn listener() -> TcpListener {
    TcpListener::bind(("127.0.0.1", 0)).unwrap()
}

fn read_request(stream: &TcpStream, on_content_host: bool) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let mut request = Request {
        method: words.next()?.to_owned(),
        path: words.next()?.to_owned(),
        on_content_host,
        authorization: None,
        range: None,
    };
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            "range" => request.range = value.trim().strip_prefix("bytes=")?.split('-').next()?.parse().ok(),
            _ => {}
        }
    }
    Some(request)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What names a large file.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// What names a small file.
pub fn git_hash(bytes: &[u8]) -> String {
    let mut state = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    state.update(bytes);
    hex(&state.finalize())
}
