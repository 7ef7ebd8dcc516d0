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
use core::fmt;

use penstock_base::limits::{POOL_BLOCKS_MAX, TENANTS_MAX};
use penstock_base::{BatchId, BlockRef, ClassRank, Instant, TrustGroup};

use crate::event::RemoveCause;
use crate::pool::{BlockPool, BlockState, Counts, StaleRef};
use crate::prefix::{Holder, Keys, PrefixCache};
use crate::reserve::{OwnerId, Reservations};
use crate::table::BlockTable;
use crate::watermark::Watermarks;

/// Sizes of one replica's block bookkeeping. Everything is reserved at construction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvConfig {
    /// Blocks of the pool, 1..=[`POOL_BLOCKS_MAX`].
    pub blocks: u32,
    /// Tokens of one block, at least 1.
    pub block_size_tokens: u32,
    /// Holders of reservations: [`OwnerId`] is below it.
    pub owners: u32,
    /// Tenants with stored content, 1..=[`TENANTS_MAX`]. Content of further ones is not stored.
    pub tenants: u32,
    /// Events between two [`Kv::take_events`]; further ones are lost and leave a gap.
    pub events: u32,
    /// When to evict.
    pub watermarks: Watermarks,
}

impl KvConfig {
    /// Defaults for a pool of `blocks` blocks of 16 tokens: 1,024 owners and tenants, room for 65,536 events.
    pub fn with_blocks(blocks: u32) -> Self {
        Self {
            blocks,
            block_size_tokens: 16,
            owners: 1_024,
            tenants: 1_024,
            events: 65_536,
            watermarks: Watermarks::default(),
        }
    }

    fn check(&self) -> Result<(), KvError> {
        let sane = (1..=POOL_BLOCKS_MAX).contains(&self.blocks)
            && self.block_size_tokens > 0
            && (1..=TENANTS_MAX).contains(&(self.tenants as usize))
            && self.watermarks.is_valid();
        if sane { Ok(()) } else { Err(KvError::Config) }
    }
}

/// Why a call changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvError {
    /// A size in [`KvConfig`] is out of range.
    Config,
    /// So many blocks are missing; the caller preempts, waits or refuses.
    NoRoom {
        /// Blocks missing.
        short_blocks: u32,
    },
    /// The block table has no room for that many entries.
    TableFull,
    /// The table must be empty for this call.
    TableInUse,
    /// No such owner.
    UnknownOwner(OwnerId),
    /// A reference names no living content.
    Stale(StaleRef),
}

impl fmt::Display for KvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config => write!(f, "a size of the block pool is out of range"),
            Self::NoRoom { short_blocks } => write!(f, "{short_blocks} blocks are missing"),
            Self::TableFull => write!(f, "the block table is full"),
            Self::TableInUse => write!(f, "the block table is in use"),
            Self::UnknownOwner(owner) => write!(f, "no reservation owner {}", owner.0),
            Self::Stale(stale) => stale.fmt(f),
        }
    }
}

impl core::error::Error for KvError {}

impl From<StaleRef> for KvError {
    fn from(stale: StaleRef) -> Self {
        Self::Stale(stale)
    }
}

/// What [`Kv::admit`] is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Admit<'a> {
    /// Who gets the promise.
    pub owner: OwnerId,
    /// Keys of the full blocks of the input.
    pub keys: Keys<'a>,
    /// Tokens to have in KV before the next one is sampled: the prompt, and on resume what was generated.
    pub input_tokens: u32,
    /// Blocks that the owner may come to hold through this promise, the found ones included.
    pub total_blocks: u32,
    /// Class of the request: what it finds was used by that class.
    pub class: ClassRank,
}

/// Leading blocks that are in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prefix {
    /// Whole blocks.
    pub blocks: u32,
    /// Tokens in them: at most the input less one, so that something is left to compute.
    pub tokens: u32,
}

/// What [`Kv::admit`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Admitted {
    /// Found and referenced; these blocks are in the table.
    pub prefix: Prefix,
    /// Promised beyond them.
    pub reserved_blocks: u32,
}

/// What [`Kv::extend`] is asked for: the tokens that a row is about to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extend {
    /// Whose promise pays first.
    pub owner: OwnerId,
    /// Position of the first token written.
    pub start: u32,
    /// Tokens written.
    pub tokens: u32,
    /// The batch that will write them; it also reads the source of a copy.
    pub batch: BatchId,
}

/// A block that was shared or findable and was replaced before a write. The caller copies, then writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyOnWrite {
    /// Table entry that changed.
    pub index: u32,
    /// Where the content is; it stays as it is.
    pub from: BlockRef,
    /// Where it must be: the new entry.
    pub to: BlockRef,
    /// Leading tokens that must be copied; 0 when all of it is overwritten.
    pub tokens: u32,
}

/// A table entry that now names another block with the same content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Adopted {
    /// Table entry that changed.
    pub index: u32,
    /// The new entry.
    pub block: BlockRef,
}

/// What [`Kv::confirm`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Confirmed {
    /// Blocks stored under their key now.
    pub stored: u32,
    /// Blocks that were stored by another sequence first; the table names that one now.
    pub adopted: u32,
    /// Blocks of the call that are still not in the cache.
    pub left: u32,
}

/// What a secure clean-up covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// Everything.
    All,
    /// One cache-sharing domain.
    Trust(TrustGroup),
}

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
        if rest + leaving > self.available_blocks() {
            return Err(self.no_room(rest + leaving));
        }
        let mut parent = None;
        for index in 0..blocks {
            let key = ask.keys.get(index).unwrap_or_default();
            let Some(i) = self.cache.find_child(parent, key, now) else { break };
            self.take_cached(i, table)?;
            self.cache.note_hit(i, ask.class, now);
            parent = Some(i);
        }
        table.set_cached(blocks);
        self.cache.stats.on_match(now, limit, blocks);
        self.reservations.add(ask.owner, rest);
        let tokens = blocks * self.config.block_size_tokens;
        Ok(Admitted { prefix: Prefix { blocks, tokens }, reserved_blocks: rest })
    }

    /// References the stored block `i`, in whatever state it is, and lists it.
    fn take_cached(&mut self, i: u32, table: &mut BlockTable) -> Result<(), KvError> {
        let block = self.acquire_stored(i)?;
        table.push(block);
        Ok(())
    }

    fn acquire_stored(&mut self, i: u32) -> Result<BlockRef, KvError> {
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

    /// Takes back what is left of the promise to `owner`; how much that was.
    pub fn unreserve(&mut self, owner: OwnerId) -> u32 {
        self.reservations.take(owner, u32::MAX)
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
        let size = self.config.block_size_tokens;
        let first = row.start / size;
        let end = (u64::from(row.start) + u64::from(row.tokens)).div_ceil(u64::from(size));
        if end > u64::from(table.capacity()) || first > table.len() {
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

    // --- Storing -------------------------------------------------------------------------------------------------------------

    /// Stores the computed and confirmed blocks of `table` up to entry `upto` (exclusive) that are not stored yet.
    ///
    /// Where another sequence stored the same content first, that block is kept and listed instead (pushed to `adopted`, to be patched at
    /// the executor), and this table's own copy is let go behind `fence`. Stops at the first block that cannot be stored; a later call
    /// tries again from there.
    pub fn confirm(
        &mut self,
        now: Instant,
        table: &mut BlockTable,
        ask: Confirm<'_>,
        adopted: &mut Vec<Adopted>,
    ) -> Confirmed {
        let mut done = Confirmed::default();
        let upto = ask.upto.min(table.len()).min(ask.keys.len());
        while !ask.holder.no_store && table.confirmed_blocks() < upto {
            let index = table.confirmed_blocks();
            match self.confirm_one(now, table, index, &ask) {
                Some(None) => done.stored += 1,
                Some(Some(block)) => {
                    done.adopted += 1;
                    adopted.push(Adopted { index, block });
                }
                None => break,
            }
            table.set_confirmed(index + 1);
        }
        done.left = upto.saturating_sub(table.confirmed_blocks());
        done
    }

    /// Stores one entry: none when it cannot be, the other block when that one was first.
    fn confirm_one(
        &mut self,
        now: Instant,
        table: &mut BlockTable,
        index: u32,
        ask: &Confirm<'_>,
    ) -> Option<Option<BlockRef>> {
        let (block, key) = (table.get(index)?, ask.keys.get(index)?);
        let parent = match index.checked_sub(1) {
            None => None,
            Some(before) => {
                let parent = table.get(before)?.index;
                let node = self.cache.node(parent);
                if !node.used || Some(node.key) != ask.keys.get(before) {
                    self.cache.stats.totals.unstored_blocks += 1;
                    return None;
                }
                Some(parent)
            }
        };
        if ask.holder.expires <= now || self.pool.state(block) != Some(BlockState::Active) {
            self.cache.stats.totals.unstored_blocks += 1;
            return None;
        }
        if let Some(first) = self.cache.find(key)
            && self.cache.node(first).expires <= now
        {
            self.forget_below(now, first, RemoveCause::Expired);
        }
        match self.cache.find(key) {
            None if self.pool.keyed_at(block.index) => None,
            None => {
                if !self.cache.insert(block.index, key, parent, &ask.holder, now) {
                    self.cache.stats.totals.unstored_blocks += 1;
                    return None;
                }
                self.pool.set_keyed(block.index);
                Some(None)
            }
            Some(first) if first == block.index => Some(None),
            Some(first) if self.cache.find_child(parent, key, now) != Some(first) => {
                self.cache.stats.totals.collisions += 1;
                None
            }
            Some(first) => self.adopt(now, table, index, first, ask),
        }
    }

    /// Lists `first` in place of the block with the same content at `index`.
    fn adopt(
        &mut self,
        now: Instant,
        table: &mut BlockTable,
        index: u32,
        first: u32,
        ask: &Confirm<'_>,
    ) -> Option<Option<BlockRef>> {
        // Until the fence of the own copy passes, the pool is one block poorer; promises must still hold.
        if self.cache.is_evictable(first) && self.available_blocks() == 0 {
            return None;
        }
        let block = self.acquire_stored(first).ok()?;
        self.cache.note_use(first, now);
        let own = table.replace(index, block);
        self.drop_reference(now, own, ask.fence).ok()?;
        self.cache.stats.totals.duplicate_blocks += 1;
        Some(Some(block))
    }

    /// Takes the stored content of `table` from entry `from` on out of the cache, with everything that follows it: output of a cancelled
    /// request is nobody's prefix. Content that other tables list too is left alone, and so is what precedes it.
    pub fn forget(&mut self, now: Instant, table: &mut BlockTable, from: u32) -> u32 {
        let mut forgotten = 0;
        for index in (from..table.confirmed_blocks()).rev() {
            let Some(block) = table.get(index) else { continue };
            if self.pool.refs(block) > 1 || !self.cache.node(block.index).used {
                break;
            }
            forgotten += self.forget_below(now, block.index, RemoveCause::Forgotten);
            table.set_confirmed(index);
        }
        forgotten
    }

    // --- Ending --------------------------------------------------------------------------------------------------------------

    /// One table lists `block` no more.
    fn drop_reference(&mut self, now: Instant, block: BlockRef, fence: Option<BatchId>) -> Result<BlockState, KvError> {
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

/// What [`Kv::confirm`] is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Confirm<'a> {
    /// Keys of the sequence's full blocks.
    pub keys: Keys<'a>,
    /// Leading blocks that are full and whose batches are done.
    pub upto: u32,
    /// For whom.
    pub holder: Holder,
    /// The last submitted batch that touches the sequence.
    pub fence: Option<BatchId>,
}

/// What became of the blocks of a table that let go of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Released {
    /// Free at once.
    pub freed: u32,
    /// Kept for their content.
    pub cached: u32,
    /// Behind a fence or a lease.
    pub deferred: u32,
    /// Still listed elsewhere.
    pub shared: u32,
    /// References that were stale; counted no-ops.
    pub stale: u32,
}
