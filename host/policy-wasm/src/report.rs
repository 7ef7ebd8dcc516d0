//! What does a seat say of itself? Lines, counters, faults and what became of them, drained by the driver between two steps.

use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{Decision, Terms};

use crate::digest::Digest;
use crate::fault::Failure;
use crate::host::LogLine;

/// Something that happened to a policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Happening {
    /// A call failed. With the guest's functions, from the innermost outwards.
    Fault {
        /// Which function, what kind, and the words.
        failure: Failure,
        /// Number of the seat's call at which it happened.
        call: u64,
        /// The machine's time.
        now_us: u64,
    },
    /// The host refused an answer.
    Malformed(Malformed),
    /// The instance was made anew, with its snapshot and every fact since.
    Rebuilt {
        /// How many facts it was told again.
        facts: usize,
    },
    /// The instance was made anew and lost something.
    Reset(ResetReason),
    /// It is not asked for a while.
    Quarantined {
        /// How many calls.
        calls: u64,
        /// How often it has been so far.
        times: u64,
    },
}

/// What was lost when an instance was made anew.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ResetReason {
    /// The facts since its snapshot: it failed on them again. It was told a gap.
    FactsLost,
    /// Everything: it failed on its snapshot too.
    StateLost,
}

impl ResetReason {
    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FactsLost => "facts-lost",
            Self::StateLost => "state-lost",
        }
    }
}

/// Whose words these are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Speaker<'a> {
    /// Which seat.
    pub decision: Decision,
    /// The policy's own name.
    pub policy: &'a str,
    /// Its component.
    pub component: Digest,
}

/// Where the driver takes what policies say. Called between two steps, on the machine's thread: it must not block.
pub trait PolicySink {
    /// A line.
    fn log(&mut self, from: Speaker<'_>, line: LogLine);
    /// Lines that were too many.
    fn lines_dropped(&mut self, from: Speaker<'_>, lines: u64);
    /// A policy's own counter rose.
    fn count(&mut self, from: Speaker<'_>, name: &str, by: u64);
    /// Counts under names that were too many or ill-formed.
    fn counts_dropped(&mut self, from: Speaker<'_>, counts: u64);
    /// Something happened.
    fn happened(&mut self, from: Speaker<'_>, happening: Happening);
    /// Happenings that were too many.
    fn happenings_dropped(&mut self, from: Speaker<'_>, happenings: u64);
}

/// Numbers of one seat, for status pages and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeatStatus {
    /// Which seat.
    pub decision: Decision,
    /// The policy's own name.
    pub policy: String,
    /// Its version.
    pub version: String,
    /// Its component; none when it is native.
    pub component: Option<Digest>,
    /// Questions put to the seat, those in quarantine included.
    pub calls: u64,
    /// Failed calls of every kind, those while it was made anew included.
    pub faults: u64,
    /// Strikes: failed calls and refused answers.
    pub strikes: u64,
    /// How often it was put into quarantine.
    pub quarantines: u64,
    /// Calls left there; 0 when it is asked.
    pub quarantine_calls_left: u64,
    /// How often its instance was made anew.
    pub rebuilds: u64,
    /// How often it lost its state.
    pub resets: u64,
    /// Snapshots taken.
    pub snapshots: u64,
    /// Size of the last one.
    pub snapshot_bytes: usize,
    /// Linear memory of its instance.
    pub memory_bytes: usize,
    /// Fuel of the last call.
    pub last_fuel: u64,
    /// Fuel of all calls.
    pub total_fuel: u64,
}

impl SeatStatus {
    /// Of a native policy: it cannot fail, and its calls are not counted here.
    pub(crate) fn native(decision: Decision, terms: &Terms) -> Self {
        Self {
            decision,
            policy: terms.name.clone(),
            version: terms.version.clone(),
            component: None,
            calls: 0,
            faults: 0,
            strikes: 0,
            quarantines: 0,
            quarantine_calls_left: 0,
            rebuilds: 0,
            resets: 0,
            snapshots: 0,
            snapshot_bytes: 0,
            memory_bytes: 0,
            last_fuel: 0,
            total_fuel: 0,
        }
    }
}
