//! A peer that this endpoint has connected to: own operations run here.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use super::link::{Arrived, Link};
use super::posting::{Poster, Postings};
use super::{Carriage, Grounds, listener};
use crate::descriptor::{get_regions, put_regions};
use crate::frame::{Denial, Word, read_nack};
use crate::memory::Mapping;
use crate::operations::{Admitted, Operations};
use crate::scatter::{Run, Scatter, copy};
use crate::wire::Reader;
use crate::{
    Descriptor, Direction, Event, Failure, Gone, GrantId, Layout, OpId, Region, Touch, Transfer, TransportError, sys,
};

/// Longest card of a peer: a few hundred bytes for each device it has.
const CARD_BYTES_MAX: usize = 64 * 1024;
/// Bytes copied in one turn: about a millisecond, after which others are heard.
const BYTES_A_TURN: usize = 4 * 1024 * 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Called; no answer yet.
    Dialling,
    /// Greeted; no answer yet.
    Greeting,
    Up,
}

/// An operation on mapped memory.
struct Copying {
    op: OpId,
    from: Scatter,
    to: Scatter,
    done: u64,
    direction: Direction,
    /// The peer has said that it may write.
    is_ready: bool,
}

pub(crate) struct Outbound {
    pub(crate) link: Link,
    target: Descriptor,
    /// Who carries the bytes.
    pub(crate) carriage: Carriage,
    state: State,
    since: Instant,
    /// The peer's regions, mapped; empty over TCP.
    mapped: Vec<Region>,
    /// Take turns, a piece each.
    copies: VecDeque<Copying>,
    /// The same where a library moves the bytes.
    pub(crate) postings: Postings,
}

impl Outbound {
    pub(crate) fn dial(target: Descriptor, own: Carriage) -> Result<Self, TransportError> {
        let stream = listener::dial(&target.address)?;
        let link = Link::new(stream);
        let carriage = match own {
            Carriage::Mapped | Carriage::Pulled if target.is_guarded => Carriage::Pulled,
            Carriage::Mapped | Carriage::Pulled => Carriage::Mapped,
            Carriage::Stream | Carriage::Posted => own,
        };
        Ok(Self {
            link,
            target,
            carriage,
            state: State::Dialling,
            since: Instant::now(),
            mapped: Vec::new(),
            copies: VecDeque::new(),
            postings: Postings::default(),
        })
    }

    pub(crate) fn is_up(&self) -> bool {
        self.state == State::Up
    }

    pub(crate) fn is_dialling(&self) -> bool {
        self.state == State::Dialling
    }

    pub(crate) fn target(&self) -> &Descriptor {
        &self.target
    }

    /// Does what can be done. Returns whether anything moved. While requests of an earlier connection drift, the peer is not
    /// greeted: the greeting says that they are over.
    pub(crate) fn turn(
        &mut self,
        grounds: &Grounds,
        mut poster: Option<&mut (dyn Poster + 'static)>,
        are_drifting: bool,
        operations: &mut Operations,
        events: &mut Vec<Event>,
    ) -> Result<bool, Gone> {
        let now = Instant::now();
        let silence_max = grounds.limits.silence_max;
        if self.state != State::Up && now.saturating_duration_since(self.since) >= silence_max {
            return Err(Gone::Silent);
        }
        if self.state == State::Dialling {
            if !listener::has_answered(self.link.stream())? || are_drifting {
                return Ok(false);
            }
            self.greet(grounds)?;
        }
        let mut arrived = Vec::new();
        let read = self.link.read(&mut arrived);
        let mut moved = !arrived.is_empty();
        for what in arrived {
            self.take(what, poster.as_deref_mut(), operations, events)?;
        }
        moved |= read?;
        moved |= self.copy(operations, events);
        if let Some(poster) = poster {
            moved |= self.postings.turn(self.target.identity, poster, &mut self.link, operations, events)?;
        }
        moved |= self.link.write()?;
        if self.link.is_silent(now, silence_max) {
            return Err(Gone::Silent);
        }
        Ok(moved)
    }

    fn greet(&mut self, grounds: &Grounds) -> Result<(), Gone> {
        if !listener::is_same_user(self.link.stream()) {
            return Err(Gone::Denied);
        }
        let mut payload = self.target.token.to_vec();
        for identity in [grounds.descriptor.identity, self.target.identity] {
            payload.extend_from_slice(&identity.endpoint.to_le_bytes());
            payload.extend_from_slice(&identity.epoch.to_le_bytes());
        }
        let mut shown = Vec::new();
        if self.carriage == Carriage::Pulled {
            put_regions(&mut payload, &grounds.descriptor.regions);
            shown = grounds.regions.iter().map(|region| Arc::clone(region.memory())).collect();
        }
        self.link.show(Word::Hello, OpId(0), 0, &payload, shown);
        self.state = State::Greeting;
        Ok(())
    }

    fn take(
        &mut self,
        what: Arrived,
        poster: Option<&mut (dyn Poster + 'static)>,
        operations: &mut Operations,
        events: &mut Vec<Event>,
    ) -> Result<(), Gone> {
        let (header, payload) = match what {
            Arrived::Control(header, payload) => (header, payload),
            Arrived::Landed(op, _) => {
                operations.end(op, Ok(()), Touch::Settled, events);
                return Ok(());
            }
            Arrived::Corrupt(op) => {
                self.link.say(Word::Cancel, op, 0, &[]);
                operations.end(op, Err(Failure::Corrupt), Touch::Settled, events);
                return Ok(());
            }
        };
        let op = OpId(header.op);
        match (self.state, header.word) {
            (State::Greeting, Word::Welcome) => {
                self.meet(&payload, poster)?;
                // The peer has closed what stood before: of that nothing can move any more.
                for op in operations.of_peer(self.target.identity) {
                    operations.settle(op, events);
                }
                events.push(Event::Connected { peer: self.target.identity });
            }
            (State::Greeting, Word::Reject) => return Err(Denial::read(header.arg, header.op)),
            (State::Up, Word::Ack) => operations.end(op, Ok(()), Touch::Settled, events),
            (State::Up, Word::Nack) => {
                if self.postings.stop(op, Word::Cancel, read_nack(header.arg)) == Touch::Quarantined {
                    return Ok(());
                }
                self.stop(op);
                operations.end(op, Err(read_nack(header.arg)), Touch::Settled, events);
            }
            (State::Up, Word::Still) => operations.settle(op, events),
            (State::Up, Word::Ready) => {
                if let Some(copying) = self.copies.iter_mut().find(|copying| copying.op == op) {
                    copying.is_ready = true;
                }
                self.postings.allow(op);
            }
            (State::Up, Word::Revoke) => {
                let refused = read_nack(header.arg);
                if self.postings.stop(op, Word::Revoked, refused.clone()) == Touch::Quarantined {
                    return Ok(());
                }
                self.stop(op);
                operations.end(op, Err(refused), Touch::Settled, events);
                self.link.say(Word::Revoked, op, 0, &[]);
            }
            _ => return Err(Gone::Protocol("a word out of turn")),
        }
        Ok(())
    }

    /// The peer is who was meant. Maps its memory where that is how bytes are carried.
    fn meet(&mut self, payload: &[u8], poster: Option<&mut (dyn Poster + 'static)>) -> Result<(), Gone> {
        let mut reader = Reader::new(payload);
        let regions = get_regions(&mut reader).map_err(|_| Gone::Protocol("a welcome without regions"))?;
        if regions != self.target.regions {
            return Err(Gone::Protocol("other regions than described"));
        }
        if let Some(poster) = poster {
            let card = reader.bytes(CARD_BYTES_MAX).map_err(|_| Gone::Protocol("a welcome without a card"))?;
            poster.meet(self.target.identity, card, &regions)?;
        }
        if self.carriage == Carriage::Mapped {
            self.mapped = mapped(std::mem::take(&mut self.link.fds), &regions, Mapping::of_memfd)?;
        }
        self.state = State::Up;
        Ok(())
    }

    /// Begins an operation that has been admitted, under a grant if there is one and the target wants one.
    pub(crate) fn start(
        &mut self,
        transfer: &Transfer,
        grant: Option<GrantId>,
        admitted: Admitted,
    ) -> Result<(), TransportError> {
        let Admitted { local, remote } = admitted;
        let (op, direction) = (transfer.op, transfer.direction);
        let grant = grant.filter(|_| self.target.is_guarded);
        let mut wanted = Vec::new();
        if let (Some(grant), Direction::Write) = (grant, direction) {
            wanted.extend_from_slice(&grant.0.to_le_bytes());
            wanted.extend_from_slice(&(remote.len() as u32).to_le_bytes());
        }
        put_runs(&mut wanted, &remote);
        if let (Some(_), Carriage::Pulled) = (grant, self.carriage) {
            wanted.extend_from_slice(&transfer.local.to_le_bytes());
            put_runs(&mut wanted, local.runs());
        }
        let word = match (direction, grant) {
            (Direction::Read, _) => Word::Fetch,
            (Direction::Write, None) => Word::Open,
            (Direction::Write, Some(_)) => Word::OpenUnder,
        };
        let region = u64::from(transfer.remote);
        match (self.carriage, direction) {
            (Carriage::Mapped, _) => {
                let mapped = self.mapped.get(usize::from(transfer.remote));
                let mapped = mapped.ok_or(TransportError::UnknownRegion(transfer.remote))?;
                let there = Scatter::new(mapped.clone(), remote.iter().copied())?;
                let is_read = direction == Direction::Read;
                let (from, to) = if is_read { (there, local) } else { (local, there) };
                if !is_read {
                    self.link.say(word, op, region, &wanted);
                }
                self.copies.push_back(Copying { op, from, to, done: 0, direction, is_ready: is_read });
            }
            (Carriage::Posted, _) => {
                self.link.say(word, op, region, &wanted);
                self.postings.start(transfer, local.region());
            }
            (Carriage::Stream, Direction::Read) => {
                self.link.land(op, local);
                self.link.say(word, op, region, &wanted);
            }
            (Carriage::Stream, Direction::Write) => {
                self.link.say(word, op, region, &wanted);
                self.link.send(op, local);
            }
            // The rest is the receiver's: it copies, or refuses.
            (Carriage::Pulled, _) => self.link.say(word, op, region, &wanted),
        }
        Ok(())
    }

    /// Whether it would copy at once if it were asked.
    pub(crate) fn has_copies(&self) -> bool {
        self.copies.iter().any(|copying| copying.is_ready)
    }

    fn copy(&mut self, operations: &mut Operations, events: &mut Vec<Event>) -> bool {
        let mut budget = BYTES_A_TURN;
        let mut moved = false;
        for _ in 0..self.copies.len() {
            let Some(mut copying) = self.copies.pop_front() else { break };
            if copying.is_ready && budget > 0 {
                let copied = copy(&copying.from, &copying.to, copying.done, budget);
                copying.done += copied as u64;
                budget -= copied;
                moved = true;
            }
            if copying.done < copying.from.bytes() {
                self.copies.push_back(copying);
                continue;
            }
            match copying.direction {
                Direction::Write => self.link.say(Word::Doorbell, copying.op, copying.done, &[]),
                Direction::Read => operations.end(copying.op, Ok(()), Touch::Settled, events),
            }
        }
        moved
    }

    /// Moves nothing more of an operation as far as this end decides.
    fn stop(&mut self, op: OpId) {
        self.link.stop_sending(op);
        self.link.drop_landing(op);
        self.copies.retain(|copying| copying.op != op);
    }

    /// Says of all operations that move nothing any more that they are over, as far as the socket takes it.
    pub(crate) fn take_leave(&mut self, ops: &[OpId]) {
        for op in ops.iter().filter(|op| !self.postings.may_move(**op)) {
            self.link.say(Word::Cancel, *op, 0, &[]);
        }
        // The connection is given up in any case: what was not taken is what a fence is for.
        let _ = self.link.write();
    }

    /// Ends an operation from this end: bytes of a write that are already on their way may still land.
    pub(crate) fn cancel(&mut self, op: OpId) -> Touch {
        let was_landing = self.link.is_landing(op);
        if self.postings.stop(op, Word::Cancel, Failure::Cancelled) == Touch::Quarantined {
            return Touch::Quarantined;
        }
        self.stop(op);
        self.link.say(Word::Cancel, op, 0, &[]);
        match self.carriage {
            Carriage::Stream | Carriage::Pulled if !was_landing => Touch::Quarantined,
            _ => Touch::Settled,
        }
    }
}

fn put_runs(bytes: &mut Vec<u8>, runs: &[Run]) {
    bytes.extend(runs.iter().flat_map(|run| [run.first.to_le_bytes(), run.blocks.to_le_bytes()]).flatten());
}

/// The other end's regions, mapped by what has come along with its word for them.
pub(crate) fn mapped(
    fds: Vec<OwnedFd>,
    layouts: &[Layout],
    map: impl Fn(OwnedFd, usize) -> io::Result<Mapping>,
) -> Result<Vec<Region>, Gone> {
    if fds.len() != layouts.len() {
        return Err(Gone::Protocol("not one memfd for each region"));
    }
    let one = |(memfd, layout): (OwnedFd, &Layout)| {
        // `get_regions` has checked that the product fits.
        let bytes = (layout.block_bytes * u64::from(layout.blocks)) as usize;
        if !sys::is_sealed_at(memfd.as_fd(), bytes).unwrap_or(false) {
            return Err(Gone::Protocol("a memfd that may shrink"));
        }
        let mapping = map(memfd, bytes).map_err(|fault| Gone::Unmappable(fault.to_string()))?;
        let region = Region::new(Arc::new(mapping), layout.block_bytes as usize);
        region.map_err(|fault| Gone::Unmappable(fault.to_string()))
    };
    fds.into_iter().zip(layouts).map(one).collect()
}
