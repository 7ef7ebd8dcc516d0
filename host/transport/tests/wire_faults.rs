//! What TCP does about damage on the way, and about peers that say what they should not.

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]
#![allow(clippy::single_range_in_vec_init, reason = "a grant is a list of runs, and often of one")]

mod world;

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock_transport::{Address, Descriptor, Event, Failure, Gone, GrantId, Kind, Limits, OpId, PeerId, Transfer};
use world::*;

#[derive(Clone, Copy)]
enum Fault {
    Flip,
    Cut,
}

/// Passes bytes on, and does one thing to byte `at` of one direction of the first connection.
struct Proxy {
    address: SocketAddr,
    /// Cleared once the first transfer is over: what comes later passes unharmed.
    is_armed: Arc<AtomicBool>,
}

impl Proxy {
    fn new(target: &Descriptor, fault: Fault, is_answer: bool, at: u64) -> Self {
        let Address::Tcp(target) = target.address else { panic!("a proxy for TCP") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let is_armed = Arc::new(AtomicBool::new(true));
        let armed = Arc::clone(&is_armed);
        std::thread::spawn(move || {
            for (number, client) in listener.incoming().map_while(Result::ok).enumerate() {
                let Ok(server) = TcpStream::connect(target) else { return };
                let active = (number == 0).then_some((fault, at));
                let (there, back) = if is_answer { (None, active) } else { (active, None) };
                for (from, to, what) in [(&client, &server, there), (&server, &client, back)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let armed = Arc::clone(&armed);
                    std::thread::spawn(move || pass(from, to, what, &armed));
                }
            }
        });
        Self { address, is_armed }
    }

    /// The descriptor of the target as its peers see it through the proxy.
    fn disguise(&self, target: &Descriptor) -> Vec<u8> {
        Descriptor { address: Address::Tcp(self.address), ..target.clone() }.encode()
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, what: Option<(Fault, u64)>, is_armed: &AtomicBool) {
    let mut bytes = vec![0; 65_536];
    let mut passed = 0;
    while let Ok(got @ 1..) = from.read(&mut bytes) {
        let mut end = got;
        let mut is_cut = false;
        if let Some((fault, at)) = what
            && (passed..passed + got as u64).contains(&at)
            && is_armed.load(Ordering::Acquire)
        {
            let here = (at - passed) as usize;
            match fault {
                Fault::Flip => bytes[here] ^= 0x10,
                Fault::Cut => (end, is_cut) = (here, true),
            }
        }
        if to.write_all(&bytes[..end]).is_err() || is_cut {
            break;
        }
        passed += got as u64;
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Runs one transfer with a fault on the way, then once more without. Returns how the first ended, if it could begin.
fn through(fault: Fault, is_answer: bool, at: u64, transfer: &Transfer) -> Option<Result<(), Failure>> {
    let (block_bytes, blocks) = (512, 2);
    let a = end(Kind::Tcp, A, block_bytes, blocks, Limits::default());
    let b = end(Kind::Tcp, B, block_bytes, blocks, Limits::default());
    let mut pair = Pair { a, b };
    let target = pair.b.transport.descriptor();
    let proxy = Proxy::new(&target, fault, is_answer, at);
    let disguised = proxy.disguise(&target);
    let mut here = fill(&pair.a.region, &mut Random(3));
    let mut there = fill(&pair.b.region, &mut Random(4));
    let is_lost = |event: &Event| matches!(event, Event::Lost { .. });
    pair.a.transport.connect(&disguised).unwrap();
    pair.until(|a, _| a.iter().any(|event| is_lost(event) || matches!(event, Event::Connected { .. })));
    let mut first = None;
    if pair.a.events.contains(&Event::Connected { peer: B }) {
        pair.a.transport.start(transfer.clone()).unwrap();
        pair.until(|a, _| ended(a, OpId(1)).is_some());
        first = ended(&pair.a.events, OpId(1)).map(|(outcome, _)| outcome);
    }
    proxy.is_armed.store(false, Ordering::Release);
    apply(transfer, block_bytes, &mut here, &mut there);
    let landed = Event::Landed { peer: A, op: OpId(1), bytes: 1_024 };
    let is_whole = content(&pair.a.region) == here && content(&pair.b.region) == there;
    if first == Some(Ok(())) || pair.b.events.contains(&landed) {
        assert!(is_whole, "byte {at}: what ended well or landed is not what was sent");
    }
    // The same again, over the same connection when it has lasted, else over a new one.
    if pair.a.events.iter().any(is_lost) {
        pair.a.events.clear();
        pair.a.transport.connect(&disguised).unwrap();
        pair.until(|a, _| a.contains(&Event::Connected { peer: B }));
    }
    assert_eq!(pair.run(Transfer { op: OpId(2), ..transfer.clone() }), Ok(()), "byte {at}: once more");
    assert_same("once more, here", &content(&pair.a.region), &here);
    assert_same("once more, there", &content(&pair.b.region), &there);
    first
}

// A greeting takes 84 bytes, the list of one run 44, the header of a chunk 36.
const CHUNK: u64 = 84 + 44;

#[test]
fn a_damaged_chunk_is_typed_and_the_connection_lasts() {
    for at in [CHUNK + 36, CHUNK + 36 + 700, CHUNK + 36 + 1_023] {
        assert_eq!(through(Fault::Flip, false, at, &write(1, vec![span(0, 0, 2)])), Some(Err(Failure::Corrupt)));
    }
    // The answer to a greeting: its header, a count, 12 bytes a region.
    let answer = 36 + 1 + 12 + 36;
    for at in [answer, answer + 700, answer + 1_023] {
        assert_eq!(through(Fault::Flip, true, at, &read(1, vec![span(0, 0, 2)])), Some(Err(Failure::Corrupt)));
    }
}

#[test]
fn a_damaged_header_ends_the_connection_and_a_new_one_works() {
    for at in [CHUNK, CHUNK + 5, CHUNK + 9, CHUNK + 17, CHUNK + 25, CHUNK + 29, CHUNK + 33] {
        let first = through(Fault::Flip, false, at, &write(1, vec![span(0, 0, 2)]));
        assert_eq!(first, Some(Err(Failure::PeerGone)), "byte {at}");
    }
}

#[test]
fn no_flipped_byte_makes_a_wrong_transfer_look_right() {
    let mut random = Random(23);
    for is_answer in [false, true] {
        for transfer in [write(1, vec![span(0, 1, 1), span(1, 0, 1)]), read(1, vec![span(0, 1, 1), span(1, 0, 1)])] {
            for _ in 0..40 {
                let at = u64::from(random.below(CHUNK as u32 + 44 + 1_060));
                through(Fault::Flip, is_answer, at, &transfer);
            }
        }
    }
}

#[test]
fn frames_cut_anywhere_end_typed_and_never_land() {
    let whole = CHUNK + 36 + 1_024;
    for at in (0..whole).step_by(41) {
        let first = through(Fault::Cut, false, at, &write(1, vec![span(0, 0, 2)]));
        let wanted = (at >= 84).then_some(Err(Failure::PeerGone));
        assert_eq!(first, wanted, "byte {at} of {whole}");
    }
}

/// A frame as its documentation lays it out.
fn frame(version: u16, word: u8, op: u64, arg: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"PSTK".to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&[word, 0]);
    bytes.extend_from_slice(&op.to_le_bytes());
    bytes.extend_from_slice(&arg.to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

const VERSION: u16 = 2;
const HELLO: u8 = 1;
const REJECT: u8 = 3;
const OPEN: u8 = 4;
const DATA: u8 = 6;
const ACK: u8 = 7;
const NACK: u8 = 8;
const OPEN_UNDER: u8 = 15;

/// A peer by hand.
struct Raw {
    stream: TcpStream,
}

impl Raw {
    fn new(target: &Descriptor) -> Self {
        let Address::Tcp(address) = target.address else { panic!("it is TCP") };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self { stream }
    }

    fn greeted(here: &mut End) -> Self {
        let target = here.transport.descriptor();
        let mut raw = Self::new(&target);
        let mut payload = target.token.to_vec();
        for number in [77, 1, target.identity.endpoint, target.identity.epoch] {
            payload.extend_from_slice(&u64::to_le_bytes(number));
        }
        raw.says(&frame(VERSION, HELLO, 0, 0, &payload));
        assert_eq!(raw.hears(here, 36 + 13).expect("it is welcomed")[6], 2);
        raw
    }

    fn says(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// As many bytes, or none when the other end closes before.
    fn hears(&mut self, here: &mut End, bytes: usize) -> Option<Vec<u8>> {
        let mut all = vec![0; bytes];
        let mut got = 0;
        let start = std::time::Instant::now();
        while got < bytes {
            assert!(start.elapsed() < PATIENCE, "it neither answers nor closes");
            here.transport.poll(Duration::from_millis(1), &mut here.events);
            match self.stream.read(&mut all[got..]) {
                Ok(0) => return None,
                Ok(more) => got += more,
                Err(fault) if fault.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        Some(all)
    }

    fn is_closed_on(&mut self, here: &mut End) -> bool {
        self.hears(here, 1).is_none()
    }
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

#[test]
fn a_peer_of_another_version_is_told_ours() {
    let mut here = end(Kind::Tcp, B, 64, 4, Limits::default());
    let mut raw = Raw::new(&here.transport.descriptor());
    raw.says(&frame(1, HELLO, 0, 0, &[0; 48]));
    // It goes on talking and listens late: what it said must not cost it the answer.
    raw.says(&[0; 50_000]);
    for _ in 0..50 {
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
    let answer = raw.hears(&mut here, 36).expect("it is told");
    assert_eq!((answer[6], number(&answer[8..16]), number(&answer[16..24])), (REJECT, 2, 1));
    assert!(raw.is_closed_on(&mut here));
}

#[test]
fn a_listener_of_another_version_is_understood() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut here = end(Kind::Tcp, A, 64, 4, Limits::default());
    let there = end(Kind::Tcp, B, 64, 4, Limits::default());
    let address = Address::Tcp(listener.local_addr().unwrap());
    let descriptor = Descriptor { address, ..there.transport.descriptor() };
    here.transport.connect(&descriptor.encode()).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&frame(9, REJECT, 9, 1, &[])).unwrap();
    let start = std::time::Instant::now();
    let lost = Event::Lost { peer: B, why: Gone::Version { ours: 2, theirs: 9 } };
    while !here.events.contains(&lost) {
        assert!(start.elapsed() < PATIENCE, "{:?}", here.events);
        here.transport.poll(Duration::from_millis(1), &mut here.events);
    }
}

#[test]
fn strangers_do_no_harm() {
    let limits = Limits { silence_max: Duration::from_millis(200), ..Limits::default() };
    let mut pair = Pair { a: end(Kind::Tcp, A, 64, 4, Limits::default()), b: end(Kind::Tcp, B, 64, 4, limits) };
    pair.connect();
    let target = pair.b.transport.descriptor();
    let mut nonsense = Raw::new(&target);
    nonsense.says(&[0x47; 4_000]);
    assert!(nonsense.is_closed_on(&mut pair.b));
    let mut silent = Raw::new(&target);
    assert!(silent.is_closed_on(&mut pair.b));
    let mut half = Raw::new(&target);
    half.says(&frame(VERSION, HELLO, 0, 0, &[0; 48])[..50]);
    assert!(half.is_closed_on(&mut pair.b));
    let mut rude = Raw::new(&target);
    rude.says(&frame(VERSION, OPEN, 1, 0, &[0; 8]));
    assert!(rude.is_closed_on(&mut pair.b));
    assert_eq!(pair.run(write(1, vec![span(0, 0, 4)])), Ok(()));
}

#[test]
fn what_a_peer_must_not_do_is_refused_by_the_receiver_itself() {
    let limits = Limits { ops_max: 2, ..Limits::default() };
    let mut here = end(Kind::Tcp, B, 64, 4, limits);
    let before = fill(&here.region, &mut Random(2));
    let mut raw = Raw::greeted(&mut here);
    let runs = |runs: &[(u32, u32)]| {
        runs.iter()
            .flat_map(|(first, blocks)| [first.to_le_bytes(), blocks.to_le_bytes()])
            .flatten()
            .collect::<Vec<_>>()
    };
    let mut answer = |bytes: &[u8]| {
        raw.says(bytes);
        let heard = raw.hears(&mut here, 36).expect("it is answered");
        (heard[6], number(&heard[8..16]), number(&heard[16..24]))
    };
    // Region, block, no block at all, an overlap, half a run: 3 is "out of range".
    assert_eq!(answer(&frame(VERSION, OPEN, 1, 7, &runs(&[(0, 1)]))), (NACK, 1, 3));
    assert_eq!(answer(&frame(VERSION, OPEN, 2, 0, &runs(&[(3, 2)]))), (NACK, 2, 3));
    assert_eq!(answer(&frame(VERSION, OPEN, 3, 0, &runs(&[(u32::MAX, u32::MAX)]))), (NACK, 3, 3));
    assert_eq!(answer(&frame(VERSION, OPEN, 4, 0, &runs(&[(0, 0)]))), (NACK, 4, 3));
    assert_eq!(answer(&frame(VERSION, OPEN, 5, 0, &[])), (NACK, 5, 3));
    assert_eq!(answer(&frame(VERSION, OPEN, 6, 0, &runs(&[(0, 2), (1, 1)]))), (NACK, 6, 3));
    assert_eq!(answer(&frame(VERSION, OPEN, 7, 0, &[0, 0, 0, 0, 1])), (NACK, 7, 3));
    // Two may be open; the third is one too many (2), and an open one cannot be opened again (5).
    let mut two = frame(VERSION, OPEN, 8, 0, &runs(&[(0, 1)]));
    two.extend(frame(VERSION, OPEN, 9, 0, &runs(&[(1, 1)])));
    two.extend(frame(VERSION, OPEN, 10, 0, &runs(&[(2, 1)])));
    assert_eq!(answer(&two), (NACK, 10, 2));
    assert_eq!(answer(&frame(VERSION, OPEN, 8, 0, &runs(&[(0, 1)]))), (NACK, 8, 5));
    // Bytes for what was refused are thrown away.
    raw.says(&frame(VERSION, DATA, 10, 0, &[9; 64]));
    // A chunk that does not follow, or reaches too far, ends it all.
    raw.says(&frame(VERSION, DATA, 8, 32, &[9; 32]));
    assert!(raw.is_closed_on(&mut here));
    let mut raw = Raw::greeted(&mut here);
    raw.says(&frame(VERSION, OPEN, 8, 0, &runs(&[(0, 1)])));
    raw.says(&frame(VERSION, DATA, 8, 0, &[9; 65]));
    assert!(raw.is_closed_on(&mut here));
    assert_same("nothing was written", &content(&here.region), &before);
    assert!(!here.events.iter().any(|event| matches!(event, Event::Landed { .. })));
}

#[test]
fn words_about_grants_that_make_no_sense_move_nothing() {
    let mut here = guarded_end(Kind::Tcp, B, 64, 4, Limits::default());
    let before = fill(&here.region, &mut Random(2));
    here.transport.grant(PeerId { endpoint: 77, epoch: 1 }, GrantId(5), 0, &[1..3]).unwrap();
    let mut raw = Raw::greeted(&mut here);
    let under = |grant: u64, count: u32, runs: &[u32]| {
        let mut payload = grant.to_le_bytes().to_vec();
        payload.extend_from_slice(&count.to_le_bytes());
        payload.extend(runs.iter().flat_map(|number| number.to_le_bytes()));
        payload
    };
    let mut answer = |bytes: &[u8]| {
        raw.says(bytes);
        let heard = raw.hears(&mut here, 36).expect("it is answered");
        (heard[6], number(&heard[8..16]), number(&heard[16..24]))
    };
    // 3 is "out of range", 6 "not granted".
    let open = |op, payload: &[u8]| frame(VERSION, OPEN_UNDER, op, 0, payload);
    assert_eq!(answer(&open(1, &[])), (NACK, 1, 3));
    assert_eq!(answer(&open(2, &under(5, 1, &[1])[..])), (NACK, 2, 3));
    assert_eq!(answer(&open(3, &under(5, 2, &[1, 1]))), (NACK, 3, 3), "another number of runs than said");
    assert_eq!(answer(&open(4, &under(5, 1, &[1, 1, 0]))), (NACK, 4, 3), "something after them");
    assert_eq!(answer(&open(5, &under(5, 2, &[1, 2, 2, 1]))), (NACK, 5, 3), "a block twice");
    assert_eq!(answer(&open(6, &under(5, 0, &[]))), (NACK, 6, 3), "nothing");
    assert_eq!(answer(&open(7, &under(5, 1, &[2, u32::MAX]))), (NACK, 7, 6));
    assert_eq!(answer(&open(8, &under(6, 1, &[1, 1]))), (NACK, 8, 6));
    assert_eq!(answer(&frame(VERSION, OPEN, 9, 0, &under(5, 1, &[])[..8])), (NACK, 9, 6), "no grant is named");
    // Bytes that follow are thrown away.
    raw.says(&frame(VERSION, DATA, 8, 0, &[9; 64]));
    raw.says(&open(10, &under(5, 1, &[1, 1])));
    raw.says(&frame(VERSION, DATA, 10, 0, &[9; 64]));
    assert_eq!(raw.hears(&mut here, 36).expect("it is answered")[6], ACK);
    let mut wanted = before;
    wanted[64..128].fill(9);
    assert_same("what was granted, and nothing else", &content(&here.region), &wanted);
}

#[test]
fn a_peer_that_asks_without_listening_is_not_heard_until_it_does() {
    let mut here = end(Kind::Tcp, B, 64, 4, Limits::default());
    let mut raw = Raw::greeted(&mut here);
    // Each is answered by 36 bytes that nobody reads. Both ends' sockets fill up; then nothing is taken in any more.
    let cancel = frame(VERSION, 9, 1, 0, &[]).repeat(1_000);
    let mut accepted = 0_u64;
    let mut idle = 0;
    while idle < 500 {
        assert!(accepted < 1 << 30, "it reads without end");
        match raw.stream.write(&cancel) {
            Ok(went) => (accepted, idle) = (accepted + went as u64, 0),
            Err(_) => idle += 1,
        }
        here.transport.poll(Duration::ZERO, &mut here.events);
    }
    assert!(accepted > 0);
    // It reads, and is heard again.
    assert!(raw.hears(&mut here, 36 * 2_000).is_some());
    assert!(here.events.is_empty());
}
