//! Accepts connections within their bounds and serves a router on each.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use super::stalled::{GivenUp, Stalled};

const BACKLOG: i32 = 1_024;
const HEADER_BYTES_MAX: usize = 32 << 10;
const HEADERS_MAX: usize = 64;

/// A bound socket.
pub struct Listener {
    inner: TcpListener,
    /// The address, with the port that was found for port 0.
    pub address: SocketAddr,
}

/// Waits of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the headers of a request.
    pub headers: Duration,
    /// For a client that takes nothing.
    pub send: Duration,
    /// Kernel send buffer, in bytes.
    pub send_buffer_bytes: usize,
}

impl Listener {
    /// Binds.
    ///
    /// # Errors
    /// The address is in use, or not ours.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let remedy = || format!("listen on {address}: is another server there? choose another with --listen");
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into()).with_context(remedy)?;
        socket.listen(BACKLOG).with_context(remedy)?;
        let inner = TcpListener::from_std(socket.into())?;
        let address = inner.local_addr()?;
        Ok(Self { inner, address })
    }
}

/// Serves until `stop` turns true, then lets open connections finish what they answer.
pub async fn serve(
    listener: Listener,
    router: Router,
    most: usize,
    timeouts: Timeouts,
    mut stop: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(most));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.inner.accept() => accepted,
            () = stopped(&mut stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(fault) => {
                // Out of descriptors, most likely: accepting again at once would spin.
                tracing::warn!(%fault, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (router, stop) = (router.clone(), stop.clone());
        tokio::spawn(async move {
            connection(stream, router, timeouts, stop).await;
            drop(slot);
        });
    }
    drop(listener);
    // Every connection holds a slot: all slots free means that all have closed.
    let _ = slots.acquire_many(u32::try_from(most).unwrap_or(u32::MAX)).await;
}

/// Returns once the server stops, or is gone.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The router of one connection: its requests know what became of it.
struct Connected {
    inner: TowerToHyperService<Router>,
    given_up: GivenUp,
}

impl Service<Request<Incoming>> for Connected {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.given_up.clone());
        self.inner.call(request)
    }
}

async fn connection(stream: TcpStream, router: Router, timeouts: Timeouts, mut stop: watch::Receiver<bool>) {
    let socket = socket2::SockRef::from(&stream);
    // Both are wishes: without them the connection works, with more delay or more buffering.
    let _ = stream.set_nodelay(true);
    let _ = socket.set_send_buffer_size(timeouts.send_buffer_bytes);
    let given_up = GivenUp::default();
    let io = TokioIo::new(Stalled::new(stream, timeouts.send, given_up.clone()));
    let service = Connected { inner: TowerToHyperService::new(router), given_up };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(timeouts.headers)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(true)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.as_mut().await
        }
    };
    if let Err(fault) = served {
        tracing::debug!(%fault, "a connection broke off");
    }
}
