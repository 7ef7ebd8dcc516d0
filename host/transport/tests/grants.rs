//! A guarded endpoint: blocks are there for whoever was granted them, for that grant, and for as long as it lasts. Every kind must keep to
//! it; two processes are in `grants_far.rs`.

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]
#![allow(clippy::single_range_in_vec_init, reason = "a grant is a list of runs, and often of one")]

mod world;

use std::time::{Duration, Instant};

use penstock_transport::{
    Event, Failure, GrantId, Kind, Limits, OpId, PeerId, Refusal, Touch, Transfer, TransportError,
};
use world::*;

const REFUSED: Result<(), Failure> = Err(Failure::Refused(Refusal::NotGranted));

/// Blocks that differ from what they held.
fn changed(pair: &Pair, before: &[u8]) -> Vec<u32> {
    let bytes = pair.b.region.block_bytes();
    let now = content(&pair.b.region);
    let differ = |block: &u32| {
        let at = *block as usize * bytes..(*block as usize + 1) * bytes;
        now[at.clone()] != before[at]
    };
    (0..pair.b.region.blocks()).filter(differ).collect()
}

#[test]
fn only_what_is_granted_is_written() {
    for kind in kinds() {
        let mut pair = Pair::guarded(kind, 64, 16);
        fill(&pair.a.region, &mut Random(3));
        let before = content(&pair.b.region);
        let mut op = 0;
        let mut try_it = |pair: &mut Pair, grant: Option<u64>, spans: &[(u32, u32)]| {
            op += 1;
            let spans = spans.iter().map(|(first, blocks)| span(*first, *first, *blocks)).collect();
            pair.run_under(grant, write(op, spans))
        };
        assert_eq!(try_it(&mut pair, None, &[(3, 1)]), REFUSED, "{kind}: without a grant");
        pair.b.transport.grant(A, GrantId(7), 0, &[2..5, 5..6, 9..10]).unwrap();
        assert_eq!(try_it(&mut pair, None, &[(3, 1)]), REFUSED, "{kind}: without naming the grant");
        assert_eq!(try_it(&mut pair, Some(8), &[(3, 1)]), REFUSED, "{kind}: under another one");
        assert_eq!(try_it(&mut pair, Some(7), &[(1, 2)]), REFUSED, "{kind}: one block too early");
        assert_eq!(try_it(&mut pair, Some(7), &[(5, 2)]), REFUSED, "{kind}: one block too late");
        assert_eq!(try_it(&mut pair, Some(7), &[(2, 1), (10, 1)]), REFUSED, "{kind}: one of two");
        assert_eq!(changed(&pair, &before), [] as [u32; 0], "{kind}: nothing of it has landed");
        assert_eq!(try_it(&mut pair, Some(7), &[(2, 4), (9, 1)]), Ok(()), "{kind}: all, across neighbours");
        assert_eq!(changed(&pair, &before), [2, 3, 4, 5, 9], "{kind}");
        assert_eq!(pair.b.transport.withdraw(A, GrantId(7)), Touch::Settled, "{kind}: nothing is under way");
        let after = content(&pair.b.region);
        fill(&pair.a.region, &mut Random(4));
        assert_eq!(try_it(&mut pair, Some(7), &[(2, 1)]), REFUSED, "{kind}: after it was taken back");
        pair.b.transport.grant(PeerId { endpoint: 3, epoch: 1 }, GrantId(9), 0, &[6..7]).unwrap();
        assert_eq!(try_it(&mut pair, Some(9), &[(6, 1)]), REFUSED, "{kind}: somebody else's");
        pair.b.transport.grant(PeerId { epoch: A.epoch - 1, ..A }, GrantId(10), 0, &[6..7]).unwrap();
        assert_eq!(try_it(&mut pair, Some(10), &[(6, 1)]), REFUSED, "{kind}: of an earlier life");
        pair.b.transport.grant(A, GrantId(11), 0, &[6..7]).unwrap();
        assert_eq!(pair.b.transport.withdraw_all(), Touch::Settled, "{kind}");
        assert_eq!(try_it(&mut pair, Some(11), &[(6, 1)]), REFUSED, "{kind}: after all were taken back");
        assert_eq!(changed(&pair, &after), [] as [u32; 0], "{kind}");
    }
}

#[test]
fn another_life_of_a_peer_has_nothing_of_the_old_one() {
    for kind in kinds() {
        let mut pair = Pair::guarded(kind, 64, 4);
        pair.b.transport.grant(A, GrantId(1), 0, &[0..4]).unwrap();
        assert_eq!(pair.run_under(Some(1), write(1, vec![span(0, 0, 1)])), Ok(()), "{kind}");
        pair.a = end(kind, PeerId { epoch: A.epoch + 1, ..A }, 64, 4, Limits::default());
        fill(&pair.a.region, &mut Random(3));
        pair.connect();
        let before = content(&pair.b.region);
        assert_eq!(pair.run_under(Some(1), write(1, vec![span(0, 0, 1)])), REFUSED, "{kind}");
        assert_eq!(content(&pair.b.region), before, "{kind}");
    }
}

#[test]
fn nobody_reads_a_guarded_memory() {
    for kind in kinds() {
        let mut pair = Pair::guarded(kind, 64, 4);
        let own = fill(&pair.a.region, &mut Random(3));
        fill(&pair.b.region, &mut Random(4));
        pair.b.transport.grant(A, GrantId(1), 0, &[0..4]).unwrap();
        assert_eq!(pair.run(read(1, vec![span(0, 0, 1)])), REFUSED, "{kind}");
        assert_eq!(pair.run_under(Some(1), read(2, vec![span(0, 0, 1)])), REFUSED, "{kind}");
        assert_eq!(content(&pair.a.region), own, "{kind}");
    }
}

#[test]
fn a_guarded_endpoint_writes_to_open_ones_as_others_do() {
    for kind in kinds() {
        let a = guarded_end(kind, A, 4_099, 16, Limits::default());
        let mut pair = Pair { a, b: end(kind, B, 4_099, 16, Limits::default()) };
        pair.connect();
        let sent = fill(&pair.a.region, &mut Random(3));
        assert_eq!(pair.run(write(1, vec![span(0, 0, 16)])), Ok(()), "{kind}");
        assert_same(&kind.to_string(), &content(&pair.b.region), &sent);
        assert_eq!(pair.run_under(Some(3), write(2, vec![span(0, 0, 16)])), Ok(()), "{kind}: no grant is needed");
    }
}

#[test]
fn a_grant_names_what_is_there_once() {
    for kind in kinds() {
        let limits = Limits { grants_max: 2, ..Limits::default() };
        let mut b = guarded_end(kind, B, 64, 16, limits).transport;
        assert!(matches!(b.grant(A, GrantId(1), 1, &[0..1]), Err(TransportError::UnknownRegion(1))), "{kind}");
        assert!(matches!(b.grant(A, GrantId(1), 0, &[15..17]), Err(TransportError::OutOfRange { .. })), "{kind}");
        assert!(matches!(b.grant(A, GrantId(1), 0, &[2..2]), Err(TransportError::Empty)), "{kind}");
        assert!(matches!(b.grant(A, GrantId(1), 0, &[]), Err(TransportError::Empty)), "{kind}");
        b.grant(A, GrantId(1), 0, &[0..1]).unwrap();
        assert!(matches!(b.grant(A, GrantId(1), 0, &[1..2]), Err(TransportError::Duplicate(_))), "{kind}");
        b.grant(B, GrantId(1), 0, &[1..2]).unwrap();
        let full = b.grant(A, GrantId(2), 0, &[1..2]);
        assert!(matches!(full, Err(TransportError::Busy { what: "grants", limit: 2 })), "{kind}");
        assert_eq!(b.withdraw(B, GrantId(1)), Touch::Settled, "{kind}");
        b.grant(A, GrantId(2), 0, &[1..2]).unwrap();
        assert_eq!(b.withdraw(A, GrantId(77)), Touch::Settled, "{kind}: one that does not stand");
        let mut open = end(kind, A, 64, 16, limits).transport;
        assert!(matches!(open.grant(B, GrantId(1), 0, &[0..1]), Err(TransportError::Unavailable(_))), "{kind}");
    }
}

#[test]
fn random_scatter_lists_under_a_grant_arrive_as_a_plain_copy_would_have_it() {
    for kind in kinds() {
        let mut random = Random(7);
        for (block_bytes, blocks) in [(1, 64), (4_099, 64), (600_001, 16)] {
            let mut pair = Pair::guarded(kind, block_bytes, blocks);
            let mut here = fill(&pair.a.region, &mut random);
            let mut there = fill(&pair.b.region, &mut random);
            for round in 0..8 {
                let (from, to) = (random.order(blocks), random.order(blocks));
                let count = 1 + random.below(blocks) as usize;
                let spans: Vec<_> =
                    from.into_iter().zip(to).take(count).map(|(local, remote)| span(local, remote, 1)).collect();
                let granted: Vec<_> = spans.iter().map(|span| span.remote..span.remote + 1).collect();
                pair.b.transport.grant(A, GrantId(round), 0, &granted).unwrap();
                let wanted = write(round, spans);
                apply(&wanted, block_bytes, &mut here, &mut there);
                assert_eq!(pair.run_under(Some(round), wanted), Ok(()), "{kind}");
                assert_same(&format!("{kind}, round {round}"), &content(&pair.b.region), &there);
                assert_eq!(pair.b.transport.withdraw(A, GrantId(round)), Touch::Settled, "{kind}");
            }
            let landed = pair.b.events.iter().filter(|event| matches!(event, Event::Landed { .. })).count();
            assert!(kind == Kind::Reference || landed == 8, "{kind}: {landed}");
        }
    }
}

/// Polls both ends for long enough that whatever is on its way would land.
fn settle_down(pair: &mut Pair) {
    for _ in 0..300 {
        pair.a.turn();
        pair.b.turn();
    }
}

/// Waits for the word that nothing lands under a grant any more, where it was not said at once.
fn certain(pair: &mut Pair, grant: u64, touch: Touch, kind: Kind) {
    let withdrawn = Event::Withdrawn { peer: A, grant: GrantId(grant) };
    if touch == Touch::Quarantined {
        assert_eq!(kind, Kind::Nixl, "everybody else is certain at once");
        assert_eq!(pair.b.transport.withdraw(A, GrantId(grant)), Touch::Quarantined, "asked again");
        let again = pair.b.transport.grant(A, GrantId(grant), 0, &[0..1]);
        assert!(matches!(again, Err(TransportError::Duplicate(_))), "{kind}: it is not over");
        pair.until(|_, b| b.contains(&withdrawn));
        assert_eq!(pair.b.transport.withdraw(A, GrantId(grant)), Touch::Settled);
    } else {
        assert!(!pair.b.events.contains(&withdrawn), "{kind}: it was said already");
    }
}

#[test]
fn a_grant_taken_back_while_a_write_is_under_way_lets_nothing_more_land() {
    for kind in kinds() {
        for turns in [0, 1, 2, 4, 7] {
            let mut pair = Pair::guarded(kind, 1 << 20, 64);
            fill(&pair.a.region, &mut Random(13));
            pair.b.transport.grant(A, GrantId(1), 0, &[0..48]).unwrap();
            pair.b.transport.grant(A, GrantId(2), 0, &[48..64]).unwrap();
            pair.a.transport.start_under(GrantId(1), write(1, vec![span(0, 0, 48)])).unwrap();
            pair.a.transport.start_under(GrantId(2), write(2, vec![span(48, 48, 16)])).unwrap();
            for _ in 0..turns {
                pair.a.turn();
                pair.b.turn();
            }
            let touch = pair.b.transport.withdraw(A, GrantId(1));
            certain(&mut pair, 1, touch, kind);
            // From here on no late byte may change these blocks: their owner writes them, and it stays.
            let own = vec![0x5a; 1 << 20];
            (0..48).for_each(|block| pair.b.region.fill(block, &own).unwrap());
            pair.until(|a, _| ended(a, OpId(1)).is_some() && ended(a, OpId(2)).is_some());
            assert_eq!(ended(&pair.a.events, OpId(1)), Some((REFUSED, true)), "{kind} after {turns}");
            assert_eq!(ended(&pair.a.events, OpId(2)), Some((Ok(()), true)), "{kind}: the other is not disturbed");
            settle_down(&mut pair);
            let now = content(&pair.b.region);
            assert!(now[..48 << 20].iter().all(|byte| *byte == 0x5a), "{kind}: a late write after {turns} turns");
            assert_same(&kind.to_string(), &now[48 << 20..], &content(&pair.a.region)[48 << 20..]);
            let first = Event::Landed { peer: A, op: OpId(1), bytes: 48 << 20 };
            assert!(!pair.b.events.contains(&first), "{kind}");
            // The number may be used again.
            pair.b.transport.grant(A, GrantId(1), 0, &[0..1]).unwrap();
            assert_eq!(pair.run_under(Some(1), write(3, vec![span(0, 0, 1)])), Ok(()), "{kind}");
        }
    }
}

#[test]
fn all_grants_taken_back_at_once_let_nothing_more_land() {
    for kind in kinds() {
        let mut pair = Pair::guarded(kind, 1 << 20, 64);
        fill(&pair.a.region, &mut Random(13));
        for grant in 0..4_u32 {
            let (first, id) = (grant * 16, u64::from(grant));
            pair.b.transport.grant(A, GrantId(id), 0, &[first..first + 16]).unwrap();
            pair.a.transport.start_under(GrantId(id), write(id, vec![span(first, first, 16)])).unwrap();
        }
        for _ in 0..3 {
            pair.a.turn();
            pair.b.turn();
        }
        pair.b.events.clear();
        if pair.b.transport.withdraw_all() == Touch::Quarantined {
            assert_eq!(kind, Kind::Nixl);
            let start = Instant::now();
            while pair.b.transport.withdraw_all() == Touch::Quarantined {
                assert!(start.elapsed() < PATIENCE);
                pair.a.turn();
                pair.b.turn();
            }
        }
        let own = fill(&pair.b.region, &mut Random(17));
        pair.until(|a, _| (0..4).all(|op| ended(a, OpId(op)).is_some()));
        settle_down(&mut pair);
        assert_same(&kind.to_string(), &content(&pair.b.region), &own);
    }
}

#[test]
fn a_write_under_a_grant_that_is_cancelled_or_late_never_lands_once_it_has_settled() {
    for kind in kinds() {
        for is_late in [false, true] {
            // Inside a process it would not be late: nobody else has to move.
            let is_late = is_late && kind != Kind::Reference;
            let mut pair = Pair::guarded(kind, 1 << 20, 64);
            fill(&pair.a.region, &mut Random(13));
            pair.b.transport.grant(A, GrantId(1), 0, &[0..64]).unwrap();
            let deadline = Instant::now() + if is_late { Duration::from_millis(60) } else { PATIENCE };
            pair.a.transport.start_under(GrantId(1), Transfer { deadline, ..write(1, vec![span(0, 0, 64)]) }).unwrap();
            for _ in 0..2 {
                pair.a.turn();
                pair.b.turn();
            }
            if is_late {
                pair.until_a(|a| ended(a, OpId(1)).is_some());
            } else {
                let touch = pair.a.transport.cancel(OpId(1)).unwrap();
                // Where the receiver copies, or the network does, only its word says that it is over.
                assert!(kind == Kind::Nixl || (touch == Touch::Settled) == (kind == Kind::Reference), "{kind}");
            }
            pair.until(|a, _| is_settled(a, OpId(1)));
            let own = fill(&pair.b.region, &mut Random(17));
            settle_down(&mut pair);
            assert_same(&kind.to_string(), &content(&pair.b.region), &own);
            assert!(!pair.b.events.iter().any(|event| matches!(event, Event::Landed { .. })), "{kind}");
            assert_eq!(pair.run_under(Some(1), write(2, vec![span(0, 0, 1)])), Ok(()), "{kind}: all still works");
        }
    }
}
