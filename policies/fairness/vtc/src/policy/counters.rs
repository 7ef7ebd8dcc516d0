//! How much has every flow been served? Weighted tokens, in thousandths, with idle time not banked.

use std::collections::BTreeMap;

use penstock_policy_sdk::{DecodeError, Fact, Reader, RestoreInfo, Sat, Told, Writer, host, state};

use super::Settings;
use super::lowest::Lowest;

/// Classes there are.
pub(super) const CLASSES: usize = 8;
/// Flows whose counter is kept, so that state stays near 100 KiB. A flow beyond starts level with the least served at every call.
const FLOWS_MAX: usize = 4_096;
/// A weight of one, in parts per million; and a thousandth of a token of such a flow.
const ONE_PPM: u64 = 1_000_000;
const SCALE: u64 = 1_000 * ONE_PPM;

/// One flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Flow {
    /// Thousandths of weighted tokens served, estimates of what is dispatched included. Changed by every fact about the flow.
    served: u64,
    /// Its weight when it last became active.
    weight_ppm: u64,
    /// For the class's turn.
    class: u8,
    /// Has it something waiting or dispatched?
    is_active: bool,
    /// Where it stands in the tournaments. Not saved: nothing depends on who stands where.
    place: u32,
}

/// What every flow has been served, and when each class had its last turn.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    /// By id; the saved bytes have its order.
    flows: BTreeMap<u64, Flow>,
    /// Counter of the flow that went idle last: where a newcomer to an empty house starts.
    left: u64,
    /// When a request of each class was last taken.
    turn_us: [u64; CLASSES],
    /// The counters of active flows, and those of idle ones. Derived, so not saved.
    active: Lowest,
    idle: Lowest,
    /// Places that nobody has any more.
    vacant: Vec<u32>,
}

/// Cost of weighted tokens to a flow of that weight.
pub(super) fn cost(tokens: u64, weight_ppm: u64) -> u64 {
    let weight = weight_ppm.max(1);
    Sat(tokens).times_over(SCALE, weight).unwrap_or(u64::MAX)
}

impl Counters {
    /// The counter of a flow that is known to be active.
    pub(super) fn of_active(&self, flow: u64) -> Option<u64> {
        self.flows.get(&flow).filter(|flow| flow.is_active).map(|flow| flow.served)
    }

    /// The counter to order a flow by that has something waiting and was not announced: another policy was in the seat when it came, or the
    /// fact was lost. It counts from now on like one that has just come back. Where nothing is kept of it, it stands level with the least
    /// served at every call.
    pub(super) fn meet(&mut self, flow: u64, class_rank: u64, weight_ppm: u64) -> Option<u64> {
        if self.flows.len() < FLOWS_MAX || self.flows.contains_key(&flow) {
            self.activate(flow, class_rank, weight_ppm);
        }
        self.of_active(flow)
    }

    /// The least counter of an active flow; that of the last flow to leave when there is none.
    pub(super) fn least(&self) -> u64 {
        self.active.least().map_or(self.left, |least| least.0)
    }

    /// When a request of `class` was last taken.
    pub(super) fn turn_us(&self, class: usize) -> u64 {
        self.turn_us.get(class).copied().unwrap_or(0)
    }

    /// Takes one fact.
    pub(super) fn hear(&mut self, settings: &Settings, fact: &Fact) {
        let input = |tokens: u64| (Sat(tokens) * settings.input_weight).0;
        match Told::from(fact) {
            Told::FlowActive(told) => self.activate(told.flow_id, told.class_rank, told.weight_ppm),
            Told::FlowIdle(told) => {
                if let Some(flow) = self.flows.get_mut(&told.flow_id) {
                    flow.is_active = false;
                    self.left = flow.served;
                    flow.book(told.flow_id, &mut self.active, &mut self.idle);
                }
            }
            Told::FlowGone(told) => {
                self.forget(told.flow_id);
            }
            Told::Taken(told) => {
                let class = self.flows.get_mut(&told.flow_id).map(|flow| {
                    flow.served = (Sat(flow.served) + cost(input(told.uncached_tokens), flow.weight_ppm)).0;
                    flow.book(told.flow_id, &mut self.active, &mut self.idle);
                    flow.class
                });
                if let Some(turn) = class.and_then(|class| self.turn_us.get_mut(usize::from(class))) {
                    *turn = fact.at_us;
                }
            }
            // It came back after it was taken: the estimate is undone.
            Told::Skipped(told) if told.taken_flag != 0 => {
                self.change(
                    told.flow_id,
                    |flow| Sat(0) - cost(input(told.uncached_tokens), flow.weight_ppm),
                    |flow| cost(input(told.uncached_tokens), flow.weight_ppm),
                );
            }
            // What was delivered is charged, and the estimate that it replaces is given back.
            Told::Served(told) => {
                let real = (Sat(told.prefill_tokens) * settings.input_weight
                    + Sat(told.decode_tokens) * settings.output_weight)
                    .0;
                self.change(
                    told.flow_id,
                    |flow| Sat(cost(real, flow.weight_ppm)),
                    |flow| cost(input(told.settled_tokens), flow.weight_ppm),
                );
            }
            _ => {}
        }
    }

    /// Lift: a flow that comes back starts no lower than the least served of those who stayed.
    fn activate(&mut self, id: u64, class_rank: u64, weight_ppm: u64) {
        let class = class_rank.min(CLASSES as u64 - 1) as u8;
        if let Some(flow) = self.flows.get_mut(&id) {
            let floor = self.active.least_but(flow.place).map_or(self.left, |least| least.0);
            *flow = Flow { served: flow.served.max(floor), weight_ppm, class, is_active: true, place: flow.place };
            flow.book(id, &mut self.active, &mut self.idle);
            return;
        }
        if self.flows.len() >= FLOWS_MAX && !self.make_room() {
            host::count("flows-not-kept", 1);
            return;
        }
        let served = self.least();
        self.keep(id, Flow { served, weight_ppm, class, is_active: true, place: 0 });
    }

    /// Gives a flow that is not kept yet a place.
    fn keep(&mut self, id: u64, mut flow: Flow) {
        // Places are as many as the most flows there were, so that they number themselves.
        flow.place = self.vacant.pop().unwrap_or(self.flows.len() as u32);
        flow.book(id, &mut self.active, &mut self.idle);
        self.flows.insert(id, flow);
    }

    /// Forgets the idle flow that was served least. One at or below the floor loses nothing by it: it would be lifted there. Of the others
    /// it is the one that loses least.
    fn make_room(&mut self) -> bool {
        match self.idle.least() {
            Some((_, id)) => {
                self.forget(id);
                true
            }
            None => false,
        }
    }

    fn forget(&mut self, id: u64) {
        if let Some(flow) = self.flows.remove(&id) {
            self.active.set(flow.place, None);
            self.idle.set(flow.place, None);
            self.vacant.push(flow.place);
        }
    }

    /// Adds what `more` says and takes off what `less` says.
    fn change(&mut self, id: u64, more: impl FnOnce(&Flow) -> Sat, less: impl FnOnce(&Flow) -> u64) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let (plus, minus) = (more(flow), less(flow));
        flow.served = (Sat(flow.served) + plus - minus).0;
        flow.book(id, &mut self.active, &mut self.idle);
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        out.u64(self.left);
        self.turn_us.iter().for_each(|turn| out.u64(*turn));
        state::write_map(out, &self.flows, |out, flow| {
            out.u64(flow.served);
            out.u64(flow.weight_ppm);
            out.u8(flow.class);
            out.bool(flow.is_active);
        });
    }

    pub(super) fn decode(from: &mut Reader<'_>, info: &RestoreInfo) -> Result<Self, DecodeError> {
        let left = from.u64()?;
        let mut turn_us = [0; CLASSES];
        for turn in &mut turn_us {
            *turn = info.moved(from.u64()?);
        }
        let mut flows = state::read_map(from, |from| {
            let (served, weight_ppm, class) = (from.u64()?, from.u64()?, from.u8()?);
            if usize::from(class) >= CLASSES {
                return Err(DecodeError::Invalid("flow class"));
            }
            Ok(Flow { served, weight_ppm, class, is_active: from.bool()?, place: 0 })
        })?;
        if flows.len() > FLOWS_MAX {
            return Err(DecodeError::Invalid("flow count"));
        }
        for (place, flow) in flows.values_mut().enumerate() {
            flow.place = place as u32;
        }
        let among = |is_active: bool| {
            Lowest::of(flows.iter().map(|(id, flow)| (flow.is_active == is_active).then_some((flow.served, *id))))
        };
        let (active, idle) = (among(true), among(false));
        Ok(Self { flows, left, turn_us, active, idle, vacant: Vec::new() })
    }
}

impl Flow {
    /// Enters its counter where it belongs.
    fn book(&self, id: u64, active: &mut Lowest, idle: &mut Lowest) {
        let key = (self.served, id);
        active.set(self.place, self.is_active.then_some(key));
        idle.set(self.place, (!self.is_active).then_some(key));
    }
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::facts::{FlowActive, FlowGone, FlowIdle, Served, Skipped, Taken};

    use super::*;

    const SETTINGS: Settings = Settings { input_weight: 1, output_weight: 2, age_us: 1_000, protect_emitted: true };

    fn told(facts: &[Fact]) -> Counters {
        let mut counters = Counters::default();
        facts.iter().for_each(|fact| counters.hear(&SETTINGS, fact));
        counters
    }

    impl Counters {
        fn of(&self, flow: u64) -> Option<u64> {
            self.flows.get(&flow).map(|flow| flow.served)
        }
    }

    fn active(flow_id: u64) -> Fact {
        FlowActive { flow_id, tenant_id: 1, class_rank: 3, weight_ppm: 1_000_000, idle_us: 0 }.at(0)
    }

    fn served(flow_id: u64, prefill_tokens: u64, decode_tokens: u64, settled_tokens: u64) -> Fact {
        Served { flow_id, prefill_tokens, decode_tokens, weight_ppm: 1_000_000, device_us: 0, settled_tokens }.at(0)
    }

    fn taken(flow_id: u64, uncached_tokens: u64) -> Fact {
        Taken { request_id: 1, flow_id, uncached_tokens, blocks: 0, by_policy_flag: 1, wait_us: 0 }.at(7)
    }

    #[test]
    fn an_estimate_is_replaced_by_what_was_delivered() {
        // 100 prompt tokens at dispatch; 60 were cached after all, so 40 are computed, and 10 output tokens count double.
        let counters = told(&[active(1), taken(1, 100), served(1, 40, 0, 100), served(1, 0, 10, 0)]);
        assert_eq!((counters.of(1), counters.turn_us(3)), (Some(60_000), 7));
    }

    #[test]
    fn a_dispatch_that_came_back_costs_nothing() {
        let back = Skipped { flow_id: 1, uncached_tokens: 100, taken_flag: 1, ..Skipped::default() }.at(0);
        let ranked = Skipped { flow_id: 1, uncached_tokens: 100, ..Skipped::default() }.at(0);
        assert_eq!(told(&[active(1), taken(1, 100), back, ranked]).of(1), Some(0));
    }

    #[test]
    fn a_heavier_flow_pays_less() {
        let heavy = FlowActive { flow_id: 1, tenant_id: 1, class_rank: 3, weight_ppm: 4_000_000, idle_us: 0 }.at(0);
        assert_eq!(told(&[heavy, taken(1, 100)]).of(1), Some(25_000));
        assert_eq!(cost(u64::MAX, 1_000_000), u64::MAX, "what does not fit stays at the end");
        assert_eq!(cost(30_000_000_000, 2_000_000_000), 15_000_000_000, "the product needs more than 64 bits");
    }

    #[test]
    fn idle_time_is_not_banked() {
        let gone_idle = FlowIdle { flow_id: 2, tenant_id: 1 }.at(0);
        let mut facts = vec![active(1), active(2), gone_idle, served(1, 500, 0, 0), active(2)];
        assert_eq!(told(&facts).of(2), Some(500_000), "level with the only one that stayed");
        // Into an empty house: level with the last that left.
        facts.extend([1, 2].map(|flow_id| FlowIdle { flow_id, tenant_id: 1 }.at(0)));
        facts.push(active(3));
        assert_eq!(told(&facts).of(3), Some(500_000));
        // A flow that has had more than the others keeps what it has had.
        facts.extend([FlowIdle { flow_id: 3, tenant_id: 1 }.at(0), served(1, 100, 0, 0), active(2), active(1)]);
        assert_eq!(told(&facts).of(1), Some(600_000));
    }

    #[test]
    fn a_flow_that_was_not_announced_is_charged_from_its_first_row_on() {
        let mut counters = told(&[active(1), served(1, 300, 0, 0)]);
        assert_eq!(
            (counters.of_active(2), counters.meet(2, 3, 2_000_000)),
            (None, Some(300_000)),
            "level with the others"
        );
        counters.hear(&SETTINGS, &taken(2, 100));
        assert_eq!(counters.of_active(2), Some(350_000), "at its weight");
        // It leaves, and the fact that it is back gets lost.
        counters.hear(&SETTINGS, &FlowIdle { flow_id: 2, tenant_id: 1 }.at(0));
        counters.hear(&SETTINGS, &served(1, 500, 0, 0));
        assert_eq!((counters.of_active(2), counters.meet(2, 3, 2_000_000)), (None, Some(800_000)), "lifted");
    }

    #[test]
    fn a_flow_that_is_gone_is_forgotten() {
        let gone = FlowGone { flow_id: 1, tenant_id: 1 }.at(0);
        assert_eq!(told(&[active(1), taken(1, 5), gone]).of(1), None);
    }

    #[test]
    fn more_flows_than_are_kept_cost_the_idle_ones_their_past() {
        let mut counters = told(&[active(0), served(0, 10, 0, 0)]);
        for flow in 1..=3 * FLOWS_MAX as u64 {
            counters.hear(&SETTINGS, &active(flow));
            // Every other one has debts when it leaves; the rest stand at the floor.
            counters.hear(&SETTINGS, &served(flow, flow % 2 * flow, 0, 0));
            counters.hear(&SETTINGS, &FlowIdle { flow_id: flow, tenant_id: 1 }.at(0));
            assert!(counters.flows.len() <= FLOWS_MAX);
        }
        assert_eq!(counters.of(0), Some(10_000), "an active flow is never forgotten");
        let newest_debtor = 3 * FLOWS_MAX as u64 - 1;
        assert!(counters.of(newest_debtor).is_some_and(|served| served > 10_000));
        assert_eq!(counters.of(2), None, "nothing is lost by forgetting a flow at the floor");
    }

    #[test]
    fn where_all_are_active_a_newcomer_is_counted_and_not_kept() {
        let mut counters = Counters::default();
        (0..FLOWS_MAX as u64 + 3).for_each(|flow| counters.hear(&SETTINGS, &active(flow)));
        assert_eq!((counters.flows.len(), counters.of(FLOWS_MAX as u64)), (FLOWS_MAX, None));
        counters.hear(&SETTINGS, &FlowIdle { flow_id: 9, tenant_id: 1 }.at(0));
        counters.hear(&SETTINGS, &active(u64::MAX));
        assert_eq!((counters.of(9), counters.of(u64::MAX)), (None, Some(0)), "the idle one makes room");
    }

    #[test]
    fn the_least_is_the_least_whatever_came_before() {
        // A walk over many flows; the scan is the slow twin of the tournament.
        let mut counters = Counters::default();
        let mut seed = 12_345_u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..5_000 {
            let flow = draw(40);
            let fact = match draw(6) {
                0 => active(flow),
                1 => FlowIdle { flow_id: flow, tenant_id: 1 }.at(0),
                2 => taken(flow, draw(100)),
                3 => Skipped { flow_id: flow, uncached_tokens: draw(100), taken_flag: 1, ..Skipped::default() }.at(0),
                4 => FlowGone { flow_id: flow, tenant_id: 1 }.at(0),
                _ => served(flow, draw(50), draw(50), draw(100)),
            };
            counters.hear(&SETTINGS, &fact);
            let stayed = counters.flows.values().filter(|flow| flow.is_active).map(|flow| flow.served);
            assert_eq!(counters.least(), stayed.min().unwrap_or(counters.left));
            let (active, idle) = (counters.active.least(), counters.idle.least());
            let places = counters.flows.values().map(|flow| flow.place).collect::<std::collections::BTreeSet<_>>();
            assert_eq!(places.len(), counters.flows.len(), "each has a place of its own");
            assert!(active.is_none_or(|(_, id)| counters.flows[&id].is_active));
            assert!(idle.is_none_or(|(_, id)| !counters.flows[&id].is_active));
        }
    }
}
