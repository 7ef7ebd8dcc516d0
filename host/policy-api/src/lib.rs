//! The contract between Penstock's machines and its policies: what a policy is told, what it may answer, and what is checked before
//! anything is done about it.
//!
//! Layer 1: depends on `penstock-base` alone. No clock, no thread, no float, no allocation at steady state; the same inputs give the
//! same answers and the same saved bytes everywhere.
//!
//! - [`signal`] and [`generated`]: the registry of facts, as enums with unit, owner, freshness and fill.
//! - [`declare`]: which of them one policy asked for. [`matrix`] and [`source`]: how it gets them.
//! - [`policy`]: the five traits, and [`Policies`], the seats handed to a machine's step.
//! - [`proposal`]: what a policy answers; [`validate`]: what of it stands.
//! - [`seat`]: asks one question: fill, call, check, fall back.
//! - [`native`]: the policies that serve when nothing is loaded, and whenever a loaded one fails.
#![no_std]
extern crate alloc;

pub mod call;
pub mod declare;
pub mod fact;
#[rustfmt::skip]
pub mod generated;
pub mod matrix;
pub mod native;
pub mod policy;
pub mod proposal;
pub mod question;
pub mod records;
pub mod sat;
pub mod seat;
pub mod seed;
pub mod signal;
pub mod source;
pub mod validate;

pub use call::Call;
pub use declare::*;
pub use fact::{Fact, FactSet};
pub use generated::facts::*;
pub use generated::*;
pub use matrix::{Context, Matrix};
pub use policy::*;
pub use proposal::*;
pub use question::{Decision, Question};
pub use records::{RequestRecord, RoutingPhase};
pub use seat::*;
pub use signal::{Fill, FillBasis, Freshness, Kind, Owner, Signal, SignalInfo, Unit};
pub use source::{ContextSource, RowSource};
