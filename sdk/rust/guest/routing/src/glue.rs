//! The contract's types in the words of the bindings.

use penstock_policy_sdk::api::RoutingPolicy as Decides;

use crate::bindings;
use crate::bindings::exports::penstock::routing::routing as seat;

penstock_policy_sdk::life!(bindings);
penstock_policy_sdk::request!();

impl<S: Seat> seat::Guest for S {
    fn decide(
        asked: wit::Call,
        of: wit::Request,
        phase: u8,
        context: Vec<u64>,
        replicas: wit::Matrix,
    ) -> seat::Placement {
        let phase = match phase {
            0 => api::RoutingPhase::Whole,
            1 => api::RoutingPhase::Decode,
            2 => api::RoutingPhase::Prefill,
            // The set is open: this build has no opinion about phases that it does not know.
            _ => return seat::Placement::NoOpinion,
        };
        let (asked, of) = (call(asked), request(of));
        let replicas = api::Matrix::from_packed(replicas.rows as usize, replicas.cells);
        let context = api::Context { values: &context };
        let question = api::RoutingQuestion { request: &of, phase, context, replicas: &replicas };
        let mut ranked = Vec::with_capacity(penstock_policy_sdk::routing::RANKED_MAX);
        let answer = S::with(|living| living.policy().decide(&asked, &question, &mut ranked));
        match answer {
            api::Answer::Proposal(api::Placement::Place { wait_us, colocate }) => {
                seat::Placement::Place(seat::Placing { ranked, wait_us, colocate })
            }
            api::Answer::Proposal(api::Placement::Hold { for_us }) => seat::Placement::Hold(for_us),
            api::Answer::NoOpinion | api::Answer::Fault(_) => seat::Placement::NoOpinion,
        }
    }
}
