//! Clients that cost as little as they can: one thread for all streams, and of what comes only ends of events are counted.

use std::net::SocketAddr;

use greenroom::Handles;
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Role};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::Failed;

/// Room for the prompt, in tokens.
pub const PROMPT_ROOM: u32 = 128;
/// Events of a stream that are no tokens: the role, the finish, `[DONE]`.
const OTHER_EVENTS: u64 = 3;
/// Bytes that are read at once, at most.
const READ: usize = 64 * 1024;

/// What is asked for.
#[derive(Clone, Copy)]
pub struct Load {
    /// Streams at once.
    pub streams: usize,
    /// Tokens of each.
    pub tokens: u32,
}

/// Asks the actors and takes every event.
pub fn actors(load: Load, handles: Handles) -> Result<(), Failed> {
    all(load, move || one_of_actors(load.tokens, handles.clone()))
}

/// Asks the server over one connection a stream.
pub fn http(load: Load, address: SocketAddr) -> Result<(), Failed> {
    all(load, move || one_of_http(load.tokens, address))
}

/// Runs all streams on this thread.
fn all<F>(load: Load, stream: impl Fn() -> F) -> Result<(), Failed>
where
    F: Future<Output = Result<(), Failed>> + Send + 'static,
{
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut streams = JoinSet::new();
        for _ in 0..load.streams {
            streams.spawn(stream());
        }
        while let Some(ended) = streams.join_next().await {
            ended??;
        }
        Ok(())
    })
}

async fn one_of_actors(tokens: u32, handles: Handles) -> Result<(), Failed> {
    let request = ChatRequest {
        messages: vec![ChatMessage::text(Role::User, "Hello".to_owned())],
        max_tokens: Some(tokens),
        ..ChatRequest::default()
    };
    let mut stream = handles.chat(request).await?;
    let mut texts = 0;
    while let Some(event) = stream.events.recv().await {
        match event {
            ChatEvent::Text(_) => texts += 1,
            ChatEvent::Done { .. } => break,
            ChatEvent::Failed(failure) => return Err(failure.message.into()),
            _ => {}
        }
    }
    check(texts, u64::from(tokens))
}

async fn one_of_http(tokens: u32, address: SocketAddr) -> Result<(), Failed> {
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"Hello"}}],"max_tokens":{tokens},"stream":true}}"#
    );
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close";
    let mut socket = TcpStream::connect(address).await?;
    socket.write_all(format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    let mut buffer = vec![0; READ];
    let mut events = Events::default();
    loop {
        let count = socket.read(&mut buffer).await?;
        if count == 0 {
            break;
        }
        events.count(&buffer[..count]);
    }
    check(events.ended, u64::from(tokens) + OTHER_EVENTS)
}

fn check(found: u64, wanted: u64) -> Result<(), Failed> {
    if found == wanted {
        return Ok(());
    }
    Err(format!("a stream had {found} events instead of {wanted}: it was refused or broken off").into())
}

/// Counts ends of events: two line feeds. Heads and frames of chunks have none of these, their lines end otherwise.
#[derive(Default)]
struct Events {
    ended: u64,
    /// The last byte seen.
    last: u8,
}

impl Events {
    fn count(&mut self, bytes: &[u8]) {
        let within = bytes.windows(2).filter(|pair| *pair == b"\n\n").count();
        let across = self.last == b'\n' && bytes.first() == Some(&b'\n');
        self.ended += within as u64 + u64::from(across);
        self.last = bytes.last().copied().unwrap_or(self.last);
    }
}
