//! The native default `overlap-load` as a component: least work, counting what is cached as done. Its code is `OverlapLoad` of the host's contract crate, not a copy of it.

penstock_guest_routing::export!(penstock_policy_sdk::native::OverlapLoad);
