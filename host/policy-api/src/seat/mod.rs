//! A seat asks one question: it fills what the policy declared, calls, checks, and lets the native default answer when the policy has no
//! opinion, fails, or answers nonsense. The machine that owns the seat gets a decision in every case.
//!
//! Buffers live in the seat, so that a call allocates nothing once the largest window has been seen. Call numbers count the calls of a
//! question at this machine; the seed of a call follows from the run's seed, the question and that number. Facts are told by the machine,
//! through `observe`, before it asks.

mod admission;
mod eviction;
mod fill;
mod order;
mod overload;
mod routing;
mod victims;

pub use admission::AdmissionSeat;
pub use eviction::EvictionSeat;
pub use order::OrderSeat;
pub use overload::{OverloadSeat, OverloadSources, busy_is_founded};
pub use routing::{PlaceAsked, RoutingSeat};
pub use victims::VictimsSeat;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};

use crate::call::Call;
use crate::proposal::FaultKind;
use crate::question::Question;
use crate::seed::call_seed;
use crate::validate::{Change, Checked, Malformed, Validated};

/// A decision, and how it came about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked<T> {
    /// What to do. Checked.
    pub decision: T,
    /// Number of the call, for the record.
    pub call: u64,
    /// Why the native default answered, when it did.
    pub fallback: Option<FallbackReason>,
    /// What the contract changed about the answer.
    pub changed: Option<Change>,
}

/// Why the native default answered in a policy's place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FallbackReason {
    /// The policy left it to the default. Always legal.
    NoOpinion,
    /// The policy failed.
    Fault(FaultKind),
    /// The policy answered nonsense.
    Malformed(Malformed),
}

impl FallbackReason {
    /// Does it count against the policy?
    pub fn is_strike(self) -> bool {
        self != Self::NoOpinion
    }

    /// Stable number: 0 no opinion, 1.. a fault, 16.. a malformed proposal, each in the order of its enum.
    pub const fn code(self) -> u8 {
        match self {
            Self::NoOpinion => 0,
            Self::Fault(kind) => 1 + kind as u8,
            Self::Malformed(why) => 16 + why as u8,
        }
    }

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoOpinion => "no-opinion",
            Self::Fault(kind) => kind.name(),
            Self::Malformed(why) => why.name(),
        }
    }
}

/// Mints the calls of one question at one machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Minted {
    /// Fixed for the run.
    run_seed: u64,
    /// Number of the last call.
    number: u64,
}

impl Minted {
    fn new(run_seed: u64) -> Self {
        Self { run_seed, number: 0 }
    }

    fn next(&mut self, question: Question, now: Instant) -> Call {
        self.number = self.number.wrapping_add(1);
        Call { number: self.number, now_us: now.as_us(), seed: call_seed(self.run_seed, question, self.number) }
    }

    fn encode(&self, out: &mut Writer) {
        out.u64(self.run_seed);
        out.u64(self.number);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { run_seed: from.u64()?, number: from.u64()? })
    }
}

/// Either the checked proposal, or why the default must answer.
type Outcome<T> = Result<Validated<T>, FallbackReason>;

fn outcome<T>(checked: Checked<T>) -> Outcome<T> {
    checked.map_err(FallbackReason::Malformed)
}

impl<T> Asked<T> {
    fn by_policy(call: u64, validated: Validated<T>) -> Self {
        Self { decision: validated.proposal, call, fallback: None, changed: validated.changed }
    }

    fn by_default(call: u64, validated: Validated<T>, reason: FallbackReason) -> Self {
        Self { decision: validated.proposal, call, fallback: Some(reason), changed: validated.changed }
    }
}
