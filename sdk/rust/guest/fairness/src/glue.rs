//! The contract's types in the words of the bindings.

use penstock_policy_sdk::api::FairnessPolicy as Decides;

use crate::bindings;
use crate::bindings::exports::penstock::fairness::fairness as seat;

penstock_policy_sdk::life!(bindings);

impl<S: Seat> seat::Guest for S {
    fn order(asked: wit::Call, context: Vec<u64>, waiting: wit::Matrix) -> seat::Ranking {
        let asked = call(asked);
        let waiting = api::Matrix::from_packed(waiting.rows as usize, waiting.cells);
        let context = api::Context { values: &context };
        let mut ranked = Vec::with_capacity(waiting.rows());
        match S::with(|living| living.policy().order(&asked, context, &waiting, &mut ranked)) {
            api::Answer::Proposal(api::Ranking { rest, tpot_target_us }) => {
                let rest = match rest {
                    api::Rest::Append => seat::Rest::Append,
                    api::Rest::Keep => seat::Rest::Keep,
                };
                seat::Ranking { ranked, rest, tpot_target_us }
            }
            api::Answer::NoOpinion | api::Answer::Fault(_) => seat::Ranking {
                ranked: Vec::new(),
                rest: seat::Rest::Append,
                tpot_target_us: penstock_policy_sdk::fairness::NO_TARGET,
            },
        }
    }

    fn victims(asked: wit::Call, context: Vec<u64>, running: wit::Matrix) -> Vec<seat::Yielder> {
        let asked = call(asked);
        let running = api::Matrix::from_packed(running.rows as usize, running.cells);
        let context = api::Context { values: &context };
        let mut yielders = Vec::new();
        match S::with(|living| living.policy().victims(&asked, context, &running, &mut yielders)) {
            api::Answer::Proposal(()) => {
                yielders.into_iter().map(|yielder| seat::Yielder { row: yielder.row, how: yielder.how }).collect()
            }
            api::Answer::NoOpinion | api::Answer::Fault(_) => Vec::new(),
        }
    }
}
