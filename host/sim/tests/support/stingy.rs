//! An admission policy that reserves a quarter of the output that is asked for, so that answers outgrow their pools and work is preempted.

use penstock_base::codec::Writer;
use penstock_policy_api::native::Bounded;
use penstock_policy_api::{
    AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, FaultKind, Policy, RequestRecord, Terms, Verdict,
};

/// Otherwise the native default.
pub struct Stingy(pub Box<Bounded>);

impl Policy for Stingy {
    fn terms(&self) -> &Terms {
        self.0.terms()
    }
    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        self.0.save(out)
    }
}

impl AdmissionPolicy for Stingy {
    fn describe(&self) -> &AdmissionDeclaration {
        self.0.describe()
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        match self.0.decide(call, request, context) {
            Answer::Proposal(Verdict::Admit { reserve_output_tokens, class_rank }) => {
                Answer::Proposal(Verdict::Admit { reserve_output_tokens: reserve_output_tokens / 4, class_rank })
            }
            other => other,
        }
    }
}
