//! What was decided lately, at one machine: a bounded ring that anyone may read.
//!
//! Numbers only: no prompt, no tenant's name. The machine's thread fills a small store of its own and hands it over between two steps;
//! a reader at the same moment makes it wait for the next turn, never the machine.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use penstock_base::{Generation, Instant, RequestId};
use penstock_policy_api::{FallbackReason, Question};

use super::seats::Machine;

/// Decisions kept for each machine.
pub const DECISIONS_KEPT_MAX: usize = 4_096;

/// One question that was asked, and what came of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecisionRecord {
    /// Counts this machine's questions, of all kinds, from 1.
    pub sequence: u64,
    /// Generation of the set that was asked.
    pub generation: Generation,
    /// What was asked.
    pub question: Question,
    /// Name of the policy that was asked.
    pub policy: Arc<str>,
    /// Number of the question among those of its kind.
    pub call: u64,
    /// The machine's time.
    pub at: Instant,
    /// The request that it is about; questions about many have none.
    pub request: Option<RequestId>,
    /// Over everything that the policy was told: equal for equal inputs.
    pub inputs: u64,
    /// Candidates.
    pub rows: u32,
    /// What the policy proposed.
    pub proposal: Proposal,
    /// Why the native default answered in its place.
    pub fallback: Option<FallbackReason>,
    /// Time inside the policy.
    pub took_ns: u64,
    /// Fuel that the policy used.
    pub fuel: u64,
}

/// A proposal in numbers, before the host's checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proposal {
    /// No opinion, or the policy failed.
    None,
    /// Admission: into the queue.
    Admit {
        /// Output tokens whose blocks are reserved.
        reserve_output_tokens: u32,
        /// Class.
        class_rank: u8,
    },
    /// Admission: ask again later.
    Defer {
        /// How much later.
        for_us: u32,
    },
    /// Admission: into the queue under a smaller cap.
    Degrade {
        /// The cap.
        max_output_tokens: u32,
        /// Output tokens whose blocks are reserved.
        reserve_output_tokens: u32,
        /// Class.
        class_rank: u8,
    },
    /// Admission: away.
    Reject {
        /// The contract's number.
        reason: u16,
        /// When another try makes sense.
        retry_after_ms: u32,
    },
    /// Routing: these rows.
    Place {
        /// The first rows, best first; `u32::MAX` is none.
        ranked: [u32; FIRST_ROWS],
        /// Rows named.
        named: u32,
        /// Bounded wait for the first.
        wait_us: u32,
    },
    /// Routing: not now.
    Hold {
        /// How long.
        for_us: u32,
    },
    /// Order: these rows.
    Rank {
        /// The first rows; `u32::MAX` is none.
        ranked: [u32; FIRST_ROWS],
        /// Rows named.
        named: u32,
        /// Rows not named wait.
        keep: bool,
        /// Target of a round; `u32::MAX` is none.
        tpot_target_us: u32,
    },
    /// Victims: these rows.
    Yield {
        /// The first rows; `u32::MAX` is none.
        rows: [u32; FIRST_ROWS],
        /// Rows named.
        named: u32,
    },
    /// Eviction: prices.
    Prices {
        /// Rows priced.
        priced: u32,
        /// The lowest price.
        lowest: u64,
        /// The highest price.
        highest: u64,
    },
    /// Overload: a stance.
    Stance {
        /// Its level.
        level: u8,
        /// How long it stands.
        hold_us: u32,
        /// Its actions.
        actions: u32,
    },
}

/// Rows of a ranking that a record keeps.
pub const FIRST_ROWS: usize = 4;

/// The first rows of a list.
pub(crate) fn first_rows(rows: impl IntoIterator<Item = u32>) -> [u32; FIRST_ROWS] {
    let mut first = [u32::MAX; FIRST_ROWS];
    first.iter_mut().zip(rows).for_each(|(slot, row)| *slot = row);
    first
}

/// The ring of one machine, shared by its thread and its readers.
#[derive(Clone, Debug, Default)]
pub(crate) struct DecisionRing(Arc<Mutex<VecDeque<DecisionRecord>>>);

impl DecisionRing {
    /// Moves everything in, unless somebody reads at this moment. What was oldest leaves.
    pub fn take(&self, from: &mut Vec<DecisionRecord>) {
        let mut kept = match self.0.try_lock() {
            Ok(kept) => kept,
            Err(TryLockError::Poisoned(kept)) => kept.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if kept.capacity() == 0 {
            kept.reserve_exact(DECISIONS_KEPT_MAX);
        }
        let over = (kept.len() + from.len()).saturating_sub(DECISIONS_KEPT_MAX).min(kept.len());
        kept.drain(..over);
        let room = DECISIONS_KEPT_MAX - kept.len();
        let skip = from.len().saturating_sub(room);
        kept.extend(from.drain(..).skip(skip));
    }

    /// The last `count` that fit, oldest first.
    pub fn last(&self, count: usize, fits: impl Fn(&DecisionRecord) -> bool) -> Vec<DecisionRecord> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<_> = kept.iter().rev().filter(|record| fits(record)).take(count).cloned().collect();
        drop(kept);
        found.reverse();
        found
    }
}

/// The rings of all machines, by machine.
#[derive(Debug)]
pub(crate) struct DecisionLog(pub Box<[(Machine, DecisionRing)]>);

impl DecisionLog {
    /// Empty, for a gateway and `replicas`.
    pub fn new(replicas: usize) -> Self {
        let replicas = (0..replicas).map(|replica| Machine::Replica(replica as u32));
        Self(
            std::iter::once(Machine::Gateway)
                .chain(replicas)
                .map(|machine| (machine, DecisionRing::default()))
                .collect(),
        )
    }

    /// One machine's ring.
    pub fn ring(&self, machine: Machine) -> DecisionRing {
        let found = self.0.iter().find(|(of, _)| *of == machine);
        found.map(|(_, ring)| ring.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sequence: u64) -> DecisionRecord {
        DecisionRecord {
            sequence,
            generation: Generation(1),
            question: Question::Order,
            policy: "p".into(),
            call: sequence,
            at: Instant(0),
            request: None,
            inputs: 0,
            rows: 0,
            proposal: Proposal::None,
            fallback: None,
            took_ns: 0,
            fuel: 0,
        }
    }

    #[test]
    fn the_newest_stay_and_the_rest_leaves() {
        let ring = DecisionRing::default();
        let most = DECISIONS_KEPT_MAX as u64;
        ring.take(&mut (1..=most).map(record).collect());
        ring.take(&mut (most + 1..=most + 10).map(record).collect());
        let all = ring.last(usize::MAX, |_| true);
        assert_eq!((all.len() as u64, all[0].sequence), (most, 11));
        ring.take(&mut (1..=most + 5).map(record).collect());
        let last = ring.last(2, |_| true);
        assert_eq!([last[0].sequence, last[1].sequence], [most + 4, most + 5]);
        assert_eq!(ring.last(9, |record| record.sequence == 7)[0].sequence, 7);
    }

    #[test]
    fn a_reader_does_not_hold_the_machine_up() {
        let ring = DecisionRing::default();
        let reader = ring.0.lock().unwrap();
        let mut waiting = vec![record(1)];
        ring.take(&mut waiting);
        assert_eq!(waiting.len(), 1, "kept for the next turn");
        drop(reader);
        ring.take(&mut waiting);
        assert!(waiting.is_empty());
        assert_eq!(ring.last(5, |_| true).len(), 1);
    }
}
