//! Greedy-dual-size-frequency prices with inflation.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::Gdsf;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::eviction::Seated<Gdsf>;

penstock_guest_eviction::export!(Seat);
