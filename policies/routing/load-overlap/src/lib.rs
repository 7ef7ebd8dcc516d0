//! Time to the first token by projected load and overlap, waiting for a hit that is worth it.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::LoadOverlap;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::routing::Seated<LoadOverlap>;

penstock_guest_routing::export!(Seat);
