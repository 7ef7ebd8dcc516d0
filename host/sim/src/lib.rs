//! The second driver of the two machines: virtual time, a cost model, faults, and checkers that know what must come out.
//!
//! One thread, no wall clock, no randomness but a seed's: [`run`] gives the same [`Report`] for the same [`Scenario`] in every process.
//!
//! - What happens: [`scenario`] (sizes, faults), [`workload`] (requests), [`cost`] (how long a step takes), [`agenda`] (when).
//! - Who does it: [`world`] drives gateways and replicas, [`driven`] is one machine with its log, [`seats`] says who decides,
//!   [`policies`] have whims.
//! - Of a cluster: [`cluster`] has roles, sessions and what goes wrong with them, [`network`] who reaches whom and how long bytes take.
//! - What must hold: [`executor`] knows what every block must contain, [`checkers`] what every message and token must be, [`owners`] whose
//!   a request is while it is handed off.
#![forbid(unsafe_code)]

pub mod agenda;
pub mod checkers;
pub mod cluster;
pub mod cost;
pub mod driven;
pub mod executor;
pub mod network;
pub mod owners;
pub mod policies;
pub mod report;
pub mod rng;
pub mod scenario;
pub mod seats;
pub mod workload;
pub mod world;

pub use cluster::{Cluster, Mishap, Sabotage};
pub use policies::PolicyKind;
pub use report::{Figures, Happened, Report, RequestReport, Violation};
pub use scenario::{Faults, Scenario};
pub use seats::{Cast, Natives, Seats};
pub use world::{run, run_with};
