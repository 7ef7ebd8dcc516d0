//! The native default `ladder` as a component: four steps over the worst of three saturations. Its code is `Ladder` of the host's contract crate, not a copy of it.

penstock_guest_overload::export!(penstock_policy_sdk::native::Ladder);
