//! Movers with endpoints of their own, as two processes have them: what lands, what is refused, and what never lands any more.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as StdInstant};

use penstock_base::{BlockRef, Instant, ReplicaEpoch, ReplicaId, TransferId};
use penstock_exec::SampledToken;
use penstock_sched::handoff::{Grid, Peer, SenderWord};
use penstock_sched::replica::HandoffInput;
use penstock_transport::{GrantId, Kind, PeerId, Region, Transport};

use super::landed::Landed;
use super::mover::{LANDED, MoverLoop, MoverOrder, MoverWake, ORDERS, PEERS, RESET, WRITES, lanes};
use super::outside::Outside;
use super::settings::{TransferSettings, endpoints};
use super::setup::Prepared;
use super::ways::Ways;
use crate::mailbox::Mailbox;
use crate::replica_wake::ReplicaWake;

const PATIENCE: Duration = Duration::from_secs(30);
const BYTES: usize = 4_096;
const LAYERS: u32 = 2;
const BLOCKS: u32 = 64;
const TRANSFER: TransferId = TransferId(77);

/// Kinds between processes that every build has.
const FAR: [Kind; 2] = [Kind::Memfd, Kind::Tcp];

/// What is around a mover here: a queue in place of the replica's loop, and a wire between movers that carries bytes.
struct Around {
    told: Sender<ReplicaWake>,
    wire: Sender<Vec<u8>>,
}

impl Outside for Around {
    fn tell(&self, wake: ReplicaWake) {
        let _ = self.told.send(wake);
    }

    fn post(&self, landed: Landed) {
        let _ = self.wire.send(landed.encode());
    }

    fn moved(&self, _: u64, _: Duration) {}

    fn failed(&self) {}
}

fn settings(kinds: &[Kind]) -> TransferSettings {
    let memfd_dir = std::env::temp_dir().join(format!("penstock-movers-{}", std::process::id()));
    TransferSettings { kinds: kinds.to_vec(), memfd_dir, ..TransferSettings::default() }
}

struct Mover {
    me: Peer,
    life: u64,
    descriptors: Vec<Vec<u8>>,
    mailbox: Arc<Mailbox<MoverWake>>,
    told: Receiver<ReplicaWake>,
    wire: Receiver<Vec<u8>>,
    region: Region,
    ways: Ways,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    fn new(replica: u32, life: u64, kinds: &[Kind]) -> Self {
        Self::with(replica, life, kinds, Duration::from_secs(2))
    }

    fn with(replica: u32, life: u64, kinds: &[Kind], copy_max: Duration) -> Self {
        let me = Peer { replica: ReplicaId(replica), epoch: ReplicaEpoch(1) };
        let region = Region::shared(BYTES, BLOCKS * LAYERS).expect("memory");
        let identity = PeerId { endpoint: u64::from(replica), epoch: life };
        let prepared = Prepared {
            ends: endpoints(&settings(kinds), identity, &region).expect("endpoints"),
            region: region.clone(),
            layers: LAYERS,
            order: kinds.into(),
            copy_max,
            peers: Arc::new([]),
        };
        let descriptors = prepared.descriptors();
        let ((tells, told), (says, wire)) = (channel(), channel());
        let (mailbox, ways) = (Arc::new(Mailbox::with_bell(&lanes())), Ways::default());
        let (its, shown) = (Arc::clone(&mailbox), ways.clone());
        let thread = std::thread::spawn(move || {
            let around = Around { told: tells, wire: says };
            MoverLoop::new(around, me.replica, prepared, shown).run(&its);
        });
        Self { me, life, descriptors, mailbox, told, wire, region, ways, thread: Some(thread) }
    }

    fn meet(&self, other: &Self) {
        let (replica, life, descriptors) = (other.me.replica, other.life, other.descriptors.clone());
        self.mailbox.try_push(PEERS, MoverWake::Peer { replica, life, descriptors }).expect("room");
    }

    fn order(&self, order: MoverOrder) {
        let lane = if matches!(order, MoverOrder::Write { .. }) { WRITES } else { ORDERS };
        self.mailbox.try_push(lane, MoverWake::Order { me: self.me, order }).expect("room");
    }

    fn hears(&self) -> ReplicaWake {
        self.told.recv_timeout(PATIENCE).expect("the mover says something")
    }

    fn hears_of_handoff(&self) -> HandoffInput {
        match self.hears() {
            ReplicaWake::Handoff { to, input } if to == self.me => input,
            other => panic!("something else: {}", name(&other)),
        }
    }

    /// What it posts goes to `other`, as bytes.
    fn passes_on(&self, other: &Self) {
        let bytes = self.wire.recv_timeout(PATIENCE).expect("a chunk lies there");
        other.hand(Landed::decode(&bytes).expect("what a mover wrote"));
    }

    fn hand(&self, landed: Landed) {
        self.mailbox.try_push(LANDED, MoverWake::Landed(landed)).expect("room");
    }

    fn fill(&self, seed: u8) {
        for block in 0..BLOCKS * LAYERS {
            let bytes: Vec<u8> = (0..BYTES).map(|at| (at as u8).wrapping_mul(seed).wrapping_add(block as u8)).collect();
            self.region.fill(block, &bytes).expect("there");
        }
    }

    fn block(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.region.read(block, &mut bytes).expect("there");
        bytes
    }

    /// Ends as a process does: what it held of others is theirs again.
    fn end(&mut self) {
        self.mailbox.close();
        self.thread.take().expect("it runs").join().expect("it ends well");
    }

    fn kinds(&self) -> Vec<Option<Kind>> {
        self.ways.all().into_iter().map(|way| way.kind).collect()
    }

    fn until_connected(&self, kind: Kind) {
        let start = StdInstant::now();
        while self.kinds() != [Some(kind)] {
            assert!(start.elapsed() < PATIENCE, "{:?}", self.ways.all());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Six blocks that travel in chunks of two; then the tail.
const GRID: Grid = Grid { first_block: 0, blocks: 6, chunk_blocks: 2, layers: LAYERS, chunk_layers: LAYERS };
/// The tail's number.
const TAIL: u32 = 3;

fn blocks(first: u32) -> Vec<BlockRef> {
    // In an order that is no run.
    [5, 0, 3, 1, 4, 2].into_iter().map(|at| BlockRef { index: first + at, generation: 1 }).collect()
}

fn token() -> SampledToken {
    SampledToken { id: 9, logprob: -0.25, top: Vec::new() }
}

/// Two that know each other, with a transfer that has begun.
fn pair(kinds: &[Kind]) -> (Mover, Mover) {
    let (sender, receiver) = (Mover::new(11, 5, kinds), Mover::new(0x8000_0022, 6, kinds));
    sender.fill(3);
    receiver.fill(7);
    sender.meet(&receiver);
    receiver.meet(&sender);
    begin(&sender, &receiver);
    (sender, receiver)
}

fn begin(sender: &Mover, receiver: &Mover) {
    let into: Arc<[BlockRef]> = blocks(40).into();
    receiver.order(MoverOrder::Grant { transfer: TRANSFER, to: sender.me, grid: GRID, blocks: Arc::clone(&into) });
    sender.order(MoverOrder::Send { transfer: TRANSFER, grid: GRID });
    sender.order(MoverOrder::Sources { transfer: TRANSFER, blocks: blocks(10) });
    sender.order(MoverOrder::Bind { transfer: TRANSFER, to: receiver.me, blocks: into });
}

fn write(sender: &Mover, index: u32) {
    sender.order(MoverOrder::Write { transfer: TRANSFER, index, stamp: Instant(u64::from(index) + 100) });
}

/// The sums that the receiver's machine is told of a chunk: of what was sent, and of what arrived.
fn chunk(receiver: &Mover, wanted: u32) -> (u64, u64) {
    loop {
        match receiver.hears() {
            ReplicaWake::Handoff { input: HandoffInput::OfSender(word), .. } => {
                assert_eq!(word.body.stamp, Instant(u64::from(wanted) + 100));
                let SenderWord::Chunk { index, sent, arrived } = word.body.word else { panic!("{word:?}") };
                assert_eq!(index, wanted);
                return (sent, arrived);
            }
            ReplicaWake::Tail { tail, .. } => assert_eq!(tail, [token()]),
            other => panic!("something else: {}", name(&other)),
        }
    }
}

fn name(wake: &ReplicaWake) -> &'static str {
    match wake {
        ReplicaWake::Handoff { .. } => "a word for another incarnation or about something else",
        ReplicaWake::Tail { .. } => "a tail",
        ReplicaWake::MoverQuiet { .. } => "quiet",
        _ => "what no mover says",
    }
}

#[test]
fn chunks_land_with_equal_sums_and_so_does_the_whole() {
    for kind in FAR {
        let (sender, receiver) = pair(&[kind]);
        for index in [1, 0, 2] {
            write(&sender, index);
            sender.passes_on(&receiver);
            let (sent, arrived) = chunk(&receiver, index);
            assert_eq!(sent, arrived, "{kind}");
        }
        sender.order(MoverOrder::Seal { transfer: TRANSFER, tail: vec![token()] });
        let HandoffInput::Sealed { seal, .. } = sender.hears_of_handoff() else { panic!("a seal") };
        assert_eq!(seal.sampled_tokens, 1);
        write(&sender, TAIL);
        sender.passes_on(&receiver);
        let (sent, arrived) = chunk(&receiver, TAIL);
        assert_eq!(sent, arrived, "{kind}");
        for (from, into) in blocks(10).into_iter().zip(blocks(40)) {
            for layer in 0..LAYERS {
                let (from, into) = (from.index * LAYERS + layer, into.index * LAYERS + layer);
                assert_eq!(receiver.block(into), sender.block(from), "{kind}: block {into}");
            }
        }
        receiver.order(MoverOrder::Fence(TRANSFER));
        assert!(matches!(receiver.hears_of_handoff(), HandoffInput::Fenced(TRANSFER)), "{kind}");
        receiver.order(MoverOrder::Digest(TRANSFER));
        let HandoffInput::Digested { sum, .. } = receiver.hears_of_handoff() else { panic!("a sum") };
        assert_eq!(sum, seal.sum, "{kind}");
        sender.order(MoverOrder::Stop(TRANSFER));
        assert!(matches!(sender.hears_of_handoff(), HandoffInput::Quiet(TRANSFER)), "{kind}");
        assert_eq!(sender.kinds(), [Some(kind)]);
    }
}

#[test]
fn many_chunks_are_under_way_at_once() {
    for kind in FAR {
        let (sender, receiver) = pair(&[kind]);
        // Said again and again while they travel: each lands at least once, and repetitions that come in time cost nothing.
        for _ in 0..20 {
            (0..3).for_each(|index| write(&sender, index));
        }
        let mut seen = [0; 3];
        while seen.contains(&0) {
            sender.passes_on(&receiver);
            let ReplicaWake::Handoff { input: HandoffInput::OfSender(word), .. } = receiver.hears() else { panic!() };
            let SenderWord::Chunk { index, sent, arrived } = word.body.word else { panic!() };
            assert_eq!(sent, arrived, "{kind}");
            seen[index as usize] += 1;
        }
        assert!(seen.iter().all(|count| *count <= 20), "{kind}: {seen:?}");
    }
}

#[test]
fn a_chunk_that_is_spoiled_has_another_sum() {
    for kind in FAR {
        let (sender, receiver) = pair(&[kind]);
        write(&sender, 0);
        let bytes = sender.wire.recv_timeout(PATIENCE).expect("a chunk lies there");
        // The first block of the first chunk, in its second layer, one bit.
        let at = blocks(40)[0].index * LAYERS + 1;
        let mut spoiled = receiver.block(at);
        spoiled[BYTES - 1] ^= 1;
        receiver.region.fill(at, &spoiled).expect("there");
        receiver.hand(Landed::decode(&bytes).expect("what a mover wrote"));
        let (sent, arrived) = chunk(&receiver, 0);
        assert_ne!(sent, arrived, "{kind}");
        // Written again it is right.
        write(&sender, 0);
        sender.passes_on(&receiver);
        let (sent, arrived) = chunk(&receiver, 0);
        assert_eq!(sent, arrived, "{kind}");
    }
}

#[test]
fn nothing_lands_after_a_fence_though_the_sender_goes_on() {
    for kind in FAR {
        let (sender, receiver) = pair(&[kind]);
        write(&sender, 0);
        sender.passes_on(&receiver);
        chunk(&receiver, 0);
        (0..50).for_each(|_| (1..3).for_each(|index| write(&sender, index)));
        receiver.order(MoverOrder::Fence(TRANSFER));
        assert!(matches!(receiver.hears_of_handoff(), HandoffInput::Fenced(TRANSFER)), "{kind}");
        receiver.fill(91);
        let wanted: Vec<_> = (0..BLOCKS * LAYERS).map(|block| receiver.block(block)).collect();
        (0..50).for_each(|_| (0..3).for_each(|index| write(&sender, index)));
        // Whatever is said of chunks after that is not heard, and their blocks stay.
        let until = StdInstant::now() + Duration::from_millis(300);
        while let Ok(bytes) = sender.wire.recv_timeout(until.saturating_duration_since(StdInstant::now())) {
            receiver.hand(Landed::decode(&bytes).expect("what a mover wrote"));
        }
        std::thread::sleep(Duration::from_millis(100));
        let now: Vec<_> = (0..BLOCKS * LAYERS).map(|block| receiver.block(block)).collect();
        assert!(now == wanted, "{kind}: something landed");
        assert!(receiver.told.try_recv().is_err(), "{kind}: a chunk counts that came behind the fence");
        sender.order(MoverOrder::Stop(TRANSFER));
        assert!(matches!(sender.hears_of_handoff(), HandoffInput::Quiet(TRANSFER)), "{kind}");
    }
}

#[test]
fn a_reset_shuts_out_and_forgets_and_the_next_epoch_begins_clean() {
    for kind in FAR {
        let (sender, receiver) = pair(&[kind]);
        write(&sender, 0);
        sender.passes_on(&receiver);
        chunk(&receiver, 0);
        let epoch = ReplicaEpoch(1);
        (0..50).for_each(|_| (1..3).for_each(|index| write(&sender, index)));
        receiver.mailbox.push_latest(RESET, MoverWake::Reset(epoch)).expect("it runs");
        while !matches!(receiver.hears(), ReplicaWake::MoverQuiet { epoch: ended } if ended == epoch) {}
        receiver.fill(91);
        let wanted = receiver.block(blocks(40)[2].index * LAYERS);
        (0..50).for_each(|_| (1..3).for_each(|index| write(&sender, index)));
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(receiver.block(blocks(40)[2].index * LAYERS), wanted, "{kind}");
        sender.mailbox.push_latest(RESET, MoverWake::Reset(epoch)).expect("it runs");
        while !matches!(sender.hears(), ReplicaWake::MoverQuiet { epoch: ended } if ended == epoch) {}
        while sender.wire.try_recv().is_ok() {}
        begin(&sender, &receiver);
        write(&sender, 2);
        sender.passes_on(&receiver);
        let (sent, arrived) = chunk(&receiver, 2);
        assert_eq!(sent, arrived, "{kind}");
    }
}

#[test]
fn a_peer_that_dies_is_noticed_and_its_next_life_is_reached() {
    for kind in FAR {
        let (sender, mut receiver) = pair(&[kind]);
        sender.until_connected(kind);
        receiver.end();
        (0..3).for_each(|index| write(&sender, index));
        // All that is asked of it comes to an end, and the mover is not held up.
        sender.order(MoverOrder::Stop(TRANSFER));
        assert!(matches!(sender.hears_of_handoff(), HandoffInput::Quiet(TRANSFER)), "{kind}");
        while sender.wire.try_recv().is_ok() {}
        let next = Mover::new(receiver.me.replica.0, receiver.life + 1, &[kind]);
        next.meet(&sender);
        // A word of an earlier life changes nothing once the later one is known.
        sender.meet(&next);
        sender.meet(&receiver);
        let (replica, life) = (receiver.me.replica, receiver.life);
        sender.mailbox.try_push(PEERS, MoverWake::PeerGone { replica, life }).expect("room");
        begin(&sender, &next);
        write(&sender, 1);
        sender.passes_on(&next);
        let (sent, arrived) = chunk(&next, 1);
        assert_eq!(sent, arrived, "{kind}");
    }
}

/// A mover that has begun to write a chunk to a peer that stands still, and is told to stop. Returns it with the peer's endpoint.
fn stopped_before_one_that_stands_still(kind: Kind, copy_max: Duration) -> (Mover, Box<dyn Transport>) {
    let sender = Mover::with(0x51, 1, &[kind], copy_max);
    // Its endpoint is served here, so that it can stand still.
    let region = Region::shared(BYTES, BLOCKS * LAYERS).expect("memory");
    let still = Peer { replica: ReplicaId(0x52), epoch: ReplicaEpoch(1) };
    let identity = PeerId { endpoint: 0x52, epoch: 1 };
    let mut end = endpoints(&settings(&[kind]), identity, &region).expect("endpoints").remove(0);
    let (writer, all) = (PeerId { endpoint: 0x51, epoch: 1 }, 0..BLOCKS * LAYERS);
    end.grant(writer, GrantId(TRANSFER.0), 0, std::slice::from_ref(&all)).expect("blocks that are there");
    let descriptors = vec![end.descriptor().encode()];
    let known = MoverWake::Peer { replica: still.replica, life: 1, descriptors };
    sender.mailbox.try_push(PEERS, known).expect("room");
    let (mut events, start) = (Vec::new(), StdInstant::now());
    while sender.kinds() != [Some(kind)] {
        assert!(start.elapsed() < PATIENCE, "{:?}", sender.ways.all());
        end.poll(Duration::from_millis(1), &mut events);
    }
    sender.order(MoverOrder::Send { transfer: TRANSFER, grid: GRID });
    sender.order(MoverOrder::Sources { transfer: TRANSFER, blocks: blocks(10) });
    sender.order(MoverOrder::Bind { transfer: TRANSFER, to: still, blocks: blocks(40).into() });
    write(&sender, 0);
    sender.order(MoverOrder::Stop(TRANSFER));
    // What does not concern it goes on meanwhile, and nothing says that its blocks are not read any more.
    let other = TransferId(5);
    sender.order(MoverOrder::Fence(other));
    assert!(matches!(sender.hears_of_handoff(), HandoffInput::Fenced(fenced) if fenced == other), "{kind}");
    let early = sender.told.recv_timeout(Duration::from_millis(300));
    assert!(early.is_err(), "{kind}: quiet while a peer may still read");
    (sender, end)
}

#[test]
fn quiet_is_said_once_a_peer_that_stood_still_has_let_go() {
    for kind in FAR {
        let (sender, mut end) = stopped_before_one_that_stands_still(kind, Duration::from_secs(20));
        let (mut events, start) = (Vec::new(), StdInstant::now());
        let word = loop {
            end.poll(Duration::from_millis(1), &mut events);
            if let Ok(word) = sender.told.try_recv() {
                break word;
            }
            assert!(start.elapsed() < PATIENCE, "{kind}: it has let go");
        };
        let is_quiet =
            matches!(word, ReplicaWake::Handoff { input: HandoffInput::Quiet(transfer), .. } if transfer == TRANSFER);
        assert!(is_quiet, "{kind}");
    }
}

/// Without this a few that stand still would in time take all room that a mover has.
fn is_given_up(kind: Kind) {
    let (sender, _end) = stopped_before_one_that_stands_still(kind, Duration::from_millis(200));
    assert!(matches!(sender.hears_of_handoff(), HandoffInput::Quiet(TRANSFER)), "{kind}");
    assert_eq!(sender.kinds(), [None], "{kind}");
}

#[test]
fn a_peer_that_stands_still_for_good_is_given_up_over_tcp() {
    is_given_up(Kind::Tcp);
}

#[test]
fn a_peer_that_stands_still_for_good_is_given_up_by_memfd() {
    is_given_up(Kind::Memfd);
}

#[test]
fn a_peer_that_one_gateway_has_lost_is_reached_as_long_as_it_is_there() {
    let (sender, mut receiver) = pair(&[Kind::Tcp]);
    sender.until_connected(Kind::Tcp);
    let (replica, life) = (receiver.me.replica, receiver.life);
    let gone = || MoverWake::PeerGone { replica, life };
    sender.mailbox.try_push(PEERS, gone()).expect("room");
    for index in 0..3 {
        write(&sender, index);
        sender.passes_on(&receiver);
        let (sent, arrived) = chunk(&receiver, index);
        assert_eq!(sent, arrived);
    }
    assert_eq!(sender.kinds(), [Some(Kind::Tcp)]);
    // When it really goes, it is forgotten at once.
    receiver.end();
    let start = StdInstant::now();
    while !sender.kinds().is_empty() {
        assert!(start.elapsed() < PATIENCE, "{:?}", sender.ways.all());
        std::thread::sleep(Duration::from_millis(2));
    }
    sender.order(MoverOrder::Stop(TRANSFER));
    assert!(matches!(sender.hears_of_handoff(), HandoffInput::Quiet(TRANSFER)));
}

#[test]
fn the_next_kind_is_taken_when_one_does_not_come_about_and_the_reason_is_kept() {
    let kinds = [Kind::Memfd, Kind::Tcp];
    let (sender, receiver) = (Mover::new(1, 1, &kinds), Mover::new(2, 1, &kinds));
    receiver.meet(&sender);
    // As between two containers of one host: the socket's name is known and nobody is there.
    let penstock_transport::Address::Memfd(path) =
        penstock_transport::Descriptor::decode(&receiver.descriptors[0]).expect("a descriptor").address
    else {
        panic!("memfd comes first");
    };
    std::fs::remove_file(path).expect("it is there");
    sender.meet(&receiver);
    sender.until_connected(Kind::Tcp);
    let way = sender.ways.all().remove(0);
    assert_eq!(
        way.why, "tcp: both ends have it, and it works anywhere; not memfd (it was tried and failed)",
        "{way:?}"
    );
    begin(&sender, &receiver);
    write(&sender, 0);
    sender.passes_on(&receiver);
    let (sent, arrived) = chunk(&receiver, 0);
    assert_eq!(sent, arrived);
}

#[test]
fn a_lost_connection_is_made_again_and_chunks_that_waited_are_written() {
    let sender = Mover::new(1, 1, &[Kind::Tcp]);
    let receiver = Mover::new(2, 1, &[Kind::Tcp]);
    receiver.meet(&sender);
    let mut target = penstock_transport::Descriptor::decode(&receiver.descriptors[0]).expect("a descriptor");
    let penstock_transport::Address::Tcp(address) = target.address else { panic!("it is TCP") };
    let relay = Relay::new(address);
    target.address = penstock_transport::Address::Tcp(relay.address);
    let (replica, life, descriptors) = (receiver.me.replica, receiver.life, vec![target.encode()]);
    sender.mailbox.try_push(PEERS, MoverWake::Peer { replica, life, descriptors }).expect("room");
    sender.until_connected(Kind::Tcp);
    begin(&sender, &receiver);
    for round in 0..3 {
        relay.cut();
        // It waits for the next connection.
        write(&sender, round);
        let until = StdInstant::now() + PATIENCE;
        while sender.wire.try_recv().map(|bytes| receiver.hand(Landed::decode(&bytes).expect("its own"))).is_err() {
            assert!(StdInstant::now() < until, "{:?}", sender.ways.all());
            // One that was under way is lost with the connection; the machine has it written again, as here.
            std::thread::sleep(Duration::from_millis(20));
            write(&sender, round);
        }
        let (sent, arrived) = chunk(&receiver, round);
        assert_eq!(sent, arrived, "round {round}");
        while let Ok(bytes) = sender.wire.recv_timeout(Duration::from_millis(200)) {
            drop(bytes);
        }
    }
}

/// Passes bytes on until it is cut, and for those who come after that again.
struct Relay {
    address: std::net::SocketAddr,
    streams: Arc<std::sync::Mutex<Vec<std::net::TcpStream>>>,
}

impl Relay {
    fn new(target: std::net::SocketAddr) -> Self {
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let streams: Arc<std::sync::Mutex<Vec<TcpStream>>> = Arc::default();
        let kept = Arc::clone(&streams);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(target) else { return };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut to) = (from.try_clone().expect("a stream"), to.try_clone().expect("a stream"));
                    std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                }
                kept.lock().expect("nobody panics here").extend([client, server]);
            }
        });
        Self { address, streams }
    }

    fn cut(&self) {
        for stream in self.streams.lock().expect("nobody panics here").drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
