//! Who gives KV back?

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::{Asked, FallbackReason, Minted, fill, outcome};
use crate::call::Call;
use crate::generated::{RunningSignal, VictimsSignal};
use crate::matrix::{Context, Matrix};
use crate::native::ClassFirst;
use crate::policy::FairnessPolicy;
use crate::proposal::{Answer, Victim, Yielder};
use crate::question::Question;
use crate::source::{ContextSource, RowSource};
use crate::validate::{self, RowMarks, Validated};

/// Asks a replica's fairness policy for victims.
#[derive(Debug)]
pub struct VictimsSeat {
    minted: Minted,
    fallback: ClassFirst,
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
    yielders: Vec<Yielder>,
    marks: RowMarks,
}

impl VictimsSeat {
    /// A seat that has asked nothing yet.
    pub fn new(run_seed: u64) -> Self {
        Self {
            minted: Minted::new(run_seed),
            fallback: ClassFirst::new(),
            scratch: Scratch::default(),
            fallback_scratch: Scratch::default(),
        }
    }

    /// Asks over the rows of `running`. `victims` becomes the sequences to preempt, in order, at most `take-sequences` of them; the
    /// machine stops once the shortage is covered.
    pub fn ask(
        &mut self,
        policy: &mut dyn FairnessPolicy,
        now: Instant,
        context: &impl ContextSource<VictimsSignal>,
        running: &impl RowSource<RunningSignal>,
        victims: &mut Vec<Victim>,
    ) -> Asked<()> {
        let call = self.minted.next(Question::Victims, now);
        let reason = match self.scratch.put(policy, &call, context, running, victims) {
            Ok(validated) => return Asked::by_policy(call.number, validated),
            Err(reason) => reason,
        };
        let answer = self.fallback_scratch.put(&mut self.fallback, &call, context, running, victims);
        let validated = answer.unwrap_or_else(|why| {
            debug_assert_eq!(
                why,
                FallbackReason::NoOpinion,
                "the default answers well-formed; nobody to name is no opinion"
            );
            victims.clear();
            Validated { proposal: (), changed: None }
        });
        Asked::by_default(call.number, validated, reason)
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
    fn put(
        &mut self,
        policy: &mut dyn FairnessPolicy,
        call: &Call,
        context: &impl ContextSource<VictimsSignal>,
        running: &impl RowSource<RunningSignal>,
        victims: &mut Vec<Victim>,
    ) -> Result<Validated<()>, FallbackReason> {
        let wants = policy.describe();
        fill::context(&wants.victims, context, |_| 0, &mut self.values);
        fill::rows(&wants.running, running, &mut self.rows, &mut self.masks);
        self.yielders.clear();
        match policy.victims(call, Context { values: &self.values }, &self.rows, &mut self.yielders) {
            Answer::NoOpinion => Err(FallbackReason::NoOpinion),
            Answer::Fault(kind) => Err(FallbackReason::Fault(kind)),
            Answer::Proposal(()) if self.yielders.is_empty() => Err(FallbackReason::NoOpinion),
            Answer::Proposal(()) => {
                let take = fill::or_fill(VictimsSignal::TakeSequences, context.value(VictimsSignal::TakeSequences));
                outcome(validate::victims(&self.yielders, self.rows.rows(), take, &mut self.marks, victims))
            }
        }
    }
}
