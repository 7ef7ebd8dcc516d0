//! Bounded queue and tenant quota with guarantee and borrowing, degrading or deferring before refusing.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::QueueQuota;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::admission::Seated<QueueQuota>;

penstock_guest_admission::export!(Seat);
