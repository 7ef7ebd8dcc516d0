//! The native default `class-first` as a component: importance first, with ageing. Its code is `ClassFirst` of the host's contract crate, not a copy of it.

penstock_guest_fairness::export!(penstock_policy_sdk::native::ClassFirst);
