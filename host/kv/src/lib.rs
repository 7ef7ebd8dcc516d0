//! Block bookkeeping of one replica: who holds which KV block, what is promised, what can be found again and what leaves first.
//!
//! Layer 1, pure: no clock, no thread, no randomness; everything is reserved at construction and every call is O(1) or O(log n) a block.
//! Start at [`Kv`], which has one call for each move of a sequence. [`BlockPool`] is the state machine of one block, [`BlockTable`] the
//! blocks of one sequence; prefix cache, prices, quotas and expiry are reached through [`Kv`].
#![no_std]
extern crate alloc;

mod bytes;
mod call;
mod check;
mod encode;
mod event;
mod evict;
mod ghost;
mod index;
mod keep;
mod kv;
mod list;
mod ordered;
mod pool;
mod prefix;
mod reserve;
mod stats;
mod store;
mod table;
mod tenant;
mod transfer;
mod watermark;
mod window;

pub use bytes::KvShape;
pub use call::{
    Admit, Admitted, Adopted, Confirm, Confirmed, CopyOnWrite, Extend, Flush, KvConfig, KvError, Prefix, Released,
};
pub use check::Violation;
pub use event::{KvChange, KvEvent, RemoveCause};
pub use evict::RunRow;
pub use kv::Kv;
pub use pool::{BlockPool, BlockState, Counts, StaleRef};
pub use prefix::{Holder, Keys, RECENT_HALF_LIFE};
pub use reserve::{OwnerId, Reservations};
pub use stats::{CacheTotals, EVICTED_WINDOW};
pub use table::BlockTable;
pub use watermark::{PoolLevel, Pressure, Watermarks};
