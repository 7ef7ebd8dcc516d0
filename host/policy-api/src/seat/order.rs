//! Whose request is placed next?

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::{Asked, FallbackReason, Minted, fill, outcome};
use crate::call::Call;
use crate::generated::{OrderSignal, WaitingSignal};
use crate::matrix::{Context, Matrix};
use crate::native::ClassFirst;
use crate::policy::FairnessPolicy;
use crate::proposal::{Answer, OrderDecision, Rest};
use crate::question::Question;
use crate::source::{ContextSource, RowSource};
use crate::validate::{self, RowMarks, Validated};

/// Asks the gateway's fairness policy for an order.
#[derive(Debug)]
pub struct OrderSeat {
    minted: Minted,
    fallback: ClassFirst,
    scratch: Scratch,
    /// As `scratch`, where the default answers: what the policy was passed stays readable.
    fallback_scratch: Scratch,
    /// The native order, where it follows what the policy named.
    native: Vec<u32>,
}

/// Buffers of a call.
#[derive(Debug, Default)]
struct Scratch {
    values: Vec<u64>,
    rows: Matrix,
    masks: Vec<u64>,
    marks: RowMarks,
}

impl OrderSeat {
    /// A seat that has asked nothing yet.
    pub fn new(run_seed: u64) -> Self {
        Self {
            minted: Minted::new(run_seed),
            fallback: ClassFirst::new(),
            scratch: Scratch::default(),
            fallback_scratch: Scratch::default(),
            native: Vec::new(),
        }
    }

    /// Asks over the rows of `waiting`. `ranked` becomes the rows to place, in order: those that the policy named, and behind them the
    /// others in native order unless the policy keeps them waiting.
    pub fn ask(
        &mut self,
        policy: &mut dyn FairnessPolicy,
        now: Instant,
        context: &impl ContextSource<OrderSignal>,
        waiting: &impl RowSource<WaitingSignal>,
        ranked: &mut Vec<u32>,
    ) -> Asked<OrderDecision> {
        let call = self.minted.next(Question::Order, now);
        match self.scratch.put(policy, &call, context, waiting, ranked) {
            Ok(validated) => {
                if validated.proposal.rest == Rest::Append && ranked.len() < waiting.rows() {
                    self.append_rest(waiting, ranked);
                }
                Asked::by_policy(call.number, validated)
            }
            Err(reason) => {
                self.fallback_scratch.fill_rows(&self.fallback, waiting);
                self.fallback.rank(&self.fallback_scratch.rows, ranked);
                let decision = OrderDecision { named: ranked.len(), rest: Rest::Append, tpot_target_us: None };
                Asked::by_default(call.number, Validated { proposal: decision, changed: None }, reason)
            }
        }
    }

    /// The rows that `marks` has not seen, in native order.
    fn append_rest(&mut self, waiting: &impl RowSource<WaitingSignal>, ranked: &mut Vec<u32>) {
        self.fallback_scratch.fill_rows(&self.fallback, waiting);
        self.fallback.rank(&self.fallback_scratch.rows, &mut self.native);
        let marks = &self.scratch.marks;
        ranked.extend(self.native.iter().copied().filter(|row| !marks.has(*row as usize)));
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
    fn fill_rows(&mut self, policy: &dyn FairnessPolicy, waiting: &impl RowSource<WaitingSignal>) {
        fill::rows(&policy.describe().waiting, waiting, &mut self.rows, &mut self.masks);
    }

    fn put(
        &mut self,
        policy: &mut dyn FairnessPolicy,
        call: &Call,
        context: &impl ContextSource<OrderSignal>,
        waiting: &impl RowSource<WaitingSignal>,
        ranked: &mut Vec<u32>,
    ) -> Result<Validated<OrderDecision>, FallbackReason> {
        fill::context(&policy.describe().order, context, |_| 0, &mut self.values);
        self.fill_rows(policy, waiting);
        ranked.clear();
        match policy.order(call, Context { values: &self.values }, &self.rows, ranked) {
            Answer::NoOpinion => Err(FallbackReason::NoOpinion),
            Answer::Fault(kind) => Err(FallbackReason::Fault(kind)),
            Answer::Proposal(ranking) if validate::is_silent(ranking, ranked) => Err(FallbackReason::NoOpinion),
            Answer::Proposal(ranking) => outcome(validate::ranking(ranking, ranked, self.rows.rows(), &mut self.marks)),
        }
    }
}
