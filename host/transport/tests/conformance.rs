//! What every kind must do, inside one process. Two processes and two network namespaces are in `processes.rs`.

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]

mod world;

use std::time::{Duration, Instant};

use penstock_transport::{
    Direction, Event, Failure, Gone, Kind, Limits, OpId, PeerId, Refusal, Region, Span, Touch, Transfer, TransportError,
};
use world::*;

/// A scatter list of random runs that never names a block twice on either side.
fn scattered(random: &mut Random, blocks: u32) -> Vec<Span> {
    let (here, there) = (random.order(blocks / 4), random.order(blocks / 4));
    let count = 1 + random.below(blocks / 4) as usize;
    // Each block number is a group of four, of which a run takes some.
    let run = |(local, remote): (u32, u32), random: &mut Random| {
        let length = 1 + random.below(4);
        let start = |group: u32, random: &mut Random| group * 4 + random.below(5 - length);
        Span { local: start(local, random), remote: start(remote, random), blocks: length }
    };
    here.into_iter().zip(there).take(count).map(|pair| run(pair, random)).collect()
}

#[test]
fn random_scatter_lists_arrive_as_a_plain_copy_would_have_it() {
    for kind in kinds() {
        let mut random = Random(7);
        // Sizes that are no power of two, and blocks larger than one chunk.
        for (block_bytes, blocks, rounds) in [(1, 64, 20), (4_099, 64, 20), (65_536, 32, 8), (600_001, 8, 4)] {
            let mut pair = Pair::new(kind, block_bytes, blocks);
            let mut here = fill(&pair.a.region, &mut random);
            let mut there = fill(&pair.b.region, &mut random);
            for round in 0..rounds {
                let direction = if random.below(2) == 0 { Direction::Write } else { Direction::Read };
                let wanted = transfer(round, direction, scattered(&mut random, blocks));
                apply(&wanted, block_bytes, &mut here, &mut there);
                assert_eq!(pair.run(wanted.clone()), Ok(()), "{kind} {wanted:?}");
                assert_same(&format!("{kind}, round {round}, here"), &content(&pair.a.region), &here);
                assert_same(&format!("{kind}, round {round}, there"), &content(&pair.b.region), &there);
            }
        }
    }
}

#[test]
fn a_pool_of_1024_blocks_of_64_kib_is_moved_in_random_order() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 65_536, 1_024);
        let mut random = Random(11);
        let mut here = fill(&pair.a.region, &mut random);
        let mut there = content(&pair.b.region);
        let (from, to) = (random.order(1_024), random.order(1_024));
        let spans = from.into_iter().zip(to).map(|(local, remote)| span(local, remote, 1)).collect();
        let wanted = write(1, spans);
        apply(&wanted, 65_536, &mut here, &mut there);
        assert_eq!(pair.run(wanted), Ok(()));
        assert_same(&kind.to_string(), &content(&pair.b.region), &there);
    }
}

#[test]
fn the_receiver_learns_of_a_write_once_it_is_whole_and_not_of_a_read() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 100_000, 16);
        let sent = fill(&pair.a.region, &mut Random(3));
        pair.a.transport.start(write(41, vec![span(0, 0, 16)])).unwrap();
        let landed = Event::Landed { peer: A, op: OpId(41), bytes: 1_600_000 };
        pair.until(|_, b| b.contains(&landed));
        // At the moment it is told, without anything being polled again.
        assert_same(&kind.to_string(), &content(&pair.b.region), &sent);
        pair.until(|a, _| ended(a, OpId(41)).is_some());
        assert_eq!(pair.run(read(42, vec![span(0, 0, 16)])), Ok(()));
        for _ in 0..100 {
            pair.a.turn();
            pair.b.turn();
        }
        let told: Vec<_> = pair.b.events.iter().filter(|event| matches!(event, Event::Landed { .. })).collect();
        assert_eq!(told, [&landed], "{kind}");
    }
}

#[test]
fn many_operations_at_once_all_arrive() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 10_007, 256);
        let mut random = Random(5);
        let mut here = fill(&pair.a.region, &mut random);
        let mut there = fill(&pair.b.region, &mut random);
        // 32 writes and 32 reads, each with its own four blocks on both sides.
        let (from, to) = (random.order(64), random.order(64));
        for (op, (local, remote)) in from.into_iter().zip(to).enumerate() {
            let direction = if op % 2 == 0 { Direction::Write } else { Direction::Read };
            let wanted = transfer(op as u64, direction, vec![span(local * 4, remote * 4, 4)]);
            apply(&wanted, 10_007, &mut here, &mut there);
            pair.a.transport.start(wanted).unwrap();
        }
        pair.until(|a, _| (0..64).all(|op| ended(a, OpId(op)).is_some()));
        for op in 0..64 {
            assert_eq!(ended(&pair.a.events, OpId(op)), Some((Ok(()), true)), "{kind} {op}");
        }
        assert_same(&format!("{kind} here"), &content(&pair.a.region), &here);
        assert_same(&format!("{kind} there"), &content(&pair.b.region), &there);
    }
}

#[test]
fn transfers_that_make_no_sense_are_refused_on_the_spot() {
    for kind in kinds() {
        let limits = Limits { spans_max: 4, bytes_max: 5 * 64, ..Limits::default() };
        let mut pair = Pair::with(kind, 64, 8, limits);
        let mut refused = |transfer: Transfer| pair.a.transport.start(transfer).unwrap_err();
        assert!(matches!(refused(write(1, vec![])), TransportError::Empty));
        assert!(matches!(refused(write(1, vec![span(0, 0, 0)])), TransportError::Empty));
        assert!(matches!(refused(write(1, vec![span(7, 0, 2)])), TransportError::OutOfRange { block: 8, blocks: 8 }));
        assert!(matches!(refused(write(1, vec![span(0, 7, 2)])), TransportError::OutOfRange { block: 8, blocks: 8 }));
        let huge = span(0, u32::MAX, u32::MAX);
        assert!(matches!(refused(read(1, vec![huge])), TransportError::OutOfRange { .. }));
        let five = (0..5).map(|block| span(block, block, 1)).collect();
        let error = refused(write(1, five));
        assert!(matches!(error, TransportError::TooLarge { what: "spans", value: 5, limit: 4 }));
        let error = refused(write(1, vec![span(0, 0, 6)]));
        assert!(matches!(error, TransportError::TooLarge { what: "bytes", value: 384, limit: 320 }));
        let twice = vec![span(0, 3, 2), span(5, 4, 1)];
        assert!(matches!(refused(write(1, twice)), TransportError::WrittenTwice(4)));
        let twice = vec![span(3, 0, 2), span(4, 5, 1)];
        assert!(matches!(refused(read(1, twice)), TransportError::WrittenTwice(4)));
        let other = Transfer { local: 1, ..write(1, vec![span(0, 0, 1)]) };
        assert!(matches!(refused(other), TransportError::UnknownRegion(1)));
        let other = Transfer { remote: 1, ..write(1, vec![span(0, 0, 1)]) };
        assert!(matches!(refused(other), TransportError::UnknownRegion(1)));
        let stranger = PeerId { endpoint: 9, epoch: 9 };
        let other = Transfer { peer: stranger, ..write(1, vec![span(0, 0, 1)]) };
        assert!(matches!(refused(other), TransportError::NotConnected(peer) if peer == stranger));
        // None of these has taken the number.
        assert_eq!(pair.run(write(1, vec![span(0, 0, 5)])), Ok(()), "{kind}");
        assert_eq!(pair.a.events.len(), 2, "{kind}: {:?}", pair.a.events);
    }
}

#[test]
fn blocks_of_another_size_are_refused() {
    for kind in kinds() {
        let a = end(kind, A, 64, 8, Limits::default());
        let b = end(kind, B, 128, 8, Limits::default());
        let mut pair = Pair { a, b };
        pair.connect();
        let error = pair.a.transport.start(write(1, vec![span(0, 0, 1)])).unwrap_err();
        assert!(matches!(error, TransportError::Layout { ours: 64, theirs: 128 }), "{kind}");
    }
}

#[test]
fn full_is_a_refusal_and_room_comes_back() {
    for kind in kinds() {
        let limits = Limits { ops_max: 3, bytes_max: 1 << 20, ..Limits::default() };
        let mut pair = Pair::with(kind, 1 << 16, 16, limits);
        // Nothing is polled, so nothing ends.
        for op in 0..3 {
            pair.a.transport.start(write(op, vec![span(op as u32, op as u32, 1)])).unwrap();
        }
        let error = pair.a.transport.start(write(3, vec![span(3, 3, 1)])).unwrap_err();
        assert!(matches!(error, TransportError::Busy { what: "operations", limit: 3 }), "{kind}");
        let error = pair.a.transport.start(write(2, vec![span(3, 3, 1)])).unwrap_err();
        assert!(matches!(error, TransportError::Duplicate(OpId(2))), "{kind}");
        pair.until(|a, _| (0..3).all(|op| ended(a, OpId(op)).is_some()));
        pair.a.transport.start(write(4, vec![span(0, 0, 16)])).unwrap();
        let error = pair.a.transport.start(write(5, vec![span(3, 3, 1)])).unwrap_err();
        assert!(matches!(error, TransportError::Busy { what: "bytes in flight", limit: 1_048_576 }), "{kind}");
        pair.until(|a, _| ended(a, OpId(4)).is_some());
        assert_eq!(pair.run(write(5, vec![span(3, 3, 1)])), Ok(()), "{kind}");
    }
}

#[test]
fn a_receiver_that_does_not_move_ends_operations_at_their_deadline() {
    // Inside a process nobody else needs to move.
    for kind in kinds().into_iter().filter(|kind| *kind != Kind::Reference) {
        // More than the sockets between the two can hold.
        let mut pair = Pair::new(kind, 1 << 20, 64);
        let before = content(&pair.b.region);
        let soon = Instant::now() + Duration::from_millis(200);
        pair.a.transport.start(Transfer { deadline: soon, ..write(1, vec![span(0, 0, 64)]) }).unwrap();
        pair.until_a(|a| ended(a, OpId(1)).is_some());
        assert!(Instant::now() >= soon, "{kind}: not before its deadline");
        let (outcome, settled) = ended(&pair.a.events, OpId(1)).unwrap();
        assert_eq!(outcome, Err(Failure::Timeout), "{kind}");
        match kind {
            // Bytes are on their way: only the receiver can say when they are gone.
            Kind::Tcp => assert!(!settled),
            _ => assert!(settled),
        }
        // Once it moves again it says so, and is not told of a landing.
        pair.until(|a, _| is_settled(a, OpId(1)));
        assert!(!pair.b.events.iter().any(|event| matches!(event, Event::Landed { .. })), "{kind}");
        if kind != Kind::Tcp {
            assert_same("nothing was written without leave", &content(&pair.b.region), &before);
        }
        assert_eq!(pair.run(write(2, vec![span(0, 0, 1)])), Ok(()), "{kind}: the connection still works");
    }
}

#[test]
fn a_write_cancelled_on_its_way_stays_in_quarantine_until_the_receiver_confirms() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 1 << 20, 64);
        fill(&pair.a.region, &mut Random(13));
        pair.a.transport.start(write(1, vec![span(0, 0, 64)])).unwrap();
        // Some of it is on its way.
        for _ in 0..3 {
            pair.a.turn();
            pair.b.turn();
        }
        let touch = pair.a.transport.cancel(OpId(1)).unwrap();
        pair.until_a(|a| ended(a, OpId(1)).is_some());
        let (outcome, settled) = ended(&pair.a.events, OpId(1)).unwrap();
        assert_eq!(outcome, Err(Failure::Cancelled), "{kind}");
        assert_eq!(settled, touch == Touch::Settled, "{kind}");
        match kind {
            Kind::Tcp => assert_eq!(touch, Touch::Quarantined, "{kind}"),
            // Whether a request is in flight at this moment is the library's doing.
            Kind::Nixl => {}
            Kind::Reference | Kind::Memfd => assert_eq!(touch, Touch::Settled, "{kind}"),
        }
        if touch == Touch::Quarantined {
            // It keeps its place, and a second cancel changes nothing.
            let again = pair.a.transport.start(write(1, vec![span(0, 0, 1)]));
            assert!(matches!(again, Err(TransportError::Duplicate(_))), "{kind}");
            assert_eq!(pair.a.transport.cancel(OpId(1)).unwrap(), Touch::Quarantined);
            pair.until(|a, _| is_settled(a, OpId(1)));
        }
        // From here on no late byte may change the receiver's memory: its owner writes it, and it stays.
        let own = fill(&pair.b.region, &mut Random(17));
        for _ in 0..200 {
            pair.a.turn();
            pair.b.turn();
        }
        assert_same(&format!("{kind}: a late write"), &content(&pair.b.region), &own);
        assert!(!pair.b.events.iter().any(|event| matches!(event, Event::Landed { .. })), "{kind}");
        assert!(matches!(pair.a.transport.cancel(OpId(1)), Err(TransportError::UnknownOperation(OpId(1)))));
    }
}

#[test]
fn a_cancelled_read_touches_nothing_here_any_more() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 1 << 20, 64);
        fill(&pair.b.region, &mut Random(13));
        pair.a.transport.start(read(1, vec![span(0, 0, 64)])).unwrap();
        for _ in 0..3 {
            pair.a.turn();
            pair.b.turn();
        }
        let touch = pair.a.transport.cancel(OpId(1)).unwrap();
        // A request that is in flight cannot be stopped.
        assert!(touch == Touch::Settled || kind == Kind::Nixl, "{kind}");
        pair.until(|a, _| is_settled(a, OpId(1)));
        let own = fill(&pair.a.region, &mut Random(17));
        for _ in 0..200 {
            pair.a.turn();
            pair.b.turn();
        }
        assert_same(&format!("{kind}: a late byte"), &content(&pair.a.region), &own);
        let settled = touch == Touch::Settled;
        assert_eq!(ended(&pair.a.events, OpId(1)), Some((Err(Failure::Cancelled), settled)), "{kind}");
        assert_eq!(pair.run(read(2, vec![span(0, 0, 1)])), Ok(()), "{kind}: the connection still works");
    }
}

#[test]
fn the_receiver_can_take_its_blocks_back_at_any_moment() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 1 << 20, 64);
        fill(&pair.a.region, &mut Random(13));
        pair.a.transport.start(write(1, vec![span(0, 0, 64)])).unwrap();
        for _ in 0..4 {
            pair.a.turn();
            pair.b.turn();
        }
        if pair.b.transport.revoke(A, OpId(1)).unwrap() == Touch::Quarantined {
            pair.until(|_, b| b.contains(&Event::Revoked { peer: A, op: OpId(1) }));
        }
        let own = fill(&pair.b.region, &mut Random(17));
        pair.until(|a, _| ended(a, OpId(1)).is_some());
        let outcome = ended(&pair.a.events, OpId(1)).unwrap();
        assert_eq!(outcome, (Err(Failure::Refused(Refusal::Revoked)), true), "{kind}");
        for _ in 0..200 {
            pair.a.turn();
            pair.b.turn();
        }
        assert_same(&format!("{kind}: a write after it was revoked"), &content(&pair.b.region), &own);
        assert!(!pair.b.events.iter().any(|event| matches!(event, Event::Landed { .. })), "{kind}");
    }
}

#[test]
fn what_was_revoked_before_it_began_never_lands() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 4_096, 4);
        fill(&pair.a.region, &mut Random(13));
        assert_eq!(pair.b.transport.revoke(A, OpId(5)).unwrap(), Touch::Settled, "{kind}");
        let own = content(&pair.b.region);
        let outcome = pair.run(write(5, vec![span(0, 0, 4)]));
        assert_eq!(outcome, Err(Failure::Refused(Refusal::Revoked)), "{kind}");
        assert_same(&kind.to_string(), &content(&pair.b.region), &own);
        assert_eq!(pair.run(write(6, vec![span(0, 0, 4)])), Ok(()), "{kind}: others are not meant");
    }
}

#[test]
fn a_peer_that_goes_ends_what_runs_with_it() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 1 << 20, 64);
        pair.a.transport.start(write(1, vec![span(0, 0, 32)])).unwrap();
        pair.a.transport.start(read(2, vec![span(32, 32, 32)])).unwrap();
        for _ in 0..3 {
            pair.a.turn();
            pair.b.turn();
        }
        let region = pair.b.region.clone();
        let Pair { a, b } = pair;
        drop(b);
        let mut pair = Pair { a, b: end_over(kind, PeerId { endpoint: 3, epoch: 1 }, region, Limits::default()) };
        pair.until_a(|a| a.contains(&Event::Lost { peer: B, why: Gone::Closed }));
        for op in [1, 2] {
            let (outcome, settled) = ended(&pair.a.events, OpId(op)).unwrap();
            assert_eq!(outcome, Err(Failure::PeerGone), "{kind} {op}");
            // A read in flight may write here until the library has seen that nobody answers.
            assert!(settled || (kind, op) == (Kind::Nixl, 2), "{kind} {op}");
            pair.until_a(|a| is_settled(a, OpId(op)));
        }
        let error = pair.a.transport.start(write(3, vec![span(0, 0, 1)])).unwrap_err();
        assert!(matches!(error, TransportError::NotConnected(B)), "{kind}");
    }
}

#[test]
fn the_receiver_is_told_when_a_writer_leaves() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 1 << 20, 64);
        pair.a.transport.start(write(1, vec![span(0, 0, 64)])).unwrap();
        for _ in 0..4 {
            pair.a.turn();
            pair.b.turn();
        }
        pair.a.transport.disconnect(B);
        pair.until(|a, b| {
            a.contains(&Event::Lost { peer: B, why: Gone::Disconnected }) && b.contains(&Event::Left { peer: A })
        });
        let own = fill(&pair.b.region, &mut Random(17));
        // The connection is made anew: with that the old one is over on both sides.
        pair.a.events.clear();
        pair.connect();
        if kind == Kind::Tcp {
            assert!(is_settled(&pair.a.events, OpId(1)));
        }
        for _ in 0..100 {
            pair.a.turn();
            pair.b.turn();
        }
        assert_same(&kind.to_string(), &content(&pair.b.region), &own);
        assert_eq!(pair.run(write(2, vec![span(0, 0, 1)])), Ok(()), "{kind}");
    }
}

#[test]
fn a_peer_that_never_comes_back_can_be_abandoned() {
    let limits = Limits { ops_max: 1, ..Limits::default() };
    let mut pair = Pair::with(Kind::Tcp, 1 << 20, 32, limits);
    pair.a.transport.start(write(1, vec![span(0, 0, 32)])).unwrap();
    pair.a.turn();
    pair.a.transport.disconnect(B);
    pair.until_a(|a| ended(a, OpId(1)).is_some());
    assert_eq!(ended(&pair.a.events, OpId(1)), Some((Err(Failure::PeerGone), false)));
    pair.connect_failing_then_abandon();
    assert!(is_settled(&pair.a.events, OpId(1)));
}

impl Pair {
    fn connect_failing_then_abandon(&mut self) {
        assert!(!is_settled(&self.a.events, OpId(1)));
        self.a.transport.abandon(B);
        self.until_a(|a| is_settled(a, OpId(1)));
    }
}

#[test]
fn another_epoch_at_the_same_address_is_not_the_peer() {
    // The port of a closed listener can be bound again at once; a path too.
    let first = end(Kind::Tcp, B, 64, 4, Limits::default());
    let old = first.transport.descriptor();
    drop(first);
    let penstock_transport::Address::Tcp(address) = old.address else { panic!("it is TCP") };
    let region = Region::private(64, 4).unwrap();
    let reborn = PeerId { epoch: 21, ..B };
    let b = penstock_transport::Tcp::bind(setup(reborn, &region, Limits::default()), address, None).unwrap();
    let b = End { transport: Box::new(b), region, events: Vec::new() };
    let mut pair = Pair { a: end(Kind::Tcp, A, 64, 4, Limits::default()), b };
    pair.a.transport.connect(&old.encode()).unwrap();
    pair.until(|a, _| a.contains(&Event::Lost { peer: B, why: Gone::Epoch }));
    pair.connect();
}

#[test]
fn a_descriptor_with_another_token_opens_nothing() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, 64, 4);
        let mut forged = pair.b.transport.descriptor();
        forged.token[3] ^= 1;
        let mut stranger = end(kind, PeerId { endpoint: 7, epoch: 7 }, 64, 4, Limits::default());
        std::mem::swap(&mut pair.a, &mut stranger);
        pair.a.transport.connect(&forged.encode()).unwrap();
        pair.until(|a, _| a.contains(&Event::Lost { peer: B, why: Gone::Denied }));
    }
}

#[test]
fn descriptors_of_another_kind_or_version_are_refused() {
    for kind in kinds() {
        let mut here = end(kind, A, 64, 4, Limits::default());
        for other in kinds().into_iter().filter(|other| *other != kind) {
            let there = end(other, B, 64, 4, Limits::default());
            let error = here.transport.connect(&there.transport.descriptor().encode()).unwrap_err();
            assert!(matches!(error, TransportError::Descriptor(_)), "{kind} {other}");
        }
        let mut bytes = end(kind, B, 64, 4, Limits::default()).transport.descriptor().encode();
        bytes[4] = 99;
        let error = here.transport.connect(&bytes).unwrap_err();
        assert!(matches!(error, TransportError::Version { ours: 2, theirs: 99 }), "{kind}");
        assert!(matches!(here.transport.connect(b"nonsense"), Err(TransportError::Descriptor(_))), "{kind}");
    }
}

#[test]
fn peers_past_the_limit_are_turned_away_by_both_ends() {
    for kind in kinds().into_iter().filter(|kind| *kind != Kind::Reference) {
        let limits = Limits { peers_max: 1, ..Limits::default() };
        let mut pair = Pair::with(kind, 64, 4, limits);
        let second = end(kind, PeerId { endpoint: 3, epoch: 1 }, 64, 4, limits);
        let error = pair.a.transport.connect(&second.transport.descriptor().encode()).unwrap_err();
        assert!(matches!(error, TransportError::Busy { what: "peers", limit: 1 }), "{kind}");
        // The other end has its one peer, too.
        let first = std::mem::replace(&mut pair.a, second);
        pair.a.transport.connect(&pair.b.transport.descriptor().encode()).unwrap();
        pair.until(|a, _| a.contains(&Event::Lost { peer: B, why: Gone::Full }));
        pair.a = first;
        assert_eq!(pair.run(write(1, vec![span(0, 0, 1)])), Ok(()), "{kind}: the first is not disturbed");
    }
}

#[test]
fn memory_that_cannot_be_shared_is_refused_for_memfd() {
    let region = Region::private(64, 4).unwrap();
    let path = std::env::temp_dir().join("penstock-never-bound.sock");
    let error = penstock_transport::Memfd::bind(setup(A, &region, Limits::default()), &path);
    assert!(matches!(error, Err(TransportError::Unavailable(_))));
}
