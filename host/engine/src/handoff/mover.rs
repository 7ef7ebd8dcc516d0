//! One replica's mover: copies chunks, sums up, lets write and shuts out. Several copies may be under way; it waits for its own replica's
//! loop, for its transports and for time, and never for another mover.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use penstock_base::{BlockRef, Instant, ReplicaEpoch, ReplicaId, TransferId};
use penstock_exec::SampledToken;
use penstock_sched::handoff::{Between, Grid, Part, Peer, Seal, SenderWord, ToReceiver, chunk_sum};
use penstock_sched::replica::HandoffInput;
use penstock_transport::{
    Direction, Event, GrantId, OpId, PeerId, Region, Span, Touch, Transfer, Transport, TransportError, Watch,
};

use super::digest;
use super::landed::Landed;
use super::outside::Outside;
use super::peers::Peers;
use super::setup::Prepared;
use super::ways::Ways;
use crate::mailbox::{Lane, Mailbox};
use crate::replica_wake::ReplicaWake;

/// What must not be lost.
pub(crate) const ORDERS: Lane = Lane(0);
/// Chunks to write; one that finds no room is said again.
pub(crate) const WRITES: Lane = Lane(1);
/// Chunks that others have written; likewise.
pub(crate) const LANDED: Lane = Lane(2);
/// The end of an epoch.
pub(crate) const RESET: Lane = Lane(3);
/// Movers of other processes that come and go; whoever finds no room says it again.
pub(crate) const PEERS: Lane = Lane(4);

/// Bounds of the lanes.
pub(crate) fn lanes() -> [usize; 5] {
    // Orders: a few for each hand-off, and one for each step that computes its prompt.
    [16_384, WAITING_MAX, 4_096, 1, 2_048]
}

/// Chunks that wait for a connection or for room. One past it is said again.
const WAITING_MAX: usize = 1_024;
/// Hand-offs into this replica that are remembered: those under way, and some that were given up.
const RECEIVED_MAX: usize = 256;

/// Why a mover wakes up.
#[derive(Debug)]
pub(crate) enum MoverWake {
    /// Its replica's machine wants something done.
    Order { me: Peer, order: MoverOrder },
    /// Somebody has written a chunk here.
    Landed(Landed),
    /// This epoch is over: nothing of it is read or written any more once the answer comes.
    Reset(ReplicaEpoch),
    /// The mover of a replica in another process, and how it is reached: descriptors of its endpoints, of one life of its process.
    Peer { replica: ReplicaId, life: u64, descriptors: Vec<Vec<u8>> },
    /// A gateway has lost this life of it.
    PeerGone { replica: ReplicaId, life: u64 },
}

/// What a machine wants done. See [`HandoffEffect`](penstock_sched::replica::HandoffEffect).
#[derive(Debug)]
pub(crate) enum MoverOrder {
    Send { transfer: TransferId, grid: Grid },
    Sources { transfer: TransferId, blocks: Vec<BlockRef> },
    Bind { transfer: TransferId, to: Peer, blocks: Arc<[BlockRef]> },
    Write { transfer: TransferId, index: u32, stamp: Instant },
    Seal { transfer: TransferId, tail: Vec<SampledToken> },
    Stop(TransferId),
    Grant { transfer: TransferId, to: Peer, grid: Grid, blocks: Arc<[BlockRef]> },
    Fence(TransferId),
    Digest(TransferId),
}

struct Sent {
    grid: Grid,
    sources: Vec<BlockRef>,
    bound: Option<(Peer, Arc<[BlockRef]>)>,
    tail: Option<Vec<SampledToken>>,
    /// Digests of chunks that were computed; a block that is read does not change.
    digests: BTreeMap<u32, u64>,
}

struct Received {
    from: Peer,
    /// What the transports call the mover that may write.
    writer: PeerId,
    grid: Grid,
    blocks: Arc<[BlockRef]>,
    tail: Vec<SampledToken>,
    fenced: bool,
}

/// A chunk that is to be written.
struct Chunk {
    me: Peer,
    transfer: TransferId,
    index: u32,
    stamp: Instant,
    /// It is not begun after this.
    until: StdInstant,
}

/// A copy under way, until nothing of it is read or written any more.
struct Copying {
    end: usize,
    started: StdInstant,
    bytes: u64,
    /// What is said once it lies there.
    landed: Landed,
    /// Its connection was closed since it did not settle.
    is_given_up: bool,
}

/// A fence that is not certain yet: these endpoints may still let something land.
struct Fencing {
    me: Peer,
    ends: BTreeSet<usize>,
}

/// The end of an epoch that is not certain yet.
struct Resetting {
    epoch: ReplicaEpoch,
    /// Reads of a peer that does not answer are not waited for any longer: what they find does not fit its sum.
    until: StdInstant,
}

/// See the module.
pub(crate) struct MoverLoop<O> {
    outside: O,
    replica: ReplicaId,
    ends: Vec<Box<dyn Transport>>,
    peers: Peers,
    region: Region,
    layers: u32,
    copy_max: Duration,
    sent: BTreeMap<TransferId, Sent>,
    received: BTreeMap<TransferId, Received>,
    /// Oldest first.
    order: VecDeque<TransferId>,
    /// Given up to make room while somebody might still write, and who.
    evicted: BTreeMap<TransferId, PeerId>,
    /// At most [`WAITING_MAX`], oldest first.
    waiting: VecDeque<Chunk>,
    /// Something has changed that those may have waited for.
    may_write: bool,
    /// At most as many as the endpoints take.
    copies: BTreeMap<OpId, Copying>,
    /// Whose reading ends with the last copy.
    stopping: BTreeMap<TransferId, Peer>,
    fencing: BTreeMap<TransferId, Fencing>,
    resetting: Option<Resetting>,
    next_op: u64,
    scratch: Vec<u8>,
}

impl<O: Outside> MoverLoop<O> {
    pub fn new(outside: O, replica: ReplicaId, prepared: Prepared, ways: Ways) -> Self {
        let Prepared { mut ends, region, layers, order, copy_max, peers: known } = prepared;
        let mut peers = Peers::new(replica, &ends, order, ways);
        for (peer, life, descriptors) in known.iter() {
            peers.introduce((*peer, *life), descriptors, &mut ends);
        }
        Self {
            outside,
            replica,
            ends,
            peers,
            region,
            layers,
            copy_max,
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
            order: VecDeque::new(),
            evicted: BTreeMap::new(),
            waiting: VecDeque::new(),
            may_write: false,
            copies: BTreeMap::new(),
            stopping: BTreeMap::new(),
            fencing: BTreeMap::new(),
            resetting: None,
            next_op: 0,
            scratch: Vec::new(),
        }
    }

    /// Runs until its mailbox is closed.
    pub fn run(mut self, mailbox: &Mailbox<MoverWake>) {
        let (mut wakes, mut events) = (Vec::new(), Vec::new());
        loop {
            mailbox.hush();
            mailbox.take_all(&mut wakes, Some(StdInstant::now()));
            if wakes.is_empty() && mailbox.is_closed() {
                return;
            }
            let mut moved = !wakes.is_empty();
            wakes.drain(..).for_each(|wake| self.wake(wake));
            for end in 0..self.ends.len() {
                self.ends[end].poll(Duration::ZERO, &mut events);
                moved |= !events.is_empty();
                events.drain(..).for_each(|event| self.hear(end, event));
            }
            let now = StdInstant::now();
            self.peers.turn(now, &mut self.ends);
            self.give_up_stuck(now);
            self.write_waiting(now);
            self.try_reset(now);
            if !moved {
                self.rest(mailbox, now);
            }
        }
    }

    /// Waits for the mailbox, the transports, or the next thing that is due.
    fn rest(&mut self, mailbox: &Mailbox<MoverWake>, now: StdInstant) {
        let mut watch = Watch::new(Duration::from_secs(3_600));
        match mailbox.bell() {
            Some(bell) => watch.add(bell),
            None => watch.at_most(Duration::from_millis(1)),
        }
        let due = [self.peers.next_turn(), self.waiting.front().map(|chunk| chunk.until), self.next_stuck()];
        for due in due.into_iter().flatten() {
            watch.at_most(due.saturating_duration_since(now));
        }
        if self.resetting.is_some() {
            watch.at_most(Duration::from_millis(5));
        }
        self.ends.iter_mut().for_each(|end| end.watch(&mut watch));
        watch.wait();
    }

    fn wake(&mut self, wake: MoverWake) {
        match wake {
            MoverWake::Order { me, order } => self.obey(me, order),
            MoverWake::Landed(landed) => self.landed(landed),
            MoverWake::Reset(epoch) => self.reset(epoch),
            MoverWake::Peer { replica, life, descriptors } => {
                self.peers.introduce((replica, life), &descriptors, &mut self.ends);
            }
            MoverWake::PeerGone { replica, life } => self.peers.lose_sight((replica, life), &mut self.ends),
        }
    }

    fn hear(&mut self, end: usize, event: Event) {
        match event {
            Event::Connected { peer } => {
                self.peers.connected(end, peer);
                self.may_write = true;
            }
            Event::Lost { peer, why } => self.peers.lost(end, peer, &why, &mut self.ends),
            Event::Ended { op, outcome, settled } => {
                self.may_write = true;
                if let Some(copying) = self.copies.get(&op) {
                    match outcome {
                        Ok(()) => {
                            self.outside.moved(copying.bytes, copying.started.elapsed());
                            self.outside.post(copying.landed.clone());
                        }
                        Err(failure) => {
                            let transfer = copying.landed.transfer.0;
                            tracing::debug!(replica = self.replica.0, transfer, %failure, "a chunk was not written");
                            self.outside.failed();
                        }
                    }
                }
                if settled {
                    self.settled(op);
                }
            }
            Event::Settled { op } => self.settled(op),
            Event::Withdrawn { grant, .. } => self.withdrawn(end, TransferId(grant.0)),
            // What others have written here is told by themselves, and their leaving ends no grant.
            _ => {}
        }
    }

    fn obey(&mut self, me: Peer, order: MoverOrder) {
        let say = |input| ReplicaWake::Handoff { to: me, input };
        match order {
            MoverOrder::Send { transfer, grid } => {
                let sent = Sent { grid, sources: Vec::new(), bound: None, tail: None, digests: BTreeMap::new() };
                self.sent.insert(transfer, sent);
            }
            MoverOrder::Sources { transfer, blocks } => {
                if let Some(sent) = self.sent.get_mut(&transfer) {
                    sent.sources.extend(blocks);
                }
            }
            MoverOrder::Bind { transfer, to, blocks } => {
                if let Some(sent) = self.sent.get_mut(&transfer) {
                    sent.bound = Some((to, blocks));
                }
            }
            MoverOrder::Write { transfer, index, stamp } => {
                let until = StdInstant::now() + self.copy_max;
                self.write_or_wait(Chunk { me, transfer, index, stamp, until });
            }
            MoverOrder::Seal { transfer, tail } => {
                let tokens = tail.len() as u32;
                if let Some(sum) = self.seal(transfer, tail) {
                    let seal = Seal { sum, sampled_tokens: tokens };
                    self.outside.tell(say(HandoffInput::Sealed { transfer, seal }));
                }
            }
            MoverOrder::Stop(transfer) => self.stop(me, transfer),
            MoverOrder::Grant { transfer, to, grid, blocks } => self.grant(transfer, to, grid, blocks),
            MoverOrder::Fence(transfer) => self.fence(me, transfer),
            MoverOrder::Digest(transfer) => {
                self.order.retain(|open| *open != transfer);
                let sum = self.received.remove(&transfer).and_then(|received| self.sum_of(&received));
                // What cannot be read fits no seal.
                self.outside.tell(say(HandoffInput::Digested { transfer, sum: sum.unwrap_or(0) }));
            }
        }
    }

    // --- The end of an epoch ---------------------------------------------------------------------------------------------------

    fn reset(&mut self, epoch: ReplicaEpoch) {
        self.sent.clear();
        self.received.clear();
        self.order.clear();
        self.evicted.clear();
        self.waiting.clear();
        self.stopping.clear();
        self.fencing.clear();
        for (op, copying) in &self.copies {
            // What has ended already answers that it is not known, or changes nothing.
            let _ = self.ends[copying.end].cancel(*op);
        }
        let now = StdInstant::now();
        self.resetting = Some(Resetting { epoch, until: now + self.copy_max });
        self.try_reset(now);
    }

    fn try_reset(&mut self, now: StdInstant) {
        let Some(resetting) = &self.resetting else { return };
        let mut is_certain = true;
        for end in &mut self.ends {
            is_certain &= end.withdraw_all() == Touch::Settled;
        }
        if is_certain && (self.copies.is_empty() || resetting.until <= now) {
            let epoch = resetting.epoch;
            self.resetting = None;
            self.outside.tell(ReplicaWake::MoverQuiet { epoch });
        }
    }

    // --- Sending ---------------------------------------------------------------------------------------------------------------
    fn sent_digest(&mut self, transfer: TransferId, index: u32) -> Option<u64> {
        let sent = self.sent.get_mut(&transfer)?;
        if let Some(known) = sent.digests.get(&index) {
            return Some(*known);
        }
        let digest = match sent.grid.part(index)? {
            Part::Tail => digest::of_tail(sent.tail.as_ref()?),
            part @ Part::Kv { first_block, blocks, .. } => {
                let held = (sent.grid.first_block, sent.sources.as_slice());
                if sent.sources.len() < (first_block + blocks - sent.grid.first_block) as usize {
                    return None;
                }
                digest::of_part(&self.region, held, self.layers, part, &mut self.scratch).ok()?
            }
        };
        sent.digests.insert(index, digest);
        Some(digest)
    }

    fn seal(&mut self, transfer: TransferId, tail: Vec<SampledToken>) -> Option<u64> {
        let sent = self.sent.get_mut(&transfer)?;
        sent.tail = Some(tail);
        let chunks = sent.grid.chunks();
        let mut sum = 0u64;
        for index in 0..chunks {
            sum = sum.wrapping_add(chunk_sum(index, self.sent_digest(transfer, index)?));
        }
        Some(sum)
    }

    /// Writes a chunk, or keeps it until there is a connection and room. What finds no place is said again.
    ///
    /// A chunk that waits or is under way is not written a second time: the machine says it again when it hears nothing for a while, and on a
    /// link that is busy for longer than that the repetitions would take the place of everything else.
    fn write_or_wait(&mut self, chunk: Chunk) {
        let (transfer, index) = (chunk.transfer, chunk.index);
        if self.copies.values().any(|copying| (copying.landed.transfer, copying.landed.index) == (transfer, index)) {
            return;
        }
        if let Some(waits) = self.waiting.iter_mut().find(|waits| (waits.transfer, waits.index) == (transfer, index)) {
            // It keeps its place, and goes with the newer stamp.
            *waits = chunk;
            return;
        }
        let Some(chunk) = self.write(chunk) else { return };
        if self.waiting.len() >= WAITING_MAX {
            return self.outside.failed();
        }
        self.waiting.push_back(chunk);
    }

    fn write_waiting(&mut self, now: StdInstant) {
        while self.waiting.front().is_some_and(|chunk| chunk.until <= now) {
            self.waiting.pop_front();
            self.outside.failed();
        }
        if !std::mem::take(&mut self.may_write) {
            return;
        }
        for _ in 0..self.waiting.len() {
            if let Some(chunk) = self.waiting.pop_front().and_then(|chunk| self.write(chunk)) {
                self.waiting.push_back(chunk);
            }
        }
    }

    /// Begins to copy a chunk. Returns it when it must wait.
    fn write(&mut self, chunk: Chunk) -> Option<Chunk> {
        let Chunk { me, transfer, index, stamp, .. } = chunk;
        let digest = self.sent_digest(transfer, index)?;
        let sent = self.sent.get(&transfer)?;
        let ((to, targets), part) = (sent.bound.as_ref()?, sent.grid.part(index)?);
        let (to, first) = (*to, sent.grid.first_block);
        let landed = Landed { transfer, from: me, to, stamp, index, sent: digest, tail: None };
        let Part::Kv { first_block, blocks, first_layer, layers } = part else {
            self.outside.post(Landed { tail: sent.tail.clone(), ..landed });
            return None;
        };
        let at = (first_block - first) as usize..(first_block - first + blocks) as usize;
        let (from, into) = (sent.sources.get(at.clone())?, targets.get(at)?);
        let span = |(from, into): (&BlockRef, &BlockRef)| Span {
            local: from.index * self.layers + first_layer,
            remote: into.index * self.layers + first_layer,
            blocks: layers,
        };
        let spans: Vec<Span> = from.iter().zip(into).map(span).collect();
        let Some((end, peer)) = self.peers.way(to.replica) else {
            if self.peers.identity(to.replica).is_some() {
                return Some(chunk);
            }
            tracing::warn!(
                replica = self.replica.0,
                peer = to.replica.0,
                "a chunk for a replica whose mover is not known"
            );
            self.outside.failed();
            return None;
        };
        self.next_op += 1;
        let op = OpId(self.next_op);
        let started = StdInstant::now();
        let moved: u64 = spans.iter().map(|span| u64::from(span.blocks)).sum();
        let (direction, deadline) = (Direction::Write, started + self.copy_max);
        let order = Transfer { op, peer, direction, local: 0, remote: 0, spans, deadline };
        match self.ends[end].start_under(GrantId(transfer.0), order) {
            Ok(()) => {
                let bytes = moved * self.region.block_bytes() as u64;
                self.copies.insert(op, Copying { end, started, bytes, landed, is_given_up: false });
                None
            }
            Err(TransportError::Busy { .. } | TransportError::NotConnected(_)) => Some(chunk),
            Err(error) => {
                tracing::warn!(replica = self.replica.0, transfer = transfer.0, %error, "a chunk cannot be written");
                self.outside.failed();
                None
            }
        }
    }

    /// Reads nothing of this transfer any more, and says so once that is certain.
    fn stop(&mut self, me: Peer, transfer: TransferId) {
        self.sent.remove(&transfer);
        self.waiting.retain(|chunk| chunk.transfer != transfer);
        for (op, copying) in self.copies.iter().filter(|(_, copying)| copying.landed.transfer == transfer) {
            // As for a reset.
            let _ = self.ends[copying.end].cancel(*op);
        }
        self.stopping.insert(transfer, me);
        self.try_quiet(transfer);
    }

    /// When a copy will have been under way for so long that its peer stands still: as long again as it may take.
    fn next_stuck(&self) -> Option<StdInstant> {
        let open = self.copies.values().filter(|copying| !copying.is_given_up);
        open.map(|copying| copying.started + self.copy_max * 2).min()
    }

    /// Closes connections to peers that stand still: what is not settled takes room that others need, and is given up with the connection.
    fn give_up_stuck(&mut self, now: StdInstant) {
        if self.next_stuck().is_none_or(|due| due > now) {
            return;
        }
        let copy_max = self.copy_max;
        let mut stuck = BTreeSet::new();
        for copying in self.copies.values_mut().filter(|copying| copying.started + copy_max * 2 <= now) {
            copying.is_given_up = true;
            stuck.insert((copying.end, copying.landed.to.replica));
        }
        for (end, replica) in stuck {
            if let Some((_, peer)) = self.peers.way(replica).filter(|(up, _)| *up == end) {
                tracing::warn!(
                    replica = self.replica.0,
                    peer = replica.0,
                    "a mover does not answer: its connection is closed"
                );
                self.ends[end].disconnect(peer);
            }
        }
    }

    fn settled(&mut self, op: OpId) {
        if let Some(copying) = self.copies.remove(&op) {
            self.try_quiet(copying.landed.transfer);
        }
    }

    fn try_quiet(&mut self, transfer: TransferId) {
        if self.copies.values().any(|copying| copying.landed.transfer == transfer) {
            return;
        }
        if let Some(me) = self.stopping.remove(&transfer) {
            self.outside.tell(ReplicaWake::Handoff { to: me, input: HandoffInput::Quiet(transfer) });
        }
    }

    // --- Receiving -------------------------------------------------------------------------------------------------------------

    /// Lets one mover write, by whichever transport it comes.
    fn grant(&mut self, transfer: TransferId, from: Peer, grid: Grid, blocks: Arc<[BlockRef]>) {
        let Some(writer) = self.peers.identity(from.replica) else {
            // Then nothing lands, and the hand-off falls back.
            tracing::warn!(
                replica = self.replica.0,
                peer = from.replica.0,
                "blocks for a replica whose mover is not known"
            );
            return;
        };
        let layers = self.layers;
        let runs: Vec<_> = blocks.iter().map(|block| block.index * layers..(block.index + 1) * layers).collect();
        for at in 0..self.ends.len() {
            let end = &mut self.ends[at];
            if let Err(error) = end.grant(writer, GrantId(transfer.0), 0, &runs) {
                let kind = end.kind();
                tracing::error!(replica = self.replica.0, transfer = transfer.0, %kind, %error, "blocks cannot be granted");
                for end in &mut self.ends[..at] {
                    // Nobody was told of it, so that nothing is under way.
                    let _ = end.withdraw(writer, GrantId(transfer.0));
                }
                return;
            }
        }
        while self.order.len() >= RECEIVED_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            let Some(received) = self.received.remove(&oldest) else { continue };
            let ends = self.withdraw(received.writer, oldest);
            if !ends.is_empty() {
                // Asked for later, it is told when it is certain, and not before.
                self.evicted.insert(oldest, received.writer);
            }
        }
        self.order.push_back(transfer);
        self.received.insert(transfer, Received { from, writer, grid, blocks, tail: Vec::new(), fenced: false });
    }

    /// Takes a grant back everywhere. Returns the endpoints where that is not certain yet.
    fn withdraw(&mut self, writer: PeerId, transfer: TransferId) -> BTreeSet<usize> {
        let mut open = BTreeSet::new();
        for (at, end) in self.ends.iter_mut().enumerate() {
            if end.withdraw(writer, GrantId(transfer.0)) == Touch::Quarantined {
                open.insert(at);
            }
        }
        open
    }

    fn fence(&mut self, me: Peer, transfer: TransferId) {
        let mut ends = BTreeSet::new();
        if let Some(received) = self.received.get_mut(&transfer) {
            received.fenced = true;
            let writer = received.writer;
            ends = self.withdraw(writer, transfer);
        } else if let Some(writer) = self.evicted.remove(&transfer) {
            ends = self.withdraw(writer, transfer);
        }
        if ends.is_empty() {
            self.fencing.remove(&transfer);
            self.outside.tell(ReplicaWake::Handoff { to: me, input: HandoffInput::Fenced(transfer) });
        } else {
            self.fencing.insert(transfer, Fencing { me, ends });
        }
    }

    fn withdrawn(&mut self, end: usize, transfer: TransferId) {
        let Some(fencing) = self.fencing.get_mut(&transfer) else { return };
        fencing.ends.remove(&end);
        if fencing.ends.is_empty() {
            let me = fencing.me;
            self.fencing.remove(&transfer);
            self.outside.tell(ReplicaWake::Handoff { to: me, input: HandoffInput::Fenced(transfer) });
        }
    }

    fn landed(&mut self, landed: Landed) {
        let Landed { transfer, from, to, stamp, index, sent, tail } = landed;
        let Some(received) = self.received.get_mut(&transfer) else { return };
        let Some(part) = received.grid.part(index).filter(|_| received.from == from && !received.fenced) else {
            return;
        };
        let arrived = match part {
            Part::Tail => {
                received.tail = tail.unwrap_or_default();
                digest::of_tail(&received.tail)
            }
            part => {
                let held = (received.grid.first_block, &*received.blocks);
                match digest::of_part(&self.region, held, self.layers, part, &mut self.scratch) {
                    Ok(digest) => digest,
                    Err(_) => return,
                }
            }
        };
        if part == Part::Tail {
            let tail = received.tail.clone();
            self.outside.tell(ReplicaWake::Tail { to, transfer, tail });
        }
        let body = ToReceiver { stamp, word: SenderWord::Chunk { index, sent, arrived } };
        let input = HandoffInput::OfSender(Between { transfer, from, to, body });
        self.outside.tell(ReplicaWake::Handoff { to, input });
    }

    fn sum_of(&mut self, received: &Received) -> Option<u64> {
        let mut sum = 0u64;
        for index in 0..received.grid.chunks() {
            let digest = match received.grid.part(index)? {
                Part::Tail => digest::of_tail(&received.tail),
                part => {
                    let held = (received.grid.first_block, &*received.blocks);
                    digest::of_part(&self.region, held, self.layers, part, &mut self.scratch).ok()?
                }
            };
            sum = sum.wrapping_add(chunk_sum(index, digest));
        }
        Some(sum)
    }
}
