//! What is found again, what leaves and what is told: examples with numbers that were computed on paper.

mod desk;

use desk::*;
use penstock_base::{BatchId, Duration, TenantId, TrustGroup};
use penstock_kv::*;

#[test]
fn a_hit_is_whole_blocks_and_leaves_a_token_to_compute() {
    let mut kv = kv(16);
    let prompt = keys(1, 4);
    cache_prompt(&mut kv, at_ms(0), &prompt, holder());
    let found = |tokens| kv.lookup(at_ms(1), Keys::prompt(&prompt), tokens);
    assert_eq!(found(64), Prefix { blocks: 3, tokens: 48 }, "64 tokens in 4 blocks: the last one is computed");
    assert_eq!(found(65), Prefix { blocks: 4, tokens: 64 });
    assert_eq!(found(16), Prefix { blocks: 0, tokens: 0 });
    assert_eq!(found(1), Prefix::default());
    assert_eq!(kv.lookup(at_ms(1), Keys::prompt(&prompt[1..]), 65), Prefix::default(), "a chain starts at its root");
    let other = keys(2, 4);
    assert_eq!(kv.lookup(at_ms(1), Keys::prompt(&other), 65), Prefix::default());
}

#[test]
fn admission_counts_found_blocks_that_could_have_left() {
    let mut kv = kv(8);
    let prompt = keys(1, 4);
    cache_prompt(&mut kv, at_ms(0), &prompt, holder());
    assert_eq!((counts(&kv), kv.available_blocks()), ((4, 0, 4, 0), 8));
    let mut t = table();
    assert_eq!(kv.admit(at_ms(1), admit(A, &prompt, 80, 9), &mut t), Err(KvError::NoRoom { short_blocks: 1 }));
    assert!(t.is_empty() && kv.counts().cached == 4, "nothing changed");
    let admitted = kv.admit(at_ms(1), admit(A, &prompt, 80, 8), &mut t).expect("4 found and 4 free");
    let idle = Duration::from_ms(1);
    assert_eq!(admitted, Admitted { prefix: Prefix { blocks: 4, tokens: 64 }, idle, reserved_blocks: 4 });
    assert_eq!((counts(&kv), kv.available_blocks()), ((4, 4, 0, 0), 0));
    assert_eq!(kv.evict(at_ms(1), 1), 0, "blocks in use never leave");
}

#[test]
fn what_was_released_behind_a_fence_can_be_found_at_once() {
    let mut kv = kv(8);
    let prompt = keys(1, 2);
    let (mut a, mut b) = (table(), table());
    kv.append(at_ms(0), A, &mut a, 2).expect("room");
    kv.confirm(at_ms(0), &mut a, confirm(&prompt), &mut Vec::new());
    let first = a.blocks().to_vec();
    kv.release(at_ms(1), &mut a, Some(BatchId(3)));
    assert_eq!(counts(&kv), (6, 0, 0, 2));
    kv.admit(at_ms(2), admit(B, &prompt, 33, 3), &mut b).expect("room");
    assert_eq!((b.blocks(), counts(&kv)), (&first[..], (6, 2, 0, 0)));
    kv.release(at_ms(3), &mut b, None);
    assert_eq!(counts(&kv), (6, 0, 0, 2), "the first reader's batch is still in flight");
    kv.retire(at_ms(4), BatchId(3));
    assert_eq!(counts(&kv), (6, 0, 2, 0));
}

#[test]
fn the_second_of_two_equal_prompts_adopts_the_blocks_of_the_first() {
    let mut kv = kv(16);
    let prompt = keys(1, 3);
    let (mut a, mut b, mut adopted) = (table(), table(), Vec::new());
    kv.append(at_ms(0), A, &mut a, 3).expect("room");
    kv.append(at_ms(0), B, &mut b, 3).expect("room");
    assert_eq!(kv.confirm(at_ms(1), &mut a, confirm(&prompt[..2]), &mut adopted).stored, 2);
    let fence = Some(BatchId(5));
    let done = kv.confirm(at_ms(1), &mut b, Confirm { fence, ..confirm(&prompt) }, &mut adopted);
    assert_eq!(done, Confirmed { stored: 1, adopted: 2, left: 0 });
    let mut sibling = table();
    kv.fork(&b, &mut sibling, 2).expect("live");
    assert_eq!((sibling.confirmed_blocks(), sibling.cached_blocks()), (2, 0));
    kv.release(at_ms(1), &mut sibling, None);
    assert_eq!(
        adopted.iter().map(|p| (p.index, p.block)).collect::<Vec<_>>(),
        [(0, a.blocks()[0]), (1, a.blocks()[1])]
    );
    assert_eq!(counts(&kv), (10, 4, 0, 2), "b's copies wait for its batch");
    kv.retire(at_ms(2), BatchId(5));
    assert_eq!((counts(&kv), kv.totals().duplicate_blocks), ((12, 4, 0, 0), 2));
    assert_eq!(kv.check_with_tables([&a, &b]), Ok(()));
}

#[test]
fn nothing_is_stored_for_those_who_asked_so_and_what_was_can_be_taken_back() {
    let mut kv = kv(16);
    let prompt = keys(1, 4);
    let mut t = table();
    kv.append(at_ms(0), A, &mut t, 4).expect("room");
    let refused = Confirm { holder: Holder { no_store: true, ..holder() }, ..confirm(&prompt) };
    assert_eq!(kv.confirm(at_ms(0), &mut t, refused, &mut Vec::new()), Confirmed { left: 4, ..Confirmed::default() });
    assert_eq!(kv.confirm(at_ms(0), &mut t, confirm(&prompt), &mut Vec::new()).stored, 4);
    assert_eq!(kv.forget(at_ms(1), &mut t, 2), 2, "the answer of a cancelled request");
    assert_eq!(kv.lookup(at_ms(1), Keys::prompt(&prompt), 65).blocks, 2);
    assert_eq!(kv.release(at_ms(2), &mut t, None), Released { freed: 2, cached: 2, ..Released::default() });
}

#[test]
fn leaves_go_first_by_price_and_deeper_before_shallower() {
    let mut kv = kv(16);
    let (old, new) = (keys(1, 3), keys(2, 2));
    cache_prompt(&mut kv, at_ms(10), &old, holder());
    cache_prompt(&mut kv, at_ms(20), &new, holder());
    let mut rows = Vec::new();
    kv.take_unpriced(at_ms(30), 64, &mut rows);
    assert_eq!(
        rows.iter().map(|r| (r.run_hash, r.depth_blocks, r.price)).collect::<Vec<_>>(),
        [(old[2].short(), 3, 10_000), (new[1].short(), 2, 20_000)]
    );
    assert_eq!(kv.unpriced_blocks(), 0);
    // The policy likes the old prompt better: its price holds for the whole chain, which has one record.
    assert_eq!(kv.set_price(rows[0].block, 1 << 40), Ok(true));
    assert_eq!(kv.evict(at_ms(31), 3), 3);
    assert_eq!(kv.left_price(), 1 << 40);
    rows.clear();
    kv.cheapest(at_ms(31), 64, &mut rows);
    assert_eq!(rows.iter().map(|r| (r.run_hash, r.price)).collect::<Vec<_>>(), [(old[1].short(), 1 << 40)]);
    let mut events = Vec::new();
    kv.take_events(&mut events);
    let gone = events.iter().filter_map(|e| match e.change {
        KvChange::Removed { key, cause, .. } => Some((key, cause)),
        _ => None,
    });
    let expected = [new[1], new[0], old[2]].map(|key| (key, RemoveCause::Pressure));
    assert_eq!(gone.collect::<Vec<_>>(), expected);
    assert!(events.iter().map(|e| e.sequence).eq(0..8), "five stored, three removed, no gap");
}

#[test]
fn a_price_that_comes_too_late_is_passed_over() {
    let mut kv = kv(16);
    let prompt = keys(1, 2);
    cache_prompt(&mut kv, at_ms(0), &prompt, holder());
    let (mut rows, mut t) = (Vec::new(), table());
    kv.take_unpriced(at_ms(1), 64, &mut rows);
    kv.admit(at_ms(1), admit(A, &prompt, 33, 3), &mut t).expect("room");
    assert_eq!(kv.set_price(rows[0].block, 5), Ok(false));
    kv.release(at_ms(2), &mut t, None);
    assert_eq!(kv.unpriced_blocks(), 1, "used again, so asked about again");
    rows.clear();
    kv.take_unpriced(at_ms(62_000), 64, &mut rows);
    let [row] = rows[..] else { panic!("one leaf: {rows:?}") };
    assert_eq!(
        (row.hit_count, row.recent_hit_count, row.price),
        (1, 0, 2_000),
        "a hit halves to nothing after a minute"
    );
    assert_eq!((row.idle, row.cached), (Duration::from_ms(61_998), Duration::from_ms(62_000)));
}

#[test]
fn a_tenant_over_its_hard_quota_gives_way_from_the_tail() {
    let mut kv = kv(16);
    let bound = Holder { quota_blocks: 2, tenant: TenantId(9), ..holder() };
    let (mine, theirs) = (keys(1, 5), keys(2, 3));
    cache_prompt(&mut kv, at_ms(0), &theirs, holder());
    cache_prompt(&mut kv, at_ms(1), &mine, bound);
    assert_eq!((kv.tenant_cached_blocks(TenantId(9)), kv.tenant_cached_blocks(TenantId(7))), (2, 3));
    assert_eq!(kv.lookup(at_ms(2), Keys::prompt(&mine), 81).blocks, 2, "the beginning is kept");
    assert_eq!(kv.totals().removed_blocks, [0, 3, 0, 0, 0]);
    // A quota that was lowered is met in steps, whenever blocks of anybody become unreferenced.
    let more = keys(3, 1);
    cache_prompt(&mut kv, at_ms(3), &more, Holder { quota_blocks: 1, ..bound });
    assert_eq!(kv.tenant_cached_blocks(TenantId(9)), 1);
    assert_eq!(kv.lookup(at_ms(4), Keys::prompt(&theirs), 49).blocks, 3);
}

#[test]
fn a_tenant_over_a_lowered_quota_gives_way_before_older_content_of_others() {
    let mut kv = kv(16);
    let (theirs, mine, more) = (keys(1, 2), keys(2, 4), keys(3, 1));
    cache_prompt(&mut kv, at_ms(0), &theirs, holder());
    cache_prompt(&mut kv, at_ms(1), &mine, Holder { tenant: TenantId(9), ..holder() });
    let mut t = table();
    kv.append(at_ms(2), A, &mut t, 1).expect("room");
    let lowered = Holder { tenant: TenantId(9), quota_blocks: 1, ..holder() };
    kv.confirm(at_ms(2), &mut t, Confirm { holder: lowered, ..confirm(&more) }, &mut Vec::new());
    assert_eq!(kv.evict(at_ms(3), 4), 4);
    assert_eq!(kv.totals().removed_blocks, [1, 3, 0, 0, 0], "three over the quota, then the cheapest of all");
    assert_eq!(kv.lookup(at_ms(3), Keys::prompt(&mine), 65).blocks, 1);
    assert_eq!(kv.lookup(at_ms(3), Keys::prompt(&theirs), 33).blocks, 1);
}

#[test]
fn at_equal_prices_the_longer_unused_leaves_first_and_then_the_smaller_hash() {
    let mut kv = kv(16);
    for (root, ms) in [(4, 20), (3, 10), (2, 30), (1, 20)] {
        cache_prompt(&mut kv, at_ms(ms), &keys(root, 1), holder());
    }
    let mut rows = Vec::new();
    kv.take_unpriced(at_ms(40), 64, &mut rows);
    for row in &rows {
        assert_eq!(kv.set_price(row.block, 77), Ok(true));
    }
    rows.clear();
    kv.cheapest(at_ms(40), 3, &mut rows);
    assert_eq!(rows.iter().map(|r| r.run_hash & 0xff).collect::<Vec<_>>(), [3, 1, 4]);
}

#[test]
fn nothing_is_stored_behind_content_whose_time_is_up() {
    let mut kv = kv(16);
    let prompt = keys(1, 2);
    let mut t = table();
    kv.append(at_ms(0), A, &mut t, 2).expect("room");
    let until = Holder { expires: at_ms(100), ..holder() };
    kv.confirm(at_ms(0), &mut t, Confirm { holder: until, upto: 1, ..confirm(&prompt) }, &mut Vec::new());
    assert_eq!(kv.confirm(at_ms(100), &mut t, confirm(&prompt), &mut Vec::new()).left, 1);
    assert_eq!((kv.stored_blocks(), kv.totals().unstored_blocks), (1, 1));
}

#[test]
fn content_whose_time_is_up_is_not_found_and_leaves_first() {
    let mut kv = kv(16);
    let (brief, lasting) = (keys(1, 2), keys(2, 2));
    cache_prompt(&mut kv, at_ms(0), &lasting, holder());
    cache_prompt(&mut kv, at_ms(5), &brief, Holder { expires: at_ms(100), ..holder() });
    assert_eq!(kv.lookup(at_ms(99), Keys::prompt(&brief), 33).blocks, 2);
    assert_eq!(kv.lookup(at_ms(100), Keys::prompt(&brief), 33).blocks, 0);
    assert_eq!(kv.evict(at_ms(100), 1), 1, "due before the older, cheaper content");
    assert_eq!(kv.expire(at_ms(100), 64), 1);
    assert_eq!((kv.totals().removed_blocks, kv.counts().cached), ([0, 0, 2, 0, 0], 2));
    assert_eq!((kv.left_price(), kv.evicted_blocks(at_ms(100))), (0, 0), "expiry is no eviction");
    // In use: forgotten, not taken away.
    let mut t = table();
    kv.append(at_ms(200), A, &mut t, 1).expect("room");
    let until = Holder { expires: at_ms(300), ..holder() };
    kv.confirm(at_ms(200), &mut t, Confirm { holder: until, ..confirm(&brief[..1]) }, &mut Vec::new());
    assert_eq!(kv.expire(at_ms(300), 64), 1);
    assert_eq!(kv.pool().state(t.blocks()[0]), Some(BlockState::Active));
    assert_eq!(kv.release(at_ms(301), &mut t, None).freed, 1);
}

#[test]
fn a_secure_clean_up_covers_one_group_or_all() {
    let mut kv = kv(16);
    let (one, two) = (keys(1, 2), keys(2, 2));
    let mut t = table();
    kv.append(at_ms(0), A, &mut t, 2).expect("room");
    kv.confirm(at_ms(0), &mut t, confirm(&one), &mut Vec::new());
    cache_prompt(&mut kv, at_ms(0), &two, Holder { trust: TrustGroup(2), ..holder() });
    assert_eq!(kv.flush(at_ms(1), Flush::Trust(TrustGroup(1))), 2);
    assert_eq!(kv.lookup(at_ms(1), Keys::prompt(&one), 33).blocks, 0, "in use, and yet not found");
    assert_eq!(kv.lookup(at_ms(1), Keys::prompt(&two), 33).blocks, 2);
    assert_eq!(kv.release(at_ms(1), &mut t, None).freed, 2);
    assert_eq!(kv.flush(at_ms(2), Flush::All), 2);
    assert_eq!((kv.stored_blocks(), kv.counts().free), (0, 16));
    let mut events = Vec::new();
    kv.take_events(&mut events);
    assert_eq!(events.last().map(|e| e.change), Some(KvChange::Cleared));
}

#[test]
fn evicted_content_that_comes_back_is_a_ghost_and_a_regret_for_a_minute() {
    let mut kv = kv(4);
    let (one, two) = (keys(1, 1), keys(2, 1));
    cache_prompt(&mut kv, at_ms(0), &one, holder());
    cache_prompt(&mut kv, at_ms(0), &two, holder());
    assert_eq!(kv.evict(at_ms(1_000), 2), 2);
    assert_eq!((kv.evicted_blocks(at_ms(1_000)), kv.evicted_blocks(at_ms(61_000))), (2, 0));
    cache_prompt(&mut kv, at_ms(30_000), &one, holder());
    assert_eq!((kv.regret_blocks(at_ms(30_000)), kv.regret_blocks(at_ms(90_000))), (1, 0));
    cache_prompt(&mut kv, at_ms(61_001), &two, holder());
    assert_eq!(kv.totals().regret_blocks, 1, "more than a minute is no regret");
    kv.evict(at_ms(61_001), 1);
    cache_prompt(&mut kv, at_ms(121_001), &one, holder());
    assert_eq!(kv.totals().regret_blocks, 2, "a minute is");
    let mut rows = Vec::new();
    kv.cheapest(at_ms(61_001), 64, &mut rows);
    assert!(rows.iter().all(|r| r.ghost) && rows.len() == 2);
}

#[test]
fn events_that_nobody_takes_leave_a_gap_and_a_listing_closes_it() {
    let mut kv = Kv::new(KvConfig { events: 2, owners: 1, ..KvConfig::with_blocks(8) }).expect("sane");
    let prompt = keys(1, 4);
    cache_prompt(&mut kv, at_ms(0), &prompt, holder());
    let mut events = Vec::new();
    kv.take_events(&mut events);
    assert_eq!((events.len(), kv.lost_events(), kv.next_event_sequence()), (2, 2, 4));
    kv.evict(at_ms(1), 1);
    kv.take_events(&mut events);
    assert_eq!(events[2].sequence, 4, "2 and 3 are missing");
    let mut listed = Vec::new();
    kv.for_each_stored(|key, parent| listed.push((key, parent)));
    listed.sort();
    assert_eq!(listed, [(prompt[0], None), (prompt[1], Some(prompt[0])), (prompt[2], Some(prompt[1]))]);
}

/// Keys are 128 bits of SHA-256, so this cannot happen by chance or by search. Were the hash broken, equal keys behind different
/// prefixes would still not be mixed up: the chain of parents is compared as well.
#[test]
fn a_forced_collision_behind_another_prefix_is_not_served() {
    let mut kv = kv(16);
    let mine = keys(1, 3);
    cache_prompt(&mut kv, at_ms(0), &mine, holder());
    let weak = [keys(2, 1)[0], mine[1], mine[2]];
    cache_prompt(&mut kv, at_ms(1), &weak[..1], holder());
    assert_eq!(kv.lookup(at_ms(2), Keys::prompt(&weak), 49).blocks, 1, "the block that collides is not found");
    let mut t = table();
    assert_eq!(kv.admit(at_ms(2), admit(A, &weak, 49, 4), &mut t).expect("room").prefix.blocks, 1);
    kv.append(at_ms(2), A, &mut t, 2).expect("promised");
    let own = t.clone();
    let done = kv.confirm(at_ms(3), &mut t, confirm(&weak), &mut Vec::new());
    assert_eq!((done, &t), (Confirmed { left: 2, ..Confirmed::default() }, &own), "nor replaced, nor stored");
    assert_eq!(kv.totals().collisions, 1);
}

#[test]
fn an_allocation_evicts_what_it_needs_and_no_more() {
    let mut kv = kv(8);
    cache_prompt(&mut kv, at_ms(0), &keys(1, 6), holder());
    assert_eq!(kv.pressure(0), None, "2 of 8 are free");
    assert_eq!(kv.pressure(4), Some(Pressure { want_blocks: 2, urgent: true }));
    let mut t = table();
    kv.append(at_ms(1), A, &mut t, 4).expect("two free and two evicted");
    assert_eq!(counts(&kv), (0, 4, 4, 0));
    assert_eq!(kv.pressure(0), None, "a twentieth of 8 blocks is none");
}

#[test]
fn tenants_beyond_the_room_are_served_and_not_stored() {
    let mut kv = Kv::new(KvConfig { tenants: 1, owners: 1, ..KvConfig::with_blocks(8) }).expect("sane");
    cache_prompt(&mut kv, at_ms(0), &keys(1, 1), holder());
    cache_prompt(&mut kv, at_ms(0), &keys(2, 1), Holder { tenant: TenantId(8), ..holder() });
    assert_eq!((kv.stored_blocks(), kv.totals().unstored_blocks), (1, 1));
    kv.evict(at_ms(1), 1);
    cache_prompt(&mut kv, at_ms(2), &keys(2, 1), Holder { tenant: TenantId(8), ..holder() });
    assert_eq!(kv.stored_blocks(), 1, "the entry went to the next tenant");
}
