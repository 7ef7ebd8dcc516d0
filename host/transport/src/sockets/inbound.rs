//! A peer that has connected to this endpoint: its writes land here, its reads are served from here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::link::{Arrived, Link};
use super::outbound::mapped;
use super::posting::Poster;
use super::{Carriage, Grounds, worst};
use crate::descriptor::{get_regions, put_regions};
use crate::frame::{Denial, Header, Word, nack};
use crate::grants::Grants;
use crate::memory::Mapping;
use crate::scatter::{Run, Scatter, copy, overlap};
use crate::wire::{Reader, put_bytes};
use crate::{Event, Failure, Gone, GrantId, Layout, OpId, PeerId, Refusal, Region, Touch, TransportError, VERSION};

/// Bytes copied in one turn out of a peer's memory: about a millisecond, after which others are heard.
const BYTES_A_TURN: usize = 4 * 1024 * 1024;

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

/// What a peer may not write any more, and what it may write.
pub(crate) type Permits<'a> = (&'a Revocations, &'a Grants);

/// A peer's write whose bytes are copied here.
struct Pull {
    op: OpId,
    from: Scatter,
    to: Scatter,
    done: u64,
}

/// What a peer asks for.
struct Wanted {
    grant: Option<GrantId>,
    runs: Vec<Run>,
    /// Where the bytes come from, if they are to be copied here: a region of the peer's, and runs of it.
    source: Option<(u16, Vec<Run>)>,
}

/// What was found right.
struct Admitted {
    grant: Option<GrantId>,
    here: Scatter,
    there: Option<Scatter>,
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
    /// Its regions, mapped to read, where this end copies.
    theirs: Vec<Region>,
    /// Take turns, a piece each.
    pulls: VecDeque<Pull>,
    /// Its operations that are open under a grant.
    under: BTreeMap<OpId, GrantId>,
    /// Since when it owes the word that it does not write any more under a grant that was taken back.
    owes_since: Option<Instant>,
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
            theirs: Vec::new(),
            pulls: VecDeque::new(),
            under: BTreeMap::new(),
            owes_since: None,
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
        permits: Permits<'_>,
        events: &mut Vec<Event>,
    ) -> Result<bool, Gone> {
        let now = Instant::now();
        let silence_max = grounds.limits.silence_max;
        let is_long_ago = |since: Instant| now.saturating_duration_since(since) >= silence_max;
        let is_late = self.peer.is_none() && is_long_ago(self.since);
        // Who does not say that it stopped is sent away, and that is certain.
        if is_late || self.owes_since.is_some_and(is_long_ago) || self.link.is_silent(now, silence_max) {
            return Err(Gone::Silent);
        }
        if self.is_rejected {
            return self.dismiss();
        }
        let mut arrived = Vec::new();
        let read = self.link.read(&mut arrived);
        for what in arrived {
            self.take(what, grounds, permits, events)?;
        }
        let pulled = self.pull(events);
        if let Err(Gone::Version { .. }) = read {
            self.reject(Denial::Version);
            return self.dismiss();
        }
        let wrote = self.link.write()?;
        Ok(read? || wrote || pulled)
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
        permits: Permits<'_>,
        events: &mut Vec<Event>,
    ) -> Result<(), Gone> {
        let (revoked, grants) = permits;
        let (header, payload) = match what {
            Arrived::Control(header, payload) => (header, payload),
            Arrived::Landed(op, bytes) => {
                let peer = self.peer.ok_or(Gone::Protocol("data before a greeting"))?;
                self.landed(peer, op, bytes, events);
                return Ok(());
            }
            Arrived::Corrupt(op) => {
                self.under.remove(&op);
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
            Word::Open | Word::OpenUnder => match self.admit(&header, &payload, grounds, permits, peer) {
                Ok(admitted) => self.open(op, admitted, grounds.carriage),
                Err(why) => self.refuse(op, Failure::Refused(why)),
            },
            Word::Fetch => match self.admit(&header, &payload, grounds, permits, peer) {
                Ok(_) if grounds.carriage == Carriage::Posted => {
                    self.lending.insert(op);
                    self.link.say(Word::Ready, op, 0, &[]);
                }
                Ok(Admitted { here, .. }) => self.link.send(op, here),
                Err(why) => self.refuse(op, Failure::Refused(why)),
            },
            Word::Doorbell => match self.writing.remove(&op) {
                Some(bytes) if bytes == header.arg => {
                    // Words may have crossed. It writes no more, which is what was to be known.
                    if revoked.contains(peer, op) {
                        self.refuse(op, Failure::Refused(Refusal::Revoked));
                        events.push(Event::Revoked { peer, op });
                    } else if self.under.get(&op).is_some_and(|grant| !grants.holds(peer, *grant)) {
                        self.refuse(op, Failure::Refused(Refusal::NotGranted));
                    } else {
                        self.landed(peer, op, bytes, events);
                    }
                    self.stopped(op, grants, peer);
                }
                Some(_) => return Err(Gone::Protocol("a doorbell for other bytes than were opened")),
                // Revoked, and the peer's word for it is on its way; or over.
                None => {}
            },
            Word::Cancel => {
                self.link.drop_landing(op);
                self.link.stop_sending(op);
                self.lending.remove(&op);
                self.pulls.retain(|pull| pull.op != op);
                if self.writing.remove(&op).is_some() && revoked.contains(peer, op) {
                    events.push(Event::Revoked { peer, op });
                }
                self.stopped(op, grants, peer);
                self.link.say(Word::Still, op, 0, &[]);
            }
            Word::Revoked => {
                if self.writing.remove(&op).is_some() && revoked.contains(peer, op) {
                    events.push(Event::Revoked { peer, op });
                }
                self.stopped(op, grants, peer);
            }
            _ => return Err(Gone::Protocol("a word that only this end may say")),
        }
        Ok(())
    }

    /// Lets bytes of a write come, by whom they are carried.
    fn open(&mut self, op: OpId, admitted: Admitted, carriage: Carriage) {
        let Admitted { grant, here, there } = admitted;
        self.under.extend(grant.map(|grant| (op, grant)));
        match (carriage, there) {
            (Carriage::Stream, _) => self.link.land(op, here),
            (Carriage::Pulled, Some(from)) => self.pulls.push_back(Pull { op, from, to: here, done: 0 }),
            _ => {
                self.writing.insert(op, here.bytes());
                self.link.say(Word::Ready, op, 0, &[]);
            }
        }
    }

    fn landed(&mut self, peer: PeerId, op: OpId, bytes: u64, events: &mut Vec<Event>) {
        self.under.remove(&op);
        self.link.say(Word::Ack, op, 0, &[]);
        events.push(Event::Landed { peer, op, bytes });
    }

    /// Copies what the turn allows out of the peer's memory. Returns whether anything moved.
    fn pull(&mut self, events: &mut Vec<Event>) -> bool {
        let Some(peer) = self.peer else { return false };
        let mut budget = BYTES_A_TURN;
        let mut moved = false;
        while budget > 0
            && let Some(mut pull) = self.pulls.pop_front()
        {
            let copied = copy(&pull.from, &pull.to, pull.done, budget);
            pull.done += copied as u64;
            budget -= copied;
            moved = true;
            if pull.done < pull.to.bytes() {
                self.pulls.push_back(pull);
            } else {
                self.landed(peer, pull.op, pull.done, events);
            }
        }
        moved
    }

    /// Whether there is something to copy.
    pub(crate) fn has_pulls(&self) -> bool {
        !self.pulls.is_empty()
    }

    /// An operation writes no more. What it owed to a grant that was taken back is paid when it was the last.
    fn stopped(&mut self, op: OpId, grants: &Grants, peer: PeerId) {
        self.under.remove(&op);
        if self.under.values().all(|grant| grants.holds(peer, *grant)) {
            self.owes_since = None;
        }
    }

    fn greet(&mut self, payload: &[u8], grounds: &Grounds) -> Result<(), Gone> {
        let read = || -> Result<([u8; 16], PeerId, PeerId, Vec<Layout>), TransportError> {
            let mut reader = Reader::new(payload);
            let token = reader.array()?;
            let peer = PeerId { endpoint: reader.u64()?, epoch: reader.u64()? };
            let meant = PeerId { endpoint: reader.u64()?, epoch: reader.u64()? };
            let is_pulled = grounds.carriage == Carriage::Pulled;
            let regions = if is_pulled { get_regions(&mut reader)? } else { Vec::new() };
            reader.end()?;
            Ok((token, peer, meant, regions))
        };
        let (token, peer, meant, regions) = read().map_err(|_| Gone::Protocol("a greeting that is none"))?;
        if meant != grounds.descriptor.identity {
            self.reject(Denial::Epoch);
        } else if !is_equal(&token, &grounds.descriptor.token) {
            self.reject(Denial::Token);
        } else {
            let fds = std::mem::take(&mut self.link.fds);
            self.theirs = mapped(fds, &regions, Mapping::of_memfd_to_read)?;
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
            Carriage::Stream | Carriage::Pulled | Carriage::Posted => Vec::new(),
        };
        self.link.show(Word::Welcome, OpId(0), 0, &payload, shown);
    }

    /// Whether it holds leave to write: only its own word, or a fence, says that it does not.
    pub(crate) fn may_write(&self) -> bool {
        !self.writing.is_empty()
    }

    /// Whether it holds leave to write under this grant.
    pub(crate) fn may_write_under(&self, grant: GrantId) -> bool {
        self.under.iter().any(|(op, under)| *under == grant && self.writing.contains_key(op))
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
        (revoked, grants): Permits<'_>,
        peer: PeerId,
    ) -> Result<Admitted, Refusal> {
        let op = OpId(header.op);
        if revoked.contains(peer, op) {
            return Err(Refusal::Revoked);
        }
        if self.link.is_landing(op)
            || self.writing.contains_key(&op)
            || self.lending.contains(&op)
            || self.pulls.iter().any(|pull| pull.op == op)
        {
            return Err(Refusal::Duplicate);
        }
        let moving = self.link.landing_count() + self.link.sending_count() + self.pulls.len();
        if moving + self.writing.len() + self.lending.len() >= grounds.limits.ops_max {
            return Err(Refusal::Busy);
        }
        let index = u16::try_from(header.arg).map_err(|_| Refusal::OutOfRange)?;
        let region = grounds.regions.get(usize::from(index)).ok_or(Refusal::OutOfRange)?;
        let is_pulled = grounds.carriage == Carriage::Pulled;
        let Wanted { grant, runs, source } = wanted(header.word, payload, is_pulled).ok_or(Refusal::OutOfRange)?;
        if header.word != Word::Fetch && overlap(runs.iter().copied()).is_some() {
            return Err(Refusal::OutOfRange);
        }
        // Nobody reads a guarded memory, and nobody writes to it but under a grant.
        if grounds.descriptor.is_guarded && !grant.is_some_and(|grant| grants.allow(peer, grant, index, &runs)) {
            return Err(Refusal::NotGranted);
        }
        let here = Scatter::new(region.clone(), runs).map_err(|_| Refusal::OutOfRange)?;
        let there = source.map(|(index, runs)| {
            let region = self.theirs.get(usize::from(index)).ok_or(Refusal::OutOfRange)?;
            let there = Scatter::new(region.clone(), runs).map_err(|_| Refusal::OutOfRange)?;
            if there.bytes() == here.bytes() { Ok(there) } else { Err(Refusal::OutOfRange) }
        });
        Ok(Admitted { grant, there: there.transpose()?, here })
    }

    fn refuse(&mut self, op: OpId, why: Failure) {
        self.link.say(Word::Nack, op, nack(&why), &[]);
    }

    /// Takes an operation's blocks back, and says why.
    pub(crate) fn revoke(&mut self, op: OpId, why: Refusal) -> Touch {
        if self.writing.contains_key(&op) {
            self.link.say(Word::Revoke, op, nack(&Failure::Refused(why)), &[]);
            return Touch::Quarantined;
        }
        let pulls = self.pulls.len();
        self.pulls.retain(|pull| pull.op != op);
        if self.link.drop_landing(op) || self.pulls.len() < pulls {
            self.refuse(op, Failure::Refused(why));
        }
        self.link.stop_sending(op);
        self.under.remove(&op);
        Touch::Settled
    }

    /// Takes the blocks of all its operations under this grant back.
    pub(crate) fn withdraw(&mut self, grant: GrantId) -> Touch {
        let ops: Vec<OpId> = self.under.iter().filter(|(_, under)| **under == grant).map(|(op, _)| *op).collect();
        let touches = ops.into_iter().map(|op| self.revoke(op, Refusal::NotGranted));
        let touch = touches.fold(Touch::Settled, worst);
        if touch == Touch::Quarantined {
            self.owes_since.get_or_insert_with(Instant::now);
        }
        touch
    }
}

/// Reads what a peer asks for; `is_pulled` where bytes under a grant are copied here. None when it makes no sense.
fn wanted(word: Word, payload: &[u8], is_pulled: bool) -> Option<Wanted> {
    let mut reader = Reader::new(payload);
    let some = |count: Option<u32>, reader: &mut Reader<'_>| {
        let mut runs = Vec::new();
        while count.is_none_or(|count| runs.len() < count as usize)
            && let Ok(first) = reader.u32()
        {
            runs.push(Run { first, blocks: reader.u32().ok()? });
        }
        count.is_none_or(|count| runs.len() == count as usize).then_some(runs)
    };
    if word != Word::OpenUnder {
        return Some(Wanted { grant: None, runs: some(None, &mut reader)?, source: None });
    }
    let grant = Some(GrantId(reader.u64().ok()?));
    let count = reader.u32().ok()?;
    let runs = some(Some(count), &mut reader)?;
    let source = if is_pulled { Some((reader.u16().ok()?, some(None, &mut reader)?)) } else { None };
    reader.end().ok()?;
    Some(Wanted { grant, runs, source })
}

/// Compares in a time that says nothing about where they differ.
fn is_equal(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}
