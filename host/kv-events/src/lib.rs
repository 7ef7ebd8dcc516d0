//! What does a worker cache, and may that be believed? KV events on vLLM's ZeroMQ wire, published and consumed.
//!
//! A worker's [`Publisher`] tells what comes into its prefix cache and leaves it, and answers who missed something. A gateway's [`Consumer`]
//! keeps an [`Index`] of each worker and says by [`Trust`] whether it may decide where a request goes. [`Tracker`] is the consumer without
//! sockets. The wire, and what is promised of it, is in `docs/kv-events.md`.

mod batch;
mod consumer;
mod error;
mod index;
pub mod limits;
mod msgpack;
mod publisher;
mod tracker;
mod zmtp;

pub use batch::{Batch, BlockHash, KvEvent, Raw, Removed, Stored};
pub use consumer::{Consumer, ConsumerSettings};
pub use error::KvEventsError;
pub use index::{Change, Index};
pub use msgpack::Malformed;
pub use publisher::{Publisher, PublisherCounts, PublisherSettings};
pub use tracker::{Counts, Doubt, Need, Tracker, Trust};
