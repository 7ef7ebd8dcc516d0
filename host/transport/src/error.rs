//! What can go wrong: refused on the spot, or failed later.

use std::fmt;
use std::io;

use crate::{OpId, PeerId};

/// Why a call did nothing. The endpoint is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Back-pressure: a bound is reached. Nothing waits; try again when operations have ended.
    #[error("busy: {what} is at its limit of {limit}")]
    Busy {
        /// Which bound.
        what: &'static str,
        /// Its value.
        limit: u64,
    },
    /// No connection to this peer stands: it was never made, is not up yet, or has gone.
    #[error("{0} is not connected")]
    NotConnected(PeerId),
    /// An operation with this id has not settled yet.
    #[error("operation {0} is still known")]
    Duplicate(OpId),
    /// No operation with this id is known: it has settled, or never was.
    #[error("operation {0} is not known")]
    UnknownOperation(OpId),
    /// One end has no region of that number.
    #[error("region {0} is not registered")]
    UnknownRegion(u16),
    /// Sizes that must be equal, or whole multiples, are not.
    #[error("layouts differ: {ours} bytes here, {theirs} there")]
    Layout {
        /// Bytes on this side.
        ours: u64,
        /// Bytes on the other.
        theirs: u64,
    },
    /// A span reaches past the end of a region.
    #[error("block {block} is outside a region of {blocks} blocks")]
    OutOfRange {
        /// First block that is not there.
        block: u64,
        /// Blocks of the region.
        blocks: u32,
    },
    /// A transfer of nothing, or a span of no blocks.
    #[error("a transfer moves at least one block in every span")]
    Empty,
    /// More than one operation may carry.
    #[error("too large: {what} {value} is over {limit}")]
    TooLarge {
        /// Spans or bytes.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// What is allowed.
        limit: u64,
    },
    /// Two spans write the same block.
    #[error("block {0} is written twice")]
    WrittenTwice(u32),
    /// Bytes that are not a descriptor, or one of another kind.
    #[error("not a usable descriptor: {0}")]
    Descriptor(&'static str),
    /// The descriptor or the peer speaks another version.
    #[error("version {theirs}, where this end speaks {ours}")]
    Version {
        /// Ours.
        ours: u16,
        /// Theirs.
        theirs: u16,
    },
    /// This endpoint cannot do that: its memory is not in a memfd.
    #[error("not available here: {0}")]
    Unavailable(String),
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// How an operation ended that did not succeed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The connection was lost before the operation was confirmed.
    PeerGone,
    /// The deadline passed. A write may have landed whole all the same: the receiver's word decides.
    Timeout,
    /// [`Transport::cancel`](crate::Transport::cancel) was called.
    Cancelled,
    /// Bytes arrived that are not those that were sent.
    Corrupt,
    /// The peer would not have it.
    Refused(Refusal),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerGone => f.write_str("the peer has gone"),
            Self::Timeout => f.write_str("the deadline has passed"),
            Self::Cancelled => f.write_str("cancelled"),
            Self::Corrupt => f.write_str("corrupt chunk"),
            Self::Refused(why) => write!(f, "refused by the peer: {why}"),
        }
    }
}

/// Why a peer refused an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// Its own bound on what may arrive at once is reached.
    Busy,
    /// It has no such region or block, or counts its bytes otherwise.
    OutOfRange,
    /// It took the operation's blocks back ([`Transport::revoke`](crate::Transport::revoke)).
    Revoked,
    /// It has not granted the blocks to whoever writes, or not any more.
    NotGranted,
    /// It still holds an operation with this id.
    Duplicate,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "it takes no more at once",
            Self::OutOfRange => "it has no such blocks",
            Self::Revoked => "it took the blocks back",
            Self::NotGranted => "it has not granted the blocks",
            Self::Duplicate => "it still holds an operation with this id",
        })
    }
}

/// Why a connection is no more, or never came to be.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Gone {
    /// Nobody answered at the address.
    Unreachable(String),
    /// The other end closed, or its process or host died.
    Closed,
    /// This end closed it.
    Disconnected,
    /// It said nothing for longer than [`Limits::silence_max`](crate::Limits::silence_max) while something was due.
    Silent,
    /// It speaks another version.
    Version {
        /// Ours.
        ours: u16,
        /// Theirs.
        theirs: u16,
    },
    /// Another life of the endpoint answers at that address: every handle of the old one is void.
    Epoch,
    /// It does not know us: the token is wrong, or the user is another.
    Denied,
    /// It has as many peers as it takes.
    Full,
    /// What it sent makes no sense, a damaged frame header among other things.
    Protocol(&'static str),
    /// This end could not map the peer's memory.
    Unmappable(String),
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) => write!(f, "unreachable: {why}"),
            Self::Closed => f.write_str("closed by the other end"),
            Self::Disconnected => f.write_str("closed by this end"),
            Self::Silent => f.write_str("silent for too long"),
            Self::Version { ours, theirs } => write!(f, "version {theirs}, where this end speaks {ours}"),
            Self::Epoch => f.write_str("another epoch answers there"),
            Self::Denied => f.write_str("denied: wrong token or user"),
            Self::Full => f.write_str("it takes no more peers"),
            Self::Protocol(what) => write!(f, "broke the protocol: {what}"),
            Self::Unmappable(what) => write!(f, "its memory cannot be mapped: {what}"),
        }
    }
}
