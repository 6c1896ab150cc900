//! `HttpFront`: the actor that owns listeners and the running server.
//!
//! Lives on the System's arbiter; actix-web's workers do the serving. It
//! installs no signal handler and never stops the `System`: that is its
//! owner's matter. Stopping it is the last step of the drain, when all streams
//! have been ended; what is still open then is cut off after two seconds.

use std::net::{SocketAddr, TcpListener};
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
    /// Where it listens, the port resolved.
    pub address: Option<SocketAddr>,
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

/// Listeners that are bound and not served yet.
///
/// Bound before a model is loaded: a port that is taken shows at once.
pub struct Listeners {
    tcp: Option<(TcpListener, SocketAddr)>,
    #[cfg(unix)]
    unix: Option<(std::os::unix::net::UnixListener, listen::SocketFile)>,
}

impl Listeners {
    /// Binds what the settings ask for.
    ///
    /// # Errors
    /// The listener that could not be had.
    pub fn bind(config: &HttpConfig) -> Result<Self, ListenError> {
        let tcp = config.tcp.then(|| listen::tcp(&config.host, config.port)).transpose()?;
        #[cfg(unix)]
        let unix = config.unix_socket.as_deref().map(listen::unix).transpose()?;
        Ok(Self {
            tcp,
            #[cfg(unix)]
            unix,
        })
    }
}

impl HttpFront {
    /// Serves on these listeners. Needs a running actix `System`.
    ///
    /// # Errors
    /// `Server` when the system refuses.
    pub fn serve(
        handles: Handles,
        config: &HttpConfig,
        listeners: Listeners,
    ) -> Result<Serving, ListenError> {
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
        let mut address = None;
        if let Some((listener, bound)) = listeners.tcp {
            server = server.listen(listener).map_err(failed)?;
            address = Some(bound);
        }
        #[cfg(unix)]
        let mut socket = None;
        #[cfg(unix)]
        if let Some((listener, file)) = listeners.unix {
            server = server.listen_uds(listener).map_err(failed)?;
            socket = Some(file);
        }
        let running = server.run();
        let front = Self {
            server: running.handle(),
            #[cfg(unix)]
            _socket: socket,
        }
        .start();
        let ended = front.downgrade();
        // Polled to its end: dropping it would force the workers down.
        actix_rt::spawn(async move {
            let result = running.await;
            if let Some(front) = ended.upgrade() {
                // BOUND: once in the actor's life.
                front.do_send(ServerEnded(result));
            }
        });
        Ok(Serving { front, address, unix_socket: config.unix_socket.clone() })
    }
}
