//! What is each cached run worth keeping?

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::{Asked, FallbackReason, Minted, fill, outcome};
use crate::call::Call;
use crate::generated::{EvictionSignal, RunSignal};
use crate::matrix::{Context, Matrix};
use crate::native::Lru;
use crate::policy::EvictionPolicy;
use crate::proposal::{Answer, Priced, Worth};
use crate::question::Question;
use crate::source::{ContextSource, RowSource};
use crate::validate::{self, Validated};

/// Asks the eviction policy.
#[derive(Debug)]
pub struct EvictionSeat {
    minted: Minted,
    fallback: Lru,
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
    worths: Vec<Worth>,
}

impl EvictionSeat {
    /// A seat that has asked nothing yet.
    pub fn new(run_seed: u64) -> Self {
        Self {
            minted: Minted::new(run_seed),
            fallback: Lru::new(),
            scratch: Scratch::default(),
            fallback_scratch: Scratch::default(),
        }
    }

    /// Asks over the rows of `runs`. `priced` becomes one answer a row, in row order.
    pub fn ask(
        &mut self,
        policy: &mut dyn EvictionPolicy,
        now: Instant,
        context: &impl ContextSource<EvictionSignal>,
        runs: &impl RowSource<RunSignal>,
        priced: &mut Vec<Priced>,
    ) -> Asked<()> {
        let call = self.minted.next(Question::Eviction, now);
        let reason = match self.scratch.put(policy, &call, context, runs, priced) {
            Ok(validated) => return Asked::by_policy(call.number, validated),
            Err(reason) => reason,
        };
        let answer = self.fallback_scratch.put(&mut self.fallback, &call, context, runs, priced);
        let validated = answer.unwrap_or_else(|why| {
            debug_assert_eq!((why, runs.rows()), (FallbackReason::NoOpinion, 0), "the default prices every row");
            priced.clear();
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
        policy: &mut dyn EvictionPolicy,
        call: &Call,
        context: &impl ContextSource<EvictionSignal>,
        runs: &impl RowSource<RunSignal>,
        priced: &mut Vec<Priced>,
    ) -> Result<Validated<()>, FallbackReason> {
        let wants = policy.describe();
        fill::context(&wants.context, context, |_| 0, &mut self.values);
        fill::rows(&wants.rows, runs, &mut self.rows, &mut self.masks);
        self.worths.clear();
        match policy.decide(call, Context { values: &self.values }, &self.rows, &mut self.worths) {
            Answer::NoOpinion => Err(FallbackReason::NoOpinion),
            Answer::Fault(kind) => Err(FallbackReason::Fault(kind)),
            Answer::Proposal(()) if self.worths.is_empty() => Err(FallbackReason::NoOpinion),
            Answer::Proposal(()) => outcome(validate::worths(&self.worths, self.rows.rows(), priced)),
        }
    }
}
