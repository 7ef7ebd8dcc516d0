//! The native default `lru` as a component: what was used last stays longest. Its code is `Lru` of the host's contract crate, not a copy of it.

penstock_guest_eviction::export!(penstock_policy_sdk::native::Lru);
