//! Random lives of sequences, in step with books kept the slow way: every observable is compared after every operation.

mod naive;

use naive::{Entry, Naive, State, key};
use penstock_base::{BatchId, BlockKey, ClassRank, Duration, Instant, TenantId, TrustGroup};
use penstock_kv::*;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const BLOCKS: u32 = 24;
const BLOCK_TOKENS: u32 = 4;
const SLOTS: usize = 5;
const DEPTH: usize = 12;
/// The one tenant with a quota, and the quota.
const BOUND_TENANT: u64 = 2;
const QUOTA: u64 = 4;

#[derive(Clone, Debug)]
enum Op {
    Admit { slot: usize, path: Vec<u8>, tail: u32, spare: u32, tenant: u64, class: u8, ttl_ms: Option<u64> },
    Extend { slot: usize, tokens: u32 },
    Confirm { slot: usize },
    Fork { from: usize, to: usize, salt: u8 },
    Release { slot: usize, keep: u32 },
    Rewind { slot: usize, tokens: u32 },
    Forget { slot: usize, from: u32 },
    Submit,
    Retire,
    Evict { want: u32 },
    Price { nth: usize, price: u64 },
    TakeUnpriced { most: usize },
    Advance { ms: u64 },
    Expire { most: u32 },
    Flush { group: u64 },
    Lease { slot: usize, index: u32 },
    Unlease,
    Reserve { slot: usize, blocks: u32 },
}

fn op() -> impl Strategy<Value = Op> {
    let slot = 0..SLOTS;
    let path = prop::collection::vec(0u8..2, 1..6);
    let ttl = prop_oneof![4 => Just(None), 1 => (1u64..200).prop_map(Some)];
    prop_oneof![
        6 => (slot.clone(), path, 0..BLOCK_TOKENS, 0u32..5, 1u64..3, 0u8..3, ttl)
            .prop_map(|(slot, path, tail, spare, tenant, class, ttl_ms)| Op::Admit { slot, path, tail, spare, tenant, class, ttl_ms }),
        8 => (slot.clone(), 1u32..14).prop_map(|(slot, tokens)| Op::Extend { slot, tokens }),
        8 => slot.clone().prop_map(|slot| Op::Confirm { slot }),
        2 => (slot.clone(), slot.clone(), 0u8..2).prop_map(|(from, to, salt)| Op::Fork { from, to, salt }),
        6 => (slot.clone(), prop_oneof![4 => Just(0u32), 1 => 0u32..6]).prop_map(|(slot, keep)| Op::Release { slot, keep }),
        1 => (slot.clone(), 0u32..16).prop_map(|(slot, tokens)| Op::Rewind { slot, tokens }),
        1 => (slot.clone(), 0u32..4).prop_map(|(slot, from)| Op::Forget { slot, from }),
        6 => Just(Op::Submit),
        6 => Just(Op::Retire),
        2 => (1u32..6).prop_map(|want| Op::Evict { want }),
        5 => (0usize..8, prop_oneof![0u64..4, 0u64..100, any::<u64>()]).prop_map(|(nth, price)| Op::Price { nth, price }),
        3 => (1usize..5).prop_map(|most| Op::TakeUnpriced { most }),
        4 => prop_oneof![8 => 1u64..50, 1 => 20_000u64..90_000].prop_map(|ms| Op::Advance { ms }),
        2 => (1u32..5).prop_map(|most| Op::Expire { most }),
        1 => (0u64..2).prop_map(|group| Op::Flush { group }),
        1 => (slot.clone(), 0u32..6).prop_map(|(slot, index)| Op::Lease { slot, index }),
        2 => Just(Op::Unlease),
        1 => (slot, 0u32..6).prop_map(|(slot, blocks)| Op::Reserve { slot, blocks }),
    ]
}

/// One sequence: what its content is, and how far it has come.
#[derive(Clone)]
struct Seq {
    path: Vec<u8>,
    tokens: u32,
    table: BlockTable,
    holder: Holder,
    last_batch: Option<u64>,
}

struct World {
    kv: Kv,
    naive: Naive,
    seqs: Vec<Seq>,
    now: u64,
    /// The batch being built, and the oldest one in flight.
    batch: u64,
    oldest: u64,
    leases: Vec<penstock_base::BlockRef>,
    events_seen: u64,
    stored_seen: u64,
}

fn keys_of(path: &[u8]) -> Vec<BlockKey> {
    (1..=path.len()).map(|n| BlockKey(key(&path[..n]))).collect()
}

/// The first digits as given, the others a function of them: equal beginnings often go on alike, but not always.
fn full_path(given: &[u8], salt: u8) -> Vec<u8> {
    let mut path = given.to_vec();
    while path.len() < DEPTH {
        path.push((path.iter().sum::<u8>() + salt) % 2);
    }
    path
}

impl World {
    fn new() -> Self {
        let config = KvConfig {
            block_size_tokens: BLOCK_TOKENS,
            owners: SLOTS as u32,
            tenants: 4,
            events: 4_096,
            ..KvConfig::with_blocks(BLOCKS)
        };
        let holder = Holder {
            tenant: TenantId(1),
            trust: TrustGroup(0),
            class: ClassRank::default(),
            retention: 50,
            quota_blocks: u64::MAX,
            expires: Instant::NEVER,
            no_store: false,
        };
        let seq = Seq {
            path: full_path(&[0], 0),
            tokens: 0,
            table: BlockTable::with_capacity(DEPTH as u32),
            holder,
            last_batch: None,
        };
        let naive = Naive {
            total: BLOCKS,
            block_size: BLOCK_TOKENS,
            quotas: [(BOUND_TENANT, QUOTA)].into(),
            ..Naive::default()
        };
        World {
            kv: Kv::new(config).expect("a sane configuration"),
            naive,
            seqs: vec![seq; SLOTS],
            now: 1_000_000_000,
            batch: 0,
            oldest: 0,
            leases: Vec::new(),
            events_seen: 0,
            stored_seen: 0,
        }
    }

    fn at(&self) -> Instant {
        Instant(self.now)
    }

    fn reserved(&mut self, slot: usize) -> &mut u32 {
        self.naive.reserved.entry(slot as u32).or_default()
    }

    fn admit(&mut self, slot: usize, path: &[u8], input_tokens: u32, total_blocks: u32, holder: Holder, salt: u8) {
        let (now, at) = (self.now, self.at());
        let path = full_path(path, salt);
        let keys = keys_of(&path);
        let ask = Admit {
            owner: OwnerId(slot as u32),
            keys: Keys { prompt: &keys[..2], generated: &keys[2..] },
            input_tokens,
            total_blocks,
            class: holder.class,
        };
        if !self.seqs[slot].table.is_empty() {
            assert_eq!(self.kv.admit(at, ask, &mut self.seqs[slot].table), Err(KvError::TableInUse));
            return;
        }
        let found = self.naive.longest(&path, input_tokens, now);
        let before = self.naive.available();
        // A found block that could have left is not available any more: count those by taking them and looking.
        let mut after = self.naive.clone();
        found.iter().for_each(|b| after.acquire(*b));
        let rest = total_blocks.saturating_sub(found.len() as u32);
        let got = self.kv.admit(at, ask, &mut self.seqs[slot].table);
        let left = i64::from(after.free() + after.evictable()) - i64::from(after.reserved_total());
        if left < i64::from(rest) {
            let short_blocks = (i64::from(rest) - left) as u32;
            assert_eq!(got, Err(KvError::NoRoom { short_blocks }), "{before} were available");
            return;
        }
        let prefix = Prefix { blocks: found.len() as u32, tokens: found.len() as u32 * BLOCK_TOKENS };
        let idle = found.last().map_or(0, |b| match (self.naive.state(*b), self.naive.blocks[b].key) {
            (Some(State::Active), _) | (_, None) => 0,
            (_, Some(key)) => now - self.naive.cache[&key].last_use,
        });
        assert_eq!(got, Ok(Admitted { prefix, idle: Duration(idle), reserved_blocks: rest }));
        self.naive = after;
        for block in &found {
            let key = self.naive.blocks[block].key.expect("found under a key");
            let entry = self.naive.cache.get_mut(&key).expect("its entry");
            entry.hits += 1;
            entry.hit_times.push(now);
            entry.class = entry.class.max(holder.class.get());
            entry.last_use = entry.last_use.max(now);
        }
        *self.reserved(slot) += rest;
        let seq = &mut self.seqs[slot];
        assert!(seq.table.blocks().iter().map(|b| b.index).eq(found), "the longest chain");
        (seq.path, seq.tokens, seq.holder, seq.last_batch) = (path, prefix.tokens, holder, None);
    }

    fn extend(&mut self, slot: usize, tokens: u32) {
        let (now, at, batch) = (self.now, self.at(), self.batch);
        let seq = self.seqs[slot].clone();
        let end = (seq.tokens + tokens).div_ceil(BLOCK_TOKENS);
        let row = Extend { owner: OwnerId(slot as u32), start: seq.tokens, tokens, batch: BatchId(batch) };
        let mut copies = Vec::new();
        let got = self.kv.extend(at, row, &mut self.seqs[slot].table, &mut copies);
        if end > DEPTH as u32 {
            assert_eq!(got, Err(KvError::TableFull));
            return;
        }
        let held = seq.table.len();
        let alone = |b: &naive::Block| b.refs == 1 && b.leases == 0 && b.key.is_none();
        let written: Vec<u32> = (seq.tokens / BLOCK_TOKENS..end).collect();
        let shared: Vec<u32> = written
            .iter()
            .copied()
            .filter(|i| *i < held && !alone(&self.naive.blocks[&seq.table.blocks()[*i as usize].index]))
            .collect();
        let need = shared.len() as u32 + end.saturating_sub(held);
        let growth = need.saturating_sub(*self.reserved(slot));
        let available = self.naive.available();
        if growth > available {
            assert_eq!(got, Err(KvError::NoRoom { short_blocks: growth - available }));
            assert_eq!(self.seqs[slot].table, seq.table, "all or nothing");
            return;
        }
        assert_eq!(got, Ok(()));
        self.naive.make_free(need, now);
        *self.reserved(slot) -= need.min(*self.naive.reserved.get(&(slot as u32)).unwrap_or(&0));
        assert_eq!(copies.iter().map(|c| c.index).collect::<Vec<_>>(), shared);
        for copy in &copies {
            assert_eq!(copy.from, seq.table.blocks()[copy.index as usize]);
            assert_eq!(copy.tokens, seq.tokens.saturating_sub(copy.index * BLOCK_TOKENS).min(BLOCK_TOKENS));
            self.naive.allocate(copy.to.index);
            self.naive.release(copy.from.index, batch + 1, now);
        }
        let table = &self.seqs[slot].table;
        for block in &table.blocks()[held.min(table.len()) as usize..] {
            self.naive.allocate(block.index);
        }
        for index in written {
            let block = table.blocks()[index as usize];
            let writers = self.seqs.iter().filter(|s| s.table.blocks().contains(&block)).count();
            assert!(alone(&self.naive.blocks[&block.index]) && writers == 1, "one writer");
        }
        let seq = &mut self.seqs[slot];
        (seq.tokens, seq.last_batch) = (seq.tokens + tokens, Some(batch));
    }

    fn confirm(&mut self, slot: usize) {
        let (now, at) = (self.now, self.at());
        let seq = self.seqs[slot].clone();
        let keys = keys_of(&seq.path);
        let fence = seq.last_batch;
        let ask = Confirm {
            keys: Keys::prompt(&keys),
            upto: seq.tokens / BLOCK_TOKENS,
            holder: seq.holder,
            fence: fence.map(BatchId),
        };
        let mut patches = Vec::new();
        let got = self.kv.confirm(at, &mut self.seqs[slot].table, ask, &mut patches);
        let mut expected = (0, Vec::new());
        for index in seq.table.confirmed_blocks()..ask.upto.min(seq.table.len()) {
            let index = index as usize;
            let (own, name) = (seq.table.blocks()[index], key(&seq.path[..=index]));
            let parent = (index > 0).then(|| key(&seq.path[..index]));
            let parent_block = (index > 0).then(|| match expected.1.iter().find(|(i, _)| *i + 1 == index as u32) {
                Some((_, block)) => *block,
                None => seq.table.blocks()[index - 1].index,
            });
            if let Some(parent) = parent
                && self.naive.cache.get(&parent).filter(|e| e.expires > now).map(|e| e.block) != parent_block
            {
                break;
            }
            if seq.holder.expires.0 <= now {
                break;
            }
            if self.naive.cache.get(&name).is_some_and(|e| e.expires <= now) {
                self.naive.remove_below(&name, RemoveCause::Expired, now);
            }
            match self.naive.cache.get(&name).map(|e| e.block) {
                None => {
                    if self.naive.blocks[&own.index].key.is_some() {
                        break;
                    }
                    let entry = Entry {
                        block: own.index,
                        parent,
                        depth: 1,
                        tenant: seq.holder.tenant.0,
                        class: seq.holder.class.get(),
                        retention: seq.holder.retention,
                        trust: seq.holder.trust.0,
                        last_use: now,
                        since: now,
                        expires: seq.holder.expires.0,
                        hits: 0,
                        hit_times: Vec::new(),
                        ghost: false,
                        answer: None,
                        serial: 0,
                    };
                    self.naive.store(name, entry, now);
                    expected.0 += 1;
                }
                Some(block) if block == own.index => expected.0 += 1,
                Some(block) => {
                    if self.naive.is_evictable(&name) && self.naive.available() == 0 {
                        break;
                    }
                    self.naive.acquire(block);
                    let entry = self.naive.cache.get_mut(&name).expect("stored");
                    entry.last_use = entry.last_use.max(now);
                    self.naive.release(own.index, fence.map_or(0, |f| f + 1), now);
                    expected.1.push((index as u32, block));
                }
            }
        }
        let adopted: Vec<(u32, u32)> = patches.iter().map(|p: &Adopted| (p.index, p.block.index)).collect();
        assert_eq!((got.stored, adopted), expected);
        assert_eq!(got.adopted as usize, patches.len());
    }

    fn apply(&mut self, op: &Op) {
        let (now, at) = (self.now, self.at());
        match op.clone() {
            Op::Admit { slot, path, tail, spare, tenant, class, ttl_ms } => {
                let input = path.len() as u32 * BLOCK_TOKENS + tail;
                let total = input.div_ceil(BLOCK_TOKENS) + spare;
                let holder = Holder {
                    tenant: TenantId(tenant),
                    trust: TrustGroup(u64::from(path[0])),
                    class: ClassRank::clamped(class),
                    retention: 50,
                    quota_blocks: self.naive.quotas.get(&tenant).copied().unwrap_or(u64::MAX),
                    expires: ttl_ms.map_or(Instant::NEVER, |ms| Instant(now + ms * 1_000_000)),
                    no_store: false,
                };
                self.admit(slot, &path, input, total, holder, (tail % 2) as u8);
            }
            Op::Extend { slot, tokens } => self.extend(slot, tokens),
            Op::Confirm { slot } => self.confirm(slot),
            Op::Fork { from, to, salt } => {
                let parent = self.seqs[from].clone();
                if from == to || parent.table.is_empty() || !self.seqs[to].table.is_empty() {
                    return;
                }
                let blocks = parent.tokens.div_ceil(BLOCK_TOKENS);
                let child = &mut self.seqs[to];
                assert_eq!(self.kv.fork(&parent.table, &mut child.table, blocks), Ok(()));
                child.path = full_path(&parent.path[..(parent.tokens / BLOCK_TOKENS) as usize], salt);
                child.path[0] = parent.path[0];
                (child.tokens, child.holder, child.last_batch) = (parent.tokens, parent.holder, parent.last_batch);
                for block in child.table.blocks() {
                    self.naive.blocks.get_mut(&block.index).expect("live").refs += 1;
                }
            }
            Op::Release { slot, keep } => {
                let fence = self.seqs[slot].last_batch;
                let old = self.seqs[slot].table.blocks().to_vec();
                let released = self.kv.truncate(at, &mut self.seqs[slot].table, keep, fence.map(BatchId));
                for block in old.iter().skip(keep as usize).rev() {
                    self.naive.release(block.index, fence.map_or(0, |f| f + 1), now);
                }
                let sum = released.freed + released.cached + released.deferred + released.shared;
                assert_eq!((sum as usize, released.stale), (old.len().saturating_sub(keep as usize), 0));
                let seq = &mut self.seqs[slot];
                seq.tokens = seq.tokens.min(seq.table.len() * BLOCK_TOKENS);
                if keep == 0 {
                    let left = core::mem::take(self.reserved(slot));
                    assert_eq!(self.kv.unreserve(OwnerId(slot as u32), u32::MAX), left);
                }
            }
            Op::Rewind { slot, tokens } => {
                let seq = &mut self.seqs[slot];
                seq.tokens = seq.tokens.saturating_sub(tokens);
            }
            Op::Forget { slot, from } => {
                let seq = &mut self.seqs[slot];
                let stored = seq.table.blocks()[..seq.table.confirmed_blocks() as usize].to_vec();
                let gone = self.kv.forget(at, &mut seq.table, from);
                let before = self.naive.cache.len();
                let from = from.max(seq.table.cached_blocks());
                for block in stored.iter().skip(from as usize).rev() {
                    let b = &self.naive.blocks[&block.index];
                    let Some(key) = b.key.filter(|_| b.refs == 1) else { break };
                    self.naive.remove_below(&key, RemoveCause::Forgotten, now);
                }
                assert_eq!(gone as usize, before - self.naive.cache.len());
            }
            Op::Submit => self.batch += u64::from(self.batch < self.oldest + 3),
            Op::Retire if self.oldest < self.batch => {
                let settled = self.naive.retire(self.oldest, now);
                assert_eq!(self.kv.retire(at, BatchId(self.oldest)), settled);
                self.oldest += 1;
            }
            Op::Retire => {
                assert_eq!(self.oldest.checked_sub(1).map(|b| self.kv.retire(at, BatchId(b))).unwrap_or(0), 0)
            }
            Op::Evict { want } => assert_eq!(self.kv.evict(at, want), self.naive.evict(want, now)),
            Op::Price { nth, price } => {
                let Some(name) = self.naive.leaves().get(nth).copied() else { return };
                let mut rows = Vec::new();
                self.kv.cheapest(at, nth + 1, &mut rows);
                assert_eq!(self.kv.set_price(rows[nth].block, price), Ok(true));
                self.naive.cache.get_mut(&name).expect("a leaf").answer = Some(price);
            }
            Op::TakeUnpriced { most } => {
                let waiting = self.kv.unpriced_blocks() as usize;
                let mut rows = Vec::new();
                self.kv.take_unpriced(at, most, &mut rows);
                assert_eq!(rows.len(), most.min(waiting));
                for row in rows {
                    let leaf = self.naive.blocks[&row.block.index].key.expect("stored");
                    assert!(self.naive.leaves().contains(&leaf) && self.naive.cache[&leaf].answer.is_none());
                }
            }
            Op::Advance { ms } => self.now += ms * 1_000_000,
            Op::Expire { most } => assert_eq!(self.kv.expire(at, most), self.naive.expire(most, now)),
            Op::Flush { group } => {
                let before = self.naive.cache.len();
                for block in 0..BLOCKS {
                    let found = self.naive.cache.iter().find(|(_, e)| e.block == block && e.trust == group);
                    if let Some(key) = found.map(|(k, _)| *k) {
                        self.naive.remove_below(&key, RemoveCause::Flushed, now);
                    }
                }
                let gone = self.kv.flush(at, Flush::Trust(TrustGroup(group)));
                assert_eq!(gone as usize, before - self.naive.cache.len());
            }
            Op::Lease { slot, index } => {
                if let Some(block) = self.seqs[slot].table.get(index) {
                    assert_eq!(self.kv.lease(block), Ok(()));
                    self.naive.blocks.get_mut(&block.index).expect("live").leases += 1;
                    self.leases.push(block);
                }
            }
            Op::Unlease => {
                if let Some(block) = self.leases.pop() {
                    assert!(self.kv.unlease(at, block).is_ok());
                    self.naive.unlease(block.index, now);
                }
            }
            Op::Reserve { slot, blocks } => {
                let available = self.naive.available();
                let got = self.kv.reserve(OwnerId(slot as u32), blocks);
                if blocks > available {
                    assert_eq!(got, Err(KvError::NoRoom { short_blocks: blocks - available }));
                } else {
                    assert_eq!(got, Ok(()));
                    *self.reserved(slot) += blocks;
                }
            }
        }
    }

    fn compare(&mut self) {
        let (kv, naive, at) = (&mut self.kv, &mut self.naive, Instant(self.now));
        assert_eq!(kv.check_with_tables(self.seqs.iter().map(|s| &s.table)), Ok(()));
        let counts = kv.counts();
        assert_eq!(counts.sum(), u64::from(BLOCKS));
        let states = (counts.free, counts.active, counts.cached, counts.reclaimable, counts.leased);
        let of = |s: State| naive.count(s);
        assert_eq!(
            states,
            (naive.free(), of(State::Active), of(State::Cached), of(State::Reclaimable), of(State::Leased))
        );
        assert_eq!(kv.evictable_blocks(), naive.evictable());
        assert_eq!(kv.reservations().total(), u64::from(naive.reserved_total()));
        assert_eq!(kv.available_blocks(), naive.available());
        assert_eq!(kv.stored_blocks() as usize, naive.cache.len());
        let mut events = Vec::new();
        kv.take_events(&mut events);
        let mut removed = Vec::new();
        for event in &events {
            assert_eq!(event.sequence, self.events_seen);
            self.events_seen += 1;
            match event.change {
                KvChange::Removed { key, cause, .. } => removed.push((key.0, cause)),
                KvChange::Stored { .. } => self.stored_seen += 1,
                KvChange::Cleared => unreachable!("never asked for"),
            }
        }
        assert_eq!(removed, core::mem::take(&mut naive.removed), "what left, in which order and why");
        let mut rows = Vec::new();
        kv.cheapest(at, usize::MAX, &mut rows);
        let leaves = naive.leaves();
        assert_eq!(
            rows.iter().map(|r| naive.blocks[&r.block.index].key).collect::<Vec<_>>(),
            leaves.iter().map(|k| Some(*k)).collect::<Vec<_>>()
        );
        for (row, key) in rows.iter().zip(&leaves) {
            let e = &naive.cache[key];
            assert_eq!((row.price, row.depth_blocks, row.ghost), (Naive::price(e), e.depth, e.ghost));
            assert_eq!((row.idle.0, row.cached.0), (self.now - e.last_use, self.now - e.since));
            assert_eq!((row.hit_count, row.recent_hit_count), (e.hits, Naive::recent_hits(e, self.now)));
            assert_eq!((row.tenant.0, row.tenant_cached_blocks), (e.tenant, naive.tenant_cached(e.tenant)));
            assert_eq!((row.class.get(), row.recompute_tokens), (e.class, BLOCK_TOKENS));
            let ttl = if e.expires == u64::MAX { u64::MAX } else { e.expires.saturating_sub(self.now) };
            assert_eq!(row.ttl_left.0, ttl);
        }
        assert_eq!((kv.left_price(), kv.totals().regret_blocks), (naive.left_price, naive.regrets));
        assert_eq!(kv.totals().stored_blocks, self.stored_seen);
        for seq in &self.seqs {
            let keys = keys_of(&seq.path);
            let blocks = naive.longest(&seq.path, 45, self.now).len() as u32;
            let found = kv.lookup(at, Keys::prompt(&keys), 45);
            assert_eq!(found, Prefix { blocks, tokens: blocks * BLOCK_TOKENS });
            let alone = seq.table.blocks().iter().filter(|b| {
                let b = &naive.blocks[&b.index];
                b.refs == 1 && b.leases == 0
            });
            assert_eq!(kv.exclusive_blocks(&seq.table) as usize, alone.count());
        }
        assert_eq!(kv.pool().stale_count(), 0);
    }

    /// Everything ends: nothing is held, promised or deferred any more.
    fn drain(&mut self) {
        while let Some(block) = self.leases.pop() {
            assert!(self.kv.unlease(self.at(), block).is_ok());
            self.naive.unlease(block.index, self.now);
        }
        for slot in 0..SLOTS {
            self.apply(&Op::Release { slot, keep: 0 });
        }
        self.batch += 1;
        while self.oldest < self.batch {
            self.apply(&Op::Retire);
        }
        self.compare();
        let counts = self.kv.counts();
        assert_eq!((counts.active, counts.reclaimable, counts.in_transfer()), (0, 0, 0));
        self.apply(&Op::Evict { want: BLOCKS });
        self.compare();
        assert_eq!(self.kv.counts().free, BLOCKS);
    }
}

/// The same cases in every run; `PROPTEST_CASES` asks for more.
fn fixed_seed() -> ProptestConfig {
    ProptestConfig {
        cases: 96,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0x6b76),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(fixed_seed())]
    #[test]
    fn books_agree_with_the_slow_way_of_keeping_them(ops in prop::collection::vec(op(), 1..160)) {
        let mut world = World::new();
        let reserved_bytes = world.kv.reserved_bytes();
        for op in &ops {
            world.apply(op);
            world.compare();
        }
        world.drain();
        prop_assert_eq!(world.kv.reserved_bytes(), reserved_bytes, "nothing grew");
    }

    #[test]
    fn a_decoded_copy_takes_the_same_steps(ops in prop::collection::vec(op(), 1..120), at in 0usize..120) {
        let (first, second) = ops.split_at(at.min(ops.len()));
        let mut world = World::new();
        for op in first {
            world.apply(op);
        }
        let bytes = encoded(&world);
        let mut reader = penstock_base::codec::Reader::new(&bytes);
        let copy = Kv::decode(*world.kv.config(), &mut reader).expect("what was written");
        let tables: Vec<BlockTable> = (0..SLOTS).map(|_| BlockTable::decode(&mut reader).expect("a table")).collect();
        prop_assert_eq!(reader.finish(), Ok(()));
        let mut twin = World {
            kv: copy,
            naive: world.naive.clone(),
            seqs: world.seqs.iter().cloned().zip(tables).map(|(seq, table)| Seq { table, ..seq }).collect(),
            leases: world.leases.clone(),
            ..world
        };
        prop_assert_eq!(&encoded(&twin), &bytes);
        for op in second {
            world.apply(op);
            twin.apply(op);
            prop_assert_eq!(encoded(&twin), encoded(&world));
            world.compare();
            twin.compare();
        }
    }
}

fn encoded(world: &World) -> Vec<u8> {
    let mut out = penstock_base::codec::Writer::new();
    world.kv.encode(&mut out);
    for seq in &world.seqs {
        seq.table.encode(&mut out);
    }
    out.into_bytes()
}
