//! How much memory do a replica's books take? Told before there is a replica, for a ledger of memory.

use penstock_base::limits::POOL_BLOCKS_MAX;
use penstock_base::{BlockKey, BlockRef};
use penstock_kv::KvConfig;

use super::ReplicaConfig;

/// Bytes of one replica's bookkeeping, at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Books {
    /// Of each block.
    pub block_bytes: u64,
    /// Of everything else, however many blocks there are.
    pub fixed_bytes: u64,
}

/// Bytes of a request's or a sequence's entry without its block table and keys, its row of a plan and of a batch included.
const ENTRY_BYTES: u64 = 2 << 10;

impl ReplicaConfig {
    /// What a replica of these sizes takes beside the memory of its blocks. The number of blocks plays no part.
    pub fn books(&self) -> Books {
        let all = Self { blocks: POOL_BLOCKS_MAX, ..self.clone() }.clamped();
        let kv = all.kv().books_bytes_max() - u64::from(POOL_BLOCKS_MAX) * KvConfig::BLOCK_BOOKS_BYTES;
        // A table and keys for each sequence, and for each request that is ready.
        let table_block_bytes = (size_of::<BlockRef>() + size_of::<BlockKey>()) as u64;
        let tables = u64::from(all.slots + all.requests_max());
        let table_bytes = u64::from(all.table_blocks_max()) * table_block_bytes;
        Books { block_bytes: KvConfig::BLOCK_BOOKS_BYTES, fixed_bytes: kv + tables * (table_bytes + ENTRY_BYTES) }
    }
}
