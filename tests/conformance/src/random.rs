//! What could a machine ask? Seeded moments within the registry's ranges: every value is one that a host may pass.

use penstock_base::{ClassRank, Priority, RequestId, Traits, limits};
use penstock_policy_api::validate::Standing;
use penstock_policy_api::{
    ClassSignal, CommonSignal, Decision, Fact, FactKind, Fill, Kind, OverloadSignal, ReplicaSignal, RequestRecord,
    RoutingPhase, RunSignal, Signal, SignalInfo, Unit, WaitingSignal,
};

use crate::dice::Dice;
use crate::moment::{Context, Moment, Question, Rows};

/// Flows, tenants, sessions and replicas of the random world: few, so that they meet again.
const FLOWS: u64 = 12;

/// `count` moments for policies of `decision`, with time going on between them.
pub fn moments(decision: Decision, seed: u64, count: usize) -> Vec<Moment> {
    let mut dice = Dice::new(seed);
    let mut now_us = 1_000_000 + dice.below(1 << 40);
    (0..count)
        .map(|_| {
            let facts = facts(&mut dice, decision, &mut now_us);
            now_us += dice.below(200_000);
            Moment { now_us, facts, question: question(&mut dice, decision, now_us) }
        })
        .collect()
}

/// A few things that happened, each of a kind that goes to `decision`.
fn facts(dice: &mut Dice, decision: Decision, now_us: &mut u64) -> Vec<Fact> {
    let kinds: Vec<FactKind> =
        FactKind::ALL.iter().copied().filter(|kind| kind.goes_to().contains(&decision)).collect();
    let count = if dice.once_in(20) { limits::FACTS_BATCH_MAX as u64 } else { dice.below(8) };
    (0..count)
        .map(|_| {
            *now_us += dice.below(5_000);
            let kind = dice.pick(&kinds);
            fact(dice, kind, *now_us)
        })
        .collect()
}

/// One fact of that kind, with numbers that its slots may hold.
pub fn fact(dice: &mut Dice, kind: FactKind, at_us: u64) -> Fact {
    let mut slots = [0; 6];
    for (slot, name) in slots.iter_mut().zip(kind.slots()) {
        *slot = match *name {
            "flow-id" | "tenant-id" | "session-id" | "replica-id" => 1 + dice.below(FLOWS),
            "class-rank" => dice.below(8),
            "weight-ppm" | "speed-ppm" => 1 + dice.below(4_000_000),
            "role-code" => 1 + dice.below(3),
            "verdict-code" | "outcome-code" | "reason-code" | "how-code" | "cause-code" | "to-code" => dice.below(4),
            name if name.ends_with("-flag") => dice.below(2),
            name if name.ends_with("-rank") => dice.below(5),
            name if name.ends_with("-us") => dice.below(30_000_000),
            _ => dice.below(5_000),
        };
    }
    Fact { kind, at_us, slots }
}

/// One question to policies of `decision`.
fn question(dice: &mut Dice, decision: Decision, now_us: u64) -> Question {
    match decision {
        Decision::Admission => {
            let request = request(dice, now_us);
            Question::Admission { request, deferrals: dice.below(9) as u32, context: context(dice) }
        }
        Decision::Routing => {
            let phase =
                dice.pick(&[RoutingPhase::Whole, RoutingPhase::Whole, RoutingPhase::Decode, RoutingPhase::Prefill]);
            let count = window(dice, limits::ROUTING_ROWS_DEFAULT, limits::ROUTING_ROWS_MAX);
            let replicas = replicas(dice, count);
            Question::Routing { request: request(dice, now_us), phase, context: context(dice), replicas }
        }
        Decision::Fairness if dice.once_in(3) => {
            let count = window(dice, limits::VICTIM_ROWS_DEFAULT, limits::VICTIM_ROWS_MAX);
            Question::Victims { context: context(dice), running: rows(dice, count) }
        }
        Decision::Fairness => {
            let count = window(dice, limits::ORDER_ROWS_DEFAULT, limits::ORDER_ROWS_MAX);
            Question::Order { context: context(dice), waiting: waiting(dice, count) }
        }
        Decision::Eviction => {
            let count = window(dice, limits::EVICTION_ROWS_DEFAULT, limits::EVICTION_ROWS_MAX);
            let mut runs: Rows<RunSignal> = rows(dice, count);
            for row in 0..count {
                runs.set(row, RunSignal::RunBlocks, Some(1 + dice.below(64)));
            }
            Question::Eviction { context: context(dice), runs }
        }
        Decision::Overload => {
            let count = window(dice, limits::ROUTING_ROWS_DEFAULT, limits::ROUTING_ROWS_MAX);
            let (context, classes, replicas) = pressed(dice, count);
            let standing = Standing { level: dice.below(5) as u8, held_us: dice.below(3_000_000) };
            Question::Overload { context, classes, replicas, standing }
        }
    }
}

/// A house under some pressure, from none to half as much again as it can bear, with every part of it at most so full. Drawn apart they
/// would nearly always be beyond all bounds.
fn pressed(dice: &mut Dice, count: usize) -> (Context<OverloadSignal>, Rows<ClassSignal>, Rows<ReplicaSignal>) {
    let pressure = dice.below(151);
    let part = |dice: &mut Dice, of: u64| of * pressure / 100 * dice.below(101) / 100;
    let mut context: Context<OverloadSignal> = context(dice);
    let limit = 1_000 + dice.below(1_000_000);
    context.own[OverloadSignal::QueueLimitTokens.index()] = Some(limit);
    context.own[OverloadSignal::QueuedTokens.index()] = Some(part(dice, limit));
    let finished = dice.below(200);
    context.own[OverloadSignal::FinishedRequests.index()] = Some(finished);
    context.own[OverloadSignal::MissedRequests.index()] = Some(part(dice, finished / 4));
    let mut classes: Rows<ClassSignal> = rows(dice, ClassRank::COUNT);
    for rank in 0..ClassRank::COUNT {
        let target = 50_000 + dice.below(10_000_000);
        classes.set(rank, ClassSignal::ClassRank, Some(rank as u64));
        classes.set(rank, ClassSignal::SloTtftUs, Some(if dice.once_in(3) { u64::MAX } else { target }));
        classes.set(rank, ClassSignal::OldestWaitUs, Some(part(dice, target)));
    }
    let mut replicas = replicas(dice, count);
    for row in 0..count {
        let total = 64 + dice.below(100_000);
        replicas.set(row, ReplicaSignal::TotalBlocks, Some(total));
        replicas.set(row, ReplicaSignal::ActiveBlocks, (!dice.once_in(16)).then(|| part(dice, total).min(total)));
        replicas.set(row, ReplicaSignal::UnreportedBlocks, Some(part(dice, total / 8)));
    }
    (context, classes, replicas)
}

/// How many candidates: mostly few, at times the window, seldom the most there are.
fn window(dice: &mut Dice, usual: usize, most: usize) -> usize {
    match dice.below(40) {
        0 => most,
        1..=4 => usual,
        5..=7 => 0,
        8..=11 => 1,
        _ => 2 + dice.below(16) as usize,
    }
}

fn context<S: Signal>(dice: &mut Dice) -> Context<S> {
    let common = CommonSignal::ALL.iter().map(|signal| value(dice, signal.info())).collect::<Vec<_>>();
    Context::of(|which: CommonSignal| common[which.index()], |which: S| value(dice, which.info()))
}

fn rows<S: Signal>(dice: &mut Dice, count: usize) -> Rows<S> {
    // Whole columns are unknown at once more often than single cells: a source is there or it is not.
    let absent: Vec<bool> = S::ALL.iter().map(|_| dice.once_in(10)).collect();
    Rows::of(count, |which: S, _| {
        let known = value(dice, which.info());
        if absent[which.index()] && which.info().fill != Fill::Required { None } else { known }
    })
}

/// Ids ascend, as in host order.
fn replicas(dice: &mut Dice, count: usize) -> Rows<ReplicaSignal> {
    let mut replicas: Rows<ReplicaSignal> = rows(dice, count);
    let mut id = 0;
    for row in 0..count {
        id += 1 + dice.below(3);
        replicas.set(row, ReplicaSignal::ReplicaId, Some(id));
        // A total that its parts fit in is the usual case, one that they do not is a report between two states.
        if !dice.once_in(8) {
            let total = 64 + dice.below(100_000);
            let active = dice.below(total + 1);
            replicas.set(row, ReplicaSignal::TotalBlocks, Some(total));
            replicas.set(row, ReplicaSignal::ActiveBlocks, Some(active));
            replicas.set(row, ReplicaSignal::FreeBlocks, Some(total - active));
        }
    }
    replicas
}

/// The n-th row of a flow says that n are ahead of it.
fn waiting(dice: &mut Dice, count: usize) -> Rows<WaitingSignal> {
    let mut waiting: Rows<WaitingSignal> = rows(dice, count);
    let mut ahead = std::collections::BTreeMap::<u64, u64>::new();
    for row in 0..count {
        let flow = 1 + dice.below(FLOWS);
        let place = ahead.entry(flow).or_default();
        waiting.set(row, WaitingSignal::FlowId, Some(flow));
        waiting.set(row, WaitingSignal::FlowCount, Some(*place));
        waiting.set(row, WaitingSignal::RequestId, Some(1_000 + row as u64));
        *place += 1;
    }
    waiting
}

fn request(dice: &mut Dice, now_us: u64) -> RequestRecord {
    let deadline_us = if dice.once_in(3) { now_us + dice.below(60_000_000) } else { u64::MAX };
    RequestRecord {
        request_id: RequestId(dice.bits() >> 1),
        tenant_id: dice.below(FLOWS),
        flow_id: 1 + dice.below(FLOWS),
        session_id: dice.below(FLOWS),
        class_rank: ClassRank::clamped(dice.below(8) as u8),
        attempt: 1 + dice.below(4) as u8,
        sequences: 1 + dice.below(8) as u16,
        priority: Priority(dice.below(201) as i32 - 100),
        input_tokens: 1 + number(dice) as u32 % 131_072,
        max_output_tokens: 1 + number(dice) as u32 % 65_536,
        deadline_us,
        traits: Traits(dice.below(128) as u32),
    }
}

/// A value of that signal, or unknown where it may be.
fn value(dice: &mut Dice, info: &SignalInfo) -> Option<u64> {
    let is_unknown = info.fill != Fill::Required && dice.once_in(8);
    let known = match info.kind {
        Kind::Bool => dice.below(2),
        Kind::Rank if info.name == "retention-rank" => dice.below(101),
        Kind::Rank => dice.below(8),
        Kind::Enum if info.name == "role-code" => 1 + dice.below(3),
        Kind::Enum => dice.below(8),
        Kind::Id | Kind::Hash => 1 + dice.below(FLOWS),
        Kind::Ppm => 1 + dice.below(4_000_000),
        Kind::Age => match dice.below(4) {
            0 => 0,
            1 => dice.below(100_000),
            2 => dice.below(10_000_000),
            _ => u64::MAX,
        },
        Kind::Price => dice.bits() >> dice.below(64),
        Kind::Mask => return None,
        Kind::Int if info.unit == Unit::Biased => (1 << 31) + dice.below(201) - 100,
        Kind::Int if info.fill == Fill::Number(u64::MAX) && dice.once_in(4) => u64::MAX,
        Kind::Int if info.unit == Unit::Us => dice.below(60_000_000) >> dice.below(26),
        Kind::Int => number(dice),
    };
    (!is_unknown).then_some(known)
}

/// A count: of any size, small ones as often as large ones.
fn number(dice: &mut Dice) -> u64 {
    if dice.once_in(6) { 0 } else { dice.bits() >> (24 + dice.below(40)) }
}
