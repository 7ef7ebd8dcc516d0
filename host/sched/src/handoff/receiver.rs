//! The decode side. Question answered: is all of the prompt's KV here, checked, out of reach of any write, and ours?
//!
//! ```text
//!   Begin ─► Reserved ─ hello ─► Landing ─ all chunks + seal ─► Fencing ─ fenced ─► Verifying ─ sum fits ─► Installed
//!               │                   │                              │                   │                       │      │
//!               │ give up           │ give up                      │ give up           │ give up       give up │      │ take
//!               ▼                   ▼                              │                   ▼                       ▼      ▼
//!              over             Quarantine ◄───────────────────────┘                  over                    over   Taken
//!                                   └ fenced, or lease to write + grace over ─► over         over ◄─ close, lease over ┘
//! ```
//! Blocks are promised in `Reserved`, landing from the hello on, active from `Installed` on, the replica's own from `Taken` on. Only in
//! `Landing` may the sender write. A write that is repeated can spoil what was checked before: so the sum that counts is taken over what
//! lies in the blocks once nothing can write to them. Giving up before that, a write may still be on its way: hence the quarantine.

mod snapshot;

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::limits::{HANDOFF_CORRUPT_MAX, HANDOFF_RECENT_MAX};
use penstock_base::time::MonotoneNow;
use penstock_base::{BlockRef, GatewayEpoch, Instant, Manifest, TransferId};
use penstock_kv::{Admit, BlockTable, Keys, Kv, KvError, OwnerId};

use super::config::PartyConfig;
use super::lease::{Granted, Lease};
use super::message::{
    Ack, Between, Failure, Order, Peer, Refusal, Report, Reserve, Said, SenderWord, ToReceiver, ToSender,
};
use super::receiver_io::{ReceiverEffect, ReceiverEffects, ReceiverEvent, ReceiverState, Started};
use super::slots::{DeadGateways, Recent, Slots};
use super::terms::{Envelope, Seal};
use super::window::{Arrival, Inbox};

#[derive(Clone, Debug)]
struct Entry {
    /// What was asked for.
    ask: Reserve,
    state: ReceiverState,
    /// The coordinator keeps this transfer.
    hold: Lease,
    /// What the sender believes that it may write.
    write: Granted,
    /// Prefix found in the cache, then what was installed.
    table: BlockTable,
    /// Being written, or quarantined.
    landing: Vec<BlockRef>,
    /// The same, as the sender was told.
    told: Option<Arc<[BlockRef]>>,
    inbox: Inbox,
    seal: Option<Seal>,
    /// Bootstrap in `Reserved`, waiting in `Landing`.
    patience: Instant,
}

/// What is answered about a transfer that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Over {
    Taken,
    Failed(Failure),
}

/// The receiving side of one replica. Pure and total: [`Self::step`] is the only way in.
#[derive(Clone, Debug)]
pub struct Receiver {
    pub(super) config: PartyConfig,
    clock: MonotoneNow,
    slots: Slots<Entry>,
    recent: Recent<Over>,
    dead: DeadGateways,
    /// Block tables not in use.
    tables: Vec<BlockTable>,
    window: u32,
    /// Requests that may still be promised a start, as the replica said; not part of the state that goes on.
    room: u32,
    draining: bool,
    orphans: u64,
}

impl Receiver {
    /// Without transfers.
    pub fn new(config: PartyConfig, now: Instant) -> Self {
        let config = config.clamped();
        Self {
            clock: MonotoneNow::starting_at(now),
            slots: Slots::new(config.transfers),
            recent: Recent::new(HANDOFF_RECENT_MAX),
            dead: DeadGateways::default(),
            tables: (0..config.transfers).map(|_| BlockTable::with_capacity(config.table_blocks)).collect(),
            window: config.window,
            room: u32::MAX,
            draining: false,
            orphans: 0,
            config,
        }
    }

    /// Transfers that were ended because nobody kept them.
    pub fn orphans(&self) -> u64 {
        self.orphans
    }

    /// Transfers here, whatever they hold.
    pub fn transfers(&self) -> u32 {
        self.slots.len()
    }

    /// Where a transfer stands; none when it is not here.
    pub fn state(&self, transfer: TransferId) -> Option<ReceiverState> {
        self.slots.iter().find(|(id, _)| *id == transfer).map(|(_, entry)| entry.state)
    }

    /// Requests that were promised to be started here and were not yet.
    pub fn promised(&self) -> u32 {
        let over = |state| matches!(state, ReceiverState::Taken | ReceiverState::Quarantine(_));
        self.slots.iter().filter(|(_, entry)| !over(entry.state)).count() as u32
    }

    /// Says how many requests could be started here now; said before each order to begin.
    pub fn allow(&mut self, starts: u32) {
        self.room = starts;
    }

    /// Takes an emptied block table back.
    pub fn recycle(&mut self, table: BlockTable) {
        if table.is_empty() && self.tables.len() < self.config.transfers as usize {
            self.tables.push(table);
        }
    }

    /// Block tables that hold references, for the full walk over the pool.
    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.slots.iter().map(|(_, entry)| &entry.table)
    }

    /// Advances by one event. Total: what does not fit is answered or counted, and changes nothing else.
    pub fn step(&mut self, now: Instant, event: ReceiverEvent, kv: &mut Kv, out: &mut ReceiverEffects) {
        let now = self.clock.observe(now);
        match event {
            ReceiverEvent::Order { transfer, to, order } => self.order(now, transfer, to, order, kv, out),
            ReceiverEvent::Sender(message) => self.hear(now, message, kv, out),
            ReceiverEvent::Fenced(transfer) => self.fenced(now, transfer, kv, out),
            ReceiverEvent::Digested { transfer, sum } => self.digested(now, transfer, sum, kv, out),
            ReceiverEvent::GiveUp(transfer) => match self.slots.place(transfer) {
                Some(place) => self.give_up(now, place, Failure::GivenUp, kv, out),
                None => out.push(ReceiverEffect::Stale),
            },
            ReceiverEvent::PeerUp(peer) => self.peer_up(now, peer, kv, out),
            ReceiverEvent::GatewayUp(epoch) => self.dead.remove(epoch),
            ReceiverEvent::GatewayDown(epoch) => self.gateway_down(now, epoch, kv, out),
            ReceiverEvent::Window(window) => self.set_window(window, out),
            ReceiverEvent::Drain => self.draining = true,
            ReceiverEvent::Tick => {}
        }
        self.keep_time(now, kv, out);
    }

    /// When to step with [`ReceiverEvent::Tick`] if nothing else happens before.
    pub fn next_wake(&self) -> Instant {
        self.slots.iter().map(|(_, entry)| self.wake_of(entry)).min().unwrap_or(Instant::NEVER)
    }

    fn wake_of(&self, entry: &Entry) -> Instant {
        let over = entry.write.over_at(self.config.terms.leases.grace);
        let own = match entry.state {
            ReceiverState::Quarantine(_) => return over,
            ReceiverState::Reserved | ReceiverState::Landing => entry.patience,
            ReceiverState::Fencing => over,
            ReceiverState::Verifying | ReceiverState::Installed | ReceiverState::Taken => Instant::NEVER,
        };
        own.min(entry.hold.until()).min(entry.hold.next_ask())
    }

    fn say(&self, transfer: TransferId, stamp: Option<Instant>, report: Report) -> ReceiverEffect {
        ReceiverEffect::Say(Said { transfer, from: self.config.me, stamp, report })
    }

    fn send(&self, transfer: TransferId, to: Peer, body: ToSender) -> ReceiverEffect {
        ReceiverEffect::Send(Between { transfer, from: self.config.me, to, body })
    }

    fn report(entry: &Entry) -> Report {
        match entry.state {
            ReceiverState::Reserved | ReceiverState::Landing | ReceiverState::Fencing | ReceiverState::Verifying => {
                Report::Ready { first_block: entry.table.cached_blocks() }
            }
            ReceiverState::Installed => Report::Installed,
            ReceiverState::Taken => Report::Taken,
            ReceiverState::Quarantine(why) => Report::Failed(why),
        }
    }

    /// Tells the coordinator how a living transfer stands, and asks it to keep it.
    fn tell(&mut self, now: Instant, place: u32, out: &mut ReceiverEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let stamp = (!matches!(entry.state, ReceiverState::Quarantine(_))).then_some(now);
        let report = Self::report(entry);
        out.push(self.say(transfer, stamp, report));
    }

    // --- The coordinator's word ------------------------------------------------------------------------------------------------

    fn order(
        &mut self,
        now: Instant,
        transfer: TransferId,
        to: Peer,
        order: Order<Reserve>,
        kv: &mut Kv,
        out: &mut ReceiverEffects,
    ) {
        if to != self.config.me {
            return out.push(self.say(transfer, None, Report::Refused(Refusal::StaleEpoch)));
        }
        if self.dead.contains(transfer.gateway_epoch()) {
            return out.push(ReceiverEffect::Stale);
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
                (None, Order::Begin(ask)) => self.reserve(now, transfer, ask, kv, out),
                (None, _) => out.push(self.say(transfer, None, Report::Unknown)),
            },
        }
    }

    fn reserve(&mut self, now: Instant, transfer: TransferId, ask: Reserve, kv: &mut Kv, out: &mut ReceiverEffects) {
        let timing = self.config.timing;
        match self.promise(now, &ask, kv) {
            Err(refusal) => out.push(self.say(transfer, None, Report::Refused(refusal))),
            Ok(table) => {
                // The answer follows in the same step: a new lease asks at once.
                let entry = Entry {
                    ask,
                    state: ReceiverState::Reserved,
                    hold: Lease::starting(now, self.config.terms.leases.hold),
                    write: Granted::default(),
                    table,
                    landing: Vec::new(),
                    told: None,
                    inbox: Inbox::default(),
                    seal: None,
                    patience: now + timing.bootstrap,
                };
                self.slots.insert(transfer, entry);
            }
        }
    }

    /// Promises prompt and output, and references what the cache has of the prompt. All or nothing.
    fn promise(&mut self, now: Instant, ask: &Reserve, kv: &mut Kv) -> Result<BlockTable, Refusal> {
        let (manifest, size) = (&ask.manifest, self.config.terms.block_size_tokens);
        if self.draining {
            return Err(Refusal::NotReady);
        }
        if manifest.sequences != 1 {
            return Err(Refusal::Sequences);
        }
        let total = Manifest::need_blocks(manifest.input_tokens, ask.caps.reserve_output_tokens, 1, size);
        if total > u64::from(self.config.table_blocks.min(kv.config().blocks)) {
            return Err(Refusal::NeverFits);
        }
        if self.room == 0 {
            return Err(Refusal::NoSlot);
        }
        let (Some(place), Some(mut table)) = (self.slots.next_place(), self.tables.pop()) else {
            return Err(Refusal::NoSlot);
        };
        let admit = Admit {
            owner: OwnerId(self.config.first_owner + place),
            keys: Keys::prompt(&manifest.keys),
            input_tokens: manifest.input_tokens,
            total_blocks: total as u32,
            class: manifest.class,
        };
        match kv.admit(now, admit, &mut table) {
            Ok(_) => Ok(table),
            Err(error) => {
                self.tables.push(table);
                Err(match error {
                    KvError::NoRoom { short_blocks } => Refusal::NoBlocks { short_blocks },
                    _ => Refusal::NeverFits,
                })
            }
        }
    }

    fn take(&mut self, now: Instant, place: u32, out: &mut ReceiverEffects) {
        let owner = OwnerId(self.config.first_owner + place);
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        if entry.state == ReceiverState::Installed && entry.hold.is_firm(now) {
            entry.state = ReceiverState::Taken;
            let table = core::mem::replace(&mut entry.table, BlockTable::with_capacity(0));
            out.push(ReceiverEffect::Start(Started {
                transfer,
                manifest: entry.ask.manifest.clone(),
                attempt: entry.ask.attempt,
                caps: entry.ask.caps,
                table,
                owner,
                sampled_tokens: entry.seal.map_or(0, |seal| seal.sampled_tokens),
            }));
        }
        self.tell(now, place, out);
    }

    fn close(&mut self, now: Instant, place: u32, end_work: bool, kv: &mut Kv, out: &mut ReceiverEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let state = entry.state;
        if state == ReceiverState::Taken {
            let over = if end_work { Over::Failed(Failure::Closed) } else { Over::Taken };
            if end_work {
                out.push(ReceiverEffect::Stop(transfer));
            }
            self.remove(now, place, over, kv);
        } else if !matches!(state, ReceiverState::Quarantine(_)) {
            self.give_up(now, place, Failure::Closed, kv, out);
        }
        out.push(self.say(transfer, None, Report::Closed));
    }

    // --- The sender's word -----------------------------------------------------------------------------------------------------

    fn hear(&mut self, now: Instant, message: Between<ToReceiver>, kv: &mut Kv, out: &mut ReceiverEffects) {
        let Between { transfer, from, to, body: ToReceiver { stamp, word } } = message;
        if to != self.config.me {
            return out.push(self.send(transfer, from, ToSender::Refuse(Refusal::StaleEpoch)));
        }
        let Some(place) = self.slots.place(transfer) else {
            return out.push(self.send(transfer, from, ToSender::Refuse(Refusal::Unknown)));
        };
        let Some((_, entry)) = self.slots.at(place) else { return };
        if from != entry.ask.source {
            let stale = from.is_before(entry.ask.source);
            let refusal = if stale { Refusal::StaleEpoch } else { Refusal::WrongPeer };
            return out.push(self.send(transfer, from, ToSender::Refuse(refusal)));
        }
        match (entry.state, word) {
            (ReceiverState::Quarantine(why), _) => out.push(self.send(transfer, from, ToSender::Failed(why))),
            (ReceiverState::Reserved, SenderWord::Hello(envelope)) => {
                self.welcome(now, place, &envelope, stamp, kv, out);
            }
            (ReceiverState::Landing, SenderWord::Hello(_)) => self.welcome_again(now, place, stamp, out),
            // Overtaken by what follows it: the hello is repeated.
            (ReceiverState::Reserved, SenderWord::Chunk { .. } | SenderWord::Seal(_) | SenderWord::Beat) => {
                out.push(ReceiverEffect::Stale);
            }
            (ReceiverState::Landing, SenderWord::Chunk { index, sent, arrived }) => {
                self.chunk(now, place, index, (sent, arrived), kv, out);
                self.acknowledge(now, transfer, Some(stamp), out);
            }
            (ReceiverState::Landing, SenderWord::Seal(seal)) => {
                self.seal(now, place, seal, kv, out);
                self.acknowledge(now, transfer, Some(stamp), out);
            }
            (ReceiverState::Landing, SenderWord::Beat) => self.acknowledge(now, transfer, Some(stamp), out),
            (
                ReceiverState::Fencing | ReceiverState::Verifying | ReceiverState::Installed | ReceiverState::Taken,
                _,
            ) => self.acknowledge(now, transfer, None, out),
        }
    }

    /// Checks the envelope and takes the promised blocks, to be written.
    fn welcome(
        &mut self,
        now: Instant,
        place: u32,
        envelope: &Envelope,
        stamp: Instant,
        kv: &mut Kv,
        out: &mut ReceiverEffects,
    ) {
        let (me, terms, owner) = (self.config.me, self.config.terms, OwnerId(self.config.first_owner + place));
        let waiting = self.config.timing.waiting;
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let source = entry.ask.source;
        if let Err(refusal) = check_envelope(envelope, transfer, me, &terms, entry) {
            return out.push(self.send(transfer, source, ToSender::Refuse(refusal)));
        }
        let landed = kv.land(now, owner, envelope.grid.blocks, &mut entry.landing);
        if let Err(KvError::NoRoom { short_blocks }) = landed {
            return out.push(self.send(transfer, source, ToSender::Refuse(Refusal::NoBlocks { short_blocks })));
        }
        entry.state = ReceiverState::Landing;
        entry.inbox = Inbox::new(envelope.grid.chunks());
        entry.told = Some(entry.landing.as_slice().into());
        entry.patience = now + waiting;
        if let Some(blocks) = entry.told.clone() {
            out.push(ReceiverEffect::Grant { transfer, to: source, grid: envelope.grid, blocks });
        }
        self.welcome_again(now, place, stamp, out);
    }

    fn welcome_again(&mut self, now: Instant, place: u32, stamp: Instant, out: &mut ReceiverEffects) {
        let (window, length) = (self.window, self.config.terms.leases.write);
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let Some(blocks) = entry.told.clone() else { return };
        entry.write.extend(now, length);
        let (source, ack) = (entry.ask.source, ack_of(entry, window));
        out.push(self.send(transfer, source, ToSender::Welcome { blocks, echo: stamp, ack }));
    }

    /// Says what is here. A stamp renews the sender's lease to write, which only a landing transfer does.
    fn acknowledge(&mut self, now: Instant, transfer: TransferId, stamp: Option<Instant>, out: &mut ReceiverEffects) {
        let (window, length) = (self.window, self.config.terms.leases.write);
        let Some(entry) = self.slots.get(transfer) else { return };
        let echo = stamp.filter(|_| entry.state == ReceiverState::Landing);
        if echo.is_some() {
            entry.write.extend(now, length);
        } else if matches!(entry.state, ReceiverState::Quarantine(_)) {
            return;
        }
        let (source, ack) = (entry.ask.source, ack_of(entry, window));
        out.push(self.send(transfer, source, ToSender::Ack { echo, ack }));
    }

    fn chunk(
        &mut self,
        now: Instant,
        place: u32,
        index: u32,
        (sent, arrived): (u64, u64),
        kv: &mut Kv,
        out: &mut ReceiverEffects,
    ) {
        let waiting = self.config.timing.waiting;
        let Some((_, entry)) = self.slots.at(place) else { return };
        if sent != arrived {
            entry.inbox.corrupt += 1;
            if entry.inbox.corrupt > HANDOFF_CORRUPT_MAX {
                self.give_up(now, place, Failure::Checksum, kv, out);
            }
            return;
        }
        match entry.inbox.take(index, arrived) {
            Arrival::New => entry.patience = now + waiting,
            Arrival::Duplicate => return,
            Arrival::OutOfRange => return out.push(ReceiverEffect::Stale),
        }
        self.complete(now, place, kv, out);
    }

    fn seal(&mut self, now: Instant, place: u32, seal: Seal, kv: &mut Kv, out: &mut ReceiverEffects) {
        let Some((_, entry)) = self.slots.at(place) else { return };
        if entry.seal.is_none() {
            entry.seal = Some(seal);
            self.complete(now, place, kv, out);
        }
    }

    /// All chunks and the seal: compare the sums, then have writes shut out before anything is believed.
    fn complete(&mut self, now: Instant, place: u32, kv: &mut Kv, out: &mut ReceiverEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        let Some(seal) = entry.seal.filter(|_| entry.inbox.is_complete()) else { return };
        if seal.sum != entry.inbox.sum() {
            return self.give_up(now, place, Failure::SealMismatch, kv, out);
        }
        entry.state = ReceiverState::Fencing;
        out.push(ReceiverEffect::Fence(transfer));
    }

    // --- Fences, ends, time ----------------------------------------------------------------------------------------------------

    fn fenced(&mut self, now: Instant, transfer: TransferId, kv: &mut Kv, out: &mut ReceiverEffects) {
        let place = self.slots.place(transfer);
        let state = place.and_then(|place| self.slots.at(place)).map(|(_, entry)| entry.state);
        match (place, state) {
            (Some(place), Some(ReceiverState::Fencing)) => self.verify(place, out),
            (Some(place), Some(ReceiverState::Quarantine(why))) => self.remove(now, place, Over::Failed(why), kv),
            _ => out.push(ReceiverEffect::Stale),
        }
    }

    /// Nothing can write to the blocks any more: what lies there now is what will be decoded from.
    fn verify(&mut self, place: u32, out: &mut ReceiverEffects) {
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        entry.state = ReceiverState::Verifying;
        out.push(ReceiverEffect::Digest(transfer));
    }

    fn digested(&mut self, now: Instant, transfer: TransferId, sum: u64, kv: &mut Kv, out: &mut ReceiverEffects) {
        let place = self.slots.place(transfer);
        let Some((place, (_, entry))) = place.and_then(|place| Some((place, self.slots.at(place)?))) else {
            return out.push(ReceiverEffect::Stale);
        };
        match (entry.state, entry.seal) {
            (ReceiverState::Verifying, Some(seal)) if seal.sum == sum => self.install(now, place, kv),
            (ReceiverState::Verifying, _) => self.give_up(now, place, Failure::SealMismatch, kv, out),
            _ => out.push(ReceiverEffect::Stale),
        }
    }

    /// Checked and out of reach: the blocks are the table's.
    fn install(&mut self, now: Instant, place: u32, kv: &mut Kv) {
        let Some((_, entry)) = self.slots.at(place) else { return };
        let mut sound = true;
        for block in entry.landing.drain(..) {
            sound &= kv.install(block, &mut entry.table).is_ok();
        }
        debug_assert!(sound, "landing blocks and the table were promised room");
        entry.state = ReceiverState::Installed;
        entry.hold.ask_soon(now);
    }

    /// Ends a transfer that is not over, whatever it holds. What a write may still touch is quarantined.
    fn give_up(&mut self, now: Instant, place: u32, why: Failure, kv: &mut Kv, out: &mut ReceiverEffects) {
        let owner = OwnerId(self.config.first_owner + place);
        let Some((transfer, entry)) = self.slots.at(place) else { return };
        match entry.state {
            ReceiverState::Quarantine(_) => return,
            ReceiverState::Taken => {
                out.push(ReceiverEffect::Stop(transfer));
                self.remove(now, place, Over::Failed(why), kv);
            }
            ReceiverState::Reserved | ReceiverState::Installed => {
                self.remove(now, place, Over::Failed(why), kv);
            }
            state @ (ReceiverState::Landing | ReceiverState::Fencing | ReceiverState::Verifying) => {
                for block in &entry.landing {
                    let quarantined = kv.quarantine(*block);
                    debug_assert!(quarantined.is_ok(), "a landing block");
                }
                kv.release(now, &mut entry.table, None);
                kv.unreserve(owner, u32::MAX);
                entry.state = ReceiverState::Quarantine(why);
                let source = entry.ask.source;
                match state {
                    ReceiverState::Landing => out.push(ReceiverEffect::Fence(transfer)),
                    ReceiverState::Verifying => self.remove(now, place, Over::Failed(why), kv),
                    _ => {}
                }
                out.push(self.send(transfer, source, ToSender::Failed(why)));
            }
        }
        if why != Failure::Closed {
            out.push(self.say(transfer, None, Report::Failed(why)));
        }
    }

    /// The transfer holds nothing any more and is remembered for a while.
    fn remove(&mut self, now: Instant, place: u32, over: Over, kv: &mut Kv) {
        let owner = OwnerId(self.config.first_owner + place);
        let Some((transfer, mut entry)) = self.slots.remove(place) else { return };
        for block in entry.landing.drain(..) {
            let cleared = kv.clear_quarantine(block);
            debug_assert!(cleared.is_ok(), "a quarantined block");
        }
        kv.release(now, &mut entry.table, None);
        kv.unreserve(owner, u32::MAX);
        if entry.table.capacity() > 0 {
            self.recycle(entry.table);
        }
        self.recent.add(transfer, over);
    }

    fn peer_up(&mut self, now: Instant, peer: Peer, kv: &mut Kv, out: &mut ReceiverEffects) {
        for place in 0..self.slots.places() {
            let Some((_, entry)) = self.slots.at(place) else { continue };
            let incomplete = matches!(entry.state, ReceiverState::Reserved | ReceiverState::Landing);
            if incomplete && entry.ask.source.is_before(peer) {
                self.give_up(now, place, Failure::PeerRestarted, kv, out);
            }
        }
    }

    fn gateway_down(&mut self, now: Instant, epoch: GatewayEpoch, kv: &mut Kv, out: &mut ReceiverEffects) {
        self.dead.add(epoch);
        for place in 0..self.slots.places() {
            if self.slots.at(place).is_some_and(|(id, _)| id.gateway_epoch() == epoch) {
                self.give_up(now, place, Failure::GatewayGone, kv, out);
            }
        }
    }

    fn set_window(&mut self, window: u32, out: &mut ReceiverEffects) {
        self.window = window.min(self.config.window);
        for place in 0..self.slots.places() {
            let window = self.window;
            let Some((transfer, entry)) = self.slots.at(place) else { continue };
            if entry.state == ReceiverState::Landing {
                let (source, ack) = (entry.ask.source, ack_of(entry, window));
                out.push(self.send(transfer, source, ToSender::Ack { echo: None, ack }));
            }
        }
    }

    fn keep_time(&mut self, now: Instant, kv: &mut Kv, out: &mut ReceiverEffects) {
        let (grace, timing) = (self.config.terms.leases.grace, self.config.timing);
        for place in 0..self.slots.places() {
            let Some((transfer, entry)) = self.slots.at(place) else { continue };
            let unreachable = now >= entry.write.over_at(grace);
            match entry.state {
                ReceiverState::Quarantine(why) => {
                    if unreachable {
                        self.remove(now, place, Over::Failed(why), kv);
                    }
                    continue;
                }
                _ if entry.hold.is_over(now) => {
                    self.orphans += 1;
                    out.push(ReceiverEffect::Swept(transfer));
                    self.give_up(now, place, Failure::LeaseExpired, kv, out);
                    continue;
                }
                ReceiverState::Reserved if now >= entry.patience => {
                    self.give_up(now, place, Failure::BootstrapTimeout, kv, out);
                    continue;
                }
                ReceiverState::Landing if now >= entry.patience => {
                    self.give_up(now, place, Failure::WaitingTimeout, kv, out);
                    continue;
                }
                ReceiverState::Fencing if unreachable => self.verify(place, out),
                _ => {}
            }
            let Some((_, entry)) = self.slots.at(place) else { continue };
            let pressing = matches!(entry.state, ReceiverState::Installed | ReceiverState::Taken);
            let every = if pressing { timing.repeat } else { entry.hold.interval() };
            if entry.hold.is_ask_due(now, every) {
                self.tell(now, place, out);
            }
        }
    }

    /// Everything that must hold between this machine and the pool. The error names the first that does not.
    pub fn check(&self, kv: &Kv) -> Result<(), &'static str> {
        let (mut landing, mut quarantined) = (0, 0);
        for (_, entry) in self.slots.iter() {
            let held = entry.landing.len() as u32;
            match entry.state {
                ReceiverState::Landing | ReceiverState::Fencing | ReceiverState::Verifying => landing += held,
                ReceiverState::Quarantine(_) => quarantined += held,
                _ if held > 0 => return Err("blocks are being written outside of a transfer"),
                _ => {}
            }
            if matches!(entry.state, ReceiverState::Landing) && entry.inbox.is_complete() && entry.seal.is_some() {
                return Err("a complete transfer still lets the sender write");
            }
            if !matches!(entry.state, ReceiverState::Installed) && entry.table.len() != entry.table.cached_blocks() {
                return Err("a block was installed before nothing could write to it");
            }
        }
        let counts = kv.counts();
        if counts.landing != landing || counts.quarantined != quarantined {
            return Err("the pool's blocks in transfer are not those of the transfers");
        }
        if counts.sum() != u64::from(kv.config().blocks) {
            return Err("block states do not add up to the pool");
        }
        if self.slots.len() > self.config.transfers || self.slots.is_full() && self.slots.len() != self.config.transfers
        {
            return Err("transfers are miscounted");
        }
        Ok(())
    }
}

fn ack_of(entry: &Entry, window: u32) -> Ack {
    let (base, mask) = entry.inbox.base_and_mask();
    Ack { base, mask, window, sealed: entry.seal.is_some() }
}

fn check_envelope(
    envelope: &Envelope,
    transfer: TransferId,
    me: Peer,
    terms: &super::terms::Terms,
    entry: &Entry,
) -> Result<(), Refusal> {
    terms.check(&envelope.terms).map_err(Refusal::Terms)?;
    let (grid, manifest) = (&envelope.grid, &entry.ask.manifest);
    let found = entry.table.cached_blocks();
    let prompt = u64::from(manifest.input_tokens).div_ceil(u64::from(terms.block_size_tokens));
    let fits = envelope.transfer == transfer
        && envelope.destination == me
        && envelope.source == entry.ask.source
        && (envelope.request, envelope.attempt) == (manifest.request, entry.ask.attempt)
        && envelope.input_tokens == manifest.input_tokens
        && grid.is_valid()
        && grid.layers == terms.layers
        && grid.first_block == found
        && u64::from(grid.first_block) + u64::from(grid.blocks) == prompt;
    if fits { Ok(()) } else { Err(Refusal::Envelope) }
}
