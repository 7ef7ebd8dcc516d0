//! What can go wrong between a publisher and a consumer, and what to do about it.

use std::net::SocketAddr;

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvEventsError {
    /// The publishers have nothing to run on.
    #[error("no runtime for KV events: {0}")]
    Runtime(std::io::Error),
    /// A setting cannot be used.
    #[error("{key}: {why}")]
    Setting {
        /// Which.
        key: &'static str,
        /// What is wrong and what to write instead.
        why: String,
    },

    /// The address is open to other hosts and nobody said that it may be.
    #[error(
        "{address} can be reached from other hosts, and KV events are neither encrypted nor authenticated: bind to loopback, or set expose on a network that is trusted"
    )]
    Exposed {
        /// Which address.
        address: SocketAddr,
    },

    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {why}")]
    Bind {
        /// Which address.
        address: SocketAddr,
        /// The system's reason.
        why: std::io::Error,
    },
}

/// Why a peer is left.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerFault {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the peer does not speak ZeroMQ: {0}")]
    Protocol(&'static str),
    #[error("the peer wants to sign in by {0:?}, and only NULL is spoken here")]
    Mechanism(String),
    #[error("the peer is a {0:?} socket")]
    Kind(String),
    #[error("the peer has closed the connection")]
    Closed,
    #[error("the peer was silent for too long")]
    Silent,
    #[error("{0}")]
    Answer(&'static str),
}
