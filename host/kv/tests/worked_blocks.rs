//! States, fences, promises, copies and transfers of blocks: examples with numbers that were computed on paper.

mod desk;

use desk::*;
use penstock_base::codec::{Reader, Writer};
use penstock_base::{BatchId, BlockRef};
use penstock_kv::*;

/// 16 blocks; A holds 6 and B 5, so 5 are free and C's 7 do not fit.
fn sixteen() -> (Kv, BlockTable, BlockTable) {
    let mut kv = kv(16);
    let (mut a, mut b) = (table(), table());
    kv.append(at_ms(0), A, &mut a, 6).expect("room for A");
    kv.append(at_ms(0), B, &mut b, 5).expect("room for B");
    assert_eq!(counts(&kv), (5, 11, 0, 0));
    assert_eq!(kv.reserve(C, 7), Err(KvError::NoRoom { short_blocks: 2 }));
    (kv, a, b)
}

#[test]
fn c_fits_once_b_is_gone_and_nothing_reads_its_blocks() {
    let (mut kv, _a, mut b) = sixteen();
    assert_eq!(kv.release(at_ms(1), &mut b, None), Released { freed: 5, ..Released::default() });
    assert_eq!(counts(&kv), (10, 6, 0, 0));
    assert_eq!(kv.reserve(C, 7), Ok(()));
    assert_eq!(kv.available_blocks(), 3);
}

#[test]
fn blocks_that_a_batch_may_still_read_are_not_free() {
    let (mut kv, _a, mut b) = sixteen();
    assert_eq!(kv.release(at_ms(1), &mut b, Some(BatchId(41))), Released { deferred: 5, ..Released::default() });
    assert_eq!(counts(&kv), (5, 6, 0, 5));
    assert_eq!(kv.reserve(C, 7), Err(KvError::NoRoom { short_blocks: 2 }));
    assert_eq!(kv.retire(at_ms(2), BatchId(40)), 0, "an earlier batch is not the fence");
    assert_eq!(kv.reserve(C, 7), Err(KvError::NoRoom { short_blocks: 2 }));
    assert_eq!(kv.retire(at_ms(3), BatchId(41)), 5);
    assert_eq!(counts(&kv), (10, 6, 0, 0));
    assert_eq!(kv.reserve(C, 7), Ok(()));
    assert_eq!(kv.retire(at_ms(4), BatchId(41)), 0, "a second time changes nothing");
}

#[test]
fn a_copy_that_still_reads_holds_its_block() {
    let (mut kv, _a, mut b) = sixteen();
    let sending = b.blocks()[0];
    assert_eq!(kv.lease(sending), Ok(()));
    kv.release(at_ms(1), &mut b, None);
    assert_eq!((counts(&kv), kv.counts().leased), ((9, 6, 0, 0), 1));
    assert_eq!(kv.unlease(at_ms(2), sending), Ok(BlockState::Free));
    assert_eq!(counts(&kv), (10, 6, 0, 0));
}

#[test]
fn the_last_reader_in_flight_is_the_fence_whoever_lets_go_last() {
    let mut kv = kv(16);
    let (mut a, mut b) = (table(), table());
    kv.append(at_ms(0), A, &mut a, 1).expect("room");
    kv.fork(&a, &mut b, 1).expect("live");
    kv.release(at_ms(1), &mut b, Some(BatchId(6)));
    kv.release(at_ms(1), &mut a, Some(BatchId(5)));
    assert_eq!(kv.retire(at_ms(2), BatchId(5)), 0);
    assert_eq!(counts(&kv), (15, 0, 0, 1));
    assert_eq!(kv.retire(at_ms(2), BatchId(6)), 1);
    assert_eq!(counts(&kv), (16, 0, 0, 0));
}

#[test]
fn many_batches_in_flight_keep_their_fences_apart() {
    let mut kv = kv(64);
    for batch in 0..40 {
        let mut t = table();
        kv.append(at_ms(0), A, &mut t, 1).expect("room");
        kv.release(at_ms(0), &mut t, Some(BatchId(batch)));
    }
    for batch in 0..40 {
        assert_eq!(kv.retire(at_ms(1), BatchId(batch)), 1);
        assert_eq!(kv.check(), Ok(()));
    }
    assert_eq!(counts(&kv), (64, 0, 0, 0));
}

#[test]
fn a_shared_half_filled_block_is_copied_before_the_first_write() {
    let mut kv = kv(16);
    let (mut a, mut b, mut copies) = (table(), table(), Vec::new());
    // A prompt of 20 tokens: one full block and one with 4 tokens; a second answer shares both.
    let row = |start, tokens, batch| Extend { owner: A, start, tokens, batch: BatchId(batch) };
    kv.extend(at_ms(0), row(0, 20, 1), &mut a, &mut copies).expect("room");
    kv.fork(&a, &mut b, 2).expect("live");
    assert!(copies.is_empty());
    assert_eq!((a.confirmed_blocks(), b.confirmed_blocks()), (0, 0));
    kv.extend(at_ms(1), Extend { owner: B, ..row(20, 1, 2) }, &mut b, &mut copies).expect("room");
    let [copy] = copies[..] else { panic!("one copy: {copies:?}") };
    assert_eq!((copy.index, copy.from, copy.to, copy.tokens), (1, a.blocks()[1], b.blocks()[1], 4));
    assert_ne!(a.blocks()[1], b.blocks()[1]);
    assert_eq!(a.blocks()[0], b.blocks()[0], "the full block stays shared");
    copies.clear();
    kv.extend(at_ms(2), row(20, 1, 2), &mut a, &mut copies).expect("room");
    assert!(copies.is_empty(), "now A is alone in its block and writes in place");
    // A goes away while batch 2 reads its block for the copy.
    kv.release(at_ms(3), &mut a, Some(BatchId(1)));
    kv.retire(at_ms(3), BatchId(1));
    assert_eq!(counts(&kv), (13, 2, 0, 1), "the source waits for the batch that copies it");
    kv.retire(at_ms(4), BatchId(2));
    assert_eq!(counts(&kv), (14, 2, 0, 0));
}

#[test]
fn a_write_over_several_shared_blocks_copies_only_what_stays() {
    let mut kv = kv(16);
    let (mut a, mut b, mut copies) = (table(), table(), Vec::new());
    kv.append(at_ms(0), A, &mut a, 3).expect("room");
    kv.fork(&a, &mut b, 3).expect("live");
    let row = Extend { owner: B, start: 10, tokens: 30, batch: BatchId(1) };
    kv.extend(at_ms(0), row, &mut b, &mut copies).expect("room");
    assert_eq!(copies.iter().map(|c| (c.index, c.tokens)).collect::<Vec<_>>(), [(0, 10), (1, 0), (2, 0)]);
}

#[test]
fn content_that_can_be_found_or_is_being_sent_is_never_overwritten() {
    let mut kv = kv(16);
    let prompt = keys(1, 2);
    let (mut t, mut copies) = (table(), Vec::new());
    kv.append(at_ms(0), A, &mut t, 3).expect("room");
    kv.confirm(at_ms(0), &mut t, confirm(&prompt), &mut Vec::new());
    kv.lease(t.blocks()[2]).expect("active");
    let [_, stored, sent] = t.blocks()[..] else { panic!("three blocks") };
    // Alone in its table, the sequence computes positions 24..40 again.
    let row = Extend { owner: A, start: 24, tokens: 16, batch: BatchId(1) };
    kv.extend(at_ms(1), row, &mut t, &mut copies).expect("room");
    assert_eq!(copies.iter().map(|c| (c.index, c.from, c.tokens)).collect::<Vec<_>>(), [(1, stored, 8), (2, sent, 0)]);
    assert_eq!(t.confirmed_blocks(), 1, "the new block holds other content until it is confirmed");
    assert_eq!(
        (kv.pool().state(stored), kv.pool().state(sent)),
        (Some(BlockState::Reclaimable), Some(BlockState::Leased))
    );
    let mut adopted = Vec::new();
    assert_eq!(kv.confirm(at_ms(2), &mut t, confirm(&prompt), &mut adopted).adopted, 1);
    assert_eq!(adopted, [Adopted { index: 1, block: stored }]);
}

#[test]
fn a_block_sent_twice_is_held_until_both_are_done() {
    let mut kv = kv(4);
    let mut t = table();
    kv.append(at_ms(0), A, &mut t, 1).expect("room");
    let block = t.blocks()[0];
    for _ in 0..2 {
        kv.lease(block).expect("active");
    }
    kv.release(at_ms(1), &mut t, Some(BatchId(9)));
    assert_eq!(kv.unlease(at_ms(2), block), Ok(BlockState::Leased));
    assert_eq!(kv.unlease(at_ms(3), block), Ok(BlockState::Reclaimable), "and until the batch is");
    assert!(kv.unlease(at_ms(3), block).is_err());
    kv.retire(at_ms(4), BatchId(9));
    assert_eq!(counts(&kv), (4, 0, 0, 0));
}

#[test]
fn a_full_pool_fails_whole_and_promises_are_kept() {
    let mut kv = kv(10);
    let (mut a, mut b, mut copies) = (table(), table(), Vec::new());
    kv.reserve(A, 6).expect("room");
    assert_eq!(kv.append(at_ms(0), B, &mut b, 5), Err(KvError::NoRoom { short_blocks: 1 }));
    assert!(b.is_empty());
    kv.append(at_ms(0), B, &mut b, 4).expect("beyond promises");
    assert_eq!(kv.available_blocks(), 0);
    kv.extend(at_ms(0), Extend { owner: A, start: 0, tokens: 96, batch: BatchId(0) }, &mut a, &mut copies)
        .expect("promised");
    let more = Extend { owner: A, start: 96, tokens: 1, batch: BatchId(0) };
    assert_eq!(kv.extend(at_ms(0), more, &mut a, &mut copies), Err(KvError::NoRoom { short_blocks: 1 }));
    assert_eq!((a.len(), kv.reservations().total()), (6, 0));
    assert_eq!(kv.reserve(OwnerId(8), 0), Err(KvError::UnknownOwner(OwnerId(8))));
}

#[test]
fn a_promise_can_be_divided_among_the_sequences_of_a_request() {
    let mut kv = kv(10);
    kv.reserve(A, 7).expect("room");
    assert_eq!(kv.move_reserved(A, B, 3), Ok(3));
    assert_eq!((kv.reservations().of(A), kv.reservations().of(B), kv.available_blocks()), (4, 3, 3));
    assert_eq!(kv.unreserve(A, 1), 1);
    assert_eq!(kv.unreserve(A, u32::MAX), 3);
    assert_eq!(kv.available_blocks(), 7);
}

#[test]
fn a_stale_reference_is_turned_away_and_counted() {
    let mut kv = kv(4);
    let mut t = table();
    kv.append(at_ms(0), A, &mut t, 1).expect("room");
    let old = t.blocks()[0];
    let forgery = t.clone();
    kv.release(at_ms(0), &mut t, None);
    assert_eq!((kv.pool().state(old), kv.pool().refs(old)), (None, 0));
    kv.append(at_ms(0), A, &mut t, 1).expect("room");
    let new = t.blocks()[0];
    assert_eq!((new.index, new.generation), (old.index, old.generation + 1));
    for result in [kv.lease(old), kv.quarantine(old), kv.clear_quarantine(old)] {
        assert_eq!(result, Err(KvError::Stale(StaleRef(old))));
    }
    assert_eq!(kv.set_price(old, 1), Err(StaleRef(old)));
    let nowhere = BlockRef { index: 4, generation: 0 };
    assert_eq!(kv.lease(nowhere), Err(KvError::Stale(StaleRef(nowhere))));
    let (mut forgery, mut child) = (forgery, table());
    assert_eq!(kv.fork(&forgery, &mut child, 1), Err(KvError::Stale(StaleRef(old))));
    assert_eq!(kv.release(at_ms(0), &mut forgery, None), Released { stale: 1, ..Released::default() });
    assert_eq!((kv.pool().stale_count(), kv.pool().refs(new)), (6, 1));
    assert_eq!(kv.check_with_tables([&t]), Ok(()));
}

#[test]
fn a_transfer_keeps_the_sum_of_states() {
    let mut kv = kv(8);
    let (mut landing, mut t) = (Vec::new(), table());
    kv.reserve(A, 3).expect("room");
    kv.land(at_ms(0), A, 3, &mut landing).expect("promised");
    assert_eq!((kv.counts().landing, kv.counts().free, kv.reservations().total()), (3, 5, 0));
    assert_eq!(kv.land(at_ms(0), A, 6, &mut landing), Err(KvError::NoRoom { short_blocks: 1 }));
    kv.install(landing[0], &mut t).expect("landed");
    assert!(kv.install(landing[0], &mut t).is_err(), "an install happens once");
    kv.quarantine(landing[1]).expect("landing");
    kv.quarantine(landing[2]).expect("landing");
    assert_eq!((kv.counts().quarantined, kv.counts().in_transfer(), kv.counts().sum()), (2, 2, 8));
    assert_eq!(kv.check_with_tables([&t]), Ok(()));
    kv.clear_quarantine(landing[1]).expect("quarantined");
    assert_eq!(kv.counts().free, 6);
    assert!(kv.lease(landing[2]).is_err(), "nobody may read it");
}

#[test]
fn a_leased_child_keeps_its_parent_from_leaving() {
    let mut kv = kv(8);
    let prompt = keys(1, 3);
    let mut t = table();
    kv.append(at_ms(0), A, &mut t, 3).expect("room");
    kv.confirm(at_ms(0), &mut t, confirm(&prompt), &mut Vec::new());
    let middle = t.blocks()[1];
    kv.lease(middle).expect("active");
    kv.release(at_ms(1), &mut t, None);
    assert_eq!((kv.counts().cached, kv.counts().leased, kv.evictable_blocks()), (2, 1, 1));
    assert_eq!(kv.evict(at_ms(2), 8), 1, "only the tail can leave");
    assert_eq!(kv.unlease(at_ms(3), middle), Ok(BlockState::Cached));
    assert_eq!((kv.evictable_blocks(), kv.evict(at_ms(4), 8)), (2, 2));
}

#[test]
fn sizes_out_of_range_are_refused() {
    let sane = KvConfig::with_blocks(4);
    for config in [
        KvConfig { blocks: 0, ..sane },
        KvConfig { blocks: (1 << 24) + 1, ..sane },
        KvConfig { block_size_tokens: 0, ..sane },
        KvConfig { tenants: 0, ..sane },
        KvConfig { watermarks: Watermarks { low_ppm: 2, high_ppm: 1 }, ..sane },
    ] {
        assert_eq!(Kv::new(config).map(|_| ()), Err(KvError::Config));
    }
}

#[test]
fn bytes_that_were_tampered_with_are_refused_or_read_soundly() {
    let mut kv = kv(6);
    cache_prompt(&mut kv, at_ms(0), &keys(1, 3), Holder { expires: at_ms(50), quota_blocks: 2, ..holder() });
    kv.evict(at_ms(1), 1);
    let mut t = table();
    kv.append(at_ms(2), A, &mut t, 2).expect("room");
    kv.release(at_ms(2), &mut t, Some(BatchId(3)));
    let mut out = Writer::new();
    kv.encode(&mut out);
    let bytes = out.into_bytes();
    for len in 0..bytes.len() {
        assert!(Kv::decode(*kv.config(), &mut Reader::new(&bytes[..len])).is_err());
    }
    for at in 0..bytes.len() {
        for bit in [1, 0x80] {
            let mut bad = bytes.clone();
            bad[at] ^= bit;
            if let Ok(read) = Kv::decode(*kv.config(), &mut Reader::new(&bad)) {
                assert_eq!(read.check(), Ok(()));
            }
        }
    }
    let other = KvConfig { owners: 9, ..*kv.config() };
    assert!(Kv::decode(other, &mut Reader::new(&bytes)).is_err());
}
