//! What is every policy held to, whoever wrote it? One function a rule. Each says in words what was broken.

mod fuel;
mod inputs;
mod repeats;
mod state;

use penstock_policy_api::{Decision, FallbackReason, Question as Which};
use penstock_policy_wasm::Component;

use crate::bench::{Bench, Seating};
use crate::course::Step;
use crate::guest::Seated;

pub use fuel::{Spent, measure, spent_within};
pub use inputs::{answers_at_the_edges, answers_legally};
pub use repeats::repeats;
pub use state::{forgets_what_is_damaged, remembers};

/// A component under test, and how to seat it.
#[derive(Clone, Copy, Debug)]
pub struct Tested<'a> {
    /// Where it is loaded.
    pub bench: &'a Bench,
    /// It.
    pub component: &'a Component,
    /// How it sits.
    pub how: Seating<'a>,
}

impl Tested<'_> {
    /// A fresh instance.
    pub fn seat(&self) -> Result<Seated, String> {
        self.bench.seat(self.component, self.how)
    }
}

/// The questions that a policy of `decision` is asked.
pub fn questions(decision: Decision) -> Vec<Which> {
    Which::ALL.into_iter().filter(|question| question.decision() == decision).collect()
}

/// Did the answer stand, or leave it to the default? Everything else is a strike.
fn is_legal(step: &Step) -> Result<(), String> {
    match step.fallback {
        None | Some(FallbackReason::NoOpinion) => Ok(()),
        Some(why) => Err(format!("its answer cannot stand: {}", why.name())),
    }
}
