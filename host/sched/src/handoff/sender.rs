//! The prefill side. Question answered: what of the prompt's KV may be written to the receiver now, and until when is it kept here?
//!
//! ```text
//!   Begin ─► Opening ─ welcome ─► Moving ─ all chunks + seal arrived ─► Delivered
//!               │                    │                                     │
//!               └────────────────────┴── cannot get across ─► Stuck ◄──────┘ (the receiver restarted)
//!
//!   Opening, Moving, Delivered, Stuck ─ take ─► Local ─ close ─► over
//!   any ─ close, lease over, prefill failed ─► Draining ─ reads done, or grace over ─► over
//! ```
//! KV is computed while it is sent. Until a `Close`, this side keeps all of it and can take the request itself; it emits nothing before it
//! has taken. It writes only under the receiver's lease, and stops when that is over without being told.

mod snapshot;

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::limits::{HANDOFF_RECENT_MAX, HANDOFF_RESENDS_MAX};
use penstock_base::time::MonotoneNow;
use penstock_base::{BlockRef, GatewayEpoch, Instant, TransferId};
use penstock_kv::Kv;

use super::config::PartyConfig;
use super::lease::Lease;
use super::message::{
    Ack, Between, Failure, Open, Order, Peer, Refusal, Report, Said, SenderWord, ToReceiver, ToSender,
};
use super::sender_io::{SenderEffect, SenderEffects, SenderEvent, SenderState};
use super::slots::{DeadGateways, Recent, Slots};
use super::terms::{Envelope, Grid, Seal};
use super::window::Outbox;

#[derive(Clone, Debug)]
struct Entry {
    ask: Open,
    envelope: Arc<Envelope>,
    state: SenderState,
    /// The coordinator keeps this transfer.
    hold: Lease,
    /// The receiver lets us write.
    write: Lease,
    out: Outbox,
    /// Leased here, in the order of the sequence.
    sources: Vec<BlockRef>,
    seal: Option<Seal>,
    /// The receiver has the seal.
    sealed: bool,
    /// When what is missing is sent again.
    resend_at: Instant,
    /// In a row without anything new.
    resends: u32,
    /// Bootstrap, and silence once the lease to write is over.
    patience: Instant,
    /// When reads are over without the transport's word; none while writes may begin.
    quiet_by: Option<Instant>,
}

/// What is answered about a transfer that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Over {
    Taken,
    Failed(Failure),
}

/// The sending side of one replica. Pure and total: [`Self::step`] is the only way in.
#[derive(Clone, Debug)]
pub struct Sender {
    pub(super) config: PartyConfig,
    clock: MonotoneNow,
    slots: Slots<Entry>,
    recent: Recent<Over>,
    dead: DeadGateways,
    /// Where the next round over the transfers begins.
    turn: u32,
    draining: bool,
    /// As last said.
    accepting: bool,
    orphans: u64,
}

impl Sender {
    /// Without transfers.
    pub fn new(config: PartyConfig, now: Instant) -> Self {
        let config = config.clamped();
        Self {
            clock: MonotoneNow::starting_at(now),
            slots: Slots::new(config.transfers),
            recent: Recent::new(HANDOFF_RECENT_MAX),
            dead: DeadGateways::default(),
            turn: 0,
            draining: false,
            accepting: true,
            orphans: 0,
            config,
        }
    }

    /// Transfers that were ended because nobody kept them.
    pub fn orphans(&self) -> u64 {
        self.orphans
    }

    /// Would another prompt be computed for somebody else?
    pub fn accepts(&self) -> bool {
        self.room_for(1).is_ok()
    }

    /// Transfers here, whatever they hold.
    pub fn transfers(&self) -> u32 {
        self.slots.len()
    }

    /// Where a transfer stands; none when it is not here.
    pub fn state(&self, transfer: TransferId) -> Option<SenderState> {
        self.slots.iter().find(|(id, _)| *id == transfer).map(|(_, entry)| entry.state)
    }

    /// Chunks of all transfers that are under way.
    pub fn inflight_chunks(&self) -> u32 {
        let moving = self.slots.iter().filter(|(_, entry)| entry.state == SenderState::Moving);
        moving.map(|(_, entry)| entry.out.inflight()).sum()
    }

    /// Blocks that transfers hold here, or will once their prompts are computed.
    pub fn held_blocks(&self) -> u64 {
        self.slots.iter().map(|(_, entry)| u64::from(entry.envelope.grid.blocks)).sum()
    }

    /// Advances by one event. Total: what does not fit is answered or counted, and changes nothing else.
    pub fn step(&mut self, now: Instant, event: SenderEvent, kv: &mut Kv, out: &mut SenderEffects) {
        let now = self.clock.observe(now);
        match event {
            SenderEvent::Order { transfer, to, order } => self.order(now, transfer, to, order, kv, out),
            SenderEvent::Receiver(message) => self.hear(now, message, out),
            SenderEvent::Placed { transfer, blocks } => self.placed(transfer, &blocks, kv, out),
            SenderEvent::Computed { transfer, blocks, layers } => match self.slots.get(transfer) {
                Some(entry) => entry.out.set_ready(entry.envelope.grid.ready(blocks, layers)),
                None => out.push(SenderEffect::Stale),
            },
            SenderEvent::Prefilled { transfer, seal } => self.prefilled(now, transfer, seal, out),
            SenderEvent::PrefillFailed(transfer) => match self.slots.place(transfer) {
                Some(place) => self.give_up(now, place, Failure::Prefill, kv, out),
                None => out.push(SenderEffect::Stale),
            },
            SenderEvent::Quiet(transfer) => self.quiet(now, transfer, kv, out),
            SenderEvent::PeerUp(peer) => self.peer_up(now, peer, out),
            SenderEvent::GatewayUp(epoch) => self.dead.remove(epoch),
            SenderEvent::GatewayDown(epoch) => self.gateway_down(now, epoch, kv, out),
            SenderEvent::Drain => self.draining = true,
            SenderEvent::Tick => {}
        }
        self.keep_time(now, kv, out);
        self.pump(now, out);
        self.tell_pressure(out);
    }

    /// When to step with [`SenderEvent::Tick`] if nothing else happens before.
    pub fn next_wake(&self) -> Instant {
        self.slots.iter().map(|(_, entry)| self.wake_of(entry)).min().unwrap_or(Instant::NEVER)
    }

    fn wake_of(&self, entry: &Entry) -> Instant {
        let quiet = entry.quiet_by.unwrap_or(Instant::NEVER);
        let own = match entry.state {
            SenderState::Draining(_) => return quiet,
            SenderState::Opening => entry.resend_at.min(entry.patience),
            SenderState::Moving => entry.resend_at.min(entry.patience).min(entry.write.next_ask()),
            SenderState::Local if !entry.sources.is_empty() => quiet,
            SenderState::Delivered | SenderState::Stuck(_) | SenderState::Local => Instant::NEVER,
        };
        own.min(entry.hold.until()).min(entry.hold.next_ask())
    }

    fn say(&self, transfer: TransferId, stamp: Option<Instant>, report: Report) -> SenderEffect {
        SenderEffect::Say(Said { transfer, from: self.config.me, stamp, report })
    }

    fn send(&self, transfer: TransferId, to: Peer, stamp: Instant, word: SenderWord) -> SenderEffect {
        SenderEffect::Send(Between { transfer, from: self.config.me, to, body: ToReceiver { stamp, word } })
    }

    fn report(entry: &Entry) -> Report {
        match entry.state {
            SenderState::Opening | SenderState::Moving => Report::Ready { first_block: entry.ask.first_block },
            SenderState::Delivered => Report::Delivered,
            SenderState::Stuck(why) => Report::Stuck(why),
            SenderState::Local => Report::Taken,
            SenderState::Draining(why) => Report::Failed(why),
        }
    }

    fn tell(&mut self, now: Instant, place: u32, out: &mut SenderEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let stamp = (!matches!(entry.state, SenderState::Draining(_))).then_some(now);
        let report = Self::report(entry);
        out.push(self.say(transfer, stamp, report));
    }

    // --- The coordinator's word ------------------------------------------------------------------------------------------------

    fn order(
        &mut self,
        now: Instant,
        transfer: TransferId,
        to: Peer,
        order: Order<Open>,
        kv: &mut Kv,
        out: &mut SenderEffects,
    ) {
        if to != self.config.me {
            return out.push(self.say(transfer, None, Report::Refused(Refusal::StaleEpoch)));
        }
        if self.dead.contains(transfer.gateway_epoch()) {
            return out.push(SenderEffect::Stale);
        }
        match (self.slots.place(transfer), order) {
            (Some(place), Order::Begin(_) | Order::Probe) => self.tell(now, place, out),
            (Some(place), Order::Keep { echo }) => {
                if let Some((_, entry)) = self.slots.at(place) {
                    entry.hold.renew(now, echo);
                }
            }
            (Some(place), Order::Take) => self.take(now, place, out),
            (Some(place), Order::Close { end_work }) => self.close(now, place, end_work, kv, out),
            (None, order) => match (self.recent.get(transfer), order) {
                (_, Order::Close { .. }) => out.push(self.say(transfer, None, Report::Closed)),
                (Some(Over::Taken), _) => out.push(self.say(transfer, None, Report::Taken)),
                (Some(Over::Failed(why)), _) => out.push(self.say(transfer, None, Report::Failed(why))),
                (None, Order::Begin(ask)) => self.open(now, transfer, ask, out),
                (None, _) => out.push(self.say(transfer, None, Report::Unknown)),
            },
        }
    }

    /// May another prompt of `blocks` blocks be computed for somebody else?
    fn room_for(&self, blocks: u32) -> Result<(), Refusal> {
        if self.draining {
            Err(Refusal::NotReady)
        } else if self.slots.is_full() {
            Err(Refusal::NoSlot)
        } else if self.held_blocks() + u64::from(blocks) > u64::from(self.config.held_blocks) {
            Err(Refusal::Congested)
        } else {
            Ok(())
        }
    }

    fn open(&mut self, now: Instant, transfer: TransferId, ask: Open, out: &mut SenderEffects) {
        let (config, terms) = (self.config, self.config.terms);
        let prompt = ask.manifest.input_tokens.div_ceil(terms.block_size_tokens.max(1));
        let grid = Grid {
            first_block: ask.first_block,
            blocks: prompt.saturating_sub(ask.first_block),
            chunk_blocks: config.chunk_blocks,
            layers: terms.layers,
            chunk_layers: config.chunk_layers,
        }
        .fitting();
        let sound = if ask.manifest.sequences != 1 {
            Err(Refusal::Sequences)
        } else if !grid.is_valid() {
            Err(Refusal::Envelope)
        } else {
            self.room_for(grid.blocks)
        };
        if let Err(refusal) = sound {
            return out.push(self.say(transfer, None, Report::Refused(refusal)));
        }
        let envelope = Arc::new(Envelope {
            terms,
            transfer,
            request: ask.manifest.request,
            attempt: ask.attempt,
            source: config.me,
            destination: ask.destination,
            input_tokens: ask.manifest.input_tokens,
            grid,
        });
        let (manifest, attempt, caps) = (ask.manifest.clone(), ask.attempt, ask.caps);
        out.push(SenderEffect::Prefill { transfer, manifest, attempt, caps, grid });
        let entry = Entry {
            ask,
            envelope,
            state: SenderState::Opening,
            hold: Lease::starting(now, terms.leases.hold),
            write: Lease::starting(now, terms.leases.write),
            out: Outbox::new(grid.chunks()),
            sources: Vec::with_capacity(grid.blocks as usize),
            seal: None,
            sealed: false,
            resend_at: now,
            resends: 0,
            patience: now + config.timing.bootstrap,
            quiet_by: None,
        };
        // The answer and the hello follow in the same step: both are due.
        self.slots.insert(transfer, entry);
    }

    fn take(&mut self, now: Instant, place: u32, out: &mut SenderEffects) {
        let grace = self.config.terms.leases.grace;
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        match entry.state {
            SenderState::Opening | SenderState::Moving | SenderState::Delivered | SenderState::Stuck(_) => {
                if entry.hold.is_firm(now) {
                    entry.state = SenderState::Local;
                    stop_writes(now + grace, transfer, entry, out);
                    out.push(SenderEffect::Continue(transfer));
                }
            }
            SenderState::Local | SenderState::Draining(_) => {}
        }
        self.tell(now, place, out);
    }

    fn close(&mut self, now: Instant, place: u32, end_work: bool, kv: &mut Kv, out: &mut SenderEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        match entry.state {
            SenderState::Local if !end_work => {
                entry.state = SenderState::Draining(Failure::Closed);
                self.recent.add(transfer, Over::Taken);
                self.settle(now, place, kv);
            }
            SenderState::Draining(_) => {}
            _ => self.give_up(now, place, Failure::Closed, kv, out),
        }
        out.push(self.say(transfer, None, Report::Closed));
    }

    // --- The receiver's word ---------------------------------------------------------------------------------------------------

    fn hear(&mut self, now: Instant, message: Between<ToSender>, out: &mut SenderEffects) {
        let Between { transfer, from, to, body } = message;
        let timing = self.config.timing;
        let Some(entry) = self.slots.get(transfer) else { return out.push(SenderEffect::Stale) };
        if to != self.config.me || (from != entry.ask.destination && !entry.ask.destination.is_before(from)) {
            return out.push(SenderEffect::Stale);
        }
        if from != entry.ask.destination {
            // Only a later incarnation is left: it answers for itself, and the one that was promised is gone.
            return self.peer_up(now, from, out);
        }
        match (entry.state, body) {
            (SenderState::Opening, ToSender::Welcome { blocks, echo, ack }) => {
                if blocks.len() != entry.envelope.grid.blocks as usize || !entry.write.renew(now, echo) {
                    return out.push(SenderEffect::Stale);
                }
                entry.state = SenderState::Moving;
                entry.patience = entry.write.until() + timing.bootstrap;
                // A prompt that was computed before its welcome came: its seal need not wait for a repetition.
                let seal = entry.seal;
                out.push(SenderEffect::Bind { transfer, to: from, blocks });
                self.heard(now, transfer, ack);
                if let Some(seal) = seal {
                    out.push(self.send(transfer, from, now, SenderWord::Seal(seal)));
                }
            }
            (SenderState::Moving, ToSender::Welcome { echo, ack, .. } | ToSender::Ack { echo: Some(echo), ack }) => {
                if entry.write.renew(now, echo) {
                    entry.patience = entry.write.until() + timing.bootstrap;
                }
                self.heard(now, transfer, ack);
            }
            (SenderState::Moving, ToSender::Ack { echo: None, ack }) => self.heard(now, transfer, ack),
            (SenderState::Opening | SenderState::Moving | SenderState::Delivered, ToSender::Refuse(refusal)) => {
                self.stick(now, transfer, Failure::PeerRefused(refusal), out);
            }
            (SenderState::Opening | SenderState::Moving | SenderState::Delivered, ToSender::Failed(_)) => {
                self.stick(now, transfer, Failure::PeerFailed, out);
            }
            (SenderState::Opening, ToSender::Ack { .. })
            | (SenderState::Delivered, ToSender::Welcome { .. } | ToSender::Ack { .. })
            | (SenderState::Stuck(_) | SenderState::Local | SenderState::Draining(_), _) => {}
        }
    }

    /// What the receiver has. Anything new starts the count of repetitions afresh.
    fn heard(&mut self, now: Instant, transfer: TransferId, ack: Ack) {
        let timing = self.config.timing;
        let Some(entry) = self.slots.get(transfer) else { return };
        let news = entry.out.take_ack(&ack) || (ack.sealed && !entry.sealed);
        entry.sealed |= ack.sealed && entry.seal.is_some();
        if news {
            entry.resends = 0;
            entry.resend_at = now + timing.repeat;
        }
        if entry.out.is_delivered() && entry.sealed {
            entry.state = SenderState::Delivered;
            entry.hold.ask_soon(now);
        }
    }

    /// It does not get across: no further write, and the coordinator decides.
    fn stick(&mut self, now: Instant, transfer: TransferId, why: Failure, out: &mut SenderEffects) {
        let grace = self.config.terms.leases.grace;
        let Some(entry) = self.slots.get(transfer) else { return };
        entry.state = SenderState::Stuck(why);
        entry.hold.ask_soon(now);
        stop_writes(now + grace, transfer, entry, out);
    }

    // --- Prefill's word --------------------------------------------------------------------------------------------------------

    fn placed(&mut self, transfer: TransferId, blocks: &[BlockRef], kv: &mut Kv, out: &mut SenderEffects) {
        let Some(entry) = self.slots.get(transfer) else { return out.push(SenderEffect::Stale) };
        if matches!(entry.state, SenderState::Local | SenderState::Draining(_)) {
            return;
        }
        let room = (entry.envelope.grid.blocks as usize).saturating_sub(entry.sources.len());
        for block in blocks.iter().take(room) {
            match kv.lease(*block) {
                Ok(()) => entry.sources.push(*block),
                Err(_) => return out.push(SenderEffect::Stale),
            }
        }
    }

    fn prefilled(&mut self, now: Instant, transfer: TransferId, seal: Seal, out: &mut SenderEffects) {
        let Some(entry) = self.slots.get(transfer) else { return out.push(SenderEffect::Stale) };
        if entry.seal.is_none() {
            entry.seal = Some(seal);
            entry.out.set_ready(entry.envelope.grid.chunks());
            // Said at once, and no reason to write again what is under way.
            let (moving, to) = (entry.state == SenderState::Moving, entry.ask.destination);
            if moving {
                out.push(self.send(transfer, to, now, SenderWord::Seal(seal)));
            }
        }
    }

    // --- Ends, time, sending ---------------------------------------------------------------------------------------------------

    fn quiet(&mut self, now: Instant, transfer: TransferId, kv: &mut Kv, out: &mut SenderEffects) {
        let place = self.slots.place(transfer);
        let stopped = place.and_then(|place| self.slots.at(place)).filter(|(_, entry)| entry.quiet_by.is_some());
        match (place, stopped) {
            (Some(place), Some((_, entry))) => {
                entry.quiet_by = Some(now);
                self.settle(now, place, kv);
            }
            _ => out.push(SenderEffect::Stale),
        }
    }

    /// Ends a transfer that nobody has taken here, or whose work is to end.
    fn give_up(&mut self, now: Instant, place: u32, why: Failure, kv: &mut Kv, out: &mut SenderEffects) {
        let grace = self.config.terms.leases.grace;
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        if matches!(entry.state, SenderState::Draining(_)) {
            return;
        }
        stop_writes(now + grace, transfer, entry, out);
        entry.state = SenderState::Draining(why);
        out.push(SenderEffect::Drop(transfer));
        if why != Failure::Closed {
            out.push(self.say(transfer, None, Report::Failed(why)));
        }
        self.recent.add(transfer, Over::Failed(why));
        self.settle(now, place, kv);
    }

    /// Gives the leases of blocks back once nothing reads them, and forgets what is over.
    fn settle(&mut self, now: Instant, place: u32, kv: &mut Kv) {
        let Some((_, entry)) = self.slots.at(place) else { return };
        if entry.quiet_by.is_none_or(|by| now < by) {
            return;
        }
        let may_be_taken = matches!(entry.state, SenderState::Stuck(_));
        if !may_be_taken {
            for block in entry.sources.drain(..) {
                let back = kv.unlease(now, block);
                debug_assert!(back.is_ok(), "a leased block");
            }
        }
        if matches!(entry.state, SenderState::Draining(_)) {
            self.slots.remove(place);
        }
    }

    fn peer_up(&mut self, now: Instant, peer: Peer, out: &mut SenderEffects) {
        for place in 0..self.slots.places() {
            let Some((transfer, entry)) = self.slots.at(place) else { continue };
            let waits = matches!(entry.state, SenderState::Opening | SenderState::Moving | SenderState::Delivered);
            if waits && entry.ask.destination.is_before(peer) {
                self.stick(now, transfer, Failure::PeerRestarted, out);
            }
        }
    }

    fn gateway_down(&mut self, now: Instant, epoch: GatewayEpoch, kv: &mut Kv, out: &mut SenderEffects) {
        self.dead.add(epoch);
        for place in 0..self.slots.places() {
            if self.slots.at(place).is_some_and(|(id, _)| id.gateway_epoch() == epoch) {
                self.give_up(now, place, Failure::GatewayGone, kv, out);
            }
        }
    }

    fn keep_time(&mut self, now: Instant, kv: &mut Kv, out: &mut SenderEffects) {
        let timing = self.config.timing;
        for place in 0..self.slots.places() {
            let Some((transfer, entry)) = self.slots.at(place) else { continue };
            if entry.hold.is_over(now) && !matches!(entry.state, SenderState::Draining(_)) {
                self.orphans += 1;
                out.push(SenderEffect::Swept(transfer));
                self.give_up(now, place, Failure::LeaseExpired, kv, out);
                continue;
            }
            if matches!(entry.state, SenderState::Opening | SenderState::Moving) && now >= entry.patience {
                let opening = entry.state == SenderState::Opening;
                let why = if opening { Failure::BootstrapTimeout } else { Failure::WaitingTimeout };
                self.stick(now, transfer, why, out);
            }
            self.settle(now, place, kv);
            let Some((_, entry)) = self.slots.at(place) else { continue };
            let pressing = match entry.state {
                SenderState::Draining(_) => continue,
                SenderState::Stuck(_) | SenderState::Local => true,
                SenderState::Opening | SenderState::Moving | SenderState::Delivered => false,
            };
            let every = if pressing { timing.repeat } else { entry.hold.interval() };
            if entry.hold.is_ask_due(now, every) {
                self.tell(now, place, out);
            }
        }
    }

    /// Sends what may be sent, one chunk a transfer and round, and again what is missing for too long.
    fn pump(&mut self, now: Instant, out: &mut SenderEffects) {
        for place in 0..self.slots.places() {
            self.repeat(now, place, out);
        }
        let mut room = self.config.inflight_chunks.saturating_sub(self.inflight_chunks());
        let (places, first) = (self.slots.places(), self.turn);
        let mut sent = true;
        while sent && room > 0 {
            sent = false;
            for place in (first..places).chain(0..first) {
                let Some((transfer, entry)) = self.slots.at(place) else { continue };
                if room == 0 || entry.state != SenderState::Moving || !entry.write.is_firm(now) {
                    continue;
                }
                if let Some(index) = entry.out.send_next() {
                    out.push(SenderEffect::Write { transfer, index, stamp: now });
                    self.turn = (place + 1) % places;
                    room -= 1;
                    sent = true;
                }
            }
        }
    }

    /// Hello until it is welcomed, missing chunks, the seal, and the question for the lease to write.
    fn repeat(&mut self, now: Instant, place: u32, out: &mut SenderEffects) {
        let timing = self.config.timing;
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let to = entry.ask.destination;
        match entry.state {
            SenderState::Opening => {
                if now >= entry.resend_at {
                    entry.resend_at = now + timing.repeat;
                    let envelope = entry.envelope.clone();
                    out.push(self.send(transfer, to, now, SenderWord::Hello(envelope)));
                }
                return;
            }
            SenderState::Moving => {}
            SenderState::Delivered | SenderState::Stuck(_) | SenderState::Local | SenderState::Draining(_) => return,
        }
        let interval = entry.write.interval();
        let ask = entry.write.is_ask_due(now, interval);
        if now >= entry.resend_at {
            entry.resend_at = now + timing.repeat;
            if let Some(seal) = entry.seal.filter(|_| !entry.sealed) {
                out.push(self.send(transfer, to, now, SenderWord::Seal(seal)));
            }
            let Some((_, entry)) = self.slots.at(place) else { return };
            if entry.write.is_firm(now) && entry.out.inflight() > 0 {
                entry.resends += 1;
                if entry.resends > HANDOFF_RESENDS_MAX {
                    return self.stick(now, transfer, Failure::Stalled, out);
                }
                let again = entry.out.missing().map(|index| SenderEffect::Write { transfer, index, stamp: now });
                out.extend(again);
            }
        }
        if ask {
            out.push(self.send(transfer, to, now, SenderWord::Beat));
        }
    }

    fn tell_pressure(&mut self, out: &mut SenderEffects) {
        let accepting = self.room_for(1).is_ok();
        if accepting != self.accepting {
            self.accepting = accepting;
            out.push(SenderEffect::Accepting(accepting));
        }
    }

    /// Everything that must hold between this machine and the pool. The error names the first that does not.
    pub fn check(&self, kv: &Kv) -> Result<(), &'static str> {
        for (_, entry) in self.slots.iter() {
            if !entry.out.is_sound() {
                return Err("a window is out of order");
            }
            if entry.sources.len() > entry.envelope.grid.blocks as usize {
                return Err("more blocks are leased than travel");
            }
            let live = |block: &BlockRef| {
                kv.pool().state(*block).is_some_and(|state| {
                    matches!(state, penstock_kv::BlockState::Active | penstock_kv::BlockState::Leased)
                })
            };
            if !entry.sources.iter().all(live) {
                return Err("a block was freed or evicted while it is read");
            }
        }
        if self.inflight_chunks() > self.config.inflight_chunks {
            return Err("more chunks are under way than allowed");
        }
        if kv.counts().sum() != u64::from(kv.config().blocks) {
            return Err("block states do not add up to the pool");
        }
        Ok(())
    }
}

/// No write begins any more. The transport says when the last one has read, or the grace ends it.
fn stop_writes(by: Instant, transfer: TransferId, entry: &mut Entry, out: &mut SenderEffects) {
    if entry.quiet_by.is_none() {
        entry.quiet_by = Some(by);
        out.push(SenderEffect::StopWrites(transfer));
    }
}
