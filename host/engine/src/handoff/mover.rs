//! One replica's mover: copies chunks, sums up, lets write and shuts out. It waits for its own replica's loop and for nobody else.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use penstock_base::{BlockRef, Instant, ReplicaEpoch, ReplicaId, TransferId};
use penstock_exec::SampledToken;
use penstock_sched::handoff::{Between, Grid, Part, Peer, Seal, SenderWord, ToReceiver, chunk_sum};
use penstock_sched::replica::HandoffInput;
use penstock_transport::{ByReference, Direction, Event, GrantId, OpId, PeerId, Region, Span, Transfer, Transport};

use super::digest;
use super::setup::Prepared;
use crate::mailbox::Lane;
use crate::replica_wake::{self, ReplicaWake};
use crate::wiring::Wiring;

/// What must not be lost.
pub(crate) const ORDERS: Lane = Lane(0);
/// Chunks to write; one that finds no room is said again.
pub(crate) const WRITES: Lane = Lane(1);
/// Chunks that others have written; likewise.
pub(crate) const LANDED: Lane = Lane(2);
/// The end of an epoch.
pub(crate) const RESET: Lane = Lane(3);

/// Bounds of the lanes.
pub(crate) fn lanes() -> [usize; 4] {
    // Orders: a few for each hand-off, and one for each step that computes its prompt.
    [16_384, 1_024, 4_096, 1]
}

/// How long one chunk may take; memory is copied at gigabytes a second.
const COPY_MAX: Duration = Duration::from_secs(1);
/// Hand-offs into this replica that are remembered: those under way, and some that were given up.
const RECEIVED_MAX: usize = 256;

/// Why a mover wakes up.
pub(crate) enum MoverWake {
    /// Its replica's machine wants something done.
    Order { me: Peer, order: MoverOrder },
    /// Somebody has written a chunk here.
    Landed(Landed),
    /// This epoch is over: nothing of it is read or written any more once the answer comes.
    Reset(ReplicaEpoch),
}

/// What a machine wants done. See [`HandoffEffect`](penstock_sched::replica::HandoffEffect).
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

/// A chunk that was written.
pub(crate) struct Landed {
    transfer: TransferId,
    from: Peer,
    to: Peer,
    stamp: Instant,
    index: u32,
    sent: u64,
    /// With the last chunk.
    tail: Option<Vec<SampledToken>>,
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
    grid: Grid,
    blocks: Arc<[BlockRef]>,
    tail: Vec<SampledToken>,
    fenced: bool,
}

/// See the module.
pub(crate) struct MoverLoop {
    wiring: Arc<Wiring>,
    replica: ReplicaId,
    transport: ByReference,
    region: Region,
    layers: u32,
    sent: BTreeMap<TransferId, Sent>,
    received: BTreeMap<TransferId, Received>,
    /// Oldest first.
    order: VecDeque<TransferId>,
    next_op: u64,
    scratch: Vec<u8>,
}

fn endpoint(peer: Peer) -> PeerId {
    PeerId { endpoint: u64::from(peer.replica.0), epoch: 1 }
}

impl MoverLoop {
    pub fn new(wiring: Arc<Wiring>, replica: ReplicaId, prepared: Prepared) -> Self {
        let Prepared { mut transport, region, layers, peers } = prepared;
        for (index, descriptor) in peers.iter().enumerate() {
            if index != replica.0 as usize
                && let Err(error) = transport.connect(descriptor)
            {
                tracing::error!(replica = replica.0, %error, "a replica cannot reach another one's memory");
            }
        }
        Self {
            wiring,
            replica,
            transport,
            region,
            layers,
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
            order: VecDeque::new(),
            next_op: 0,
            scratch: Vec::new(),
        }
    }

    /// Runs until its mailbox is closed.
    pub fn run(mut self) {
        let wiring = Arc::clone(&self.wiring);
        let Some(mailbox) = wiring.mover(self.replica) else { return };
        let mut wakes = Vec::new();
        loop {
            mailbox.take_all(&mut wakes, None);
            if wakes.is_empty() {
                return;
            }
            for wake in wakes.drain(..) {
                match wake {
                    MoverWake::Order { me, order } => self.obey(me, order),
                    MoverWake::Landed(landed) => self.landed(landed),
                    MoverWake::Reset(epoch) => {
                        // By reference it is certain at once.
                        let _ = self.transport.withdraw_all();
                        self.sent.clear();
                        self.received.clear();
                        self.order.clear();
                        self.tell(ReplicaWake::MoverQuiet { epoch });
                    }
                }
            }
        }
    }

    /// To the own replica's loop: it must hear this.
    fn tell(&self, wake: ReplicaWake) {
        let port = self.wiring.replica(self.replica);
        if let Some(mailbox) = port.as_ref().and_then(|port| port.local()) {
            let _ = mailbox.push_waiting(replica_wake::MOVED, wake);
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
            MoverOrder::Write { transfer, index, stamp } => self.write(me, transfer, index, stamp),
            MoverOrder::Seal { transfer, tail } => {
                let tokens = tail.len() as u32;
                if let Some(sum) = self.seal(transfer, tail) {
                    let seal = Seal { sum, sampled_tokens: tokens };
                    self.tell(say(HandoffInput::Sealed { transfer, seal }));
                }
            }
            MoverOrder::Stop(transfer) => {
                // Copies are made inside of one order: none is under way between two.
                self.sent.remove(&transfer);
                self.tell(say(HandoffInput::Quiet(transfer)));
            }
            MoverOrder::Grant { transfer, to, grid, blocks } => self.grant(transfer, to, grid, blocks),
            MoverOrder::Fence(transfer) => {
                if let Some(received) = self.received.get_mut(&transfer) {
                    received.fenced = true;
                    let _ = self.transport.withdraw(endpoint(received.from), GrantId(transfer.0));
                }
                self.tell(say(HandoffInput::Fenced(transfer)));
            }
            MoverOrder::Digest(transfer) => {
                let sum = self.received.remove(&transfer).and_then(|received| self.sum_of(&received));
                // What cannot be read fits no seal.
                self.tell(say(HandoffInput::Digested { transfer, sum: sum.unwrap_or(0) }));
            }
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

    fn write(&mut self, me: Peer, transfer: TransferId, index: u32, stamp: Instant) {
        let Some(digest) = self.sent_digest(transfer, index) else { return };
        let Some(sent) = self.sent.get(&transfer) else { return };
        let (Some((to, targets)), Some(part)) = (&sent.bound, sent.grid.part(index)) else { return };
        let (to, first) = (*to, sent.grid.first_block);
        let mut tail = None;
        match part {
            Part::Tail => tail = sent.tail.clone(),
            Part::Kv { first_block, blocks, first_layer, layers } => {
                let at = (first_block - first) as usize..(first_block - first + blocks) as usize;
                let (Some(from), Some(into)) = (sent.sources.get(at.clone()), targets.get(at)) else { return };
                let span = |(from, into): (&BlockRef, &BlockRef)| Span {
                    local: from.index * self.layers + first_layer,
                    remote: into.index * self.layers + first_layer,
                    blocks: layers,
                };
                let spans: Vec<Span> = from.iter().zip(into).map(span).collect();
                if !self.copy(to, transfer, spans) {
                    return;
                }
            }
        }
        let landed = Landed { transfer, from: me, to, stamp, index, sent: digest, tail };
        if let Some(mailbox) = self.wiring.mover(to.replica) {
            // Lost without room: it is written again.
            let _ = mailbox.try_push(LANDED, MoverWake::Landed(landed));
        }
    }

    /// Copies and waits for it. False when it was turned away or came to nothing.
    fn copy(&mut self, to: Peer, transfer: TransferId, spans: Vec<Span>) -> bool {
        self.next_op += 1;
        let op = OpId(self.next_op);
        let started = StdInstant::now();
        let blocks: u64 = spans.iter().map(|span| u64::from(span.blocks)).sum();
        let order = Transfer {
            op,
            peer: endpoint(to),
            direction: Direction::Write,
            local: 0,
            remote: 0,
            spans,
            deadline: started + COPY_MAX,
        };
        let metrics = &self.wiring.metrics;
        if let Err(error) = self.transport.start_under(GrantId(transfer.0), order) {
            tracing::warn!(replica = self.replica.0, transfer = transfer.0, %error, "a chunk cannot be written");
            metrics.chunk_failed();
            return false;
        }
        let mut events = Vec::new();
        loop {
            self.transport.poll(COPY_MAX, &mut events);
            let ended = events.drain(..).find_map(|event| match event {
                Event::Ended { op: ended, outcome, .. } if ended == op => Some(outcome),
                _ => None,
            });
            match ended {
                None => {}
                Some(Ok(())) => {
                    metrics.chunk_moved(blocks * self.region.block_bytes() as u64, started.elapsed());
                    return true;
                }
                Some(Err(failure)) => {
                    tracing::debug!(replica = self.replica.0, transfer = transfer.0, %failure, "a chunk was not written");
                    metrics.chunk_failed();
                    return false;
                }
            }
        }
    }

    // --- Receiving -------------------------------------------------------------------------------------------------------------

    fn grant(&mut self, transfer: TransferId, from: Peer, grid: Grid, blocks: Arc<[BlockRef]>) {
        let layers = self.layers;
        let runs: Vec<_> = blocks.iter().map(|block| block.index * layers..(block.index + 1) * layers).collect();
        if let Err(error) = self.transport.grant(endpoint(from), GrantId(transfer.0), 0, &runs) {
            // Then nothing lands, and the hand-off falls back.
            tracing::error!(replica = self.replica.0, transfer = transfer.0, %error, "blocks cannot be granted");
            return;
        }
        while self.order.len() >= RECEIVED_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            if let Some(received) = self.received.remove(&oldest) {
                let _ = self.transport.withdraw(endpoint(received.from), GrantId(oldest.0));
            }
        }
        self.order.push_back(transfer);
        self.received.insert(transfer, Received { from, grid, blocks, tail: Vec::new(), fenced: false });
    }

    fn landed(&mut self, landed: Landed) {
        let Landed { transfer, from, to, stamp, index, sent, tail } = landed;
        // What others have written here is told by themselves; their notices only take room.
        self.transport.poll(Duration::ZERO, &mut Vec::new());
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
            self.tell(ReplicaWake::Tail { to, transfer, tail });
        }
        let body = ToReceiver { stamp, word: SenderWord::Chunk { index, sent, arrived } };
        let input = HandoffInput::OfSender(Between { transfer, from, to, body });
        self.tell(ReplicaWake::Handoff { to, input });
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
