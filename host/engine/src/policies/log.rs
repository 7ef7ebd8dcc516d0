//! What was decided lately, at one machine: a bounded ring that anyone may read.
//!
//! Numbers only: no prompt, no tenant's name. The machine's thread fills a small store of its own and hands it over between two steps;
//! a reader at the same moment makes it wait for the next turn, never the machine.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use penstock_base::{Generation, Instant, RequestId};
use penstock_policy_api::validate::Change;
use penstock_policy_api::{FallbackReason, Question};

use super::inputs::{InputsKept, KeptFor, Sampling};
use super::seats::Machine;
use crate::story::{MOMENTS_MAX, Moment};

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
    /// What the host changed about it.
    pub changed: Option<Change>,
    /// Why the native default answered in its place.
    pub fallback: Option<FallbackReason>,
    /// Why everything that the policy was told is kept beside this, when it is.
    pub kept: Option<KeptFor>,
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

/// Bounded, shared by one thread that fills it and anybody who reads.
pub(crate) struct Ring<T> {
    kept: Arc<Mutex<Kept<T>>>,
    /// Most weight in it.
    most: usize,
    /// Weight of one.
    weight: fn(&T) -> usize,
}

struct Kept<T> {
    all: VecDeque<T>,
    weight: usize,
}

impl<T> Clone for Ring<T> {
    fn clone(&self) -> Self {
        Self { kept: Arc::clone(&self.kept), most: self.most, weight: self.weight }
    }
}

impl<T: Clone> Ring<T> {
    /// Empty, for what weighs `most` together.
    pub fn new(most: usize, weight: fn(&T) -> usize) -> Self {
        Self { kept: Arc::new(Mutex::new(Kept { all: VecDeque::new(), weight: 0 })), most, weight }
    }

    /// Moves everything in, unless somebody reads at this moment. What was oldest leaves.
    pub fn take(&self, from: &mut Vec<T>) {
        if from.is_empty() {
            return;
        }
        let mut kept = match self.kept.try_lock() {
            Ok(kept) => kept,
            Err(TryLockError::Poisoned(kept)) => kept.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        for one in from.drain(..) {
            kept.weight += (self.weight)(&one);
            kept.all.push_back(one);
            while kept.weight > self.most {
                let Some(oldest) = kept.all.pop_front() else { break };
                kept.weight -= (self.weight)(&oldest);
            }
        }
    }

    /// The last `count` that fit, oldest first.
    pub fn last(&self, count: usize, fits: impl Fn(&T) -> bool) -> Vec<T> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<_> = kept.all.iter().rev().filter(|one| fits(one)).take(count).cloned().collect();
        drop(kept);
        found.reverse();
        found
    }

    /// The oldest that is still there.
    pub fn oldest(&self) -> Option<T> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).all.front().cloned()
    }
}

/// The rings of one machine.
#[derive(Clone)]
pub(crate) struct DecisionRings {
    /// Decisions.
    pub decisions: Ring<DecisionRecord>,
    /// What some of them were told.
    pub inputs: Ring<InputsKept>,
}

impl DecisionRings {
    fn new(inputs_bytes: usize) -> Self {
        Self { decisions: Ring::new(DECISIONS_KEPT_MAX, |_| 1), inputs: Ring::new(inputs_bytes, InputsKept::bytes) }
    }

    /// Moves everything in, as far as nobody reads.
    pub fn take(&self, decisions: &mut Vec<DecisionRecord>, inputs: &mut Vec<InputsKept>) {
        self.decisions.take(decisions);
        self.inputs.take(inputs);
    }
}

/// What is kept of decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecisionsConfig {
    /// Requests whose questions are kept with everything that the policy was told, in parts of a million; chosen by a hash of their ids.
    /// Of questions about many, one in 64 of that share. Faults and changed answers are kept in any case.
    pub sample_ppm: u32,
    /// Memory for that, of each machine.
    pub inputs_bytes: usize,
}

impl Default for DecisionsConfig {
    fn default() -> Self {
        // Every request can be explained until its inputs leave the ring: a few thousand of them.
        Self { sample_ppm: 1_000_000, inputs_bytes: 4 << 20 }
    }
}

/// The rings of all machines, by machine.
pub(crate) struct DecisionLog {
    /// By machine.
    pub rings: Box<[(Machine, DecisionRings)]>,
    /// What happened to requests.
    pub moments: Ring<Moment>,
    /// Which inputs are kept.
    pub sampling: Sampling,
}

impl DecisionLog {
    /// Empty, for a gateway and `replicas`.
    pub fn new(replicas: usize, config: DecisionsConfig) -> Self {
        let replicas = (0..replicas).map(|replica| Machine::Replica(replica as u32));
        let machines = std::iter::once(Machine::Gateway).chain(replicas);
        Self {
            rings: machines.map(|machine| (machine, DecisionRings::new(config.inputs_bytes))).collect(),
            moments: Ring::new(MOMENTS_MAX, |_| 1),
            sampling: Sampling { ppm: config.sample_ppm },
        }
    }

    /// One machine's rings.
    pub fn of(&self, machine: Machine) -> Option<&DecisionRings> {
        self.rings.iter().find(|(of, _)| *of == machine).map(|(_, rings)| rings)
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
            changed: None,
            fallback: None,
            kept: None,
            took_ns: 0,
            fuel: 0,
        }
    }

    #[test]
    fn the_newest_stay_and_the_rest_leaves() {
        let ring = Ring::new(DECISIONS_KEPT_MAX, |_| 1);
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
    fn a_ring_is_bounded_by_weight() {
        let ring: Ring<Vec<u8>> = Ring::new(10, Vec::len);
        ring.take(&mut vec![vec![1; 4], vec![2; 4], vec![3; 4]]);
        assert_eq!(ring.last(9, |_| true), [vec![2; 4], vec![3; 4]]);
        ring.take(&mut vec![vec![4; 11]]);
        assert_eq!(ring.last(9, |_| true), Vec::<Vec<u8>>::new(), "too large for the whole ring");
    }

    #[test]
    fn a_reader_does_not_hold_the_machine_up() {
        let ring = Ring::new(DECISIONS_KEPT_MAX, |_| 1);
        let reader = ring.kept.lock().unwrap();
        let mut waiting = vec![record(1)];
        ring.take(&mut waiting);
        assert_eq!(waiting.len(), 1, "kept for the next turn");
        drop(reader);
        ring.take(&mut waiting);
        assert!(waiting.is_empty());
        assert_eq!(ring.last(5, |_| true).len(), 1);
    }
}
