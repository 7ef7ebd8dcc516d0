//! How do bytes of KV get from one registered memory into another?
//!
//! One trait, [`Transport`], and one way to fill it for each situation: [`ByReference`] inside a process, [`Memfd`] between
//! processes of one host, [`Tcp`] anywhere, and `Nixl` (the feature `nixl`) where there is RDMA. [`choose`] says which of them two ends share, and why that one. What each
//! needs and promises is in `docs/transport.md`; `tests/` holds all of them to the same conformance suite.

mod choose;
mod descriptor;
mod error;
mod frame;
mod grants;
mod memory;
mod operations;
mod reference;
mod scatter;
mod sockets;
mod sys;
mod watch;
mod wire;

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

pub use choose::{Choice, NoWay, PassedOver, choose, choose_in};
pub use descriptor::{Address, Descriptor, Layout, NixlAddress, Place};
pub use error::{Failure, Gone, Refusal, TransportError};
pub use frame::VERSION;
pub use memory::{Memory, Region};
pub use reference::ByReference;
#[cfg(feature = "nixl")]
pub use sockets::nixl::{Nixl, NixlSettings, leave_with_nixl};
pub use sockets::{Memfd, Tcp};
pub use watch::Watch;

/// Which way of moving bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// Inside one process.
    Reference,
    /// Between processes of one host, through memory that both map.
    Memfd,
    /// By NIXL, which uses what network there is: RDMA among others.
    Nixl,
    /// Over a TCP connection.
    Tcp,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reference => "reference",
            Self::Memfd => "memfd",
            Self::Nixl => "nixl",
            Self::Tcp => "tcp",
        })
    }
}

/// One life of one endpoint. A restarted one has another epoch, and nothing of the old one is valid.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerId {
    /// The endpoint's number, unique among those that meet.
    pub endpoint: u64,
    /// Its life.
    pub epoch: u64,
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {} of epoch {}", self.endpoint, self.epoch)
    }
}

/// Number of an operation, chosen by whoever starts it and unique in that endpoint's epoch. The receiver learns it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A run of blocks on both sides: `local + i` goes with `remote + i` for `i < blocks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// First block in the region here.
    pub local: u32,
    /// First block in the region there.
    pub remote: u32,
    /// How many, at least one.
    pub blocks: u32,
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From here to the peer; the peer is told with [`Event::Landed`].
    Write,
    /// From the peer to here; the peer is not told.
    Read,
}

/// Number of a permission to write, chosen by the endpoint that gives it and unique in its epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GrantId(pub u64);

/// One operation.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Its number.
    pub op: OpId,
    /// With whom.
    pub peer: PeerId,
    /// Which way.
    pub direction: Direction,
    /// Region here, in the order they were registered.
    pub local: u16,
    /// Region there. Its blocks must be as large as those of the local one.
    pub remote: u16,
    /// Which blocks. No block may be written twice.
    pub spans: Vec<Span>,
    /// When it ends as [`Failure::Timeout`] at the latest, as long as the endpoint is polled.
    pub deadline: Instant,
}

/// What an endpoint has to tell.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The peer that [`Transport::connect`] named can be used.
    Connected {
        /// Which.
        peer: PeerId,
    },
    /// The connection to it is lost or never came to be; its running operations have ended. `connect` may try again.
    Lost {
        /// Which.
        peer: PeerId,
        /// Why.
        why: Gone,
    },
    /// An own operation has ended; said once for each that was started.
    Ended {
        /// Which.
        op: OpId,
        /// All its bytes are where they belong, or why not.
        outcome: Result<(), Failure>,
        /// No byte of it can be written any more. Else its destination stays in quarantine until [`Event::Settled`].
        settled: bool,
    },
    /// An own operation that had ended unsettled can write no more: its destination may be used again.
    Settled {
        /// Which.
        op: OpId,
    },
    /// A peer's write has landed here, whole and checked.
    Landed {
        /// Who wrote.
        peer: PeerId,
        /// Its number there.
        op: OpId,
        /// How many bytes.
        bytes: u64,
    },
    /// A peer that had connected to this endpoint has gone: nothing more of what it was writing can land.
    Left {
        /// Who.
        peer: PeerId,
    },
    /// What [`Transport::revoke`] asked for is certain now.
    Revoked {
        /// Whose operation.
        peer: PeerId,
        /// Which.
        op: OpId,
    },
    /// What [`Transport::withdraw`] asked for is certain now: nothing lands under this grant any more.
    Withdrawn {
        /// Who could write.
        peer: PeerId,
        /// Under which number.
        grant: GrantId,
    },
}

/// Whether an operation can still touch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "blocks may be used again only once it is settled"]
pub enum Touch {
    /// It cannot.
    Settled,
    /// It may; an event will tell.
    Quarantined,
}

/// Every bound of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Own operations that have not settled, and likewise those a peer may have open here. 64: a few for each layer in flight.
    pub ops_max: usize,
    /// Bytes of own operations that have not settled. 1 GiB: the KV of a prompt of 8,192 tokens of an 8B model.
    pub bytes_max: u64,
    /// Spans of one operation. 16,384: 16 KiB of list a MiB of KV at worst, and the list fits one frame.
    pub spans_max: usize,
    /// Peers that this endpoint talks to, and likewise those that talk to it.
    pub peers_max: usize,
    /// Grants that stand at once. 4,096: a few for each of a thousand requests that arrive.
    pub grants_max: usize,
    /// How long a connection may owe bytes or an answer to its handshake without a sign of life.
    pub silence_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            ops_max: 64,
            bytes_max: 1 << 30,
            spans_max: 16_384,
            peers_max: 256,
            grants_max: 4_096,
            silence_max: Duration::from_secs(30),
        }
    }
}

/// Who an endpoint is, what it offers, and how much it takes.
#[derive(Clone, Debug)]
pub struct Setup {
    /// This life of this endpoint.
    pub identity: PeerId,
    /// The memory that transfers may touch, here and at the word of any connected peer. At most [`REGIONS_MAX`].
    pub regions: Vec<Region>,
    /// Nobody reads this memory, and nobody writes to it but under a grant ([`Transport::grant`]).
    pub is_guarded: bool,
    /// Its bounds.
    pub limits: Limits,
}

fn check_guarded(is_guarded: bool) -> Result<(), TransportError> {
    let fault =
        || TransportError::Unavailable("the endpoint is not guarded, so that its grants would mean nothing".to_owned());
    if is_guarded { Ok(()) } else { Err(fault()) }
}

/// Regions one endpoint may register: a pool for each KV group, and some to spare.
pub const REGIONS_MAX: usize = 8;

/// One endpoint that moves bytes between its registered memory and that of its peers.
///
/// It belongs to one thread and does its work inside [`poll`](Self::poll): nothing moves between calls, so a receiver must be
/// polled as well. No call waits except `poll`, which waits as long as it is told to.
///
/// Each operation goes through these states, and the table of operations counts it until it has settled:
///
/// ```text
///             start              Ended { settled: true }
///   (nothing) ─────► running ───────────────────────────────► (nothing)
///                       │  timeout, cancel, loss                  ▲
///                       └──────────────► quarantined ─────────────┘
///                 Ended { settled: false }           Settled
/// ```
pub trait Transport: Send {
    /// Which kind it is.
    fn kind(&self) -> Kind;

    /// What a peer needs to connect, to be carried to it as bytes.
    fn descriptor(&self) -> Descriptor;

    /// Starts to connect to the endpoint described by `descriptor`: [`Event::Connected`] or [`Event::Lost`] will tell. To a
    /// peer that is connected it does nothing. After a loss it may be called again: should another epoch answer, the loss says so.
    ///
    /// # Errors
    ///
    /// For what is not a descriptor of this kind and version, and [`TransportError::Busy`] at the limit of peers.
    fn connect(&mut self, descriptor: &[u8]) -> Result<PeerId, TransportError>;

    /// Starts an operation. Both ends' blocks belong to it until it has settled.
    ///
    /// # Errors
    ///
    /// When it is refused; then it has not begun and no event will name it.
    fn start(&mut self, transfer: Transfer) -> Result<(), TransportError>;

    /// Starts a write under a grant of its target. A grant that does not stand, or does not cover all the blocks, ends the operation as
    /// [`Refusal::NotGranted`], and so does one that is taken back before the end. To a target that is not guarded it is a plain start.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    fn start_under(&mut self, grant: GrantId, transfer: Transfer) -> Result<(), TransportError>;

    /// Lets `peer` write to these blocks of a region here, and to no others, under this number.
    ///
    /// # Errors
    ///
    /// [`TransportError::Unavailable`] when the endpoint is not guarded; for a region or block that is not there, no block at all, a
    /// number that is in use, and [`TransportError::Busy`] at the limit of grants.
    fn grant(&mut self, peer: PeerId, grant: GrantId, region: u16, blocks: &[Range<u32>])
    -> Result<(), TransportError>;

    /// Takes a grant back: no write begins under it any more. Once this is settled, or [`Event::Withdrawn`] says so, nothing lands under
    /// it either. One that does not stand is settled.
    fn withdraw(&mut self, peer: PeerId, grant: GrantId) -> Touch;

    /// Takes all grants back, with an [`Event::Withdrawn`] for each of those that are not settled at once.
    fn withdraw_all(&mut self) -> Touch;

    /// Ends an own operation as [`Failure::Cancelled`], with its event, and says whether it may still write.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownOperation`] when it has settled. Cancelling one that is in quarantine changes nothing.
    fn cancel(&mut self, op: OpId) -> Result<Touch, TransportError>;

    /// Takes back the blocks that a peer's write was allowed to touch here, whether or not that write has begun: once this
    /// is settled, or [`Event::Revoked`] or [`Event::Left`] says so, no byte of it can land.
    ///
    /// # Errors
    ///
    /// When the peer cannot be asked at the moment; ask again.
    fn revoke(&mut self, peer: PeerId, op: OpId) -> Result<Touch, TransportError>;

    /// Does what can be done, waits for more at most `wait` while nothing has happened, and appends what there is to tell.
    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>);

    /// Adds what this endpoint waits for, so that one thread can wait for several of them: after [`Watch::wait`] each is polled. To be
    /// asked anew for each wait, with no call of the endpoint in between.
    fn watch(&mut self, watch: &mut Watch);

    /// Closes the connection to a peer; its running operations end as with a loss.
    fn disconnect(&mut self, peer: PeerId);

    /// Takes the caller's word that this life of the peer is over (discovery says so, or its lease has ended on both sides):
    /// all that is in quarantine on its account settles. Without it, operations with a peer that is never seen again keep
    /// their place in the table.
    fn abandon(&mut self, peer: PeerId);
}
