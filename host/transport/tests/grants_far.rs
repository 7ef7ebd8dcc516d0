//! Grants between two processes: what a writer does that is stopped or killed, and what it could do to memory that is not granted.

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]
#![allow(clippy::single_range_in_vec_init, reason = "a grant is a list of runs, and often of one")]

mod world;

use std::time::{Duration, Instant};

use penstock_transport::{Direction, Event, Failure, GrantId, Kind, Limits, OpId, Refusal, Touch, Transfer};
use world::probe::Probe;
use world::*;

const BLOCK: usize = 1 << 20;
const BLOCKS: u32 = 192;

fn far_kinds() -> Vec<Kind> {
    kinds().into_iter().filter(|kind| *kind != Kind::Reference).collect()
}

/// A writer in another process, and this end once the first bytes of its write have come.
fn under_way(kind: Kind) -> (End, Probe) {
    let mut here = guarded_end(kind, A, BLOCK, BLOCKS, Limits::default());
    let writer = Probe::writing_under(7, &here.transport.descriptor(), BLOCK, BLOCKS);
    here.transport.grant(writer.descriptor.identity, GrantId(7), 0, &[0..BLOCKS]).unwrap();
    let mut first = vec![0; BLOCK];
    here.until_true("the first bytes", |region| {
        region.read(0, &mut first).unwrap();
        first.iter().any(|byte| *byte != 0)
    });
    (here, writer)
}

fn has_landed(here: &End) -> bool {
    here.events.iter().any(|event| matches!(event, Event::Landed { .. }))
}

/// Its owner writes the memory, and it stays.
fn nothing_lands(kind: Kind, here: &mut End) {
    let own = fill(&here.region, &mut Random(17));
    for _ in 0..300 {
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
    assert_same(&format!("{kind}: a late write"), &content(&here.region), &own);
    assert!(!has_landed(here), "{kind}");
}

#[test]
fn a_writer_killed_while_its_grant_is_taken_back_writes_nothing_more() {
    for kind in far_kinds() {
        let (mut here, mut writer) = under_way(kind);
        let peer = writer.descriptor.identity;
        // It cannot answer, and cannot have ended.
        writer.signal(libc::SIGSTOP);
        assert!(!has_landed(&here), "{kind}");
        let touch = here.transport.withdraw(peer, GrantId(7));
        let withdrawn = Event::Withdrawn { peer, grant: GrantId(7) };
        if kind == Kind::Nixl {
            assert_eq!(touch, Touch::Quarantined, "a request may be in flight");
            for _ in 0..100 {
                here.transport.poll(Duration::from_millis(1), &mut here.events);
            }
            assert!(!here.events.contains(&withdrawn), "it has not said so, and lives");
        } else {
            assert_eq!(touch, Touch::Settled, "{kind}: this end alone decides");
        }
        writer.signal(libc::SIGKILL);
        if touch == Touch::Quarantined {
            here.until("certainty", |events| events.contains(&withdrawn));
        }
        nothing_lands(kind, &mut here);
        writer.child.wait().unwrap();
    }
}

#[test]
fn a_writer_that_is_stopped_finds_its_grant_gone_when_it_goes_on() {
    for kind in far_kinds() {
        let (mut here, writer) = under_way(kind);
        let peer = writer.descriptor.identity;
        writer.signal(libc::SIGSTOP);
        let touch = here.transport.withdraw(peer, GrantId(7));
        if touch == Touch::Settled {
            nothing_lands(kind, &mut here);
        }
        writer.signal(libc::SIGCONT);
        if touch == Touch::Quarantined {
            here.until("certainty", |events| events.contains(&Event::Withdrawn { peer, grant: GrantId(7) }));
        }
        nothing_lands(kind, &mut here);
        assert_eq!(writer.says(), "ended 1 Err(Refused(NotGranted))", "{kind}");
    }
}

#[test]
fn a_writer_that_never_answers_is_sent_away_and_that_is_certain() {
    if !nixl::is_there() {
        return;
    }
    let limits = Limits { silence_max: Duration::from_millis(400), ..Limits::default() };
    let mut here = guarded_end(Kind::Nixl, A, BLOCK, BLOCKS, limits);
    let writer = Probe::writing_under(7, &here.transport.descriptor(), BLOCK, BLOCKS);
    let peer = writer.descriptor.identity;
    here.transport.grant(peer, GrantId(7), 0, &[0..BLOCKS]).unwrap();
    let mut first = vec![0; BLOCK];
    here.until_true("the first bytes", |region| {
        region.read(0, &mut first).unwrap();
        first.iter().any(|byte| *byte != 0)
    });
    writer.signal(libc::SIGSTOP);
    assert_eq!(here.transport.withdraw(peer, GrantId(7)), Touch::Quarantined);
    here.until("certainty", |events| events.contains(&Event::Withdrawn { peer, grant: GrantId(7) }));
    let own = fill(&here.region, &mut Random(17));
    writer.signal(libc::SIGCONT);
    for _ in 0..300 {
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
    assert_same("a write by one that was sent away", &content(&here.region), &own);
}

#[test]
fn a_guarded_receiver_in_another_process_takes_what_it_granted_and_refuses_the_rest() {
    for kind in far_kinds() {
        let probe = Probe::granting(kind, (3, A), 65_536, 64);
        let mut here = end(kind, A, 65_536, 64, Limits::default());
        let peer = here.connect(&probe);
        let sent = fill(&here.region, &mut Random(9));
        let refused = Err(Failure::Refused(Refusal::NotGranted));
        assert_eq!(here.run(Transfer { peer, ..write(1, vec![span(0, 0, 64)]) }), refused, "{kind}");
        here.transport.start_under(GrantId(3), Transfer { peer, ..write(2, vec![span(0, 0, 64)]) }).unwrap();
        here.until("the end", |events| ended(events, OpId(2)).is_some());
        assert_eq!(ended(&here.events, OpId(2)), Some((Ok(()), true)), "{kind}");
        let bytes = sent.len();
        assert_eq!(probe.says(), format!("landed 1 2 {bytes} {:08x}", crc32c::crc32c(&sent)), "{kind}");
    }
}

#[test]
fn a_guarded_receiver_that_is_stopped_costs_a_deadline_and_one_that_is_killed_is_noticed() {
    for kind in far_kinds() {
        let mut probe = Probe::granting(kind, (3, A), BLOCK, 64);
        let mut here = end(kind, A, BLOCK, 64, Limits::default());
        let peer = here.connect(&probe);
        probe.signal(libc::SIGSTOP);
        let all = |op, deadline| Transfer { peer, deadline, ..write(op, vec![span(0, 0, 64)]) };
        let soon = Instant::now() + Duration::from_millis(200);
        here.transport.start_under(GrantId(3), all(1, soon)).unwrap();
        here.until("the deadline", |events| ended(events, OpId(1)).is_some());
        assert_eq!(ended(&here.events, OpId(1)).unwrap().0, Err(Failure::Timeout), "{kind}");
        here.transport.start_under(GrantId(3), all(2, Instant::now() + PATIENCE)).unwrap();
        here.turn();
        probe.signal(libc::SIGKILL);
        here.until("the end", |events| ended(events, OpId(2)).is_some());
        assert_eq!(ended(&here.events, OpId(2)), Some((Err(Failure::PeerGone), true)), "{kind}");
        here.until("the settlement", |events| is_settled(events, OpId(1)));
        probe.child.wait().unwrap();
    }
}

/// The mappings of KV memory that a process has, by their permissions.
fn mappings(process: u32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let of_kv = maps.lines().filter(|line| line.contains("memfd:penstock-kv"));
    of_kv.map(|line| line.split_whitespace().nth(1).unwrap().to_owned()).collect()
}

#[test]
fn by_memfd_a_writer_never_has_guarded_memory_and_the_receiver_can_only_read_the_writers() {
    let probe = Probe::granting(Kind::Memfd, (3, A), 65_536, 64);
    let mut here = end(Kind::Memfd, A, 65_536, 64, Limits::default());
    let peer = here.connect(&probe);
    here.transport.start_under(GrantId(3), Transfer { peer, ..write(1, vec![span(0, 0, 64)]) }).unwrap();
    here.until("the end", |events| ended(events, OpId(1)).is_some());
    let mut theirs = mappings(probe.child.id());
    theirs.sort();
    assert_eq!(theirs, ["r--s", "rw-s"], "the receiver has its own, and the writer's to read");
    drop((here, probe));
    // The other way: an endpoint that is open gives its memory away.
    let open = Probe::new(Kind::Memfd, 65_536, 64);
    let mut here = end(Kind::Memfd, A, 65_536, 64, Limits::default());
    let before = mappings(std::process::id()).len();
    let peer = here.connect(&open);
    let direction = Direction::Write;
    assert_eq!(here.run(Transfer { peer, direction, ..write(2, vec![span(0, 0, 64)]) }), Ok(()));
    assert_eq!(mappings(std::process::id()).len(), before + 1);
}
