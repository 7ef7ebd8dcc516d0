//! Hand-off: a prompt's KV is computed at one replica and decoded at another, and at every moment one party owns the request.
//!
//! Three machines, joined by messages that may be lost, late, repeated or overtaken:
//!
//! - [`Coordinator`], beside the gateway machine: reserves at the receiver first, then has the sender begin, then tells one party to take.
//! - [`Sender`], beside the replica machine that prefills: keeps the blocks leased, sends chunks as they are computed.
//! - [`Receiver`], beside the replica machine that decodes: promises room, checks, shuts writes out, installs.
//!
//! Sender and receiver use the replica's own [`Kv`](penstock_kv::Kv), so that blocks in transfer stand in its one conservation law. What
//! drives them: whoever drives the two other machines. A driver carries `Say`, `Send` and `To..` effects to their address, chunks through a
//! transport that can write, report completion (`Fence`, `StopWrites`) and digest what arrived; it feeds `Placed`, `Computed` and
//! `Prefilled` from the replica machine's plans, moves a `Started` table into a sequence, and steps with `Tick` at `next_wake`.
//!
//! One file a question: `terms` (do both speak of the same KV?), `message` (what do they say?), `lease` (who may still act?), `window`
//! (what is under way?), `slots` (where do transfers lie?), `config` (how much, how long?), `codec` (how does it become bytes?), `path` (hand off at all, and between whom?).
//! docs/handoff.md has the whole as one picture, with what each crash leads to.

mod codec;
mod config;
mod coordinator;
mod lease;
mod message;
mod path;
mod receiver;
mod receiver_io;
mod sender;
mod sender_io;
mod slots;
mod terms;
mod window;

pub use codec::Coded;
pub use config::{CoordinatorConfig, PartyConfig, Timing};
pub use coordinator::{
    Ask, Coordinator, CoordinatorEffect, CoordinatorEffects, CoordinatorEvent, CoordinatorState, End, Fallback, Side,
};
pub use message::{
    Ack, Between, Caps, Failure, Open, Order, Peer, Refusal, Report, Reserve, Said, SenderWord, ToReceiver, ToSender,
};
pub use path::{Candidate, Path, PathAsk, PathTerms, Topology, choose};
pub use receiver::Receiver;
pub use receiver_io::{ReceiverEffect, ReceiverEffects, ReceiverEvent, ReceiverState, Started};
pub use sender::Sender;
pub use sender_io::{SenderEffect, SenderEffects, SenderEvent, SenderState};
pub use terms::{Digest, Envelope, Grid, LeaseTerms, Mismatch, PROTOCOL_VERSION, Part, Seal, Terms, chunk_sum};
