//! Endpoints that meet over a socket. TCP carries the bytes themselves; over a Unix socket come memfds and doorbells, and the
//! bytes are copied straight into the peer's memory.

mod inbound;
mod link;
mod listener;
mod outbound;
mod posting;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use self::inbound::{Inbound, Revocations};
use self::link::Link;
use self::listener::Listener;
use self::outbound::Outbound;
use self::posting::{Drifting, Poster};
use crate::frame::Denial;
use crate::grants::Grants;
use crate::operations::Operations;
use crate::{
    Address, Descriptor, Event, Failure, Gone, GrantId, Kind, Limits, OpId, PeerId, Refusal, Region, Setup, Touch,
    Transfer, Transport, TransportError, Watch, check_guarded,
};

/// Peers that are told "no" at the same time; further ones wait in the system's queue.
const REJECTING_MAX: usize = 16;

/// Who carries the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carriage {
    /// The socket.
    Stream,
    /// The operation's own endpoint, in memory that both have mapped.
    Mapped,
    /// The receiver, whose endpoint is guarded, out of memory of the writer that it has mapped to read.
    Pulled,
    /// A library, by requests that the operation's own endpoint posts.
    Posted,
}

/// Turns that ask again at once while requests are open: some tens of microseconds.
const IDLE_SPINS: u32 = 200;
/// After that, naps: short ones, for bytes that move by the hands of a library do not wake this end, and a full socket stands still.
const NAP: Duration = Duration::from_micros(50);
/// After two seconds of these nothing seems to move, and naps become long.
const NAPS_SHORT: u32 = 20_000;
const NAP_LONG: Duration = Duration::from_millis(1);

/// What stays the same through an endpoint's life.
pub(crate) struct Grounds {
    carriage: Carriage,
    descriptor: Descriptor,
    regions: Vec<Region>,
    limits: Limits,
}

/// Moves bytes over TCP. The fallback that works anywhere, and what the others are checked against.
pub struct Tcp(Endpoint);

impl Tcp {
    /// Listens at `bind`. Peers are told `advertised`, or the bound address when there is none; an unspecified address
    /// (`0.0.0.0`) therefore needs one.
    ///
    /// # Errors
    ///
    /// [`TransportError::Io`] when the address cannot be bound, and for a setup without regions or with too many.
    pub fn bind(setup: Setup, bind: SocketAddr, advertised: Option<SocketAddr>) -> Result<Self, TransportError> {
        let (listener, bound) = Listener::tcp(bind)?;
        let address = advertised.unwrap_or(bound);
        if address.ip().is_unspecified() {
            return Err(TransportError::Descriptor("an unspecified address needs another to be advertised"));
        }
        Endpoint::new(setup, Carriage::Stream, listener, Address::Tcp(address)).map(Self)
    }
}

/// Moves bytes between processes of one user on one host: the end that starts an operation copies them, in place on both sides.
pub struct Memfd(Endpoint);

impl Memfd {
    /// Listens at the Unix socket `path`, which peers must see under the same name.
    ///
    /// # Errors
    ///
    /// [`TransportError::Unavailable`] when a region is not in a memfd ([`Region::shared`]), [`TransportError::Io`] when the
    /// path cannot be bound, and for a setup without regions or with too many.
    pub fn bind(setup: Setup, path: &Path) -> Result<Self, TransportError> {
        if setup.regions.iter().any(|region| region.memory().memfd().is_none()) {
            return Err(TransportError::Unavailable("a region is not in a memfd".to_owned()));
        }
        let listener = Listener::unix(path)?;
        Endpoint::new(setup, Carriage::Mapped, listener, Address::Memfd(path.to_owned())).map(Self)
    }
}

struct Endpoint {
    grounds: Grounds,
    listener: Listener,
    inbound: Vec<Inbound>,
    outbound: BTreeMap<PeerId, Outbound>,
    operations: Operations,
    revoked: Revocations,
    grants: Grants,
    /// Grants that were taken back while a peer had leave to write under them and has not said that it stopped.
    withdrawing: BTreeSet<(PeerId, GrantId)>,
    /// Requests whose connections are gone. Each is part of an operation that has not settled, or of a write to a peer that has gone.
    drifting: Vec<Drifting>,
    /// Who moves the bytes, where that is a library. Dropped after all requests.
    poster: Option<Box<dyn Poster>>,
    /// Turns in a row that moved nothing while requests were open.
    idle_turns: u32,
    /// What happened outside `poll`. Bounded by the operations and peers it is about.
    untold: Vec<Event>,
}

impl Endpoint {
    fn new(setup: Setup, carriage: Carriage, listener: Listener, address: Address) -> Result<Self, TransportError> {
        let descriptor = Descriptor::new(&setup, address)?;
        let Setup { regions, limits, is_guarded, .. } = setup;
        let carriage = if carriage == Carriage::Mapped && is_guarded { Carriage::Pulled } else { carriage };
        Ok(Self {
            grounds: Grounds { carriage, descriptor, regions, limits },
            listener,
            inbound: Vec::new(),
            outbound: BTreeMap::new(),
            operations: Operations::new(limits),
            revoked: Revocations::default(),
            grants: Grants::default(),
            withdrawing: BTreeSet::new(),
            poster: None,
            drifting: Vec::new(),
            idle_turns: 0,
            untold: Vec::new(),
        })
    }

    fn connect(&mut self, descriptor: &[u8]) -> Result<PeerId, TransportError> {
        let target = Descriptor::decode(descriptor)?;
        if target.address.kind() != self.grounds.descriptor.address.kind() {
            return Err(TransportError::Descriptor("it is for another kind of transport"));
        }
        let peer = target.identity;
        if self.outbound.contains_key(&peer) {
            return Ok(peer);
        }
        if self.outbound.len() >= self.grounds.limits.peers_max {
            return Err(TransportError::Busy { what: "peers", limit: self.grounds.limits.peers_max as u64 });
        }
        match Outbound::dial(target, self.grounds.carriage) {
            Ok(outbound) => {
                self.outbound.insert(peer, outbound);
            }
            Err(TransportError::Io(fault)) => {
                self.untold.push(Event::Lost { peer, why: Gone::Unreachable(fault.to_string()) });
            }
            Err(fault) => return Err(fault),
        }
        Ok(peer)
    }

    fn start(&mut self, transfer: &Transfer, grant: Option<GrantId>) -> Result<(), TransportError> {
        let outbound = self.outbound.get_mut(&transfer.peer).filter(|outbound| outbound.is_up());
        let outbound = outbound.ok_or(TransportError::NotConnected(transfer.peer))?;
        let admitted = self.operations.admit(transfer, &self.grounds.regions, &outbound.target().regions)?;
        outbound.start(transfer, grant, admitted).inspect_err(|_| self.operations.forget(transfer.op))
    }

    fn cancel(&mut self, op: OpId, why: Failure) -> Result<Touch, TransportError> {
        let (peer, touch) = self.operations.state(op).ok_or(TransportError::UnknownOperation(op))?;
        if touch == Touch::Quarantined {
            return Ok(touch);
        }
        let outbound = self.outbound.get_mut(&peer);
        let touch = outbound.map_or(Touch::Settled, |outbound| outbound.cancel(op));
        self.operations.end(op, Err(why), touch, &mut self.untold);
        Ok(touch)
    }

    fn revoke(&mut self, peer: PeerId, op: OpId) -> Touch {
        self.revoked.insert(peer, op);
        let connections = self.inbound.iter_mut().filter(|inbound| inbound.peer == Some(peer));
        let touches = connections.map(|inbound| inbound.revoke(op, Refusal::Revoked));
        touches.fold(Touch::Settled, worst)
    }

    fn grant(
        &mut self,
        peer: PeerId,
        grant: GrantId,
        region: u16,
        blocks: &[Range<u32>],
    ) -> Result<(), TransportError> {
        let Grounds { descriptor, regions, limits, .. } = &self.grounds;
        check_guarded(descriptor.is_guarded)?;
        if self.withdrawing.contains(&(peer, grant)) {
            return Err(TransportError::Duplicate(OpId(grant.0)));
        }
        self.grants.insert((peer, grant), (region, blocks), regions, limits)
    }

    fn withdraw(&mut self, peer: PeerId, grant: GrantId) -> Touch {
        if !self.grants.remove(peer, grant) {
            let is_pending = self.withdrawing.contains(&(peer, grant));
            return if is_pending { Touch::Quarantined } else { Touch::Settled };
        }
        let connections = self.inbound.iter_mut().filter(|inbound| inbound.peer == Some(peer));
        let touch = connections.map(|inbound| inbound.withdraw(grant)).fold(Touch::Settled, worst);
        if touch == Touch::Quarantined {
            self.withdrawing.insert((peer, grant));
        }
        touch
    }

    fn withdraw_all(&mut self) -> Touch {
        let grants = self.grants.all();
        let first = if self.withdrawing.is_empty() { Touch::Settled } else { Touch::Quarantined };
        grants.into_iter().map(|(peer, grant)| self.withdraw(peer, grant)).fold(first, worst)
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) {
        let until = Instant::now() + wait;
        let before = events.len();
        loop {
            events.append(&mut self.untold);
            let moved = self.turn(events);
            events.append(&mut self.untold);
            let now = Instant::now();
            if moved {
                self.idle_turns = 0;
            }
            if events.len() > before || now >= until {
                return;
            }
            if !moved {
                let mut watch = Watch::new(until.saturating_duration_since(now));
                self.watch(&mut watch);
                watch.wait();
            }
        }
    }

    /// Does what can be done without waiting. Returns whether anything moved.
    fn turn(&mut self, events: &mut Vec<Event>) -> bool {
        if let Some(poster) = &mut self.poster
            && !self.inbound.is_empty()
        {
            poster.serve();
        }
        let mut moved = self.welcome();
        moved |= self.hear_inbound(events);
        moved |= self.hear_outbound(events);
        moved |= self.drift(events);
        for op in self.operations.expired(Instant::now()) {
            // It is known and running, so it can be ended; its event is told at once.
            let _ = self.cancel(op, Failure::Timeout);
            moved = true;
        }
        moved
    }

    fn has_room(&self) -> bool {
        self.inbound.len() < self.grounds.limits.peers_max + REJECTING_MAX
    }

    fn welcome(&mut self) -> bool {
        let mut moved = false;
        while self.has_room()
            && let Some(stream) = self.listener.accept()
        {
            let mut inbound = Inbound::new(Link::new(stream));
            if self.inbound.len() >= self.grounds.limits.peers_max {
                inbound.reject(Denial::Full);
            }
            self.inbound.push(inbound);
            moved = true;
        }
        moved
    }

    fn hear_inbound(&mut self, events: &mut Vec<Event>) -> bool {
        let mut moved = false;
        let mut needs_fence = false;
        let is_posted = self.grounds.carriage == Carriage::Posted;
        let mut kept: Vec<Inbound> = Vec::with_capacity(self.inbound.len());
        // Closed only after a fence: a peer takes it for the word that nothing of it lands any more.
        let mut gone = Vec::new();
        for mut inbound in std::mem::take(&mut self.inbound) {
            let was_unknown = inbound.peer.is_none();
            let heard = inbound.turn(&self.grounds, (&self.revoked, &self.grants), events);
            if let Some(peer) = inbound.peer.filter(|_| was_unknown) {
                // An endpoint that comes anew has left what it had: its late bytes must find nobody.
                let is_older = |other: &mut Inbound| other.peer.is_some_and(|older| older.endpoint == peer.endpoint);
                for older in kept.extract_if(.., is_older) {
                    events.extend(older.peer.map(|peer| Event::Left { peer }));
                    needs_fence |= is_posted && older.may_write();
                    gone.push(older);
                }
            }
            match heard {
                Ok(did) => {
                    moved |= did;
                    kept.push(inbound);
                }
                Err(_) => {
                    events.extend(inbound.peer.map(|peer| Event::Left { peer }));
                    needs_fence |= is_posted && inbound.may_write();
                    gone.push(inbound);
                    moved = true;
                }
            }
        }
        self.inbound = kept;
        if needs_fence {
            self.fence(events);
        }
        drop(gone);
        for inbound in &mut self.inbound {
            inbound.welcome(&self.grounds, self.poster.as_deref_mut());
        }
        let inbound = &self.inbound;
        self.withdrawing.retain(|(peer, grant)| {
            let is_open = inbound.iter().any(|inbound| inbound.peer == Some(*peer) && inbound.may_write_under(*grant));
            if !is_open {
                events.push(Event::Withdrawn { peer: *peer, grant: *grant });
            }
            is_open
        });
        moved
    }

    /// A peer has gone that could write through the library, and only this makes sure that it does not: all peers' cards become
    /// void. Those who held one are sent away, and connect anew.
    fn fence(&mut self, events: &mut Vec<Event>) {
        if let Some(poster) = &mut self.poster {
            poster.fence();
        }
        self.inbound.retain(|inbound| {
            events.extend(inbound.peer.filter(|_| inbound.holds_card()).map(|peer| Event::Left { peer }));
            !inbound.holds_card()
        });
    }

    /// Asks about requests whose connections are gone. Returns whether one is over.
    fn drift(&mut self, events: &mut Vec<Event>) -> bool {
        let before = self.drifting.len();
        let operations = &mut self.operations;
        self.drifting.retain_mut(|drifting| !drifting.is_over(operations, events));
        self.drifting.len() < before
    }

    fn hear_outbound(&mut self, events: &mut Vec<Event>) -> bool {
        let mut moved = false;
        let mut lost = Vec::new();
        for (peer, outbound) in &mut self.outbound {
            let are_drifting = self.drifting.iter().any(|drifting| drifting.peer == *peer);
            let poster = self.poster.as_deref_mut();
            match outbound.turn(&self.grounds, poster, are_drifting, &mut self.operations, events) {
                Ok(did) => moved |= did,
                Err(why) => lost.push((*peer, why)),
            }
        }
        for (peer, why) in lost {
            moved = true;
            self.lose(peer, why, events);
        }
        moved
    }

    fn lose(&mut self, peer: PeerId, why: Gone, events: &mut Vec<Event>) {
        let Some(mut outbound) = self.outbound.remove(&peer) else { return };
        // What the peer itself closed, or never was of this life, writes nothing more; of a peer that is merely out of
        // reach that cannot be known.
        let has_gone = matches!(why, Gone::Closed | Gone::Epoch);
        let carriage = outbound.carriage;
        if carriage == Carriage::Posted && !has_gone {
            // The peer should know which of its blocks are free, if it is there. What is in flight is not named.
            outbound.take_leave(&self.operations.of_peer(peer));
        }
        let Outbound { link, postings, .. } = outbound;
        let unsettled = postings.abandon(peer, has_gone, &mut self.drifting);
        for op in self.operations.of_peer(peer) {
            let settled = match carriage {
                Carriage::Posted => !unsettled.contains(&op),
                Carriage::Mapped => true,
                Carriage::Stream | Carriage::Pulled => has_gone || link.is_landing(op),
            };
            let touch = if settled { Touch::Settled } else { Touch::Quarantined };
            self.operations.end(op, Err(Failure::PeerGone), touch, events);
        }
        events.push(Event::Lost { peer, why });
    }

    fn abandon(&mut self, peer: PeerId) {
        let mut events = std::mem::take(&mut self.untold);
        if self.outbound.contains_key(&peer) {
            self.lose(peer, Gone::Closed, &mut events);
        }
        self.drifting.retain(|drifting| drifting.peer != peer);
        if let Some(poster) = &mut self.poster {
            poster.part(peer);
        }
        for op in self.operations.of_peer(peer) {
            self.operations.settle(op, &mut events);
        }
        self.untold = events;
    }

    fn disconnect(&mut self, peer: PeerId) {
        let mut events = std::mem::take(&mut self.untold);
        self.lose(peer, Gone::Disconnected, &mut events);
        self.untold = events;
    }

    /// Whether requests are open, own ones or those of peers.
    fn has_requests(&self) -> bool {
        let own = || self.outbound.values().any(|outbound| outbound.postings.is_in_flight());
        let theirs = || self.inbound.iter().any(Inbound::may_move);
        self.poster.is_some() && (!self.drifting.is_empty() || own() || theirs())
    }

    /// Waits are over when a socket is ready, or a deadline is due.
    fn watch(&mut self, watch: &mut Watch) {
        let now = Instant::now();
        if let Some(deadline) = self.operations.next_deadline() {
            watch.at_most(deadline.saturating_duration_since(now));
        }
        // Silence and calls that nobody answers are noticed by the clock: no rest is longer than this.
        watch.at_most(Duration::from_millis(50));
        let has_work = |endpoint: &Self| {
            endpoint.inbound.iter().any(Inbound::has_pulls) || endpoint.outbound.values().any(Outbound::has_copies)
        };
        if !self.untold.is_empty() || has_work(self) {
            watch.at_most(Duration::ZERO);
        }
        if self.has_requests() {
            // A library that has no descriptor to wait for is asked: at once at first, then less often.
            self.idle_turns = self.idle_turns.saturating_add(1);
            watch.at_most(match self.idle_turns {
                ..IDLE_SPINS => Duration::ZERO,
                IDLE_SPINS..NAPS_SHORT => NAP,
                NAPS_SHORT.. => NAP_LONG,
            });
        }
        watch.interest(self.listener.fd(), self.has_room(), false);
        for inbound in &self.inbound {
            let link = &inbound.link;
            watch.interest(link.stream().fd(), link.wants_to_read(), link.wants_to_write());
        }
        for outbound in self.outbound.values() {
            let link = &outbound.link;
            let writes = outbound.is_dialling() || link.wants_to_write();
            watch.interest(link.stream().fd(), link.wants_to_read(), writes);
        }
    }
}

/// What is certain of two things together.
fn worst(one: Touch, other: Touch) -> Touch {
    if one == Touch::Settled { other } else { one }
}

macro_rules! transport {
    ($name:ident, $kind:expr) => {
        impl Transport for $name {
            fn kind(&self) -> Kind {
                $kind
            }

            fn descriptor(&self) -> Descriptor {
                self.0.grounds.descriptor.clone()
            }

            fn connect(&mut self, descriptor: &[u8]) -> Result<PeerId, TransportError> {
                self.0.connect(descriptor)
            }

            fn start(&mut self, transfer: Transfer) -> Result<(), TransportError> {
                self.0.start(&transfer, None)
            }

            fn start_under(&mut self, grant: GrantId, transfer: Transfer) -> Result<(), TransportError> {
                self.0.start(&transfer, Some(grant))
            }

            fn grant(
                &mut self,
                peer: PeerId,
                grant: GrantId,
                region: u16,
                blocks: &[Range<u32>],
            ) -> Result<(), TransportError> {
                self.0.grant(peer, grant, region, blocks)
            }

            fn withdraw(&mut self, peer: PeerId, grant: GrantId) -> Touch {
                self.0.withdraw(peer, grant)
            }

            fn withdraw_all(&mut self) -> Touch {
                self.0.withdraw_all()
            }

            fn cancel(&mut self, op: OpId) -> Result<Touch, TransportError> {
                self.0.cancel(op, Failure::Cancelled)
            }

            fn revoke(&mut self, peer: PeerId, op: OpId) -> Result<Touch, TransportError> {
                Ok(self.0.revoke(peer, op))
            }

            fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) {
                self.0.poll(wait, events);
            }

            fn watch(&mut self, watch: &mut Watch) {
                self.0.watch(watch);
            }

            fn disconnect(&mut self, peer: PeerId) {
                self.0.disconnect(peer);
            }

            fn abandon(&mut self, peer: PeerId) {
                self.0.abandon(peer);
            }
        }
    };
}

transport!(Tcp, Kind::Tcp);
transport!(Memfd, Kind::Memfd);

#[cfg(feature = "nixl")]
pub(crate) mod nixl;
