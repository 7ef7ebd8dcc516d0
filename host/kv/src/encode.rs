//! How are one replica's books written down and read back? What is derived (counts, index, orders) is rebuilt and then checked.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Instant, TrustGroup};

use crate::call::KvConfig;
use crate::event::{EventLog, decode_class, decode_key, encode_key};
use crate::evict::{EvictionOrder, Pricing};
use crate::ghost::Ghosts;
use crate::kv::Kv;
use crate::list::NONE;
use crate::pool::BlockPool;
use crate::prefix::{Node, PrefixCache};
use crate::reserve::Reservations;
use crate::stats::CacheStats;
use crate::tenant::Tenants;

/// Version of the format.
const VERSION: u32 = 1;

impl KvConfig {
    fn encode(&self, out: &mut Writer) {
        let marks = self.watermarks;
        for size in
            [self.blocks, self.block_size_tokens, self.owners, self.tenants, self.events, marks.low_ppm, marks.high_ppm]
        {
            out.u32(size);
        }
    }
}

impl Kv {
    /// Writes the whole state for a snapshot. Equal states give equal bytes.
    pub fn encode(&self, out: &mut Writer) {
        out.u32(VERSION);
        self.config.encode(out);
        self.pool.encode(out);
        self.reservations.encode(out);
        self.cache.encode(out);
    }

    /// Reads what [`Self::encode`] wrote at the same configuration, and checks it. What it returns behaves as the original.
    pub fn decode(config: KvConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let found = from.u32()?;
        if found != VERSION {
            return Err(DecodeError::Version { found, expected: VERSION });
        }
        let mut expected = Writer::new();
        config.encode(&mut expected);
        if from.raw(expected.bytes().len())? != expected.bytes() {
            return Err(DecodeError::Invalid("kv configuration"));
        }
        config.check().map_err(|_| DecodeError::Invalid("kv configuration"))?;
        let pool = BlockPool::decode(config.blocks, from)?;
        let reservations = Reservations::decode(from)?;
        if reservations.owners() != config.owners {
            return Err(DecodeError::Invalid("owner count"));
        }
        let cache = PrefixCache::decode(&config, from)?;
        let kv = Self { config, pool, reservations, cache };
        kv.check().map_err(|_| DecodeError::Invalid("kv state"))?;
        Ok(kv)
    }
}

impl PrefixCache {
    fn encode(&self, out: &mut Writer) {
        out.u32(self.stored());
        for (i, node) in (0u32..).zip(&self.nodes).filter(|(_, node)| node.used) {
            out.u32(i);
            node.encode(out);
        }
        self.tenants.encode(out);
        self.order.encode(out);
        self.ghosts.encode(out);
        self.events.encode(out);
        self.stats.encode(out);
    }

    fn decode(config: &KvConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut cache = Self::new(config.blocks, config.block_size_tokens, config.tenants, config.events);
        for _ in 0..from.u32()? {
            let i = from.u32()?;
            let node = Node::decode(from)?;
            let slot = cache.nodes.get_mut(i as usize).filter(|slot| !slot.used);
            *slot.ok_or(DecodeError::Invalid("cached block"))? = node;
        }
        cache.tenants = Tenants::decode(config.tenants, from)?;
        cache.order = EvictionOrder::decode(config.blocks, from)?;
        cache.ghosts = Ghosts::decode(config.blocks, from)?;
        cache.events = EventLog::decode(config.events, from)?;
        cache.stats = CacheStats::decode(from)?;
        cache.rebuild()?;
        Ok(cache)
    }
}

impl Node {
    fn encode(&self, out: &mut Writer) {
        encode_key(out, self.key);
        out.bool(self.idle);
        out.bool(self.ghost);
        out.u8(self.pricing as u8);
        out.u8(self.class.get());
        out.u8(self.retention);
        for link in [self.parent, self.child, self.next, self.prev, self.held, self.depth, self.tenant] {
            out.u32(link);
        }
        for word in [self.trust.0, self.price, self.last_use.0, self.since.0, self.expires.0] {
            out.u64(word);
        }
        for count in [self.hits, self.recent, self.recent_at] {
            out.u32(count);
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            used: true,
            key: decode_key(from)?,
            idle: from.bool()?,
            ghost: from.bool()?,
            pricing: Pricing::from_code(from.u8()?)?,
            class: decode_class(from)?,
            retention: from.u8()?,
            parent: from.u32()?,
            child: from.u32()?,
            next: from.u32()?,
            prev: from.u32()?,
            held: from.u32()?,
            depth: from.u32()?,
            tenant: from.u32()?,
            trust: TrustGroup(from.u64()?),
            price: from.u64()?,
            last_use: Instant(from.u64()?),
            since: Instant(from.u64()?),
            expires: Instant(from.u64()?),
            hits: from.u32()?,
            recent: from.u32()?,
            recent_at: from.u32()?,
        })
    }

    /// May the walk follow this node's links?
    pub(crate) fn links_within(&self, blocks: u32, tenants: u32) -> bool {
        let known = |link: u32| link == NONE || link < blocks;
        [self.parent, self.child, self.next, self.prev].into_iter().all(known) && self.tenant < tenants
    }
}
