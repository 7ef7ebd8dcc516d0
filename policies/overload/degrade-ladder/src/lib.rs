//! A ladder of measures with hysteresis and hold.
//!
//! [`policy`] decides; this file only says which seat it takes.

pub mod policy;

pub use policy::DegradeLadder;

/// The policy in its seat, natively.
pub type Seat = penstock_policy_sdk::overload::Seated<DegradeLadder>;

penstock_guest_overload::export!(Seat);
