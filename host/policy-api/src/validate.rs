//! What of a proposal stands? Every check that needs nothing but the proposal, the request and the size of the window.
//!
//! Three outcomes: it stands; it stands after a change that the contract names (a clamp, a deferral that cannot be); or it is malformed,
//! which is a strike, and the native default answers the call. Checks against live state (credit, quota, reference counts) belong to
//! the machine that acts.

use alloc::vec::Vec;

use penstock_base::limits::{ACTIONS_MAX, DEFER_MAX, DEFER_MIN, DEFERRALS_MAX, RANKED_MAX, RESERVE_WAIT_MAX};
use penstock_base::{ClassRank, Refusal, Traits};

use crate::declare::Terms;
use crate::generated::ActionKind;
use crate::proposal::{
    Action, AdmissionDecision, OrderDecision, Placement, Priced, RankedRows, Ranking, Rest, RoutingDecision, Stance,
    StanceAction, Tier, Verdict, Victim, Worth, YieldHow, Yielder,
};
use crate::records::RequestRecord;

/// Shortest deferral that a policy may name; the host still asks no sooner than [`DEFER_MIN`].
pub const DEFER_NAMED_US_MIN: u32 = 1_000;
/// Smallest output cap that a degrade may leave.
pub const DEGRADED_TOKENS_MIN: u32 = 16;
/// Shortest and longest `Retry-After` in milliseconds.
pub const RETRY_AFTER_MS: (u32, u32) = (1_000, 60_000);
/// Shortest hold in routing.
pub const HOLD_US_MIN: u32 = 1_000;
/// Shortest target for a round with decodes.
pub const TPOT_TARGET_US_MIN: u32 = 1_000;
/// Strictest level of a stance.
pub const LEVEL_MAX: u8 = 4;
/// Longest time a stance may hold.
pub const STANCE_HOLD_US_MAX: u32 = 60_000_000;
/// Time between two downward steps of the level.
pub const LEVEL_FALL_US: u64 = 1_000_000;
/// All of them, in parts per million.
pub const ALL_PPM: u64 = 1_000_000;

/// A proposal that stands, and what was changed about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Validated<T> {
    /// What the machine acts on.
    pub proposal: T,
    /// What the contract changed, if anything.
    pub changed: Option<Change>,
}

impl<T> Validated<T> {
    fn as_is(proposal: T) -> Self {
        Self { proposal, changed: None }
    }
}

/// A change that the contract names. Not a strike. Journals number it by its place: new ones go to the end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Change {
    /// `retry-after-ms` was brought into 1,000..=60,000.
    RetryAfterClamped,
    /// The request may not be deferred, or not again: it is queued at once.
    DeferBecameAdmit,
    /// The deadline comes before the deferral ends: refused now.
    DeferPastDeadline,
    /// Asked again no sooner than after 10 ms.
    DeferRaised,
    /// `wait-us` above a second is a second.
    WaitClamped,
    /// More victims than the call may name: the first ones stand.
    VictimsCut,
    /// The level falls one step a second at most.
    LevelFallSlowed,
    /// An action's amount was brought into its range.
    AmountClamped,
    /// `busy` without every ready replica known to be loaded.
    BusyDropped,
}

impl Change {
    /// All of them, by number.
    pub const ALL: [Self; 9] = [
        Self::RetryAfterClamped,
        Self::DeferBecameAdmit,
        Self::DeferPastDeadline,
        Self::DeferRaised,
        Self::WaitClamped,
        Self::VictimsCut,
        Self::LevelFallSlowed,
        Self::AmountClamped,
        Self::BusyDropped,
    ];

    /// The change with this number.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RetryAfterClamped => "retry-after-clamped",
            Self::DeferBecameAdmit => "defer-became-admit",
            Self::DeferPastDeadline => "defer-past-deadline",
            Self::DeferRaised => "defer-raised",
            Self::WaitClamped => "wait-clamped",
            Self::VictimsCut => "victims-cut",
            Self::LevelFallSlowed => "level-fall-slowed",
            Self::AmountClamped => "amount-clamped",
            Self::BusyDropped => "busy-dropped",
        }
    }
}

/// Why a proposal cannot stand. A strike. Journals number it by its place: new ones go to the end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Malformed {
    /// A row outside the window.
    RowOutOfRange,
    /// A row twice.
    RowTwice,
    /// More ranked rows than eight.
    TooManyRows,
    /// A class above 7.
    ClassOutOfRange,
    /// A class above the request's.
    ClassRaised,
    /// More output reserved than the cap allows.
    ReserveAboveCap,
    /// A cap outside 16..cap.
    CapOutOfRange,
    /// A degrade of a request that may not be degraded.
    MayNotDegrade,
    /// A deferral outside 1,000..=60,000,000 microseconds.
    DeferOutOfRange,
    /// A refusal reason that is neither the contract's nor named in the manifest.
    UnknownReason,
    /// A hold outside its range.
    HoldOutOfRange,
    /// A step-time target below 1,000 microseconds.
    TargetOutOfRange,
    /// A way to yield that does not exist.
    UnknownHow,
    /// Not one answer a row.
    WrongCount,
    /// A tier that does not exist.
    UnknownTier,
    /// A level above 4.
    LevelOutOfRange,
    /// More actions than sixteen.
    TooManyActions,
    /// An action that does not exist or was not declared.
    UnknownAction,
}

impl Malformed {
    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RowOutOfRange => "row-out-of-range",
            Self::RowTwice => "row-twice",
            Self::TooManyRows => "too-many-rows",
            Self::ClassOutOfRange => "class-out-of-range",
            Self::ClassRaised => "class-raised",
            Self::ReserveAboveCap => "reserve-above-cap",
            Self::CapOutOfRange => "cap-out-of-range",
            Self::MayNotDegrade => "may-not-degrade",
            Self::DeferOutOfRange => "defer-out-of-range",
            Self::UnknownReason => "unknown-reason",
            Self::HoldOutOfRange => "hold-out-of-range",
            Self::TargetOutOfRange => "target-out-of-range",
            Self::UnknownHow => "unknown-how",
            Self::WrongCount => "wrong-count",
            Self::UnknownTier => "unknown-tier",
            Self::LevelOutOfRange => "level-out-of-range",
            Self::TooManyActions => "too-many-actions",
            Self::UnknownAction => "unknown-action",
        }
    }
}

/// What a check gives.
pub type Checked<T> = Result<Validated<T>, Malformed>;

/// Marks of rows already named. Keeps its room.
#[derive(Clone, Debug, Default)]
pub struct RowMarks {
    seen: Vec<bool>,
}

impl RowMarks {
    /// No row of a window of `rows` is marked.
    pub fn reset(&mut self, rows: usize) {
        self.seen.clear();
        self.seen.resize(rows, false);
    }

    /// Marks `row`; an error when it is marked or outside.
    pub fn mark(&mut self, row: u32) -> Result<(), Malformed> {
        let seen = self.seen.get_mut(row as usize).ok_or(Malformed::RowOutOfRange)?;
        if core::mem::replace(seen, true) { Err(Malformed::RowTwice) } else { Ok(()) }
    }

    /// Is `row` marked?
    pub fn has(&self, row: usize) -> bool {
        self.seen.get(row).copied().unwrap_or(false)
    }
}

/// What an admission verdict is held against.
#[derive(Clone, Copy, Debug)]
pub struct VerdictCheck<'a> {
    /// The request it is about.
    pub request: &'a RequestRecord,
    /// How often this request was deferred before.
    pub deferrals: u32,
    /// Time of the call.
    pub now_us: u64,
    /// Of the policy that answers.
    pub terms: &'a Terms,
}

impl VerdictCheck<'_> {
    /// Admission.
    pub fn verdict(&self, proposal: Verdict) -> Checked<AdmissionDecision> {
        let request = self.request;
        match proposal {
            Verdict::Admit { reserve_output_tokens, class_rank } => {
                let class = lowered(class_rank, request.class_rank)?;
                if reserve_output_tokens > request.max_output_tokens {
                    return Err(Malformed::ReserveAboveCap);
                }
                Ok(Validated::as_is(AdmissionDecision::Admit { reserve_output_tokens, class }))
            }
            Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank } => {
                if !request.traits.has(Traits::MAY_DEGRADE) {
                    return Err(Malformed::MayNotDegrade);
                }
                if max_output_tokens < DEGRADED_TOKENS_MIN || max_output_tokens >= request.max_output_tokens {
                    return Err(Malformed::CapOutOfRange);
                }
                if reserve_output_tokens > max_output_tokens {
                    return Err(Malformed::ReserveAboveCap);
                }
                let class = lowered(class_rank, request.class_rank)?;
                Ok(Validated::as_is(AdmissionDecision::Degrade { max_output_tokens, reserve_output_tokens, class }))
            }
            Verdict::Defer { for_us } => self.deferral(for_us),
            Verdict::Reject { reason, retry_after_ms } => {
                let retry = retry_after_ms.clamp(RETRY_AFTER_MS.0, RETRY_AFTER_MS.1);
                let changed = (retry != retry_after_ms).then_some(Change::RetryAfterClamped);
                let reason = refusal(reason, self.terms)?;
                Ok(Validated { proposal: AdmissionDecision::Reject { reason, retry_after_ms: retry }, changed })
            }
        }
    }

    fn deferral(&self, for_us: u32) -> Checked<AdmissionDecision> {
        let request = self.request;
        let longest = u32::try_from(DEFER_MAX.as_us()).unwrap_or(u32::MAX);
        if !(DEFER_NAMED_US_MIN..=longest).contains(&for_us) {
            return Err(Malformed::DeferOutOfRange);
        }
        if !request.traits.has(Traits::MAY_DEFER) || self.deferrals >= DEFERRALS_MAX {
            let at_once = AdmissionDecision::Admit {
                reserve_output_tokens: request.max_output_tokens,
                class: request.class_rank,
            };
            return Ok(Validated { proposal: at_once, changed: Some(Change::DeferBecameAdmit) });
        }
        let shortest = u32::try_from(DEFER_MIN.as_us()).unwrap_or(u32::MAX);
        let raised = for_us.max(shortest);
        if request.deadline_left_us(self.now_us) < u64::from(raised) {
            let late = AdmissionDecision::Reject { reason: Refusal::Deadline, retry_after_ms: RETRY_AFTER_MS.0 };
            return Ok(Validated { proposal: late, changed: Some(Change::DeferPastDeadline) });
        }
        let changed = (raised != for_us).then_some(Change::DeferRaised);
        Ok(Validated { proposal: AdmissionDecision::Defer { for_us: raised }, changed })
    }
}

fn lowered(class_rank: u8, ceiling: ClassRank) -> Result<ClassRank, Malformed> {
    let class = ClassRank::new(class_rank).ok_or(Malformed::ClassOutOfRange)?;
    if class > ceiling { Err(Malformed::ClassRaised) } else { Ok(class) }
}

/// The contract's five reasons, and the policy's own from 16 on, as far as its manifest names them.
fn refusal(reason: u16, terms: &Terms) -> Result<Refusal, Malformed> {
    let named = match reason {
        0..=4 => true,
        5..=15 => false,
        own => usize::from(own - 16) < terms.reasons.len(),
    };
    Refusal::from_code(reason).filter(|_| named).ok_or(Malformed::UnknownReason)
}

/// Routing. `ranked` is not empty where the placement is `Place`: an empty ranking is no opinion.
pub fn placement(proposal: Placement, ranked: &[u32], rows: usize, marks: &mut RowMarks) -> Checked<RoutingDecision> {
    let longest = u32::try_from(RESERVE_WAIT_MAX.as_us()).unwrap_or(u32::MAX);
    match proposal {
        Placement::Hold { for_us } => {
            if !(HOLD_US_MIN..=longest).contains(&for_us) {
                return Err(Malformed::HoldOutOfRange);
            }
            Ok(Validated::as_is(RoutingDecision::Hold { for_us }))
        }
        Placement::Place { wait_us, colocate } => {
            if ranked.len() > RANKED_MAX {
                return Err(Malformed::TooManyRows);
            }
            distinct(ranked.iter().copied(), rows, marks)?;
            let wait = wait_us.min(longest);
            let changed = (wait != wait_us).then_some(Change::WaitClamped);
            let proposal = RoutingDecision::Place { ranked: RankedRows::first_of(ranked), wait_us: wait, colocate };
            Ok(Validated { proposal, changed })
        }
    }
}

fn distinct(named: impl Iterator<Item = u32>, rows: usize, marks: &mut RowMarks) -> Result<(), Malformed> {
    marks.reset(rows);
    for row in named {
        marks.mark(row)?;
    }
    Ok(())
}

/// Order. Afterwards `marks` tells which rows were named.
pub fn ranking(proposal: Ranking, ranked: &[u32], rows: usize, marks: &mut RowMarks) -> Checked<OrderDecision> {
    distinct(ranked.iter().copied(), rows, marks)?;
    let tpot_target_us = match proposal.tpot_target_us {
        u32::MAX => None,
        target if target < TPOT_TARGET_US_MIN => return Err(Malformed::TargetOutOfRange),
        target => Some(target),
    };
    Ok(Validated::as_is(OrderDecision { named: ranked.len(), rest: proposal.rest, tpot_target_us }))
}

/// Does a ranking say nothing at all?
pub fn is_silent(proposal: Ranking, ranked: &[u32]) -> bool {
    ranked.is_empty() && proposal.rest == Rest::Append && proposal.tpot_target_us == u32::MAX
}

/// Victims: the checked ones are written to `out`, at most `take` of them.
pub fn victims(
    proposal: &[Yielder],
    rows: usize,
    take: u64,
    marks: &mut RowMarks,
    out: &mut Vec<Victim>,
) -> Checked<()> {
    out.clear();
    distinct(proposal.iter().map(|yielder| yielder.row), rows, marks)?;
    for yielder in proposal {
        let how = match yielder.how {
            0 => YieldHow::Recompute,
            1 => YieldHow::Offload,
            _ => return Err(Malformed::UnknownHow),
        };
        if (out.len() as u64) < take {
            out.push(Victim { row: yielder.row, how });
        }
    }
    let changed = (out.len() < proposal.len()).then_some(Change::VictimsCut);
    Ok(Validated { proposal: (), changed })
}

/// Eviction: one checked answer a row is written to `out`.
pub fn worths(proposal: &[Worth], rows: usize, out: &mut Vec<Priced>) -> Checked<()> {
    out.clear();
    if proposal.len() != rows {
        return Err(Malformed::WrongCount);
    }
    for worth in proposal {
        let to = match worth.to {
            0 => Tier::Drop,
            1 => Tier::Dram,
            2 => Tier::Ssd,
            _ => return Err(Malformed::UnknownTier),
        };
        out.push(Priced { price: worth.price, to });
    }
    Ok(Validated::as_is(()))
}

/// The stance in force when another is proposed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Standing {
    /// Its level.
    pub level: u8,
    /// Time at that level.
    pub held_us: u64,
}

/// What a stance is held against.
#[derive(Clone, Copy, Debug)]
pub struct StanceCheck<'a> {
    /// Of the policy that answers.
    pub terms: &'a Terms,
    /// The stance until now.
    pub standing: Standing,
    /// Is every ready replica known to be loaded?
    pub busy_founded: bool,
}

impl StanceCheck<'_> {
    /// Overload: the checked actions are written to `out`.
    pub fn stance(&self, proposal: Stance, actions: &[Action], out: &mut Vec<StanceAction>) -> Checked<Stance> {
        out.clear();
        if proposal.level > LEVEL_MAX {
            return Err(Malformed::LevelOutOfRange);
        }
        if proposal.hold_us == 0 || proposal.hold_us > STANCE_HOLD_US_MAX {
            return Err(Malformed::HoldOutOfRange);
        }
        if actions.len() > ACTIONS_MAX {
            return Err(Malformed::TooManyActions);
        }
        let mut changed = None;
        for action in actions {
            let checked = self.action(*action)?;
            if checked.kind == ActionKind::Busy && !self.busy_founded {
                changed = Some(Change::BusyDropped);
                continue;
            }
            if checked.amount != action.amount {
                changed = changed.or(Some(Change::AmountClamped));
            }
            out.push(checked);
        }
        let level = proposal.level.max(self.standing.floor());
        if level != proposal.level {
            changed = changed.or(Some(Change::LevelFallSlowed));
        }
        Ok(Validated { proposal: Stance { level, hold_us: proposal.hold_us }, changed })
    }

    fn action(&self, action: Action) -> Result<StanceAction, Malformed> {
        let kind = ActionKind::from_code(action.what).filter(|kind| self.terms.actions.has(*kind));
        let kind = kind.ok_or(Malformed::UnknownAction)?;
        let class = ClassRank::new(action.class_rank).ok_or(Malformed::ClassOutOfRange)?;
        Ok(StanceAction { kind, class, amount: in_range(kind, action.amount) })
    }
}

impl Standing {
    /// The lowest level that may follow.
    fn floor(self) -> u8 {
        let step = u8::from(self.held_us >= LEVEL_FALL_US);
        self.level.saturating_sub(step).min(LEVEL_MAX)
    }
}

/// A share is at most all; a cap leaves at least what a degrade must leave.
fn in_range(kind: ActionKind, amount: u64) -> u64 {
    match kind {
        ActionKind::ShedClass => amount.min(ALL_PPM),
        ActionKind::CapOutput => amount.max(u64::from(DEGRADED_TOKENS_MIN)),
        _ => amount,
    }
}
