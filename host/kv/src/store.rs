//! Which computed blocks become findable, and what when somebody else was first?

use alloc::vec::Vec;

use penstock_base::{BlockRef, Instant};

use crate::call::{Adopted, Confirm, Confirmed};
use crate::event::RemoveCause;
use crate::kv::Kv;
use crate::pool::BlockState;
use crate::table::BlockTable;

impl Kv {
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
                if !node.used || node.expires <= now || Some(node.key) != ask.keys.get(before) {
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
    /// request is nobody's prefix. What the table had found in the cache is left alone, and so is content that other tables list too, with
    /// all that precedes it. How many blocks were forgotten.
    pub fn forget(&mut self, now: Instant, table: &mut BlockTable, from: u32) -> u32 {
        let mut forgotten = 0;
        for index in (from.max(table.cached_blocks())..table.confirmed_blocks()).rev() {
            let Some(block) = table.get(index) else { continue };
            if self.pool.refs(block) > 1 || !self.cache.node(block.index).used {
                break;
            }
            forgotten += self.forget_below(now, block.index, RemoveCause::Forgotten);
            table.set_confirmed(index);
        }
        forgotten
    }
}
