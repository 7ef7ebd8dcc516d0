//! Virtual token counter with lift, weights and ageing classes; victims by least loss.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::Vtc;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::fairness::Seated<Vtc>;

penstock_guest_fairness::export!(Seat);
