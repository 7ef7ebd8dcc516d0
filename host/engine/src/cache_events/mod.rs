//! KV events: what this process's replicas cache, told to whoever listens, and what others' replicas say that they cache.
//!
//! A replica's loop has a [`CacheTap`]: it hands a turn's changes to the publishers' thread, and never waits for it. A [`CacheFollower`]
//! listens to one publisher elsewhere and tells the gateway's loop, which takes it for the word of that replica. The wire is in
//! `penstock-kv-events`.

mod follow;
mod publish;
mod tap;

pub use follow::CacheFollower;
pub(crate) use follow::{CacheNews, Line};
pub(crate) use publish::start;
pub(crate) use tap::{CacheTap, Told};
