//! Policies of `policies/`, compiled into the test: the same code as their components, without the wall.

use std::sync::Arc;

use penstock_base::codec::Writer;
use penstock_base::{Generation, Instant};
use penstock_journal::MachineKind;
use penstock_policy_api::{
    AdmissionPolicy, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, Policy, RestoreCause, RestoreInfo,
    RoutingPolicy,
};
use penstock_policy_sdk::Load;
use penstock_policy_sdk::native::{Bounded, ClassFirst, Ladder, Lru, OverlapLoad};
use penstock_sim::{Cast, Seats};

use super::lineup::{ADMISSION, EVICTION, FAIRNESS, Lineup, OVERLOAD, ROUTING, Seat};
use super::stingy::Stingy;

/// Seats these line-ups, the n-th generation the n-th of them, round and round.
#[derive(Clone)]
pub struct Compiled {
    lineups: Arc<[Lineup]>,
    /// Is a new instance made where line-ups differ in the instance alone?
    renews: bool,
}

impl Compiled {
    /// Instances live on where policy and parameters stay.
    pub fn lasting(lineups: &[Lineup]) -> Self {
        Self { lineups: lineups.into(), renews: false }
    }

    /// Every other instance is a new one, which takes the state of the last over.
    pub fn renewed(lineups: &[Lineup]) -> Self {
        Self { lineups: lineups.into(), renews: true }
    }
}

impl Cast for Compiled {
    fn seats(&self, _: MachineKind, _context_tokens_max: u32) -> Result<Box<dyn Seats>, String> {
        let lineup = self.lineups[0].clone();
        Ok(Box::new(CompiledSeats {
            generation: Generation(0),
            cast: self.clone(),
            admission: admission(&lineup.0[ADMISSION])?,
            routing: routing(&lineup.0[ROUTING])?,
            fairness: fairness(&lineup.0[FAIRNESS])?,
            eviction: eviction(&lineup.0[EVICTION])?,
            overload: overload(&lineup.0[OVERLOAD])?,
            lineup,
        }))
    }
}

struct CompiledSeats {
    generation: Generation,
    cast: Compiled,
    lineup: Lineup,
    admission: Box<dyn AdmissionPolicy>,
    routing: Box<dyn RoutingPolicy>,
    fairness: Box<dyn FairnessPolicy>,
    eviction: Box<dyn EvictionPolicy>,
    overload: Box<dyn OverloadPolicy>,
}

fn made<P: Load + 'static>(seat: &Seat) -> Result<Box<P>, String> {
    P::configure(&seat.parameters).map(Box::new).map_err(|error| format!("{}: {error}", seat.name))
}

fn unknown<T>(seat: &Seat) -> Result<T, String> {
    Err(format!("{} is not compiled into this test", seat.name))
}

fn admission(seat: &Seat) -> Result<Box<dyn AdmissionPolicy>, String> {
    match seat.name {
        "bounded" => Ok(made::<Bounded>(seat)?),
        "stingy" => Ok(Box::new(Stingy(made::<Bounded>(seat)?))),
        "queue-quota" => Ok(made::<penstock_admission_queue_quota::Seat>(seat)?),
        _ => unknown(seat),
    }
}

fn routing(seat: &Seat) -> Result<Box<dyn RoutingPolicy>, String> {
    match seat.name {
        "overlap-load" => Ok(made::<OverlapLoad>(seat)?),
        "load-overlap" => Ok(made::<penstock_routing_load_overlap::Seat>(seat)?),
        _ => unknown(seat),
    }
}

fn fairness(seat: &Seat) -> Result<Box<dyn FairnessPolicy>, String> {
    match seat.name {
        "class-first" => Ok(made::<ClassFirst>(seat)?),
        "vtc" => Ok(made::<penstock_fairness_vtc::Seat>(seat)?),
        "round-robin" => Ok(made::<penstock_fairness_round_robin::Seat>(seat)?),
        _ => unknown(seat),
    }
}

fn eviction(seat: &Seat) -> Result<Box<dyn EvictionPolicy>, String> {
    match seat.name {
        "lru" => Ok(made::<Lru>(seat)?),
        "gdsf" => Ok(made::<penstock_eviction_gdsf::Seat>(seat)?),
        _ => unknown(seat),
    }
}

fn overload(seat: &Seat) -> Result<Box<dyn OverloadPolicy>, String> {
    match seat.name {
        "ladder" => Ok(made::<Ladder>(seat)?),
        "degrade-ladder" => Ok(made::<penstock_overload_degrade_ladder::Seat>(seat)?),
        _ => unknown(seat),
    }
}

/// Hands the state on as the host does: from a policy to the next of its name, as of now.
fn hand_over<P: Policy + ?Sized>(
    (seat, now): (&mut Box<P>, Instant),
    (old, new): (&Seat, &Seat),
    renews: bool,
    make: fn(&Seat) -> Result<Box<P>, String>,
) -> Result<(), String> {
    let is_same = old.name == new.name && old.parameters == new.parameters;
    if is_same && !(renews && old.instance != new.instance) {
        return Ok(());
    }
    let before = std::mem::replace(seat, make(new)?);
    if old.name != new.name {
        return Ok(());
    }
    let (mut before, now_us) = (before, now.as_us());
    let mut state = Writer::new();
    before.save(&mut state).map_err(|fault| format!("{} does not save: {fault:?}", old.name))?;
    let schema = before.terms().state_schema;
    let info = RestoreInfo { schema, cause: RestoreCause::Swap, saved_now_us: now_us, now_us, elapsed_us: 0 };
    seat.restore(&info, state.bytes()).map_err(|error| format!("{} does not restore: {error:?}", new.name))?;
    Ok(())
}

impl Policies for CompiledSeats {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.admission.as_mut()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.routing.as_mut()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.fairness.as_mut()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.eviction.as_mut()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.overload.as_mut()
    }
}

impl Seats for CompiledSeats {
    fn switch(&mut self, generation: Generation, now: Instant) -> Result<(), String> {
        self.generation = generation;
        let next = self.cast.lineups[generation.0 as usize % self.cast.lineups.len()].clone();
        let (old, renews) = (std::mem::replace(&mut self.lineup, next), self.cast.renews);
        let pair = |at: usize| (&old.0[at], &self.lineup.0[at]);
        hand_over((&mut self.admission, now), pair(ADMISSION), renews, admission)?;
        hand_over((&mut self.routing, now), pair(ROUTING), renews, routing)?;
        hand_over((&mut self.fairness, now), pair(FAIRNESS), renews, fairness)?;
        hand_over((&mut self.eviction, now), pair(EVICTION), renews, eviction)?;
        hand_over((&mut self.overload, now), pair(OVERLOAD), renews, overload)
    }
}
