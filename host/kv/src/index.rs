//! Which element has this hash? Open addressing over element numbers, with the keys kept by whoever owns the elements.
//!
//! At most half full, linear probing, removal by shifting back: no tombstones, so no rebuilding and no allocation, ever.

use alloc::vec::Vec;

use crate::list::NONE;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct HashIndex {
    buckets: Vec<u32>,
    mask: usize,
}

impl HashIndex {
    /// Most bytes of an entry: twice as many buckets, rounded up to a power of two.
    pub(crate) const ENTRY_BYTES_MAX: usize = 4 * size_of::<u32>();

    /// Room for `capacity` elements.
    pub(crate) fn new(capacity: u32) -> Self {
        let len = (capacity as usize * 2).next_power_of_two().max(2);
        Self { buckets: alloc::vec![NONE; len], mask: len - 1 }
    }

    /// Hashes here are prefixes of SHA-256; the mix keeps test keys, which count up, from forming one long cluster.
    fn home(&self, hash: u64) -> usize {
        ((hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) as usize & self.mask
    }

    /// The element of this hash for which `is` holds.
    pub(crate) fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        loop {
            match self.buckets[at] {
                NONE => return None,
                i if is(i) => return Some(i),
                _ => at = (at + 1) & self.mask,
            }
        }
    }

    /// Adds an element that is not there. The owner keeps to the capacity.
    pub(crate) fn insert(&mut self, hash: u64, i: u32) {
        let mut at = self.home(hash);
        while self.buckets[at] != NONE {
            at = (at + 1) & self.mask;
        }
        self.buckets[at] = i;
    }

    /// Removes an element that is there; `hash_of` tells the hash of any element.
    pub(crate) fn remove(&mut self, hash: u64, i: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = self.home(hash);
        while self.buckets[hole] != i {
            if self.buckets[hole] == NONE {
                debug_assert!(false, "only a member can leave");
                return;
            }
            hole = (hole + 1) & self.mask;
        }
        let mut at = (hole + 1) & self.mask;
        while self.buckets[at] != NONE {
            let home = self.home(hash_of(self.buckets[at]));
            // The element may move into the hole unless its home lies behind the hole.
            if (at.wrapping_sub(home) & self.mask) >= (at.wrapping_sub(hole) & self.mask) {
                self.buckets[hole] = self.buckets[at];
                hole = at;
            }
            at = (at + 1) & self.mask;
        }
        self.buckets[hole] = NONE;
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<u32>()
    }

    pub(crate) fn clear(&mut self) {
        self.buckets.fill(NONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;

    #[test]
    fn finds_what_a_map_finds_with_crowded_hashes() {
        // 64 elements, element i has hash i / 4: four share every hash, and the table is exactly half full.
        let hash_of = |i: u32| u64::from(i / 4);
        let (mut index, mut naive) = (HashIndex::new(64), BTreeMap::new());
        let mut seed = 3u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let i = ((seed >> 33) % 64) as u32;
            if naive.remove(&i).is_some() {
                index.remove(hash_of(i), i, hash_of);
            } else {
                index.insert(hash_of(i), i);
                naive.insert(i, ());
            }
            for k in 0..64 {
                assert_eq!(index.find(hash_of(k), |e| e == k).is_some(), naive.contains_key(&k));
            }
        }
    }
}
