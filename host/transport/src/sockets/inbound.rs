//! A peer that has connected to this endpoint: its writes land here, its reads are served from here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::link::{Arrived, Link};
use super::posting::Poster;
use super::{Carriage, Grounds};
use crate::descriptor::put_regions;
use crate::frame::{Denial, Header, Word, nack};
use crate::scatter::{Run, Scatter, overlap};
use crate::wire::{Reader, put_bytes};
use crate::{Event, Failure, Gone, OpId, PeerId, Refusal, Touch, TransportError, VERSION};

/// Operations whose blocks were taken back. Peers name an operation once, so those forgotten first are long over.
const REVOKED_MAX: usize = 65_536;

/// What peers may not write any more.
#[derive(Default)]
pub(crate) struct Revocations {
    held: BTreeSet<(PeerId, OpId)>,
    order: VecDeque<(PeerId, OpId)>,
}

impl Revocations {
    pub(crate) fn insert(&mut self, peer: PeerId, op: OpId) {
        if !self.held.insert((peer, op)) {
            return;
        }
        self.order.push_back((peer, op));
        if self.order.len() > REVOKED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.held.remove(&oldest);
        }
    }

    pub(crate) fn contains(&self, peer: PeerId, op: OpId) -> bool {
        self.held.contains(&(peer, op))
    }
}

pub(crate) struct Inbound {
    pub(crate) link: Link,
    /// Who it is, once it has said so.
    pub(crate) peer: Option<PeerId>,
    since: Instant,
    /// It is told no, and nothing it says is heard any more.
    is_rejected: bool,
    /// Mapped memory: operations that were told they may write, and how many bytes.
    writing: BTreeMap<OpId, u64>,
    /// Where a library moves the bytes: operations that were told they may read.
    lending: BTreeSet<OpId>,
    /// Its greeting was accepted, and it has not been welcomed yet.
    is_accepted: bool,
}

impl Inbound {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            peer: None,
            since: Instant::now(),
            is_rejected: false,
            writing: BTreeMap::new(),
            lending: BTreeSet::new(),
            is_accepted: false,
        }
    }

    /// Tells it no.
    pub(crate) fn reject(&mut self, why: Denial) {
        self.is_rejected = true;
        self.link.say(Word::Reject, OpId(u64::from(VERSION)), why as u64, &[]);
    }

    /// Does what can be done. Returns whether anything moved.
    pub(crate) fn turn(
        &mut self,
        grounds: &Grounds,
        revoked: &Revocations,
        events: &mut Vec<Event>,
    ) -> Result<bool, Gone> {
        let now = Instant::now();
        let silence_max = grounds.limits.silence_max;
        let is_late = self.peer.is_none() && now.saturating_duration_since(self.since) >= silence_max;
        if is_late || self.link.is_silent(now, silence_max) {
            return Err(Gone::Silent);
        }
        if self.is_rejected {
            return self.dismiss();
        }
        let mut arrived = Vec::new();
        let read = self.link.read(&mut arrived);
        for what in arrived {
            self.take(what, grounds, revoked, events)?;
        }
        if let Err(Gone::Version { .. }) = read {
            self.reject(Denial::Version);
            return self.dismiss();
        }
        let wrote = self.link.write()?;
        Ok(read? || wrote)
    }

    /// Sends the rejection, then waits for the peer to hang up.
    fn dismiss(&mut self) -> Result<bool, Gone> {
        let wrote = self.link.write()?;
        if wrote && !self.link.wants_to_write() {
            self.link.finish();
        }
        Ok(self.link.discard()? || wrote)
    }

    fn take(
        &mut self,
        what: Arrived,
        grounds: &Grounds,
        revoked: &Revocations,
        events: &mut Vec<Event>,
    ) -> Result<(), Gone> {
        let (header, payload) = match what {
            Arrived::Control(header, payload) => (header, payload),
            Arrived::Landed(op, bytes) => {
                let peer = self.peer.ok_or(Gone::Protocol("data before a greeting"))?;
                self.link.say(Word::Ack, op, 0, &[]);
                events.push(Event::Landed { peer, op, bytes });
                return Ok(());
            }
            Arrived::Corrupt(op) => {
                self.refuse(op, Failure::Corrupt);
                return Ok(());
            }
        };
        let op = OpId(header.op);
        let Some(peer) = self.peer else {
            return match header.word {
                Word::Hello => self.greet(&payload, grounds),
                _ => Err(Gone::Protocol("the first word is not a greeting")),
            };
        };
        match header.word {
            Word::Open => match self.admit(&header, &payload, grounds, revoked, peer) {
                Ok(into) if grounds.carriage != Carriage::Stream => {
                    self.writing.insert(op, into.bytes());
                    self.link.say(Word::Ready, op, 0, &[]);
                }
                Ok(into) => self.link.land(op, into),
                Err(why) => self.refuse(op, Failure::Refused(why)),
            },
            Word::Fetch => match self.admit(&header, &payload, grounds, revoked, peer) {
                Ok(_) if grounds.carriage == Carriage::Posted => {
                    self.lending.insert(op);
                    self.link.say(Word::Ready, op, 0, &[]);
                }
                Ok(from) => self.link.send(op, from),
                Err(why) => self.refuse(op, Failure::Refused(why)),
            },
            Word::Doorbell => match self.writing.remove(&op) {
                Some(bytes) if bytes == header.arg => {
                    if revoked.contains(peer, op) {
                        // The two crossed. It writes no more, which is what was to be known.
                        self.refuse(op, Failure::Refused(Refusal::Revoked));
                        events.push(Event::Revoked { peer, op });
                    } else {
                        self.link.say(Word::Ack, op, 0, &[]);
                        events.push(Event::Landed { peer, op, bytes });
                    }
                }
                Some(_) => return Err(Gone::Protocol("a doorbell for other bytes than were opened")),
                // Revoked, and the peer's word for it is on its way; or over.
                None => {}
            },
            Word::Cancel => {
                self.link.drop_landing(op);
                self.link.stop_sending(op);
                self.lending.remove(&op);
                if self.writing.remove(&op).is_some() && revoked.contains(peer, op) {
                    events.push(Event::Revoked { peer, op });
                }
                self.link.say(Word::Still, op, 0, &[]);
            }
            Word::Revoked => {
                if self.writing.remove(&op).is_some() {
                    events.push(Event::Revoked { peer, op });
                }
            }
            _ => return Err(Gone::Protocol("a word that only this end may say")),
        }
        Ok(())
    }

    fn greet(&mut self, payload: &[u8], grounds: &Grounds) -> Result<(), Gone> {
        let read = || -> Result<([u8; 16], PeerId, PeerId), TransportError> {
            let mut reader = Reader::new(payload);
            let token = reader.array()?;
            let peer = PeerId { endpoint: reader.u64()?, epoch: reader.u64()? };
            let meant = PeerId { endpoint: reader.u64()?, epoch: reader.u64()? };
            reader.end()?;
            Ok((token, peer, meant))
        };
        let (token, peer, meant) = read().map_err(|_| Gone::Protocol("a greeting that is none"))?;
        if meant != grounds.descriptor.identity {
            self.reject(Denial::Epoch);
        } else if !is_equal(&token, &grounds.descriptor.token) {
            self.reject(Denial::Token);
        } else {
            self.peer = Some(peer);
            self.is_accepted = true;
        }
        Ok(())
    }

    /// Welcomes a peer whose greeting was accepted. By then what it had before is over, so that the card is good.
    pub(crate) fn welcome(&mut self, grounds: &Grounds, poster: Option<&mut (dyn Poster + 'static)>) {
        if !std::mem::take(&mut self.is_accepted) {
            return;
        }
        let mut payload = Vec::new();
        put_regions(&mut payload, &grounds.descriptor.regions);
        match poster.map(Poster::card) {
            None => {}
            Some(Ok(card)) => put_bytes(&mut payload, &card),
            Some(Err(_)) => {
                // Nobody can write here for now. It is as if no more peers were taken.
                self.peer = None;
                return self.reject(Denial::Full);
            }
        }
        let shown = match grounds.carriage {
            Carriage::Mapped => grounds.regions.iter().map(|region| Arc::clone(region.memory())).collect(),
            Carriage::Stream | Carriage::Posted => Vec::new(),
        };
        self.link.show(Word::Welcome, OpId(0), 0, &payload, shown);
    }

    /// Whether it holds leave to write: only its own word, or a fence, says that it does not.
    pub(crate) fn may_write(&self) -> bool {
        !self.writing.is_empty()
    }

    /// Whether it has been told how to reach the regions here.
    pub(crate) fn holds_card(&self) -> bool {
        self.peer.is_some() && !self.is_accepted
    }

    /// Whether it holds leave to move anything.
    pub(crate) fn may_move(&self) -> bool {
        self.may_write() || !self.lending.is_empty()
    }

    /// Checks what a peer wants to write or read.
    fn admit(
        &self,
        header: &Header,
        payload: &[u8],
        grounds: &Grounds,
        revoked: &Revocations,
        peer: PeerId,
    ) -> Result<Scatter, Refusal> {
        let op = OpId(header.op);
        if revoked.contains(peer, op) {
            return Err(Refusal::Revoked);
        }
        if self.link.is_landing(op) || self.writing.contains_key(&op) || self.lending.contains(&op) {
            return Err(Refusal::Duplicate);
        }
        let open = self.link.landing_count() + self.link.sending_count() + self.writing.len() + self.lending.len();
        if open >= grounds.limits.ops_max {
            return Err(Refusal::Busy);
        }
        let region = usize::try_from(header.arg).ok().and_then(|index| grounds.regions.get(index));
        let region = region.ok_or(Refusal::OutOfRange)?;
        let mut reader = Reader::new(payload);
        let mut runs = Vec::with_capacity(payload.len() / 8);
        while let Ok(first) = reader.u32() {
            runs.push(Run { first, blocks: reader.u32().map_err(|_| Refusal::OutOfRange)? });
        }
        if header.word == Word::Open && overlap(runs.iter().copied()).is_some() {
            return Err(Refusal::OutOfRange);
        }
        Scatter::new(region.clone(), runs).map_err(|_| Refusal::OutOfRange)
    }

    fn refuse(&mut self, op: OpId, why: Failure) {
        self.link.say(Word::Nack, op, nack(&why), &[]);
    }

    /// Takes an operation's blocks back.
    pub(crate) fn revoke(&mut self, op: OpId) -> Touch {
        if self.writing.contains_key(&op) {
            self.link.say(Word::Revoke, op, 0, &[]);
            return Touch::Quarantined;
        }
        if self.link.drop_landing(op) {
            self.refuse(op, Failure::Refused(Refusal::Revoked));
        }
        self.link.stop_sending(op);
        Touch::Settled
    }
}

/// Compares in a time that says nothing about where they differ.
fn is_equal(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}
