//! The native default `bounded` as a component: into the queue while queue and quota have room. Its code is `Bounded` of the host's contract crate, not a copy of it.

penstock_guest_admission::export!(penstock_policy_sdk::native::Bounded);
