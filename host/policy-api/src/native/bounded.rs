//! Native admission: into the queue while the queue and the tenant's window have room.

use crate::call::Call;
use crate::declare::{AdmissionDeclaration, Declaration, Declared, InContext, Terms};
use crate::matrix::Context;
use crate::policy::{AdmissionPolicy, Policy};
use crate::proposal::{Answer, Verdict};
use crate::records::RequestRecord;
use crate::sat;

use super::positions;

positions! { at: AdmissionSignal {
    QUEUED_REQUESTS = PoolQueuedRequests,
    LIMIT_REQUESTS = QueueLimitRequests,
    QUEUED_TOKENS = PoolQueuedTokens,
    LIMIT_TOKENS = QueueLimitTokens,
    USED_TOKENS = TenantUsedTokens,
    TENANT_LIMIT_TOKENS = TenantLimitTokens,
    EXPECTED_OUTPUT = ExpectedOutputTokens,
    PREFILL_RATE = PrefillTokensPerSec,
} }

const QUOTA: u16 = 0;
const CAPACITY: u16 = 1;

/// Admits with the whole cap reserved, or refuses for capacity or quota. No report and no estimate is needed to admit.
#[derive(Debug)]
pub struct Bounded {
    declaration: AdmissionDeclaration,
}

impl Default for Bounded {
    fn default() -> Self {
        let names: alloc::vec::Vec<_> = at::ALL.iter().copied().map(InContext::Own).collect();
        let context = Declared::exactly(&names);
        Self { declaration: Declaration { terms: Terms::native("bounded"), context, rows: () } }
    }
}

impl Bounded {
    /// The policy; it has no parameters.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Policy for Bounded {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}

impl AdmissionPolicy for Bounded {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.declaration
    }

    fn decide(&mut self, _call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let input = u64::from(request.input_tokens);
        let queued = context.get(at::QUEUED_TOKENS);
        let queue_has_room = context.get(at::QUEUED_REQUESTS) < context.get(at::LIMIT_REQUESTS)
            && sat::add(queued, input) <= context.get(at::LIMIT_TOKENS);
        let charge = sat::add(sat::add(context.get(at::USED_TOKENS), input), context.get(at::EXPECTED_OUTPUT));
        let reason = match (queue_has_room, charge <= context.get(at::TENANT_LIMIT_TOKENS)) {
            (true, true) => {
                return Answer::Proposal(Verdict::Admit {
                    reserve_output_tokens: request.max_output_tokens,
                    class_rank: request.class_rank.get(),
                });
            }
            (false, _) => CAPACITY,
            (true, false) => QUOTA,
        };
        let wait_ms = sat::mul_div(1_000, queued, context.get(at::PREFILL_RATE).max(1)).unwrap_or(u64::MAX);
        Answer::Proposal(Verdict::Reject { reason, retry_after_ms: u32::try_from(wait_ms).unwrap_or(u32::MAX) })
    }
}
