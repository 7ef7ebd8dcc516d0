//! What do the calls of [`Kv`] take and answer?

use core::fmt;

use penstock_base::limits::{POOL_BLOCKS_MAX, TENANTS_MAX};
use penstock_base::{BatchId, BlockRef, ClassRank, Duration, TrustGroup};

#[cfg(doc)]
use crate::Kv;
use crate::event::KvEvent;
use crate::pool::{BlockPool, StaleRef};
use crate::prefix::{Holder, Keys, PrefixCache};
use crate::reserve::OwnerId;
use crate::tenant::Tenants;
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

    /// Most bytes of bookkeeping that one more block adds.
    pub const BLOCK_BOOKS_BYTES: u64 = (BlockPool::ENTRY_BYTES + PrefixCache::ENTRY_BYTES_MAX) as u64;

    /// Most bytes of bookkeeping in all.
    pub fn books_bytes_max(&self) -> u64 {
        // Two buckets are the least of an index.
        let indices = 3 * 2 * size_of::<u32>() as u64;
        u64::from(self.blocks) * Self::BLOCK_BOOKS_BYTES
            + u64::from(self.owners) * size_of::<u32>() as u64
            + u64::from(self.tenants) * Tenants::ENTRY_BYTES_MAX as u64
            + u64::from(self.events) * size_of::<KvEvent>() as u64
            + indices
    }

    pub(crate) fn check(&self) -> Result<(), KvError> {
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
    /// How long nobody had used the last one found; zero when it is in use, or when none was found.
    pub idle: Duration,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kv;

    /// What is held for blocks, tenants and events is told before anything is held, and not much too high.
    #[test]
    fn books_are_no_larger_than_foretold() {
        for blocks in [1, 2, 3, 77, 2_048, 2_049, 20_000, 65_537] {
            for (owners, tenants, events) in [(1, 1, 0), (66, 1_024, 65_536), (1_024, 3, 5)] {
                let config = KvConfig { owners, tenants, events, ..KvConfig::with_blocks(blocks) };
                let held = Kv::new(config).unwrap().reserved_bytes() as u64;
                let foretold = config.books_bytes_max();
                assert!(
                    (held..=held + held / 5 + 64).contains(&foretold),
                    "{blocks}: {held} held, {foretold} foretold"
                );
            }
        }
    }
}
