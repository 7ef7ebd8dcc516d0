//! Blocks that a transfer fills or reads. The states count like all others, so the sum of states stays the pool while a transfer runs.

use alloc::vec::Vec;

use penstock_base::{BlockRef, Instant};

use crate::call::KvError;
use crate::kv::Kv;
use crate::pool::BlockState;
use crate::reserve::OwnerId;
use crate::table::BlockTable;

impl Kv {
    /// Takes `blocks` blocks for an incoming transfer, from the owner's promise first, and pushes them to `landing`. All or nothing.
    pub fn land(
        &mut self,
        now: Instant,
        owner: OwnerId,
        blocks: u32,
        landing: &mut Vec<BlockRef>,
    ) -> Result<(), KvError> {
        self.check_room(owner, blocks)?;
        self.make_free(now, blocks);
        for _ in 0..blocks {
            self.reservations.take(owner, 1);
            landing.push(self.pool.land().ok_or(KvError::NoRoom { short_blocks: 1 })?);
        }
        Ok(())
    }

    /// A landed block is complete and checked: it joins the table. A second time, it is stale.
    pub fn install(&mut self, block: BlockRef, table: &mut BlockTable) -> Result<(), KvError> {
        if table.len() == table.capacity() {
            return Err(KvError::TableFull);
        }
        self.pool.install(block)?;
        table.push(block);
        Ok(())
    }

    /// A landing block is given up while a one-sided write may still touch it.
    pub fn quarantine(&mut self, block: BlockRef) -> Result<(), KvError> {
        Ok(self.pool.quarantine(block)?)
    }

    /// The transport has confirmed that nothing can write to the block any more: it is free.
    pub fn clear_quarantine(&mut self, block: BlockRef) -> Result<(), KvError> {
        Ok(self.pool.clear_quarantine(block)?)
    }

    /// An outgoing transfer reads the block: it can be neither written nor evicted until [`Self::unlease`].
    pub fn lease(&mut self, block: BlockRef) -> Result<(), KvError> {
        Ok(self.pool.lease(block)?)
    }

    /// An outgoing transfer has read the block, or was given up.
    pub fn unlease(&mut self, now: Instant, block: BlockRef) -> Result<BlockState, KvError> {
        let state = self.pool.unlease(block)?;
        if state == BlockState::Cached {
            self.cache.note_use(block.index, now);
            self.cache.set_idle(block.index);
            self.enforce_quotas(now, 2);
        }
        Ok(state)
    }
}
