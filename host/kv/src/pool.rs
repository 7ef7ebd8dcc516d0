//! Where does every block stand, and may this reference still be used?
//!
//! ```text
//!             allocate                release, last, batch in flight
//!    Free ───────────────► Active ─────────────────────────────────► Reclaimable
//!     ▲ ▲                  ▲ ▲  │ release, last, keyed                │ retire: keyed ► Cached
//!     │ └── unkey ── Cached┘ │  └──────────────────► Cached           └ retire: else  ► Free
//!     │           (acquire)  │ install
//!     │ land                 │           Active ── release, last, lease ──► Leased ── unlease ──► as release
//!     └─────► Landing ───────┘
//!               └── quarantine ──► Quarantined ── clear ──► Free
//! ```
//! `Reclaimable` and `Leased` blocks that carry a key can be acquired again. The counts of all states add up to the pool after every call.

use alloc::vec::Vec;
use core::fmt;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{BatchId, BlockRef};

use crate::check::Violation;
use crate::list::{Links, List};

/// Where a block stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum BlockState {
    /// Nobody's; the next allocation takes it.
    Free,
    /// In at least one block table.
    Active,
    /// In no table, but its content has a key and may be found again.
    Cached,
    /// In no table; a batch in flight may still read or write it.
    Reclaimable,
    /// Being filled by a transfer; nobody may read it.
    Landing,
    /// In no table; a transfer still reads it.
    Leased,
    /// Given up while a one-sided write may still touch it.
    Quarantined,
}

impl BlockState {
    /// Number of states.
    pub const COUNT: usize = 7;
    /// All of them, in the order of [`Counts`].
    pub const ALL: [Self; Self::COUNT] =
        [Self::Free, Self::Active, Self::Cached, Self::Reclaimable, Self::Landing, Self::Leased, Self::Quarantined];

    fn from_code(code: u8) -> Result<Self, DecodeError> {
        Self::ALL.get(usize::from(code)).copied().ok_or(DecodeError::Invalid("block state"))
    }
}

/// Blocks per state. Their sum is the pool, always.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// See [`BlockState::Free`].
    pub free: u32,
    /// See [`BlockState::Active`].
    pub active: u32,
    /// See [`BlockState::Cached`].
    pub cached: u32,
    /// See [`BlockState::Reclaimable`].
    pub reclaimable: u32,
    /// See [`BlockState::Landing`].
    pub landing: u32,
    /// See [`BlockState::Leased`].
    pub leased: u32,
    /// See [`BlockState::Quarantined`].
    pub quarantined: u32,
}

impl Counts {
    fn slot(&mut self, state: BlockState) -> &mut u32 {
        match state {
            BlockState::Free => &mut self.free,
            BlockState::Active => &mut self.active,
            BlockState::Cached => &mut self.cached,
            BlockState::Reclaimable => &mut self.reclaimable,
            BlockState::Landing => &mut self.landing,
            BlockState::Leased => &mut self.leased,
            BlockState::Quarantined => &mut self.quarantined,
        }
    }

    /// Blocks in `state`.
    pub fn of(mut self, state: BlockState) -> u32 {
        *self.slot(state)
    }

    /// Landing, leased and quarantined together.
    pub fn in_transfer(&self) -> u32 {
        self.landing + self.leased + self.quarantined
    }

    /// All states together.
    pub fn sum(&self) -> u64 {
        [self.free, self.active, self.cached, self.reclaimable, self.landing, self.leased, self.quarantined]
            .into_iter()
            .map(u64::from)
            .sum()
    }
}

/// A reference that names no living content: another generation, another state, or no such block. A counted no-op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StaleRef(pub BlockRef);

impl fmt::Display for StaleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} generation {} is not live", self.0.index, self.0.generation)
    }
}

impl core::error::Error for StaleRef {}

/// Batches in flight never share a fence list while there are at most this many; more are still exact, only slower.
const FENCE_LISTS: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Block {
    /// Grows with each hand-out.
    generation: u32,
    /// Tables that list it.
    refs: u32,
    /// Transfers that read it.
    leases: u32,
    /// 1 + the last batch that may touch it; 0 is none.
    fence: u64,
    /// Where it stands.
    state: BlockState,
    /// The prefix cache knows its content.
    keyed: bool,
}

/// States, references, fences and generations of all blocks of one replica.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Threads the free list and the fence lists: a block is in one of them at most.
    links: Links,
    free: List,
    fences: [List; FENCE_LISTS],
    /// 1 + the last batch known to be done; 0 is none.
    retired: u64,
    counts: Counts,
    stale_count: u64,
}

impl BlockPool {
    pub(crate) const ENTRY_BYTES: usize = size_of::<Block>() + Links::ENTRY_BYTES;

    /// A pool of `blocks` free blocks; the lowest index goes first.
    pub fn new(blocks: u32) -> Self {
        let fresh = Block { generation: 0, refs: 0, leases: 0, fence: 0, state: BlockState::Free, keyed: false };
        let mut links = Links::new(blocks as usize);
        let mut free = List::default();
        for i in 0..blocks {
            links.push_back(&mut free, i);
        }
        Self {
            blocks: alloc::vec![fresh; blocks as usize],
            links,
            free,
            fences: [List::default(); FENCE_LISTS],
            retired: 0,
            counts: Counts { free: blocks, ..Counts::default() },
            stale_count: 0,
        }
    }

    /// Blocks in the pool.
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// A pool without blocks?
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks per state.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Stale references turned away since the start.
    pub fn stale_count(&self) -> u64 {
        self.stale_count
    }

    /// The last batch that was retired.
    pub fn retired(&self) -> Option<BatchId> {
        self.retired.checked_sub(1).map(BatchId)
    }

    /// The state of the content that `block` names; none when the reference is stale or the block is free.
    pub fn state(&self, block: BlockRef) -> Option<BlockState> {
        let b = self.blocks.get(block.index as usize)?;
        (b.generation == block.generation && b.state != BlockState::Free).then_some(b.state)
    }

    /// Tables that list the block; 0 for a stale reference.
    pub fn refs(&self, block: BlockRef) -> u32 {
        self.state(block).map_or(0, |_| self.blocks[block.index as usize].refs)
    }

    /// May the one table that lists this block write into it? Not when it is shared, findable under a key, or read by a transfer.
    pub fn is_writable(&self, block: BlockRef) -> bool {
        let exclusive = |b: &Block| b.state == BlockState::Active && b.refs == 1 && !b.keyed && b.leases == 0;
        self.state(block).is_some() && exclusive(&self.blocks[block.index as usize])
    }

    /// Would this block come back to the pool if its one table let go of it? Not when another table or a transfer uses it.
    pub fn is_exclusive(&self, block: BlockRef) -> bool {
        let b = |b: &Block| b.state == BlockState::Active && b.refs == 1 && b.leases == 0;
        self.state(block).is_some() && b(&self.blocks[block.index as usize])
    }

    pub(crate) fn state_at(&self, i: u32) -> BlockState {
        self.blocks[i as usize].state
    }

    pub(crate) fn refs_at(&self, i: u32) -> u32 {
        self.blocks[i as usize].refs
    }

    pub(crate) fn keyed_at(&self, i: u32) -> bool {
        self.blocks[i as usize].keyed
    }

    pub(crate) fn reference(&self, i: u32) -> BlockRef {
        BlockRef { index: i, generation: self.blocks[i as usize].generation }
    }

    fn enter(&mut self, i: u32, to: BlockState) {
        let from = core::mem::replace(&mut self.blocks[i as usize].state, to);
        *self.counts.slot(from) -= 1;
        *self.counts.slot(to) += 1;
    }

    /// Index of a live block in one of `states`; anything else is counted as stale.
    fn live(&mut self, block: BlockRef, states: &[BlockState]) -> Result<u32, StaleRef> {
        match self.state(block) {
            Some(state) if states.contains(&state) => Ok(block.index),
            _ => Err(self.stale(block)),
        }
    }

    /// Counts a stale reference that was turned away.
    pub(crate) fn stale(&mut self, block: BlockRef) -> StaleRef {
        self.stale_count += 1;
        StaleRef(block)
    }

    fn take_free(&mut self, to: BlockState, refs: u32) -> Option<BlockRef> {
        let i = self.links.pop_front(&mut self.free)?;
        let block = &mut self.blocks[i as usize];
        block.generation = block.generation.wrapping_add(1);
        block.refs = refs;
        self.enter(i, to);
        Some(self.reference(i))
    }

    fn give_free(&mut self, i: u32) {
        self.blocks[i as usize].fence = 0;
        self.enter(i, BlockState::Free);
        self.links.push_front(&mut self.free, i);
    }

    fn fence_list(fence: u64) -> usize {
        (fence % FENCE_LISTS as u64) as usize
    }

    /// Hands out one free block with one reference.
    pub fn allocate(&mut self) -> Option<BlockRef> {
        self.take_free(BlockState::Active, 1)
    }

    /// One more table lists the block. The state it came from; anything but `Active` means that nobody listed it.
    pub fn acquire(&mut self, block: BlockRef) -> Result<BlockState, StaleRef> {
        use BlockState::{Active, Cached, Leased, Reclaimable};
        let i = self.live(block, &[Active, Cached, Leased, Reclaimable])?;
        let from = self.state_at(i);
        if from == Reclaimable {
            let list = Self::fence_list(self.blocks[i as usize].fence);
            self.links.remove(&mut self.fences[list], i);
        }
        self.blocks[i as usize].refs += 1;
        if from != Active {
            self.enter(i, Active);
        }
        Ok(from)
    }

    /// One table less lists the block; `fence` is the last batch that may touch it on that table's behalf. The state it is in now.
    pub fn release(&mut self, block: BlockRef, fence: Option<BatchId>) -> Result<BlockState, StaleRef> {
        let i = self.live(block, &[BlockState::Active])?;
        let b = &mut self.blocks[i as usize];
        b.fence = b.fence.max(fence.map_or(0, |batch| batch.0 + 1));
        b.refs -= 1;
        Ok(if b.refs == 0 { self.leave(i) } else { BlockState::Active })
    }

    /// Moves a block that no table lists to where its lease, fence and key say.
    fn leave(&mut self, i: u32) -> BlockState {
        let b = self.blocks[i as usize];
        if b.leases > 0 {
            self.enter(i, BlockState::Leased);
        } else if b.fence > self.retired {
            self.enter(i, BlockState::Reclaimable);
            self.links.push_back(&mut self.fences[Self::fence_list(b.fence)], i);
        } else if b.keyed {
            self.enter(i, BlockState::Cached);
        } else {
            self.give_free(i);
        }
        self.state_at(i)
    }

    /// Every batch up to `batch` is done, for reading and writing. The blocks that waited for it are cached or free now, and each is
    /// reported, first released first. A batch that was retired before changes nothing.
    pub fn retire(&mut self, batch: BatchId, mut each: impl FnMut(BlockRef, BlockState)) {
        let from = self.retired;
        self.retired = from.max(batch.0 + 1);
        let span = (self.retired - from).min(FENCE_LISTS as u64);
        for fence in self.retired - span + 1..=self.retired {
            let list = Self::fence_list(fence);
            for _ in 0..self.fences[list].len() {
                let Some(i) = self.links.pop_front(&mut self.fences[list]) else { break };
                if self.blocks[i as usize].fence > self.retired {
                    self.links.push_back(&mut self.fences[list], i);
                } else {
                    let state = self.leave(i);
                    each(self.reference(i), state);
                }
            }
        }
    }

    /// The cache knows the content of an active block from now on.
    pub(crate) fn set_keyed(&mut self, i: u32) {
        debug_assert_eq!(self.state_at(i), BlockState::Active);
        self.blocks[i as usize].keyed = true;
    }

    /// The cache has forgotten the content; a cached block becomes free.
    pub(crate) fn unkey(&mut self, i: u32) -> BlockState {
        self.blocks[i as usize].keyed = false;
        if self.state_at(i) == BlockState::Cached {
            self.give_free(i);
        }
        self.state_at(i)
    }

    /// Takes a free block to be filled by a transfer.
    pub fn land(&mut self) -> Option<BlockRef> {
        self.take_free(BlockState::Landing, 0)
    }

    /// The transfer is complete and checked: the block is active with one reference.
    pub fn install(&mut self, block: BlockRef) -> Result<(), StaleRef> {
        let i = self.live(block, &[BlockState::Landing])?;
        self.blocks[i as usize].refs = 1;
        self.enter(i, BlockState::Active);
        Ok(())
    }

    /// The transfer is given up while its writes may still arrive.
    pub fn quarantine(&mut self, block: BlockRef) -> Result<(), StaleRef> {
        let i = self.live(block, &[BlockState::Landing])?;
        self.enter(i, BlockState::Quarantined);
        Ok(())
    }

    /// The transport has confirmed that no write can arrive any more.
    pub fn clear_quarantine(&mut self, block: BlockRef) -> Result<(), StaleRef> {
        let i = self.live(block, &[BlockState::Quarantined])?;
        self.give_free(i);
        Ok(())
    }

    /// A transfer reads an active block; it stays out of reach of the pool until as many ends of leases.
    pub fn lease(&mut self, block: BlockRef) -> Result<(), StaleRef> {
        let i = self.live(block, &[BlockState::Active, BlockState::Leased])?;
        self.blocks[i as usize].leases += 1;
        Ok(())
    }

    /// A transfer has read the block. The state it is in now.
    pub(crate) fn unlease(&mut self, block: BlockRef) -> Result<BlockState, StaleRef> {
        let i = self.live(block, &[BlockState::Active, BlockState::Leased])?;
        let b = &mut self.blocks[i as usize];
        let Some(left) = b.leases.checked_sub(1) else {
            return Err(self.stale(block));
        };
        b.leases = left;
        Ok(if b.state == BlockState::Leased { self.leave(i) } else { b.state })
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block>() + self.links.reserved_bytes()
    }

    /// Recounts states and lists: the pool's part of the full walk.
    pub(crate) fn check(&self) -> Result<(), Violation> {
        let (mut counted, mut listed) = (Counts::default(), 0);
        for (i, block) in (0u32..).zip(&self.blocks) {
            *counted.slot(block.state) += 1;
            let queued = matches!(block.state, BlockState::Free | BlockState::Reclaimable);
            let sound = (block.refs > 0) == (block.state == BlockState::Active)
                && (block.leases > 0 || block.state != BlockState::Leased)
                && (block.leases == 0 || matches!(block.state, BlockState::Active | BlockState::Leased))
                && (block.fence > self.retired || block.state != BlockState::Reclaimable)
                && (block.keyed || block.state != BlockState::Cached)
                && (!block.keyed
                    || !matches!(block.state, BlockState::Free | BlockState::Landing | BlockState::Quarantined))
                && self.links.contains(i) == queued;
            if !sound {
                return Err(Violation::Block(i));
            }
        }
        if counted != self.counts || counted.sum() != u64::from(self.len()) {
            return Err(Violation::Counts { kept: self.counts, counted });
        }
        for i in self.links.iter(&self.free) {
            listed += u32::from(self.state_at(i) == BlockState::Free);
        }
        for (k, list) in (0..).zip(&self.fences) {
            let belongs = |i: &u32| {
                let block = self.blocks[*i as usize];
                block.state == BlockState::Reclaimable && Self::fence_list(block.fence) == k
            };
            listed += self.links.iter(list).filter(belongs).count() as u32;
        }
        let lengths = self.free.len() + self.fences.iter().map(List::len).sum::<u32>();
        let expected = counted.free + counted.reclaimable;
        if listed == expected && lengths == expected { Ok(()) } else { Err(Violation::Lists) }
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.u64(self.retired);
        out.u64(self.stale_count);
        for block in &self.blocks {
            out.u32(block.generation);
            out.u8(block.state as u8);
            if block.state != BlockState::Free {
                out.u32(block.refs);
                out.u32(block.leases);
                out.u64(block.fence);
                out.bool(block.keyed);
            }
        }
        self.links.encode(&self.free, out);
        for list in &self.fences {
            self.links.encode(list, out);
        }
    }

    /// Reads a pool of `blocks` blocks; whether it is sound is for the full walk to say.
    pub(crate) fn decode(blocks: u32, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut pool = Self {
            blocks: Vec::with_capacity(blocks as usize),
            links: Links::new(blocks as usize),
            free: List::default(),
            fences: [List::default(); FENCE_LISTS],
            retired: from.u64()?,
            counts: Counts::default(),
            stale_count: from.u64()?,
        };
        for _ in 0..blocks {
            let (generation, state) = (from.u32()?, BlockState::from_code(from.u8()?)?);
            let mut block = Block { generation, refs: 0, leases: 0, fence: 0, state, keyed: false };
            if state != BlockState::Free {
                (block.refs, block.leases) = (from.u32()?, from.u32()?);
                (block.fence, block.keyed) = (from.u64()?, from.bool()?);
            }
            *pool.counts.slot(state) += 1;
            pool.blocks.push(block);
        }
        pool.free = pool.links.decode(from)?;
        for list in &mut pool.fences {
            *list = pool.links.decode(from)?;
        }
        Ok(pool)
    }
}
