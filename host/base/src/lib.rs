//! The words every Penstock crate shares: ids, time, ranks, block keys, bounded tables, the plan contract and the limits.
//!
//! Layer 0: `core` and `alloc` only. No clock, no thread, no randomness; everything here is a plain value.
#![no_std]
extern crate alloc;

pub mod codec;
pub mod ids;
pub mod key;
pub mod limits;
pub mod manifest;
pub mod map;
pub mod plan;
pub mod rank;
pub mod reason;
pub mod time;

pub use ids::*;
pub use key::*;
pub use manifest::*;
pub use rank::*;
pub use reason::*;
pub use time::{Duration, Instant};
