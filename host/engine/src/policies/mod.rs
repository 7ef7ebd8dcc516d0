//! The policies of the machines: where they come from, how the next set takes over while requests run, what is kept of their decisions.
//!
//! [`seats`] has the contract with whoever makes sets (natively, or from components: the engine does not know which). [`activation`]
//! leads a swap: build for every machine, have every machine hold its part, then commit at the gateway; [`order`] has the messages and
//! [`machine`] the machine's side. [`recorder`] stands between a machine and its policies, with the clock (`views` are the seats as the machine
//! sees them); [`log`] keeps what it saw, and [`inputs`] some of what policies were told.
//! [`reaper`] ends what has left, where nobody waits.
//!
//! ```text
//! activate ──build, all machines──► Prepare ──every machine holds──► commit at the gateway ──Policies(g)──► each replica
//!     └── any refusal, or no answer in time: Abort; the set in force stays
//! ```

pub(crate) mod activation;
pub(crate) mod inputs;
pub(crate) mod log;
pub(crate) mod machine;
pub(crate) mod order;
pub(crate) mod reaper;
pub(crate) mod recorder;
pub(crate) mod seats;
mod views;
