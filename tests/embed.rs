//! Greenroom inside another application: started and stopped ten times in a
//! host's System beside its own server and actors, leaving nothing behind.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use actix_web::{App, HttpServer, web};
use greenroom::actors::OpenChat;
use greenroom::model::fake::{FakeModel, Script};
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Role};
use greenroom::{Config, Greenroom};

/// The host's own actor.
struct Asker {
    chat: Recipient<OpenChat>,
}

#[derive(Message)]
#[rtype(result = "String")]
struct Ask;

impl Actor for Asker {
    type Context = Context<Self>;
}

impl Handler<Ask> for Asker {
    type Result = ResponseFuture<String>;

    fn handle(&mut self, _: Ask, _: &mut Self::Context) -> Self::Result {
        let chat = self.chat.clone();
        Box::pin(async move {
            let messages = vec![ChatMessage::text(Role::User, "hello")];
            let request = ChatRequest { messages, ..ChatRequest::default() };
            let mut stream = chat.send(OpenChat { request }).await.unwrap().unwrap();
            let mut text = String::new();
            while let Some(event) = stream.events.recv().await {
                if let ChatEvent::Text(piece) = event {
                    text.push_str(&piece);
                }
            }
            text
        })
    }
}

/// Threads of this process and its resident memory in KiB.
fn footprint() -> (usize, u64) {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    (threads, line.split_whitespace().nth(1).unwrap().parse().unwrap())
}

fn request(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(text.replace("HOST", &address.to_string()).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

async fn get(address: SocketAddr, path: &str) -> String {
    let text = format!("GET {path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n");
    tokio::task::spawn_blocking(move || request(address, &text)).await.unwrap()
}

async fn post(address: SocketAddr, path: &str, body: &str) -> String {
    let text = format!(
        "POST {path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::task::spawn_blocking(move || request(address, &text)).await.unwrap()
}

/// One life of Greenroom in the host: both ways of asking, then a proper end.
async fn one_life() {
    let config = Config::default();
    let model = Arc::new(FakeModel::new("scripted", Script::new().say("hello", "Good day")));
    let greenroom = Greenroom::builder(config.clone()).model(model).start().await.unwrap();
    greenroom.ready().await.unwrap();
    let ai = greenroom::http::configure(greenroom.handles(), &config.http);
    let server = HttpServer::new(move || {
        App::new()
            .route("/about", web::get().to(|| async { "the host" }))
            .service(web::scope("/ai").configure(ai.clone()))
            .default_service(web::to(|| async { "the host's own default" }))
    })
    .workers(1)
    .disable_signals()
    .bind(("127.0.0.1", 0))
    .unwrap();
    let address = server.addrs()[0];
    let server = server.run();
    let handle = server.handle();
    let running = actix_rt::spawn(server);

    let asker = Asker { chat: greenroom.open_chat() }.start();
    assert_eq!(asker.send(Ask).await.unwrap(), "Good day");
    assert!(get(address, "/about").await.ends_with("the host"));
    assert!(get(address, "/elsewhere").await.ends_with("the host's own default"));
    assert!(get(address, "/ai/v1/models").await.contains("\"scripted\""));
    assert!(get(address, "/ai/nowhere").await.contains("\"not_found\""));
    assert!(get(address, "/ai").await.contains("location: ai/"));
    assert!(get(address, "/ai/").await.contains("page/app.js"));
    let answer =
        post(address, "/ai/v1/chat/completions", r#"{"messages":[{"role":"user","content":"hello"}]}"#).await;
    assert!(answer.contains("Good day"), "{answer}");

    greenroom.drain(Duration::from_secs(5)).await;
    let refused =
        post(address, "/ai/v1/chat/completions", r#"{"messages":[{"role":"user","content":"hello"}]}"#).await;
    assert!(refused.contains("shutting_down"), "{refused}");
    assert!(get(address, "/about").await.ends_with("the host"), "the host goes on");
    let gauges = Arc::clone(greenroom.handles().gauges());
    greenroom.stop().await;
    assert_eq!(gauges.tickets_live(), 0);
    handle.stop(false).await;
    running.await.unwrap().unwrap();
}

/// The footprint once no thread has ended for half a second: those that were told to end do so on
/// their own time, and give no sign.
async fn settled() -> (usize, u64) {
    let (mut last, mut since) = (footprint(), Instant::now());
    while since.elapsed() < Duration::from_millis(500) {
        actix_rt::time::sleep(Duration::from_millis(20)).await;
        let now = footprint();
        if now.0 != last.0 {
            since = Instant::now();
        }
        last = now;
    }
    last
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "counts threads in /proc")]
fn ten_lives_leave_what_the_first_one_left() {
    actix_rt::System::new().block_on(async {
        // Threads of the runtime's blocking pool stay for a while: made once, before counting.
        tokio::task::spawn_blocking(|| {}).await.unwrap();
        one_life().await;
        let (threads, memory) = settled().await;
        for _ in 1..10 {
            one_life().await;
        }
        // The runtime's blocking pool, busier on a busy machine, lets its threads go after ten seconds
        // without work; a thread that leaked never goes.
        let deadline = Instant::now() + Duration::from_secs(40);
        let mut after = settled().await;
        while after.0 > threads && Instant::now() < deadline {
            after = settled().await;
        }
        assert!(after.0 <= threads, "{} threads after ten lives, {threads} after the first", after.0);
        let grown = after.1.saturating_sub(memory);
        assert!(grown < 24 * 1024, "memory grew by {grown} KiB, from {memory} KiB");
    });
}
