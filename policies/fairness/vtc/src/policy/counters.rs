//! How much has every flow been served? Weighted tokens, in thousandths, with idle time not banked.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use penstock_policy_sdk::{DecodeError, Fact, Reader, RestoreInfo, Sat, Told, Writer, host, state};

use super::Settings;

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
    /// Least counters of active flows, some of them out of date; derived, so not saved.
    least: BinaryHeap<Reverse<(u64, u64)>>,
}

/// Cost of weighted tokens to a flow of that weight.
pub(super) fn cost(tokens: u64, weight_ppm: u64) -> u64 {
    let weight = weight_ppm.max(1);
    Sat(tokens).times_over(SCALE, weight).unwrap_or(u64::MAX)
}

impl Counters {
    /// The counter to order a flow by. One that was never announced starts level with the least served.
    pub(super) fn of(&self, flow: u64) -> Option<u64> {
        self.flows.get(&flow).map(|flow| flow.served)
    }

    /// The least counter of an active flow, other than `but`; that of the last flow to leave when there is none.
    pub(super) fn least_but(&mut self, but: u64) -> u64 {
        let mut own = None;
        let least = loop {
            let Some(Reverse((served, id))) = self.least.peek().copied() else { break None };
            let now = self.flows.get(&id).filter(|flow| flow.is_active).map(|flow| flow.served);
            if now == Some(served) && id != but {
                break Some(served);
            }
            self.least.pop();
            match now {
                Some(now) if now != served => self.least.push(Reverse((now, id))),
                Some(_) => own = Some(Reverse((served, id))),
                None => {}
            }
        };
        self.least.extend(own);
        least.unwrap_or(self.left)
    }

    /// As [`Self::least_but`] without changing the heap.
    pub(super) fn least(&self) -> u64 {
        let active = self.flows.values().filter(|flow| flow.is_active);
        active.map(|flow| flow.served).min().unwrap_or(self.left)
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
                }
            }
            Told::FlowGone(told) => {
                self.flows.remove(&told.flow_id);
            }
            Told::Taken(told) => {
                let class = self.flows.get_mut(&told.flow_id).map(|flow| {
                    flow.served = (Sat(flow.served) + cost(input(told.uncached_tokens), flow.weight_ppm)).0;
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
        let floor = self.least_but(id);
        let class = class_rank.min(CLASSES as u64 - 1) as u8;
        let is_new = !self.flows.contains_key(&id);
        if is_new && self.flows.len() >= FLOWS_MAX {
            self.forget(floor);
            if self.flows.len() >= FLOWS_MAX {
                host::count("flows-not-kept", 1);
                return;
            }
        }
        let served = self.flows.get(&id).map_or(floor, |flow| flow.served.max(floor));
        self.flows.insert(id, Flow { served, weight_ppm, class, is_active: true });
        self.remember(served, id);
    }

    /// Makes room. An idle flow at or below the floor loses nothing by it: it would be lifted there. When that is not enough, idle flows go
    /// that are nearest to the floor, half of them.
    fn forget(&mut self, floor: u64) {
        self.flows.retain(|_, flow| flow.is_active || flow.served > floor);
        if self.flows.len() < FLOWS_MAX / 4 * 3 {
            return;
        }
        let mut idle: Vec<u64> = self.flows.values().filter(|flow| !flow.is_active).map(|flow| flow.served).collect();
        if idle.is_empty() {
            return;
        }
        let half = idle.len() / 2;
        let (_, middle, _) = idle.select_nth_unstable(half);
        let middle = *middle;
        self.flows.retain(|_, flow| flow.is_active || flow.served > middle);
    }

    /// Adds what `more` says and takes off what `less` says.
    fn change(&mut self, id: u64, more: impl FnOnce(&Flow) -> Sat, less: impl FnOnce(&Flow) -> u64) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let (before, plus, minus) = (flow.served, more(flow), less(flow));
        flow.served = (Sat(before) + plus - minus).0;
        // The heap may hold counters that are too low, never only ones that are too high.
        let sank = (flow.is_active && flow.served < before).then_some(flow.served);
        if let Some(served) = sank {
            self.remember(served, id);
        }
    }

    fn remember(&mut self, served: u64, id: u64) {
        if self.least.len() > 4 * self.flows.len() + 64 {
            self.rebuild();
        } else {
            self.least.push(Reverse((served, id)));
        }
    }

    fn rebuild(&mut self) {
        self.least.clear();
        let active = self.flows.iter().filter(|(_, flow)| flow.is_active);
        self.least.extend(active.map(|(id, flow)| Reverse((flow.served, *id))));
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
        let flows = state::read_map(from, |from| {
            let (served, weight_ppm, class) = (from.u64()?, from.u64()?, from.u8()?);
            if usize::from(class) >= CLASSES {
                return Err(DecodeError::Invalid("flow class"));
            }
            Ok(Flow { served, weight_ppm, class, is_active: from.bool()? })
        })?;
        let mut counters = Self { flows, left, turn_us, least: BinaryHeap::new() };
        counters.rebuild();
        Ok(counters)
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
    fn the_least_is_the_least_whatever_came_before() {
        // A walk over many flows; the scan is the slow twin of the heap.
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
            let scanned = counters.least();
            assert_eq!(counters.least_but(u64::MAX), scanned);
        }
    }
}
