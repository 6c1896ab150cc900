//! `HttpFront`: the actor that owns listeners and the running server.
//!
//! Lives on the System's arbiter; actix-web's workers do the serving. It
//! installs no signal handler and never stops the `System`: that is its
//! owner's matter. Stopping it is the last step of the drain, when all streams
//! have been ended; what is still open then is cut off after two seconds.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use actix::prelude::*;
use actix_web::dev::ServerHandle;
use actix_web::{App, HttpServer};

use super::listen::{self, ListenError};
use super::routes::configure;
use crate::actors::Handles;
use crate::config::HttpConfig;
use crate::observe::fields;

/// Seconds that connections get once all streams have been ended.
const SHUTDOWN_TIMEOUT_S: u64 = 2;
/// Threads of a worker for blocking work; there is next to none.
const BLOCKING_THREADS: usize = 2;
/// How long the head of a request may take.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Stops the server; with grace, connections get two seconds. The reply comes when it has stopped.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
struct StopServing {
    graceful: bool,
}

/// The server has ended by itself, or by order.
#[derive(Message)]
#[rtype(result = "()")]
struct ServerEnded(std::io::Result<()>);

/// See the module.
pub struct HttpFront {
    server: ServerHandle,
    /// Removed from the file system with the actor.
    #[cfg(unix)]
    _socket: Option<listen::SocketFile>,
}

impl Actor for HttpFront {
    type Context = Context<Self>;
}

impl Handler<StopServing> for HttpFront {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, message: StopServing, _: &mut Self::Context) -> Self::Result {
        Box::pin(self.server.stop(message.graceful))
    }
}

impl Handler<ServerEnded> for HttpFront {
    type Result = ();

    fn handle(&mut self, message: ServerEnded, context: &mut Self::Context) {
        if let ServerEnded(Err(error)) = message {
            tracing::error!(target: fields::LIFE, %error, "the HTTP server ended with an error");
        }
        context.stop();
    }
}

/// A running HTTP side.
pub struct Serving {
    front: Addr<HttpFront>,
    /// Where it listens, ports resolved.
    pub addresses: Vec<SocketAddr>,
    /// Its Unix socket.
    pub unix_socket: Option<PathBuf>,
}

impl Serving {
    /// Stops serving; with grace, open connections get two seconds. Returns when it has stopped.
    pub async fn stop(self, graceful: bool) {
        // An actor that is gone has stopped already.
        let _ = self.front.send(StopServing { graceful }).await;
    }
}

impl HttpFront {
    /// Binds and serves. Needs a running actix `System`.
    ///
    /// # Errors
    /// Whatever a listener could not be had for.
    pub fn serve(handles: Handles, config: &HttpConfig) -> Result<Serving, ListenError> {
        let failed = |source| ListenError::Server { source };
        let routes = configure(handles, config);
        let mut server = HttpServer::new(move || App::new().configure(routes.clone()))
            .workers(config.workers)
            .worker_max_blocking_threads(BLOCKING_THREADS)
            .keep_alive(Duration::from_secs(config.keep_alive_s))
            .client_request_timeout(HEAD_TIMEOUT)
            .tcp_nodelay(true)
            .h1_allow_half_closed(config.allow_half_close)
            .shutdown_timeout(SHUTDOWN_TIMEOUT_S)
            .disable_signals();
        let mut addresses = Vec::new();
        if config.tcp {
            let (listener, address) = listen::tcp(&config.host, config.port)?;
            server = server.listen(listener).map_err(failed)?;
            addresses.push(address);
        }
        #[cfg(unix)]
        let socket = match &config.unix_socket {
            None => None,
            Some(path) => {
                let (listener, file) = listen::unix(path)?;
                server = server.listen_uds(listener).map_err(failed)?;
                Some(file)
            }
        };
        let unix_socket = config.unix_socket.clone();
        let running = server.run();
        let handle = running.handle();
        let front = Self {
            server: handle,
            #[cfg(unix)]
            _socket: socket,
        }
        .start();
        let ended = front.downgrade();
        // Polled to its end: dropping it would force the workers down.
        actix_rt::spawn(async move {
            let result = running.await;
            if let Some(front) = ended.upgrade() {
                front.do_send(ServerEnded(result));
            }
        });
        Ok(Serving { front, addresses, unix_socket })
    }
}
