//! What computed content can be found again, and under which key? A tree of full blocks by parent, with an index by key.
//!
//! A key is 128 bits of SHA-256 over parent key and tokens, rooted in namespace and trust group, so equal keys mean equal content and
//! equal permission; nothing else is compared here. As a second fence against a weak hash a match also demands that each block's parent
//! is the block matched before it.
//!
//! Blocks that nobody references and that have no pinned descendant are *evictable*: all of them can leave, leaf by leaf. A block is
//! pinned while it is referenced, deferred or leased, or while a child is pinned; `held` counts pinned children, so the number of evictable
//! blocks is kept in O(change).

use alloc::vec::Vec;

use penstock_base::codec::DecodeError;
use penstock_base::{BlockKey, ClassRank, Duration, Instant, Manifest, TenantId, Traits, TrustGroup};

use crate::event::{EventLog, KvChange, RemoveCause};
use crate::evict::{EvictionOrder, Pricing, RunRow};
use crate::ghost::Ghosts;
use crate::index::HashIndex;
use crate::list::NONE;
use crate::stats::CacheStats;
use crate::tenant::Tenants;

/// Time after which recent hits count half.
pub const RECENT_HALF_LIFE: Duration = Duration::from_s(60);

/// For whom content is stored, and on what terms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Who pays for the room.
    pub tenant: TenantId,
    /// Cache-sharing domain; part of every key already, kept for clean-up.
    pub trust: TrustGroup,
    /// Class of the request.
    pub class: ClassRank,
    /// Hint 0..=100, larger stays longer.
    pub retention: u8,
    /// Most unreferenced cached blocks of the tenant here; [`u64::MAX`] is no quota.
    pub quota_blocks: u64,
    /// Not found any more from then on; [`Instant::NEVER`] is no expiry.
    pub expires: Instant,
    /// Nothing may be stored.
    pub no_store: bool,
}

impl Holder {
    /// The terms of a request, without expiry.
    pub fn of(manifest: &Manifest) -> Self {
        Self {
            tenant: manifest.tenant,
            trust: manifest.trust,
            class: manifest.class,
            retention: manifest.retention.min(100),
            quota_blocks: manifest.terms.cache_blocks_max,
            expires: Instant::NEVER,
            no_store: manifest.traits.has(Traits::NO_STORE),
        }
    }
}

/// Keys of a sequence's full blocks, root first: those of the prompt, then those of what was generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Keys<'a> {
    /// Full blocks of the prompt.
    pub prompt: &'a [BlockKey],
    /// Full blocks behind them.
    pub generated: &'a [BlockKey],
}

impl<'a> Keys<'a> {
    /// Keys of a prompt alone.
    pub fn prompt(keys: &'a [BlockKey]) -> Self {
        Self { prompt: keys, generated: &[] }
    }

    /// Number of keys.
    pub fn len(&self) -> u32 {
        (self.prompt.len() + self.generated.len()) as u32
    }

    /// No keys?
    pub fn is_empty(&self) -> bool {
        self.prompt.is_empty() && self.generated.is_empty()
    }

    /// Key of block `index`.
    pub fn get(&self, index: u32) -> Option<BlockKey> {
        let index = index as usize;
        self.prompt.get(index).or_else(|| self.generated.get(index - self.prompt.len())).copied()
    }
}

/// What the cache knows about one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// Its content is findable; otherwise nothing else here counts.
    pub(crate) used: bool,
    /// Nobody references it: the pool says `Cached`.
    pub(crate) idle: bool,
    pub(crate) ghost: bool,
    pub(crate) pricing: Pricing,
    pub(crate) class: ClassRank,
    pub(crate) retention: u8,
    pub(crate) key: BlockKey,
    /// Tree links: the block before, the first block behind, and siblings.
    pub(crate) parent: u32,
    pub(crate) child: u32,
    pub(crate) next: u32,
    pub(crate) prev: u32,
    /// Children that are pinned.
    pub(crate) held: u32,
    /// Blocks from the root to this one.
    pub(crate) depth: u32,
    /// Entry in [`Tenants`].
    pub(crate) tenant: u32,
    pub(crate) trust: TrustGroup,
    pub(crate) price: u64,
    pub(crate) last_use: Instant,
    pub(crate) since: Instant,
    pub(crate) expires: Instant,
    pub(crate) hits: u32,
    /// Hits, halved at every boundary of [`RECENT_HALF_LIFE`] since the origin, as of period `recent_at`.
    pub(crate) recent: u32,
    pub(crate) recent_at: u32,
}

impl Node {
    pub(crate) const EMPTY: Self = Self {
        used: false,
        idle: false,
        ghost: false,
        pricing: Pricing::Unasked,
        class: ClassRank::MIN,
        retention: 0,
        key: BlockKey([0; 16]),
        parent: NONE,
        child: NONE,
        next: NONE,
        prev: NONE,
        held: 0,
        depth: 0,
        tenant: 0,
        trust: TrustGroup(0),
        price: 0,
        last_use: Instant::ZERO,
        since: Instant::ZERO,
        expires: Instant::NEVER,
        hits: 0,
        recent: 0,
        recent_at: 0,
    };

    pub(crate) fn is_pinned(&self) -> bool {
        !self.idle || self.held > 0
    }

    fn period(now: Instant) -> u32 {
        (now.0 / RECENT_HALF_LIFE.0) as u32
    }

    fn recent_at(&self, now: Instant) -> u32 {
        let halvings = Self::period(now).saturating_sub(self.recent_at);
        self.recent.checked_shr(halvings).unwrap_or(0)
    }

    /// Equal owner and access record: both belong to one run.
    fn same_record(&self, other: &Self) -> bool {
        let record = |n: &Self| (n.tenant, n.class, n.retention, n.hits, n.last_use, n.expires);
        record(self) == record(other)
    }
}

/// Findable content of one replica. Knows blocks by index; states and references are the pool's.
#[derive(Clone, Debug)]
pub(crate) struct PrefixCache {
    pub(crate) nodes: Vec<Node>,
    index: HashIndex,
    pub(crate) tenants: Tenants,
    pub(crate) order: EvictionOrder,
    pub(crate) ghosts: Ghosts,
    pub(crate) events: EventLog,
    pub(crate) stats: CacheStats,
    /// Blocks whose content is findable.
    stored: u32,
    /// Blocks that could all leave.
    evictable: u32,
    block_size_tokens: u32,
}

impl PrefixCache {
    pub(crate) const ENTRY_BYTES_MAX: usize =
        size_of::<Node>() + HashIndex::ENTRY_BYTES_MAX + EvictionOrder::ENTRY_BYTES + Ghosts::ENTRY_BYTES_MAX;

    pub(crate) fn new(blocks: u32, block_size_tokens: u32, tenants: u32, events: u32) -> Self {
        Self {
            nodes: alloc::vec![Node::EMPTY; blocks as usize],
            index: HashIndex::new(blocks),
            tenants: Tenants::new(tenants),
            order: EvictionOrder::new(blocks),
            ghosts: Ghosts::new(blocks),
            events: EventLog::new(events),
            stats: CacheStats::new(),
            stored: 0,
            evictable: 0,
            block_size_tokens,
        }
    }

    pub(crate) fn node(&self, i: u32) -> &Node {
        &self.nodes[i as usize]
    }

    fn node_mut(&mut self, i: u32) -> &mut Node {
        &mut self.nodes[i as usize]
    }

    pub(crate) fn stored(&self) -> u32 {
        self.stored
    }

    pub(crate) fn evictable(&self) -> u32 {
        self.evictable
    }

    /// The block under `key`, its time up or not.
    pub(crate) fn find(&self, key: BlockKey) -> Option<u32> {
        self.index.find(key.short(), |i| self.nodes[i as usize].key == key)
    }

    /// The block under `key` that follows `parent`, unless its time is up.
    pub(crate) fn find_child(&self, parent: Option<u32>, key: BlockKey, now: Instant) -> Option<u32> {
        let i = self.find(key)?;
        let node = self.node(i);
        (node.parent == parent.unwrap_or(NONE) && node.expires > now).then_some(i)
    }

    pub(crate) fn is_evictable(&self, i: u32) -> bool {
        !self.node(i).is_pinned()
    }

    /// A child of `at` became pinned.
    fn pin_up(&mut self, mut at: u32) {
        while at != NONE {
            let node = self.node_mut(at);
            let was_pinned = node.is_pinned();
            node.held += 1;
            if was_pinned {
                return;
            }
            at = node.parent;
            self.evictable -= 1;
        }
    }

    /// A child of `at` is pinned no more, or gone while it was.
    fn unpin_up(&mut self, mut at: u32) {
        while at != NONE {
            let node = self.node_mut(at);
            node.held -= 1;
            if node.is_pinned() {
                return;
            }
            at = node.parent;
            self.evictable += 1;
        }
    }

    /// Stores the content of the referenced block `i` behind `parent`. False when there is no room for another tenant.
    pub(crate) fn insert(&mut self, i: u32, key: BlockKey, parent: Option<u32>, holder: &Holder, now: Instant) -> bool {
        let Some(tenant) = self.tenants.store(holder.tenant, holder.quota_blocks) else { return false };
        let evicted = self.ghosts.call_back(key);
        let (depth, parent_expires, parent_key) =
            parent.map(|p| self.node(p)).map_or((0, Instant::NEVER, None), |p| (p.depth, p.expires, Some(p.key)));
        let parent = parent.unwrap_or(NONE);
        let next = match parent {
            NONE => NONE,
            p => {
                if self.order.is_leaf(p) {
                    self.order.remove_leaf(&self.nodes, &mut self.tenants, p);
                    self.node_mut(p).pricing = Pricing::Unasked;
                }
                core::mem::replace(&mut self.node_mut(p).child, i)
            }
        };
        if next != NONE {
            self.node_mut(next).prev = i;
        }
        *self.node_mut(i) = Node {
            used: true,
            ghost: evicted.is_some(),
            class: holder.class,
            retention: holder.retention,
            key,
            parent,
            next,
            depth: depth + 1,
            tenant,
            trust: holder.trust,
            last_use: now,
            since: now,
            expires: holder.expires.min(parent_expires),
            recent_at: Node::period(now),
            ..Node::EMPTY
        };
        self.index.insert(key.short(), i);
        self.stored += 1;
        self.pin_up(parent);
        self.order.add_expiry(&self.nodes, i);
        let evicted_before = evicted.map(|then| now.since(then));
        self.stats.on_stored(now, evicted_before);
        self.events.push(KvChange::Stored {
            key,
            parent: parent_key,
            depth_blocks: depth + 1,
            tenant: holder.tenant,
            class: holder.class,
            evicted_before,
        });
        true
    }

    /// The last reference to `i` is gone, and so is its fence.
    pub(crate) fn set_idle(&mut self, i: u32) {
        let node = self.node_mut(i);
        node.idle = true;
        let (tenant, parent, childless, pinned) = (node.tenant, node.parent, node.child == NONE, node.is_pinned());
        self.tenants.add_cached(tenant);
        if !pinned {
            self.evictable += 1;
            self.unpin_up(parent);
        }
        if childless {
            self.become_leaf(i, None);
        }
    }

    /// A cached block is referenced again.
    pub(crate) fn set_busy(&mut self, i: u32) {
        self.leave_order(i);
        let node = self.node_mut(i);
        let was_pinned = node.is_pinned();
        node.idle = false;
        node.pricing = Pricing::Unasked;
        let (tenant, parent) = (node.tenant, node.parent);
        self.tenants.sub_cached(tenant);
        if !was_pinned {
            self.evictable -= 1;
            self.pin_up(parent);
        }
    }

    /// Somebody stopped using the content.
    pub(crate) fn note_use(&mut self, i: u32, now: Instant) {
        let node = self.node_mut(i);
        node.last_use = node.last_use.max(now);
    }

    /// Somebody found the content and uses it from now on; it is not idle any more.
    pub(crate) fn note_hit(&mut self, i: u32, class: ClassRank, now: Instant) {
        let node = self.node_mut(i);
        node.recent = node.recent_at(now).saturating_add(1);
        node.recent_at = Node::period(now);
        node.hits = node.hits.saturating_add(1);
        node.class = node.class.max(class);
        self.note_use(i, now);
    }

    fn leave_order(&mut self, i: u32) {
        if self.order.is_leaf(i) {
            self.order.remove_leaf(&self.nodes, &mut self.tenants, i);
        }
    }

    /// `i` is idle and has no children (any more); `behind` is the record of the leaf that just left from behind it.
    fn become_leaf(&mut self, i: u32, behind: Option<&Node>) {
        let node = self.node_mut(i);
        match behind.filter(|b| matches!(b.pricing, Pricing::Asked | Pricing::Answered) && b.same_record(node)) {
            Some(run) => (node.price, node.pricing) = (run.price, run.pricing),
            None => (node.price, node.pricing) = (node.last_use.as_us(), Pricing::Waiting),
        }
        self.order.add_leaf(&self.nodes, &mut self.tenants, i);
    }

    /// The content of `i`, which has no children, cannot be found any more.
    pub(crate) fn remove(&mut self, i: u32, cause: RemoveCause, now: Instant) {
        debug_assert!(self.node(i).used && self.node(i).child == NONE, "only leaves leave");
        self.leave_order(i);
        self.order.remove_expiry(i);
        let node = *self.node(i);
        let nodes = &self.nodes;
        self.index.remove(node.key.short(), i, |e| nodes[e as usize].key.short());
        match node.prev {
            NONE if node.parent != NONE => self.node_mut(node.parent).child = node.next,
            NONE => {}
            prev => self.node_mut(prev).next = node.next,
        }
        if node.next != NONE {
            self.node_mut(node.next).prev = node.prev;
        }
        if node.idle {
            self.evictable -= 1;
            self.tenants.sub_cached(node.tenant);
        } else {
            self.unpin_up(node.parent);
        }
        *self.node_mut(i) = Node::EMPTY;
        self.stored -= 1;
        let tenant = self.tenants.get(node.tenant).id;
        if node.parent != NONE && self.node(node.parent).child == NONE && self.node(node.parent).idle {
            self.become_leaf(node.parent, Some(&node));
        }
        self.tenants.unstore(node.tenant);
        if cause.is_eviction() {
            self.ghosts.push(node.key, now);
            self.stats.left_price = node.price;
        }
        self.stats.on_removed(now, cause, node.idle);
        let idle = now.since(node.last_use);
        self.events.push(KvChange::Removed { key: node.key, tenant, cause, idle, hit_count: node.hits });
    }

    /// A leaf of the tree below `i`, or `i` itself.
    pub(crate) fn last_below(&self, i: u32) -> u32 {
        let mut at = i;
        while self.node(at).child != NONE {
            at = self.node(at).child;
        }
        at
    }

    /// Sets a policy's price. False when the block is not a leaf: the answer came too late and is passed over.
    pub(crate) fn set_price(&mut self, i: u32, price: u64) -> bool {
        if !self.order.is_leaf(i) {
            return false;
        }
        self.order.remove_leaf(&self.nodes, &mut self.tenants, i);
        let node = self.node_mut(i);
        (node.price, node.pricing) = (price, Pricing::Answered);
        self.order.add_leaf(&self.nodes, &mut self.tenants, i);
        true
    }

    /// The next leaf that waits for the question about its price.
    pub(crate) fn next_waiting(&mut self) -> Option<u32> {
        let i = self.order.next_waiting()?;
        self.node_mut(i).pricing = Pricing::Asked;
        Some(i)
    }

    /// The content whose time is up.
    pub(crate) fn due(&self, now: Instant) -> Option<u32> {
        self.order.soonest().filter(|i| self.node(*i).expires <= now)
    }

    /// The cheapest leaf of the tenant that is over its hard quota for longest.
    pub(crate) fn over_quota(&self) -> Option<u32> {
        self.order.cheapest_of(self.tenants.first_over()?.leaves)
    }

    /// What a policy may know about the leaf `i`.
    pub(crate) fn row(&self, i: u32, block: penstock_base::BlockRef, now: Instant) -> RunRow {
        let node = self.node(i);
        let tenant = self.tenants.get(node.tenant);
        RunRow {
            block,
            run_hash: node.key.short(),
            run_blocks: 1,
            depth_blocks: node.depth,
            tenant: tenant.id,
            trust: node.trust,
            class: node.class,
            idle: now.since(node.last_use),
            cached: now.since(node.since),
            hit_count: node.hits,
            recent_hit_count: node.recent_at(now),
            ghost: node.ghost,
            recompute_tokens: self.block_size_tokens,
            retention: node.retention,
            ttl_left: now.until(node.expires),
            tenant_cached_blocks: tenant.cached(),
            tenant_quota_blocks: tenant.quota(),
            price: node.price,
        }
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
            + self.index.reserved_bytes()
            + self.tenants.reserved_bytes()
            + self.order.reserved_bytes()
            + self.ghosts.reserved_bytes()
            + self.events.reserved_bytes()
    }

    /// Derives index, counts and orders from nodes, tenants and queue that were read back.
    pub(crate) fn rebuild(&mut self) -> Result<(), DecodeError> {
        let (blocks, tenants) = (self.nodes.len() as u32, self.tenants.entries().len() as u32);
        for i in 0..blocks {
            let node = *self.node(i);
            if !node.used {
                continue;
            }
            if !node.links_within(blocks, tenants) || self.find(node.key).is_some() {
                return Err(DecodeError::Invalid("cached block"));
            }
            self.index.insert(node.key.short(), i);
            self.stored += 1;
            self.evictable += u32::from(!node.is_pinned());
            self.order.add_expiry(&self.nodes, i);
            if node.idle && node.child == NONE {
                self.order.add_leaf(&self.nodes, &mut self.tenants, i);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_in_use_pins_all_that_precedes_it() {
        let mut cache = PrefixCache::new(4, 16, 1, 8);
        let holder = Holder {
            tenant: TenantId(1),
            trust: TrustGroup(1),
            class: ClassRank::MIN,
            retention: 50,
            quota_blocks: u64::MAX,
            expires: Instant::NEVER,
            no_store: false,
        };
        for i in 0..3u32 {
            assert!(cache.insert(i, BlockKey([i as u8; 16]), i.checked_sub(1), &holder, Instant::ZERO));
        }
        for (i, evictable) in [(0, 0), (1, 0), (2, 3)] {
            cache.set_idle(i);
            assert_eq!(cache.evictable(), evictable, "a block can leave once all behind it can");
        }
        cache.set_busy(2);
        assert_eq!(cache.evictable(), 0);
        cache.set_idle(2);
        cache.set_busy(1);
        assert_eq!(cache.evictable(), 1, "what follows is not pinned");
    }
}
