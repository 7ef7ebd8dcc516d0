//! The contract's types in the words of the bindings.

use penstock_policy_sdk::api::OverloadPolicy as Decides;

use crate::bindings;
use crate::bindings::exports::penstock::overload::overload as seat;

penstock_policy_sdk::life!(bindings);

impl<S: Seat> seat::Guest for S {
    fn decide(
        asked: wit::Call,
        context: Vec<u64>,
        classes: wit::Matrix,
        replicas: wit::Matrix,
    ) -> Option<seat::Stance> {
        let asked = call(asked);
        let classes = api::Matrix::from_packed(classes.rows as usize, classes.cells);
        let replicas = api::Matrix::from_packed(replicas.rows as usize, replicas.cells);
        let context = api::Context { values: &context };
        let question = api::OverloadQuestion { context, classes: &classes, replicas: &replicas };
        let mut actions = Vec::new();
        match S::with(|living| living.policy().decide(&asked, &question, &mut actions)) {
            api::Answer::Proposal(api::Stance { level, hold_us }) => {
                let actions = actions.into_iter().map(|action| seat::Action {
                    what: action.what,
                    class_rank: action.class_rank,
                    amount: action.amount,
                });
                Some(seat::Stance { level, hold_us, actions: actions.collect() })
            }
            api::Answer::NoOpinion | api::Answer::Fault(_) => None,
        }
    }
}
