//! The contract's types in the words of the bindings.

use penstock_policy_sdk::api::AdmissionPolicy as Decides;

use crate::bindings;
use crate::bindings::exports::penstock::admission::admission as seat;

penstock_policy_sdk::life!(bindings);
penstock_policy_sdk::request!();

impl<S: Seat> seat::Guest for S {
    fn decide(asked: wit::Call, of: wit::Request, context: Vec<u64>) -> seat::Verdict {
        let (asked, of) = (call(asked), request(of));
        let answer = S::with(|living| living.policy().decide(&asked, &of, api::Context { values: &context }));
        let api::Answer::Proposal(verdict) = answer else { return seat::Verdict::NoOpinion };
        match verdict {
            api::Verdict::Admit { reserve_output_tokens, class_rank } => {
                seat::Verdict::Admit(seat::Grant { reserve_output_tokens, class_rank })
            }
            api::Verdict::Defer { for_us } => seat::Verdict::Defer(for_us),
            api::Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank } => {
                seat::Verdict::Degrade(seat::Smaller { max_output_tokens, reserve_output_tokens, class_rank })
            }
            api::Verdict::Reject { reason, retry_after_ms } => {
                seat::Verdict::Reject(seat::Refusal { reason, retry_after_ms })
            }
        }
    }
}
