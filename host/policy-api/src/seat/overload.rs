//! What gives way at this saturation?

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::{Asked, FallbackReason, Minted, fill, outcome};
use crate::call::Call;
use crate::generated::{ClassSignal, CommonSignal, OverloadSignal, ReplicaSignal};
use crate::matrix::{Context, Matrix};
use crate::native::Ladder;
use crate::policy::{OverloadPolicy, OverloadQuestion};
use crate::proposal::{Action, Answer, Stance, StanceAction};
use crate::question::Question;
use crate::source::{ContextSource, RowSource};
use crate::validate::{StanceCheck, Standing, Validated};

/// Asks the overload policy.
#[derive(Debug)]
pub struct OverloadSeat {
    minted: Minted,
    /// Its level is state: it moves with every call that the default answers.
    fallback: Ladder,
    scratch: Scratch,
    /// As `scratch`, where the default answers: what the policy was passed stays readable.
    fallback_scratch: Scratch,
}

/// Buffers of a call.
#[derive(Debug, Default)]
struct Scratch {
    values: Vec<u64>,
    classes: Matrix,
    replicas: Matrix,
    masks: Vec<u64>,
    actions: Vec<Action>,
}

/// Where the facts of one overload call come from.
#[derive(Debug)]
pub struct OverloadSources<'a, C, K, R> {
    /// Context.
    pub context: &'a C,
    /// Eight classes, rank 0 first.
    pub classes: &'a K,
    /// Ready replicas, by id.
    pub replicas: &'a R,
}

impl OverloadSeat {
    /// A seat that has asked nothing yet. The default ladder refuses inputs beyond a part of `context_window_tokens`.
    pub fn new(run_seed: u64, context_window_tokens: u32) -> Self {
        let fallback = Ladder::new(context_window_tokens);
        Self {
            minted: Minted::new(run_seed),
            fallback,
            scratch: Scratch::default(),
            fallback_scratch: Scratch::default(),
        }
    }

    /// Asks. `actions` becomes what to do; `standing` is the stance in force until now.
    pub fn ask<C, K, R>(
        &mut self,
        policy: &mut dyn OverloadPolicy,
        now: Instant,
        sources: &OverloadSources<'_, C, K, R>,
        standing: Standing,
        actions: &mut Vec<StanceAction>,
    ) -> Asked<Stance>
    where
        C: ContextSource<OverloadSignal>,
        K: RowSource<ClassSignal>,
        R: RowSource<ReplicaSignal>,
    {
        let call = self.minted.next(Question::Overload, now);
        let reason = match self.scratch.put(policy, &call, sources, standing, actions) {
            Ok(validated) => return Asked::by_policy(call.number, validated),
            Err(reason) => reason,
        };
        let answer = self.fallback_scratch.put(&mut self.fallback, &call, sources, standing, actions);
        let validated = answer.expect("the native default answers every call well-formed");
        Asked::by_default(call.number, validated, reason)
    }

    /// The context of the last call, as it was passed.
    pub fn context(&self) -> &[u64] {
        &self.scratch.values
    }

    /// The class rows of the last call, as they were passed.
    pub fn classes(&self) -> &Matrix {
        &self.scratch.classes
    }

    /// The replica rows of the last call, as they were passed.
    pub fn replicas(&self) -> &Matrix {
        &self.scratch.replicas
    }

    /// Writes what outlives a call.
    pub fn encode(&self, out: &mut Writer) {
        self.minted.encode(out);
        self.fallback.encode(out);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let minted = Minted::decode(from)?;
        Ok(Self { minted, fallback: Ladder::decode(from)?, ..Self::new(0, 0) })
    }
}

impl Scratch {
    fn put<C, K, R>(
        &mut self,
        policy: &mut dyn OverloadPolicy,
        call: &Call,
        sources: &OverloadSources<'_, C, K, R>,
        standing: Standing,
        actions: &mut Vec<StanceAction>,
    ) -> Result<Validated<Stance>, FallbackReason>
    where
        C: ContextSource<OverloadSignal>,
        K: RowSource<ClassSignal>,
        R: RowSource<ReplicaSignal>,
    {
        let wants = policy.describe();
        fill::context(&wants.context, sources.context, |_| 0, &mut self.values);
        fill::rows(&wants.rows.classes, sources.classes, &mut self.classes, &mut self.masks);
        fill::rows(&wants.rows.replicas, sources.replicas, &mut self.replicas, &mut self.masks);
        let question = OverloadQuestion {
            context: Context { values: &self.values },
            classes: &self.classes,
            replicas: &self.replicas,
        };
        self.actions.clear();
        match policy.decide(call, &question, &mut self.actions) {
            Answer::NoOpinion => Err(FallbackReason::NoOpinion),
            Answer::Fault(kind) => Err(FallbackReason::Fault(kind)),
            Answer::Proposal(stance) => {
                let stale_us =
                    fill::or_fill(CommonSignal::StaleLoadUs, sources.context.common(CommonSignal::StaleLoadUs));
                let founded = busy_is_founded(sources.replicas, stale_us);
                let check = StanceCheck { terms: policy.terms(), standing, busy_founded: founded };
                outcome(check.stance(stance, &self.actions, actions))
            }
        }
    }
}

/// May everyone be told that all is busy? Only while every ready replica's load is known, fresh and not zero, and there is one.
///
/// The gateway asks again while `busy` stands: the first idle or unknown replica lifts it.
pub fn busy_is_founded(replicas: &impl RowSource<ReplicaSignal>, stale_load_us: u64) -> bool {
    let loads = [
        ReplicaSignal::ActiveBlocks,
        ReplicaSignal::UnreportedBlocks,
        ReplicaSignal::InflightRequests,
        ReplicaSignal::RunningRequests,
        ReplicaSignal::ReadyRequests,
    ];
    let busy = |row: usize| {
        let fresh = replicas.cell(ReplicaSignal::LoadAgeUs, row).is_some_and(|age| age < stale_load_us);
        fresh && loads.iter().any(|load| replicas.cell(*load, row).is_some_and(|value| value > 0))
    };
    replicas.rows() > 0 && (0..replicas.rows()).all(busy)
}
