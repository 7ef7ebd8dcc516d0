//! How many blocks are promised and not yet handed out, and to whom?

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};

/// A holder of a promise: a dense index that the caller assigns (one per request at a replica), below [`crate::KvConfig::owners`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct OwnerId(pub u32);

/// Promised blocks per owner and in total.
#[derive(Clone, Debug)]
pub struct Reservations {
    per_owner: Vec<u32>,
    total: u64,
}

impl Reservations {
    pub(crate) fn new(owners: u32) -> Self {
        Self { per_owner: alloc::vec![0; owners as usize], total: 0 }
    }

    /// Blocks promised and not yet handed out.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Of these, what `owner` has left; 0 for an owner out of range.
    pub fn of(&self, owner: OwnerId) -> u32 {
        self.per_owner.get(owner.0 as usize).copied().unwrap_or(0)
    }

    pub(crate) fn owners(&self) -> u32 {
        self.per_owner.len() as u32
    }

    /// Adds to a promise. The caller has checked that the blocks exist.
    pub(crate) fn add(&mut self, owner: OwnerId, blocks: u32) {
        self.per_owner[owner.0 as usize] += blocks;
        self.total += u64::from(blocks);
    }

    /// Takes up to `blocks` from the promise; how many it covered.
    pub(crate) fn take(&mut self, owner: OwnerId, blocks: u32) -> u32 {
        let Some(left) = self.per_owner.get_mut(owner.0 as usize) else { return 0 };
        let taken = blocks.min(*left);
        *left -= taken;
        self.total -= u64::from(taken);
        taken
    }

    /// Total recounted, for the full walk.
    pub(crate) fn recount(&self) -> u64 {
        self.per_owner.iter().copied().map(u64::from).sum()
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.per_owner.capacity() * size_of::<u32>()
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.list(self.per_owner.iter(), |w, blocks| w.u32(*blocks));
    }

    pub(crate) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let per_owner = from.list(Reader::u32)?;
        let total = per_owner.iter().copied().map(u64::from).sum();
        Ok(Self { per_owner, total })
    }
}
