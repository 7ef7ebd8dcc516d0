//! A bounded table: looked up by key, referred to by slot, and when it is full the longest unused entry makes room.
//!
//! Entries are pinned while somebody depends on them; only unpinned ones make room. All memory is taken at construction, twice the
//! bound for the map, so that neither churn nor its tombstones allocate.

use alloc::vec::Vec;
use core::hash::Hash;
use core::ops::{Index, IndexMut};

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::map::Map;

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Table<K, V> {
    /// Key to slot.
    slots: Map<K, u32>,
    /// By slot. Vacant ones form a chain through `next`.
    entries: Vec<Entry<K, V>>,
    /// First of the vacant chain.
    vacant: u32,
    /// Longest unused entry that may make room.
    oldest: u32,
    /// Last one that became free to make room, or was touched.
    newest: u32,
    /// Most entries.
    capacity: usize,
}

#[derive(Clone, Debug)]
struct Entry<K, V> {
    item: Option<(K, V)>,
    /// In the order of use when unpinned; unused else.
    prev: u32,
    /// In the order of use when unpinned, in the vacant chain when vacant.
    next: u32,
    /// Somebody depends on it.
    pinned: bool,
}

impl<K: Copy + Eq + Hash, V> Table<K, V> {
    /// An empty table of at most `capacity` entries.
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.clamp(1, NONE as usize - 1);
        Self {
            slots: Map::with_capacity(capacity * 2),
            entries: Vec::with_capacity(capacity),
            vacant: NONE,
            oldest: NONE,
            newest: NONE,
            capacity,
        }
    }

    /// Most entries.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Entries now.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Slots ever used: every occupied slot is below.
    pub fn slots_end(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Where `key` is.
    pub fn find(&self, key: &K) -> Option<u32> {
        self.slots.get(key).copied()
    }

    /// The entry of an occupied slot.
    pub fn get(&self, slot: u32) -> Option<&V> {
        self.entries.get(slot as usize).and_then(|entry| entry.item.as_ref()).map(|(_, value)| value)
    }

    /// The key of an occupied slot.
    pub fn key(&self, slot: u32) -> Option<K> {
        self.entries.get(slot as usize).and_then(|entry| entry.item.as_ref()).map(|(key, _)| *key)
    }

    /// Occupied slots and their entries, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &V)> {
        let occupied = |(slot, entry): (usize, &'_ Entry<K, V>)| entry.item.is_some().then_some(slot as u32);
        self.entries.iter().enumerate().filter_map(occupied).map(|slot| (slot, &self[slot]))
    }

    /// Adds a pinned entry. When full, the longest unused one goes and is returned; `None` when every entry is pinned or the key exists.
    pub fn insert(&mut self, key: K, value: V) -> Option<Inserted<K, V>> {
        if self.slots.contains_key(&key) {
            return None;
        }
        let mut evicted = None;
        if self.slots.len() >= self.capacity {
            let slot = self.oldest;
            if slot == NONE {
                return None;
            }
            evicted = self.remove(slot).map(|(key, value)| Evicted { slot, key, value });
        }
        let slot = if self.vacant == NONE {
            self.entries.push(Entry { item: None, prev: NONE, next: NONE, pinned: true });
            (self.entries.len() - 1) as u32
        } else {
            let slot = self.vacant;
            self.vacant = self.entries[slot as usize].next;
            slot
        };
        self.entries[slot as usize] = Entry { item: Some((key, value)), prev: NONE, next: NONE, pinned: true };
        self.slots.insert(key, slot);
        Some(Inserted { slot, evicted })
    }

    /// Takes an entry out, pinned or not.
    pub fn remove(&mut self, slot: u32) -> Option<(K, V)> {
        let entry = self.entries.get(slot as usize)?;
        entry.item.as_ref()?;
        if !entry.pinned {
            self.unlink(slot);
        }
        let entry = &mut self.entries[slot as usize];
        let (key, value) = entry.item.take()?;
        entry.pinned = false;
        entry.prev = NONE;
        entry.next = self.vacant;
        self.vacant = slot;
        self.slots.remove(&key);
        Some((key, value))
    }

    /// It may not make room.
    pub fn pin(&mut self, slot: u32) {
        if self.is_occupied(slot) && !self.entries[slot as usize].pinned {
            self.unlink(slot);
            self.entries[slot as usize].pinned = true;
        }
    }

    /// It may make room, after all that may already.
    pub fn unpin(&mut self, slot: u32) {
        if self.is_occupied(slot) && self.entries[slot as usize].pinned {
            self.entries[slot as usize].pinned = false;
            self.link_newest(slot);
        }
    }

    /// It was used: others make room first.
    pub fn touch(&mut self, slot: u32) {
        if self.is_occupied(slot) && !self.entries[slot as usize].pinned {
            self.unlink(slot);
            self.link_newest(slot);
        }
    }

    /// The one that makes room next.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    fn is_occupied(&self, slot: u32) -> bool {
        self.get(slot).is_some()
    }

    fn link_newest(&mut self, slot: u32) {
        let last = self.newest;
        let entry = &mut self.entries[slot as usize];
        entry.prev = last;
        entry.next = NONE;
        if last == NONE {
            self.oldest = slot;
        } else {
            self.entries[last as usize].next = slot;
        }
        self.newest = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let (prev, next) = (self.entries[slot as usize].prev, self.entries[slot as usize].next);
        if prev == NONE {
            self.oldest = next;
        } else {
            self.entries[prev as usize].next = next;
        }
        if next == NONE {
            self.newest = prev;
        } else {
            self.entries[next as usize].prev = prev;
        }
    }

    /// Every slot is occupied or vacant, unpinned ones are in the order of use, and the map knows exactly the occupied ones.
    pub fn check(&self) -> Result<(), &'static str> {
        let (mut occupied, mut unpinned) = (0, 0);
        for (slot, entry) in self.entries.iter().enumerate() {
            let Some((key, _)) = &entry.item else { continue };
            occupied += 1;
            unpinned += usize::from(!entry.pinned);
            if self.slots.get(key) != Some(&(slot as u32)) {
                return Err("table: a key does not lead to its slot");
            }
        }
        if occupied != self.slots.len() || occupied > self.capacity {
            return Err("table: the map and the slots differ");
        }
        let vacant = self.walk(self.vacant, |entry, _| entry.item.is_none());
        let by_use = self.walk(self.oldest, |entry, last| entry.item.is_some() && !entry.pinned && entry.prev == last);
        if vacant.map(|(count, _)| count) != Some(self.entries.len() - occupied)
            || by_use != Some((unpinned, self.newest))
        {
            return Err("table: a chain does not cover its entries");
        }
        Ok(())
    }

    /// Length and last slot of a chain whose every entry belongs, given the one before it.
    fn walk(&self, from: u32, belongs: impl Fn(&Entry<K, V>, u32) -> bool) -> Option<(usize, u32)> {
        let (mut at, mut count, mut last) = (from, 0, NONE);
        while at != NONE {
            let entry = self.entries.get(at as usize)?;
            if count > self.entries.len() || !belongs(entry, last) {
                return None;
            }
            count += 1;
            last = at;
            at = entry.next;
        }
        Some((count, last))
    }

    /// Writes everything that later steps could see.
    pub fn encode(&self, out: &mut Writer, mut item: impl FnMut(&mut Writer, &K, &V)) {
        out.list(self.entries.iter(), |out, entry| {
            out.u8(u8::from(entry.item.is_some()) | u8::from(entry.pinned) << 1);
            out.u32(entry.prev);
            out.u32(entry.next);
            if let Some((key, value)) = &entry.item {
                item(out, key, value);
            }
        });
        out.u32(self.vacant);
        out.u32(self.oldest);
        out.u32(self.newest);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(
        from: &mut Reader<'_>,
        capacity: usize,
        mut item: impl FnMut(&mut Reader<'_>) -> Result<(K, V), DecodeError>,
    ) -> Result<Self, DecodeError> {
        let mut table = Self::with_capacity(capacity);
        let count = from.count()?;
        if count > table.capacity {
            return Err(DecodeError::Invalid("number of entries"));
        }
        for slot in 0..count {
            let flags = from.u8()?;
            let (prev, next) = (from.u32()?, from.u32()?);
            let item = if flags & 1 == 1 { Some(item(from)?) } else { None };
            if let Some((key, _)) = &item
                && table.slots.insert(*key, slot as u32).is_some()
            {
                return Err(DecodeError::Invalid("key: it is there twice"));
            }
            table.entries.push(Entry { item, prev, next, pinned: flags & 2 == 2 });
        }
        table.vacant = from.u32()?;
        table.oldest = from.u32()?;
        table.newest = from.u32()?;
        table.check().map_err(DecodeError::Invalid)?;
        Ok(table)
    }
}

impl<K: Copy + Eq + Hash, V> Index<u32> for Table<K, V> {
    type Output = V;
    fn index(&self, slot: u32) -> &V {
        self.get(slot).expect("slots are handed out for occupied entries and dropped with them")
    }
}

impl<K: Copy + Eq + Hash, V> IndexMut<u32> for Table<K, V> {
    fn index_mut(&mut self, slot: u32) -> &mut V {
        let item = self.entries.get_mut(slot as usize).and_then(|entry| entry.item.as_mut());
        &mut item.expect("slots are handed out for occupied entries and dropped with them").1
    }
}

/// What an insertion did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Inserted<K, V> {
    /// Where the new entry is.
    pub slot: u32,
    /// What made room.
    pub evicted: Option<Evicted<K, V>>,
}

/// An entry that made room.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Evicted<K, V> {
    /// Where it was; the new entry is there now.
    pub slot: u32,
    /// Its key.
    pub key: K,
    /// Its value.
    pub value: V,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_entry_makes_room_and_a_pinned_one_never_does() {
        let mut table = Table::with_capacity(3);
        let slots: Vec<u32> = (0..3u64).map(|key| table.insert(key, key).expect("room").slot).collect();
        assert_eq!(table.insert(9, 9), None, "all are pinned");
        table.unpin(slots[0]);
        table.unpin(slots[1]);
        table.touch(slots[0]);
        let inserted = table.insert(9, 9).expect("one may go");
        assert_eq!(inserted.evicted.map(|gone| gone.key), Some(1), "0 was touched after it");
        table.pin(slots[0]);
        assert_eq!(table.insert(10, 10), None);
        assert_eq!((table.len(), table.find(&9), table.find(&1)), (3, Some(slots[1]), None));
        table.check().expect("sound");
    }

    #[test]
    fn a_decoded_table_goes_on_like_the_original() {
        let mut table = Table::with_capacity(4);
        for key in 0..4u64 {
            let slot = table.insert(key, key * 10).expect("room").slot;
            table.unpin(slot);
        }
        table.remove(2);
        table.touch(0);
        let mut out = Writer::new();
        table.encode(&mut out, |out, key, value| {
            out.u64(*key);
            out.u64(*value);
        });
        let bytes = out.into_bytes();
        let mut copy =
            Table::decode(&mut Reader::new(&bytes), 4, |from| Ok((from.u64()?, from.u64()?))).expect("reads");
        for key in 20..24u64 {
            let (one, two) = (table.insert(key, 0), copy.insert(key, 0));
            assert_eq!(one, two);
        }
    }
}
