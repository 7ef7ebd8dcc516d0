//! What a policy answers, before and after the host's checks.
//!
//! The first form is what crosses the wall, any number in any place. The second exists only behind [`crate::validate`].

use penstock_base::limits::RANKED_MAX;
use penstock_base::{ClassRank, Refusal};

use crate::generated::ActionKind;

/// What came of one call. Lists are written into a buffer beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer<T> {
    /// A proposal, not checked yet.
    Proposal(T),
    /// The native default decides this call. Always legal.
    NoOpinion,
    /// The policy failed. A strike.
    Fault(FaultKind),
}

/// How a policy failed to answer. Journals number it by its place: new ones go to the end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultKind {
    /// It trapped.
    Trap,
    /// Its fuel ran out: the only limit with meaning.
    Fuel,
    /// The backstop in time fired. Journaled as an input, since a replay has no clock.
    Epoch,
    /// It asked for more memory than it may have.
    Memory,
    /// It is being rebuilt after an earlier fault.
    Rebuilding,
}

impl FaultKind {
    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trap => "trap",
            Self::Fuel => "fuel",
            Self::Epoch => "epoch",
            Self::Memory => "memory",
            Self::Rebuilding => "rebuilding",
        }
    }
}

/// What admission answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Into the queue.
    Admit {
        /// Output tokens whose blocks dispatch reserves, of each sequence.
        reserve_output_tokens: u32,
        /// Not above the request's.
        class_rank: u8,
    },
    /// Ask again later.
    Defer {
        /// How much later.
        for_us: u32,
    },
    /// Into the queue under a smaller output cap.
    Degrade {
        /// The new cap, of each sequence.
        max_output_tokens: u32,
        /// As in `Admit`.
        reserve_output_tokens: u32,
        /// As in `Admit`.
        class_rank: u8,
    },
    /// Away.
    Reject {
        /// 0 quota, 1 capacity, 2 deadline, 3 retry storm, 4 too long, 16.. the policy's own.
        reason: u16,
        /// When another try makes sense.
        retry_after_ms: u32,
    },
}

/// A checked [`Verdict`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdmissionDecision {
    /// Into the queue.
    Admit {
        /// 0..=cap.
        reserve_output_tokens: u32,
        /// At most the request's.
        class: ClassRank,
    },
    /// Ask again later. The request may defer, has deferrals left, and its deadline lies behind the end of this one.
    Defer {
        /// 10,000..=60,000,000.
        for_us: u32,
    },
    /// Into the queue under a smaller cap. The request may degrade.
    Degrade {
        /// 16..cap.
        max_output_tokens: u32,
        /// 0..=the new cap.
        reserve_output_tokens: u32,
        /// At most the request's.
        class: ClassRank,
    },
    /// Away.
    Reject {
        /// Why.
        reason: Refusal,
        /// 1,000..=60,000.
        retry_after_ms: u32,
    },
}

/// What routing answers; `Place` ranks the rows in the list beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// The ranked rows, best first.
    Place {
        /// How long the request may be reserved for the first row's next credit.
        wait_us: u32,
        /// On a row of role 3 the whole request runs there.
        colocate: bool,
    },
    /// Not now: it keeps its place in the queue.
    Hold {
        /// How long.
        for_us: u32,
    },
}

/// A checked [`Placement`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoutingDecision {
    /// Rows to try, best first.
    Place {
        /// Distinct rows of the window; none only when there was no row.
        ranked: RankedRows,
        /// 0..=1,000,000.
        wait_us: u32,
        /// Counts only when the winning row has role 3.
        colocate: bool,
    },
    /// Not now.
    Hold {
        /// 1,000..=1,000,000.
        for_us: u32,
    },
}

/// Up to eight row indices, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankedRows {
    rows: [u32; RANKED_MAX],
    len: u8,
}

impl RankedRows {
    /// The first eight of `rows`.
    pub fn first_of(rows: &[u32]) -> Self {
        let mut ranked = Self::default();
        for (slot, row) in ranked.rows.iter_mut().zip(rows) {
            *slot = *row;
            ranked.len += 1;
        }
        ranked
    }

    /// As a list.
    pub fn as_slice(&self) -> &[u32] {
        &self.rows[..usize::from(self.len)]
    }
}

/// What becomes of the rows that a ranking does not name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rest {
    /// They follow in native order.
    #[default]
    Append,
    /// They wait.
    Keep,
}

/// What `order` answers about the rows in the list beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranking {
    /// Of the rows not named.
    pub rest: Rest,
    /// How long a round with decodes should take; [`u32::MAX`] is no opinion.
    pub tpot_target_us: u32,
}

/// A checked [`Ranking`]; the list beside it holds the rows to place, in order, unnamed ones included where they follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OrderDecision {
    /// How many of the list the policy named; the others follow in native order.
    pub named: usize,
    /// Of the rows not named.
    pub rest: Rest,
    /// At least 1,000.
    pub tpot_target_us: Option<u32>,
}

/// A sequence that gives its blocks back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Yielder {
    /// Row of the window.
    pub row: u32,
    /// 0 recompute, 1 offload.
    pub how: u8,
}

/// How a victim comes back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum YieldHow {
    /// Its tokens are computed again.
    Recompute,
    /// Its blocks are copied out and back.
    Offload,
}

/// A checked [`Yielder`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Victim {
    /// Row of the window.
    pub row: u32,
    /// How it comes back, where the host can.
    pub how: YieldHow,
}

/// What one cached run is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Worth {
    /// Larger stays longer.
    pub price: u64,
    /// 0 drop, 1 DRAM, 2 SSD.
    pub to: u8,
}

/// Where a run goes when it leaves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Tier {
    /// Nowhere.
    #[default]
    Drop,
    /// Host memory.
    Dram,
    /// Disk.
    Ssd,
}

/// A checked [`Worth`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Priced {
    /// Larger stays longer.
    pub price: u64,
    /// Where it goes, where the host can.
    pub to: Tier,
}

/// What overload answers, with the actions in the list beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stance {
    /// 0..=4.
    pub level: u8,
    /// 1..=60,000,000; then the native default stands again.
    pub hold_us: u32,
}

/// One action of a stance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Action {
    /// Code of an [`ActionKind`].
    pub what: u16,
    /// Classes up to and including this one.
    pub class_rank: u8,
    /// In the action's unit.
    pub amount: u64,
}

/// A checked [`Action`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StanceAction {
    /// What to do.
    pub kind: ActionKind,
    /// To classes up to and including this one.
    pub class: ClassRank,
    /// In the action's unit.
    pub amount: u64,
}

impl StanceAction {
    /// Does it reach `class`?
    pub fn reaches(&self, class: ClassRank) -> bool {
        class <= self.class
    }
}
