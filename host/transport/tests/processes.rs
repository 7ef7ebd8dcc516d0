//! The same between two processes, and between two network namespaces.

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]

mod world;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use penstock_transport::{Address, Descriptor, Event, Failure, Gone, Kind, Limits, OpId, PeerId, Span, Transfer};
use world::*;

const KINDS: [Kind; 2] = [Kind::Memfd, Kind::Tcp];

/// A `transport-probe` in a process of its own.
struct Probe {
    child: Child,
    lines: Receiver<String>,
    descriptor: Descriptor,
}

impl Probe {
    fn new(kind: Kind, block_bytes: usize, blocks: u32) -> Self {
        let address = match kind {
            Kind::Memfd => {
                let name = format!("penstock-probe-{}-{:?}.sock", std::process::id(), std::thread::current().id());
                std::env::temp_dir().join(name).display().to_string()
            }
            _ => "127.0.0.1:0".to_owned(),
        };
        Self::at(Command::new(env!("CARGO_BIN_EXE_transport-probe")), kind, &address, block_bytes, blocks)
    }

    fn at(mut command: Command, kind: Kind, address: &str, block_bytes: usize, blocks: u32) -> Self {
        command.args([&kind.to_string(), address, "--block-bytes", &block_bytes.to_string()]);
        command.args(["--blocks", &blocks.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let first = lines.recv_timeout(PATIENCE).expect("the probe tells its descriptor");
        let bytes: Vec<u8> =
            (0..first.len()).step_by(2).map(|at| u8::from_str_radix(&first[at..at + 2], 16).unwrap()).collect();
        Self { child, lines, descriptor: Descriptor::decode(&bytes).unwrap() }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn says(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the probe says something")
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Address::Memfd(path) = &self.descriptor.address {
            // A killed process leaves it behind.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl End {
    fn until(&mut self, what: &str, done: impl Fn(&[Event]) -> bool) {
        let start = Instant::now();
        while !done(&self.events) {
            assert!(start.elapsed() < PATIENCE, "waiting for {what}: {:?}", self.events);
            self.transport.poll(Duration::from_millis(5), &mut self.events);
        }
    }

    fn connect(&mut self, probe: &Probe) -> PeerId {
        let peer = self.transport.connect(&probe.descriptor.encode()).unwrap();
        self.until("the connection", |events| events.contains(&Event::Connected { peer }));
        peer
    }

    fn run(&mut self, transfer: Transfer) -> Result<(), Failure> {
        let op = transfer.op;
        self.transport.start(transfer).unwrap();
        self.until("an end", |events| ended(events, op).is_some());
        ended(&self.events, op).unwrap().0
    }
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
    for kind in KINDS {
        let probe = Probe::new(kind, 65_536, 1_024);
        let mut here = end(kind, A, 65_536, 1_024, Limits::default());
        moves_both_ways(kind, &mut here, &probe, 65_536, 1_024);
    }
}

#[test]
fn a_receiver_killed_in_the_middle_is_noticed_and_all_settles() {
    for kind in KINDS {
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
    for kind in KINDS {
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
    for kind in KINDS {
        let probe = Probe::new(kind, 1 << 20, 64);
        let mut here = end(kind, A, 1 << 20, 64, Limits::default());
        let peer = here.connect(&probe);
        here.transport.start(Transfer { peer, ..write(1, vec![span(0, 0, 64)]) }).unwrap();
        here.turn();
        drop(here);
        assert_eq!(probe.says(), "left 1", "{kind}");
    }
}

/// A network namespace with one end of a pair of virtual interfaces; the other end is in that of the test.
struct Namespace {
    name: String,
}

impl Namespace {
    /// None, with the reason printed, where that cannot be had.
    fn new() -> Option<Self> {
        let number = std::process::id() % 60_000;
        let name = format!("pst{number}");
        let here = format!("psa{number}");
        let there = format!("psb{number}");
        let third = number / 250;
        let (ours, theirs) = (format!("10.213.{third}.1/30"), format!("10.213.{third}.2/30"));
        if let Err(why) = ip(&["netns", "add", &name]) {
            println!("SKIPPED across network namespaces: {why}");
            return None;
        }
        let namespace = Self { name: name.clone() };
        let steps: [&[&str]; 6] = [
            &["link", "add", &here, "type", "veth", "peer", "name", &there, "netns", &name],
            &["addr", "add", &ours, "dev", &here],
            &["link", "set", &here, "up"],
            &["-n", &name, "addr", "add", &theirs, "dev", &there],
            &["-n", &name, "link", "set", &there, "up"],
            &["-n", &name, "link", "set", "lo", "up"],
        ];
        for step in steps {
            if let Err(why) = ip(step) {
                println!("SKIPPED across network namespaces: {why}");
                return None;
            }
        }
        Some(namespace)
    }

    fn address(&self, last: u8) -> String {
        format!("10.213.{}.{last}", std::process::id() % 60_000 / 250)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, env!("CARGO_BIN_EXE_transport-probe")]);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The interfaces go with it.
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|fault| format!("ip: {fault}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[test]
fn bytes_go_both_ways_between_two_network_namespaces() {
    let Some(namespace) = Namespace::new() else { return };
    let address = format!("{}:0", namespace.address(2));
    let probe = Probe::at(namespace.command(), Kind::Tcp, &address, 65_536, 1_024);
    let mut here = end(Kind::Tcp, A, 65_536, 1_024, Limits::default());
    moves_both_ways(Kind::Tcp, &mut here, &probe, 65_536, 1_024);
}
