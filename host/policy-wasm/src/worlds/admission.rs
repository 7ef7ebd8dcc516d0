//! May this request enter the queue now?

use penstock_base::{ClassRank, Instant, Priority, RequestId, Traits};
use penstock_policy_api::native::Bounded;
use penstock_policy_api::{
    AdmissionDeclaration, AdmissionPolicy, AdmissionSeat, Answer, Call, Context, Decision, FallbackReason, Question,
    RequestRecord, Terms, Verdict,
};
use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre};

use super::rehearsal::Blank;
use super::{World, row_fuel};
use crate::bindings::admission as wall;
use crate::component::{Component, Declared};
use crate::fault::GuestCall;
use crate::host::Host;
use crate::instance::Bound;
use crate::living::Living;
use wall::exports::penstock::admission::admission as answered;
use wall::penstock::types::types;

/// The functions of an admission policy.
pub(crate) struct Admission(wall::AdmissionPolicy);

impl Bound for Admission {
    fn bind(pre: &InstancePre<Host>, store: &mut Store<Host>, instance: &Instance) -> wasmtime::Result<Self> {
        wall::AdmissionPolicyIndices::new(pre)?.load(store, instance).map(Self)
    }
}

impl World for Admission {
    type Declaration = AdmissionDeclaration;
    type Native = dyn AdmissionPolicy + Send;
    const DECISION: Decision = Decision::Admission;

    fn declaration(component: &Component) -> Option<&AdmissionDeclaration> {
        match component.declared() {
            Declared::Admission(declaration) => Some(declaration),
            _ => None,
        }
    }
    fn terms(declaration: &AdmissionDeclaration) -> &Terms {
        &declaration.terms
    }
    fn terms_mut(declaration: &mut AdmissionDeclaration) -> &mut Terms {
        &mut declaration.terms
    }
    fn native(name: &str, _context_window_tokens: u32) -> Option<Box<Self::Native>> {
        match name {
            "bounded" => Some(Box::new(Bounded::new())),
            _ => None,
        }
    }
    fn rehearse(living: &mut Living<Self>, _question: Question) -> Option<FallbackReason> {
        AdmissionSeat::new(0).ask(living, Instant::ZERO, &plain_request(), 0, &Blank { rows: 0 }).fallback
    }
}

/// A small request without wishes.
pub(super) fn plain_request() -> RequestRecord {
    RequestRecord {
        request_id: RequestId(1),
        tenant_id: 0,
        flow_id: 1,
        session_id: 0,
        class_rank: ClassRank::default(),
        attempt: 1,
        sequences: 1,
        priority: Priority(0),
        input_tokens: 16,
        max_output_tokens: 16,
        deadline_us: Instant::NEVER.as_us(),
        traits: Traits(0),
    }
}

impl AdmissionPolicy for Living<Admission> {
    fn describe(&self) -> &AdmissionDeclaration {
        self.declaration()
    }

    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let asked = wall_call!(call);
        let request = wall_request!(request);
        let fuel = row_fuel(Question::Admission, 0);
        let answer = self.ask(GuestCall::Decide, call, fuel, |guest, store| {
            guest.0.penstock_admission_admission().call_decide(store, asked, request, context.values)
        });
        match answer {
            Err(kind) => Answer::Fault(kind),
            Ok(answered::Verdict::NoOpinion) => Answer::NoOpinion,
            Ok(answered::Verdict::Admit(grant)) => Answer::Proposal(Verdict::Admit {
                reserve_output_tokens: grant.reserve_output_tokens,
                class_rank: grant.class_rank,
            }),
            Ok(answered::Verdict::Defer(for_us)) => Answer::Proposal(Verdict::Defer { for_us }),
            Ok(answered::Verdict::Degrade(smaller)) => Answer::Proposal(Verdict::Degrade {
                max_output_tokens: smaller.max_output_tokens,
                reserve_output_tokens: smaller.reserve_output_tokens,
                class_rank: smaller.class_rank,
            }),
            Ok(answered::Verdict::Reject(refusal)) => {
                Answer::Proposal(Verdict::Reject { reason: refusal.reason, retry_after_ms: refusal.retry_after_ms })
            }
        }
    }
}
