//! How do bytes move when both memories are in this process? The end that starts an operation copies them, a piece at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::grants::Grants;
use crate::operations::Operations;
use crate::scatter::{Run, Scatter, copy};
use crate::{
    Address, Descriptor, Direction, Event, Failure, Gone, GrantId, Kind, OpId, PeerId, Refusal, Region, Setup, Touch,
    Transfer, Transport, TransportError, Watch, check_guarded,
};

/// Bytes copied while the target's gate is held: about a hundred microseconds, for which `revoke` may have to wait.
const PIECE_BYTES: usize = 1024 * 1024;
/// Bytes copied in one turn, after which others are looked at.
const TURN_BYTES: usize = 4 * PIECE_BYTES;
/// Landed operations an endpoint has not been told of yet. Past this, writers wait.
const INBOX_MAX: usize = 4_096;
/// Operations whose blocks were taken back; those forgotten first are long over.
const REVOKED_MAX: usize = 65_536;
/// How long a resting endpoint may not notice that a peer has closed, or has room again.
const NAP: Duration = Duration::from_millis(2);

/// Endpoints of this process by number.
static ENDPOINTS: LazyLock<Mutex<Registry>> = LazyLock::new(|| Mutex::new(Registry::default()));

#[derive(Default)]
struct Registry {
    next: u64,
    endpoints: BTreeMap<u64, Weak<Shared>>,
}

/// The part of an endpoint that others reach.
struct Shared {
    descriptor: Descriptor,
    regions: Vec<Region>,
    gate: Mutex<Gate>,
    /// Something has landed, or somebody has left.
    news: Condvar,
}

/// Held by whoever copies into the endpoint's memory, and by the endpoint when it takes blocks back.
#[derive(Default)]
struct Gate {
    is_closed: bool,
    landed: VecDeque<(PeerId, OpId, u64)>,
    revoked: BTreeSet<(PeerId, OpId)>,
    revoked_order: VecDeque<(PeerId, OpId)>,
    /// Who may write where, where the endpoint is guarded.
    grants: Grants,
    left: Vec<PeerId>,
}

impl Gate {
    /// Is all that an operation writes to granted to whoever writes, still?
    fn allows(&self, from: PeerId, copying: &Copying) -> bool {
        copying.grant.is_some_and(|grant| self.grants.allow(from, grant, copying.target.0, &copying.target.1))
    }
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        // A panic elsewhere leaves the gate's lists whole: each is changed in one step.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn registry() -> MutexGuard<'static, Registry> {
    ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Moves bytes between two memories of this process.
pub struct ByReference {
    number: u64,
    shared: Arc<Shared>,
    setup: Setup,
    peers: BTreeMap<PeerId, Arc<Shared>>,
    operations: Operations,
    copies: VecDeque<Copying>,
    /// What happened outside `poll`.
    untold: Vec<Event>,
}

struct Copying {
    op: OpId,
    peer: PeerId,
    from: Scatter,
    to: Scatter,
    done: u64,
    direction: Direction,
    /// Under which grant, and where it writes.
    grant: Option<GrantId>,
    target: (u16, Vec<Run>),
}

impl ByReference {
    /// An endpoint that others of this process can reach until it is dropped.
    ///
    /// # Errors
    ///
    /// For a setup without regions or with too many.
    pub fn new(setup: Setup) -> Result<Self, TransportError> {
        let mut registry = registry();
        let number = registry.next;
        let descriptor = Descriptor::new(&setup, Address::Reference(number))?;
        let shared = Arc::new(Shared {
            descriptor,
            regions: setup.regions.clone(),
            gate: Mutex::default(),
            news: Condvar::new(),
        });
        registry.next += 1;
        registry.endpoints.insert(number, Arc::downgrade(&shared));
        let operations = Operations::new(setup.limits);
        let (peers, copies) = (BTreeMap::new(), VecDeque::new());
        Ok(Self { number, shared, setup, peers, operations, copies, untold: Vec::new() })
    }

    fn begin(&mut self, transfer: Transfer, grant: Option<GrantId>) -> Result<(), TransportError> {
        let peer = self.peers.get(&transfer.peer).ok_or(TransportError::NotConnected(transfer.peer))?;
        let admitted = self.operations.admit(&transfer, &self.setup.regions, &peer.descriptor.regions)?;
        let target = (transfer.remote, admitted.remote.clone());
        let there = peer
            .regions
            .get(usize::from(transfer.remote))
            .ok_or(TransportError::UnknownRegion(transfer.remote))
            .and_then(|region| Scatter::new(region.clone(), admitted.remote))
            .inspect_err(|_| self.operations.forget(transfer.op))?;
        let Transfer { op, peer, direction, .. } = transfer;
        let (from, to) = match direction {
            Direction::Write => (admitted.local, there),
            Direction::Read => (there, admitted.local),
        };
        self.copies.push_back(Copying { op, peer, from, to, done: 0, direction, grant, target });
        Ok(())
    }

    /// Copies what the turn allows. Returns whether anything moved.
    fn turn(&mut self, events: &mut Vec<Event>) -> bool {
        let me = self.setup.identity;
        let mut budget = TURN_BYTES;
        let mut moved = false;
        for _ in 0..self.copies.len() {
            if budget == 0 {
                break;
            }
            let Some(mut copying) = self.copies.pop_front() else { break };
            // Operations of a peer that was lost are dropped with it.
            let Some(peer) = self.peers.get(&copying.peer) else { continue };
            let mut gate = peer.gate();
            if gate.is_closed {
                // Told with the peer's loss, below.
                self.copies.push_back(copying);
                continue;
            }
            let is_write = copying.direction == Direction::Write;
            if is_write && gate.revoked.contains(&(me, copying.op)) {
                drop(gate);
                let failure = Failure::Refused(Refusal::Revoked);
                self.operations.end(copying.op, Err(failure), Touch::Settled, events);
                moved = true;
                continue;
            }
            // Nobody reads a guarded memory, and nobody writes to it but under a grant.
            if peer.descriptor.is_guarded && !(is_write && gate.allows(me, &copying)) {
                drop(gate);
                let failure = Failure::Refused(Refusal::NotGranted);
                self.operations.end(copying.op, Err(failure), Touch::Settled, events);
                moved = true;
                continue;
            }
            let copied = copy(&copying.from, &copying.to, copying.done, PIECE_BYTES.min(budget));
            copying.done += copied as u64;
            budget -= copied;
            moved |= copied > 0;
            let bytes = copying.from.bytes();
            let is_blocked = is_write && gate.landed.len() >= INBOX_MAX;
            if copying.done < bytes || is_blocked {
                drop(gate);
                self.copies.push_back(copying);
                continue;
            }
            if is_write {
                gate.landed.push_back((me, copying.op, bytes));
                peer.news.notify_one();
            }
            drop(gate);
            self.operations.end(copying.op, Ok(()), Touch::Settled, events);
            moved = true;
        }
        moved
    }

    /// Tells what others have done here, and which peers have closed.
    fn hear(&mut self, events: &mut Vec<Event>) {
        let mut gate = self.shared.gate();
        events.extend(gate.landed.drain(..).map(|(peer, op, bytes)| Event::Landed { peer, op, bytes }));
        events.extend(gate.left.drain(..).map(|peer| Event::Left { peer }));
        drop(gate);
        let closed: Vec<PeerId> =
            self.peers.iter().filter(|(_, shared)| shared.gate().is_closed).map(|(peer, _)| *peer).collect();
        for peer in closed {
            self.lose(peer, Gone::Closed, events);
        }
    }

    fn lose(&mut self, peer: PeerId, why: Gone, events: &mut Vec<Event>) {
        let Some(shared) = self.peers.remove(&peer) else { return };
        self.copies.retain(|copying| copying.peer != peer);
        for op in self.operations.of_peer(peer) {
            self.operations.end(op, Err(Failure::PeerGone), Touch::Settled, events);
        }
        events.push(Event::Lost { peer, why });
        leave(&shared, self.setup.identity);
    }
}

/// Tells a peer that an endpoint will not write to it any more.
fn leave(peer: &Shared, me: PeerId) {
    let mut gate = peer.gate();
    if !gate.is_closed && !gate.left.contains(&me) {
        gate.left.push(me);
        peer.news.notify_one();
    }
}

impl Transport for ByReference {
    fn kind(&self) -> Kind {
        Kind::Reference
    }

    fn descriptor(&self) -> Descriptor {
        self.shared.descriptor.clone()
    }

    fn connect(&mut self, descriptor: &[u8]) -> Result<PeerId, TransportError> {
        let target = Descriptor::decode(descriptor)?;
        let peer = target.identity;
        let Address::Reference(number) = target.address else {
            return Err(TransportError::Descriptor("it is for another kind of transport"));
        };
        if self.peers.contains_key(&peer) {
            return Ok(peer);
        }
        if self.peers.len() >= self.setup.limits.peers_max {
            return Err(TransportError::Busy { what: "peers", limit: self.setup.limits.peers_max as u64 });
        }
        let found = if target.place.process == self.shared.descriptor.place.process {
            registry().endpoints.get(&number).and_then(Weak::upgrade)
        } else {
            None
        };
        self.untold.push(match found {
            None => Event::Lost { peer, why: Gone::Unreachable("no such endpoint in this process".to_owned()) },
            Some(shared) if shared.descriptor.identity != peer => Event::Lost { peer, why: Gone::Epoch },
            Some(shared) if shared.descriptor.token != target.token => Event::Lost { peer, why: Gone::Denied },
            Some(shared) => {
                self.peers.insert(peer, shared);
                Event::Connected { peer }
            }
        });
        Ok(peer)
    }

    fn start(&mut self, transfer: Transfer) -> Result<(), TransportError> {
        self.begin(transfer, None)
    }

    fn start_under(&mut self, grant: GrantId, transfer: Transfer) -> Result<(), TransportError> {
        self.begin(transfer, Some(grant))
    }

    fn grant(
        &mut self,
        peer: PeerId,
        grant: GrantId,
        region: u16,
        blocks: &[Range<u32>],
    ) -> Result<(), TransportError> {
        check_guarded(self.setup.is_guarded)?;
        let Setup { regions, limits, .. } = &self.setup;
        self.shared.gate().grants.insert((peer, grant), (region, blocks), regions, limits)
    }

    fn withdraw(&mut self, peer: PeerId, grant: GrantId) -> Touch {
        // Whoever copies holds the gate for a piece at a time, and looks at the grant before each.
        self.shared.gate().grants.remove(peer, grant);
        Touch::Settled
    }

    fn withdraw_all(&mut self) -> Touch {
        self.shared.gate().grants = Grants::default();
        Touch::Settled
    }

    fn cancel(&mut self, op: OpId) -> Result<Touch, TransportError> {
        let _known = self.operations.state(op).ok_or(TransportError::UnknownOperation(op))?;
        self.copies.retain(|copying| copying.op != op);
        self.operations.end(op, Err(Failure::Cancelled), Touch::Settled, &mut self.untold);
        Ok(Touch::Settled)
    }

    fn revoke(&mut self, peer: PeerId, op: OpId) -> Result<Touch, TransportError> {
        let mut gate = self.shared.gate();
        if gate.revoked.insert((peer, op)) {
            gate.revoked_order.push_back((peer, op));
        }
        if gate.revoked_order.len() > REVOKED_MAX
            && let Some(oldest) = gate.revoked_order.pop_front()
        {
            gate.revoked.remove(&oldest);
        }
        Ok(Touch::Settled)
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) {
        let until = Instant::now() + wait;
        let before = events.len();
        loop {
            events.append(&mut self.untold);
            let moved = self.turn(events);
            self.hear(events);
            let now = Instant::now();
            for op in self.operations.expired(now) {
                self.copies.retain(|copying| copying.op != op);
                self.operations.end(op, Err(Failure::Timeout), Touch::Settled, events);
            }
            if events.len() > before || now >= until {
                return;
            }
            if !moved {
                let gate = self.shared.gate();
                if gate.landed.is_empty() && gate.left.is_empty() {
                    // Woken or not, the next turn looks at everything.
                    drop(self.shared.news.wait_timeout(gate, NAP.min(until - now)));
                }
            }
        }
    }

    fn watch(&mut self, watch: &mut Watch) {
        if !self.untold.is_empty() || !self.shared.gate().landed.is_empty() {
            watch.at_most(Duration::ZERO);
        } else if !self.copies.is_empty() {
            // The next piece can be copied at once, but for a peer that has no room for the news.
            let is_closed_or_full = |shared: &Arc<Shared>| {
                let gate = shared.gate();
                gate.is_closed || gate.landed.len() >= INBOX_MAX
            };
            let is_stuck = |copying: &Copying| self.peers.get(&copying.peer).is_none_or(is_closed_or_full);
            watch.at_most(if self.copies.iter().all(is_stuck) { NAP } else { Duration::ZERO });
        }
    }

    fn disconnect(&mut self, peer: PeerId) {
        let mut events = std::mem::take(&mut self.untold);
        self.lose(peer, Gone::Disconnected, &mut events);
        self.untold = events;
    }

    fn abandon(&mut self, peer: PeerId) {
        // Nothing is ever in quarantine here.
        self.disconnect(peer);
    }
}

impl Drop for ByReference {
    fn drop(&mut self) {
        registry().endpoints.remove(&self.number);
        // Whoever copies at this moment holds the gate; after this nobody begins.
        self.shared.gate().is_closed = true;
        for peer in self.peers.values() {
            leave(peer, self.setup.identity);
        }
    }
}
