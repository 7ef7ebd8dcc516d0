//! The same between two processes, and between two network namespaces.

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]

mod world;

use std::process::Command;
use std::time::{Duration, Instant};

use penstock_transport::{Event, Failure, Gone, Kind, Limits, OpId, PeerId, Span, Touch, Transfer};
use world::probe::{Namespace, Probe};
use world::*;

/// The kinds that go between processes.
fn far_kinds() -> Vec<Kind> {
    kinds().into_iter().filter(|kind| *kind != Kind::Reference).collect()
}

/// What the probe's pool holds at first, by its own documentation.
fn probe_content(block_bytes: usize, blocks: u32) -> Vec<u8> {
    let block = |i: usize| (0..block_bytes).map(move |j| ((31 * i + 7 * j) % 251) as u8);
    (0..blocks as usize).flat_map(block).collect()
}

fn scattered(blocks: u32, seed: u64) -> Vec<Span> {
    let mut random = Random(seed);
    let (from, to) = (random.order(blocks), random.order(blocks));
    from.into_iter().zip(to).map(|(local, remote)| span(local, remote, 1)).collect()
}

/// Reads the probe's whole pool in random order, then writes one of our own over half of it; both must be what a plain copy gives.
fn moves_both_ways(kind: Kind, here: &mut End, probe: &Probe, block_bytes: usize, blocks: u32) {
    let peer = here.connect(probe);
    let mut there = probe_content(block_bytes, blocks);
    let mut wanted = content(&here.region);
    let reading = Transfer { peer, ..read(1, scattered(blocks, 5)) };
    apply(&reading, block_bytes, &mut wanted, &mut there);
    assert_eq!(here.run(reading), Ok(()), "{kind}");
    assert_same(&format!("{kind}: read"), &content(&here.region), &wanted);
    let mut own = fill(&here.region, &mut Random(9));
    let half = scattered(blocks, 6).into_iter().take(blocks as usize / 2).collect();
    let writing = Transfer { peer, ..write(2, half) };
    apply(&writing, block_bytes, &mut own, &mut there);
    assert_eq!(here.run(writing), Ok(()), "{kind}");
    let bytes = blocks as usize / 2 * block_bytes;
    assert_eq!(probe.says(), format!("landed 1 2 {bytes} {:08x}", crc32c::crc32c(&there)), "{kind}");
}

#[test]
fn bytes_go_both_ways_between_two_processes() {
    for kind in far_kinds() {
        let probe = Probe::new(kind, 65_536, 1_024);
        let mut here = end(kind, A, 65_536, 1_024, Limits::default());
        moves_both_ways(kind, &mut here, &probe, 65_536, 1_024);
    }
}

#[test]
fn a_receiver_killed_in_the_middle_is_noticed_and_all_settles() {
    for kind in far_kinds() {
        let mut probe = Probe::new(kind, 1 << 20, 64);
        let mut here = end(kind, A, 1 << 20, 64, Limits::default());
        let peer = here.connect(&probe);
        // It is stopped first, so that the transfer cannot have ended when it dies.
        probe.signal(libc::SIGSTOP);
        here.transport.start(Transfer { peer, ..write(1, vec![span(0, 0, 64)]) }).unwrap();
        for _ in 0..50 {
            here.turn();
        }
        assert_eq!(ended(&here.events, OpId(1)), None, "{kind}");
        probe.signal(libc::SIGKILL);
        here.until("the loss", |events| events.contains(&Event::Lost { peer, why: Gone::Closed }));
        assert_eq!(ended(&here.events, OpId(1)), Some((Err(Failure::PeerGone), true)), "{kind}");
        // Its sockets are closed one by one: only now all of them are.
        probe.child.wait().unwrap();
        here.transport.connect(&probe.descriptor.encode()).unwrap();
        let is_unreachable = |event: &Event| matches!(event, Event::Lost { why: Gone::Unreachable(_), .. });
        here.until("the refusal", |events| events.iter().any(is_unreachable));
    }
}

#[test]
fn a_stopped_receiver_costs_a_deadline_and_comes_back() {
    for kind in far_kinds() {
        let probe = Probe::new(kind, 1 << 20, 64);
        let mut here = end(kind, A, 1 << 20, 64, Limits::default());
        let peer = here.connect(&probe);
        probe.signal(libc::SIGSTOP);
        let deadline = Instant::now() + Duration::from_millis(300);
        let outcome = here.run(Transfer { peer, deadline, ..write(1, vec![span(0, 0, 64)]) });
        assert_eq!(outcome, Err(Failure::Timeout), "{kind}");
        probe.signal(libc::SIGCONT);
        here.until("the settlement", |events| is_settled(events, OpId(1)));
        assert_eq!(here.run(Transfer { peer, ..write(2, vec![span(0, 0, 2)]) }), Ok(()), "{kind}");
        assert!(probe.says().starts_with("landed 1 2 2097152 "), "{kind}: the first never landed");
    }
}

#[test]
fn a_writer_killed_in_the_middle_is_noticed_by_the_receiver() {
    // The roles of the test above: here is the receiver, and the writer is a second endpoint that simply ends.
    for kind in far_kinds() {
        let probe = Probe::new(kind, 1 << 20, 64);
        let mut here = end(kind, A, 1 << 20, 64, Limits::default());
        let peer = here.connect(&probe);
        here.transport.start(Transfer { peer, ..write(1, vec![span(0, 0, 64)]) }).unwrap();
        here.turn();
        drop(here);
        assert_eq!(probe.says(), "left 1", "{kind}");
    }
}

#[test]
fn bytes_go_both_ways_between_two_network_namespaces() {
    let Some(namespace) = Namespace::new() else { return };
    let address = format!("{}:0", namespace.address(2));
    let probe = Probe::at(namespace.command(), Kind::Tcp, &address, 65_536, 1_024);
    let mut here = end(Kind::Tcp, A, 65_536, 1_024, Limits::default());
    moves_both_ways(Kind::Tcp, &mut here, &probe, 65_536, 1_024);
}

#[cfg(feature = "nixl")]
mod namespaces_by_nixl {
    use super::*;

    #[test]
    fn bytes_go_both_ways_between_two_network_namespaces() {
        if !nixl::is_there() {
            return;
        }
        let Some(namespace) = Namespace::new() else { return };
        // Which interface is used is read from the environment when the library is loaded: hence two fresh processes.
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["namespaces_by_nixl::the_near_end", "--exact", "--ignored", "--nocapture"]);
        test.env("PENSTOCK_TEST_NAMESPACE", &namespace.name).env("PENSTOCK_TEST_ADDRESS", namespace.address(2));
        test.env("PENSTOCK_TEST_FAR_DEVICE", namespace.device("b"));
        test.env("UCX_TLS", "tcp,self").env("UCX_NET_DEVICES", namespace.device("a"));
        let output = test.output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        let faults = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("test result: ok. 1 passed"), "{told}\n{faults}");
    }

    #[test]
    #[ignore = "the test above runs it in a process of its own"]
    fn the_near_end() {
        let given = |name: &str| std::env::var(name).unwrap();
        let mut command = Namespace::command_in(&given("PENSTOCK_TEST_NAMESPACE"));
        command.env("UCX_NET_DEVICES", given("PENSTOCK_TEST_FAR_DEVICE"));
        let address = format!("{}:0", given("PENSTOCK_TEST_ADDRESS"));
        let probe = Probe::at(command, Kind::Nixl, &address, 65_536, 1_024);
        let mut here = end(Kind::Nixl, A, 65_536, 1_024, Limits::default());
        moves_both_ways(Kind::Nixl, &mut here, &probe, 65_536, 1_024);
    }
}

/// Blocks of a MiB for a transfer by NIXL that lasts long enough to be disturbed.
const MANY: u32 = 192;

/// Starts a write of all blocks and stops the receiver while a request is in flight. Its operation is number 1.
fn stopped_in_flight(deadline: Duration) -> Option<(Probe, End, PeerId)> {
    if !nixl::is_there() {
        return None;
    }
    let probe = Probe::new(Kind::Nixl, 1 << 20, MANY);
    let mut here = end(Kind::Nixl, A, 1 << 20, MANY, Limits::default());
    let peer = here.connect(&probe);
    let deadline = Instant::now() + deadline;
    here.transport.start(Transfer { peer, deadline, ..write(1, vec![span(0, 0, MANY)]) }).unwrap();
    // A turn posts one request of 16 MiB at most, of which the sockets between the two hold only a part: after ten of them one is in
    // flight, and not the last. Between them the receiver has time to give leave.
    for _ in 0..10 {
        here.turn();
        std::thread::sleep(Duration::from_millis(50));
    }
    probe.signal(libc::SIGSTOP);
    for _ in 0..50 {
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
    assert_eq!(ended(&here.events, OpId(1)), None);
    Some((probe, here, peer))
}

#[test]
fn by_nixl_a_request_that_hangs_stays_in_quarantine_until_it_is_final() {
    let Some((probe, mut here, peer)) = stopped_in_flight(Duration::from_millis(3_000)) else { return };
    here.until("the deadline", |events| ended(events, OpId(1)).is_some());
    assert_eq!(ended(&here.events, OpId(1)), Some((Err(Failure::Timeout), false)));
    assert_eq!(here.transport.cancel(OpId(1)).unwrap(), Touch::Quarantined);
    for _ in 0..50 {
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
    assert!(!is_settled(&here.events, OpId(1)), "its bytes may still move");
    probe.signal(libc::SIGCONT);
    here.until("the settlement", |events| is_settled(events, OpId(1)));
    assert_eq!(here.run(Transfer { peer, ..write(2, vec![span(0, 0, 2)]) }), Ok(()));
    assert!(probe.says().starts_with("landed 1 2 2097152 "), "the first never landed");
}

#[test]
fn by_nixl_a_receiver_killed_under_a_request_ends_it() {
    let Some((mut probe, mut here, peer)) = stopped_in_flight(PATIENCE) else { return };
    probe.signal(libc::SIGKILL);
    let start = Instant::now();
    here.until("the end", |events| ended(events, OpId(1)).is_some());
    println!("figure: nixl, a killed receiver is noticed after {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    assert_eq!(ended(&here.events, OpId(1)).unwrap().0, Err(Failure::PeerGone));
    probe.child.wait().unwrap();
    // What is in flight to nobody ends too, and another peer is served as before.
    here.until("the loss", |events| events.iter().any(|event| matches!(event, Event::Lost { .. })));
    here.transport.abandon(peer);
    here.until("the settlement", |events| is_settled(events, OpId(1)));
    drop(probe);
    here.events.clear();
    let next = Probe::new(Kind::Nixl, 1 << 20, 2);
    let peer = here.connect(&next);
    assert_eq!(here.run(Transfer { peer, ..write(2, vec![span(0, 0, 2)]) }), Ok(()));
}

#[test]
fn by_nixl_nothing_of_a_writer_that_was_killed_lands_once_it_is_said_to_have_left() {
    if !nixl::is_there() {
        return;
    }
    let mut here = end(Kind::Nixl, A, 1 << 20, MANY, Limits::default());
    let writer = Probe::writing_to(&here.transport.descriptor(), 1 << 20, MANY);
    let mut first = vec![0; 1 << 20];
    here.until_true("the first bytes", |region| {
        region.read(0, &mut first).unwrap();
        first.iter().any(|byte| *byte != 0)
    });
    writer.signal(libc::SIGKILL);
    let left = Event::Left { peer: writer.descriptor.identity };
    here.until("the farewell", |events| events.contains(&left));
    assert!(!here.events.iter().any(|event| matches!(event, Event::Landed { .. })), "it was not yet whole");
    let own = fill(&here.region, &mut Random(17));
    for _ in 0..300 {
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
    assert_same("a late write", &content(&here.region), &own);
    // Who comes next is shown the way anew.
    drop(writer);
    here.events.clear();
    let _next = Probe::writing_to(&here.transport.descriptor(), 1 << 20, MANY);
    here.until("a landing", |events| events.iter().any(|event| matches!(event, Event::Landed { .. })));
    assert_same("the next write", &content(&here.region), &probe_content(1 << 20, MANY));
}

#[test]
fn by_nixl_a_process_that_is_done_ends_well() {
    if !nixl::is_there() {
        return;
    }
    // What is unloaded at the end of a process is known to crash.
    let mut probe = Probe::new(Kind::Nixl, 1 << 20, 4);
    let mut here = end(Kind::Nixl, A, 1 << 20, 4, Limits::default());
    let peer = here.connect(&probe);
    assert_eq!(here.run(Transfer { peer, ..write(1, vec![span(0, 0, 4)]) }), Ok(()));
    drop(probe.child.stdin.take());
    assert_eq!(probe.child.wait().unwrap().code(), Some(0));
}

#[test]
fn by_nixl_a_library_that_is_not_there_is_an_error_that_says_where_it_was_looked_for() {
    // In a process that has loaded none.
    let mut probe = Command::new(env!("CARGO_BIN_EXE_transport-probe"));
    let folder = std::env::temp_dir().join("penstock-no-such-folder");
    let output = probe.args(["nixl", "127.0.0.1:0"]).env("PENSTOCK_NIXL", &folder).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "it ends by itself: {told}");
    let wanted = if cfg!(feature = "nixl") { "libnixl_capi.so" } else { "built without NIXL" };
    assert!(told.contains(wanted), "{told}");
    assert!(!cfg!(feature = "nixl") || told.contains("penstock-no-such-folder"), "{told}");
}
