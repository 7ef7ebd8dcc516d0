//! Which blocks stand in a queue, in which order? Doubly linked lists threaded through fixed arrays: O(1), nothing allocated.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};

/// "No block" in every link.
pub(crate) const NONE: u32 = u32::MAX;
/// In `prev` of an element that stands in no list.
const OUT: u32 = u32::MAX - 1;

/// The links of all elements. One element stands in at most one list of one `Links`.
#[derive(Clone, Debug)]
pub(crate) struct Links(Vec<[u32; 2]>);

/// Ends and length of one list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NONE, tail: NONE, len: 0 }
    }
}

impl List {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }
    pub(crate) fn first(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }
}

impl Links {
    pub(crate) const ENTRY_BYTES: usize = size_of::<[u32; 2]>();

    pub(crate) fn new(len: usize) -> Self {
        Self(alloc::vec![[OUT, NONE]; len])
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.0.capacity() * size_of::<[u32; 2]>()
    }

    pub(crate) fn contains(&self, i: u32) -> bool {
        self.0[i as usize][0] != OUT
    }

    pub(crate) fn next(&self, i: u32) -> Option<u32> {
        let next = self.0[i as usize][1];
        (next != NONE).then_some(next)
    }

    pub(crate) fn push_back(&mut self, list: &mut List, i: u32) {
        debug_assert!(!self.contains(i), "an element stands in one list");
        self.0[i as usize] = [list.tail, NONE];
        match list.tail {
            NONE => list.head = i,
            tail => self.0[tail as usize][1] = i,
        }
        list.tail = i;
        list.len += 1;
    }

    pub(crate) fn push_front(&mut self, list: &mut List, i: u32) {
        debug_assert!(!self.contains(i), "an element stands in one list");
        self.0[i as usize] = [NONE, list.head];
        match list.head {
            NONE => list.tail = i,
            head => self.0[head as usize][0] = i,
        }
        list.head = i;
        list.len += 1;
    }

    /// Takes `i` out; it must stand in `list`.
    pub(crate) fn remove(&mut self, list: &mut List, i: u32) {
        debug_assert!(self.contains(i), "only a listed element can leave");
        let [prev, next] = self.0[i as usize];
        match prev {
            NONE => list.head = next,
            prev => self.0[prev as usize][1] = next,
        }
        match next {
            NONE => list.tail = prev,
            next => self.0[next as usize][0] = prev,
        }
        self.0[i as usize] = [OUT, NONE];
        list.len -= 1;
    }

    pub(crate) fn pop_front(&mut self, list: &mut List) -> Option<u32> {
        let head = list.first()?;
        self.remove(list, head);
        Some(head)
    }

    /// The elements of `list`, first to last. At most as many as the list claims, so a broken list cannot loop.
    pub(crate) fn iter<'a>(&'a self, list: &List) -> impl Iterator<Item = u32> + 'a {
        let mut at = list.first();
        (0..list.len).map_while(move |_| {
            let now = at?;
            at = self.next(now);
            Some(now)
        })
    }

    pub(crate) fn encode(&self, list: &List, out: &mut Writer) {
        out.u32(list.len);
        for i in self.iter(list) {
            out.u32(i);
        }
    }

    /// Reads a list into links that do not hold its elements yet.
    pub(crate) fn decode(&mut self, from: &mut Reader<'_>) -> Result<List, DecodeError> {
        let mut list = List::default();
        for _ in 0..from.u32()? {
            let i = from.u32()?;
            if i as usize >= self.0.len() || self.contains(i) {
                return Err(DecodeError::Invalid("list element"));
            }
            self.push_back(&mut list, i);
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn elements_leave_from_anywhere_and_order_stays() {
        let (mut links, mut list) = (Links::new(5), List::default());
        for i in [3, 1, 4] {
            links.push_back(&mut list, i);
        }
        links.push_front(&mut list, 0);
        links.remove(&mut list, 1);
        assert_eq!(links.iter(&list).collect::<Vec<_>>(), vec![0, 3, 4]);
        assert_eq!((links.pop_front(&mut list), list.len(), links.contains(0)), (Some(0), 2, false));
        links.remove(&mut list, 4);
        links.remove(&mut list, 3);
        assert_eq!(list, List::default());
    }
}
