//! Which replicas are believed to hold a block? One inverted index, key to set of replicas, walked along a prompt's chain.
//!
//! It is a hint: the replica looks again on arrival. A missed event makes a replica's part unknown until its cache is known to be empty.

use alloc::vec;
use alloc::vec::Vec;

use penstock_base::BlockKey;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::table::Table;

/// The index.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    /// Keys, the longest unused making room. The depth a key was stored at is not needed: the chain says it.
    keys: Table<BlockKey, ()>,
    /// A set of replica slots for each key slot, `words` words each.
    sets: Vec<u64>,
    words: usize,
    /// Counts changes, by a part of the key: what was read of keys still stands while the sum over them does. Derived.
    changes: Vec<u32>,
    /// Changes that may concern any key.
    sweeps: u64,
}

/// Counts of changes there are at most: 256 KiB, of which a window of requests touches a few. As many as keys where there are fewer, so that
/// one that is asked for often and one that changes often seldom share a count.
const COUNTS_MAX: usize = 1 << 16;

/// Overlap of one prompt with each replica, in leading blocks. Reused from call to call.
#[derive(Clone, Debug, Default)]
pub(super) struct Overlaps {
    /// By replica slot.
    blocks: Vec<u32>,
    /// Replicas that hold everything up to the present depth.
    alive: Vec<u64>,
}

impl Overlaps {
    /// Room for replica slots below `replicas_max`.
    pub fn with_capacity(replicas_max: usize) -> Self {
        let words = replicas_max.div_ceil(64).max(1);
        Self { blocks: vec![0; words * 64], alive: vec![0; words] }
    }

    /// Leading blocks that the replica is believed to hold.
    pub fn blocks(&self, replica: u32) -> u32 {
        self.blocks.get(replica as usize).copied().unwrap_or(0)
    }

    /// Nobody holds anything.
    pub fn clear(&mut self) {
        self.blocks.fill(0);
    }
}

impl Directory {
    /// Empty, for at most `keys_max` keys and replica slots below `replicas_max`.
    pub fn new(keys_max: usize, replicas_max: usize) -> Self {
        let keys = Table::with_capacity(keys_max);
        let words = replicas_max.div_ceil(64).max(1);
        let counts = keys.capacity().next_power_of_two().clamp(64, COUNTS_MAX);
        Self { sets: vec![0; keys.capacity() * words], keys, words, changes: vec![0; counts], sweeps: 0 }
    }

    /// Equal stamps of the same places: nothing about the keys there has changed between the two. Counts wrap, after four billion changes.
    pub fn stamp(&self, places: impl Iterator<Item = u16>) -> u64 {
        places.map(|place| u64::from(self.changes[usize::from(place)])).fold(self.sweeps, u64::wrapping_add)
    }

    /// Where changes of `key` are counted.
    pub fn place_of(&self, key: &BlockKey) -> u16 {
        (key.short() as usize & (self.changes.len() - 1)) as u16
    }

    fn changed(&mut self, key: &BlockKey) {
        let place = self.place_of(key);
        let count = &mut self.changes[usize::from(place)];
        *count = count.wrapping_add(1);
    }

    /// Keys now.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    fn set(&self, slot: u32) -> &[u64] {
        &self.sets[slot as usize * self.words..][..self.words]
    }

    fn set_mut(&mut self, slot: u32) -> &mut [u64] {
        &mut self.sets[slot as usize * self.words..][..self.words]
    }

    /// The replica holds the block.
    pub fn store(&mut self, replica: u32, key: BlockKey) {
        let slot = match self.keys.find(&key) {
            Some(slot) => slot,
            None => {
                let Some(inserted) = self.keys.insert(key, ()) else { return };
                if let Some(evicted) = inserted.evicted {
                    self.changed(&evicted.key);
                }
                self.keys.unpin(inserted.slot);
                self.set_mut(inserted.slot).fill(0);
                inserted.slot
            }
        };
        self.keys.touch(slot);
        let word = &mut self.set_mut(slot)[replica as usize / 64];
        let was = core::mem::replace(word, *word | 1 << (replica % 64));
        if was >> (replica % 64) & 1 == 0 {
            self.changed(&key);
        }
    }

    /// The replica holds it no longer.
    pub fn remove(&mut self, replica: u32, key: BlockKey) {
        let Some(slot) = self.keys.find(&key) else { return };
        self.changed(&key);
        let set = self.set_mut(slot);
        set[replica as usize / 64] &= !(1 << (replica % 64));
        if set.iter().all(|word| *word == 0) {
            self.keys.remove(slot);
        }
    }

    /// The replica holds nothing, or nobody knows what.
    pub fn drop_replica(&mut self, replica: u32) {
        self.swept();
        for slot in 0..self.keys.slots_end() {
            if self.keys.get(slot).is_none() {
                continue;
            }
            let set = self.set_mut(slot);
            set[replica as usize / 64] &= !(1 << (replica % 64));
            if set.iter().all(|word| *word == 0) {
                self.keys.remove(slot);
            }
        }
    }

    /// What is believed of somebody has changed, so that what was read of any key may not stand.
    pub fn swept(&mut self) {
        self.sweeps = self.sweeps.wrapping_add(1);
    }

    /// The chain was used: its keys are the last to make room.
    pub fn touch(&mut self, keys: &[BlockKey]) {
        for key in keys {
            let Some(slot) = self.keys.find(key) else { return };
            self.keys.touch(slot);
        }
    }

    /// How far along the chain each replica holds it. Walks until nobody does; how many keys it looked at.
    pub fn overlaps(&self, keys: &[BlockKey], out: &mut Overlaps) -> usize {
        out.clear();
        out.alive.fill(u64::MAX);
        for (at, key) in keys.iter().enumerate() {
            let Some(slot) = self.keys.find(key) else { return at + 1 };
            let mut anybody = 0;
            for (word, (alive, holders)) in out.alive.iter_mut().zip(self.set(slot)).enumerate() {
                *alive &= holders;
                anybody |= *alive;
                let mut left = *alive;
                while left != 0 {
                    out.blocks[word * 64 + left.trailing_zeros() as usize] += 1;
                    left &= left - 1;
                }
            }
            if anybody == 0 {
                return at + 1;
            }
        }
        keys.len()
    }

    /// Bounded, sound, and no key without a holder or with one that `known` denies.
    pub fn check(&self, known: impl Fn(u32) -> bool) -> Result<(), &'static str> {
        self.keys.check()?;
        let mut held = 0;
        for (slot, ()) in self.keys.iter() {
            for (at, word) in self.set(slot).iter().enumerate() {
                let mut left = *word;
                held += left.count_ones();
                while left != 0 {
                    if !known(at as u32 * 64 + left.trailing_zeros()) {
                        return Err("directory: a block is held by a replica whose cache is not known");
                    }
                    left &= left - 1;
                }
            }
            if core::mem::take(&mut held) == 0 {
                return Err("directory: a key without a holder");
            }
        }
        Ok(())
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        self.keys.encode(out, |out, key, ()| out.raw(&key.0));
        for (slot, ()) in self.keys.iter() {
            self.set(slot).iter().for_each(|word| out.u64(*word));
        }
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>, keys_max: usize, replicas_max: usize) -> Result<Self, DecodeError> {
        let mut directory = Self::new(keys_max, replicas_max);
        directory.keys = Table::decode(from, keys_max, |from| Ok((BlockKey::decode(from)?, ())))?;
        for slot in 0..directory.keys.slots_end() {
            if directory.keys.get(slot).is_some() {
                for word in directory.set_mut(slot) {
                    *word = from.u64()?;
                }
            }
        }
        Ok(directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    #[test]
    fn overlap_is_the_unbroken_lead() {
        let mut directory = Directory::new(16, 100);
        let mut overlaps = Overlaps::with_capacity(100);
        for (replica, keys) in [(0, &[1, 2, 3][..]), (70, &[1, 3][..]), (2, &[2, 3][..])] {
            keys.iter().for_each(|n| directory.store(replica, key(*n)));
        }
        directory.overlaps(&[key(1), key(2), key(3)], &mut overlaps);
        assert_eq!([0, 70, 2].map(|r| overlaps.blocks(r)), [3, 1, 0], "a hole ends the lead");
        directory.drop_replica(0);
        directory.overlaps(&[key(1), key(2), key(3)], &mut overlaps);
        assert_eq!([0, 70, 2].map(|r| overlaps.blocks(r)), [0, 1, 0]);
        directory.check(|replica| replica != 0).expect("nothing of 0 is left");
    }

    #[test]
    fn it_agrees_with_a_naive_set_and_stays_bounded() {
        let mut directory = Directory::new(1_000, 8);
        let mut naive: BTreeSet<(u8, u32)> = BTreeSet::new();
        let mut overlaps = Overlaps::with_capacity(8);
        let mut seed = 3u64;
        for _ in 0..4_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (n, replica) = ((seed >> 33) as u8 % 40, (seed >> 50) as u32 % 8);
            if seed >> 62 < 3 {
                directory.store(replica, key(n));
                naive.insert((n, replica));
            } else {
                directory.remove(replica, key(n));
                naive.remove(&(n, replica));
            }
            let chain: Vec<u8> = (n..n.saturating_add(6)).collect();
            directory.overlaps(&chain.iter().map(|n| key(*n)).collect::<Vec<_>>(), &mut overlaps);
            for replica in 0..8 {
                let lead = chain.iter().take_while(|n| naive.contains(&(**n, replica))).count();
                assert_eq!(overlaps.blocks(replica) as usize, lead);
            }
        }
        let mut small = Directory::new(4, 1);
        (0..9).for_each(|n| small.store(0, key(n)));
        assert_eq!(small.len(), 4);
        small.overlaps(&[key(8)], &mut overlaps);
        assert_eq!(overlaps.blocks(0), 1, "the newest stay");
    }
}
