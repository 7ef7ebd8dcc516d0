//! Doubly linked lists of slots whose links lie in one array beside the table: moving a request between places allocates nothing.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};

use super::table::NONE;

/// Links of every slot of one table, for one list membership at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Links(Vec<[u32; 2]>);

/// Where a list begins and ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct List {
    /// First slot.
    pub head: u32,
    /// Last slot.
    pub tail: u32,
    /// Number of slots.
    pub len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NONE, tail: NONE, len: 0 }
    }
}

impl Links {
    /// Links for slots below `slots`.
    pub fn with_capacity(slots: usize) -> Self {
        let mut links = Vec::with_capacity(slots);
        links.resize(slots, [NONE; 2]);
        Self(links)
    }

    /// The slot behind `slot` in its list, [`NONE`] at the end.
    pub fn next(&self, slot: u32) -> u32 {
        self.0.get(slot as usize).map_or(NONE, |link| link[1])
    }

    /// Writes the links of the slots below `end`.
    pub fn encode(&self, end: u32, out: &mut Writer) {
        for [prev, next] in &self.0[..end as usize] {
            out.u32(*prev);
            out.u32(*next);
        }
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>, end: u32, slots: usize) -> Result<Self, DecodeError> {
        let mut links = Self::with_capacity(slots);
        for link in &mut links.0[..end as usize] {
            *link = [from.u32()?, from.u32()?];
            if link.iter().any(|slot| *slot != NONE && *slot >= end) {
                return Err(DecodeError::Invalid("link"));
            }
        }
        Ok(links)
    }
}

impl List {
    /// Nothing in it?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds at the end.
    pub fn push_back(&mut self, links: &mut Links, slot: u32) {
        links.0[slot as usize] = [self.tail, NONE];
        if self.tail == NONE {
            self.head = slot;
        } else {
            links.0[self.tail as usize][1] = slot;
        }
        self.tail = slot;
        self.len += 1;
    }

    /// Adds before `before`, which is in the list; at the end when it is [`NONE`].
    pub fn insert_before(&mut self, links: &mut Links, slot: u32, before: u32) {
        if before == NONE {
            return self.push_back(links, slot);
        }
        let prev = links.0[before as usize][0];
        links.0[slot as usize] = [prev, before];
        links.0[before as usize][0] = slot;
        if prev == NONE {
            self.head = slot;
        } else {
            links.0[prev as usize][1] = slot;
        }
        self.len += 1;
    }

    /// The first slot for which `is_behind` holds, [`NONE`] when there is none. The list is sorted by it; looked for from both ends, since
    /// what comes back belongs near one of them.
    pub fn first_behind(&self, links: &Links, is_behind: impl Fn(u32) -> bool) -> u32 {
        let (mut front, mut back, mut found) = (self.head, self.tail, NONE);
        for _ in 0..self.len {
            if is_behind(front) {
                return front;
            }
            if !is_behind(back) {
                return found;
            }
            found = back;
            front = links.next(front);
            back = links.0[back as usize][0];
        }
        found
    }

    /// Takes out a slot that is in this list.
    pub fn remove(&mut self, links: &mut Links, slot: u32) {
        let [prev, next] = links.0[slot as usize];
        if prev == NONE {
            self.head = next;
        } else {
            links.0[prev as usize][1] = next;
        }
        if next == NONE {
            self.tail = prev;
        } else {
            links.0[next as usize][0] = prev;
        }
        links.0[slot as usize] = [NONE; 2];
        self.len -= 1;
    }

    /// The slots in order.
    pub fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        let (mut at, mut left) = (self.head, self.len);
        core::iter::from_fn(move || {
            if at == NONE || left == 0 {
                return None;
            }
            let slot = at;
            at = links.next(slot);
            left -= 1;
            Some(slot)
        })
    }

    /// The links lead from head to tail and back over `len` slots.
    pub fn check(&self, links: &Links) -> Result<(), &'static str> {
        let (mut count, mut last) = (0, NONE);
        for slot in self.iter(links) {
            if links.0.get(slot as usize).is_none_or(|link| link[0] != last) {
                return Err("list: a link back is wrong");
            }
            last = slot;
            count += 1;
        }
        if count == self.len && last == self.tail && (last == NONE || links.next(last) == NONE) {
            Ok(())
        } else {
            Err("list: the links do not cover the list")
        }
    }

    /// Writes the ends.
    pub fn encode(&self, out: &mut Writer) {
        out.u32(self.head);
        out.u32(self.tail);
        out.u32(self.len);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { head: from.u32()?, tail: from.u32()?, len: from.u32()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_out_in_the_order_they_stand() {
        let mut links = Links::with_capacity(8);
        let mut list = List::default();
        for slot in [3, 5, 1] {
            list.push_back(&mut links, slot);
        }
        list.insert_before(&mut links, 7, 5);
        list.insert_before(&mut links, 0, 3);
        assert_eq!(list.iter(&links).collect::<Vec<_>>(), [0, 3, 7, 5, 1]);
        let order = [0, 3, 7, 5, 1];
        for at in 0..=5 {
            let is_behind = |slot: u32| order.iter().position(|other| *other == slot) >= Some(at);
            assert_eq!(list.first_behind(&links, is_behind), order.get(at).copied().unwrap_or(NONE));
        }
        for slot in [0, 1, 7] {
            list.remove(&mut links, slot);
        }
        assert_eq!((list.iter(&links).collect::<Vec<_>>(), list.check(&links)), (alloc::vec![3, 5], Ok(())));
    }
}
