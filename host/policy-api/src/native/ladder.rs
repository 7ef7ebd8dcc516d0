//! Native overload: a ladder of four steps over the worst of three saturations, with hysteresis.

use alloc::vec::Vec;

use penstock_base::ClassRank;
use penstock_base::codec::{DecodeError, Reader, Writer};

use crate::call::Call;
use crate::declare::{ActionSet, Declaration, Declared, InContext, OverloadDeclaration, OverloadRows, Terms};
use crate::generated::{ActionKind, CommonSignal, OverloadSignal};
use crate::matrix::{Context, Matrix};
use crate::policy::{Kept, OverloadPolicy, OverloadQuestion, Policy, RestoreError, RestoreInfo};
use crate::proposal::{Action, Answer, FaultKind, Stance};
use crate::sat;

use super::{is_known, positions};

positions! { class_at: ClassSignal {
    OLDEST_WAIT = OldestWaitUs,
    SLO_TTFT = SloTtftUs,
} }
positions! { replica_at: ReplicaSignal {
    KNOWN = KnownMask,
    LOAD_AGE = LoadAgeUs,
    TOTAL = TotalBlocks,
    ACTIVE = ActiveBlocks,
    UNREPORTED = UnreportedBlocks,
} }

const CONTEXT: [InContext<OverloadSignal>; 3] = [
    InContext::Own(OverloadSignal::QueuedTokens),
    InContext::Own(OverloadSignal::QueueLimitTokens),
    InContext::Common(CommonSignal::StaleLoadUs),
];
const QUEUED_TOKENS: usize = 0;
const QUEUE_LIMIT_TOKENS: usize = 1;
const STALE_LOAD: usize = 2;

const ONE_PPM: u64 = 1_000_000;
/// Share of a pool that counts as all of it: the rest is room for what runs to grow.
pub const FULL_PPM: u64 = 900_000;
/// Saturation from which each step stands.
const STEPS_PPM: [u64; 4] = [800_000, 900_000, 1_000_000, 1_200_000];
/// How far below its step the saturation falls before the step is left.
const HYSTERESIS_PPM: u64 = 100_000;
/// How long a stance holds without another call.
const HOLD_US: u32 = 1_000_000;
/// Output cap from the second step on.
const CAP_OUTPUT_TOKENS: u64 = 512;
/// An input is long beyond this part of the context window.
const LONG_DIVISOR: u64 = 4;
/// Classes that long inputs are refused for, and that are shed a step later.
const SHED_CLASS: u8 = 2;

const SCHEMA: u32 = 1;

/// Blocks in use, as parts per million of what may be used; 0 without blocks.
pub fn saturation_ppm(used_blocks: u64, total_blocks: u64) -> u64 {
    // used / (0.9 * total) in millionths is used * 10^12 / (total * 900,000); in 128 bits, so that no pool saturates early.
    let usable = u128::from(total_blocks) * u128::from(FULL_PPM);
    let scaled = u128::from(used_blocks) * u128::from(ONE_PPM * ONE_PPM);
    scaled.checked_div(usable).map_or(0, |ppm| u64::try_from(ppm).unwrap_or(u64::MAX))
}

/// The level after one look at `saturation_ppm`: up at once, down only when the saturation has fallen 0.1 below the step.
pub fn level_after(level: u8, saturation_ppm: u64) -> u8 {
    let steps = |above: u64| STEPS_PPM.iter().filter(|step| saturation_ppm >= **step - above).count() as u8;
    steps(0).max(level.min(steps(HYSTERESIS_PPM)))
}

/// Four steps: pause background work; cap outputs and refuse long inputs; shed below the default class; tell everyone when all is full.
#[derive(Debug)]
pub struct Ladder {
    declaration: OverloadDeclaration,
    /// Set at the start; long is a part of it.
    context_window_tokens: u32,
    /// The step it stands on; changed by each decision.
    level: u8,
}

impl Ladder {
    /// A ladder on its lowest step.
    pub fn new(context_window_tokens: u32) -> Self {
        let mut terms = Terms::native("ladder");
        terms.actions = ActionSet::all();
        terms.state_schema = SCHEMA;
        let rows =
            OverloadRows { classes: Declared::exactly(class_at::ALL), replicas: Declared::exactly(replica_at::ALL) };
        let declaration = Declaration { terms, context: Declared::exactly(&CONTEXT), rows };
        Self { declaration, context_window_tokens, level: 0 }
    }

    /// The step it stands on.
    pub fn level(&self) -> u8 {
        self.level
    }

    /// Writes window and level.
    pub fn encode(&self, out: &mut Writer) {
        out.u32(self.context_window_tokens);
        out.u8(self.level);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut ladder = Self::new(from.u32()?);
        ladder.level = read_level(from)?;
        Ok(ladder)
    }

    /// The actions of the level, each step adding its own.
    fn act(&self, all_full: bool, actions: &mut Vec<Action>) {
        let mut push =
            |kind: ActionKind, class_rank, amount| actions.push(Action { what: kind.code(), class_rank, amount });
        if self.level >= 1 {
            push(ActionKind::PauseClass, 0, 0);
        }
        if self.level >= 2 {
            push(ActionKind::CapOutput, ClassRank::MAX.get(), CAP_OUTPUT_TOKENS);
            push(ActionKind::RefuseLong, SHED_CLASS, u64::from(self.context_window_tokens) / LONG_DIVISOR);
        }
        if self.level >= 3 {
            push(ActionKind::ShedClass, SHED_CLASS, ONE_PPM);
        }
        if self.level >= 4 && all_full {
            push(ActionKind::Busy, ClassRank::MAX.get(), 0);
        }
    }
}

fn read_level(from: &mut Reader<'_>) -> Result<u8, DecodeError> {
    let level = from.u8()?;
    if usize::from(level) > STEPS_PPM.len() { Err(DecodeError::Invalid("ladder level")) } else { Ok(level) }
}

/// The worst of pool, queue and wait. Stale replicas count with their last value, replicas that never reported not at all; a term without
/// a denominator is 0.
fn worst_ppm(context: Context<'_>, classes: &Matrix, replicas: &Matrix) -> u64 {
    let (mut used, mut total) = (0, 0);
    for row in (0..replicas.rows()).filter(|row| is_known(replicas.get(*row, replica_at::KNOWN), replica_at::ACTIVE)) {
        let held = sat::add(replicas.get(row, replica_at::ACTIVE), replicas.get(row, replica_at::UNREPORTED));
        used = sat::add(used, held);
        total = sat::add(total, replicas.get(row, replica_at::TOTAL));
    }
    let pool = saturation_ppm(used, total);
    let queue = sat::mul_div(ONE_PPM, context.get(QUEUED_TOKENS), context.get(QUEUE_LIMIT_TOKENS)).unwrap_or(0);
    let wait = |row| {
        let target = classes.get(row, class_at::SLO_TTFT);
        sat::mul_div(ONE_PPM, classes.get(row, class_at::OLDEST_WAIT), target).unwrap_or(0)
    };
    (0..classes.rows()).map(wait).fold(pool.max(queue), u64::max)
}

/// Is every replica known, fresh and without a block to give?
fn all_full(context: Context<'_>, replicas: &Matrix) -> bool {
    let full = |row: usize| {
        let cell = |position| replicas.get(row, position);
        let known = is_known(cell(replica_at::KNOWN), replica_at::ACTIVE) && cell(replica_at::TOTAL) > 0;
        let fresh = cell(replica_at::LOAD_AGE) < context.get(STALE_LOAD);
        known && fresh && sat::add(cell(replica_at::ACTIVE), cell(replica_at::UNREPORTED)) >= cell(replica_at::TOTAL)
    };
    replicas.rows() > 0 && (0..replicas.rows()).all(full)
}

impl Policy for Ladder {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }

    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        out.u8(self.level);
        Ok(())
    }

    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.level = 0;
        if info.schema != SCHEMA {
            return Err(RestoreError::UnknownSchema);
        }
        let mut from = Reader::new(state);
        let level = read_level(&mut from)?;
        from.finish()?;
        self.level = level;
        Ok(Kept::Kept)
    }
}

impl OverloadPolicy for Ladder {
    fn describe(&self) -> &OverloadDeclaration {
        &self.declaration
    }

    fn decide(&mut self, _call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let worst = worst_ppm(asked.context, asked.classes, asked.replicas);
        self.level = level_after(self.level, worst);
        self.act(all_full(asked.context, asked.replicas), actions);
        Answer::Proposal(Stance { level: self.level, hold_us: HOLD_US })
    }
}
