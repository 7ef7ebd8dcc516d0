//! Where does it run? The hard filter, the question, and the debit: eligibility and credit are looked at again when it is made.

use penstock_base::limits::HELD_REQUESTS_MAX;
use penstock_base::{Duration, Outcome, Refusal};
use penstock_policy_api::{
    Asked, Decision, PlaceAsked, Question, RoutingDecision, RoutingPhase, SessionEnd, Taken, seed::call_seed,
};

use super::State;
use super::directory::Overlaps;
use super::finish::End;
use super::handoff::Way;
use super::io::{GatewayEffect, GatewayEvent, NO_REPLICA, RANKED_TOLD, RoutingMade};
use super::replicas::Replica;
use super::request::{Need, Place, Ranked, Request};
use super::seats::{Cx, Scratch};
use super::signals::{ReplicaRows, RoutingFacts};
use super::table::NONE;
use crate::message::{Dispatch, ToReplica};

/// On whose word a request is placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    /// The policy ranked it.
    Policy,
    /// The native order did.
    Native,
    /// It starves: it is neither held nor made to wait for a named replica.
    Starving,
    /// The host collected credit for it.
    Host,
}

/// What came of placing a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Placed {
    /// It is at a replica.
    Dispatched,
    /// It is held, or waits for a replica's credit.
    Waits,
    /// No replica that fits it has credit for it.
    NoFit {
        /// Blocks missing at the one where the fewest are.
        short_blocks: u64,
    },
    /// Nobody grants credit any more, or it may not start.
    NoCredit,
    /// No known replica could ever take it: it has ended.
    Ended,
}

impl State {
    /// The hard filter for a request: ready, decodes, and large enough.
    fn filter(&self, request: &Request) -> impl Fn(&Replica) -> bool + use<> {
        let need = Need { slots: u32::from(request.manifest.sequences), prefill_tokens: 1, blocks: 0 };
        let finish = request.finish_blocks(self.config.block_size_tokens);
        let longest = u64::from(request.manifest.input_tokens) + u64::from(request.max_output_tokens);
        move |replica| !replica.draining && replica.decodes() && replica.fits(&need, finish, longest)
    }

    /// Replicas that pass the hard filter. By id.
    pub(super) fn eligible<'a>(&'a self, request: &Request) -> impl Iterator<Item = (u32, &'a Replica)> + use<'a> {
        let passes = self.filter(request);
        self.replicas.iter().filter(move |(_, replica)| passes(replica))
    }

    fn need_at(&self, request: &Request, replica: u32, overlaps: &Overlaps) -> (Need, u32) {
        let manifest = &request.manifest;
        let known = self.replicas.table[replica].cache.believed;
        let overlap = if known { overlaps.blocks(replica) } else { 0 };
        let cached = self.overlap_tokens(manifest, overlap);
        let need = Need {
            slots: u32::from(manifest.sequences),
            prefill_tokens: u64::from(manifest.input_tokens - cached) + u64::from(request.carried_output),
            blocks: request.need_blocks(self.config.block_size_tokens),
        };
        (need, cached)
    }

    /// Its credit covers the request, and is not withheld for another.
    fn takes_now(&self, slot: u32, replica: &Replica, blocks: u64) -> bool {
        let sequences = self.requests.table[slot].manifest.sequences;
        let need = Need { slots: u32::from(sequences), prefill_tokens: 1, blocks };
        (replica.withheld_for == NONE || replica.withheld_for == slot) && replica.covers(&need)
    }

    /// Asks routing about a waiting request and carries the answer out.
    pub(super) fn place(&mut self, slot: u32, how: How, cx: &mut Cx<'_>) -> Placed {
        if self.running_requests >= self.config.running_requests_max {
            return Placed::NoCredit;
        }
        let request = &self.requests.table[slot];
        let blocks = request.need_blocks(self.config.block_size_tokens);
        let scratch = &mut cx.seats.scratch;
        scratch.eligible.clear();
        scratch.eligible.extend(self.eligible(request).map(|(replica, _)| replica));
        let rows = scratch.eligible.iter().map(|replica| &self.replicas.table[*replica]);
        if !rows.clone().any(|replica| self.takes_now(slot, replica, blocks)) {
            let short = rows.map(|replica| blocks.saturating_sub(replica.credit().blocks)).min().unwrap_or(blocks);
            return self.no_fit(slot, short, cx);
        }
        self.directory.overlaps(&self.requests.table[slot].manifest.keys, &mut cx.seats.scratch.overlaps);
        if !self.may_be_computed(slot, blocks, &cx.seats.scratch) {
            return Placed::NoCredit;
        }
        self.deliver_facts(Decision::Routing, cx);
        let rows = cx.policies.routing().terms().window(self.config.routing_rows);
        self.choose_candidates(slot, rows, cx);
        let Asked { decision, call, .. } = self.ask_routing(slot, cx);
        let may_hold = how != How::Starving && self.may_hold(slot);
        let mut otherwise = RoutingMade::NoCredit;
        match decision {
            RoutingDecision::Hold { for_us } => {
                self.digest.add(&[3, self.requests.table[slot].manifest.request.0, u64::from(for_us)]);
                if may_hold && (self.held.len as usize) < HELD_REQUESTS_MAX {
                    self.forget_ranking(slot);
                    self.hold(slot, self.now + Duration::from_us(u64::from(for_us)));
                    self.note_routed(slot, call, RoutingMade::Held, cx);
                    return Placed::Waits;
                }
                self.forget_ranking(slot);
                otherwise = RoutingMade::NotHeld;
            }
            RoutingDecision::Place { ranked, wait_us, colocate } => {
                self.requests.table[slot].wait.colocate = colocate;
                let mut order = Ranked::default();
                for row in ranked.as_slice() {
                    let Some(replica) = cx.seats.scratch.candidates.get(*row as usize) else { continue };
                    order.push(self.replicas.table[*replica].named(*replica));
                }
                self.digest.add(&[3, self.requests.table[slot].manifest.request.0, u64::from(wait_us)]);
                ranked.as_slice().iter().for_each(|row| self.digest.add(&[u64::from(*row)]));
                self.requests.table[slot].wait.ranked = order;
                if may_hold && wait_us > 0 && self.reserve_first(slot, blocks, wait_us) {
                    self.note_routed(slot, call, RoutingMade::Reserved, cx);
                    return Placed::Waits;
                }
            }
        }
        // Told with the ranking as it was: placing goes through it.
        let told = cx.effects.len();
        self.note_routed(slot, call, RoutingMade::Dispatched, cx);
        if self.place_ranked_or_native(slot, how, cx) {
            return Placed::Dispatched;
        }
        if let Some(GatewayEffect::Event(GatewayEvent::Routed { made, .. })) = cx.effects.get_mut(told) {
            *made = otherwise;
        }
        Placed::NoFit { short_blocks: 0 }
    }

    /// Is there room for its prompt as well as for its answer? Asked before the policy is: without it the answer would come to nothing.
    fn may_be_computed(&self, slot: u32, blocks: u64, scratch: &Scratch) -> bool {
        let request = &self.requests.table[slot];
        let Some(handoff) = self.config.handoff.filter(|_| self.may_split(request)) else { return true };
        let computes_itself = |replica: u32| {
            let at = &self.replicas.table[replica];
            let (need, _) = self.need_at(request, replica, &scratch.overlaps);
            let whole = at.facts.role_code != 2 || need.prefill_tokens < u64::from(handoff.prefill_tokens_min);
            self.takes_now(slot, at, blocks) && whole
        };
        let need = self.need_of_prompt(request, 0);
        self.replicas.iter_ready().any(|(_, at)| at.facts.role_code == 1 && at.covers(&need))
            || scratch.eligible.iter().any(|replica| computes_itself(*replica))
    }

    /// Says what became of an answer about where a request runs.
    fn note_routed(&self, slot: u32, call: u64, made: RoutingMade, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let order = &request.wait.ranked;
        let mut ranked = [NO_REPLICA; RANKED_TOLD];
        for (told, (replica, _)) in ranked.iter_mut().zip(&order.rows[..usize::from(order.len)]) {
            *told = self.replicas.table[*replica].facts.replica;
        }
        let event = GatewayEvent::Routed { request: request.manifest.request, call, ranked, made };
        cx.effects.push(GatewayEffect::Event(event));
    }

    /// Nobody takes it now. When no known replica ever could, waiting is no use.
    fn no_fit(&mut self, slot: u32, short_blocks: u64, cx: &mut Cx<'_>) -> Placed {
        let request = &self.requests.table[slot];
        if self.replicas.slots().is_empty() || self.fits_any(&request.manifest, request.max_output_tokens) {
            return Placed::NoFit { short_blocks };
        }
        let end = End { retry_after_ms: 1_000, ..End::unused(Outcome::Refused(Refusal::NoReplica)) };
        self.end_early(slot, end, cx);
        Placed::Ended
    }

    /// What a placement is for: the replica that decodes is chosen first.
    fn phase_of(&self, request: &Request) -> RoutingPhase {
        if self.may_split(request) { RoutingPhase::Decode } else { RoutingPhase::Whole }
    }

    fn ask_routing(&mut self, slot: u32, cx: &mut Cx<'_>) -> Asked<RoutingDecision> {
        let asked = {
            let seats = &mut *cx.seats;
            let request = &self.requests.table[slot];
            let record = request.record();
            let phase = self.phase_of(request);
            let place = PlaceAsked { request: &record, phase };
            let eligible = seats.scratch.eligible.len() as u64;
            let facts = RoutingFacts { state: self, request, eligible, peer: None };
            let scratch = &seats.scratch;
            let rows = ReplicaRows::for_routing(self, &scratch.candidates, request, &scratch.overlaps);
            seats.routing.ask(cx.policies.routing(), self.now, place, &facts, &rows)
        };
        self.note_checked(Decision::Routing, &asked, cx);
        asked
    }

    /// The window over the eligible replicas: all, or some by overlap, some by credit and load, the session's, and the rest by lot.
    fn choose_candidates(&self, slot: u32, rows: usize, cx: &mut Cx<'_>) {
        let scratch = &mut cx.seats.scratch;
        let (eligible, chosen) = (&scratch.eligible, &mut scratch.candidates);
        chosen.clear();
        let rows = rows.max(1);
        if eligible.len() <= rows {
            chosen.extend_from_slice(eligible);
            return;
        }
        let request = &self.requests.table[slot];
        let blocks = request.need_blocks(self.config.block_size_tokens);
        let overlaps = &scratch.overlaps;
        let work = &mut scratch.native;
        let replica = |slot: u32| &self.replicas.table[slot];
        let part = (rows * 24 / 64).max(1);
        work.clear();
        work.extend_from_slice(eligible);
        let by_overlap = |other: &u32| (core::cmp::Reverse(overlaps.blocks(*other)), replica(*other).facts.replica);
        chosen.extend_from_slice(first_by_key(work, part.min(rows), by_overlap));
        // Of the first so many, no more than were chosen before are chosen already.
        let by_load = first_by_key(work, part * 2, |other| {
            let at = replica(*other);
            let (prefill, active) =
                at.load().map_or((0, 0), |load| (load.prefill_tokens, u64::from(load.active_blocks)));
            let load =
                (prefill.saturating_add(at.uncovered.prefill_tokens), active.saturating_add(at.uncovered.blocks));
            (!self.takes_now(slot, at, blocks), at.report.is_none(), load, at.requests.len, at.facts.replica)
        });
        let mut add = |other: u32, up_to: usize| {
            if chosen.len() < up_to.min(rows) && !chosen.contains(&other) {
                chosen.push(other);
            }
        };
        let best = *by_load.first().expect("more are eligible than a window holds");
        by_load.iter().for_each(|other| add(*other, part * 2));
        add(best, rows);
        let last = self.sessions.last(request.manifest.session).and_then(|(id, epoch)| self.replicas.find(id, epoch));
        if let Some(last) = last.filter(|last| eligible.contains(last)) {
            add(last, rows);
        }
        let throw = |other: u32| {
            let number = request.manifest.request.0 ^ u64::from(replica(other).facts.replica.0).rotate_left(32);
            call_seed(self.config.run_seed, Question::Routing, number)
        };
        let by_lot = first_by_key(work, rows * 2, |other| (throw(*other), replica(*other).facts.replica));
        by_lot.iter().for_each(|other| add(*other, rows));
        chosen.sort_unstable_by_key(|other| replica(*other).facts.replica);
    }

    /// Reserves the request for the first ranked replica, when that one has no credit for it. `false` when there is nothing to wait for.
    fn reserve_first(&mut self, slot: u32, blocks: u64, wait_us: u32) -> bool {
        let ranked = &mut self.requests.table[slot].wait.ranked;
        if ranked.len == 0 {
            return false;
        }
        let (first, _) = ranked.rows[0];
        if self.takes_now(slot, &self.replicas.table[first], blocks) {
            return false;
        }
        let until = self.now + Duration::from_us(u64::from(wait_us));
        if !self.reserve(slot, first, until) {
            return false;
        }
        self.requests.table[slot].wait.ranked.tried = 1;
        true
    }

    /// A reservation came to nothing: the next ranked replica with credit takes it, else it waits in its place again.
    pub(super) fn end_reservation(&mut self, slot: u32, cx: &mut Cx<'_>) {
        self.directory.overlaps(&self.requests.table[slot].manifest.keys, &mut cx.seats.scratch.overlaps);
        let request = &self.requests.table[slot];
        let may_start = self.may_start(request.class, request.manifest.traits, false);
        if may_start && self.place_ranked_or_native(slot, How::Policy, cx) {
            return;
        }
        if matches!(self.requests.table[slot].place, Place::Reserved { .. }) {
            self.unhold(slot);
        }
        self.forget_ranking(slot);
        self.tell_in_vain(slot, cx);
    }

    /// Its replica refused: the next ranked one, the native ranking of the rest, or it waits in its place for the next credit.
    pub(super) fn place_next(&mut self, slot: u32, cx: &mut Cx<'_>) {
        let waited = self.wants_dispatch;
        self.directory.overlaps(&self.requests.table[slot].manifest.keys, &mut cx.seats.scratch.overlaps);
        if !self.place_ranked_or_native(slot, How::Policy, cx) {
            self.forget_ranking(slot);
        }
        // What came back is no reason to ask again; the next credit is.
        self.wants_dispatch = waited;
    }

    /// Tries what is left of the ranking, then every other eligible replica in native order.
    fn place_ranked_or_native(&mut self, slot: u32, how: How, cx: &mut Cx<'_>) -> bool {
        while let Some(named) = self.requests.table[slot].wait.ranked.next() {
            let same = self.replicas.named(named).is_some();
            if same && self.dispatch_if_covered(slot, named.0, how, cx) {
                return true;
            }
        }
        let request = &self.requests.table[slot];
        let ranked = request.wait.ranked;
        let blocks = request.need_blocks(self.config.block_size_tokens);
        let seats = &mut *cx.seats;
        let candidates = &mut seats.scratch.candidates;
        candidates.clear();
        let rest = self
            .eligible(request)
            .filter(|(replica, at)| !ranked.has_tried(at.named(*replica)) && self.takes_now(slot, at, blocks));
        candidates.extend(rest.map(|(replica, _)| replica));
        if candidates.is_empty() {
            return false;
        }
        let record = request.record();
        let place = PlaceAsked { request: &record, phase: self.phase_of(request) };
        let facts = RoutingFacts { state: self, request, eligible: candidates.len() as u64, peer: None };
        let scratch = &mut seats.scratch;
        let rows = ReplicaRows::for_routing(self, &scratch.candidates, request, &scratch.overlaps);
        seats.routing.rank_natively(place, &facts, &rows, &mut scratch.native);
        let first = scratch.native.first().and_then(|row| scratch.candidates.get(*row as usize)).copied();
        first.is_some_and(|replica| self.dispatch_if_covered(slot, replica, how, cx))
    }

    /// Chooses and debits in one step, when the replica is still eligible and its credit still covers the request.
    pub(super) fn dispatch_if_covered(&mut self, slot: u32, replica: u32, how: How, cx: &mut Cx<'_>) -> bool {
        let request = &self.requests.table[slot];
        let blocks = request.need_blocks(self.config.block_size_tokens);
        let at = &self.replicas.table[replica];
        let covered = self.filter(request)(at) && self.takes_now(slot, at, blocks);
        if !covered || self.running_requests >= self.config.running_requests_max {
            return false;
        }
        if how == How::Host || matches!(request.place, Place::Reserved { .. }) {
            self.directory.overlaps(&request.manifest.keys, &mut cx.seats.scratch.overlaps);
        }
        let (mut need, cached) = self.need_at(request, replica, &cx.seats.scratch.overlaps);
        let wait = request.waited(self.now);
        let uncached = need.prefill_tokens;
        let way = self.way_of(slot, replica, u32::try_from(uncached).unwrap_or(u32::MAX), cx);
        match way {
            Way::Whole => {}
            Way::Split(_) => need.prefill_tokens = 0,
            Way::Wait => return false,
        }
        self.leave_queue(slot);
        self.join_replica(slot, replica, need, (cached, uncached));
        let request = &mut self.requests.table[slot];
        let named = (replica, self.replicas.table[replica].facts.epoch);
        request.run.rank_taken = request.wait.ranked.rank_of(named);
        let manifest = request.manifest.clone();
        let facts = self.replicas.table[replica].facts;
        let dispatch = Dispatch {
            number: request.run.number,
            manifest: manifest.clone(),
            attempt: request.attempt,
            class: request.class,
            max_output_tokens: request.max_output_tokens,
            reserve_output_tokens: request.reserve_output_tokens,
            expected_output_tokens: request.expected_output_tokens,
        };
        let attempt = request.attempt;
        self.digest.add(&[4, manifest.request.0, u64::from(facts.replica.0), dispatch.number.0, u64::from(attempt)]);
        if let Way::Split(sender) = way {
            let cached = cx.seats.scratch.overlaps.blocks(sender).min(self.replicas.table[sender].known_blocks());
            let cached = self.overlap_tokens(&manifest, cached);
            self.begin_handoff(slot, sender, cached, cx);
        } else {
            cx.effects.push(GatewayEffect::Send {
                replica: facts.replica,
                epoch: facts.epoch,
                message: ToReplica::Dispatch(dispatch),
            });
        }
        cx.effects.push(GatewayEffect::Dispatched {
            request: manifest.request,
            replica: facts.replica,
            epoch: facts.epoch,
            attempt,
            generation: self.generation,
        });
        self.counters.dispatched += 1;
        self.watch.moved(self.now);
        self.heat.add(manifest.prefix_key, self.now);
        self.directory.touch(&manifest.keys);
        if let Some((session, last)) = self.sessions.served(manifest.session, facts.replica, facts.epoch) {
            let fact = SessionEnd { session_id: session.0, replica_id: u64::from(last.0) };
            self.tell(fact.at(self.now.as_us()), cx);
        }
        let fact = Taken {
            request_id: manifest.request.0,
            flow_id: manifest.flow.0,
            uncached_tokens: uncached,
            blocks: need.blocks,
            by_policy_flag: u64::from(how == How::Policy),
            wait_us: wait.as_us(),
        };
        self.tell(fact.at(self.now.as_us()), cx);
        true
    }
}

/// The first `count` by a key that no two share, in order. The others are not ordered: a window is a small part of many replicas.
fn first_by_key<K: Ord>(work: &mut [u32], count: usize, key: impl Fn(&u32) -> K) -> &[u32] {
    let count = count.min(work.len());
    if 0 < count && count < work.len() {
        work.select_nth_unstable_by_key(count - 1, &key);
    }
    let first = &mut work[..count];
    first.sort_unstable_by_key(key);
    first
}
