//! Which physical block holds position p of this sequence?

use alloc::vec::Vec;

use penstock_base::BlockRef;
use penstock_base::codec::{DecodeError, Reader, Writer};

/// The blocks of one sequence in one KV group, by position / block size. Capacity is fixed at construction.
///
/// Each entry is one reference in the pool. Only [`crate::Kv`] changes entries, so that table and counts cannot part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockTable {
    blocks: Vec<BlockRef>,
    capacity: u32,
    /// Leading blocks that came out of the prefix cache.
    cached: u32,
    /// Leading blocks that were found or stored; the next confirmation starts here.
    confirmed: u32,
}

impl BlockTable {
    /// An empty table with room for `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self { blocks: Vec::with_capacity(capacity as usize), capacity, cached: 0, confirmed: 0 }
    }

    /// The blocks, first position first.
    pub fn blocks(&self) -> &[BlockRef] {
        &self.blocks
    }

    /// The block of table entry `index`.
    pub fn get(&self, index: u32) -> Option<BlockRef> {
        self.blocks.get(index as usize).copied()
    }

    /// Blocks held.
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// No blocks?
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks it has room for.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Leading blocks that were found in the prefix cache at admission.
    pub fn cached_blocks(&self) -> u32 {
        self.cached
    }

    /// Leading blocks that were found in the prefix cache or stored there. They may have expired or been cleaned up since.
    pub fn confirmed_blocks(&self) -> u32 {
        self.confirmed
    }

    pub(crate) fn push(&mut self, block: BlockRef) {
        debug_assert!(self.len() < self.capacity, "the caller checks the room first");
        self.blocks.push(block);
    }

    pub(crate) fn replace(&mut self, index: u32, block: BlockRef) -> BlockRef {
        core::mem::replace(&mut self.blocks[index as usize], block)
    }

    pub(crate) fn pop(&mut self) -> Option<BlockRef> {
        let block = self.blocks.pop()?;
        self.cached = self.cached.min(self.len());
        self.confirmed = self.confirmed.min(self.len());
        Some(block)
    }

    pub(crate) fn set_cached(&mut self, blocks: u32) {
        self.cached = blocks;
        self.confirmed = blocks;
    }

    pub(crate) fn set_confirmed(&mut self, blocks: u32) {
        self.confirmed = blocks;
    }

    /// Writes the table for a snapshot.
    pub fn encode(&self, out: &mut Writer) {
        out.u32(self.capacity);
        out.u32(self.cached);
        out.u32(self.confirmed);
        out.list(self.blocks.iter(), |w, block| {
            w.u32(block.index);
            w.u32(block.generation);
        });
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (capacity, cached, confirmed) = (from.u32()?, from.u32()?, from.u32()?);
        let held = from.list(|r| Ok(BlockRef { index: r.u32()?, generation: r.u32()? }))?;
        let len = held.len() as u64;
        let sane = len <= u64::from(capacity)
            && capacity <= penstock_base::limits::POOL_BLOCKS_MAX
            && u64::from(cached) <= len
            && u64::from(confirmed) <= len;
        if !sane {
            return Err(DecodeError::Invalid("block table"));
        }
        let mut blocks = Vec::with_capacity(capacity as usize);
        blocks.extend_from_slice(&held);
        Ok(Self { blocks, capacity, cached, confirmed })
    }
}
