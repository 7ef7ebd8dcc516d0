//! Was this content evicted not long ago? A ring of as many hashes as the pool has blocks.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{BlockKey, Instant};

use crate::index::HashIndex;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ghost {
    hash: u64,
    evicted: Instant,
    /// Not called back and not overtaken by a later eviction of the same content.
    live: bool,
}

/// What left under pressure, newest `capacity` entries. Hints only: 64 bits of the key are enough.
#[derive(Clone, Debug)]
pub(crate) struct Ghosts {
    ring: Vec<Ghost>,
    /// Live slots by hash.
    slots: HashIndex,
    /// Where the next one goes, once the ring is full.
    next: u32,
    capacity: u32,
}

impl Ghosts {
    pub(crate) const ENTRY_BYTES_MAX: usize = size_of::<Ghost>() + HashIndex::ENTRY_BYTES_MAX;

    pub(crate) fn new(capacity: u32) -> Self {
        Self { ring: Vec::with_capacity(capacity as usize), slots: HashIndex::new(capacity), next: 0, capacity }
    }

    fn find(&self, hash: u64) -> Option<u32> {
        self.slots.find(hash, |slot| self.ring[slot as usize].hash == hash)
    }

    /// The live slot of `hash` is a ghost no more.
    fn drop_live(&mut self, hash: u64) -> Option<Instant> {
        let slot = self.find(hash)?;
        let ring = &self.ring;
        self.slots.remove(hash, slot, |i| ring[i as usize].hash);
        let ghost = &mut self.ring[slot as usize];
        ghost.live = false;
        Some(ghost.evicted)
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.ring.capacity() * size_of::<Ghost>() + self.slots.reserved_bytes()
    }

    pub(crate) fn push(&mut self, key: BlockKey, evicted: Instant) {
        if self.capacity == 0 {
            return;
        }
        let ghost = Ghost { hash: key.short(), evicted, live: true };
        self.drop_live(ghost.hash);
        let slot = if self.ring.len() < self.capacity as usize {
            self.ring.push(ghost);
            self.ring.len() as u32 - 1
        } else {
            let slot = self.next;
            let old = self.ring[slot as usize];
            if old.live {
                self.drop_live(old.hash);
            }
            self.ring[slot as usize] = ghost;
            self.next = (slot + 1) % self.capacity;
            slot
        };
        self.slots.insert(ghost.hash, slot);
    }

    /// When the content was evicted, if the ring still knows; it is no ghost after that.
    pub(crate) fn call_back(&mut self, key: BlockKey) -> Option<Instant> {
        self.drop_live(key.short())
    }

    pub(crate) fn clear(&mut self) {
        self.ring.clear();
        self.slots.clear();
        self.next = 0;
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.u32(self.next);
        out.list(self.ring.iter(), |w, ghost| {
            w.u64(ghost.hash);
            w.u64(ghost.evicted.0);
            w.bool(ghost.live);
        });
    }

    pub(crate) fn decode(capacity: u32, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut ghosts = Self::new(capacity);
        ghosts.next = from.u32()?;
        let ring = from.list(|r| Ok(Ghost { hash: r.u64()?, evicted: Instant(r.u64()?), live: r.bool()? }))?;
        if ring.len() > capacity as usize || ghosts.next >= capacity.max(1) {
            return Err(DecodeError::Invalid("ghost ring"));
        }
        ghosts.ring.extend_from_slice(&ring);
        for (slot, ghost) in (0u32..).zip(&ring) {
            if ghost.live {
                if ghosts.find(ghost.hash).is_some() {
                    return Err(DecodeError::Invalid("ghost"));
                }
                ghosts.slots.insert(ghost.hash, slot);
            }
        }
        Ok(ghosts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    #[test]
    fn the_ring_forgets_the_oldest_and_a_ghost_comes_back_once() {
        let mut ghosts = Ghosts::new(2);
        ghosts.push(key(1), Instant(10));
        ghosts.push(key(2), Instant(20));
        ghosts.push(key(3), Instant(30));
        assert_eq!(ghosts.call_back(key(1)), None, "pushed out");
        assert_eq!(ghosts.call_back(key(2)), Some(Instant(20)));
        assert_eq!(ghosts.call_back(key(2)), None);
    }

    #[test]
    fn of_two_evictions_the_later_one_counts() {
        let mut ghosts = Ghosts::new(3);
        ghosts.push(key(3), Instant(40));
        ghosts.push(key(4), Instant(50));
        ghosts.push(key(3), Instant(60));
        assert_eq!(ghosts.call_back(key(3)), Some(Instant(60)));
        assert_eq!(ghosts.call_back(key(3)), None);
    }
}
