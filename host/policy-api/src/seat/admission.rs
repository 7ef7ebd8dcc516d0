//! May this request enter the queue now?

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::{Asked, FallbackReason, Minted, fill, outcome};
use crate::call::Call;
use crate::generated::AdmissionSignal;
use crate::matrix::Context;
use crate::native::Bounded;
use crate::policy::AdmissionPolicy;
use crate::proposal::{AdmissionDecision, Answer};
use crate::question::Question;
use crate::records::RequestRecord;
use crate::source::ContextSource;
use crate::validate::{Validated, VerdictCheck};

/// Asks the admission policy.
#[derive(Debug)]
pub struct AdmissionSeat {
    minted: Minted,
    fallback: Bounded,
    values: Vec<u64>,
    /// As `values`, where the default answers: what the policy was passed stays readable.
    fallback_values: Vec<u64>,
}

impl AdmissionSeat {
    /// A seat that has asked nothing yet.
    pub fn new(run_seed: u64) -> Self {
        Self {
            minted: Minted::new(run_seed),
            fallback: Bounded::new(),
            values: Vec::new(),
            fallback_values: Vec::new(),
        }
    }

    /// Asks. `deferrals` is how often this request was deferred before.
    pub fn ask(
        &mut self,
        policy: &mut dyn AdmissionPolicy,
        now: Instant,
        request: &RequestRecord,
        deferrals: u32,
        source: &impl ContextSource<AdmissionSignal>,
    ) -> Asked<AdmissionDecision> {
        let call = self.minted.next(Question::Admission, now);
        let reason = match put(policy, &call, request, deferrals, source, &mut self.values) {
            Ok(validated) => return Asked::by_policy(call.number, validated),
            Err(reason) => reason,
        };
        let answer = put(&mut self.fallback, &call, request, deferrals, source, &mut self.fallback_values);
        let validated = answer.expect("the native default answers every call well-formed");
        Asked::by_default(call.number, validated, reason)
    }

    /// The context of the last call, as it was passed.
    pub fn context(&self) -> &[u64] {
        &self.values
    }

    /// Writes what outlives a call.
    pub fn encode(&self, out: &mut Writer) {
        self.minted.encode(out);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { minted: Minted::decode(from)?, ..Self::new(0) })
    }
}

fn put(
    policy: &mut dyn AdmissionPolicy,
    call: &Call,
    request: &RequestRecord,
    deferrals: u32,
    source: &impl ContextSource<AdmissionSignal>,
    values: &mut Vec<u64>,
) -> Result<Validated<AdmissionDecision>, FallbackReason> {
    fill::context(&policy.describe().context, source, |basis| request.basis(basis), values);
    match policy.decide(call, request, Context { values }) {
        Answer::NoOpinion => Err(FallbackReason::NoOpinion),
        Answer::Fault(kind) => Err(FallbackReason::Fault(kind)),
        Answer::Proposal(verdict) => {
            let check = VerdictCheck { request, deferrals, now_us: call.now_us, terms: policy.terms() };
            outcome(check.verdict(verdict))
        }
    }
}
