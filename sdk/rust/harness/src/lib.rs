//! Puts a policy through case files: what it is told, what it is asked, what it should answer, in text that a person can check by hand.
//!
//! Whatever implements the host's traits can be a [`Subject`]: a policy of the SDK in its seat, a native default, a loaded component. So one
//! file serves three purposes: a policy's own tests, the comparison of a component with its native twin ([`transcript`]), and an example in
//! its README. The format is in the README of this crate.

mod case;
mod run;
mod supply;

pub use case::{Case, CaseError, CaseFile};
pub use run::{Answered, Subject, answers, check, check_folder, transcript};
