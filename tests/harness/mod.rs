//! A Greenroom with a scripted engine behind real sockets.
//!
//! Every server that a test starts is taken down at its end, and must then
//! hold no request.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use greenroom::http::{HttpFront, Listeners};
use greenroom::model::ModelSource;
use greenroom::model::fake::{FakeControl, FakeModel, Script};
use greenroom::{Config, Greenroom, Handles};
use serde_json::Value;
use tokio::sync::mpsc as orders;

use crate::wire::{Connection, PATIENCE, Response};

/// What a test may order.
enum Order {
    Drain(Duration),
    Stop,
}

/// A running server.
pub struct Server {
    pub address: SocketAddr,
    pub handles: Handles,
    pub control: FakeControl,
    orders: orders::UnboundedSender<Order>,
    thread: Option<JoinHandle<()>>,
}

/// Settings for tests: any port, quick.
pub fn config() -> Config {
    let mut config = Config::default();
    config.http.port = 0;
    config.cache.enabled = false;
    config
}

impl Server {
    /// Starts with this script; returns once the model answers.
    pub fn start(script: Script) -> Self {
        Self::with(script, |_| {})
    }

    /// Starts with changed settings.
    pub fn with(script: Script, change: impl FnOnce(&mut Config)) -> Self {
        let model = FakeModel::new("scripted", script);
        let control = model.control();
        let server = Self::serving(Arc::new(model), control, change);
        server.wait("the model to be loaded", |handles| handles.health() == greenroom::Health::Ready);
        server
    }

    /// Starts with any model; returns once it listens.
    pub fn serving(
        model: Arc<dyn ModelSource>,
        control: FakeControl,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let mut config = config();
        change(&mut config);
        let (send, receive) = mpsc::channel();
        let (orders, mut inbox) = orders::unbounded_channel();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let listeners = Listeners::bind(&config.http).unwrap();
                let greenroom = Greenroom::builder(config.clone()).model(model).start().await.unwrap();
                let serving = HttpFront::serve(greenroom.handles(), &config.http, listeners).unwrap();
                send.send((serving.address, greenroom.handles())).unwrap();
                while let Some(Order::Drain(deadline)) = inbox.recv().await {
                    greenroom.drain(deadline).await;
                }
                serving.stop(false).await;
                greenroom.stop().await;
            });
        });
        let (address, handles) = receive.recv_timeout(PATIENCE).unwrap();
        let address = address.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        Self { address, handles, control, orders, thread: Some(thread) }
    }

    /// Begins a drain.
    pub fn drain(&self, deadline: Duration) {
        self.orders.send(Order::Drain(deadline)).unwrap();
    }

    /// Waits until something holds; fails loudly when it never does.
    pub fn wait(&self, what: &str, holds: impl Fn(&Handles) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.handles) {
            assert!(Instant::now() < deadline, "waited in vain for {what}");
            std::thread::yield_now();
        }
    }

    /// Opens a connection.
    pub fn connect(&self) -> Connection {
        Connection::tcp(self.address)
    }

    /// One request on its own connection.
    pub fn send(&self, raw: impl AsRef<[u8]>) -> Response {
        let mut connection = self.connect();
        connection.write(raw);
        connection.read_response()
    }

    /// A request without body.
    pub fn get(&self, path: &str) -> Response {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address))
    }

    /// A JSON body to the chat route.
    pub fn chat(&self, body: &Value) -> Response {
        self.send(self.chat_bytes(body))
    }

    /// The bytes of a chat request.
    pub fn chat_bytes(&self, body: &Value) -> Vec<u8> {
        self.post("/v1/chat/completions", "application/json", &body.to_string())
    }

    /// The bytes of a request with a body.
    pub fn post(&self, path: &str, media_type: &str, body: &str) -> Vec<u8> {
        format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
        .into_bytes()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.control.open();
        let _ = self.orders.send(Order::Stop);
        let joined = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(joined, Some(Ok(()))), "the server's thread panicked");
            assert_eq!(self.handles.gauges().tickets_live(), 0, "requests are left over");
        }
    }
}
