//! What carries hand-offs between the replicas of this process? Words go from loop to loop, bytes from pool to pool.
//!
//! Each replica that takes part has a mover: a thread with an endpoint of the by-reference transport over its executor's pool. It copies
//! chunks to where the machine says, sums up what was sent and what lies here, and lets others write only to what the machine has granted.
//! Words may be lost, so their lanes drop what they have no room for; the protocol says it again.

mod bytes;
mod digest;
mod mover;
mod setup;

pub(crate) use mover::{MoverLoop, MoverOrder, MoverWake, ORDERS, RESET, WRITES, lanes};
pub(crate) use setup::{Movers, Prepared, prepare};

pub use setup::HandoffSetup;
