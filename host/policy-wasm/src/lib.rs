//! How does a WebAssembly component answer for a policy, and what becomes of it when it fails?
//!
//! Layer 3: the only crate that knows WebAssembly. It implements the traits of `penstock-policy-api`; machines do not see the difference.
//!
//! - [`Runtime`]: one engine a process. [`Component`]: a policy's code, checked and compiled off the hot path; [`Library`]: those at hand.
//! - [`PolicySet`]: five seats in one document with one digest.
//! - [`Prepared`]: a set's instances for one machine, tried. [`WasmPolicies`]: the set in force there, and the swap to the next.
//! - [`PolicySink`]: what policies say and what happened to them, for logs and metrics.
//!
//! Whatever a component does, its machine gets an answer in the same call: fuel ends every call, memory is capped, and a fault is answered
//! by the native default while the instance is made anew from its last snapshot and the facts since. Behaviour is a function of the inputs,
//! with one exception that is reported as such: the backstop in processor time ([`penstock_policy_api::FaultKind::Epoch`]).

mod backstop;
mod bindings;
mod cache;
mod census;
mod component;
mod digest;
mod fault;
mod host;
mod instance;
mod library;
pub mod limits;
mod living;
mod policies;
mod prepared;
mod report;
mod runtime;
mod set;
mod snapshot;
mod strikes;
mod worlds;

pub use cache::CacheSecret;
pub use component::{CONTRACT_VERSIONS, Component, LoadError, Origin};
pub use digest::{Digest, NotADigest};
pub use fault::{Failure, GuestCall};
pub use host::{LogLevel, LogLine};
pub use library::{Library, LibraryFull};
pub use policies::{FreshReason, Retired, SeatSwap, SwapOutcome, SwapReport, WasmPolicies};
pub use prepared::{Machine, PrepareFault, PrepareFaults, PrepareProblem, Prepared, Remembered, SavedSeat, Workshop};
pub use report::{Happening, PolicySink, ResetReason, SeatStatus, Speaker};
pub use runtime::{Runtime, RuntimeConfig, RuntimeError};
pub use set::{PolicyRef, PolicySet, SeatSpec, SetFault, SetFaults, native_names};
pub use snapshot::Snapshot;
