//! What does this replica do for requests whose prompt is computed at one replica and decoded at another?
//!
//! It keeps the two parties of the protocol beside its plans, on its own block pool. What is computed here for another replica stands in
//! the batch like any prompt; its tokens are kept back until somebody owns the request, and nobody hears of its end here. What was
//! computed elsewhere joins the batch with all of its prompt done. [`crate::handoff`] has the protocol.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{
    BatchId, CancelCause, DispatchNumber, Failure, GatewayEpoch, Instant, Manifest, Outcome, TransferId,
};
use penstock_kv::OwnerId;

use super::digest::Mark;
use super::intake::Intake;
use super::sequence::{Held, NONE, Place, Sending};
use super::{HandoffEffect, HandoffInput, Replica, ReplicaConfig, ReplicaEffect, ReplicaEffects};
use crate::handoff::{
    Caps, Grid, Open, Order, PartyConfig, Peer, Receiver, ReceiverEffect, ReceiverEvent, Reserve, Sender, SenderEffect,
    SenderEvent, Side, Started,
};
use crate::message::{FromReplica, Ordered};

/// The two parties.
#[derive(Clone, Debug)]
pub(super) struct Parties {
    pub sender: Sender,
    pub receiver: Receiver,
}

impl Parties {
    pub(super) fn new(config: PartyConfig, now: Instant) -> Self {
        Self { sender: Sender::new(config, now), receiver: Receiver::new(config, now) }
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        self.sender.encode(out);
        self.receiver.encode(out);
    }

    pub(super) fn decode(config: PartyConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { sender: Sender::decode(config, from)?, receiver: Receiver::decode(config, from)? })
    }
}

impl ReplicaConfig {
    /// The parties' configuration, with what follows from the replica's own.
    pub(super) fn party(&self) -> Option<PartyConfig> {
        let handoff = self.handoff?;
        Some(PartyConfig {
            me: Peer { replica: self.replica, epoch: self.epoch },
            first_owner: self.requests_max(),
            table_blocks: self.table_blocks_max(),
            ..handoff
        })
    }
}

impl Replica {
    /// Slots that nobody has, and that were not promised to a request on its way here.
    pub(super) fn vacant_slots(&self) -> u32 {
        let promised = self.parties.as_ref().map_or(0, |parties| parties.receiver.promised());
        self.sequence_entries.len().saturating_sub(promised)
    }

    /// Hand-offs here, in either part.
    pub fn handoffs(&self) -> u32 {
        self.parties.as_ref().map_or(0, |parties| parties.sender.transfers() + parties.receiver.transfers())
    }

    /// May another prompt be computed for somebody else?
    pub(super) fn sends(&self) -> bool {
        self.parties.as_ref().is_none_or(|parties| parties.sender.accepts())
    }

    pub(super) fn next_handoff_wake(&self) -> Instant {
        let wake = |parties: &Parties| parties.sender.next_wake().min(parties.receiver.next_wake());
        self.parties.as_ref().map_or(Instant::NEVER, wake)
    }

    // --- Inputs ----------------------------------------------------------------------------------------------------------------

    pub(super) fn order_sender(
        &mut self,
        now: Instant,
        gateway: GatewayEpoch,
        ordered: Ordered<Open>,
        effects: &mut ReplicaEffects,
    ) {
        self.cover(gateway, ordered.number);
        let Ordered { transfer, to, order, .. } = ordered;
        self.step_sender(now, SenderEvent::Order { transfer, to, order }, effects);
    }

    pub(super) fn order_receiver(
        &mut self,
        now: Instant,
        gateway: GatewayEpoch,
        ordered: Ordered<Reserve>,
        effects: &mut ReplicaEffects,
    ) {
        self.cover(gateway, ordered.number);
        let Ordered { transfer, to, order, .. } = ordered;
        let vacant = self.vacant_slots();
        if let (Order::Begin(_), Some(parties)) = (&order, &mut self.parties) {
            parties.receiver.allow(vacant);
        }
        self.step_receiver(now, ReceiverEvent::Order { transfer, to, order }, effects);
    }

    /// The next report includes what was ordered with this number.
    fn cover(&mut self, gateway: GatewayEpoch, number: DispatchNumber) {
        if let Some(peer) = self.peers.get_mut(gateway) {
            peer.covers = peer.covers.max(number);
        }
    }

    pub(super) fn take_handoff(&mut self, now: Instant, input: HandoffInput, effects: &mut ReplicaEffects) {
        match input {
            HandoffInput::OfSender(message) => self.step_receiver(now, ReceiverEvent::Sender(message), effects),
            HandoffInput::OfReceiver(message) => self.step_sender(now, SenderEvent::Receiver(message), effects),
            HandoffInput::Sealed { transfer, seal } => {
                self.step_sender(now, SenderEvent::Prefilled { transfer, seal }, effects);
            }
            HandoffInput::Quiet(transfer) => self.step_sender(now, SenderEvent::Quiet(transfer), effects),
            HandoffInput::Fenced(transfer) => self.step_receiver(now, ReceiverEvent::Fenced(transfer), effects),
            HandoffInput::Digested { transfer, sum } => {
                self.step_receiver(now, ReceiverEvent::Digested { transfer, sum }, effects);
            }
        }
    }

    /// What concerns all hand-offs: both parties hear it.
    pub(super) fn tell_parties(&mut self, now: Instant, told: Told, effects: &mut ReplicaEffects) {
        if self.parties.is_none() {
            return;
        }
        let (sender, receiver) = match told {
            Told::PeerUp(peer) => (SenderEvent::PeerUp(peer), ReceiverEvent::PeerUp(peer)),
            Told::GatewayUp(epoch) => (SenderEvent::GatewayUp(epoch), ReceiverEvent::GatewayUp(epoch)),
            Told::GatewayDown(epoch) => (SenderEvent::GatewayDown(epoch), ReceiverEvent::GatewayDown(epoch)),
            Told::Drain => (SenderEvent::Drain, ReceiverEvent::Drain),
        };
        self.step_sender(now, sender, effects);
        self.step_receiver(now, receiver, effects);
    }

    /// Lets time pass for the parties, when something of theirs is due.
    pub(super) fn keep_handoff_time(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        let Some(parties) = &self.parties else { return };
        let (sender, receiver) = (parties.sender.next_wake() <= now, parties.receiver.next_wake() <= now);
        if sender {
            self.step_sender(now, SenderEvent::Tick, effects);
        }
        if receiver {
            self.step_receiver(now, ReceiverEvent::Tick, effects);
        }
    }

    // --- The sender ------------------------------------------------------------------------------------------------------------

    fn step_sender(&mut self, now: Instant, event: SenderEvent, effects: &mut ReplicaEffects) {
        let Some(parties) = &mut self.parties else { return self.stale(effects) };
        let mut said = Vec::new();
        parties.sender.step(now, event, &mut self.kv, &mut said);
        for effect in said {
            self.carry_out_sender(now, effect, effects);
        }
    }

    fn carry_out_sender(&mut self, now: Instant, effect: SenderEffect, effects: &mut ReplicaEffects) {
        let out = match effect {
            SenderEffect::Say(said) => {
                let message = FromReplica::Party { side: Side::Sender, said };
                return self.send(said.transfer.gateway_epoch(), message, effects);
            }
            SenderEffect::Prefill { transfer, manifest, attempt, caps, grid } => {
                return self.begin_sending(now, (transfer, grid), (manifest, attempt, caps), effects);
            }
            SenderEffect::Continue(transfer) => return self.keep_here(now, transfer, effects),
            SenderEffect::Drop(transfer) => return self.drop_sent(now, transfer, effects),
            SenderEffect::Stale => return self.stale(effects),
            SenderEffect::Send(message) => HandoffEffect::ToReceiver(message),
            SenderEffect::Bind { transfer, to, blocks } => HandoffEffect::Bind { transfer, to, blocks },
            SenderEffect::Write { transfer, index, stamp } => HandoffEffect::Write { transfer, index, stamp },
            SenderEffect::StopWrites(transfer) => HandoffEffect::StopWrites(transfer),
            SenderEffect::Swept(transfer) => HandoffEffect::Swept(transfer),
            SenderEffect::Accepting(accepting) => HandoffEffect::Accepting(accepting),
        };
        effects.push(ReplicaEffect::Handoff(out));
    }

    /// Takes the prompt in, as a request that is not this replica's own.
    fn begin_sending(
        &mut self,
        now: Instant,
        (transfer, grid): (TransferId, Grid),
        (manifest, attempt, caps): (Arc<Manifest>, u16, Caps),
        effects: &mut ReplicaEffects,
    ) {
        let sending = Sending { transfer, first_block: grid.first_block, placed: 0 };
        let intake = Intake {
            gateway: transfer.gateway_epoch(),
            number: DispatchNumber(0),
            attempt,
            // Decoding here is the exception: no more than the first token is promised for it.
            caps: Caps { reserve_output_tokens: 1, ..caps },
            sending: Some(sending),
            manifest,
        };
        let seq = penstock_base::SeqId { request: intake.manifest.request, index: 0 };
        let known = self.by_id.contains_key(&seq.request);
        let taken = if known { None } else { self.take_in(now, intake).ok() };
        self.digest.mix(Mark::Handoff, transfer.0, u64::from(taken.is_some()));
        if taken.is_none() {
            return self.step_sender(now, SenderEvent::PrefillFailed(transfer), effects);
        }
        effects.push(ReplicaEffect::Handoff(HandoffEffect::Sending { transfer, seq, grid }));
    }

    /// The request that is computed here for this hand-off.
    fn sent_by(&self, transfer: TransferId) -> Option<u32> {
        let is_it = |entry: &u32| {
            let request = self.requests[*entry as usize].as_ref();
            request.is_some_and(|request| request.sending.is_some_and(|sending| sending.transfer == transfer))
        };
        (0..self.requests.len() as u32).find(is_it)
    }

    /// It is decoded here after all: what was kept back counts.
    fn keep_here(&mut self, now: Instant, transfer: TransferId, effects: &mut ReplicaEffects) {
        let Some(entry) = self.sent_by(transfer) else { return self.stale(effects) };
        self.digest.mix(Mark::Handoff, transfer.0, 2);
        let request = self.request_mut(entry);
        request.sending = None;
        // Until it is let go, whoever leads the hand-off may still end it.
        request.adopted = Some(transfer);
        let (seq, slot) = (request.seq_id(0), request.sequences[0]);
        effects.push(ReplicaEffect::Handoff(HandoffEffect::Continue { transfer, seq }));
        if slot != NONE {
            self.release_held(now, slot, effects);
        }
    }

    /// Another replica has it, or nobody: it goes without an end.
    fn drop_sent(&mut self, now: Instant, transfer: TransferId, effects: &mut ReplicaEffects) {
        // Its prompt may have failed before: then it is gone already.
        let Some(entry) = self.sent_by(transfer) else { return self.stop_adopted(now, transfer, effects) };
        self.digest.mix(Mark::Handoff, transfer.0, 3);
        // Not a failure of its prompt, which the sender would have to hear of.
        self.request_mut(entry).sending = None;
        self.request_mut(entry).silent = true;
        self.end_request(now, entry, Outcome::Cancelled(CancelCause::Drain), effects);
    }

    /// Tells the sender which blocks are computed, and of the first token.
    pub(super) fn tell_sending(
        &mut self,
        now: Instant,
        entry: u32,
        sampled: Option<(BatchId, u32)>,
        effects: &mut ReplicaEffects,
    ) {
        let size = self.config.block_size_tokens;
        let (owner, computed, prompt) = {
            let seq = self.sequence(entry);
            (seq.request, seq.computed, seq.prompt)
        };
        let Some(sending) = self.request(owner).sending else { return };
        let all = prompt.div_ceil(size);
        let done = if computed >= prompt { all } else { computed / size };
        let from = sending.first_block + sending.placed;
        let transfer = sending.transfer;
        if done > from {
            let blocks = self.sequence(entry).table.blocks()[from as usize..done as usize].to_vec();
            if let Some(sending) = &mut self.request_mut(owner).sending {
                sending.placed += blocks.len() as u32;
            }
            // Leased before anybody is told to read them.
            let sources = HandoffEffect::Sources { transfer, blocks: blocks.clone() };
            effects.push(ReplicaEffect::Handoff(sources));
            self.step_sender(now, SenderEvent::Placed { transfer, blocks }, effects);
            self.step_sender(now, SenderEvent::Computed { transfer, blocks: done, layers: 0 }, effects);
        }
        if let Some((batch, row)) = sampled {
            let (seq, tokens) = (self.request(owner).seq_id(0), u32::from(self.sequence(entry).held == Held::Token));
            self.digest.mix(Mark::Handoff, transfer.0, 4 + u64::from(tokens));
            let sampled = HandoffEffect::Sampled { transfer, seq, batch, row, tokens };
            effects.push(ReplicaEffect::Handoff(sampled));
        }
    }

    /// A prompt that was computed for somebody else has ended here: the sender hears of it.
    pub(super) fn tell_failed_prefills(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        while let Some(transfer) = self.failed_prefills.pop() {
            self.step_sender(now, SenderEvent::PrefillFailed(transfer), effects);
        }
    }

    /// The sequence is this replica's own now: its kept token counts, and may be its last.
    pub(super) fn release_held(&mut self, now: Instant, entry: u32, effects: &mut ReplicaEffects) {
        let seq = self.sequence_mut(entry);
        let held = core::mem::replace(&mut seq.held, Held::Free);
        let tokens = match held {
            Held::Free | Held::Prompt => return,
            Held::Token => 1,
            Held::Stop => 0,
        };
        seq.delivered += tokens;
        let (owner, index, delivered) = (seq.request, seq.index, seq.delivered);
        let full = seq.generated >= seq.max_output;
        let request = self.request_mut(owner);
        let id = request.seq_id(index);
        request.done.decode_tokens += tokens;
        if tokens > 0 && !core::mem::replace(&mut request.first_token, true) {
            request.done.first_token = true;
            request.first_token_at = now;
        }
        if !core::mem::replace(&mut request.done.touched, true) {
            self.touched.push(owner);
        }
        self.meters.decoded += u64::from(tokens);
        effects.push(ReplicaEffect::Handoff(HandoffEffect::Release { seq: id, tokens }));
        self.digest.mix(Mark::Deliver, id.as_u64(), u64::from(tokens));
        if held == Held::Stop || full {
            let outcome = if held == Held::Stop { Outcome::Stop } else { Outcome::Length };
            self.end_sequence(now, entry, outcome, delivered, effects);
        }
    }

    // --- The receiver ----------------------------------------------------------------------------------------------------------

    fn step_receiver(&mut self, now: Instant, event: ReceiverEvent, effects: &mut ReplicaEffects) {
        let Some(parties) = &mut self.parties else { return self.stale(effects) };
        let mut said = Vec::new();
        parties.receiver.step(now, event, &mut self.kv, &mut said);
        for effect in said {
            self.carry_out_receiver(now, effect, effects);
        }
    }

    fn carry_out_receiver(&mut self, now: Instant, effect: ReceiverEffect, effects: &mut ReplicaEffects) {
        let out = match effect {
            ReceiverEffect::Say(said) => {
                let message = FromReplica::Party { side: Side::Receiver, said };
                return self.send(said.transfer.gateway_epoch(), message, effects);
            }
            ReceiverEffect::Start(started) => return self.adopt(now, started, effects),
            ReceiverEffect::Stop(transfer) => return self.stop_adopted(now, transfer, effects),
            ReceiverEffect::Stale => return self.stale(effects),
            ReceiverEffect::Send(message) => HandoffEffect::ToSender(message),
            ReceiverEffect::Grant { transfer, to, grid, blocks } => HandoffEffect::Grant { transfer, to, grid, blocks },
            ReceiverEffect::Fence(transfer) => HandoffEffect::Fence(transfer),
            ReceiverEffect::Digest(transfer) => HandoffEffect::Digest(transfer),
            ReceiverEffect::Swept(transfer) => HandoffEffect::Swept(transfer),
        };
        effects.push(ReplicaEffect::Handoff(out));
    }

    /// A request that was handed off joins the batch, with all of its prompt done and its first token known.
    fn adopt(&mut self, now: Instant, started: Started, effects: &mut ReplicaEffects) {
        let Started { transfer, manifest, attempt, caps, mut table, owner, sampled_tokens } = started;
        let intake = Intake {
            gateway: transfer.gateway_epoch(),
            number: DispatchNumber(0),
            attempt,
            caps,
            sending: None,
            manifest,
        };
        let id = intake.manifest.request;
        let entry = if self.by_id.contains_key(&id) { None } else { self.request_entries.take() };
        let slot = entry.and_then(|_| self.sequence_entries.take());
        let (Some(entry), Some(slot)) = (entry, slot) else {
            // Not possible while what was promised is kept free.
            self.kv.release(now, &mut table, None);
            self.kv.unreserve(owner, u32::MAX);
            return self.freeze("a request that was handed off finds no room", Failure::Internal, effects);
        };
        let found = table.cached_blocks() * self.config.block_size_tokens;
        self.serial += 2;
        self.joined += 1;
        let mut request = self.new_request(&intake, self.serial - 1);
        request.ready = false;
        request.started = true;
        request.adopted = Some(transfer);
        request.cached_tokens = found;
        request.charged = request.prompt();
        request.sequences[0] = slot;
        let (prompt, max_output, deadline) = (request.prompt(), request.max_output, request.manifest.deadline);
        self.facts.on_hit(now, &request, table.cached_blocks());
        let (gateway, seq_id) = (request.gateway, request.seq_id(0));
        self.by_id.insert(id, entry);
        self.requests[entry as usize] = Some(request);
        self.next_deadline = self.next_deadline.min(deadline);
        let (serial, joined) = (self.serial, self.joined);
        let seq = &mut self.sequences[slot as usize];
        seq.reset();
        seq.place = Place::Running;
        seq.serial = serial;
        seq.request = entry;
        seq.prompt = prompt;
        seq.max_output = max_output;
        (seq.joined, seq.joined_at) = (joined, now);
        (seq.scheduled, seq.computed, seq.confirmed) = (prompt, prompt, prompt);
        (seq.generated, seq.sampled) = (1, 1);
        seq.held = if sampled_tokens > 0 { Held::Token } else { Held::Stop };
        core::mem::swap(&mut table, &mut seq.table);
        self.running.push(slot);
        let moved = self.kv.move_reserved(owner, OwnerId(entry), u32::MAX);
        debug_assert!(moved.is_ok(), "both are owners here");
        if let Some(parties) = &mut self.parties {
            parties.receiver.recycle(table);
        }
        self.digest.mix(Mark::Handoff, transfer.0, 6);
        effects.push(ReplicaEffect::Handoff(HandoffEffect::Adopt { transfer, seq: seq_id, attempt }));
        self.send(gateway, FromReplica::Started { request: id, attempt, cached_tokens: found }, effects);
        self.store_blocks(now, slot);
        self.release_held(now, slot, effects);
    }

    /// Its coordinator ended the work, or was not heard of for a lease.
    fn stop_adopted(&mut self, now: Instant, transfer: TransferId, effects: &mut ReplicaEffects) {
        let is_it = |entry: &u32| {
            let request = self.requests[*entry as usize].as_ref();
            request.is_some_and(|request| request.adopted == Some(transfer) && request.live > 0)
        };
        let entry = (0..self.requests.len() as u32).find(is_it);
        if let Some(entry) = entry {
            self.digest.mix(Mark::Handoff, transfer.0, 7);
            self.end_request(now, entry, Outcome::Cancelled(CancelCause::Drain), effects);
        }
    }
}

/// See [`Replica::tell_parties`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Told {
    PeerUp(Peer),
    GatewayUp(GatewayEpoch),
    GatewayDown(GatewayEpoch),
    Drain,
}
