//! The same books kept the slow way: maps, recursion and sorting. No counters, no lists, no heaps: everything is derived when asked.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use penstock_kv::RemoveCause;

pub type Key = [u8; 16];

/// Key of a block whose path from the root is `path`: one byte a block, so that keys are readable in failures.
pub fn key(path: &[u8]) -> Key {
    let mut key = [0; 16];
    assert!(path.len() < 15);
    key[0] = path.len() as u8;
    key[1..=path.len()].copy_from_slice(path);
    key
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub refs: u32,
    pub leases: u32,
    /// 1 + last batch that may touch it.
    pub fence: u64,
    pub key: Option<Key>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Active,
    Cached,
    Reclaimable,
    Leased,
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub block: u32,
    pub parent: Option<Key>,
    pub depth: u32,
    pub tenant: u64,
    pub class: u8,
    pub retention: u8,
    pub trust: u64,
    pub last_use: u64,
    pub since: u64,
    pub expires: u64,
    pub hits: u32,
    /// Time of each hit: recent hits are counted from these.
    pub hit_times: Vec<u64>,
    pub ghost: bool,
    /// A policy's answer that still counts.
    pub answer: Option<u64>,
    /// Order of storing: of several children the latest goes first when a subtree is forgotten.
    pub serial: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Naive {
    pub total: u32,
    pub block_size: u32,
    pub blocks: BTreeMap<u32, Block>,
    pub cache: BTreeMap<Key, Entry>,
    pub reserved: BTreeMap<u32, u32>,
    pub quotas: BTreeMap<u64, u64>,
    pub retired: u64,
    pub left_price: u64,
    /// Every eviction for want of room with its time, oldest first, and whether it still counts. The last `total` are remembered.
    pub ghosts: Vec<(Key, u64, bool)>,
    pub serials: u64,
    /// What left since the last look.
    pub removed: Vec<(Key, RemoveCause)>,
    pub regrets: u64,
}

impl Naive {
    pub fn state(&self, block: u32) -> Option<State> {
        let b = self.blocks.get(&block)?;
        Some(match b {
            b if b.refs > 0 => State::Active,
            b if b.leases > 0 => State::Leased,
            b if b.fence > self.retired => State::Reclaimable,
            _ => State::Cached,
        })
    }

    pub fn count(&self, state: State) -> u32 {
        self.blocks.keys().filter(|b| self.state(**b) == Some(state)).count() as u32
    }

    pub fn free(&self) -> u32 {
        self.total - self.blocks.len() as u32
    }

    fn children(&self, key: &Key) -> impl Iterator<Item = (&Key, &Entry)> + '_ {
        let key = *key;
        self.cache.iter().filter(move |(_, e)| e.parent == Some(key))
    }

    fn is_idle(&self, e: &Entry) -> bool {
        self.state(e.block) == Some(State::Cached)
    }

    pub fn is_evictable(&self, key: &Key) -> bool {
        self.is_idle(&self.cache[key]) && self.children(key).all(|(k, _)| self.is_evictable(k))
    }

    pub fn evictable(&self) -> u32 {
        self.cache.keys().filter(|k| self.is_evictable(k)).count() as u32
    }

    pub fn reserved_total(&self) -> u32 {
        self.reserved.values().sum()
    }

    pub fn available(&self) -> u32 {
        self.free() + self.evictable() - self.reserved_total()
    }

    pub fn price(e: &Entry) -> u64 {
        e.answer.unwrap_or(e.last_use / 1_000)
    }

    /// All leaves in the order in which they would leave.
    pub fn leaves(&self) -> Vec<Key> {
        let idle = |(k, e): &(&Key, &Entry)| self.is_idle(e) && self.children(k).next().is_none();
        let mut leaves: Vec<_> = self.cache.iter().filter(idle).collect();
        let hash = |k: &Key| u64::from_le_bytes(k[..8].try_into().expect("eight bytes"));
        leaves.sort_by_key(|(k, e)| (Self::price(e), Reverse(e.depth), e.last_use, hash(k), e.block));
        leaves.into_iter().map(|(k, _)| *k).collect()
    }

    pub fn tenant_cached(&self, tenant: u64) -> u32 {
        self.cache.values().filter(|e| e.tenant == tenant && self.is_idle(e)).count() as u32
    }

    pub fn longest(&self, path: &[u8], input_tokens: u32, now: u64) -> Vec<u32> {
        let limit = (input_tokens.saturating_sub(1) / self.block_size) as usize;
        let chain = (1..=limit.min(path.len())).map_while(|n| self.cache.get(&key(&path[..n])));
        chain.take_while(|e| e.expires > now).map(|e| e.block).collect()
    }

    /// Forgets a leaf of the tree; a block that nothing needs any more is free.
    fn remove(&mut self, key: &Key, cause: RemoveCause, now: u64) -> bool {
        assert!(self.children(key).next().is_none());
        let e = self.cache.remove(key).expect("an entry");
        let was_idle = self.state(e.block) == Some(State::Cached);
        self.blocks.get_mut(&e.block).expect("its block").key = None;
        self.sweep();
        if cause.is_eviction() {
            self.left_price = Self::price(&e);
            self.ghosts.iter_mut().filter(|(k, _, _)| k == key).for_each(|ghost| ghost.2 = false);
            self.ghosts.push((*key, now, true));
        }
        self.removed.push((*key, cause));
        let record = |e: &Entry| (e.tenant, e.class, e.retention, e.hits, e.last_use, e.expires);
        if let Some(parent) = e.parent
            && self.children(&parent).next().is_none()
            && self.is_idle(&self.cache[&parent])
        {
            let up = self.cache.get_mut(&parent).expect("the parent");
            up.answer = if record(up) == record(&e) { e.answer } else { None };
        }
        was_idle
    }

    /// Forgets everything below `key`, and it: down along the latest child, then back up.
    pub fn remove_below(&mut self, key: &Key, cause: RemoveCause, now: u64) {
        loop {
            let mut at = *key;
            while let Some((child, _)) = self.children(&at).max_by_key(|(_, e)| e.serial) {
                at = *child;
            }
            self.remove(&at, cause, now);
            if at == *key {
                return;
            }
        }
    }

    fn sweep(&mut self) {
        let retired = self.retired;
        self.blocks.retain(|_, b| b.refs > 0 || b.leases > 0 || b.fence > retired || b.key.is_some());
    }

    pub fn due(&self, now: u64) -> Option<Key> {
        let due = self.cache.iter().filter(|(_, e)| e.expires <= now);
        due.min_by_key(|(_, e)| (e.expires, Reverse(e.depth), e.block)).map(|(k, _)| *k)
    }

    fn over_quota(&self) -> Option<Key> {
        let over = |k: &&Key| {
            let tenant = self.cache[*k].tenant;
            u64::from(self.tenant_cached(tenant)) > self.quotas.get(&tenant).copied().unwrap_or(u64::MAX)
        };
        self.leaves().iter().find(over).copied()
    }

    pub fn evict(&mut self, want: u32, now: u64) -> u32 {
        let mut freed = 0;
        while freed < want {
            let (key, cause) = if let Some(due) = self.due(now) {
                (due, RemoveCause::Expired)
            } else if let Some(key) = self.over_quota() {
                (key, RemoveCause::Quota)
            } else if let Some(key) = self.leaves().first().copied() {
                (key, RemoveCause::Pressure)
            } else {
                break;
            };
            freed += u32::from(self.remove(&key, cause, now));
        }
        freed
    }

    fn enforce(&mut self, most: u32, now: u64) {
        for _ in 0..most {
            let Some(key) = self.over_quota() else { return };
            self.remove(&key, RemoveCause::Quota, now);
        }
    }

    pub fn expire(&mut self, most: u32, now: u64) -> u32 {
        let mut gone = 0;
        while gone < most {
            let Some(key) = self.due(now) else { break };
            self.remove(&key, RemoveCause::Expired, now);
            gone += 1;
        }
        gone
    }

    /// A found or adopted block is used by one more table.
    pub fn acquire(&mut self, block: u32) {
        let b = self.blocks.get_mut(&block).expect("a live block");
        b.refs += 1;
        if let Some(key) = b.key {
            self.cache.get_mut(&key).expect("its entry").answer = None;
        }
    }

    pub fn release(&mut self, block: u32, fence: u64, now: u64) {
        let b = self.blocks.get_mut(&block).expect("a live block");
        b.refs -= 1;
        b.fence = b.fence.max(fence);
        let key = b.key;
        if let Some(key) = key {
            let e = self.cache.get_mut(&key).expect("its entry");
            e.last_use = e.last_use.max(now);
        }
        self.sweep();
        if self.state(block) == Some(State::Cached) {
            self.enforce(2, now);
        }
    }

    pub fn unlease(&mut self, block: u32, now: u64) {
        let b = self.blocks.get_mut(&block).expect("a live block");
        b.leases -= 1;
        let key = b.key;
        self.sweep();
        if self.state(block) == Some(State::Cached) {
            let e = self.cache.get_mut(&key.expect("cached under a key")).expect("its entry");
            e.last_use = e.last_use.max(now);
            self.enforce(2, now);
        }
    }

    pub fn retire(&mut self, batch: u64, now: u64) -> u32 {
        let waiting = self.count(State::Reclaimable);
        self.retired = self.retired.max(batch + 1);
        let settled = waiting - self.count(State::Reclaimable);
        self.sweep();
        self.enforce(settled * 2, now);
        settled
    }

    /// A block that was free is somebody's.
    pub fn allocate(&mut self, block: u32) {
        let fresh = Block { refs: 1, leases: 0, fence: 0, key: None };
        assert_eq!(self.blocks.insert(block, fresh), None, "only free blocks are handed out");
    }

    /// Makes room as an allocation does.
    pub fn make_free(&mut self, blocks: u32, now: u64) {
        if self.free() < blocks {
            self.evict(blocks - self.free(), now);
        }
    }

    pub fn store(&mut self, key: Key, mut entry: Entry, now: u64) {
        if let Some(parent) = &entry.parent {
            entry.expires = entry.expires.min(self.cache[parent].expires);
            entry.depth = self.cache[parent].depth + 1;
        }
        let from = self.ghosts.len().saturating_sub(self.total as usize);
        if let Some(ghost) = self.ghosts[from..].iter_mut().find(|(k, _, live)| *k == key && *live) {
            ghost.2 = false;
            entry.ghost = true;
            self.regrets += u64::from(now - ghost.1 <= 60_000_000_000);
        }
        self.serials += 1;
        entry.serial = self.serials;
        self.blocks.get_mut(&entry.block).expect("its block").key = Some(key);
        assert!(self.cache.insert(key, entry).is_none());
    }

    pub fn recent_hits(e: &Entry, now: u64) -> u32 {
        let minute = |t: u64| t / 60_000_000_000;
        let mut recent = 0u32;
        let mut at = minute(e.since);
        for time in &e.hit_times {
            recent = recent.checked_shr((minute(*time) - at) as u32).unwrap_or(0) + 1;
            at = minute(*time);
        }
        recent.checked_shr((minute(now) - at) as u32).unwrap_or(0)
    }
}
