//! Which element comes first, and which follow? Ordered sets over block indices without allocation.
//!
//! A treap threaded through fixed arrays: several sets (one root each) may share one `Ordered`, an element stands in one of them at most.
//! An element's heap rank is a bijective mix of its index, so the shape depends on the members and their order alone, never on history:
//! a set rebuilt from a snapshot behaves as the one that was saved. Expected O(log n) for insertion and removal.

use alloc::vec::Vec;

use crate::list::NONE;

/// In `up` of an element that stands in no set.
const OUT: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct Links {
    left: u32,
    right: u32,
    up: u32,
}

/// Root of one set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Root(u32);

impl Default for Root {
    fn default() -> Self {
        Self(NONE)
    }
}

impl Root {
    pub(crate) fn is_empty(self) -> bool {
        self.0 == NONE
    }
}

/// The links of all elements.
#[derive(Clone, Debug)]
pub(crate) struct Ordered(Vec<Links>);

/// Every step is a bijection of u32, so no two elements share a rank.
fn rank(i: u32) -> u32 {
    let x = (i ^ (i >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

impl Ordered {
    pub(crate) const ENTRY_BYTES: usize = size_of::<Links>();

    pub(crate) fn new(len: usize) -> Self {
        Self(alloc::vec![Links { left: NONE, right: NONE, up: OUT }; len])
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.0.capacity() * size_of::<Links>()
    }

    pub(crate) fn contains(&self, i: u32) -> bool {
        self.0[i as usize].up != OUT
    }

    fn at(&self, i: u32) -> Links {
        self.0[i as usize]
    }

    fn at_mut(&mut self, i: u32) -> &mut Links {
        &mut self.0[i as usize]
    }

    /// Puts `to` where `from` hangs below `up`.
    fn hang(&mut self, root: &mut Root, up: u32, from: u32, to: u32) {
        match up {
            NONE => root.0 = to,
            up if self.at(up).left == from => self.at_mut(up).left = to,
            up => self.at_mut(up).right = to,
        }
        if to != NONE {
            self.at_mut(to).up = up;
        }
    }

    /// Lifts `i` over its parent and keeps the order.
    fn lift(&mut self, root: &mut Root, i: u32) {
        let parent = self.at(i).up;
        let grand = self.at(parent).up;
        let inner = if self.at(parent).left == i {
            let inner = self.at(i).right;
            self.at_mut(parent).left = inner;
            self.at_mut(i).right = parent;
            inner
        } else {
            let inner = self.at(i).left;
            self.at_mut(parent).right = inner;
            self.at_mut(i).left = parent;
            inner
        };
        if inner != NONE {
            self.at_mut(inner).up = parent;
        }
        self.hang(root, grand, parent, i);
        self.at_mut(parent).up = i;
    }

    /// Adds `i`, which stands in no set. `before(a, b)`: a total order, unchanged while its elements stand here.
    pub(crate) fn insert(&mut self, root: &mut Root, i: u32, before: impl Fn(u32, u32) -> bool) {
        debug_assert!(!self.contains(i), "an element stands in one set");
        *self.at_mut(i) = Links { left: NONE, right: NONE, up: NONE };
        let mut at = root.0;
        if at == NONE {
            root.0 = i;
            return;
        }
        loop {
            let side = if before(i, at) { &mut self.0[at as usize].left } else { &mut self.0[at as usize].right };
            if *side == NONE {
                *side = i;
                break;
            }
            at = *side;
        }
        self.at_mut(i).up = at;
        while self.at(i).up != NONE && rank(self.at(i).up) < rank(i) {
            self.lift(root, i);
        }
    }

    /// Takes `i` out; it must stand in the set of `root`.
    pub(crate) fn remove(&mut self, root: &mut Root, i: u32) {
        debug_assert!(self.contains(i), "only a member can leave");
        loop {
            let Links { left, right, up } = self.at(i);
            let only = match (left, right) {
                (NONE, other) | (other, NONE) => other,
                (left, right) => {
                    self.lift(root, if rank(left) > rank(right) { left } else { right });
                    continue;
                }
            };
            self.hang(root, up, i, only);
            *self.at_mut(i) = Links { left: NONE, right: NONE, up: OUT };
            return;
        }
    }

    /// The first element.
    pub(crate) fn first(&self, root: Root) -> Option<u32> {
        let mut at = root.0;
        if at == NONE {
            return None;
        }
        while self.at(at).left != NONE {
            at = self.at(at).left;
        }
        Some(at)
    }

    /// The element behind `i`.
    pub(crate) fn next(&self, i: u32) -> Option<u32> {
        let mut at = self.at(i).right;
        if at != NONE {
            while self.at(at).left != NONE {
                at = self.at(at).left;
            }
            return Some(at);
        }
        let (mut child, mut up) = (i, self.at(i).up);
        while up != NONE && self.at(up).right == child {
            (child, up) = (up, self.at(up).up);
        }
        (up != NONE).then_some(up)
    }

    /// In order.
    pub(crate) fn iter(&self, root: Root) -> impl Iterator<Item = u32> + '_ {
        core::iter::successors(self.first(root), |i| self.next(*i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn behaves_as_a_sorted_set_and_forgets_its_history() {
        let mut seed = 9u64;
        let mut random = move |below: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((seed >> 33) % u64::from(below)) as u32
        };
        let keys: Vec<u32> = (0..200).map(|_| random(50)).collect();
        let before = |a: u32, b: u32| (keys[a as usize], a) < (keys[b as usize], b);
        let (mut set, mut root, mut naive) = (Ordered::new(200), Root::default(), BTreeSet::new());
        for _ in 0..5_000 {
            let i = random(200);
            if set.contains(i) {
                set.remove(&mut root, i);
                assert!(naive.remove(&(keys[i as usize], i)));
            } else {
                set.insert(&mut root, i, before);
                assert!(naive.insert((keys[i as usize], i)));
            }
            assert!(set.iter(root).eq(naive.iter().map(|(_, i)| *i)));
        }
        let (mut again, mut again_root) = (Ordered::new(200), Root::default());
        for (_, i) in &naive {
            again.insert(&mut again_root, *i, before);
        }
        assert_eq!(again_root, root);
        for (_, i) in naive {
            let (a, b) = (set.at(i), again.at(i));
            assert_eq!((a.left, a.right, a.up), (b.left, b.right, b.up));
        }
    }
}
