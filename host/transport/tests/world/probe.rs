//! `transport-probe` in a process of its own, or in a network namespace of its own.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use penstock_transport::{Address, Descriptor, Event, Failure, Kind, PeerId, Region, Transfer};

use super::{End, PATIENCE, ended};

/// A `transport-probe` in a process of its own.
pub struct Probe {
    pub child: Child,
    lines: Receiver<String>,
    pub descriptor: Descriptor,
}

impl Probe {
    pub fn new(kind: Kind, block_bytes: usize, blocks: u32) -> Self {
        Self::at(Command::new(env!("CARGO_BIN_EXE_transport-probe")), kind, &address(kind), block_bytes, blocks)
    }

    /// One that is guarded, and grants its whole pool to one peer.
    pub fn granting(kind: Kind, (grant, to): (u64, PeerId), block_bytes: usize, blocks: u32) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_transport-probe"));
        command.args([&kind.to_string(), &address(kind), "--grant", &grant.to_string(), "--grantee"]);
        command.arg(format!("{}.{}", to.endpoint, to.epoch));
        command.args(["--block-bytes", &block_bytes.to_string(), "--blocks", &blocks.to_string()]);
        Self::spawn(command)
    }

    pub fn at(mut command: Command, kind: Kind, address: &str, block_bytes: usize, blocks: u32) -> Self {
        command.args([&kind.to_string(), address, "--block-bytes", &block_bytes.to_string()]);
        command.args(["--blocks", &blocks.to_string()]);
        Self::spawn(command)
    }

    /// One that writes its whole pool to an endpoint, once.
    pub fn writing_to(target: &Descriptor, block_bytes: usize, blocks: u32) -> Self {
        Self::spawn(Self::writer(target, block_bytes, blocks))
    }

    /// The same under a grant.
    pub fn writing_under(grant: u64, target: &Descriptor, block_bytes: usize, blocks: u32) -> Self {
        let mut command = Self::writer(target, block_bytes, blocks);
        command.args(["--under", &grant.to_string()]);
        Self::spawn(command)
    }

    fn writer(target: &Descriptor, block_bytes: usize, blocks: u32) -> Command {
        let digits: String = target.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_transport-probe"));
        let kind = target.address.kind();
        command.args([&kind.to_string(), &address(kind), "--block-bytes", &block_bytes.to_string()]);
        command.args(["--blocks", &blocks.to_string(), "--to", &digits]);
        command
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let first = lines.recv_timeout(PATIENCE).expect("the probe tells its descriptor");
        let bytes: Vec<u8> =
            (0..first.len()).step_by(2).map(|at| u8::from_str_radix(&first[at..at + 2], 16).unwrap()).collect();
        Self { child, lines, descriptor: Descriptor::decode(&bytes).unwrap() }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    pub fn says(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the probe says something")
    }
}

fn address(kind: Kind) -> String {
    match kind {
        Kind::Memfd => {
            let name = format!("penstock-probe-{}-{:?}.sock", std::process::id(), std::thread::current().id());
            std::env::temp_dir().join(name).display().to_string()
        }
        _ => "127.0.0.1:0".to_owned(),
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
    pub fn until(&mut self, what: &str, done: impl Fn(&[Event]) -> bool) {
        let start = Instant::now();
        while !done(&self.events) {
            assert!(start.elapsed() < PATIENCE, "waiting for {what}: {:?}", self.events);
            self.transport.poll(Duration::from_millis(5), &mut self.events);
        }
    }

    pub fn until_true(&mut self, what: &str, mut done: impl FnMut(&Region) -> bool) {
        let start = Instant::now();
        while !done(&self.region) {
            assert!(start.elapsed() < PATIENCE, "waiting for {what}: {:?}", self.events);
            self.transport.poll(Duration::from_millis(1), &mut self.events);
        }
    }

    pub fn connect(&mut self, probe: &Probe) -> PeerId {
        let peer = self.transport.connect(&probe.descriptor.encode()).unwrap();
        self.until("the connection", |events| events.contains(&Event::Connected { peer }));
        peer
    }

    pub fn run(&mut self, transfer: Transfer) -> Result<(), Failure> {
        let op = transfer.op;
        self.transport.start(transfer).unwrap();
        self.until("an end", |events| ended(events, op).is_some());
        ended(&self.events, op).unwrap().0
    }
}

/// A network namespace with one end of a pair of virtual interfaces; the other end is in that of the test.
pub struct Namespace {
    pub name: String,
}

impl Namespace {
    /// None, with the reason printed, where that cannot be had.
    pub fn new() -> Option<Self> {
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

    pub fn address(&self, last: u8) -> String {
        format!("10.213.{}.{last}", std::process::id() % 60_000 / 250)
    }

    /// The interface here (`a`) or there (`b`).
    pub fn device(&self, end: &str) -> String {
        format!("ps{end}{}", std::process::id() % 60_000)
    }

    pub fn command(&self) -> Command {
        Self::command_in(&self.name)
    }

    pub fn command_in(name: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", name, env!("CARGO_BIN_EXE_transport-probe")]);
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
