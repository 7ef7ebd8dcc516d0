//! The end that calls: connects, and connects again while the session lasts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Streaming};

use crate::conversation::{Attached, Conversation, Shared};
use crate::glue::control_client::ControlClient;
use crate::limits::{
    CONNECT_WITHIN, GREETING_BYTES_MAX, HELLO_WITHIN, PACKET_OVERHEAD_BYTES, PAUSE_FIRST, PAUSE_LAST, WINDOW_BYTES,
};
use crate::session::{ConnectionId, End, Ended};
use crate::wire::{Hello, Packet, Refusal, VERSION, Welcome, Word};
use crate::{Identity, Limits};

/// Whom to call, and as whom.
#[derive(Clone, Debug)]
pub struct DialSettings {
    /// `HOST:PORT`.
    pub address: String,
    /// Life of the other end that is meant; none takes any.
    pub epoch: Option<u64>,
    /// Who this end is, and the token that the other wants.
    pub identity: Identity,
    /// Bounds of the session.
    pub limits: Limits,
}

/// Why a conversation did not begin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// The address is none, the token cannot be sent, or the greeting is too long.
    #[error("{what} cannot be used: {why}")]
    Settings {
        /// Which.
        what: &'static str,
        /// Why not.
        why: String,
    },
    /// Nobody answered in time.
    #[error("{address} does not answer: {why}")]
    Unreachable {
        /// Where.
        address: String,
        /// The last try.
        why: String,
    },
    /// The token is not the other end's.
    #[error("{address} does not take the token: both ends must have the same one")]
    Denied {
        /// Where.
        address: String,
    },
    /// It answered and will not.
    #[error("{address} refuses: {refusal}{}{detail}", if detail.is_empty() { "" } else { ": " })]
    Refused {
        /// Where.
        address: String,
        /// Why.
        refusal: Refusal,
        /// More of it.
        detail: String,
    },
    /// It does not speak this protocol.
    #[error("{address} does not speak the control protocol: {why}")]
    Protocol {
        /// Where.
        address: String,
        /// What was odd.
        why: String,
    },
}

/// Sessions that this process has begun.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// Begins a conversation. Tries until it is welcome, until it is refused for good, or for as long as a lease. Later losses of the connection
/// are mended behind the conversation's back.
///
/// # Errors
/// See [`DialError`].
pub async fn dial(settings: DialSettings) -> Result<Conversation, DialError> {
    if !settings.identity.has_short_greeting() {
        let why = format!("over {GREETING_BYTES_MAX} bytes: say less in it");
        return Err(DialError::Settings { what: "the greeting", why });
    }
    let caller = Caller::new(settings)?;
    let (shared, inbox) = Shared::start(caller.settings.limits);
    let until = Instant::now() + caller.settings.limits.lease;
    let mut pause = PAUSE_FIRST;
    let mut connection = 0;
    let (welcome, attached, packets) = loop {
        connection += 1;
        let epoch = caller.settings.epoch.unwrap_or(0);
        match caller.connect(&shared, ConnectionId(connection), epoch, false).await {
            Ok(up) => break up,
            Err(error) if is_passing(&error) && Instant::now() + pause < until => tokio::time::sleep(pause).await,
            Err(error) => {
                shared.end(Ended::Closed);
                return Err(error);
            }
        }
        pause = (pause * 2).min(PAUSE_LAST);
    };
    let peer = End { id: welcome.id, epoch: welcome.epoch };
    let conversation = shared.conversation(peer, welcome.greeting, inbox);
    tokio::spawn(caller.keep(shared, peer.epoch, connection, attached, packets));
    Ok(conversation)
}

fn is_passing(error: &DialError) -> bool {
    match error {
        DialError::Unreachable { .. } => true,
        DialError::Refused { refusal, .. } => refusal.is_passing(),
        _ => false,
    }
}

struct Caller {
    settings: DialSettings,
    endpoint: Endpoint,
    authorization: Option<MetadataValue<tonic::metadata::Ascii>>,
    session: u64,
}

impl Caller {
    fn new(settings: DialSettings) -> Result<Self, DialError> {
        let endpoint = Endpoint::from_shared(format!("http://{}", settings.address))
            .map_err(|error| DialError::Settings { what: "the address", why: error.to_string() })?
            .connect_timeout(CONNECT_WITHIN)
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let authorization = match &settings.identity.token {
            None => None,
            Some(token) => {
                // The error would repeat the token's bytes.
                let mut value: MetadataValue<_> = format!("Bearer {token}").parse().map_err(|_| {
                    let why = "only visible ASCII can be sent".to_owned();
                    DialError::Settings { what: "the token", why }
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let session = SESSIONS.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Self { settings, endpoint, authorization, session })
    }

    /// One connection, up to the welcome.
    async fn connect(
        &self,
        shared: &Shared,
        id: ConnectionId,
        epoch: u64,
        resumes: bool,
    ) -> Result<(Welcome, Attached, Streaming<Packet>), DialError> {
        let address = || self.settings.address.clone();
        let unreachable = |why: String| DialError::Unreachable { address: address(), why };
        let channel = self.endpoint.connect().await.map_err(|error| unreachable(root(&error)))?;
        let identity = &self.settings.identity;
        let hello = Hello {
            version: VERSION,
            from_id: identity.end.id,
            from_epoch: identity.end.epoch,
            to_epoch: epoch,
            session: self.session,
            connection: id.0,
            received: shared.received(),
            compatibility: identity.compatibility.clone(),
            greeting: identity.greeting.clone(),
            resumes,
        };
        let (out, words) = shared.channel();
        // The channel is new and has room.
        drop(out.try_send(Packet::of(Word::Hello(hello))));
        let mut request = Request::new(ReceiverStream::new(words));
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        let most = self.settings.limits.message_bytes_max.max(GREETING_BYTES_MAX) + PACKET_OVERHEAD_BYTES;
        let mut client = ControlClient::new(channel).max_decoding_message_size(most);
        let first = tokio::time::timeout(HELLO_WITHIN, async {
            let mut packets = client.converse(request).await?.into_inner();
            let first = packets.message().await?;
            Ok::<_, tonic::Status>((first, packets))
        });
        let (first, packets) = match first.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(status)) if status.code() == Code::Unauthenticated => {
                return Err(DialError::Denied { address: address() });
            }
            Ok(Err(status)) if matches!(status.code(), Code::Unimplemented | Code::InvalidArgument) => {
                return Err(DialError::Protocol { address: address(), why: status.message().to_owned() });
            }
            Ok(Err(status)) => return Err(unreachable(status.message().to_owned())),
            Err(_) => return Err(unreachable("no welcome in time".to_owned())),
        };
        match first.and_then(|packet| packet.word) {
            Some(Word::Welcome(welcome)) if welcome.version == VERSION => {
                let attached = shared.attach(id, out, welcome.received);
                let attached = attached.ok_or_else(|| unreachable("the session is over".to_owned()))?;
                Ok((welcome, attached, packets))
            }
            Some(Word::Reject(reject)) => {
                let refusal = Refusal::of(reject.reason);
                Err(DialError::Refused { address: address(), refusal, detail: reject.detail })
            }
            Some(_) => Err(DialError::Protocol { address: address(), why: "no welcome came first".to_owned() }),
            None => Err(unreachable("it closed the connection".to_owned())),
        }
    }

    /// Reads the connection, and makes another when it is lost, until the session is over.
    async fn keep(
        self,
        shared: Arc<Shared>,
        epoch: u64,
        mut connection: u64,
        mut attached: Attached,
        mut packets: Streaming<Packet>,
    ) {
        loop {
            shared.pump(attached, packets).await;
            let mut pause: Duration = PAUSE_FIRST;
            (attached, packets) = loop {
                if !shared.detached().await {
                    return;
                }
                connection += 1;
                match self.connect(&shared, ConnectionId(connection), epoch, true).await {
                    Ok((_, attached, packets)) => break (attached, packets),
                    Err(error) if is_passing(&error) => {
                        tracing::debug!(%error, "the control connection is down");
                    }
                    Err(DialError::Refused { refusal, .. }) => return shared.end(Ended::Refused(refusal)),
                    Err(error) => {
                        tracing::warn!(%error, "the control connection cannot be taken up again");
                        return shared.end(Ended::Protocol("it answers otherwise than before"));
                    }
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_LAST);
            };
        }
    }
}

/// The innermost reason of a transport's error; the outer ones say no more than "transport error".
fn root(error: &tonic::transport::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
