//! What the worked examples start from. Each test file uses a part of it.
#![allow(dead_code)]

use penstock_base::{BlockKey, ClassRank, Duration, Instant, TenantId, TrustGroup};
use penstock_kv::*;

pub const A: OwnerId = OwnerId(0);
pub const B: OwnerId = OwnerId(1);
pub const C: OwnerId = OwnerId(2);

pub fn at_ms(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_ms(ms)
}

pub fn kv(blocks: u32) -> Kv {
    Kv::new(KvConfig { owners: 8, events: 256, ..KvConfig::with_blocks(blocks) }).expect("a sane configuration")
}

pub fn table() -> BlockTable {
    BlockTable::with_capacity(64)
}

pub fn holder() -> Holder {
    Holder {
        tenant: TenantId(7),
        trust: TrustGroup(1),
        class: ClassRank::default(),
        retention: 50,
        quota_blocks: u64::MAX,
        expires: Instant::NEVER,
        no_store: false,
    }
}

/// Keys of `n` blocks of a prompt that starts with `root`.
pub fn keys(root: u8, n: u8) -> Vec<BlockKey> {
    (1..=n)
        .map(|depth| {
            let mut key = [0; 16];
            (key[0], key[1]) = (root, depth);
            BlockKey(key)
        })
        .collect()
}

pub fn admit<'a>(owner: OwnerId, keys: &'a [BlockKey], input_tokens: u32, total_blocks: u32) -> Admit<'a> {
    Admit { owner, keys: Keys::prompt(keys), input_tokens, total_blocks, class: ClassRank::default() }
}

pub fn confirm(keys: &[BlockKey]) -> Confirm<'_> {
    Confirm { keys: Keys::prompt(keys), upto: keys.len() as u32, holder: holder(), fence: None }
}

/// Computes and stores a prompt of whole blocks, then lets go of it: its blocks are cached.
pub fn cache_prompt(kv: &mut Kv, now: Instant, keys: &[BlockKey], holder: Holder) {
    let mut t = table();
    kv.append(now, A, &mut t, keys.len() as u32).expect("room");
    kv.confirm(now, &mut t, Confirm { holder, ..confirm(keys) }, &mut Vec::new());
    kv.release(now, &mut t, None);
}

pub fn counts(kv: &Kv) -> (u32, u32, u32, u32) {
    let c = kv.counts();
    (c.free, c.active, c.cached, c.reclaimable)
}
