//! What happened, told to the policies that want to know: in order, in batches, right before they are asked next.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{FACTS_BATCH_MAX, FACTS_WAIT_MAX};
use penstock_base::{Duration, Instant};
use penstock_policy_api::{Decision, Fact, FactKind, FactSet, FallbackReason, Policies, Served};

use super::State;
use super::io::{GatewayEffect, GatewayEvent, fallback_code};
use super::seats::Cx;

/// The decisions that are made at a gateway, in the order of their queues.
const TOLD: [Decision; 4] = [Decision::Admission, Decision::Routing, Decision::Fairness, Decision::Overload];

/// Facts on their way.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    queues: [FactQueue; TOLD.len()],
}

#[derive(Clone, Debug)]
struct FactQueue {
    facts: Vec<Fact>,
    /// When the first of them happened; [`Instant::NEVER`] when there is none.
    since: Instant,
    /// Kinds that the policy in the seat wants; read again at every step.
    wanted: FactSet,
}

impl FactQueue {
    fn wait_max(&self) -> Duration {
        let only_served = self.wanted == FactSet::NONE.with(FactKind::Served);
        if only_served { Duration::from_s(1) } else { FACTS_WAIT_MAX }
    }
}

impl Facts {
    /// Nothing happened yet.
    pub fn new() -> Self {
        let queue =
            || FactQueue { facts: Vec::with_capacity(FACTS_BATCH_MAX), since: Instant::NEVER, wanted: FactSet::NONE };
        Self { queues: [queue(), queue(), queue(), queue()] }
    }

    /// Reads what the policies want.
    pub fn refresh(&mut self, policies: &mut dyn Policies) {
        for (queue, decision) in self.queues.iter_mut().zip(TOLD) {
            queue.wanted = match decision {
                Decision::Admission => policies.admission().terms().facts,
                Decision::Routing => policies.routing().terms().facts,
                Decision::Overload => policies.overload().terms().facts,
                Decision::Fairness | Decision::Eviction => policies.fairness().terms().facts,
            };
        }
    }

    /// When the oldest waiting facts must be told.
    pub fn next_due(&self) -> Instant {
        let due = |queue: &FactQueue| queue.since + queue.wait_max();
        self.queues.iter().map(due).min().unwrap_or(Instant::NEVER)
    }

    /// Does any policy want facts of this kind?
    fn wants(&self, kind: FactKind) -> bool {
        self.queues.iter().any(|queue| queue.wanted.has(kind))
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        for queue in &self.queues {
            out.list(queue.facts.iter(), |out, fact| fact.flat().iter().for_each(|number| out.u64(*number)));
            out.u64(queue.since.0);
        }
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut facts = Self::new();
        for queue in &mut facts.queues {
            let count = from.count()?;
            if count > FACTS_BATCH_MAX {
                return Err(DecodeError::Invalid("number of facts"));
            }
            for _ in 0..count {
                let mut flat = [0; Fact::STRIDE];
                for number in &mut flat {
                    *number = from.u64()?;
                }
                queue.facts.push(Fact::from_flat(flat).ok_or(DecodeError::Invalid("fact"))?);
            }
            queue.since = Instant(from.u64()?);
        }
        Ok(facts)
    }
}

fn queue_of(decision: Decision) -> Option<usize> {
    TOLD.iter().position(|told| *told == decision)
}

impl State {
    /// Something happened.
    pub(super) fn tell(&mut self, fact: Fact, cx: &mut Cx<'_>) {
        for (at, decision) in TOLD.iter().enumerate() {
            let queue = &mut self.facts.queues[at];
            if !queue.wanted.has(fact.kind) || !fact.kind.goes_to().contains(decision) {
                continue;
            }
            if queue.facts.is_empty() {
                queue.since = self.now;
            }
            queue.facts.push(fact);
            if queue.facts.len() >= FACTS_BATCH_MAX {
                self.deliver(*decision, cx);
            }
        }
    }

    /// Right before `decision` is asked: what happened until now.
    pub(super) fn deliver_facts(&mut self, decision: Decision, cx: &mut Cx<'_>) {
        if matches!(decision, Decision::Fairness | Decision::Overload) {
            self.tell_served(cx);
        }
        self.deliver(decision, cx);
    }

    /// Facts that have waited long enough.
    pub(super) fn deliver_due_facts(&mut self, cx: &mut Cx<'_>) {
        for (at, decision) in TOLD.iter().enumerate() {
            let queue = &self.facts.queues[at];
            if queue.since + queue.wait_max() <= self.now {
                self.deliver(*decision, cx);
            }
        }
    }

    fn deliver(&mut self, decision: Decision, cx: &mut Cx<'_>) {
        let Some(queue) = queue_of(decision).and_then(|at| self.facts.queues.get_mut(at)) else { return };
        if queue.facts.is_empty() {
            return;
        }
        let told = match decision {
            Decision::Admission => cx.policies.admission().observe(&queue.facts),
            Decision::Routing => cx.policies.routing().observe(&queue.facts),
            Decision::Overload => cx.policies.overload().observe(&queue.facts),
            Decision::Fairness | Decision::Eviction => cx.policies.fairness().observe(&queue.facts),
        };
        queue.facts.clear();
        queue.since = Instant::NEVER;
        if let Err(kind) = told {
            let reason = fallback_code(FallbackReason::Fault(kind));
            cx.effects.push(GatewayEffect::Event(GatewayEvent::Fallback { decision: decision as u8, call: 0, reason }));
        }
    }

    /// Sums of served tokens become facts: at the end of a round, and before anything that must come behind them.
    pub(super) fn tell_served(&mut self, cx: &mut Cx<'_>) {
        while !self.flows.told_later.is_empty() {
            self.tell_served_of(self.flows.told_later.head, cx);
        }
    }

    /// The same for one flow.
    pub(super) fn tell_served_of(&mut self, flow: u32, cx: &mut Cx<'_>) {
        let Some(served) = self.flows.take_served(flow) else { return };
        if !self.facts.wants(FactKind::Served) {
            return;
        }
        let Some(id) = self.flows.table.key(flow) else { return };
        let fact = Served {
            flow_id: id.0,
            prefill_tokens: served.prefill_tokens,
            decode_tokens: served.decode_tokens,
            weight_ppm: self.flows.table[flow].weight_ppm,
            device_us: served.device_us,
            settled_tokens: served.settled_tokens,
        };
        self.tell(fact.at(self.now.as_us()), cx);
    }
}
