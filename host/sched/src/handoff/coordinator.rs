//! The gateway's side. Question answered: whose is the request now, and how does its hand-off end?
//!
//! ```text
//!   begin ─► Reserving ─ promised ─► Opening ─ begun ─► Moving ─ installed ─► Settling(receiver) ─ taken ─► handed off
//!                │                      │                  │                      │
//!                │                      └──── cannot ──────┴──► Settling(sender) ─┴ taken ─► fell back to the sender
//!                └─ refused, timeout                                 │
//!                        ▼                                           ▼
//!                  fell back anew, or failed ◄──────────── nobody is left that can take
//!
//!   Settling(x) ─ no answer ─► Fencing(x) ─ lease of x + grace over ─► as if x had failed
//! ```
//! **Ownership.** The request is the coordinator's until a party has taken it: before that no party emits. One party at a time is told to
//! take; another one only when the first has said that it never will, is a dead incarnation, or holds no lease any more. So there is one
//! owner at every moment, and it changes once.

mod snapshot;

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::time::MonotoneNow;
use penstock_base::{Duration, Instant, Manifest, RequestId, TransferId};

use super::config::CoordinatorConfig;
use super::lease::Granted;
use super::message::{Caps, Failure, Open, Order, Peer, Refusal, Report, Reserve, Said};
use super::slots::Slots;

/// What a request may fall back to when its hand-off does not come about. Chosen for each request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fallback {
    /// Decode where it was prefilled, if that is possible; else anew.
    AtSender,
    /// From the queue again, on the unified path.
    Anew,
    /// A typed error.
    Never,
}

/// A request that is to be handed off.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// The request, of one sequence.
    pub manifest: Arc<Manifest>,
    /// Which attempt of it.
    pub attempt: u16,
    /// Where it is prefilled.
    pub sender: Peer,
    /// Where it is decoded.
    pub receiver: Peer,
    /// What its output may come to.
    pub caps: Caps,
    /// What else may be done.
    pub fallback: Fallback,
}

/// One of the two parties.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// Prefill.
    Sender,
    /// Decode.
    Receiver,
}

/// What happens to a coordinator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CoordinatorEvent {
    /// Hand this request off.
    Begin(Ask),
    /// A party's word.
    Said {
        /// In which role it speaks.
        side: Side,
        /// What it says.
        said: Said,
    },
    /// The request is over for its client.
    Cancel(TransferId),
    /// A replica has this incarnation now.
    PeerUp(Peer),
    /// Time has passed.
    Tick,
}

/// What a coordinator wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CoordinatorEffect {
    /// A hand-off has this id from now on.
    Begun {
        /// The id.
        transfer: TransferId,
        /// The request.
        request: RequestId,
    },
    /// To the prefill replica.
    ToSender {
        /// About which transfer.
        transfer: TransferId,
        /// To which incarnation.
        to: Peer,
        /// What.
        order: Order<Open>,
    },
    /// To the decode replica.
    ToReceiver {
        /// About which transfer.
        transfer: TransferId,
        /// To which incarnation.
        to: Peer,
        /// What.
        order: Order<Reserve>,
    },
    /// How the hand-off ended. Exactly once for each [`CoordinatorEvent::Begin`].
    Ended {
        /// The request.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// How.
        end: End,
    },
    /// A word of an old incarnation, or about an unknown transfer. Counted, without effect on any hand-off.
    Stale,
}

/// How a hand-off ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum End {
    /// This replica decodes it.
    HandedOff(Peer),
    /// The prefill replica decodes it itself.
    AtSender(Peer, Failure),
    /// Nobody has emitted anything: it goes the unified path, as a new attempt.
    Anew(Failure),
    /// A typed error. Nothing was emitted, so it may be sent again.
    Failed(Failure),
    /// Its client has left.
    Cancelled,
}

/// The effects of one step.
pub type CoordinatorEffects = Vec<CoordinatorEffect>;

/// Where a hand-off stands. The diagram is at the top of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CoordinatorState {
    /// The receiver was asked for room.
    Reserving,
    /// The sender was told to begin.
    Opening,
    /// KV is computed and moves.
    Moving,
    /// This party was told to take, and nobody else may be.
    Settling(Side),
    /// It did not answer: nothing is told it until it certainly does not act.
    Fencing(Side),
    /// Ended; the parties are told to let go.
    Closing,
}

/// What is known of one party.
#[derive(Clone, Copy, Debug)]
struct Party {
    peer: Peer,
    /// It was told to begin.
    begun: bool,
    /// It said that all is delivered (sender) or installed (receiver).
    done: bool,
    /// It was told to take.
    told_to_take: bool,
    /// It never will take, or it does not exist any more.
    gone: Option<Failure>,
    /// It has let go.
    closed: bool,
    /// The lease that it may believe in.
    granted: Granted,
    /// Its last word, or our last question.
    asked: Instant,
}

impl Party {
    fn new(peer: Peer, now: Instant) -> Self {
        Self {
            peer,
            begun: false,
            done: false,
            told_to_take: false,
            gone: None,
            closed: false,
            granted: Granted::default(),
            asked: now,
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    ask: Ask,
    state: CoordinatorState,
    sender: Party,
    receiver: Party,
    /// Leading blocks that the receiver has.
    first_block: u32,
    /// End of the present wait.
    deadline: Instant,
    /// When what is not answered is said again.
    repeat_at: Instant,
    /// The party whose work goes on after the end.
    owner: Option<Side>,
    /// Why it is not handed off, as far as it is known.
    why: Failure,
}

impl Entry {
    fn party(&mut self, side: Side) -> &mut Party {
        match side {
            Side::Sender => &mut self.sender,
            Side::Receiver => &mut self.receiver,
        }
    }
}

/// The coordinating side of one gateway. Pure and total: [`Self::step`] is the only way in.
#[derive(Clone, Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    clock: MonotoneNow,
    slots: Slots<Entry>,
    /// Counts transfers.
    next: u64,
}

impl Coordinator {
    /// Without transfers.
    pub fn new(config: CoordinatorConfig, now: Instant) -> Self {
        let config = config.clamped();
        Self { clock: MonotoneNow::starting_at(now), slots: Slots::new(config.transfers), next: 1, config }
    }

    /// Hand-offs here, those that are being closed included.
    pub fn transfers(&self) -> u32 {
        self.slots.len()
    }

    /// Where a hand-off stands; none when it is not here.
    pub fn state(&self, transfer: TransferId) -> Option<CoordinatorState> {
        self.slots.iter().find(|(id, _)| *id == transfer).map(|(_, entry)| entry.state)
    }

    /// Advances by one event. Total: what does not fit is answered or counted, and changes nothing else.
    pub fn step(&mut self, now: Instant, event: CoordinatorEvent, out: &mut CoordinatorEffects) {
        let now = self.clock.observe(now);
        match event {
            CoordinatorEvent::Begin(ask) => self.begin(now, ask, out),
            CoordinatorEvent::Said { side, said } => self.hear(now, side, said, out),
            CoordinatorEvent::Cancel(transfer) => match self.slots.place(transfer) {
                Some(place) => self.cancel(now, place, out),
                None => out.push(CoordinatorEffect::Stale),
            },
            CoordinatorEvent::PeerUp(peer) => self.peer_up(now, peer, out),
            CoordinatorEvent::Tick => {}
        }
        self.keep_time(now, out);
    }

    /// When to step with [`CoordinatorEvent::Tick`] if nothing else happens before.
    pub fn next_wake(&self) -> Instant {
        let every = self.probe_every();
        let wake = |entry: &Entry| {
            let probe = (entry.sender.asked.min(entry.receiver.asked)) + every;
            let probes = matches!(entry.state, CoordinatorState::Opening | CoordinatorState::Moving);
            entry.deadline.min(entry.repeat_at).min(if probes { probe } else { Instant::NEVER })
        };
        self.slots.iter().map(|(_, entry)| wake(entry)).min().unwrap_or(Instant::NEVER)
    }

    /// Half a lease: parties speak three times a lease, so silence means that something is lost.
    fn probe_every(&self) -> Duration {
        Duration(self.config.leases.hold.0 / 2)
    }

    fn begin(&mut self, now: Instant, ask: Ask, out: &mut CoordinatorEffects) {
        let (request, attempt) = (ask.manifest.request, ask.attempt);
        let id = TransferId::new(self.config.epoch, self.next);
        let (Some(transfer), false) = (id, self.slots.is_full()) else {
            let end = without(ask.fallback, Failure::TableFull);
            return out.push(CoordinatorEffect::Ended { request, attempt, end });
        };
        self.next += 1;
        out.push(CoordinatorEffect::Begun { transfer, request });
        let entry = Entry {
            state: CoordinatorState::Reserving,
            sender: Party::new(ask.sender, now),
            receiver: Party { begun: true, ..Party::new(ask.receiver, now) },
            first_block: 0,
            deadline: now + self.config.timing.reserve,
            repeat_at: now,
            owner: None,
            why: Failure::ReserveTimeout,
            ask,
        };
        // The reservation goes out in the same step: it is due.
        self.slots.insert(transfer, entry);
    }

    fn cancel(&mut self, now: Instant, place: u32, out: &mut CoordinatorEffects) {
        let Some((_, entry)) = self.slots.at(place) else { return };
        match entry.state {
            CoordinatorState::Closing => out.push(CoordinatorEffect::Stale),
            _ => self.end(now, place, End::Cancelled, None, out),
        }
    }

    // --- Words of the parties --------------------------------------------------------------------------------------------------

    fn hear(&mut self, now: Instant, side: Side, said: Said, out: &mut CoordinatorEffects) {
        let transfer = said.transfer;
        let Some(place) = self.slots.place(transfer) else {
            // What lives on without us is an orphan: it may go.
            if said.stamp.is_some() {
                out.push(close_order(side, transfer, said.from, true));
            }
            return out.push(CoordinatorEffect::Stale);
        };
        let hold = self.config.leases.hold;
        let Some((_, entry)) = self.slots.at(place) else { return };
        let (state, party) = (entry.state, entry.party(side));
        if party.peer != said.from {
            if party.peer.is_before(said.from) {
                return self.lost(now, place, side, Failure::PeerRestarted, out);
            }
            return out.push(CoordinatorEffect::Stale);
        }
        party.asked = now;
        if let Some(echo) = said.stamp.filter(|_| keeps(state, side)) {
            party.granted.extend(now, hold);
            out.push(keep_order(side, transfer, said.from, echo));
        }
        match (state, said.report) {
            (CoordinatorState::Closing, report) => self.hear_closing(place, side, report, out),
            (_, Report::Ready { first_block }) => self.ready(now, place, side, first_block),
            (_, Report::Delivered) if side == Side::Sender => {
                party.done = true;
                self.ready(now, place, side, 0);
            }
            (_, Report::Installed) if side == Side::Receiver => {
                party.done = true;
                if matches!(state, CoordinatorState::Opening | CoordinatorState::Moving) {
                    self.tell_to_take(now, place, Side::Receiver);
                }
            }
            (CoordinatorState::Settling(on) | CoordinatorState::Fencing(on), Report::Taken) if on == side => {
                let (peer, why) = (party.peer, entry.why);
                let end = match side {
                    Side::Receiver => End::HandedOff(peer),
                    Side::Sender => End::AtSender(peer, why),
                };
                self.end(now, place, end, Some(side), out);
            }
            // It was never told to, or has already been passed over.
            (_, Report::Taken) => out.push(CoordinatorEffect::Stale),
            (_, Report::Stuck(why)) if side == Side::Sender => self.stuck(now, place, why, out),
            // Said in the wrong role.
            (_, Report::Delivered | Report::Installed | Report::Stuck(_)) => out.push(CoordinatorEffect::Stale),
            (_, Report::Refused(refusal)) => {
                let why = match refusal {
                    Refusal::StaleEpoch => Failure::PeerRestarted,
                    _ => Failure::PeerRefused(refusal),
                };
                self.lost(now, place, side, why, out);
            }
            (_, Report::Failed(why)) => self.lost(now, place, side, why, out),
            // It may have taken and forgotten: only its lease can tell.
            (_, Report::Unknown) if party.told_to_take => out.push(CoordinatorEffect::Stale),
            (_, Report::Unknown | Report::Closed) => self.lost(now, place, side, Failure::Closed, out),
        }
    }

    fn hear_closing(&mut self, place: u32, side: Side, report: Report, out: &mut CoordinatorEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let end_work = entry.owner != Some(side);
        let party = entry.party(side);
        let peer = party.peer;
        match report {
            Report::Closed | Report::Failed(_) | Report::Refused(_) | Report::Unknown => party.closed = true,
            _ => out.push(close_order(side, transfer, peer, end_work)),
        }
        if entry.sender.closed && entry.receiver.closed {
            self.slots.remove(place);
        }
    }

    fn ready(&mut self, now: Instant, place: u32, side: Side, first_block: u32) {
        let timing = self.config.timing;
        let Some((_, entry)) = self.slots.at(place) else { return };
        match (entry.state, side) {
            (CoordinatorState::Reserving, Side::Receiver) => {
                entry.first_block = first_block;
                entry.state = CoordinatorState::Opening;
                entry.sender.begun = true;
                entry.why = Failure::OpenTimeout;
                (entry.deadline, entry.repeat_at) = (now + timing.open, now);
            }
            (CoordinatorState::Opening, Side::Sender) => {
                entry.state = CoordinatorState::Moving;
                entry.why = Failure::TransferTimeout;
                (entry.deadline, entry.repeat_at) = (now + timing.transfer, Instant::NEVER);
            }
            _ => {}
        }
    }

    fn stuck(&mut self, now: Instant, place: u32, why: Failure, out: &mut CoordinatorEffects) {
        let Some((_, entry)) = self.slots.at(place) else { return };
        if matches!(entry.state, CoordinatorState::Opening | CoordinatorState::Moving) {
            entry.why = why;
            self.next_best(now, place, out);
        }
    }

    /// This party will never take the request.
    fn lost(&mut self, now: Instant, place: u32, side: Side, why: Failure, out: &mut CoordinatorEffects) {
        let settle = self.config.timing.settle;
        let Some((_, entry)) = self.slots.at(place) else { return };
        let party = entry.party(side);
        if party.gone.is_some() {
            return;
        }
        party.gone = Some(why);
        party.closed |= why == Failure::PeerRestarted;
        match entry.state {
            CoordinatorState::Closing => {
                if entry.sender.closed && entry.receiver.closed {
                    self.slots.remove(place);
                }
            }
            CoordinatorState::Settling(on) | CoordinatorState::Fencing(on) if on != side => {}
            // All has left the sender: the receiver may still bring it to an end.
            CoordinatorState::Moving if side == Side::Sender && entry.sender.done => {
                entry.why = why;
                entry.deadline = entry.deadline.min(now + settle);
            }
            _ => {
                entry.why = why;
                self.next_best(now, place, out);
            }
        }
    }

    fn peer_up(&mut self, now: Instant, peer: Peer, out: &mut CoordinatorEffects) {
        for place in 0..self.slots.places() {
            for side in [Side::Receiver, Side::Sender] {
                let Some((_, entry)) = self.slots.at(place) else { continue };
                if entry.party(side).peer.is_before(peer) {
                    self.lost(now, place, side, Failure::PeerRestarted, out);
                }
            }
        }
    }

    // --- Whose it is -----------------------------------------------------------------------------------------------------------

    /// Nobody is told to take, or the one that was cannot any more: who is next?
    fn next_best(&mut self, now: Instant, place: u32, out: &mut CoordinatorEffects) {
        let Some((_, entry)) = self.slots.at(place) else { return };
        let at_sender = entry.ask.fallback == Fallback::AtSender;
        if entry.receiver.done && entry.receiver.gone.is_none() {
            self.tell_to_take(now, place, Side::Receiver);
        } else if at_sender && entry.sender.begun && entry.sender.gone.is_none() {
            self.tell_to_take(now, place, Side::Sender);
        } else {
            let end = without(entry.ask.fallback, entry.why);
            self.end(now, place, end, None, out);
        }
    }

    fn tell_to_take(&mut self, now: Instant, place: u32, side: Side) {
        let settle = self.config.timing.settle;
        let Some((_, entry)) = self.slots.at(place) else { return };
        entry.state = CoordinatorState::Settling(side);
        entry.party(side).told_to_take = true;
        (entry.deadline, entry.repeat_at) = (now + settle, now);
    }

    fn end(&mut self, now: Instant, place: u32, end: End, owner: Option<Side>, out: &mut CoordinatorEffects) {
        let (leases, timing) = (self.config.leases, self.config.timing);
        let Some((_, entry)) = self.slots.at(place) else { return };
        let (request, attempt) = (entry.ask.manifest.request, entry.ask.attempt);
        out.push(CoordinatorEffect::Ended { request, attempt, end });
        entry.state = CoordinatorState::Closing;
        entry.owner = owner;
        entry.sender.closed |= !entry.sender.begun;
        entry.deadline = now + leases.hold + leases.grace + timing.settle;
        entry.repeat_at = now;
        if entry.sender.closed && entry.receiver.closed {
            self.slots.remove(place);
        }
    }

    // --- Time ------------------------------------------------------------------------------------------------------------------

    fn keep_time(&mut self, now: Instant, out: &mut CoordinatorEffects) {
        for place in 0..self.slots.places() {
            self.expire(now, place, out);
            self.repeat(now, place, out);
            self.probe(now, place, out);
        }
    }

    fn expire(&mut self, now: Instant, place: u32, out: &mut CoordinatorEffects) {
        let grace = self.config.leases.grace;
        let Some((_, entry)) = self.slots.at(place) else { return };
        if now < entry.deadline {
            return;
        }
        match entry.state {
            // It may have promised room; it does not exist for us any more.
            CoordinatorState::Reserving => {
                entry.receiver.gone = Some(entry.why);
                self.next_best(now, place, out);
            }
            CoordinatorState::Opening => {
                entry.sender.gone = Some(entry.why);
                self.next_best(now, place, out);
            }
            CoordinatorState::Moving => self.next_best(now, place, out),
            CoordinatorState::Settling(side) => {
                entry.state = CoordinatorState::Fencing(side);
                entry.deadline = entry.party(side).granted.over_at(grace).max(now);
                entry.repeat_at = Instant::NEVER;
                if entry.deadline == now {
                    self.expire(now, place, out);
                }
            }
            CoordinatorState::Fencing(side) => self.lost(now, place, side, Failure::Silent, out),
            // The leases of both are over: there is nothing that could be let go.
            CoordinatorState::Closing => {
                self.slots.remove(place);
            }
        }
    }

    fn repeat(&mut self, now: Instant, place: u32, out: &mut CoordinatorEffects) {
        let every = self.config.timing.repeat;
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        if now < entry.repeat_at {
            return;
        }
        entry.repeat_at = now + every;
        let (sender, receiver, ask) = (entry.sender, entry.receiver, &entry.ask);
        match entry.state {
            CoordinatorState::Reserving => {
                let order = Order::Begin(Reserve {
                    manifest: ask.manifest.clone(),
                    attempt: ask.attempt,
                    source: ask.sender,
                    caps: ask.caps,
                });
                out.push(CoordinatorEffect::ToReceiver { transfer, to: receiver.peer, order });
            }
            CoordinatorState::Opening => {
                let order = Order::Begin(Open {
                    manifest: ask.manifest.clone(),
                    attempt: ask.attempt,
                    destination: ask.receiver,
                    first_block: entry.first_block,
                    caps: ask.caps,
                });
                out.push(CoordinatorEffect::ToSender { transfer, to: sender.peer, order });
            }
            CoordinatorState::Settling(Side::Sender) => {
                out.push(CoordinatorEffect::ToSender { transfer, to: sender.peer, order: Order::Take });
            }
            CoordinatorState::Settling(Side::Receiver) => {
                out.push(CoordinatorEffect::ToReceiver { transfer, to: receiver.peer, order: Order::Take });
            }
            CoordinatorState::Closing => {
                for (side, party) in [(Side::Sender, sender), (Side::Receiver, receiver)] {
                    if !party.closed {
                        out.push(close_order(side, transfer, party.peer, entry.owner != Some(side)));
                    }
                }
            }
            CoordinatorState::Moving | CoordinatorState::Fencing(_) => entry.repeat_at = Instant::NEVER,
        }
    }

    /// Asks whoever has been silent for half a lease: a lost word about an end is found so.
    fn probe(&mut self, now: Instant, place: u32, out: &mut CoordinatorEffects) {
        let every = self.probe_every();
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        if !matches!(entry.state, CoordinatorState::Opening | CoordinatorState::Moving) {
            return;
        }
        for side in [Side::Sender, Side::Receiver] {
            let party = entry.party(side);
            if party.begun && party.gone.is_none() && now >= party.asked + every {
                let to = party.peer;
                out.push(match side {
                    Side::Sender => CoordinatorEffect::ToSender { transfer, to, order: Order::Probe },
                    Side::Receiver => CoordinatorEffect::ToReceiver { transfer, to, order: Order::Probe },
                });
            }
            // Asked or not to be asked: the next look is half a lease away.
            if now >= party.asked + every {
                party.asked = now;
            }
        }
    }

    /// Everything that must hold. The error names the first that does not.
    pub fn check(&self) -> Result<(), &'static str> {
        for (_, entry) in self.slots.iter() {
            let (sender, receiver) = (&entry.sender, &entry.receiver);
            let told = |party: &Party| party.told_to_take && party.gone.is_none();
            if told(sender) && told(receiver) {
                return Err("two parties may take one request");
            }
            let settles = match entry.state {
                CoordinatorState::Settling(Side::Sender) | CoordinatorState::Fencing(Side::Sender) => told(sender),
                CoordinatorState::Settling(Side::Receiver) | CoordinatorState::Fencing(Side::Receiver) => {
                    told(receiver)
                }
                CoordinatorState::Closing => true,
                _ => !told(sender) && !told(receiver),
            };
            if !settles {
                return Err("a party may take that the coordinator does not wait for");
            }
            if entry.state == CoordinatorState::Closing && sender.closed && receiver.closed {
                return Err("a hand-off that is over is still here");
            }
        }
        Ok(())
    }
}

/// Does a party's lease go on in this state? Not where the coordinator waits for it to run out, and not after the end.
fn keeps(state: CoordinatorState, side: Side) -> bool {
    state != CoordinatorState::Closing && state != CoordinatorState::Fencing(side)
}

/// The end when nobody takes it.
fn without(fallback: Fallback, why: Failure) -> End {
    match fallback {
        Fallback::AtSender | Fallback::Anew => End::Anew(why),
        Fallback::Never => End::Failed(why),
    }
}

fn keep_order(side: Side, transfer: TransferId, to: Peer, echo: Instant) -> CoordinatorEffect {
    match side {
        Side::Sender => CoordinatorEffect::ToSender { transfer, to, order: Order::Keep { echo } },
        Side::Receiver => CoordinatorEffect::ToReceiver { transfer, to, order: Order::Keep { echo } },
    }
}

fn close_order(side: Side, transfer: TransferId, to: Peer, end_work: bool) -> CoordinatorEffect {
    match side {
        Side::Sender => CoordinatorEffect::ToSender { transfer, to, order: Order::Close { end_work } },
        Side::Receiver => CoordinatorEffect::ToReceiver { transfer, to, order: Order::Close { end_work } },
    }
}
