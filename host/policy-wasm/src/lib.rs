//! How does a WebAssembly component answer for a policy, and what becomes of it when it fails?
//!
//! Layer 3: the only crate that knows WebAssembly. It implements the traits of `penstock-policy-api`; machines do not see the difference.
