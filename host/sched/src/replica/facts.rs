//! What happened, told to the two policies of a replica: in order, in batches, right before they are asked next.

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{FACTS_BATCH_MAX, FACTS_HIT_SEARCH_MAX, FACTS_KEPT_MAX, FACTS_WAIT_MAX};
use penstock_kv::{EVICTED_WINDOW, KvChange};
use penstock_policy_api::{
    Decision, Evicted, Fact, FactKind, FactSet, FallbackReason, FaultKind, Finished, Gap, Hit, Policies, Preempted,
    Regret, Resumed, Stored,
};

use super::sequence::Request;
use super::{Replica, ReplicaEffects};

/// Facts on their way to one instance.
#[derive(Clone, Debug)]
struct FactQueue {
    waiting: Vec<Fact>,
    /// Kinds that the policy in the seat wants; read again at every step.
    wanted: FactSet,
    /// How many had to go for want of room, and when the first of those happened.
    lost: (u64, u64),
}

impl FactQueue {
    fn new() -> Self {
        Self { waiting: Vec::with_capacity(FACTS_BATCH_MAX), wanted: FactSet::NONE, lost: (0, 0) }
    }

    fn tell(&mut self, fact: Fact) {
        if !self.wanted.has(fact.kind) {
            return;
        }
        if self.waiting.len() >= FACTS_KEPT_MAX {
            // A listing as long as this happens at a flush only; what is kept is the newest. The oldest go by the batch, so that a long one
            // does not move all the others for each.
            if self.lost.0 == 0 {
                self.lost.1 = self.waiting[0].at_us;
            }
            self.waiting.drain(..FACTS_BATCH_MAX);
            self.lost.0 += FACTS_BATCH_MAX as u64;
        }
        self.waiting.push(fact);
    }

    fn due(&self) -> Instant {
        match self.waiting.first() {
            None => Instant::NEVER,
            Some(_) if self.waiting.len() >= FACTS_BATCH_MAX => Instant::ZERO,
            Some(fact) => Instant(fact.at_us.saturating_mul(1_000)) + FACTS_WAIT_MAX,
        }
    }

    /// Tells everything that waits, what was lost before it. The first fault is the answer. A policy that fails on the gap has been made
    /// anew before this goes on, so that it is told the facts behind the gap all the same: they happened, and nobody tells them again.
    fn deliver(&mut self, mut observe: impl FnMut(&[Fact]) -> Result<(), FaultKind>) -> Result<(), FaultKind> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let (count, from_us) = core::mem::take(&mut self.lost);
        let of_gap = if count > 0 { observe(&[Gap { lost_count: count, from_us }.at(from_us)]) } else { Ok(()) };
        let of_facts = observe(&self.waiting);
        self.waiting.clear();
        of_gap.and(of_facts)
    }

    fn encode(&self, out: &mut Writer) {
        out.list(self.waiting.iter(), |w, fact| fact.flat().into_iter().for_each(|word| w.u64(word)));
        out.u64(self.lost.0);
        out.u64(self.lost.1);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut queue = Self::new();
        queue.waiting.extend(from.list(|r| {
            let mut flat = [0; Fact::STRIDE];
            for word in &mut flat {
                *word = r.u64()?;
            }
            Fact::from_flat(flat).ok_or(DecodeError::Invalid("fact kind"))
        })?);
        queue.lost = (from.u64()?, from.u64()?);
        if queue.waiting.len() > FACTS_KEPT_MAX {
            return Err(DecodeError::Invalid("number of facts"));
        }
        Ok(queue)
    }
}

/// The two queues of a replica.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    fairness: FactQueue,
    eviction: FactQueue,
}

impl Default for Facts {
    fn default() -> Self {
        Self { fairness: FactQueue::new(), eviction: FactQueue::new() }
    }
}

impl Facts {
    /// Reads what the policies in the seats want.
    pub(super) fn refresh(&mut self, policies: &mut dyn Policies) {
        self.fairness.wanted = policies.fairness().terms().facts;
        self.eviction.wanted = policies.eviction().terms().facts;
    }

    /// When the oldest waiting fact must be told.
    pub(super) fn next_due(&self) -> Instant {
        self.fairness.due().min(self.eviction.due())
    }

    fn tell(&mut self, fact: Fact) {
        for decision in fact.kind.goes_to() {
            match decision {
                Decision::Fairness => self.fairness.tell(fact),
                Decision::Eviction => self.eviction.tell(fact),
                Decision::Admission | Decision::Routing | Decision::Overload => {}
            }
        }
    }

    pub(super) fn on_preempted(&mut self, now: Instant, request: &Request, freed: (u32, u32), cause_code: u8) {
        let fact = Preempted {
            request_id: request.id().0,
            flow_id: request.manifest.flow.0,
            computed_tokens: u64::from(freed.0),
            freed_blocks: u64::from(freed.1),
            how_code: 0,
            cause_code: u64::from(cause_code),
        };
        self.tell(fact.at(now.as_us()));
    }

    pub(super) fn on_resumed(&mut self, now: Instant, request: &Request, recomputed_tokens: u32) {
        let fact = Resumed {
            request_id: request.id().0,
            flow_id: request.manifest.flow.0,
            recomputed_tokens: u64::from(recomputed_tokens),
        };
        self.tell(fact.at(now.as_us()));
    }

    pub(super) fn on_ended(&mut self, now: Instant, request: &Request) {
        let (kind, detail) = request.outcome().code();
        let arrived = request.manifest.arrived;
        let ttft = if request.first_token { request.first_token_at.since(arrived).as_us() } else { u64::MAX };
        let fact = Finished {
            request_id: request.id().0,
            flow_id: request.manifest.flow.0,
            outcome_code: u64::from(kind) << 16 | u64::from(detail),
            output_tokens: u64::from(request.output_tokens),
            ttft_us: ttft,
            age_us: now.since(arrived).as_us(),
        };
        self.tell(fact.at(now.as_us()));
    }

    /// A prompt found `blocks` cached blocks. Reuses of one run that wait to be told are summed.
    pub(super) fn on_hit(&mut self, now: Instant, request: &Request, blocks: u32) {
        let tail = blocks.checked_sub(1).and_then(|tail| request.manifest.keys.get(tail as usize));
        let Some(key) = tail else { return };
        if !self.eviction.wanted.has(FactKind::Hit) {
            return;
        }
        let same = |fact: &&mut Fact| fact.kind == FactKind::Hit && fact.slots[0] == key.short();
        if let Some(fact) = self.eviction.waiting.iter_mut().rev().take(FACTS_HIT_SEARCH_MAX).find(same) {
            fact.slots[3] += 1;
            return;
        }
        let tenant_id = request.manifest.tenant.0;
        let hit = Hit { run_hash: key.short(), tenant_id, blocks: u64::from(blocks), count: 1, idle_us: 0 };
        self.tell(hit.at(now.as_us()));
    }

    pub(super) fn on_cache(&mut self, now: Instant, change: &KvChange) {
        let at_us = now.as_us();
        match *change {
            KvChange::Stored { key, depth_blocks, tenant, class, evicted_before, .. } => {
                let stored = Stored {
                    run_hash: key.short(),
                    tenant_id: tenant.0,
                    blocks: 1,
                    depth_blocks: u64::from(depth_blocks),
                    class_rank: u64::from(class.get()),
                    ghost_flag: u64::from(evicted_before.is_some()),
                };
                self.tell(stored.at(at_us));
                if let Some(since) = evicted_before.filter(|since| *since <= EVICTED_WINDOW) {
                    let (run_hash, tenant_id) = (key.short(), tenant.0);
                    self.tell(Regret { run_hash, tenant_id, blocks: 1, since_us: since.as_us() }.at(at_us));
                }
            }
            KvChange::Removed { key, tenant, idle, hit_count, .. } => {
                let evicted = Evicted {
                    run_hash: key.short(),
                    tenant_id: tenant.0,
                    blocks: 1,
                    to_code: 0,
                    idle_us: idle.as_us(),
                    hit_count: u64::from(hit_count),
                };
                self.tell(evicted.at(at_us));
            }
            KvChange::Cleared => {}
        }
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        self.fairness.encode(out);
        self.eviction.encode(out);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { fairness: FactQueue::decode(from)?, eviction: FactQueue::decode(from)? })
    }
}

impl Replica {
    /// Tells the fairness policy what waits, right before it is asked.
    pub(super) fn tell_fairness(&mut self, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        let told = self.facts.fairness.deliver(|facts| policies.fairness().observe(facts));
        if let Err(kind) = told {
            self.note_fallback(Decision::Fairness, 0, FallbackReason::Fault(kind), effects);
        }
    }

    /// Tells the eviction policy what waits, right before it is asked.
    pub(super) fn tell_eviction(&mut self, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        let told = self.facts.eviction.deliver(|facts| policies.eviction().observe(facts));
        if let Err(kind) = told {
            self.note_fallback(Decision::Eviction, 0, FallbackReason::Fault(kind), effects);
        }
    }

    /// At the end of a step: what is due by number or age.
    pub(super) fn deliver_facts(&mut self, now: Instant, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        if self.facts.fairness.due() <= now {
            self.tell_fairness(policies, effects);
        }
        if self.facts.eviction.due() <= now {
            self.tell_eviction(policies, effects);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::Duration;

    fn fact(at_us: u64) -> Fact {
        Resumed { request_id: at_us, flow_id: 1, recomputed_tokens: 1 }.at(at_us)
    }

    /// A queue that was told of facts at 1, 2, 3 .. microseconds.
    fn told(facts: usize) -> FactQueue {
        let mut queue = FactQueue::new();
        queue.wanted = FactSet::all_for(Decision::Fairness);
        (1..=facts as u64).for_each(|at_us| queue.tell(fact(at_us)));
        queue
    }

    fn delivered(queue: &mut FactQueue) -> Vec<Fact> {
        let mut seen = Vec::new();
        let take = |facts: &[Fact]| {
            seen.extend_from_slice(facts);
            Ok(())
        };
        queue.deliver(take).expect("nobody fails");
        seen
    }

    #[test]
    fn as_many_facts_as_the_limit_are_kept_and_with_one_more_the_oldest_become_a_gap() {
        let all = delivered(&mut told(4_096));
        assert_eq!((all.len(), all[0], all[4_095]), (4_096, fact(1), fact(4_096)));
        let mut queue = told(4_097);
        let all = delivered(&mut queue);
        assert_eq!(all[0], Gap { lost_count: 256, from_us: 1 }.at(1), "those of 1 .. 256");
        assert_eq!((all.len(), all[1], all[3_841]), (1 + 3_841, fact(257), fact(4_097)));
        assert!(delivered(&mut queue).is_empty());
    }

    #[test]
    fn a_policy_that_fails_on_the_gap_is_told_the_facts_behind_it() {
        for fails_on in [FactKind::Gap, FactKind::Resumed] {
            let mut queue = told(4_097);
            let mut seen = Vec::new();
            let answer = queue.deliver(|facts| {
                seen.extend_from_slice(facts);
                if facts[0].kind == fails_on { Err(FaultKind::Trap) } else { Ok(()) }
            });
            assert_eq!(answer, Err(FaultKind::Trap), "{fails_on:?}");
            assert_eq!((seen.len(), seen[0].kind), (1 + 3_841, FactKind::Gap), "{fails_on:?}");
            assert!(seen[1..].iter().map(|fact| fact.at_us).eq(257..=4_097), "{fails_on:?}: each once, in order");
            assert!(delivered(&mut queue).is_empty(), "{fails_on:?}: and never again");
        }
    }

    #[test]
    fn a_fact_waits_a_hundred_milliseconds_and_a_batch_of_them_not_at_all() {
        let due = |facts| told(facts).due();
        assert_eq!(due(0), Instant::NEVER);
        assert_eq!(due(1), Instant::ZERO + Duration::from_us(1) + Duration::from_ms(100));
        assert_eq!(due(255), due(1), "the first one's time");
        assert_eq!(due(256), Instant::ZERO);
    }
}
