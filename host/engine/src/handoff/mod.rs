//! What carries hand-offs between replicas? Words go from loop to loop, bytes from pool to pool.
//!
//! Each replica that takes part has a mover: a thread with endpoints over its executor's pool, by reference for the replicas of its process, or of
//! each kind that can leave it. It copies chunks to where the machine says, sums up what was sent and what lies here, and lets others write only
//! to what the machine has granted. Words may be lost, so their lanes drop what they have no room for; the protocol says it again.

mod bytes;
mod digest;
mod landed;
mod mover;
mod outside;
mod peers;
mod settings;
mod setup;
mod ways;

#[cfg(test)]
mod tests;

pub(crate) use landed::Landed;
pub(crate) use mover::{LANDED, MoverLoop, MoverOrder, MoverWake, ORDERS, PEERS, RESET, WRITES};
pub(crate) use outside::Wired;
pub(crate) use setup::{Movers, Prepared, WorkerParty, prepare, prepare_worker};

pub use settings::{EndpointError, NixlTransfer, TransferSettings};
pub use setup::{HandoffSetup, PartyError};
pub use ways::Way;
