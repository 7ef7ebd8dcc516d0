//! Where gateways come in to a worker: bound early, open once it can serve, closed in two steps.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use penstock_control::{ListenSettings, Listening, listen_on};
use penstock_engine::Worker;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// An address that is ours, where nobody is let in yet: whoever calls is refused at once.
pub struct Reserved {
    socket: Socket,
    /// With the port that was found for port 0.
    pub address: SocketAddr,
}

impl Reserved {
    /// Binds.
    ///
    /// # Errors
    /// The address is in use, or not ours.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let remedy = || {
            format!("listen for gateways on {address}: is another worker there? choose another with --control-listen")
        };
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into()).with_context(remedy)?;
        let address = socket.local_addr()?.as_socket().context("the control socket has no address")?;
        Ok(Self { socket, address })
    }

    /// Lets gateways in. To be called inside a tokio runtime.
    ///
    /// # Errors
    /// The system does not let it listen.
    pub fn open(self, settings: ListenSettings, worker: Arc<Worker>) -> Result<Doors> {
        self.socket.listen(BACKLOG).with_context(|| format!("listen for gateways on {}", self.address))?;
        let listener = TcpListener::from_std(self.socket.into())?;
        let listening = listen_on(listener, settings).context("listen for gateways")?;
        let (state, wanted) = watch::channel(Wanted::Open);
        let task = tokio::spawn(attend(listening, worker, wanted));
        Ok(Doors { state, task })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wanted {
    Open,
    NobodyNew,
    Closed,
}

/// An open control listener.
pub struct Doors {
    state: watch::Sender<Wanted>,
    task: JoinHandle<()>,
}

impl Doors {
    /// No new gateway comes in; those that are here stay.
    pub fn nobody_new(&self) {
        self.state.send_replace(Wanted::NobodyNew);
    }

    /// Ends every session.
    pub async fn close(self) {
        self.state.send_replace(Wanted::Closed);
        // It ends at once, or has panicked, and then its sessions are over as well.
        let _ = self.task.await;
    }
}

async fn attend(mut listening: Listening, worker: Arc<Worker>, mut wanted: watch::Receiver<Wanted>) {
    loop {
        let conversation = tokio::select! {
            conversation = listening.accept() => conversation,
            changed = wanted.changed() => {
                let now = *wanted.borrow_and_update();
                if now == Wanted::Closed || changed.is_err() {
                    return;
                }
                listening.drain();
                continue;
            }
        };
        let Some(conversation) = conversation else { return };
        let peer = conversation.peer();
        if let Err(why) = worker.take_gateway(conversation) {
            tracing::error!(%peer, %why, "a gateway was turned away");
        }
    }
}
