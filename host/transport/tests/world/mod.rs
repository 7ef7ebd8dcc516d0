//! Two endpoints of any kind, driven by one thread, and what their memories should hold.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "test code outside test functions")]

#[cfg_attr(not(feature = "nixl"), path = "no_nixl.rs")]
pub mod nixl;
pub mod probe;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_transport::{
    ByReference, Direction, Event, Failure, GrantId, Kind, Limits, Memfd, OpId, PeerId, Region, Setup, Span, Tcp,
    Transfer, Transport,
};

/// Long enough for anything that must happen on a busy machine; reaching it is a failure.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The kinds that this build and machine can test inside one process.
pub fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::Reference, Kind::Memfd, Kind::Tcp];
    kinds.extend(nixl::is_there().then_some(Kind::Nixl));
    kinds
}

pub const A: PeerId = PeerId { endpoint: 1, epoch: 10 };
pub const B: PeerId = PeerId { endpoint: 2, epoch: 20 };

pub struct End {
    pub transport: Box<dyn Transport>,
    pub region: Region,
    pub events: Vec<Event>,
}

impl End {
    pub fn turn(&mut self) {
        self.transport.poll(Duration::ZERO, &mut self.events);
    }
}

pub fn setup(identity: PeerId, region: &Region, limits: Limits) -> Setup {
    Setup { identity, regions: vec![region.clone()], is_guarded: false, limits }
}

/// An endpoint to whose memory nobody may write but under a grant.
pub fn guarded_end(kind: Kind, identity: PeerId, block_bytes: usize, blocks: u32, limits: Limits) -> End {
    let region = Region::shared(block_bytes, blocks).unwrap();
    let setup = Setup { is_guarded: true, ..setup(identity, &region, limits) };
    End { transport: endpoint(kind, setup), region, events: Vec::new() }
}

/// An endpoint with one region, alone.
pub fn end(kind: Kind, identity: PeerId, block_bytes: usize, blocks: u32, limits: Limits) -> End {
    let region = Region::shared(block_bytes, blocks).unwrap();
    end_over(kind, identity, region, limits)
}

pub fn end_over(kind: Kind, identity: PeerId, region: Region, limits: Limits) -> End {
    let transport = endpoint(kind, setup(identity, &region, limits));
    End { transport, region, events: Vec::new() }
}

fn endpoint(kind: Kind, setup: Setup) -> Box<dyn Transport> {
    match kind {
        Kind::Reference => Box::new(ByReference::new(setup).unwrap()),
        Kind::Memfd => {
            let name = format!("penstock-{}-{}.sock", std::process::id(), unique());
            Box::new(Memfd::bind(setup, &std::env::temp_dir().join(name)).unwrap())
        }
        Kind::Nixl => nixl::endpoint(setup, SocketAddr::from(([127, 0, 0, 1], 0))),
        Kind::Tcp => Box::new(Tcp::bind(setup, SocketAddr::from(([127, 0, 0, 1], 0)), None).unwrap()),
    }
}

fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Two ends; `a` has connected to `b`.
pub struct Pair {
    pub a: End,
    pub b: End,
}

impl Pair {
    pub fn new(kind: Kind, block_bytes: usize, blocks: u32) -> Self {
        Self::with(kind, block_bytes, blocks, Limits::default())
    }

    pub fn with(kind: Kind, block_bytes: usize, blocks: u32, limits: Limits) -> Self {
        let mut pair =
            Self { a: end(kind, A, block_bytes, blocks, limits), b: end(kind, B, block_bytes, blocks, limits) };
        pair.connect();
        pair
    }

    /// `b` is guarded.
    pub fn guarded(kind: Kind, block_bytes: usize, blocks: u32) -> Self {
        let limits = Limits::default();
        let mut pair =
            Self { a: end(kind, A, block_bytes, blocks, limits), b: guarded_end(kind, B, block_bytes, blocks, limits) };
        pair.connect();
        pair
    }

    pub fn connect(&mut self) {
        let descriptor = self.b.transport.descriptor();
        let peer = self.a.transport.connect(&descriptor.encode()).unwrap();
        assert_eq!(peer, descriptor.identity);
        self.until(|a, _| a.contains(&Event::Connected { peer }));
    }

    /// Polls both ends in turn until `done` is true of what `a` and `b` have told so far.
    pub fn until(&mut self, done: impl Fn(&[Event], &[Event]) -> bool) {
        let start = Instant::now();
        while !done(&self.a.events, &self.b.events) {
            assert!(start.elapsed() < PATIENCE, "a told {:?}\nb told {:?}", self.a.events, self.b.events);
            self.a.turn();
            self.b.turn();
        }
    }

    /// Polls `a` alone: `b` is stuck.
    pub fn until_a(&mut self, done: impl Fn(&[Event]) -> bool) {
        let start = Instant::now();
        while !done(&self.a.events) {
            assert!(start.elapsed() < PATIENCE, "a told {:?}", self.a.events);
            self.a.transport.poll(Duration::from_millis(1), &mut self.a.events);
        }
    }

    /// Runs one operation to its end, which is returned.
    pub fn run(&mut self, transfer: Transfer) -> Result<(), Failure> {
        self.run_under(None, transfer)
    }

    /// The same under a grant.
    pub fn run_under(&mut self, grant: Option<u64>, transfer: Transfer) -> Result<(), Failure> {
        let op = transfer.op;
        match grant {
            Some(grant) => self.a.transport.start_under(GrantId(grant), transfer).unwrap(),
            None => self.a.transport.start(transfer).unwrap(),
        }
        self.until(|a, _| ended(a, op).is_some());
        ended(&self.a.events, op).unwrap().0
    }
}

/// How an operation ended, and whether it was settled then.
pub fn ended(events: &[Event], op: OpId) -> Option<(Result<(), Failure>, bool)> {
    let mut found = events.iter().filter_map(|event| match event {
        Event::Ended { op: which, outcome, settled } if *which == op => Some((outcome.clone(), *settled)),
        _ => None,
    });
    let first = found.next();
    assert_eq!(found.next(), None, "an operation ends once");
    first
}

pub fn is_settled(events: &[Event], op: OpId) -> bool {
    let late = events.iter().filter(|event| **event == Event::Settled { op }).count();
    let at_once = ended(events, op).is_some_and(|(_, settled)| settled);
    assert!(late + usize::from(at_once) <= 1, "an operation settles once: {events:?}");
    late == 1 || at_once
}

pub fn write(op: u64, spans: Vec<Span>) -> Transfer {
    transfer(op, Direction::Write, spans)
}

pub fn read(op: u64, spans: Vec<Span>) -> Transfer {
    transfer(op, Direction::Read, spans)
}

pub fn transfer(op: u64, direction: Direction, spans: Vec<Span>) -> Transfer {
    let deadline = Instant::now() + PATIENCE;
    Transfer { op: OpId(op), peer: B, direction, local: 0, remote: 0, spans, deadline }
}

pub fn span(local: u32, remote: u32, blocks: u32) -> Span {
    Span { local, remote, blocks }
}

/// The same pseudo-random numbers for the same seed (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, bound: u32) -> u32 {
        (self.next() % u64::from(bound)) as u32
    }

    /// The numbers below `bound` in random order.
    pub fn order(&mut self, bound: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..bound).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, self.below(i as u32 + 1) as usize);
        }
        order
    }
}

/// Fills a region with random bytes and returns them.
pub fn fill(region: &Region, random: &mut Random) -> Vec<u8> {
    let bytes = region.block_bytes();
    let mut all = Vec::with_capacity(bytes * region.blocks() as usize);
    for block in 0..region.blocks() {
        let from = all.len();
        while all.len() < from + bytes {
            let word = random.next().to_le_bytes();
            let left = from + bytes - all.len();
            all.extend_from_slice(&word[..left.min(8)]);
        }
        region.fill(block, &all[from..]).unwrap();
    }
    all
}

/// All bytes of a region.
pub fn content(region: &Region) -> Vec<u8> {
    let mut all = vec![0; region.block_bytes() * region.blocks() as usize];
    for (block, bytes) in all.chunks_mut(region.block_bytes()).enumerate() {
        region.read(block as u32, bytes).unwrap();
    }
    all
}

/// What the memories should hold after a transfer: a plain copy of slices.
pub fn apply(transfer: &Transfer, block_bytes: usize, local: &mut [u8], remote: &mut [u8]) {
    for Span { local: here, remote: there, blocks } in &transfer.spans {
        let bytes = *blocks as usize * block_bytes;
        let here = &mut local[*here as usize * block_bytes..][..bytes];
        let there = &mut remote[*there as usize * block_bytes..][..bytes];
        match transfer.direction {
            Direction::Write => there.copy_from_slice(here),
            Direction::Read => here.copy_from_slice(there),
        }
    }
}

/// Fails with the first differing byte instead of two long lists.
pub fn assert_same(what: &str, got: &[u8], wanted: &[u8]) {
    let differing = got.iter().zip(wanted).position(|(a, b)| a != b);
    assert!(got.len() == wanted.len() && differing.is_none(), "{what}: differs from byte {differing:?}");
}
