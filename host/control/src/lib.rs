//! How do a gateway and a worker keep one ordered conversation over a network?
//!
//! A [`Session`] is the conversation itself: numbered messages, what is not confirmed yet, beats, the lease. It is pure, and outlives its
//! connections. [`listen`] and [`dial`] carry it over gRPC; a [`Conversation`] is what the layer above holds. What is promised is in
//! `docs/control.md`.

mod conversation;
mod dial;
mod limits;
mod listen;
mod session;
mod wire;

/// Written by the build script.
#[allow(missing_docs, clippy::all, unused_qualifications)]
mod glue {
    include!(concat!(env!("OUT_DIR"), "/penstock.control.v1.Control.rs"));
}

use bytes::Bytes;

pub use conversation::{Conversation, Link};
pub use dial::{DialError, DialSettings, dial};
pub use limits::Limits;
pub use listen::{ListenSettings, Listening, listen, listen_on};
pub use session::{ConnectionId, Effect, End, Ended, Frame, NotSent, Session};
pub use wire::{Refusal, VERSION};

/// What one end says of itself.
#[derive(Clone)]
pub struct Identity {
    /// Who it is, in which life.
    pub end: End,
    /// What both ends must have in common, compared as text: model, layout, versions.
    pub compatibility: String,
    /// For the layer above at the other end, at most 64 KiB.
    pub greeting: Bytes,
    /// Secret that both ends have; none takes anyone, which is for loopback alone.
    pub token: Option<String>,
}

impl Identity {
    /// Is the greeting one that the other end takes?
    pub(crate) fn has_short_greeting(&self) -> bool {
        self.greeting.len() <= limits::GREETING_BYTES_MAX
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { end, compatibility, token, .. } = self;
        let token = token.as_ref().map(|_| "...");
        f.debug_struct("Identity")
            .field("end", end)
            .field("compatibility", compatibility)
            .field("token", &token)
            .finish()
    }
}
