//! Flows take turns, one request each.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::RoundRobin;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::fairness::Seated<RoundRobin>;

penstock_guest_fairness::export!(Seat);
