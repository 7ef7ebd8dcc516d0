//! Is everything that must hold true? The full walk over one replica's books.
//!
//! The counters that answer every step are kept in O(change); this recounts all of them. It may allocate and costs O(pool): run it at
//! quiescence, every few thousand steps, and after every step in tests.

use core::fmt;

use penstock_base::Instant;

use crate::kv::Kv;
use crate::list::NONE;
use crate::pool::{BlockState, Counts};
use crate::table::BlockTable;

/// The first broken invariant that the walk met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Violation {
    /// The counted states differ from the kept counts, or do not add up to the pool.
    Counts {
        /// As kept.
        kept: Counts,
        /// As counted.
        counted: Counts,
    },
    /// More is promised than could be had, or the total is wrong.
    Reserved {
        /// Promised in total.
        reserved: u64,
        /// Free and evictable.
        have: u64,
    },
    /// References, leases or fence do not fit the state of this block.
    Block(u32),
    /// A free or fenced block is not in its list, or another one is.
    Lists,
    /// Pool and cache disagree about whether this block is cached.
    Keyed(u32),
    /// The tree of cached content is broken at this block.
    Tree(u32),
    /// This block cannot be found under its key.
    Index(u32),
    /// The number of pinned children of this block is wrong.
    Held(u32),
    /// The number of stored or of evictable blocks is wrong.
    CacheCounts,
    /// This block stands in the wrong eviction orders.
    Order(u32),
    /// The eviction orders are not sorted, or hold the wrong number of blocks.
    Sorting,
    /// The counts of this tenant entry are wrong.
    Tenant(u32),
    /// Tables do not list this block as often as it has references.
    References {
        /// The block.
        block: u32,
        /// As kept by the pool.
        kept: u32,
        /// As counted over the tables.
        counted: u32,
    },
    /// A table lists a reference that is not live.
    StaleEntry(u32),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "broken invariant of the block pool: {self:?}")
    }
}

impl core::error::Error for Violation {}

fn ensure(holds: bool, else_what: Violation) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(else_what) }
}

impl Kv {
    /// Recounts everything. See [`Violation`].
    pub fn check(&self) -> Result<(), Violation> {
        self.pool.check()?;
        self.check_promises()?;
        self.check_tree()?;
        self.check_orders()?;
        self.check_tenants()
    }

    /// [`Self::check`], and that `tables` are all tables: each reference of the pool is one entry, and each entry is live.
    pub fn check_with_tables<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) -> Result<(), Violation> {
        self.check()?;
        let mut listed = alloc::vec![0u32; self.config.blocks as usize];
        for block in tables.into_iter().flat_map(BlockTable::blocks) {
            ensure(self.pool.state(*block) == Some(BlockState::Active), Violation::StaleEntry(block.index))?;
            listed[block.index as usize] += 1;
        }
        for (block, counted) in (0..).zip(listed) {
            let kept = self.pool.refs_at(block);
            ensure(kept == counted, Violation::References { block, kept, counted })?;
        }
        Ok(())
    }

    fn check_promises(&self) -> Result<(), Violation> {
        let reserved = self.reservations.total();
        let have = u64::from(self.counts().free) + u64::from(self.cache.evictable());
        let sound = reserved == self.reservations.recount() && reserved <= have;
        ensure(sound, Violation::Reserved { reserved, have })
    }

    fn check_tree(&self) -> Result<(), Violation> {
        let cache = &self.cache;
        let (mut stored, mut evictable, mut linked) = (0, 0, 0);
        for i in 0..self.config.blocks {
            let node = cache.node(i);
            let idle = self.pool.state_at(i) == BlockState::Cached;
            ensure(node.used == self.pool.keyed_at(i) && node.idle == idle, Violation::Keyed(i))?;
            if !node.used {
                continue;
            }
            stored += 1;
            evictable += u32::from(!node.is_pinned());
            ensure(cache.find(node.key) == Some(i), Violation::Index(i))?;
            let neighbours = [node.parent, node.child, node.next, node.prev];
            let known = |n: u32| n == NONE || cache.nodes.get(n as usize).is_some_and(|n| n.used);
            ensure(neighbours.into_iter().all(known), Violation::Tree(i))?;
            self.check_node(i)?;
            let (mut held, mut at) = (0, node.child);
            while at != NONE {
                let child = cache.node(at);
                linked += 1;
                ensure(child.parent == i && linked <= self.config.blocks, Violation::Tree(at))?;
                held += u32::from(child.is_pinned());
                at = child.next;
            }
            ensure(held == node.held, Violation::Held(i))?;
        }
        let children = cache.nodes.iter().filter(|node| node.used && node.parent != NONE).count() as u32;
        ensure((stored, evictable, linked) == (cache.stored(), cache.evictable(), children), Violation::CacheCounts)
    }

    /// Links of a stored block whose neighbours are stored.
    fn check_node(&self, i: u32) -> Result<(), Violation> {
        let cache = &self.cache;
        let node = cache.node(i);
        let first = match node.parent {
            NONE => node.depth == 1 && node.next == NONE && node.prev == NONE,
            p => {
                let parent = cache.node(p);
                parent.depth + 1 == node.depth
                    && node.expires <= parent.expires
                    && (node.prev == NONE) == (parent.child == i)
            }
        };
        let siblings = (node.next == NONE || cache.node(node.next).prev == i)
            && (node.prev == NONE || cache.node(node.prev).next == i);
        ensure(first && siblings, Violation::Tree(i))
    }

    fn check_orders(&self) -> Result<(), Violation> {
        let (order, nodes) = (&self.cache.order, &self.cache.nodes);
        let mut leaves = 0;
        for (i, node) in (0..).zip(nodes) {
            let leaf = node.used && node.idle && node.child == NONE;
            leaves += usize::from(leaf);
            let waiting = leaf && node.pricing == crate::evict::Pricing::Waiting;
            let expires = node.used && node.expires != Instant::NEVER;
            let stands = order.is_leaf(i) == leaf
                && order.is_waiting(i) == waiting
                && order.has_expiry(i) == expires
                && (leaf || node.pricing == crate::evict::Pricing::Unasked);
            ensure(stands, Violation::Order(i))?;
        }
        ensure(order.in_order().count() == leaves && order.is_sorted(nodes), Violation::Sorting)
    }

    fn check_tenants(&self) -> Result<(), Violation> {
        let entries = self.cache.tenants.entries();
        let mut counted = alloc::vec![(0u32, 0u32, 0usize); entries.len()];
        for (i, node) in (0..).zip(&self.cache.nodes).filter(|(_, node)| node.used) {
            let count = counted.get_mut(node.tenant as usize).ok_or(Violation::Order(i))?;
            count.0 += 1;
            count.1 += u32::from(node.idle);
            count.2 += usize::from(node.idle && node.child == NONE);
        }
        for ((t, entry), (stored, cached, leaves)) in (0..).zip(entries).zip(counted) {
            let own = self.cache.order.in_order_of(entry.leaves);
            let sound = (entry.stored(), entry.cached()) == (stored, cached)
                && own.map(|i| self.cache.node(i).tenant).filter(|of| *of == t).count() == leaves
                && self.cache.order.in_order_of(entry.leaves).count() == leaves
                && self.cache.tenants.is_over(t) == (u64::from(cached) > entry.quota() && leaves > 0)
                && (stored == 0 || self.cache.tenants.find(entry.id).is_some_and(|found| found.id == entry.id));
            ensure(sound, Violation::Tenant(t))?;
        }
        Ok(())
    }
}
