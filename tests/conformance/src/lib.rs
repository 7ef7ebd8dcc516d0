//! Does a policy keep the contract? What every component is held to, whoever wrote it.
//!
//! - [`Bench`] seats components, [`Seated`] is one of them or a native policy, with the fuel of its last call.
//! - [`Moment`] is one question with everything it is asked over: [`random`] ones are legal and seeded, [`edges`] are the ends of what is
//!   legal.
//! - [`Course`] is what a policy makes of a list of moments: proposals, saved states and fuel, in bytes.
//! - [`checks`] are the rules, each one function; `penstock-conformance FILE` puts a component through all of them.

mod bench;
pub mod checks;
mod course;
pub mod dice;
pub mod edges;
mod guest;
mod heard;
mod moment;
pub mod random;

pub use bench::{Bench, Seating, shipped};
pub use course::{Course, Seats, Step, run};
pub use guest::Seated;
pub use moment::{Context, Moment, Question, Rows};
