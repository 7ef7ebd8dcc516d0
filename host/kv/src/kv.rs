//! What does one step of a replica do with its blocks? Each move of a sequence is one call here; every call leaves all counts exact.
//!
//! | moment | call |
//! |---|---|
//! | a sequence starts or resumes | [`Kv::admit`]: longest prefix, references on it, the rest reserved; all or nothing |
//! | its sibling starts | [`Kv::fork`] |
//! | tokens are scheduled | [`Kv::extend`]: capacity, then blocks and copies-on-write into the table; then the caller submits |
//! | a batch is confirmed | [`Kv::retire`], then [`Kv::confirm`] for each sequence with newly full blocks |
//! | it ends or yields | [`Kv::release`] with its last batch as fence, [`Kv::unreserve`] |
//! | once a step | [`Kv::expire`]; [`Kv::take_unpriced`] and, under [`Kv::pressure`], [`Kv::cheapest`]: ask the policy, [`Kv::set_price`], [`Kv::evict`] |
//!
//! An allocation that is promised never fails for want of free blocks: what is missing is evicted at the prices in force. Asking the
//! policy first makes that a better choice, never a possible one.

use alloc::vec::Vec;

use penstock_base::{BatchId, BlockRef, Duration, Instant};

use crate::call::{Admit, Admitted, CopyOnWrite, Extend, KvConfig, KvError, Prefix, Released};
use crate::pool::{BlockPool, BlockState, Counts, StaleRef};
use crate::prefix::{Keys, PrefixCache};
use crate::reserve::{OwnerId, Reservations};
use crate::table::BlockTable;

/// Block pool, reservations and prefix cache of one replica.
///
/// The promise it keeps: `reserved <= free + evictable` after every call, so a promised block can always be had.
#[derive(Clone, Debug)]
pub struct Kv {
    pub(crate) config: KvConfig,
    pub(crate) pool: BlockPool,
    pub(crate) reservations: Reservations,
    pub(crate) cache: PrefixCache,
}

impl Kv {
    /// An empty pool.
    pub fn new(config: KvConfig) -> Result<Self, KvError> {
        config.check()?;
        Ok(Self {
            config,
            pool: BlockPool::new(config.blocks),
            reservations: Reservations::new(config.owners),
            cache: PrefixCache::new(config.blocks, config.block_size_tokens, config.tenants, config.events),
        })
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &KvConfig {
        &self.config
    }

    /// States, references and generations.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Blocks per state.
    pub fn counts(&self) -> Counts {
        self.pool.counts()
    }

    /// Promised and not yet handed out.
    pub fn reservations(&self) -> &Reservations {
        &self.reservations
    }

    /// Cached blocks that could all leave. Fewer than the cached ones while a block behind them is in use.
    pub fn evictable_blocks(&self) -> u32 {
        self.cache.evictable()
    }

    /// Blocks that can still be promised or taken beyond promises: free + evictable - reserved.
    pub fn available_blocks(&self) -> u32 {
        let have = u64::from(self.counts().free) + u64::from(self.cache.evictable());
        (have - self.reservations.total()) as u32
    }

    /// Blocks whose content is findable, referenced or not.
    pub fn stored_blocks(&self) -> u32 {
        self.cache.stored()
    }

    /// Memory that the bookkeeping holds; the same from construction on.
    pub fn reserved_bytes(&self) -> usize {
        self.pool.reserved_bytes() + self.reservations.reserved_bytes() + self.cache.reserved_bytes()
    }

    fn no_room(&self, missing: u32) -> KvError {
        KvError::NoRoom { short_blocks: missing - self.available_blocks() }
    }

    fn check_owner(&self, owner: OwnerId) -> Result<(), KvError> {
        if owner.0 < self.reservations.owners() { Ok(()) } else { Err(KvError::UnknownOwner(owner)) }
    }

    // --- Starting: match, reserve, share -------------------------------------------------------------------------------------

    fn prefix_limit(&self, keys: Keys<'_>, input_tokens: u32) -> u32 {
        keys.len().min(input_tokens.saturating_sub(1) / self.config.block_size_tokens)
    }

    /// The blocks of the longest chain, root first.
    fn chain<'a>(&'a self, now: Instant, keys: Keys<'a>, limit: u32) -> impl Iterator<Item = u32> + 'a {
        let mut parent = None;
        (0..limit).map_while(move |index| {
            parent = Some(self.cache.find_child(parent, keys.get(index)?, now)?);
            parent
        })
    }

    /// The longest cached prefix: whole blocks, at most the input less one token. Changes nothing.
    pub fn lookup(&self, now: Instant, keys: Keys<'_>, input_tokens: u32) -> Prefix {
        let blocks = self.chain(now, keys, self.prefix_limit(keys, input_tokens)).count() as u32;
        Prefix { blocks, tokens: blocks * self.config.block_size_tokens }
    }

    /// Finds the longest cached prefix, references it from the empty `table`, and promises the rest of `total_blocks`. All or nothing.
    pub fn admit(&mut self, now: Instant, ask: Admit<'_>, table: &mut BlockTable) -> Result<Admitted, KvError> {
        self.check_owner(ask.owner)?;
        if !table.is_empty() {
            return Err(KvError::TableInUse);
        }
        let limit = self.prefix_limit(ask.keys, ask.input_tokens);
        let (mut blocks, mut leaving) = (0, 0);
        for i in self.chain(now, ask.keys, limit) {
            blocks += 1;
            leaving += u32::from(self.cache.is_evictable(i));
        }
        if blocks > table.capacity() {
            return Err(KvError::TableFull);
        }
        let rest = ask.total_blocks.saturating_sub(blocks);
        let need = rest.saturating_add(leaving);
        if need > self.available_blocks() {
            return Err(self.no_room(need));
        }
        let (mut parent, mut idle) = (None, Duration::ZERO);
        for index in 0..blocks {
            let key = ask.keys.get(index).unwrap_or_default();
            let Some(i) = self.cache.find_child(parent, key, now) else { break };
            let in_use = self.pool.state_at(i) == BlockState::Active;
            idle = if in_use { Duration::ZERO } else { now.since(self.cache.node(i).last_use) };
            table.push(self.acquire_stored(i)?);
            self.cache.note_hit(i, ask.class, now);
            parent = Some(i);
        }
        table.set_cached(blocks);
        self.cache.stats.on_match(now, limit, blocks);
        self.reservations.add(ask.owner, rest);
        let tokens = blocks * self.config.block_size_tokens;
        Ok(Admitted { prefix: Prefix { blocks, tokens }, idle, reserved_blocks: rest })
    }

    /// References the stored block `i`, in whatever state it is.
    pub(crate) fn acquire_stored(&mut self, i: u32) -> Result<BlockRef, KvError> {
        let block = self.pool.reference(i);
        if self.pool.acquire(block)? == BlockState::Cached {
            self.cache.set_busy(i);
        }
        Ok(block)
    }

    /// Lists the first `blocks` blocks of `from` in the empty table `to` as well.
    pub fn fork(&mut self, from: &BlockTable, to: &mut BlockTable, blocks: u32) -> Result<(), KvError> {
        if !to.is_empty() {
            return Err(KvError::TableInUse);
        }
        if blocks > to.capacity() || blocks > from.len() {
            return Err(KvError::TableFull);
        }
        let shared = &from.blocks()[..blocks as usize];
        if let Some(stale) = shared.iter().find(|b| self.pool.state(**b) != Some(BlockState::Active)) {
            return Err(StaleRef(*stale).into());
        }
        for block in shared {
            self.pool.acquire(*block)?;
            to.push(*block);
        }
        to.set_cached(from.cached_blocks().min(blocks));
        to.set_confirmed(from.confirmed_blocks().min(blocks));
        Ok(())
    }

    /// Promises `blocks` more to `owner`, all or nothing.
    pub fn reserve(&mut self, owner: OwnerId, blocks: u32) -> Result<(), KvError> {
        self.check_owner(owner)?;
        if blocks > self.available_blocks() {
            return Err(self.no_room(blocks));
        }
        self.reservations.add(owner, blocks);
        Ok(())
    }

    /// Takes back up to `blocks` of what is left of the promise to `owner` ([`u32::MAX`]: all of it); how much that was.
    pub fn unreserve(&mut self, owner: OwnerId, blocks: u32) -> u32 {
        self.reservations.take(owner, blocks)
    }

    /// Hands up to `blocks` of one owner's promise to another, as when a request's promise is divided among its sequences.
    pub fn move_reserved(&mut self, from: OwnerId, to: OwnerId, blocks: u32) -> Result<u32, KvError> {
        self.check_owner(to)?;
        let moved = self.reservations.take(from, blocks);
        self.reservations.add(to, moved);
        Ok(moved)
    }

    // --- Growing -------------------------------------------------------------------------------------------------------------

    /// Can `owner` have `blocks` blocks, from its promise and from what is available?
    pub(crate) fn check_room(&self, owner: OwnerId, blocks: u32) -> Result<(), KvError> {
        self.check_owner(owner)?;
        let growth = blocks.saturating_sub(self.reservations.of(owner));
        if growth > self.available_blocks() { Err(self.no_room(growth)) } else { Ok(()) }
    }

    /// Makes `blocks` blocks free, which [`Self::check_room`] has promised.
    pub(crate) fn make_free(&mut self, now: Instant, blocks: u32) {
        let free = self.counts().free;
        if free < blocks {
            self.evict(now, blocks - free);
        }
    }

    fn allocate_one(&mut self, owner: OwnerId) -> Result<BlockRef, KvError> {
        self.reservations.take(owner, 1);
        self.pool.allocate().ok_or(KvError::NoRoom { short_blocks: 1 })
    }

    /// Appends `blocks` blocks to the table, from the owner's promise first; evicts what is missing. All or nothing.
    pub fn append(&mut self, now: Instant, owner: OwnerId, table: &mut BlockTable, blocks: u32) -> Result<(), KvError> {
        if blocks > table.capacity() - table.len() {
            return Err(KvError::TableFull);
        }
        self.check_room(owner, blocks)?;
        self.make_free(now, blocks);
        for _ in 0..blocks {
            let block = self.allocate_one(owner)?;
            table.push(block);
        }
        Ok(())
    }

    /// Makes the positions `start..start + tokens` writable by this table alone: appends blocks up to the last position and replaces
    /// blocks that others can see, which are pushed to `copies`. All or nothing. Then the caller submits `batch`.
    pub fn extend(
        &mut self,
        now: Instant,
        row: Extend,
        table: &mut BlockTable,
        copies: &mut Vec<CopyOnWrite>,
    ) -> Result<(), KvError> {
        if row.tokens == 0 {
            return Ok(());
        }
        let size = self.config.block_size_tokens;
        let first = row.start / size;
        let end = (u64::from(row.start) + u64::from(row.tokens)).div_ceil(u64::from(size));
        if end > u64::from(table.capacity()) {
            return Err(KvError::TableFull);
        }
        let end = end as u32;
        let written = first..end.min(table.len());
        let is_shared = |kv: &Self, index: u32| table.get(index).is_some_and(|block| !kv.pool.is_writable(block));
        let shared = written.clone().filter(|index| is_shared(self, *index)).count() as u32;
        if let Some(stale) = written.clone().filter_map(|i| table.get(i)).find(|b| self.pool.state(*b).is_none()) {
            return Err(StaleRef(stale).into());
        }
        let appended = end.saturating_sub(table.len());
        self.check_room(row.owner, shared + appended)?;
        self.make_free(now, shared + appended);
        for index in written {
            let Some(from) = table.get(index).filter(|block| !self.pool.is_writable(*block)) else { continue };
            let to = self.allocate_one(row.owner)?;
            table.replace(index, to);
            table.set_confirmed(table.confirmed_blocks().min(index));
            self.drop_reference(now, from, Some(row.batch))?;
            let tokens = row.start.saturating_sub(index * size).min(size);
            copies.push(CopyOnWrite { index, from, to, tokens });
        }
        for _ in 0..appended {
            let block = self.allocate_one(row.owner)?;
            table.push(block);
        }
        Ok(())
    }

    // --- Ending --------------------------------------------------------------------------------------------------------------

    /// One table lists `block` no more.
    pub(crate) fn drop_reference(
        &mut self,
        now: Instant,
        block: BlockRef,
        fence: Option<BatchId>,
    ) -> Result<BlockState, KvError> {
        let state = self.pool.release(block, fence)?;
        if self.pool.state(block).is_some() && self.pool.keyed_at(block.index) {
            self.cache.note_use(block.index, now);
            if state == BlockState::Cached {
                self.cache.set_idle(block.index);
                self.enforce_quotas(now, 2);
            }
        }
        Ok(state)
    }

    /// Empties the table, last block first. `fence` is the last submitted batch that touches the sequence: until [`Self::retire`] of it,
    /// blocks that nobody else lists are reclaimable. A fence that has been retired already is none.
    pub fn release(&mut self, now: Instant, table: &mut BlockTable, fence: Option<BatchId>) -> Released {
        self.truncate(now, table, 0, fence)
    }

    /// Lets go of all but the first `keep` blocks, last block first, like [`Self::release`].
    pub fn truncate(&mut self, now: Instant, table: &mut BlockTable, keep: u32, fence: Option<BatchId>) -> Released {
        let mut released = Released::default();
        while table.len() > keep {
            let Some(block) = table.pop() else { break };
            match self.drop_reference(now, block, fence) {
                Ok(BlockState::Free) => released.freed += 1,
                Ok(BlockState::Cached) => released.cached += 1,
                Ok(BlockState::Active) => released.shared += 1,
                Ok(_) => released.deferred += 1,
                Err(_) => released.stale += 1,
            }
        }
        released
    }

    /// All batches up to `batch` are done: blocks that waited for them are cached or free. How many there were.
    pub fn retire(&mut self, now: Instant, batch: BatchId) -> u32 {
        let (cache, mut settled) = (&mut self.cache, 0);
        self.pool.retire(batch, |block, state| {
            settled += 1;
            if state == BlockState::Cached {
                cache.set_idle(block.index);
            }
        });
        self.enforce_quotas(now, settled * 2);
        settled
    }

    /// Blocks that would come back to the pool if this table let go: not shared, not read by a transfer. O(table).
    pub fn exclusive_blocks(&self, table: &BlockTable) -> u32 {
        table.blocks().iter().filter(|block| self.pool.is_exclusive(**block)).count() as u32
    }
}
