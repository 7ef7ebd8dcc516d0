//! Maps that behave the same in every process: a fixed hash, and no way to iterate.
//!
//! Iteration order of a hash map depends on its history, so a machine restored from a snapshot would differ from the one that was
//! saved. Whoever needs an order keeps one (a list, a heap, a slab) and uses these only to look up.

#![allow(clippy::disallowed_types, reason = "this is the one wrapper around the map that is banned elsewhere")]

use core::hash::{BuildHasher, Hash, Hasher};

/// A hash that is the same everywhere: FxHash's multiply and rotate over 64-bit words with a final mix.
#[derive(Clone, Copy, Default, Debug)]
pub struct FixedState;

/// See [`FixedState`].
#[derive(Clone, Copy, Debug)]
pub struct FixedHasher(u64);

const MULTIPLIER: u64 = 0xf135_7aea_2e62_a9c5;

impl BuildHasher for FixedState {
    type Hasher = FixedHasher;
    fn build_hasher(&self) -> FixedHasher {
        FixedHasher(0x243f_6a88_85a3_08d3)
    }
}

impl FixedHasher {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(MULTIPLIER);
    }
}

impl Hasher for FixedHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, v: u8) {
        self.add(u64::from(v));
    }
    fn write_u16(&mut self, v: u16) {
        self.add(u64::from(v));
    }
    fn write_u32(&mut self, v: u32) {
        self.add(u64::from(v));
    }
    fn write_u64(&mut self, v: u64) {
        self.add(v);
    }
    fn write_usize(&mut self, v: usize) {
        self.add(v as u64);
    }
    fn finish(&self) -> u64 {
        let mixed = (self.0 ^ (self.0 >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    }
}

/// A map with a fixed hash and no iteration.
///
/// Allocation happens in [`Map::with_capacity`] and when an insertion outgrows it; a caller with a bound reserves the bound once.
#[derive(Clone, Debug)]
pub struct Map<K, V>(hashbrown::HashMap<K, V, FixedState>);

impl<K: Hash + Eq, V> Default for Map<K, V> {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl<K: Hash + Eq, V> Map<K, V> {
    /// Room for `capacity` entries without allocating again.
    pub fn with_capacity(capacity: usize) -> Self {
        Self(hashbrown::HashMap::with_capacity_and_hasher(capacity, FixedState))
    }
    /// Inserts or replaces; the old value if there was one.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.0.insert(key, value)
    }
    /// Removes and returns.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        self.0.remove(key)
    }
    /// Looks up.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.0.get(key)
    }
    /// Looks up to change.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.0.get_mut(key)
    }
    /// The value of `key`, made by `make` when absent.
    pub fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        self.0.entry(key).or_insert_with(make)
    }
    /// Is it there?
    pub fn contains_key(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }
    /// No entries?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// Forgets everything, keeps the room.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_same_in_every_process() {
        // Worked by hand with the two constants above: one word, one multiply, the final mix.
        let seed = 0x243f_6a88_85a3_08d3u64;
        let word = (seed.rotate_left(5) ^ 42).wrapping_mul(0xf135_7aea_2e62_a9c5);
        let mixed = (word ^ (word >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        assert_eq!(FixedState.hash_one(42u64), mixed ^ (mixed >> 29));
    }
}
