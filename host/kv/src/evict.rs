//! Which cached block leaves next? Leaves by (price, deeper first, longest unused, hash); content whose time is up before all.
//!
//! A candidate is one leaf of the tree of cached content: a run of one block. When a leaf leaves, the block before it becomes a leaf; if
//! both have the same owner and access record they are one run and the price carries over, so a policy prices a chain once and not
//! block by block. A leaf without a price has the native one (longest unused leaves first) and waits in a queue to be asked about.

use core::cmp::Reverse;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{BlockRef, ClassRank, Duration, Instant, TenantId, TrustGroup};

use crate::list::{Links, List};
use crate::ordered::{Ordered, Root};
use crate::prefix::Node;
use crate::tenant::Tenants;

/// What the eviction policy may know about one run: the rows of its question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunRow {
    /// Names the run in [`crate::Kv::set_price`].
    pub block: BlockRef,
    /// 64 bits of the tail's key; stable while cached, and as a ghost.
    pub run_hash: u64,
    /// Blocks in the run: 1.
    pub run_blocks: u32,
    /// Blocks from the root of the prompt to the tail.
    pub depth_blocks: u32,
    /// Who stored it.
    pub tenant: TenantId,
    /// Cache-sharing domain.
    pub trust: TrustGroup,
    /// Highest class that used it.
    pub class: ClassRank,
    /// Since its last use.
    pub idle: Duration,
    /// Since it was stored.
    pub cached: Duration,
    /// Reuses since it was stored.
    pub hit_count: u32,
    /// Reuses, halved every 60 s.
    pub recent_hit_count: u32,
    /// It was evicted before and came back within the ghost ring.
    pub ghost: bool,
    /// Tokens to compute again if it is dropped.
    pub recompute_tokens: u32,
    /// Hint of the request, 0..=100, larger stays longer.
    pub retention: u8,
    /// Time to its expiry; zero is due, [`Duration::MAX`] is never.
    pub ttl_left: Duration,
    /// Unreferenced cached blocks of the tenant.
    pub tenant_cached_blocks: u32,
    /// The tenant's quota of these; [`u64::MAX`] is none.
    pub tenant_quota_blocks: u64,
    /// The price in force.
    pub price: u64,
}

/// How far the question about a leaf's price has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Pricing {
    /// Not a leaf, or not one since its last use: no price counts.
    Unasked,
    /// Has the native price and waits for the question.
    Waiting,
    /// Asked about; the native price stands unless an answer came.
    Asked,
    /// Has a policy's price.
    Answered,
}

impl Pricing {
    pub(crate) fn from_code(code: u8) -> Result<Self, DecodeError> {
        [Self::Unasked, Self::Waiting, Self::Asked, Self::Answered]
            .get(usize::from(code))
            .copied()
            .ok_or(DecodeError::Invalid("pricing"))
    }
}

/// The orders in which cached blocks leave.
#[derive(Clone, Debug)]
pub(crate) struct EvictionOrder {
    by_price: Ordered,
    cheapest: Root,
    /// The same order again, one set for each tenant, rooted in [`Tenants`].
    by_tenant: Ordered,
    /// Every stored block with a time to live, in use or not.
    by_expiry: Ordered,
    soonest: Root,
    links: Links,
    /// Leaves to ask the policy about, first come first.
    waiting: List,
}

fn price_order(nodes: &[Node], i: u32) -> (u64, Reverse<u32>, Instant, u64, u32) {
    let n = &nodes[i as usize];
    (n.price, Reverse(n.depth), n.last_use, n.key.short(), i)
}

/// A child expires no later than its parent, so the first in this order has no children.
fn expiry_order(nodes: &[Node], i: u32) -> (Instant, Reverse<u32>, u32) {
    let n = &nodes[i as usize];
    (n.expires, Reverse(n.depth), i)
}

impl EvictionOrder {
    pub(crate) const ENTRY_BYTES: usize = 3 * Ordered::ENTRY_BYTES + Links::ENTRY_BYTES;

    pub(crate) fn new(blocks: u32) -> Self {
        let len = blocks as usize;
        Self {
            by_price: Ordered::new(len),
            cheapest: Root::default(),
            by_tenant: Ordered::new(len),
            by_expiry: Ordered::new(len),
            soonest: Root::default(),
            links: Links::new(len),
            waiting: List::default(),
        }
    }

    pub(crate) fn is_leaf(&self, i: u32) -> bool {
        self.by_price.contains(i)
    }

    /// `i` is a leaf from now on, at the price its node has.
    pub(crate) fn add_leaf(&mut self, nodes: &[Node], tenants: &mut Tenants, i: u32) {
        let before = |a: u32, b: u32| price_order(nodes, a) < price_order(nodes, b);
        self.by_price.insert(&mut self.cheapest, i, before);
        let t = nodes[i as usize].tenant;
        self.by_tenant.insert(tenants.leaves_mut(t), i, before);
        tenants.refresh(t);
        if nodes[i as usize].pricing == Pricing::Waiting && !self.links.contains(i) {
            self.links.push_back(&mut self.waiting, i);
        }
    }

    /// `i` is no leaf any more, or is about to change its place in the order.
    pub(crate) fn remove_leaf(&mut self, nodes: &[Node], tenants: &mut Tenants, i: u32) {
        self.by_price.remove(&mut self.cheapest, i);
        let t = nodes[i as usize].tenant;
        self.by_tenant.remove(tenants.leaves_mut(t), i);
        tenants.refresh(t);
        self.stop_waiting(i);
    }

    pub(crate) fn stop_waiting(&mut self, i: u32) {
        if self.links.contains(i) {
            self.links.remove(&mut self.waiting, i);
        }
    }

    pub(crate) fn next_waiting(&mut self) -> Option<u32> {
        self.links.pop_front(&mut self.waiting)
    }

    pub(crate) fn waiting(&self) -> &List {
        &self.waiting
    }

    pub(crate) fn add_expiry(&mut self, nodes: &[Node], i: u32) {
        if nodes[i as usize].expires != Instant::NEVER {
            self.by_expiry.insert(&mut self.soonest, i, |a, b| expiry_order(nodes, a) < expiry_order(nodes, b));
        }
    }

    pub(crate) fn remove_expiry(&mut self, i: u32) {
        if self.by_expiry.contains(i) {
            self.by_expiry.remove(&mut self.soonest, i);
        }
    }

    /// The leaf that leaves first when room is needed.
    pub(crate) fn cheapest(&self) -> Option<u32> {
        self.by_price.first(self.cheapest)
    }

    pub(crate) fn cheapest_of(&self, leaves: Root) -> Option<u32> {
        self.by_tenant.first(leaves)
    }

    /// All leaves, cheapest first.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_price.iter(self.cheapest)
    }

    pub(crate) fn in_order_of(&self, leaves: Root) -> impl Iterator<Item = u32> + '_ {
        self.by_tenant.iter(leaves)
    }

    /// The stored block whose time is up first, with that time.
    pub(crate) fn soonest(&self) -> Option<u32> {
        self.by_expiry.first(self.soonest)
    }

    pub(crate) fn has_expiry(&self, i: u32) -> bool {
        self.by_expiry.contains(i)
    }

    pub(crate) fn is_waiting(&self, i: u32) -> bool {
        self.links.contains(i)
    }

    /// Members of all three orders stand as the nodes say, in order: the full walk's part.
    pub(crate) fn is_sorted(&self, nodes: &[Node]) -> bool {
        self.in_order().map(|i| price_order(nodes, i)).is_sorted()
            && self.by_expiry.iter(self.soonest).map(|i| expiry_order(nodes, i)).is_sorted()
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.by_price.reserved_bytes()
            + self.by_tenant.reserved_bytes()
            + self.by_expiry.reserved_bytes()
            + self.links.reserved_bytes()
    }

    /// Writes the queue of questions; the orders follow from the nodes.
    pub(crate) fn encode(&self, out: &mut Writer) {
        self.links.encode(&self.waiting, out);
    }

    /// Reads the queue; expiries and leaves are added by whoever knows the nodes.
    pub(crate) fn decode(blocks: u32, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut order = Self::new(blocks);
        order.waiting = order.links.decode(from)?;
        Ok(order)
    }
}
