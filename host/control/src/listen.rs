//! The end that is called: takes connections, tells sessions apart, hands new conversations over.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use subtle::ConstantTimeEq as _;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use crate::conversation::{Attached, Conversation, Shared};
use crate::glue::control_server::{Control, ControlServer};
use crate::limits::{GREETING_BYTES_MAX, HELLO_WITHIN, PACKET_OVERHEAD_BYTES, STREAMS_MAX, WINDOW_BYTES};
use crate::session::{ConnectionId, End, Ended};
use crate::wire::{Hello, Packet, Refusal, Reject, VERSION, Welcome, Word};
use crate::{Identity, Limits};

/// How an end is called.
#[derive(Clone, Debug)]
pub struct ListenSettings {
    /// Who this end is.
    pub identity: Identity,
    /// Bounds of each session.
    pub limits: Limits,
    /// Sessions at once; one a caller.
    pub sessions_max: usize,
}

/// An end that can be called. Dropping it ends every session that came in by it.
#[derive(Debug)]
pub struct Listening {
    address: SocketAddr,
    conversations: mpsc::Receiver<Conversation>,
    table: Arc<Table>,
    /// Dropped to stop.
    _stop: oneshot::Sender<()>,
}

impl Listening {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next conversation that somebody began. None when the server has ended.
    pub async fn accept(&mut self) -> Option<Conversation> {
        self.conversations.recv().await
    }

    /// From now on no new session is taken; those that run go on, over new connections as well.
    pub fn drain(&self) {
        self.table.drains.store(true, Ordering::Release);
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.drain();
        for seat in self.table.lock().values() {
            seat.shared.end(Ended::Closed);
        }
    }
}

/// Listens at `address`. Whoever shows the identity's token and speaks of the same compatibility may begin a conversation.
///
/// # Errors
/// When the address cannot be had, or the identity's greeting is over 64 KiB.
pub async fn listen(address: SocketAddr, settings: ListenSettings) -> std::io::Result<Listening> {
    listen_on(TcpListener::bind(address).await?, settings)
}

/// As [`listen`], at a socket that listens already. To be called inside a tokio runtime.
///
/// # Errors
/// When the identity's greeting is over 64 KiB.
pub fn listen_on(listener: TcpListener, settings: ListenSettings) -> std::io::Result<Listening> {
    if !settings.identity.has_short_greeting() {
        let why = format!("the greeting is over {GREETING_BYTES_MAX} bytes: say less in it");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    }
    let address = listener.local_addr()?;
    let (accepted, conversations) = mpsc::channel(settings.sessions_max.max(1));
    let (stop, stopped) = oneshot::channel::<()>();
    let packet_bytes_max = settings.limits.message_bytes_max.max(GREETING_BYTES_MAX) + PACKET_OVERHEAD_BYTES;
    let table = Arc::new(Table { settings, seats: Mutex::default(), accepted, drains: AtomicBool::new(false) });
    let service = ControlServer::from_arc(Arc::clone(&table)).max_decoding_message_size(packet_bytes_max);
    let server = tonic::transport::Server::builder()
        .tcp_nodelay(true)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .serve_with_incoming_shutdown(service, TcpListenerStream::new(listener), async move { drop(stopped.await) });
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "the control listener has ended");
        }
    });
    Ok(Listening { address, conversations, table, _stop: stop })
}

/// Sessions by caller.
#[derive(Debug)]
struct Table {
    settings: ListenSettings,
    seats: Mutex<HashMap<u64, Seat>>,
    accepted: mpsc::Sender<Conversation>,
    drains: AtomicBool,
}

/// The latest session of one caller.
#[derive(Debug)]
struct Seat {
    epoch: u64,
    session: u64,
    shared: Arc<Shared>,
}

type Packets = Pin<Box<dyn Stream<Item = Result<Packet, Status>> + Send>>;

#[tonic::async_trait]
impl Control for Table {
    type ConverseStream = Packets;

    async fn converse(&self, request: Request<Streaming<Packet>>) -> Result<Response<Packets>, Status> {
        if !self.is_allowed(request.metadata()) {
            return Err(Status::unauthenticated("the token is missing or wrong"));
        }
        let mut packets = request.into_inner();
        let first = tokio::time::timeout(HELLO_WITHIN, packets.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no hello came"))??;
        let Some(Word::Hello(hello)) = first.and_then(|packet| packet.word) else {
            return Err(Status::invalid_argument("the first word is not a hello"));
        };
        match self.seat(&hello) {
            Ok((shared, attached, answers)) => {
                tokio::spawn(async move { shared.pump(attached, packets).await });
                let answers = ReceiverStream::new(answers);
                Ok(Response::new(Box::pin(tokio_stream::StreamExt::map(answers, Ok))))
            }
            Err((refusal, detail)) => {
                tracing::warn!(caller = hello.from_id, epoch = hello.from_epoch, %refusal, detail, "a caller was refused");
                let reject = Packet::of(Word::Reject(Reject { reason: refusal.number(), detail }));
                Ok(Response::new(Box::pin(tokio_stream::once(Ok(reject)))))
            }
        }
    }
}

type Refused = (Refusal, String);

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Seat>> {
        // Nothing can panic half way through a change.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_allowed(&self, metadata: &MetadataMap) -> bool {
        let Some(token) = &self.settings.identity.token else { return true };
        let shown = metadata.get("authorization").and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| bool::from(shown.ct_eq(token.as_bytes())))
    }

    /// Finds or makes the session that a hello is about, and attaches the connection to it.
    fn seat(&self, hello: &Hello) -> Result<(Arc<Shared>, Attached, mpsc::Receiver<Packet>), Refused> {
        let identity = &self.settings.identity;
        if hello.version != VERSION {
            return Err((Refusal::Version, format!("{VERSION} here, {} there", hello.version)));
        }
        if hello.compatibility != identity.compatibility {
            let cut = |text: &str| text.chars().take(200).collect::<String>();
            let detail = format!("{} here, {} there", cut(&identity.compatibility), cut(&hello.compatibility));
            return Err((Refusal::Compatibility, detail));
        }
        if hello.to_epoch != 0 && hello.to_epoch != identity.end.epoch {
            return Err((Refusal::Epoch, format!("{} here, {} meant", identity.end.epoch, hello.to_epoch)));
        }
        if hello.greeting.len() > GREETING_BYTES_MAX || hello.session == 0 || hello.connection == 0 {
            return Err((Refusal::Unknown, "the hello makes no sense".to_owned()));
        }
        let mut seats = self.lock();
        seats.retain(|_, seat| !seat.shared.is_over());
        let theirs = (hello.from_epoch, hello.session);
        let shared = match seats.get(&hello.from_id) {
            Some(seat) if theirs < (seat.epoch, seat.session) => {
                return Err((Refusal::Outdated, format!("epoch {}, session {}", seat.epoch, seat.session)));
            }
            Some(seat) if theirs == (seat.epoch, seat.session) => Arc::clone(&seat.shared),
            _ if hello.resumes => return Err((Refusal::Forgotten, String::new())),
            before => {
                if self.drains.load(Ordering::Acquire) {
                    return Err((Refusal::Draining, String::new()));
                }
                if before.is_none() && seats.len() >= self.settings.sessions_max {
                    return Err((Refusal::Full, format!("{} at once", self.settings.sessions_max)));
                }
                let Ok(place) = self.accepted.try_reserve() else {
                    return Err((Refusal::Full, "earlier ones wait to be taken".to_owned()));
                };
                if let Some(before) = before {
                    before.shared.end(Ended::Replaced);
                }
                let (shared, inbox) = Shared::start(self.settings.limits);
                let peer = End { id: hello.from_id, epoch: hello.from_epoch };
                place.send(shared.conversation(peer, hello.greeting.clone(), inbox));
                let seat = Seat { epoch: hello.from_epoch, session: hello.session, shared: Arc::clone(&shared) };
                seats.insert(hello.from_id, seat);
                shared
            }
        };
        let (out, answers) = shared.channel();
        let welcome = Welcome {
            version: VERSION,
            id: identity.end.id,
            epoch: identity.end.epoch,
            received: shared.received(),
            greeting: identity.greeting.clone(),
        };
        // The channel is new and has room.
        drop(out.try_send(Packet::of(Word::Welcome(welcome))));
        let attached = shared.attach(ConnectionId(hello.connection), out, hello.received);
        match attached {
            Some(attached) => Ok((shared, attached, answers)),
            None => Err((Refusal::Outdated, "a later connection of the session is up".to_owned())),
        }
    }
}
