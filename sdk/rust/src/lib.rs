//! Writes a Penstock policy in Rust.
//!
//! A policy is plain code: what it reads is declared once, what it is asked comes as arguments, what it answers is returned. The same code
//! runs in two places: as a WebAssembly component (the crates under `guest/` export it) and natively (each decision's `Seated` type makes
//! it one of the host's policies, for unit tests, case files and the simulator).
//!
//! - [`declare!`] and [`tables`]: which signals it reads; reading one that is not declared does not compile.
//! - [`Policy`]: name, parameters, facts, state. [`admission`], [`routing`], [`fairness`], [`eviction`], [`overload`]: its question.
//! - [`Document`]: parameters, from JSON. [`Told`]: facts, by name. [`state`]: saved bytes.
//! - [`Sat`] and [`sat`]: arithmetic that stops at the ends. [`host`]: log and count.
//!
//! Rules of the contract that no type can hold: the same calls give the same answers, so no randomness but `call.seed`, no hash maps
//! with a random order, and no floats where an engine's rounding could show.

pub mod admission;
mod declared;
mod document;
pub mod eviction;
pub mod fairness;
#[rustfmt::skip]
mod generated;
#[doc(hidden)]
pub mod glue;
pub mod host;
mod life;
mod load;
pub mod native;
pub mod overload;
pub mod routing;
mod saturating;
pub mod state;
mod view;

/// Tables of the registry: markers to declare signals of, and the views that read them.
pub mod tables {
    pub use crate::generated::tables::*;
}

pub use declared::{Declares, Table};
pub use document::{Document, ParameterError};
pub use generated::facts::Told;
pub use life::{Parameters, Policy};
pub use load::{Load, manifest};
pub use saturating::Sat;

pub use penstock_base::codec::{DecodeError, Reader, Writer};
pub use penstock_base::{ClassRank, Priority, RequestId, Traits};
pub use penstock_policy_api::{
    Action, ActionKind, Call, Context, Fact, FactKind, Kept, Manifest, Matrix, Placement, Ranking, RequestRecord, Rest,
    RestoreCause, RestoreError, RestoreInfo, RoutingPhase, Stance, TableWanted, Verdict, Wanted, Worth, Yielder, facts,
    sat,
};

#[doc(hidden)]
pub use penstock_policy_api as api;
