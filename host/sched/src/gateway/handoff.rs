//! What if a prompt is computed at one replica and its answer at another? Who computes it, and what becomes of the request when the
//! hand-off ends?
//!
//! A request that is handed off is placed at the replica that decodes it, from the first moment on: that one's room is promised before
//! anything is computed. What the other one spends is debited beside it, until a report of that replica covers it. The coordinator says
//! who owns the request; here only its end is carried out. [`crate::handoff`] has the protocol.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{
    DispatchNumber, Failure as WorkFailure, Instant, Outcome, ReplicaEpoch, ReplicaId, RequestId, TransferId,
};
use penstock_policy_api::{PlaceAsked, RoutingDecision, RoutingPhase};

use super::State;
use super::feedback::SKIPPED_REFUSED;
use super::finish::End;
use super::io::{GatewayConfig, GatewayEffect, GatewayEvent, HandoffConfig};
use super::replicas::Replica;
use super::request::{Need, Place, Request};
use super::seats::Cx;
use super::signals::{ReplicaRows, RoutingFacts};
use crate::handoff::{
    Ask, Candidate, Caps, Coded, Coordinator, CoordinatorConfig, CoordinatorEffect, CoordinatorEvent,
    End as HandoffEnd, Order, Path, PathAsk, PathTerms, Peer, Said, Side, Topology, choose,
};
use crate::message::{Ordered, Progress, ToReplica};

/// One hand-off that has not ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Live {
    transfer: TransferId,
    /// Slot of the request.
    request: u32,
    /// Slot and incarnation of the replica that computes the prompt.
    sender: (u32, ReplicaEpoch),
    /// What it spends there.
    need: Need,
    /// The order to begin went out with this number.
    number: Option<DispatchNumber>,
    /// A report of the sender includes it.
    covered: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Handoffs {
    coordinator: Coordinator,
    live: Vec<Live>,
    /// Most hand-offs at once.
    most: u32,
}

impl Handoffs {
    pub(super) fn new(config: &GatewayConfig, now: Instant) -> Option<Self> {
        let handoff = config.handoff?;
        let coordinator = Coordinator::new(coordinator_config(config, &handoff), now);
        Some(Self { coordinator, live: Vec::with_capacity(handoff.transfers as usize), most: handoff.transfers })
    }

    pub(super) fn next_wake(&self) -> Instant {
        self.coordinator.next_wake()
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        self.coordinator.encode(out);
        out.list(self.live.iter(), |w, live| {
            live.transfer.put(w);
            w.u32(live.request);
            w.u32(live.sender.0);
            live.sender.1.put(w);
            w.u32(live.need.slots);
            w.u64(live.need.prefill_tokens);
            w.u64(live.need.blocks);
            w.option(live.number, |w, number| w.u64(number.0));
            w.bool(live.covered);
        });
    }

    pub(super) fn decode(config: &GatewayConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let handoff = config.handoff.ok_or(DecodeError::Invalid("hand-offs"))?;
        let coordinator = Coordinator::decode(coordinator_config(config, &handoff), from)?;
        let mut live = Vec::with_capacity(handoff.transfers as usize);
        live.extend(from.list(|r| {
            Ok(Live {
                transfer: TransferId::take(r)?,
                request: r.u32()?,
                sender: (r.u32()?, ReplicaEpoch::take(r)?),
                need: Need { slots: r.u32()?, prefill_tokens: r.u64()?, blocks: r.u64()? },
                number: r.option(Reader::u64)?.map(DispatchNumber),
                covered: r.bool()?,
            })
        })?);
        Ok(Self { coordinator, live, most: handoff.transfers })
    }
}

fn coordinator_config(config: &GatewayConfig, handoff: &HandoffConfig) -> CoordinatorConfig {
    CoordinatorConfig {
        epoch: config.epoch,
        timing: handoff.timing,
        leases: handoff.leases,
        transfers: handoff.transfers,
    }
}

/// How a request that a replica has room for goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// That replica does all of it.
    Whole,
    /// This one computes the prompt first.
    Split(u32),
    /// One should, and none has room: it waits.
    Wait,
}

impl State {
    /// Is there somebody who computes prompts for others?
    fn has_senders(&self) -> bool {
        self.replicas.iter_ready().any(|(_, replica)| replica.facts.role_code == 1)
    }

    /// Would this request be handed off, as far as it is known before a replica is chosen?
    pub(super) fn may_split(&self, request: &Request) -> bool {
        let Some(handoff) = self.config.handoff.filter(|_| self.handoffs.is_some()) else { return false };
        !request.wait.whole
            && request.manifest.sequences == 1
            && request.manifest.input_tokens >= handoff.prefill_tokens_min
            && self.has_senders()
    }

    /// What the prompt of `request` needs at a replica that computes it for another one.
    pub(super) fn need_of_prompt(&self, request: &Request, cached: u32) -> Need {
        let manifest = &request.manifest;
        let blocks = penstock_base::Manifest::need_blocks(manifest.input_tokens, 1, 1, self.config.block_size_tokens);
        Need { slots: 1, prefill_tokens: u64::from(manifest.input_tokens - cached), blocks }
    }

    /// Which way does it go, when `receiver` decodes it with `uncached` tokens of its prompt to be computed?
    pub(super) fn way_of(&mut self, slot: u32, receiver: u32, uncached: u32, cx: &mut Cx<'_>) -> Way {
        let Some(handoff) = self.config.handoff else { return Way::Whole };
        // One that takes whole requests alone knows nothing of hand-offs.
        let decodes_for_others = self.replicas.table[receiver].facts.role_code == 2;
        let request = &self.requests.table[slot];
        if !decodes_for_others || request.wait.colocate || !self.may_split(request) {
            return Way::Whole;
        }
        let candidate = |replica: &Replica| {
            let peer = Peer { replica: replica.facts.replica, epoch: replica.facts.epoch };
            Candidate { peer, domain: replica.facts.domain }
        };
        let terms =
            PathTerms { enabled: true, prefill_tokens_min: handoff.prefill_tokens_min, topology: handoff.topology };
        let ask = PathAsk { sequences: 1, uncached_tokens: uncached };
        let decode = [candidate(&self.replicas.table[receiver])];
        // The path is a matter of who is there; who of them computes it, a matter of who has room.
        let there: Vec<Candidate> = self.senders().map(|(_, replica)| candidate(replica)).collect();
        if choose(&terms, &ask, &decode, &there) == Path::Unified {
            return Way::Whole;
        }
        self.rank_senders(slot, receiver, cx);
        let ranked: Vec<Candidate> =
            cx.seats.scratch.senders.iter().map(|replica| candidate(&self.replicas.table[*replica])).collect();
        match choose(&terms, &ask, &decode, &ranked) {
            Path::Split { sender, .. } => {
                self.replicas.find(sender.replica, sender.epoch).map_or(Way::Wait, Way::Split)
            }
            // Under `required` a near one is there and has no room: the whole path is for those that have none.
            Path::Unified => Way::Wait,
        }
    }

    fn senders(&self) -> impl Iterator<Item = (u32, &Replica)> {
        self.replicas.iter_ready().filter(|(_, replica)| replica.facts.role_code == 1)
    }

    /// Replicas with room for the prompt, best first: what routing says in its second phase, with the decode peer known.
    fn rank_senders(&mut self, slot: u32, receiver: u32, cx: &mut Cx<'_>) {
        cx.seats.scratch.senders.clear();
        let full = self.handoffs.as_ref().is_none_or(|handoffs| handoffs.coordinator.transfers() >= handoffs.most);
        if full {
            return;
        }
        let request = &self.requests.table[slot];
        let finish = u64::from(request.manifest.input_tokens) + u64::from(request.max_output_tokens);
        let need = self.need_of_prompt(request, 0);
        let has_room = |(_, replica): &(u32, &Replica)| {
            replica.covers(&need) && replica.fits(&need, request.finish_blocks(self.config.block_size_tokens), finish)
        };
        let mut senders = core::mem::take(&mut cx.seats.scratch.senders);
        senders.extend(self.senders().filter(has_room).map(|(replica, _)| replica));
        if senders.len() > 1 {
            let asked = {
                let seats = &mut *cx.seats;
                let record = request.record();
                let place = PlaceAsked { request: &record, phase: RoutingPhase::Prefill };
                let peer = Some(self.replicas.table[receiver].facts.replica);
                let facts = RoutingFacts { state: self, request, eligible: senders.len() as u64, peer };
                let rows = ReplicaRows::for_routing(self, &senders, request, &seats.scratch.overlaps);
                seats.routing.ask(cx.policies.routing(), self.now, place, &facts, &rows)
            };
            self.note_checked(penstock_policy_api::Decision::Routing, &asked, cx);
            if let RoutingDecision::Place { ranked, .. } = asked.decision {
                let by_rank: Vec<u32> =
                    ranked.as_slice().iter().filter_map(|row| senders.get(*row as usize).copied()).collect();
                senders.retain(|replica| !by_rank.contains(replica));
                senders.splice(0..0, by_rank);
            }
            self.digest.add(&[8, asked.call]);
        }
        cx.seats.scratch.senders = senders;
    }

    /// A request has just been placed at the replica that decodes it: `sender` computes its prompt.
    pub(super) fn begin_handoff(&mut self, slot: u32, sender: u32, cached: u32, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let Some(receiver) = request.place.at_replica() else { return };
        let peer = |replica: &Replica| Peer { replica: replica.facts.replica, epoch: replica.facts.epoch };
        let (from, to) = (peer(&self.replicas.table[sender]), peer(&self.replicas.table[receiver]));
        let ask = Ask {
            manifest: request.manifest.clone(),
            attempt: request.attempt,
            sender: from,
            receiver: to,
            caps: Caps {
                class: request.class,
                max_output_tokens: request.max_output_tokens,
                reserve_output_tokens: request.reserve_output_tokens,
                expected_output_tokens: request.expected_output_tokens,
            },
            fallback: self.config.handoff.map_or(crate::handoff::Fallback::Anew, |handoff| handoff.fallback),
        };
        let need = self.need_of_prompt(request, cached);
        let live = Live {
            transfer: TransferId(0),
            request: slot,
            sender: (sender, from.epoch),
            need,
            number: None,
            covered: false,
        };
        self.digest.add(&[9, request.manifest.request.0, u64::from(from.replica.0), u64::from(to.replica.0)]);
        self.replicas.table[sender].lent.add(&need);
        if let Some(handoffs) = &mut self.handoffs {
            handoffs.live.push(live);
        }
        self.coordinate(CoordinatorEvent::Begin(ask), cx);
    }

    // --- The coordinator -------------------------------------------------------------------------------------------------------

    pub(super) fn hear_party(&mut self, side: Side, said: Said, cx: &mut Cx<'_>) {
        self.coordinate(CoordinatorEvent::Said { side, said }, cx);
    }

    /// Lets time pass for hand-offs, when something of theirs is due.
    pub(super) fn keep_handoff_time(&mut self, cx: &mut Cx<'_>) {
        if self.handoffs.as_ref().is_some_and(|handoffs| handoffs.next_wake() <= self.now) {
            self.coordinate(CoordinatorEvent::Tick, cx);
        }
    }

    fn coordinate(&mut self, event: CoordinatorEvent, cx: &mut Cx<'_>) {
        let Some(handoffs) = &mut self.handoffs else { return self.stale(cx) };
        let mut said = Vec::new();
        let before = handoffs.coordinator.transfers();
        handoffs.coordinator.step(self.now, event, &mut said);
        // Who waited because as many hand-offs as may be were there need not wait any more.
        self.wants_dispatch |= handoffs.coordinator.transfers() < before;
        for effect in said {
            match effect {
                CoordinatorEffect::Begun { transfer, request } => self.begun(transfer, request, cx),
                CoordinatorEffect::ToSender { transfer, to, order } => {
                    let begins = matches!(order, Order::Begin(_));
                    self.order(transfer, to, begins.then_some(Side::Sender), cx, |number| {
                        ToReplica::Prefill(Ordered { number, transfer, to, order })
                    });
                }
                CoordinatorEffect::ToReceiver { transfer, to, order } => {
                    self.order(transfer, to, None, cx, |number| {
                        ToReplica::Decode(Ordered { number, transfer, to, order })
                    });
                }
                CoordinatorEffect::Ended { request, attempt, end } => self.handoff_ended(request, attempt, end, cx),
                CoordinatorEffect::Stale => self.stale(cx),
            }
        }
    }

    fn begun(&mut self, transfer: TransferId, request: RequestId, cx: &mut Cx<'_>) {
        let Some(live) = self.handoffs.as_mut().and_then(|handoffs| handoffs.live.last_mut()) else { return };
        live.transfer = transfer;
        let (slot, sender) = (live.request, live.sender.0);
        self.requests.table[slot].run.transfer = Some(transfer);
        let receiver = self.requests.table[slot].place.at_replica();
        let id = |replica: u32| self.replicas.table[replica].facts.replica;
        let (sender, receiver) = (id(sender), receiver.map_or(super::io::NO_REPLICA, id));
        let event = GatewayEvent::HandoffBegun { request, transfer, sender, receiver };
        cx.effects.push(GatewayEffect::Event(event));
    }

    /// Sends an order. The number that goes with it covers everything that was sent to that replica so far; the first order to compute
    /// counts as a dispatch of its own.
    fn order(
        &mut self,
        transfer: TransferId,
        to: Peer,
        begins: Option<Side>,
        cx: &mut Cx<'_>,
        message: impl FnOnce(DispatchNumber) -> ToReplica,
    ) {
        // For an incarnation that is gone it is lost: the coordinator has heard of that, or will.
        let Some(at) = self.replicas.find(to.replica, to.epoch) else { return };
        if begins == Some(Side::Sender) {
            let live = self.handoffs.as_mut().and_then(|handoffs| {
                handoffs.live.iter_mut().find(|live| live.transfer == transfer && live.number.is_none())
            });
            if let Some(live) = live {
                let replica = &mut self.replicas.table[at];
                replica.dispatched = DispatchNumber(replica.dispatched.0 + 1);
                live.number = Some(replica.dispatched);
            }
        }
        let message = message(self.replicas.table[at].dispatched);
        cx.effects.push(GatewayEffect::Send { replica: to.replica, epoch: to.epoch, message });
    }

    /// A hand-off is over for its request, whatever its parties still have to let go.
    fn handoff_ended(&mut self, request: RequestId, attempt: u16, end: HandoffEnd, cx: &mut Cx<'_>) {
        let slot = self.requests.table.find(&request).filter(|slot| self.requests.table[*slot].attempt == attempt);
        let Some(slot) = slot else { return };
        // One that was cancelled here has been seen to.
        let Some(transfer) = self.requests.table[slot].run.transfer.take() else { return };
        self.end_lending(transfer);
        self.digest.add(&[10, request.0, end_code(end)]);
        cx.effects.push(GatewayEffect::Event(GatewayEvent::HandoffEnded { request, transfer, end }));
        self.watch.moved(self.now);
        match end {
            HandoffEnd::HandedOff(_) => self.counters.handed_off += 1,
            HandoffEnd::AtSender(peer, _) => match self.replicas.find(peer.replica, peer.epoch) {
                Some(sender) => self.stay_at_sender(slot, sender),
                None => self.place_anew(slot, cx),
            },
            HandoffEnd::Anew(_) => self.place_anew(slot, cx),
            HandoffEnd::Failed(_) | HandoffEnd::Cancelled => self.fail_handoff(slot, cx),
        }
    }

    /// The replica that computed the prompt decodes it too.
    fn stay_at_sender(&mut self, slot: u32, sender: u32) {
        let need = self.need_of_prompt(&self.requests.table[slot], 0);
        self.counters.kept_at_sender += 1;
        self.leave_replica(slot);
        self.hold_at(slot, sender, Need { prefill_tokens: 0, ..need }, 0);
        self.requests.retime(slot, &self.config);
    }

    /// Nobody has emitted anything: it goes the whole path, as a new attempt.
    fn place_anew(&mut self, slot: u32, cx: &mut Cx<'_>) {
        self.counters.handed_back += 1;
        let request = &mut self.requests.table[slot];
        if request.compute.is_terminal() || request.attempt >= self.config.attempts_max {
            return self.fail_handoff(slot, cx);
        }
        request.attempt += 1;
        request.wait.whole = true;
        self.forget_ranking(slot);
        self.come_back(slot, SKIPPED_REFUSED, cx);
    }

    fn fail_handoff(&mut self, slot: u32, cx: &mut Cx<'_>) {
        let usage = self.requests.table[slot].usage();
        let outcome = Outcome::Failed(WorkFailure::ReplicaLost);
        self.end_at_replica(slot, End { outcome, usage, retry_after_ms: 0 }, cx);
    }

    /// Ends the hand-off of a request that ends, or is placed anew, for a reason of its own. Was there one?
    pub(super) fn cancel_handoff(&mut self, slot: u32, cx: &mut Cx<'_>) -> bool {
        let Some(transfer) = self.requests.table[slot].run.transfer.take() else { return false };
        self.end_lending(transfer);
        let request = self.requests.table[slot].manifest.request;
        let event = GatewayEvent::HandoffEnded { request, transfer, end: HandoffEnd::Cancelled };
        cx.effects.push(GatewayEffect::Event(event));
        self.coordinate(CoordinatorEvent::Cancel(transfer), cx);
        true
    }

    /// What a hand-off spends at its sender is not debited any more: the next report says what is still spent there.
    fn end_lending(&mut self, transfer: TransferId) {
        let Some(handoffs) = &mut self.handoffs else { return };
        let Some(at) = handoffs.live.iter().position(|live| live.transfer == transfer) else { return };
        let live = handoffs.live.swap_remove(at);
        let (sender, epoch) = live.sender;
        let same = self.replicas.table.get(sender).is_some_and(|replica| replica.facts.epoch == epoch);
        if same && !live.covered {
            self.replicas.table[sender].lent.sub(&live.need);
            self.wants_dispatch = true;
        }
    }

    // --- Replicas --------------------------------------------------------------------------------------------------------------

    /// A report of `at` includes what was ordered up to `covers`.
    pub(super) fn cover_lending(&mut self, at: u32, covers: DispatchNumber) {
        let (Some(handoffs), replica) = (&mut self.handoffs, &mut self.replicas.table[at]) else { return };
        for live in &mut handoffs.live {
            let its = live.sender == (at, replica.facts.epoch) && !live.covered;
            if its && live.number.is_some_and(|number| number <= covers) {
                live.covered = true;
                replica.lent.sub(&live.need);
            }
        }
    }

    /// A replica has another incarnation, or none: what it took part in goes on without it.
    pub(super) fn lose_party(&mut self, replica: ReplicaId, epoch: ReplicaEpoch, cx: &mut Cx<'_>) {
        if self.handoffs.is_some() {
            let gone = Peer { replica, epoch: ReplicaEpoch(epoch.0.saturating_add(1)) };
            self.coordinate(CoordinatorEvent::PeerUp(gone), cx);
        }
    }

    /// Others that may hold a part in a hand-off with it hear of a replica's new incarnation.
    pub(super) fn tell_peer_up(&mut self, peer: Peer, cx: &mut Cx<'_>) {
        if self.handoffs.is_none() {
            return;
        }
        for (_, other) in self.replicas.iter() {
            let facts = &other.facts;
            if facts.replica != peer.replica {
                let message = ToReplica::PeerUp(peer);
                cx.effects.push(GatewayEffect::Send { replica: facts.replica, epoch: facts.epoch, message });
            }
        }
    }

    /// The request whose prompt is computed at `at` for another replica.
    pub(super) fn sent_from(&self, at: u32, request: RequestId, attempt: u16) -> Option<u32> {
        let slot = self.requests.table.find(&request)?;
        let known = &self.requests.table[slot];
        let transfer = known.run.transfer.filter(|_| known.attempt == attempt)?;
        let mut live = self.handoffs.as_ref()?.live.iter();
        live.any(|live| live.transfer == transfer && live.sender.0 == at).then_some(slot)
    }

    /// Part of its prompt was computed, where it is not placed.
    pub(super) fn prefilled_elsewhere(&mut self, slot: u32, progress: &Progress) {
        let request = &mut self.requests.table[slot];
        let tokens = u64::from(progress.prefill_tokens);
        request.run.prefill_tokens += tokens;
        let settled = request.run.unsettled_tokens.min(tokens);
        request.run.unsettled_tokens -= settled;
        let flow = &mut self.flows.table[request.flow];
        flow.prefill_tokens += tokens;
        flow.served.prefill_tokens += tokens;
        flow.served.device_us += u64::from(progress.device_us);
        flow.served.settled_tokens += settled;
        self.flows.tell_later(request.flow);
        self.watch.moved(self.now);
    }

    /// Hand-offs stand with requests that are at a replica, and what they spend adds up.
    pub(super) fn check_handoffs(&self) -> Result<(), &'static str> {
        let Some(handoffs) = &self.handoffs else { return Ok(()) };
        handoffs.coordinator.check()?;
        for live in &handoffs.live {
            let request = self.live(live.request)?;
            if request.run.transfer != Some(live.transfer) || !matches!(request.place, Place::Running { .. }) {
                return Err("hand-offs: one stands with a request that is not handed off");
            }
        }
        let handed = self.requests.table.iter().filter(|(_, request)| request.run.transfer.is_some()).count();
        if handed != handoffs.live.len() || handed > handoffs.most as usize {
            return Err("hand-offs: miscounted");
        }
        for (slot, replica) in self.replicas.table.iter() {
            let mut lent = Need::default();
            let its = |live: &&Live| live.sender == (slot, replica.facts.epoch) && !live.covered;
            handoffs.live.iter().filter(its).for_each(|live| lent.add(&live.need));
            if lent != replica.lent {
                return Err("hand-offs: what a replica spends for others differs from the walk");
            }
        }
        Ok(())
    }
}

/// Kind of an end, for the digest.
fn end_code(end: HandoffEnd) -> u64 {
    match end {
        HandoffEnd::HandedOff(_) => 0,
        HandoffEnd::AtSender(..) => 1,
        HandoffEnd::Anew(_) => 2,
        HandoffEnd::Failed(_) => 3,
        HandoffEnd::Cancelled => 4,
    }
}

impl Default for HandoffConfig {
    fn default() -> Self {
        Self {
            timing: crate::handoff::Timing::default(),
            leases: crate::handoff::LeaseTerms::default(),
            transfers: 256,
            prefill_tokens_min: 256,
            topology: Topology::Any,
            fallback: crate::handoff::Fallback::AtSender,
        }
    }
}
