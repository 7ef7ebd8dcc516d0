//! The seats of one machine: a set of policies in force, and how the next one takes over between two steps.

use std::fmt;
use std::mem;
use std::sync::Arc;

use penstock_base::{Generation, Instant};
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, FallbackReason, Kept, OverloadPolicy, Policies,
    Policy as _, RestoreCause, RestoreError, RoutingPolicy,
};

use crate::living::Living;
use crate::prepared::{Chair, Chairs, Machine, Prepared, Remembered, SavedSeat};
use crate::report::{PolicySink, SeatStatus, Speaker};
use crate::set::PolicySet;
use crate::worlds::World;

/// One machine's policies. Belongs to that machine's thread; moved there once.
pub struct WasmPolicies {
    generation: Generation,
    machine: Machine,
    set: Arc<PolicySet>,
    chairs: Chairs,
}

/// What became of one seat at a swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeatSwap {
    /// Which seat.
    pub decision: Decision,
    /// What became of its state.
    pub outcome: SwapOutcome,
    /// Bytes of state handed over.
    pub state_bytes: usize,
}

/// What became of a seat's state at a swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapOutcome {
    /// The same policy with the same parameters goes on.
    Unchanged,
    /// The next instance took the state over.
    Carried(Kept),
    /// The next instance starts fresh.
    Fresh(FreshReason),
}

/// Why an instance starts fresh.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreshReason {
    /// The seat changes between native and component, or to a policy of another name.
    OtherPolicy,
    /// There is no state to hand over.
    NoState,
    /// The state was not taken.
    Refused(RestoreError),
}

/// What a swap did.
#[derive(Debug)]
pub struct SwapReport {
    /// In force before.
    pub from: Generation,
    /// In force now.
    pub to: Generation,
    /// The seats that this machine asks.
    pub seats: Vec<SeatSwap>,
    /// What left. To be drained and dropped where nobody waits: ending an instance gives its memory back to the system.
    pub retired: Retired,
}

/// Seats that left.
pub struct Retired {
    machine: Machine,
    /// The former set's, those that changed, and what was prepared in vain for those that did not.
    chairs: Chairs,
}

macro_rules! each_chair {
    ($chairs:expr, $machine:expr, |$chair:ident| $body:expr) => {{
        let chairs = $chairs;
        match $machine {
            Machine::Gateway => {
                {
                    let $chair = &mut chairs.admission;
                    $body
                }
                {
                    let $chair = &mut chairs.routing;
                    $body
                }
                {
                    let $chair = &mut chairs.fairness;
                    $body
                }
                {
                    let $chair = &mut chairs.overload;
                    $body
                }
            }
            Machine::Replica => {
                {
                    let $chair = &mut chairs.fairness;
                    $body
                }
                {
                    let $chair = &mut chairs.eviction;
                    $body
                }
            }
        }
    }};
}

impl WasmPolicies {
    /// The first set of a machine.
    pub fn new(prepared: Prepared, generation: Generation) -> Self {
        Self { generation, machine: prepared.machine, set: prepared.set, chairs: prepared.chairs }
    }

    /// The set in force.
    pub fn set(&self) -> &Arc<PolicySet> {
        &self.set
    }

    /// The machine that it serves.
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// Switches to `prepared`, which must be for the same kind of machine, between two steps. State goes from a policy to its successor
    /// of the same name; whatever fails on the way costs that seat its state and never the swap.
    pub fn swap(&mut self, prepared: Prepared, generation: Generation, now: Instant) -> SwapReport {
        debug_assert_eq!(prepared.machine, self.machine, "an instance belongs to one machine");
        let from = mem::replace(&mut self.generation, generation);
        self.set = prepared.set;
        let mut next = prepared.chairs;
        let now_us = now.as_us();
        let (old, new) = (&mut self.chairs, &mut next);
        let seats = match self.machine {
            Machine::Gateway => vec![
                take_over(&mut old.admission, &mut new.admission, now_us),
                take_over(&mut old.routing, &mut new.routing, now_us),
                take_over(&mut old.fairness, &mut new.fairness, now_us),
                take_over(&mut old.overload, &mut new.overload, now_us),
            ],
            Machine::Replica => vec![
                take_over(&mut old.fairness, &mut new.fairness, now_us),
                take_over(&mut old.eviction, &mut new.eviction, now_us),
            ],
        };
        SwapReport { from, to: generation, seats, retired: Retired { machine: self.machine, chairs: next } }
    }

    /// Gives saved states back, e.g. those of the process before this one. How much time has passed is what each snapshot says.
    pub fn resume(&mut self, remembered: &Remembered, cause: RestoreCause, now: Instant) -> Vec<SeatSwap> {
        let mut seats = Vec::new();
        each_chair!(&mut self.chairs, self.machine, |chair| {
            seats.push(resume(chair, remembered, cause, now.as_us()));
        });
        seats
    }

    /// Takes the snapshots that are due. Called by the driver between two steps; costs nothing when none is.
    pub fn between_steps(&mut self, now: Instant) {
        each_chair!(&mut self.chairs, self.machine, |chair| if let Some(living) = chair.living_mut() {
            living.between_steps(now.as_us());
        });
    }

    /// The last snapshots, for a trial restore elsewhere or for a file. Asks no instance.
    pub fn remembered(&mut self) -> Remembered {
        let mut remembered = Remembered::default();
        each_chair!(&mut self.chairs, self.machine, |chair| remember(chair, &mut remembered));
        remembered
    }

    /// The host refused an answer of this seat. Faults inside a component are counted where they happen and change nothing here.
    pub fn strike(&mut self, decision: Decision, reason: FallbackReason) {
        fn strike<W: World>(chair: &mut Chair<W>, reason: FallbackReason) {
            if let Some(living) = chair.living_mut() {
                living.strike(reason);
            }
        }
        match decision {
            Decision::Admission => strike(&mut self.chairs.admission, reason),
            Decision::Routing => strike(&mut self.chairs.routing, reason),
            Decision::Fairness => strike(&mut self.chairs.fairness, reason),
            Decision::Eviction => strike(&mut self.chairs.eviction, reason),
            Decision::Overload => strike(&mut self.chairs.overload, reason),
        }
    }

    /// The seats that are in quarantine: their default answers, and the publication may return to the last good set.
    pub fn quarantined(&mut self) -> Vec<Decision> {
        let mut out = Vec::new();
        each_chair!(&mut self.chairs, self.machine, |chair| {
            out.extend(chair.living().filter(|living| living.is_quarantined()).map(decision_of));
        });
        out
    }

    /// Fuel of the last call of a seat; 0 when it is native or was not asked.
    pub fn last_fuel(&self, decision: Decision) -> u64 {
        fn of<W: World>(chair: &Chair<W>) -> u64 {
            chair.living().map_or(0, Living::last_fuel)
        }
        match decision {
            Decision::Admission => of(&self.chairs.admission),
            Decision::Routing => of(&self.chairs.routing),
            Decision::Fairness => of(&self.chairs.fairness),
            Decision::Eviction => of(&self.chairs.eviction),
            Decision::Overload => of(&self.chairs.overload),
        }
    }

    /// Counts how often a seat's instance was made anew.
    pub fn rebuilds(&self, decision: Decision) -> u64 {
        fn of<W: World>(chair: &Chair<W>) -> u64 {
            chair.living().map_or(0, Living::rebuilds)
        }
        match decision {
            Decision::Admission => of(&self.chairs.admission),
            Decision::Routing => of(&self.chairs.routing),
            Decision::Fairness => of(&self.chairs.fairness),
            Decision::Eviction => of(&self.chairs.eviction),
            Decision::Overload => of(&self.chairs.overload),
        }
    }

    /// Numbers of the seats that this machine asks.
    pub fn status(&mut self) -> Vec<SeatStatus> {
        let mut out = Vec::new();
        each_chair!(&mut self.chairs, self.machine, |chair| out.push(status(chair)));
        out
    }

    /// Hands out what the policies said since the last time.
    pub fn drain(&mut self, sink: &mut dyn PolicySink) {
        each_chair!(&mut self.chairs, self.machine, |chair| drain(chair, sink));
    }
}

impl Policies for WasmPolicies {
    fn generation(&self) -> Generation {
        self.generation
    }

    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        match &mut self.chairs.admission {
            Chair::Native { policy, .. } => policy.as_mut(),
            Chair::Wasm { living, .. } => living.as_mut(),
        }
    }

    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        match &mut self.chairs.routing {
            Chair::Native { policy, .. } => policy.as_mut(),
            Chair::Wasm { living, .. } => living.as_mut(),
        }
    }

    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        match &mut self.chairs.fairness {
            Chair::Native { policy, .. } => policy.as_mut(),
            Chair::Wasm { living, .. } => living.as_mut(),
        }
    }

    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        match &mut self.chairs.eviction {
            Chair::Native { policy, .. } => policy.as_mut(),
            Chair::Wasm { living, .. } => living.as_mut(),
        }
    }

    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        match &mut self.chairs.overload {
            Chair::Native { policy, .. } => policy.as_mut(),
            Chair::Wasm { living, .. } => living.as_mut(),
        }
    }
}

impl Retired {
    /// Hands out what the policies said last.
    pub fn drain(&mut self, sink: &mut dyn PolicySink) {
        each_chair!(&mut self.chairs, self.machine, |chair| drain(chair, sink));
    }
}

impl fmt::Debug for WasmPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WasmPolicies")
            .field("generation", &self.generation)
            .field("machine", &self.machine)
            .field("set", &self.set.digest())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Retired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retired").field("machine", &self.machine).finish_non_exhaustive()
    }
}

fn decision_of<W: World>(_: &Living<W>) -> Decision {
    W::DECISION
}

/// Puts the next chair in the place of the old one, which is left in `new`.
fn take_over<W: World>(old: &mut Chair<W>, new: &mut Chair<W>, now_us: u64) -> SeatSwap {
    let decision = W::DECISION;
    let is_well = old.living().is_none_or(|living| !living.is_quarantined());
    if old.spec() == new.spec() && is_well {
        return SeatSwap { decision, outcome: SwapOutcome::Unchanged, state_bytes: 0 };
    }
    let (outcome, state_bytes) = match (old.living_mut(), new.living_mut()) {
        (Some(before), Some(next)) if before.terms().name == next.terms().name => match before.carry_out(now_us) {
            None => (SwapOutcome::Fresh(FreshReason::NoState), 0),
            Some(carried) => {
                let bytes = carried.snapshot.bytes.len();
                (outcome_of(next.carry_in(carried, now_us)), bytes)
            }
        },
        _ => (SwapOutcome::Fresh(FreshReason::OtherPolicy), 0),
    };
    mem::swap(old, new);
    SeatSwap { decision, outcome, state_bytes }
}

fn outcome_of(taken: Result<Kept, RestoreError>) -> SwapOutcome {
    match taken {
        Ok(kept) => SwapOutcome::Carried(kept),
        Err(error) => SwapOutcome::Fresh(FreshReason::Refused(error)),
    }
}

fn resume<W: World>(chair: &mut Chair<W>, remembered: &Remembered, cause: RestoreCause, now_us: u64) -> SeatSwap {
    let decision = W::DECISION;
    let fresh = |reason| SeatSwap { decision, outcome: SwapOutcome::Fresh(reason), state_bytes: 0 };
    let Some(saved) = remembered.seat(decision) else { return fresh(FreshReason::NoState) };
    let Some(living) = chair.living_mut().filter(|living| living.terms().name == saved.policy) else {
        return fresh(FreshReason::OtherPolicy);
    };
    let info = saved.snapshot.info(cause, now_us);
    let outcome = outcome_of(living.restore(&info, &saved.snapshot.bytes));
    SeatSwap { decision, outcome, state_bytes: saved.snapshot.bytes.len() }
}

fn remember<W: World>(chair: &Chair<W>, into: &mut Remembered) {
    if let Some(living) = chair.living()
        && let Some(snapshot) = living.snapshot()
    {
        into.set(W::DECISION, SavedSeat { policy: living.terms().name.clone(), snapshot: snapshot.clone() });
    }
}

fn status<W: World>(chair: &Chair<W>) -> SeatStatus {
    match chair {
        Chair::Wasm { living, .. } => living.status(),
        Chair::Native { policy, .. } => SeatStatus::native(W::DECISION, policy.terms()),
    }
}

fn drain<W: World>(chair: &mut Chair<W>, sink: &mut dyn PolicySink) {
    let Some(living) = chair.living_mut() else { return };
    let policy = living.terms().name.clone();
    let from = Speaker { decision: W::DECISION, policy: &policy, component: living.setup().component.digest() };
    let (happenings, dropped) = living.take_happenings();
    let notes = living.notes_mut();
    for line in notes.lines.drain(..) {
        sink.log(from, line);
    }
    match mem::take(&mut notes.lines_dropped) {
        0 => {}
        lines => sink.lines_dropped(from, lines),
    }
    for (name, sum) in &mut notes.counters {
        match mem::take(sum) {
            0 => {}
            by => sink.count(from, name, by),
        }
    }
    match mem::take(&mut notes.counts_dropped) {
        0 => {}
        counts => sink.counts_dropped(from, counts),
    }
    for happening in happenings {
        sink.happened(from, happening);
    }
    if dropped > 0 {
        sink.happenings_dropped(from, dropped);
    }
}
