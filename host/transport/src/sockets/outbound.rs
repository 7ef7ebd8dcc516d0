//! A peer that this endpoint has connected to: own operations run here.

use std::collections::VecDeque;
use std::time::Instant;

use super::link::{Arrived, Link};
use super::posting::{Poster, Postings};
use super::{Carriage, Grounds, listener};
use crate::descriptor::get_regions;
use crate::frame::{Denial, Word, read_nack};
use crate::memory::Mapping;
use crate::operations::{Admitted, Operations};
use crate::scatter::{Scatter, copy};
use crate::wire::Reader;
use crate::{Descriptor, Direction, Event, Failure, Gone, OpId, Refusal, Region, Touch, Transfer, TransportError, sys};

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
    pub(crate) fn dial(target: Descriptor) -> Result<Self, TransportError> {
        let stream = listener::dial(&target.address)?;
        let link = Link::new(stream);
        Ok(Self {
            link,
            target,
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
            self.take(what, grounds, poster.as_deref_mut(), operations, events)?;
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
        self.link.say(Word::Hello, OpId(0), 0, &payload);
        self.state = State::Greeting;
        Ok(())
    }

    fn take(
        &mut self,
        what: Arrived,
        grounds: &Grounds,
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
                self.meet(&payload, grounds, poster)?;
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
                let refused = Failure::Refused(Refusal::Revoked);
                if self.postings.stop(op, Word::Revoked, refused) == Touch::Quarantined {
                    return Ok(());
                }
                self.stop(op);
                operations.end(op, Err(Failure::Refused(Refusal::Revoked)), Touch::Settled, events);
                self.link.say(Word::Revoked, op, 0, &[]);
            }
            _ => return Err(Gone::Protocol("a word out of turn")),
        }
        Ok(())
    }

    /// The peer is who was meant. Maps its memory where that is how bytes are carried.
    fn meet(
        &mut self,
        payload: &[u8],
        grounds: &Grounds,
        poster: Option<&mut (dyn Poster + 'static)>,
    ) -> Result<(), Gone> {
        let mut reader = Reader::new(payload);
        let regions = get_regions(&mut reader).map_err(|_| Gone::Protocol("a welcome without regions"))?;
        if regions != self.target.regions {
            return Err(Gone::Protocol("other regions than described"));
        }
        if let Some(poster) = poster {
            let card = reader.bytes(CARD_BYTES_MAX).map_err(|_| Gone::Protocol("a welcome without a card"))?;
            poster.meet(self.target.identity, card, &regions)?;
        }
        if grounds.carriage == Carriage::Mapped {
            let fds = std::mem::take(&mut self.link.fds);
            if fds.len() != regions.len() {
                return Err(Gone::Protocol("not one memfd for each region"));
            }
            for (memfd, layout) in fds.into_iter().zip(&regions) {
                // `get_regions` has checked that the product fits.
                let bytes = (layout.block_bytes * u64::from(layout.blocks)) as usize;
                let is_safe = sys::is_sealed_at(std::os::fd::AsFd::as_fd(&memfd), bytes).unwrap_or(false);
                if !is_safe {
                    return Err(Gone::Protocol("a memfd that may shrink"));
                }
                let mapping = Mapping::of_memfd(memfd, bytes).map_err(|fault| Gone::Unmappable(fault.to_string()))?;
                let region = Region::new(std::sync::Arc::new(mapping), layout.block_bytes as usize);
                self.mapped.push(region.map_err(|fault| Gone::Unmappable(fault.to_string()))?);
            }
        }
        self.state = State::Up;
        Ok(())
    }

    /// Begins an operation that has been admitted.
    pub(crate) fn start(
        &mut self,
        transfer: &Transfer,
        admitted: Admitted,
        carriage: Carriage,
    ) -> Result<(), TransportError> {
        let Admitted { local, remote } = admitted;
        let runs = |word_runs: &[crate::scatter::Run]| {
            let each = word_runs.iter().flat_map(|run| [run.first.to_le_bytes(), run.blocks.to_le_bytes()]);
            each.flatten().collect::<Vec<u8>>()
        };
        let (op, region) = (transfer.op, u64::from(transfer.remote));
        if let Some(mapped) = self.mapped.get(usize::from(transfer.remote)) {
            let there = Scatter::new(mapped.clone(), remote.iter().copied())?;
            let is_read = transfer.direction == Direction::Read;
            let (from, to) = if is_read { (there, local) } else { (local, there) };
            if !is_read {
                self.link.say(Word::Open, op, region, &runs(&remote));
            }
            let direction = transfer.direction;
            self.copies.push_back(Copying { op, from, to, done: 0, direction, is_ready: is_read });
            return Ok(());
        }
        if carriage == Carriage::Posted {
            let word = if transfer.direction == Direction::Write { Word::Open } else { Word::Fetch };
            self.link.say(word, op, region, &runs(&remote));
            self.postings.start(transfer, local.region());
            return Ok(());
        }
        match transfer.direction {
            Direction::Write => {
                self.link.say(Word::Open, op, region, &runs(&remote));
                self.link.send(op, local);
            }
            Direction::Read => {
                self.link.land(op, local);
                self.link.say(Word::Fetch, op, region, &runs(&remote));
            }
        }
        Ok(())
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
    pub(crate) fn cancel(&mut self, op: OpId, carriage: Carriage) -> Touch {
        let was_landing = self.link.is_landing(op);
        if self.postings.stop(op, Word::Cancel, Failure::Cancelled) == Touch::Quarantined {
            return Touch::Quarantined;
        }
        self.stop(op);
        self.link.say(Word::Cancel, op, 0, &[]);
        if was_landing || carriage != Carriage::Stream { Touch::Settled } else { Touch::Quarantined }
    }
}
