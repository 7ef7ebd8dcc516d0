//! What leaves the prefix cache, when and why? Eviction, quotas, expiry, clean-up, and the questions to the policy.

use alloc::vec::Vec;

use penstock_base::{BlockKey, BlockRef, Instant, TenantId};

use crate::call::Flush;
use crate::event::{KvChange, KvEvent, RemoveCause};
use crate::evict::RunRow;
use crate::kv::Kv;
use crate::list::NONE;
use crate::pool::{BlockState, StaleRef};
use crate::stats::CacheTotals;
use crate::watermark::{PoolLevel, Pressure};

impl Kv {
    /// Must blocks leave before `needed` are allocated? Ask the policy about [`Self::cheapest`] first, then [`Self::evict`].
    pub fn pressure(&self, needed: u32) -> Option<Pressure> {
        self.config.watermarks.pressure(PoolLevel {
            total: self.config.blocks,
            free: self.counts().free,
            evictable: self.cache.evictable(),
            needed,
        })
    }

    /// The content of `i`, which has no children, is forgotten; the block becomes free if nobody references it.
    fn forget_leaf(&mut self, now: Instant, i: u32, cause: RemoveCause) -> bool {
        self.cache.remove(i, cause, now);
        let was_cached = self.pool.state_at(i) == BlockState::Cached;
        self.pool.unkey(i);
        was_cached
    }

    /// Forgets `i` and everything behind it; how many blocks that were.
    pub(crate) fn forget_below(&mut self, now: Instant, i: u32, cause: RemoveCause) -> u32 {
        let mut forgotten = 0;
        loop {
            let last = self.cache.last_below(i);
            self.forget_leaf(now, last, cause);
            forgotten += 1;
            if last == i {
                return forgotten;
            }
        }
    }

    /// Frees up to `want` cached blocks: content whose time is up, then the cheapest of tenants over their quota, then the cheapest
    /// leaves. How many became free; fewer only when nothing else can leave.
    pub fn evict(&mut self, now: Instant, want: u32) -> u32 {
        let mut freed = 0;
        while freed < want {
            let (leaf, cause) = if let Some(due) = self.cache.due(now) {
                (self.cache.last_below(due), RemoveCause::Expired)
            } else if let Some(leaf) = self.cache.over_quota() {
                (leaf, RemoveCause::Quota)
            } else if let Some(leaf) = self.cache.order.cheapest() {
                (leaf, RemoveCause::Pressure)
            } else {
                break;
            };
            freed += u32::from(self.forget_leaf(now, leaf, cause));
        }
        freed
    }

    /// Evicts from tenants over their hard quota, at most `most` blocks: a quota that was lowered is met in steps.
    pub(crate) fn enforce_quotas(&mut self, now: Instant, most: u32) {
        for _ in 0..most {
            let Some(leaf) = self.cache.over_quota() else { return };
            self.forget_leaf(now, leaf, RemoveCause::Quota);
        }
    }

    /// Forgets content whose time is up, at most `most` blocks; call it once a step. Due content is never found, forgotten or not;
    /// blocks in use stay with their sequences. How many were forgotten.
    pub fn expire(&mut self, now: Instant, most: u32) -> u32 {
        let mut forgotten = 0;
        while forgotten < most {
            let Some(due) = self.cache.due(now) else { break };
            let last = self.cache.last_below(due);
            self.forget_leaf(now, last, RemoveCause::Expired);
            forgotten += 1;
        }
        forgotten
    }

    /// Secure clean-up: nothing of `what` can be found after this call, blocks in use stay with their sequences, and all unreferenced ones
    /// are free. Walks the pool: an operator's action, not a step's. How many blocks were forgotten.
    pub fn flush(&mut self, now: Instant, what: Flush) -> u32 {
        let mut forgotten = 0;
        for i in 0..self.config.blocks {
            let node = self.cache.node(i);
            let matches = node.used
                && match what {
                    Flush::All => true,
                    Flush::Trust(group) => node.trust == group,
                };
            if matches {
                forgotten += self.forget_below(now, i, RemoveCause::Flushed);
            }
        }
        if what == Flush::All {
            self.cache.ghosts.clear();
            self.cache.events.push(KvChange::Cleared);
        }
        forgotten
    }

    /// Leaves that have not been priced since they became leaves, first come first; each is handed out once. Until it is priced, a leaf
    /// has the native price: the time of its last use.
    pub fn take_unpriced(&mut self, now: Instant, most: usize, rows: &mut Vec<RunRow>) {
        for _ in 0..most {
            let Some(i) = self.cache.next_waiting() else { return };
            rows.push(self.cache.row(i, self.pool.reference(i), now));
        }
    }

    /// Leaves waiting for [`Self::take_unpriced`].
    pub fn unpriced_blocks(&self) -> u32 {
        self.cache.order.waiting().len()
    }

    /// The `most` leaves that would leave next, in that order: the question before an eviction.
    pub fn cheapest(&self, now: Instant, most: usize, rows: &mut Vec<RunRow>) {
        rows.extend(self.cache.order.in_order().take(most).map(|i| self.cache.row(i, self.pool.reference(i), now)));
    }

    /// A policy's price for a run. False when it is no leaf any more (found again, or grown): the answer is passed over.
    pub fn set_price(&mut self, block: BlockRef, price: u64) -> Result<bool, StaleRef> {
        match self.pool.state(block) {
            None => Err(self.pool.stale(block)),
            Some(BlockState::Cached) => Ok(self.cache.set_price(block.index, price)),
            Some(_) => Ok(false),
        }
    }

    /// Moves the events since the last call to `into`.
    pub fn take_events(&mut self, into: &mut Vec<KvEvent>) {
        self.cache.events.drain_into(into);
    }

    /// The number that the next event will have: a fresh listing covers all numbers below.
    pub fn next_event_sequence(&self) -> u64 {
        self.cache.events.next_sequence()
    }

    /// Events lost because nobody took them in time.
    pub fn lost_events(&self) -> u64 {
        self.cache.events.lost()
    }

    /// Every findable block with the key of its parent, for a receiver that lost events. Walks the pool.
    pub fn for_each_stored(&self, mut each: impl FnMut(BlockKey, Option<BlockKey>)) {
        for node in self.cache.nodes.iter().filter(|node| node.used) {
            let parent = (node.parent != NONE).then(|| self.cache.node(node.parent).key);
            each(node.key, parent);
        }
    }

    /// Every findable block with its depth in blocks from the root, 1 for the first of a prompt. Walks the pool.
    pub fn for_each_stored_at(&self, mut each: impl FnMut(BlockKey, u32)) {
        self.cache.nodes.iter().filter(|node| node.used).for_each(|node| each(node.key, node.depth));
    }

    /// Every findable block with the key of the block before it and its depth, in no order. Walks the pool.
    pub fn for_each_stored_behind(&self, mut each: impl FnMut(BlockKey, Option<BlockKey>, u32)) {
        let nodes = &self.cache.nodes;
        for node in nodes.iter().filter(|node| node.used) {
            each(node.key, nodes.get(node.parent as usize).map(|parent| parent.key), node.depth);
        }
    }

    /// Counters since the start.
    pub fn totals(&self) -> CacheTotals {
        self.cache.stats.totals
    }

    /// Price of the leaf that left last for want of room.
    pub fn left_price(&self) -> u64 {
        self.cache.stats.left_price
    }

    /// Cached blocks evicted within the last 60 s.
    pub fn evicted_blocks(&self, now: Instant) -> u64 {
        self.cache.stats.evicted(now)
    }

    /// Blocks computed again within the last 60 s although they had been evicted no longer than 60 s before.
    pub fn regret_blocks(&self, now: Instant) -> u64 {
        self.cache.stats.regret(now)
    }

    /// Cached blocks reused within the last second.
    pub fn hit_blocks_per_sec(&self, now: Instant) -> u64 {
        self.cache.stats.hits_per_sec(now)
    }

    /// Unreferenced cached blocks of a tenant.
    pub fn tenant_cached_blocks(&self, tenant: TenantId) -> u32 {
        self.cache.tenants.find(tenant).map_or(0, |t| t.cached())
    }
}
