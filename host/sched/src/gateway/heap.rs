//! A binary min-heap over slots that knows where each slot stands, so that keys change and entries leave at once: nothing stale stays.

use alloc::vec::Vec;

use super::table::NONE;

/// Slots by key; equal keys by the second number, which callers make unique.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotHeap {
    heap: Vec<Item>,
    /// Position in `heap` by slot, [`NONE`] when absent.
    place: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Item {
    key: u64,
    tie: u64,
    slot: u32,
}

impl SlotHeap {
    /// Room for slots below `slots`.
    pub fn with_capacity(slots: usize) -> Self {
        let mut place = Vec::with_capacity(slots);
        place.resize(slots, NONE);
        Self { heap: Vec::with_capacity(slots), place }
    }

    /// Sets the key of `slot`, adding it if needed. The largest key is "never" and takes it out.
    pub fn set(&mut self, slot: u32, key: u64, tie: u64) {
        if key == u64::MAX {
            self.remove(slot);
            return;
        }
        let item = Item { key, tie, slot };
        let at = self.place[slot as usize];
        if at == NONE {
            self.heap.push(item);
            self.place[slot as usize] = (self.heap.len() - 1) as u32;
            self.rise(self.heap.len() - 1);
        } else {
            self.heap[at as usize] = item;
            let at = self.rise(at as usize);
            self.sink(at);
        }
    }

    /// Takes `slot` out, if it is there.
    pub fn remove(&mut self, slot: u32) {
        let at = self.place[slot as usize];
        if at == NONE {
            return;
        }
        self.place[slot as usize] = NONE;
        let last = self.heap.len() - 1;
        self.heap.swap(at as usize, last);
        self.heap.pop();
        if (at as usize) < self.heap.len() {
            self.place[self.heap[at as usize].slot as usize] = at;
            let at = self.rise(at as usize);
            self.sink(at);
        }
    }

    /// The smallest key and its slot.
    pub fn first(&self) -> Option<(u64, u32)> {
        self.heap.first().map(|item| (item.key, item.slot))
    }

    /// The key of `slot`.
    pub fn key(&self, slot: u32) -> Option<u64> {
        let at = *self.place.get(slot as usize)?;
        self.heap.get(at as usize).map(|item| item.key)
    }

    /// Number of slots in it.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    fn rise(&mut self, mut at: usize) -> usize {
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.heap[parent] <= self.heap[at] {
                break;
            }
            self.swap(at, parent);
            at = parent;
        }
        at
    }

    fn sink(&mut self, mut at: usize) {
        loop {
            let left = at * 2 + 1;
            let right = left + 1;
            if left >= self.heap.len() {
                return;
            }
            let least = if right < self.heap.len() && self.heap[right] < self.heap[left] { right } else { left };
            if self.heap[at] <= self.heap[least] {
                return;
            }
            self.swap(at, least);
            at = least;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.place[self.heap[a].slot as usize] = a as u32;
        self.place[self.heap[b].slot as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;

    #[test]
    fn it_agrees_with_a_sorted_map_under_random_changes() {
        let mut heap = SlotHeap::with_capacity(32);
        let mut naive: BTreeMap<u32, u64> = BTreeMap::new();
        let mut seed = 7u64;
        for _ in 0..5_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (slot, key) = ((seed >> 33) as u32 % 32, (seed >> 40) % 50);
            if seed >> 62 == 0 {
                heap.remove(slot);
                naive.remove(&slot);
            } else {
                heap.set(slot, key, u64::from(slot));
                naive.insert(slot, key);
            }
            let least = naive.iter().map(|(slot, key)| (*key, *slot)).min();
            assert_eq!((heap.first(), heap.len(), heap.key(slot)), (least, naive.len(), naive.get(&slot).copied()));
        }
    }
}
