//! Which replica runs this request?

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::{Asked, FallbackReason, Minted, fill, outcome};
use crate::call::Call;
use crate::generated::{ReplicaSignal, RoutingSignal};
use crate::matrix::{Context, Matrix};
use crate::native::OverlapLoad;
use crate::policy::{RoutingPolicy, RoutingQuestion};
use crate::proposal::{Answer, Placement, RankedRows, RoutingDecision};
use crate::question::Question;
use crate::records::{RequestRecord, RoutingPhase};
use crate::source::{ContextSource, RowSource};
use crate::validate::{self, RowMarks, Validated};

/// Asks the routing policy.
#[derive(Debug)]
pub struct RoutingSeat {
    minted: Minted,
    fallback: OverlapLoad,
    scratch: Scratch,
    /// As `scratch`, where the default answers: what the policy was passed stays readable.
    fallback_scratch: Scratch,
}

/// Buffers of a call.
#[derive(Debug, Default)]
struct Scratch {
    values: Vec<u64>,
    rows: Matrix,
    masks: Vec<u64>,
    ranked: Vec<u32>,
    marks: RowMarks,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct PlaceAsked<'a> {
    /// The request.
    pub request: &'a RequestRecord,
    /// What the placement is for.
    pub phase: RoutingPhase,
}

impl RoutingSeat {
    /// A seat that has asked nothing yet.
    pub fn new(run_seed: u64) -> Self {
        Self {
            minted: Minted::new(run_seed),
            fallback: OverlapLoad::new(),
            scratch: Scratch::default(),
            fallback_scratch: Scratch::default(),
        }
    }

    /// Asks over the rows of `replicas`, whose indices the decision names. Without rows the ranking is empty.
    pub fn ask(
        &mut self,
        policy: &mut dyn RoutingPolicy,
        now: Instant,
        asked: PlaceAsked<'_>,
        context: &impl ContextSource<RoutingSignal>,
        replicas: &impl RowSource<ReplicaSignal>,
    ) -> Asked<RoutingDecision> {
        let call = self.minted.next(Question::Routing, now);
        let reason = match self.scratch.put(policy, &call, asked, context, replicas) {
            Ok(validated) => return Asked::by_policy(call.number, validated),
            Err(reason) => reason,
        };
        let answer = self.fallback_scratch.put(&mut self.fallback, &call, asked, context, replicas);
        let validated = answer.unwrap_or_else(|why| {
            debug_assert_eq!(
                (why, replicas.rows()),
                (FallbackReason::NoOpinion, 0),
                "the default ranks whatever there is"
            );
            let nothing = RoutingDecision::Place { ranked: RankedRows::default(), wait_us: 0, colocate: false };
            Validated { proposal: nothing, changed: None }
        });
        Asked::by_default(call.number, validated, reason)
    }

    /// The native ranking of every row, best first: for what remains when each ranked row has refused. Not a call.
    pub fn rank_natively(
        &mut self,
        asked: PlaceAsked<'_>,
        context: &impl ContextSource<RoutingSignal>,
        replicas: &impl RowSource<ReplicaSignal>,
        ranked: &mut Vec<u32>,
    ) {
        let scratch = &mut self.fallback_scratch;
        scratch.fill(&self.fallback, asked.request, context, replicas);
        let values = Context { values: &scratch.values };
        self.fallback.rank(asked.request, values, &scratch.rows, ranked);
    }

    /// The context of the last call, as it was passed.
    pub fn context(&self) -> &[u64] {
        &self.scratch.values
    }

    /// The rows of the last call, as they were passed.
    pub fn rows(&self) -> &Matrix {
        &self.scratch.rows
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

impl Scratch {
    fn fill(
        &mut self,
        policy: &dyn RoutingPolicy,
        request: &RequestRecord,
        context: &impl ContextSource<RoutingSignal>,
        replicas: &impl RowSource<ReplicaSignal>,
    ) {
        let wants = policy.describe();
        fill::context(&wants.context, context, |basis| request.basis(basis), &mut self.values);
        fill::rows(&wants.rows, replicas, &mut self.rows, &mut self.masks);
    }

    fn put(
        &mut self,
        policy: &mut dyn RoutingPolicy,
        call: &Call,
        asked: PlaceAsked<'_>,
        context: &impl ContextSource<RoutingSignal>,
        replicas: &impl RowSource<ReplicaSignal>,
    ) -> Result<Validated<RoutingDecision>, FallbackReason> {
        self.fill(policy, asked.request, context, replicas);
        let question = RoutingQuestion {
            request: asked.request,
            phase: asked.phase,
            context: Context { values: &self.values },
            replicas: &self.rows,
        };
        self.ranked.clear();
        match policy.decide(call, &question, &mut self.ranked) {
            Answer::NoOpinion => Err(FallbackReason::NoOpinion),
            Answer::Fault(kind) => Err(FallbackReason::Fault(kind)),
            Answer::Proposal(Placement::Place { .. }) if self.ranked.is_empty() => Err(FallbackReason::NoOpinion),
            Answer::Proposal(placement) => {
                outcome(validate::placement(placement, &self.ranked, self.rows.rows(), &mut self.marks))
            }
        }
    }
}
