//! What is known of each replica, and how much may it still be given?
//!
//! A report grants absolute credit; what was dispatched past the last dispatch that it covers is taken off. So a stale report never
//! makes two gateways' worth of work of one slot, and a report says the whole truth again.

use alloc::vec::Vec;

use penstock_base::limits::RESERVED_REQUESTS_MAX;
use penstock_base::{DispatchNumber, Duration, Instant, ReplicaEpoch, ReplicaId};

use super::io::ReplicaFacts;
use super::list::{Links, List};
use super::request::Need;
use super::table::{NONE, Table};
use crate::message::{Credit, Load, Report};

/// One known replica: ready or draining.
#[derive(Clone, Debug)]
pub(super) struct Replica {
    /// What it said of itself.
    pub facts: ReplicaFacts,
    /// It takes no new work.
    pub draining: bool,
    /// When it became ready.
    pub since: Instant,
    /// Its newest report.
    pub report: Option<Report>,
    /// Number of the last dispatch sent.
    pub dispatched: DispatchNumber,
    /// Requests that hold resources there, in the order of dispatch, settling ones included.
    pub requests: List,
    /// The first of them that no report covers; [`NONE`] when all are covered.
    pub first_uncovered: u32,
    /// What all of them hold.
    pub inflight: Need,
    /// Of `inflight.prefill_tokens`: of requests that have not emitted. Kept apart since blocks stay and prefill does not.
    pub inflight_prefill_tokens: u64,
    /// What the uncovered ones were debited.
    pub uncovered: Need,
    /// What it spends on prompts for other replicas, as far as no report covers it.
    pub lent: Need,
    /// How many are uncovered.
    pub uncovered_requests: u32,
    /// Output tokens that all of them are still expected to produce.
    pub expected_left: u64,
    /// A refused dispatch: no credit until a report covers it, whatever the last one said.
    pub refused: Option<DispatchNumber>,
    /// Requests that wait for its next credit, first come first.
    pub reserved: Reserved,
    /// The request for which its credit is withheld, [`NONE`] else.
    pub withheld_for: u32,
    /// Its part of the prefix index.
    pub cache: CacheState,
}

/// How well the index knows a replica's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CacheState {
    /// Number of the last event taken.
    pub sequence: u64,
    /// No event was missed since the epoch began or the cache was last cleared.
    pub complete: bool,
    /// When the index last agreed with the replica.
    pub as_of: Instant,
    /// It is complete, and agreed lately enough. Else the replica gets requests by its load alone.
    pub believed: bool,
}

impl CacheState {
    /// Is what is known complete, and younger than `stale`?
    fn deserves_belief(&self, now: Instant, stale: Duration) -> bool {
        self.complete && now < self.as_of + stale
    }
}

/// Request slots in order, a handful at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Reserved {
    slots: [u32; RESERVED_REQUESTS_MAX],
    len: u8,
}

impl Reserved {
    /// In order.
    pub fn as_slice(&self) -> &[u32] {
        &self.slots[..usize::from(self.len)]
    }

    /// Adds at the end; `false` when full.
    pub fn push(&mut self, slot: u32) -> bool {
        let Some(place) = self.slots.get_mut(usize::from(self.len)) else { return false };
        *place = slot;
        self.len += 1;
        true
    }

    /// Takes one out.
    pub fn remove(&mut self, slot: u32) {
        let Some(at) = self.as_slice().iter().position(|other| *other == slot) else { return };
        self.slots.copy_within(at + 1..usize::from(self.len), at);
        self.len -= 1;
    }

    /// Full?
    pub fn is_full(&self) -> bool {
        usize::from(self.len) == RESERVED_REQUESTS_MAX
    }
}

impl Replica {
    fn new(facts: ReplicaFacts, now: Instant) -> Self {
        Self {
            facts,
            draining: false,
            since: now,
            report: None,
            dispatched: DispatchNumber(0),
            requests: List::default(),
            first_uncovered: NONE,
            inflight: Need::default(),
            inflight_prefill_tokens: 0,
            uncovered: Need::default(),
            lent: Need::default(),
            uncovered_requests: 0,
            expected_left: 0,
            refused: None,
            reserved: Reserved::default(),
            withheld_for: NONE,
            cache: CacheState { sequence: 0, complete: true, as_of: now, believed: true },
        }
    }

    /// Slot, epoch: what a ranking remembers.
    pub fn named(&self, slot: u32) -> (u32, ReplicaEpoch) {
        (slot, self.facts.epoch)
    }

    /// What may be dispatched now; nothing before the first report, while draining, and after a refusal until a report covers it.
    pub fn credit(&self) -> Credit {
        let Some(report) = self.report.as_ref().filter(|_| !self.draining && self.refused.is_none()) else {
            return Credit::default();
        };
        Credit {
            requests: report.credit.requests.saturating_sub(self.uncovered.slots + self.lent.slots),
            prefill_tokens: report
                .credit
                .prefill_tokens
                .saturating_sub(self.uncovered.prefill_tokens + self.lent.prefill_tokens),
            blocks: report.credit.blocks.saturating_sub(self.uncovered.blocks + self.lent.blocks),
        }
    }

    /// Are answers computed here?
    pub fn decodes(&self) -> bool {
        self.facts.role_code >= 2
    }

    /// Looks again at whether its part of the index is believed; what changed.
    pub fn judge_cache(&mut self, now: Instant, stale: Duration) -> Option<bool> {
        let believed = self.cache.deserves_belief(now, stale);
        (core::mem::replace(&mut self.cache.believed, believed) != believed).then_some(believed)
    }

    /// Blocks of a prompt that the index may be believed to find here: none while it is not believed.
    pub fn known_blocks(&self) -> u32 {
        if self.cache.believed { u32::MAX } else { 0 }
    }

    /// Does its credit cover `need` now?
    pub fn covers(&self, need: &Need) -> bool {
        covers(self.credit(), need)
    }

    /// Could it ever take `need` with sequences of `tokens_max`?
    pub fn fits(&self, need: &Need, finish_blocks: u64, tokens_max: u64) -> bool {
        need.slots <= self.facts.slots
            && finish_blocks <= u64::from(self.facts.total_blocks)
            && tokens_max <= u64::from(self.facts.context_tokens_max)
    }

    /// Has it nothing to do, as far as is known here?
    pub fn is_idle(&self) -> bool {
        let reported = self
            .report
            .as_ref()
            .is_some_and(|report| report.load.running_requests == 0 && report.load.ready_requests == 0);
        reported && self.requests.is_empty() && !self.draining
    }

    /// Its load as last reported.
    pub fn load(&self) -> Option<&Load> {
        self.report.as_ref().map(|report| &report.load)
    }
}

/// Does a credit cover a need?
///
/// Any prefill credit covers one prompt of whatever length, which may overdraw it once: a prompt longer than a round would otherwise
/// never start.
pub(super) fn covers(credit: Credit, need: &Need) -> bool {
    credit.requests >= need.slots && credit.blocks >= need.blocks && credit.prefill_tokens >= need.prefill_tokens.min(1)
}

/// Sums over ready replicas, kept as reports come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct PoolSums {
    /// Blocks.
    pub total_blocks: u64,
    /// Referenced.
    pub active_blocks: u64,
    /// Free.
    pub free_blocks: u64,
    /// Unreferenced and cached.
    pub cached_blocks: u64,
    /// What running work may still grow to.
    pub growth_blocks: u64,
    /// Prompt tokens dispatched and unfinished.
    pub prefill_tokens: u64,
    /// Running.
    pub running_requests: u64,
    /// Prompt tokens a second.
    pub prefill_tokens_per_sec: u64,
    /// Output tokens a second.
    pub decode_tokens_per_sec: u64,
    /// Replicas that have reported.
    pub reported: u32,
}

impl PoolSums {
    fn change(&mut self, load: &Load, by: impl Fn(u64, u64) -> u64) {
        let Self {
            total_blocks,
            active_blocks,
            free_blocks,
            cached_blocks,
            growth_blocks,
            prefill_tokens,
            running_requests,
            prefill_tokens_per_sec,
            decode_tokens_per_sec,
            reported,
        } = self;
        for (sum, part) in [
            (total_blocks, u64::from(load.total_blocks)),
            (active_blocks, u64::from(load.active_blocks)),
            (free_blocks, u64::from(load.free_blocks)),
            (cached_blocks, u64::from(load.cached_blocks)),
            (growth_blocks, bounded(load.growth_blocks)),
            (prefill_tokens, bounded(load.prefill_tokens)),
            (running_requests, u64::from(load.running_requests)),
            (prefill_tokens_per_sec, bounded(load.prefill_tokens_per_sec)),
            (decode_tokens_per_sec, bounded(load.decode_tokens_per_sec)),
        ] {
            *sum = by(*sum, part);
        }
        *reported = by(u64::from(*reported), 1) as u32;
    }
}

/// A reported number, small enough that sums over all replicas cannot overflow.
fn bounded(value: u64) -> u64 {
    value.min(1 << 48)
}

/// All known replicas.
#[derive(Clone, Debug)]
pub(super) struct Replicas {
    /// By slot; never evicted.
    pub table: Table<ReplicaId, Replica>,
    /// Slots in the order of replica ids: the host's row order.
    by_id: Vec<u32>,
    /// Over ready ones.
    pub pool: PoolSums,
    /// Blocks debited at ready ones and covered by no report. Asked for at every step, so it is kept and not added up.
    pub uncovered_blocks: u64,
    /// Ready ones.
    ready: u32,
}

impl Replicas {
    /// None known.
    pub fn new(replicas_max: usize) -> Self {
        let table = Table::with_capacity(replicas_max);
        let by_id = Vec::with_capacity(table.capacity());
        Self { table, by_id, pool: PoolSums::default(), uncovered_blocks: 0, ready: 0 }
    }

    /// Adds a ready replica; `None` when the table is full or it is known.
    pub fn add(&mut self, facts: ReplicaFacts, now: Instant) -> Option<u32> {
        let slot = self.table.insert(facts.replica, Replica::new(facts, now))?.slot;
        let table = &self.table;
        let at = self.by_id.partition_point(|other| table.key(*other) < Some(facts.replica));
        self.by_id.insert(at, slot);
        self.ready += 1;
        Some(slot)
    }

    /// Removes one that holds nothing any more.
    pub fn remove(&mut self, slot: u32) {
        self.leave_pool(slot);
        self.by_id.retain(|other| *other != slot);
        self.table.remove(slot);
    }

    /// It takes no new work. `false` when it did not before.
    pub fn drain(&mut self, slot: u32) -> bool {
        if self.table[slot].draining {
            return false;
        }
        self.leave_pool(slot);
        self.table[slot].draining = true;
        true
    }

    fn leave_pool(&mut self, slot: u32) {
        let replica = &self.table[slot];
        if replica.draining {
            return;
        }
        if let Some(load) = replica.load() {
            self.pool.change(load, |sum, part| sum - part);
        }
        self.uncovered_blocks -= replica.uncovered.blocks;
        self.ready -= 1;
    }

    /// Takes a newer report. `false` for an old one, or one that covers dispatches nobody sent or fewer than were covered before.
    pub fn take_report(
        &mut self,
        slot: u32,
        report: &Report,
        now: Instant,
        mut uncovered: impl FnMut(u32) -> Uncovered,
    ) -> bool {
        let replica = &mut self.table[slot];
        let known = replica.report.as_ref();
        let (newest, covered) = known.map_or((0, DispatchNumber(0)), |known| (known.number, known.covers));
        if report.number <= newest || report.covers > replica.dispatched || report.covers < covered {
            return false;
        }
        if !replica.draining {
            if let Some(load) = replica.report.as_ref().map(|known| known.load) {
                self.pool.change(&load, |sum, part| sum - part);
            }
            self.pool.change(&report.load, |sum, part| sum + part);
        }
        replica.report = Some(Report { as_of: report.as_of.min(now), ..*report });
        if replica.refused.is_some_and(|number| number <= report.covers) {
            replica.refused = None;
        }
        while replica.first_uncovered != NONE {
            let first = uncovered(replica.first_uncovered);
            if first.number > report.covers {
                break;
            }
            replica.uncovered.sub(&first.need);
            if !replica.draining {
                self.uncovered_blocks -= first.need.blocks;
            }
            replica.uncovered_requests -= 1;
            replica.first_uncovered = first.next;
        }
        true
    }

    /// Slots by replica id.
    pub fn slots(&self) -> &[u32] {
        &self.by_id
    }

    /// Known replicas by id.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Replica)> {
        self.by_id.iter().map(|slot| (*slot, &self.table[*slot]))
    }

    /// Ready replicas by id.
    pub fn iter_ready(&self) -> impl Iterator<Item = (u32, &Replica)> {
        self.iter().filter(|(_, replica)| !replica.draining)
    }

    /// Number of ready replicas.
    pub fn ready(&self) -> u32 {
        self.ready
    }

    /// The slot, when the incarnation is the known one.
    pub fn find(&self, replica: ReplicaId, epoch: ReplicaEpoch) -> Option<u32> {
        self.table.find(&replica).filter(|slot| self.table[*slot].facts.epoch == epoch)
    }

    /// The replica of a ranking, while it is the same incarnation.
    pub fn named(&self, (slot, epoch): (u32, ReplicaEpoch)) -> Option<&Replica> {
        self.table.get(slot).filter(|replica| replica.facts.epoch == epoch)
    }

    /// Age of the oldest report among ready replicas; `None` when there is none, or one has not reported.
    pub fn oldest_report(&self, now: Instant) -> Option<Duration> {
        if self.ready == 0 || self.pool.reported < self.ready {
            return None;
        }
        self.iter_ready().filter_map(|(_, replica)| replica.report.as_ref()).map(|report| now.since(report.as_of)).max()
    }

    /// Order and sums equal a walk.
    pub fn check(&self, links: &Links) -> Result<(), &'static str> {
        self.table.check()?;
        let (mut pool, mut ready, mut last, mut uncovered) = (PoolSums::default(), 0, None, 0);
        for (_, replica) in self.iter() {
            replica.requests.check(links)?;
            if last >= Some(replica.facts.replica) {
                return Err("replicas: not in the order of their ids");
            }
            last = Some(replica.facts.replica);
            if replica.draining {
                continue;
            }
            ready += 1;
            uncovered += replica.uncovered.blocks;
            if let Some(load) = replica.load() {
                pool.change(load, |sum, part| sum + part);
            }
        }
        let sums = (ready, pool, uncovered) == (self.ready, self.pool, self.uncovered_blocks);
        if self.by_id.len() != self.table.len() || !sums {
            return Err("replicas: a sum differs from the walk");
        }
        Ok(())
    }

    /// Recomputes what follows from the entries, after decoding.
    pub fn from_table(table: Table<ReplicaId, Replica>) -> Self {
        let mut by_id = Vec::with_capacity(table.capacity());
        by_id.extend(table.iter().map(|(slot, _)| slot));
        by_id.sort_unstable_by_key(|slot| table.key(*slot));
        let (mut pool, mut ready, mut uncovered_blocks) = (PoolSums::default(), 0, 0);
        for (_, replica) in table.iter().filter(|(_, replica)| !replica.draining) {
            ready += 1;
            uncovered_blocks += replica.uncovered.blocks;
            if let Some(load) = replica.load() {
                pool.change(load, |sum, part| sum + part);
            }
        }
        Self { table, by_id, pool, uncovered_blocks, ready }
    }
}

/// An uncovered dispatch, as [`Replicas::take_report`] walks over them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uncovered {
    /// Its number.
    pub number: DispatchNumber,
    /// What it was debited.
    pub need: Need,
    /// The one behind it, [`NONE`] at the end.
    pub next: u32,
}

impl Need {
    /// Both together.
    pub fn add(&mut self, other: &Self) {
        self.slots += other.slots;
        self.prefill_tokens += other.prefill_tokens;
        self.blocks += other.blocks;
    }

    /// Without `other`, which is part of it.
    pub fn sub(&mut self, other: &Self) {
        self.slots -= other.slots;
        self.prefill_tokens -= other.prefill_tokens;
        self.blocks -= other.blocks;
    }
}
