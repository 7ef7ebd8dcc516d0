//! A routing policy to begin with.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::FewestFirst;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::routing::Seated<FewestFirst>;

penstock_guest_routing::export!(Seat);
