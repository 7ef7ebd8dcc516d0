//! Where does what a machine may ask end? Nobody to choose from, one, the most there are; nothing known, all zero, all of the largest
//! number, and columns that rise and fall.

use penstock_base::{ClassRank, Priority, RequestId, Traits, limits};
use penstock_policy_api::validate::Standing;
use penstock_policy_api::{
    CommonSignal, Fact, FactKind, Fill, Question as Which, RequestRecord, RoutingPhase, Signal, Table,
};

use crate::dice::Dice;
use crate::moment::{Context, Moment, Question, Rows, plain_request};

/// What the values of an edge are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// Unknown wherever the registry lets them be, else the row's number, from 1.
    Unknown,
    /// All 0.
    Zero,
    /// All 2^64 - 1.
    Most,
    /// Each row more than the one before.
    Rising,
    /// Each row less than the one before.
    Falling,
    /// Every bit drawn, so that nothing is in order and nothing equal.
    Drawn,
}

impl Values {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Unknown, Self::Zero, Self::Most, Self::Rising, Self::Falling, Self::Drawn];

    fn of(self, dice: &mut Dice, fill: Fill, row: usize) -> Option<u64> {
        let row = row as u64;
        match self {
            Self::Unknown => (fill == Fill::Required).then_some(row + 1),
            Self::Zero => Some(0),
            Self::Most => Some(u64::MAX),
            Self::Rising => Some(row),
            Self::Falling => Some((1 << 20) - row),
            Self::Drawn => Some(dice.bits()),
        }
    }

    fn request(self) -> RequestRecord {
        match self {
            Self::Unknown | Self::Rising | Self::Falling => plain_request(),
            Self::Zero => RequestRecord {
                request_id: RequestId(0),
                tenant_id: 0,
                flow_id: 0,
                class_rank: ClassRank::clamped(0),
                attempt: 0,
                sequences: 0,
                priority: Priority(i32::MIN),
                input_tokens: 0,
                max_output_tokens: 0,
                deadline_us: 0,
                ..plain_request()
            },
            Self::Most | Self::Drawn => RequestRecord {
                request_id: RequestId(u64::MAX),
                tenant_id: u64::MAX,
                flow_id: u64::MAX,
                session_id: u64::MAX,
                class_rank: ClassRank::clamped(u8::MAX),
                attempt: u8::MAX,
                sequences: u16::MAX,
                priority: Priority(i32::MAX),
                input_tokens: u32::MAX,
                max_output_tokens: u32::MAX,
                deadline_us: u64::MAX,
                traits: Traits(u32::MAX),
            },
        }
    }

    fn context<S: Signal>(self, dice: &mut Dice) -> Context<S> {
        let mut bits = dice.clone();
        Context::of(
            |which: CommonSignal| self.of(dice, which.info().fill, 0),
            |which: S| self.of(&mut bits, which.info().fill, 0),
        )
    }

    fn rows<S: Signal>(self, dice: &mut Dice, count: usize) -> Rows<S> {
        // The class table's rows are its ranks, whatever else is the matter.
        let is_rank = |which: S| S::TABLE == Table::Class && which.info().name == "class-rank";
        Rows::of(
            count,
            |which: S, row| {
                if is_rank(which) { Some(row as u64) } else { self.of(dice, which.info().fill, row) }
            },
        )
    }
}

/// Most candidates of a question; of overload's, most replicas.
pub const fn rows_max(which: Which) -> usize {
    match which {
        Which::Admission => 0,
        Which::Routing | Which::Overload => limits::ROUTING_ROWS_MAX,
        Which::Order => limits::ORDER_ROWS_MAX,
        Which::Victims => limits::VICTIM_ROWS_MAX,
        Which::Eviction => limits::EVICTION_ROWS_MAX,
    }
}

/// One question over `rows` candidates, at the time 0 of all zeros, the end of time of the largest numbers, and in between otherwise.
pub fn moment(which: Which, values: Values, rows: usize) -> Moment {
    let dice = &mut Dice::new(rows as u64);
    let now_us = match values {
        Values::Zero => 0,
        // The core's time is 64 bits of nanoseconds.
        Values::Most => u64::MAX / 1_000,
        _ => 1 << 40,
    };
    let question = match which {
        Which::Admission => {
            Question::Admission { request: values.request(), deferrals: 0, context: values.context(dice) }
        }
        Which::Routing => Question::Routing {
            request: values.request(),
            phase: RoutingPhase::Whole,
            context: values.context(dice),
            replicas: values.rows(dice, rows),
        },
        Which::Order => Question::Order { context: values.context(dice), waiting: values.rows(dice, rows) },
        Which::Victims => Question::Victims { context: values.context(dice), running: values.rows(dice, rows) },
        Which::Eviction => Question::Eviction { context: values.context(dice), runs: values.rows(dice, rows) },
        Which::Overload => Question::Overload {
            context: values.context(dice),
            classes: values.rows(dice, ClassRank::COUNT),
            replicas: values.rows(dice, rows),
            standing: Standing::default(),
        },
    };
    Moment { now_us, facts: Vec::new(), question }
}

/// The largest batch of facts of one kind: all 0, all of the largest number, or each about somebody else.
pub fn facts(kind: FactKind, values: Values, from: u64) -> Vec<Fact> {
    let dice = &mut Dice::new(from);
    let fact = |row: usize| {
        let mut slots = [0; 6];
        for (at, slot) in slots.iter_mut().enumerate().take(kind.slots().len()) {
            // What a fact is about comes first.
            let about = if at == 0 { from.wrapping_add(row as u64) } else { 1 };
            *slot = if values == Values::Unknown { about } else { values.of(dice, Fill::Required, row).unwrap_or(0) };
        }
        Fact { kind, at_us: 1 << 40, slots }
    };
    (0..limits::FACTS_BATCH_MAX).map(fact).collect()
}
