//! A client that speaks HTTP in bytes, over TCP and Unix sockets.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// No test waits longer for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Both kinds of sockets.
pub trait Socket: Read + Write + Send {}
impl<T: Read + Write + Send> Socket for T {}

/// A chat body with one user message.
pub fn ask(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

/// A body with more fields.
pub fn with(mut body: Value, fields: Value) -> Value {
    let more = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

/// The client's end of a connection.
pub struct Connection {
    reader: BufReader<Box<dyn Socket>>,
    tcp: Option<TcpStream>,
}

/// A response, or its head.
#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Connection {
    pub fn tcp(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let tcp = stream.try_clone().unwrap();
        Self { reader: BufReader::new(Box::new(stream)), tcp: Some(tcp) }
    }

    pub fn unix(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { reader: BufReader::new(Box::new(stream)), tcp: None }
    }

    pub fn write(&mut self, bytes: impl AsRef<[u8]>) {
        // A server that has answered and closed refuses the rest: the answer is what counts.
        let _ = self.reader.get_mut().write_all(bytes.as_ref());
    }

    /// The socket of a TCP connection.
    pub fn stream(&self) -> &TcpStream {
        self.tcp.as_ref().unwrap()
    }

    /// Status line and headers.
    pub fn read_head(&mut self) -> Response {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.reader.read_line(&mut line).unwrap(), 0, "the connection ended: {lines:?}");
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines[1..]
            .iter()
            .map(|line| line.split_once(':').unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Response { status, headers, body: Vec::new() }
    }

    /// A whole response; 100 Continue is skipped.
    pub fn read_response(&mut self) -> Response {
        let mut response = self.read_head();
        while response.status == 100 {
            response = self.read_head();
        }
        if response.header("transfer-encoding").is_some_and(|coding| coding.contains("chunked")) {
            while let Some(chunk) = self.read_chunk() {
                response.body.extend(chunk);
            }
        } else if let Some(length) = response.header("content-length") {
            let mut body = vec![0; length.parse().unwrap()];
            self.reader.read_exact(&mut body).unwrap();
            response.body = body;
        }
        response
    }

    /// One chunk of a chunked body; `None` at its proper end.
    pub fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let mut size = String::new();
        assert_ne!(self.reader.read_line(&mut size).unwrap(), 0, "the body was cut off");
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut chunk = vec![0; size + 2];
        self.reader.read_exact(&mut chunk).unwrap();
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Whether the server has closed its side, nothing more being sent.
    pub fn ends(&mut self) -> bool {
        matches!(self.reader.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {}", self.text()))
    }

    /// `error.code` and `error.param` and the message of an error.
    pub fn error(&self) -> (String, Option<String>, String) {
        let error = self.json()["error"].clone();
        let text = |name: &str| error[name].as_str().map(str::to_owned);
        (text("code").unwrap(), text("param"), text("message").unwrap())
    }

    /// The `data:` payloads of an event stream.
    pub fn events(&self) -> Vec<String> {
        events(&self.text())
    }
}

/// The `data:` payloads of an event stream.
pub fn events(text: &str) -> Vec<String> {
    let data = |event: &str| event.lines().find_map(|line| line.strip_prefix("data: ")).map(str::to_owned);
    text.split("\n\n").filter_map(data).collect()
}
