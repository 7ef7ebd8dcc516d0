//! Facts that wait to be told to one instance.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{FACTS_BATCH_MAX, FACTS_KEPT_MAX};

use super::FallbackReason;
use crate::declare::Terms;
use crate::fact::Fact;
use crate::generated::facts::Gap;
use crate::policy::Policy;

/// Longest that a fact waits for a call when nobody asks.
const WAIT_US_MAX: u64 = 100_000;

/// Facts of one instance, in the order they happened. Told right before its next call, or sooner when [`Self::is_due`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FactQueue {
    /// Not told yet, at most [`FACTS_KEPT_MAX`].
    waiting: Vec<Fact>,
    /// How many had to go for want of room.
    lost_count: u64,
    /// When the first of those happened.
    lost_from_us: u64,
}

impl FactQueue {
    /// Queues `fact` if the policy of these terms wants its kind. Past the bound the oldest one goes, and is told as lost.
    pub fn tell(&mut self, terms: &Terms, fact: Fact) {
        if !terms.facts.has(fact.kind) {
            return;
        }
        if self.waiting.len() >= FACTS_KEPT_MAX {
            let oldest = self.waiting.remove(0);
            if self.lost_count == 0 {
                self.lost_from_us = oldest.at_us;
            }
            self.lost_count = self.lost_count.saturating_add(1);
        }
        self.waiting.push(fact);
    }

    /// Should the machine deliver without waiting for a call?
    pub fn is_due(&self, now_us: u64) -> bool {
        let old = self.waiting.first().is_some_and(|fact| now_us.saturating_sub(fact.at_us) >= WAIT_US_MAX);
        old || self.waiting.len() >= FACTS_BATCH_MAX
    }

    /// Number of facts not told yet.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Nothing to tell?
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Tells everything. What was told is gone from here, also when the policy failed over it: its owner keeps what a rebuild needs.
    pub fn deliver<P: Policy + ?Sized>(&mut self, policy: &mut P) -> Result<(), FallbackReason> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut told = Ok(());
        if self.lost_count > 0 {
            let gap = Gap { lost_count: self.lost_count, from_us: self.lost_from_us }.at(self.lost_from_us);
            told = policy.observe(&[gap]);
            self.lost_count = 0;
        }
        told = told.and_then(|()| policy.observe(&self.waiting));
        self.waiting.clear();
        told.map_err(FallbackReason::Fault)
    }

    /// Writes the queue.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.lost_count);
        out.u64(self.lost_from_us);
        out.list(self.waiting.iter(), |out, fact| fact.flat().into_iter().for_each(|word| out.u64(word)));
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (lost_count, lost_from_us) = (from.u64()?, from.u64()?);
        let waiting = from.list(|from| {
            let mut flat = [0; Fact::STRIDE];
            for word in &mut flat {
                *word = from.u64()?;
            }
            Fact::from_flat(flat).ok_or(DecodeError::Invalid("fact kind"))
        })?;
        if waiting.len() > FACTS_KEPT_MAX {
            return Err(DecodeError::Invalid("number of facts"));
        }
        Ok(Self { waiting, lost_count, lost_from_us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fact::FactSet;
    use crate::generated::FactKind;
    use crate::generated::facts::{FlowIdle, Hit};
    use crate::proposal::FaultKind;

    struct Listener(Terms, Vec<Fact>, Result<(), FaultKind>);

    impl Policy for Listener {
        fn terms(&self) -> &Terms {
            &self.0
        }
        fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
            self.1.extend_from_slice(facts);
            self.2
        }
    }

    fn listener() -> Listener {
        let terms = Terms { facts: FactSet::of(&[FactKind::FlowIdle, FactKind::Gap]), ..Terms::native("listener") };
        Listener(terms, Vec::new(), Ok(()))
    }

    fn idle(flow_id: u64) -> Fact {
        FlowIdle { flow_id, tenant_id: 0 }.at(flow_id)
    }

    #[test]
    fn only_wanted_kinds_are_told_once_and_in_order() {
        let (mut queue, mut policy) = (FactQueue::default(), listener());
        queue.tell(&policy.0, idle(1));
        queue.tell(&policy.0, Hit::default().at(2));
        queue.tell(&policy.0, idle(3));
        assert_eq!(queue.deliver(&mut policy), Ok(()));
        assert_eq!(policy.1, [idle(1), idle(3)]);
        assert_eq!(queue.deliver(&mut policy), Ok(()));
        assert_eq!(policy.1.len(), 2);
    }

    #[test]
    fn past_the_bound_the_oldest_become_one_gap() {
        let (mut queue, mut policy) = (FactQueue::default(), listener());
        for flow in 0..FACTS_KEPT_MAX as u64 + 3 {
            queue.tell(&policy.0, idle(flow + 10));
        }
        assert_eq!(queue.len(), FACTS_KEPT_MAX);
        assert_eq!(queue.deliver(&mut policy), Ok(()));
        assert_eq!(policy.1[0], Gap { lost_count: 3, from_us: 10 }.at(10));
        assert_eq!((policy.1[1], policy.1.len()), (idle(13), FACTS_KEPT_MAX + 1));
    }

    #[test]
    fn facts_are_due_by_number_or_age() {
        let (mut queue, policy) = (FactQueue::default(), listener());
        assert!(!queue.is_due(u64::MAX));
        queue.tell(&policy.0, idle(5));
        assert!(!queue.is_due(100_004) && queue.is_due(100_005));
        for _ in 1..FACTS_BATCH_MAX {
            queue.tell(&policy.0, idle(5));
        }
        assert!(queue.is_due(5));
    }

    #[test]
    fn a_policy_that_fails_over_facts_is_a_fault_of_the_next_call() {
        let (mut queue, mut policy) = (FactQueue::default(), listener());
        policy.2 = Err(FaultKind::Trap);
        queue.tell(&policy.0, idle(1));
        assert_eq!(queue.deliver(&mut policy), Err(FallbackReason::Fault(FaultKind::Trap)));
        assert!(queue.is_empty());
    }

    #[test]
    fn a_queue_reads_back_as_it_was() {
        let (mut queue, policy) = (FactQueue::default(), listener());
        queue.tell(&policy.0, idle(1));
        let mut out = Writer::new();
        queue.encode(&mut out);
        let bytes = out.into_bytes();
        assert_eq!(FactQueue::decode(&mut Reader::new(&bytes)), Ok(queue));
    }
}
