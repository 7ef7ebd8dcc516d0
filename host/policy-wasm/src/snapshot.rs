//! What does a policy remember, and what has it been told since? Both outlive the instance.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_base::limits::{FACTS_BATCH_MAX, FACTS_KEPT_MAX};
use penstock_policy_api::{Fact, FactKind, FactSet, Gap, RestoreCause, RestoreInfo};

/// Saved state of one policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// Schema of the bytes.
    pub schema: u32,
    /// Time of the save, of the machine that saved.
    pub saved_now_us: u64,
    /// When this machine got it: the same as `saved_now_us` where this machine saved it.
    pub at_us: u64,
    /// Time between the save and `at_us`.
    pub elapsed_us: u64,
    /// The state.
    pub bytes: Arc<[u8]>,
}

impl Snapshot {
    /// State saved here and now.
    pub fn here(schema: u32, now_us: u64, bytes: Vec<u8>) -> Self {
        Self { schema, saved_now_us: now_us, at_us: now_us, elapsed_us: 0, bytes: bytes.into() }
    }

    /// State that came with `info`.
    pub(crate) fn brought(info: &RestoreInfo, bytes: &[u8]) -> Self {
        Self {
            schema: info.schema,
            saved_now_us: info.saved_now_us,
            at_us: info.now_us,
            elapsed_us: info.elapsed_us,
            bytes: bytes.into(),
        }
    }

    /// What a policy is told when it gets this back.
    pub fn info(&self, cause: RestoreCause, now_us: u64) -> RestoreInfo {
        RestoreInfo {
            schema: self.schema,
            cause,
            saved_now_us: self.saved_now_us,
            now_us,
            elapsed_us: self.elapsed_us.saturating_add(now_us.saturating_sub(self.at_us)),
        }
    }
}

/// Facts told since the last snapshot, at most [`FACTS_KEPT_MAX`]; what was older is one gap.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptFacts {
    facts: VecDeque<Fact>,
    lost: u64,
    /// Time of the first lost one.
    lost_from_us: u64,
}

impl KeptFacts {
    pub fn push(&mut self, fact: Fact) {
        if self.facts.len() >= FACTS_KEPT_MAX
            && let Some(oldest) = self.facts.pop_front()
        {
            self.lose(oldest.at_us, 1);
        }
        self.facts.push_back(fact);
    }

    /// All of them become a gap.
    pub fn lose_all(&mut self) {
        if let Some(first) = self.facts.front() {
            let (at_us, count) = (first.at_us, self.facts.len() as u64);
            self.lose(at_us, count);
            self.facts.clear();
        }
    }

    fn lose(&mut self, at_us: u64, count: u64) {
        if self.lost == 0 {
            self.lost_from_us = at_us;
        }
        self.lost = self.lost.saturating_add(count);
    }

    /// A snapshot covers them.
    pub fn clear(&mut self) {
        self.facts.clear();
        self.lost = 0;
    }

    pub fn is_empty(&self) -> bool {
        self.facts.is_empty() && self.lost == 0
    }

    pub fn len(&self) -> usize {
        self.facts.len()
    }

    /// Each batch to tell, in order, the gap first. Only kinds that are wanted.
    pub fn batches(&self, wanted: FactSet) -> Vec<Vec<Fact>> {
        let gap = Gap { lost_count: self.lost, from_us: self.lost_from_us }.at(self.lost_from_us);
        let gap = (self.lost > 0 && wanted.has(FactKind::Gap)).then_some(gap);
        let told: Vec<Fact> =
            gap.into_iter().chain(self.facts.iter().copied().filter(|f| wanted.has(f.kind))).collect();
        told.chunks(FACTS_BATCH_MAX).map(<[Fact]>::to_vec).collect()
    }
}
