//! How do a gateway and its workers work together when they are processes of their own?
//!
//! One process is the gateway: its machine, the output loop, no executor. Each worker is one replica: its machine, its executor, its mover.
//! Between them is one control conversation. What the loops of one process hand each other through mailboxes travels in it as bytes, in the
//! same order, so that the machines and the loops are the same in both settings.
//!
//! ```text
//!  gateway process                                    worker process
//!  gateway loop ── ReplicaPort ──┐                ┌── Server ──► replica loop ──► executor
//!  output loop  ── ReplicaPort ──┤  conversation  │                  │   └──────► mover
//!      ▲                         ├───────────────►┘                  │              │ KV, directly
//!      └──────── Reader ◄────────┴◄──────────────── GatewayLinks ◄───┘              ▼
//!                   └── words for other workers are passed on ──►             other movers
//! ```
//!
//! A session that is over is a lost replica for the gateway and a lost gateway for the worker. Nobody waits for a link: what finds no room
//! ends the session.

mod greeting;
mod join;
mod links;
mod port;
mod serve;
mod tokens;
mod wire;
mod worker;

pub use greeting::{WIRE_VERSION, gateway_greeting};
pub use join::{JoinError, Joined};
pub use worker::{RefusedGateway, Worker, WorkerIdentity};

pub(crate) use join::{Joins, join};
pub(crate) use links::GatewayLinks;
pub(crate) use port::{ReplicaPort, Replicas};
pub(crate) use wire::{Word, gateway_of};
