//! The contract's types in the words of the bindings.

use penstock_policy_sdk::api::EvictionPolicy as Decides;

use crate::bindings;
use crate::bindings::exports::penstock::eviction::eviction as seat;

penstock_policy_sdk::life!(bindings);

impl<S: Seat> seat::Guest for S {
    fn decide(asked: wit::Call, context: Vec<u64>, runs: wit::Matrix) -> Vec<seat::Worth> {
        let asked = call(asked);
        let runs = api::Matrix::from_packed(runs.rows as usize, runs.cells);
        let context = api::Context { values: &context };
        let mut worths = Vec::with_capacity(runs.rows());
        match S::with(|living| living.policy().decide(&asked, context, &runs, &mut worths)) {
            api::Answer::Proposal(()) => {
                worths.into_iter().map(|worth| seat::Worth { price: worth.price, to: worth.to }).collect()
            }
            api::Answer::NoOpinion | api::Answer::Fault(_) => Vec::new(),
        }
    }
}
