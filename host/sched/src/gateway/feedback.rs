//! What replicas tell: reports, progress, refusals, ends, cache events; and what becomes of work when one is lost.

use penstock_base::{Failure, Instant, Outcome, RefuseReason, ReplicaEpoch, ReplicaId, RequestId};
use penstock_policy_api::{FirstToken, Placed, Preempted, ReplicaDown, ReplicaDrain, ReplicaUp, Resumed, Skipped};

use super::State;
use super::finish::End;
use super::io::{GatewayEffect, GatewayEvent, ReplicaFacts};
use super::migrate::MigrationCause;
use super::overload::Edge;
use super::replicas::Uncovered;
use super::request::{Compute, Place};
use super::seats::Cx;
use super::table::NONE;
use crate::handoff::Peer;
use crate::message::{CacheEvent, FromReplica, Progress, Report, Usage};

/// Why a ranked row came to nothing, as facts number it.
pub(super) const SKIPPED_REFUSED: u64 = 1;
/// See [`SKIPPED_REFUSED`]: it waited for a replica in vain.
pub(super) const SKIPPED_IN_VAIN: u64 = 2;

impl State {
    /// A message. One of another incarnation, or about work that is not there, is counted and changes nothing.
    pub(super) fn hear(&mut self, replica: ReplicaId, epoch: ReplicaEpoch, message: FromReplica, cx: &mut Cx<'_>) {
        let Some(at) = self.replicas.find(replica, epoch) else { return self.stale(cx) };
        match message {
            FromReplica::Report(report) => self.take_report(at, &report, cx),
            FromReplica::Cache { sequence, event } => self.take_cache_event(at, sequence, event, cx),
            FromReplica::Party { side, said } => self.hear_party(side, said, cx),
            FromReplica::Started { request, attempt, cached_tokens } => {
                let Some(slot) = self.attempt_at(at, request, attempt) else { return self.stale(cx) };
                self.started(slot, at, cached_tokens, cx);
            }
            FromReplica::Progress(progress) => {
                let Some(slot) = self.attempt_at(at, progress.request, progress.attempt) else {
                    return match self.sent_from(at, progress.request, progress.attempt) {
                        Some(slot) => self.prefilled_elsewhere(slot, &progress),
                        None => self.stale(cx),
                    };
                };
                self.progressed(slot, at, &progress, cx);
            }
            FromReplica::Preempted { request, attempt, computed_tokens, freed_blocks, cause_code } => {
                let Some(slot) = self.attempt_at(at, request, attempt) else { return self.stale(cx) };
                let request = &mut self.requests.table[slot];
                request.run.preemptions += 1;
                let fact = Preempted {
                    request_id: request.manifest.request.0,
                    flow_id: request.manifest.flow.0,
                    computed_tokens: u64::from(computed_tokens),
                    freed_blocks: u64::from(freed_blocks),
                    how_code: 0,
                    cause_code: u64::from(cause_code),
                };
                self.tell(fact.at(self.now.as_us()), cx);
            }
            FromReplica::Resumed { request, attempt, recomputed_tokens } => {
                let Some(slot) = self.attempt_at(at, request, attempt) else { return self.stale(cx) };
                let flow_id = self.requests.table[slot].manifest.flow.0;
                let fact = Resumed { request_id: request.0, flow_id, recomputed_tokens: u64::from(recomputed_tokens) };
                self.tell(fact.at(self.now.as_us()), cx);
            }
            FromReplica::Refuse { request, attempt, number, reason } => {
                let slot = self.attempt_at(at, request, attempt);
                let Some(slot) = slot.filter(|slot| self.requests.table[*slot].run.number == number) else {
                    return self.stale(cx);
                };
                self.refused_by(slot, at, reason, cx);
            }
            FromReplica::Ended { request, attempt, outcome, usage } => {
                let Some(slot) = self.attempt_at(at, request, attempt) else { return self.stale(cx) };
                self.end_at_replica(slot, End { outcome, usage, retry_after_ms: 0 }, cx);
            }
        }
    }

    /// The request, when that attempt of it is at that replica.
    fn attempt_at(&self, replica: u32, request: RequestId, attempt: u16) -> Option<u32> {
        let slot = self.requests.table.find(&request)?;
        let known = &self.requests.table[slot];
        (known.attempt == attempt && known.place.at_replica() == Some(replica)).then_some(slot)
    }

    fn take_report(&mut self, at: u32, report: &Report, cx: &mut Cx<'_>) {
        let before = self.replicas.table[at].credit();
        let (table, inner) = (&self.requests.table, &self.requests.inner);
        let uncovered = |slot: u32| Uncovered {
            number: table[slot].run.number,
            need: table[slot].run.need,
            next: inner.next(slot),
        };
        if !self.replicas.take_report(at, report, self.now, uncovered) {
            return self.stale(cx);
        }
        self.cover_lending(at, report.covers);
        let replica = &mut self.replicas.table[at];
        if replica.cache.complete && report.cache_sequence == replica.cache.sequence {
            replica.cache.as_of = report.as_of.min(self.now);
        }
        let credit = replica.credit();
        self.judge_cache(at, cx);
        let grew = credit.requests > before.requests
            || credit.prefill_tokens > before.prefill_tokens
            || credit.blocks > before.blocks;
        if grew {
            self.wants_dispatch = true;
            self.capacity_freed = true;
        }
        self.tell_served(cx);
    }

    /// The replica took it up: the placement stands.
    fn started(&mut self, slot: u32, at: u32, cached_tokens: u32, cx: &mut Cx<'_>) {
        let request = &mut self.requests.table[slot];
        if core::mem::replace(&mut request.run.started, true) {
            return self.stale(cx);
        }
        request.run.cached_tokens = cached_tokens.min(request.manifest.input_tokens);
        let facts = &self.replicas.table[at].facts;
        let fact = Placed {
            request_id: request.manifest.request.0,
            replica_id: u64::from(facts.replica.0),
            replica_epoch: facts.epoch.0,
            uncached_tokens: u64::from(request.manifest.input_tokens - request.run.cached_tokens),
            blocks: request.run.need.blocks,
            rank_taken: u64::from(request.run.rank_taken),
        };
        self.watch.moved(self.now);
        self.tell(fact.at(self.now.as_us()), cx);
    }

    fn progressed(&mut self, slot: u32, at: u32, progress: &Progress, cx: &mut Cx<'_>) {
        let now = self.now;
        let request = &mut self.requests.table[slot];
        let had_emitted = request.has_emitted();
        let run = &mut request.run;
        run.started = true;
        run.prefill_tokens += u64::from(progress.prefill_tokens);
        run.output_tokens += u64::from(progress.decode_tokens);
        let produced = run.expected_left.min(u64::from(progress.decode_tokens));
        run.expected_left -= produced;
        let first = progress.first_token && !run.emitted;
        let settled =
            if first { run.unsettled_tokens } else { run.unsettled_tokens.min(u64::from(progress.prefill_tokens)) };
        run.unsettled_tokens -= settled;
        let replica = &mut self.replicas.table[at];
        replica.expected_left -= produced;
        if first {
            run.emitted = true;
            run.first_token_at = now;
            replica.inflight_prefill_tokens -= run.need.prefill_tokens;
        }
        let first_ever = first && !had_emitted;
        if first_ever {
            request.first_token_at = now;
        }
        if first && request.compute == Compute::Prefilling {
            let moved = request.move_to(Compute::Decoding);
            debug_assert!(moved, "a first token begins decoding");
        }
        let flow = &mut self.flows.table[request.flow];
        flow.prefill_tokens += u64::from(progress.prefill_tokens);
        flow.decode_tokens += u64::from(progress.decode_tokens);
        flow.served.prefill_tokens += u64::from(progress.prefill_tokens);
        flow.served.decode_tokens += u64::from(progress.decode_tokens);
        flow.served.device_us += u64::from(progress.device_us);
        flow.served.settled_tokens += settled;
        self.flows.tell_later(request.flow);
        self.watch.moved(now);
        if first_ever {
            self.tell_first_token(slot, at, cx);
        }
    }

    fn tell_first_token(&mut self, slot: u32, at: u32, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let fact = FirstToken {
            request_id: request.manifest.request.0,
            replica_id: u64::from(self.replicas.table[at].facts.replica.0),
            cached_tokens: u64::from(request.run.cached_tokens),
            predicted_cached_tokens: u64::from(request.run.predicted_cached_tokens),
            queue_us: request.wait.before.as_us(),
            ttft_us: self.now.since(request.manifest.arrived).as_us(),
        };
        self.tell(fact.at(self.now.as_us()), cx);
    }

    /// The replica did not take it: its credit is wrong until a report covers that dispatch. The next ranked one is tried.
    fn refused_by(&mut self, slot: u32, at: u32, _reason: RefuseReason, cx: &mut Cx<'_>) {
        let number = self.requests.table[slot].run.number;
        let covered = self.replicas.table[at].report.as_ref().is_some_and(|report| report.covers >= number);
        if !covered {
            let refused = &mut self.replicas.table[at].refused;
            *refused = (*refused).max(Some(number));
        }
        if self.requests.table[slot].compute.is_terminal() {
            // It was cancelled meanwhile: the refusal says that nothing is held there.
            let end = End::unused(Outcome::Cancelled(penstock_base::CancelCause::Client));
            return self.end_at_replica(slot, end, cx);
        }
        if self.requests.table[slot].run.started {
            return self.stale(cx);
        }
        self.counters.refused_dispatches += 1;
        self.come_back(slot, SKIPPED_REFUSED, cx);
        self.place_next(slot, cx);
    }

    /// From its replica back into the queue, with nothing computed that counts; the fact undoes the `taken`.
    pub(super) fn come_back(&mut self, slot: u32, reason: u64, cx: &mut Cx<'_>) {
        let request = &mut self.requests.table[slot];
        let fact = Skipped {
            request_id: request.manifest.request.0,
            flow_id: request.manifest.flow.0,
            uncached_tokens: core::mem::take(&mut request.run.unsettled_tokens),
            short_blocks: 0,
            reason_code: reason,
            taken_flag: 1,
        };
        self.leave_replica(slot);
        self.tell(fact.at(self.now.as_us()), cx);
        self.counters.returned += 1;
        self.return_to_queue(slot, cx);
    }

    fn take_cache_event(&mut self, at: u32, sequence: u64, event: CacheEvent, cx: &mut Cx<'_>) {
        let now = self.now;
        let replica = &mut self.replicas.table[at];
        let expected = replica.cache.sequence.saturating_add(1);
        // The last number is none that could follow: whoever says it counts wrongly.
        if sequence < expected || sequence == u64::MAX {
            return self.stale(cx);
        }
        replica.cache.sequence = sequence;
        let gap = sequence > expected && replica.cache.complete;
        if gap {
            replica.cache.complete = false;
            let id = replica.facts.replica;
            self.directory.drop_replica(at);
            cx.effects.push(GatewayEffect::Event(GatewayEvent::CacheGap { replica: id }));
        }
        let replica = &mut self.replicas.table[at];
        match event {
            CacheEvent::Cleared => {
                replica.cache.complete = true;
                replica.cache.as_of = now;
                self.directory.drop_replica(at);
            }
            _ if !replica.cache.complete => {}
            CacheEvent::Stored { key, .. } => {
                replica.cache.as_of = now;
                self.directory.store(at, key);
            }
            CacheEvent::Removed { key } => {
                replica.cache.as_of = now;
                self.directory.remove(at, key);
            }
        }
        self.judge_cache(at, cx);
    }

    /// Believes or doubts one replica's part of the index, and says so when that changes.
    fn judge_cache(&mut self, at: u32, cx: &mut Cx<'_>) {
        let replica = &mut self.replicas.table[at];
        let changed = replica.judge_cache(self.now, self.config.stale_cache);
        if replica.cache.believed {
            self.cache_due = self.cache_due.min(replica.cache.as_of + self.config.stale_cache);
        }
        if let Some(believed) = changed {
            let replica = replica.facts.replica;
            self.directory.swept();
            cx.effects.push(GatewayEffect::Event(GatewayEvent::CacheBelief { replica, believed }));
        }
    }

    /// Whatever has grown stale is not believed from now on: nothing was heard of it for too long, or what was heard did not fit.
    pub(super) fn judge_caches(&mut self, cx: &mut Cx<'_>) {
        if self.now < self.cache_due {
            return;
        }
        self.cache_due = Instant::NEVER;
        for at in 0..self.replicas.slots().len() {
            self.judge_cache(self.replicas.slots()[at], cx);
        }
    }

    /// A replica is ready. A newer incarnation of a known one takes its place, and the old one is lost.
    pub(super) fn replica_up(&mut self, facts: ReplicaFacts, cx: &mut Cx<'_>) {
        if let Some(known) = self.replicas.table.find(&facts.replica) {
            let epoch = self.replicas.table[known].facts.epoch;
            if facts.epoch <= epoch {
                return self.stale(cx);
            }
            self.replica_down(facts.replica, epoch, cx);
        }
        if self.replicas.add(facts, self.now).is_none() {
            self.counters.replicas_beyond_limit += 1;
            return self.stale(cx);
        }
        self.cache_due = self.cache_due.min(self.now + self.config.stale_cache);
        self.stance.repeat_now();
        self.tell_peer_up(Peer { replica: facts.replica, epoch: facts.epoch }, cx);
        let fact = ReplicaUp {
            replica_id: u64::from(facts.replica.0),
            replica_epoch: facts.epoch.0,
            role_code: u64::from(facts.role_code),
            total_blocks: u64::from(facts.total_blocks),
            speed_ppm: facts.speed_ppm,
            zone_rank: u64::from(facts.zone_rank),
        };
        self.tell(fact.at(self.now.as_us()), cx);
        self.wants_dispatch = true;
    }

    /// A replica takes no new work; what it has goes on. Who waited for its credit waits no longer.
    pub(super) fn replica_drain(&mut self, replica: ReplicaId, epoch: ReplicaEpoch, cx: &mut Cx<'_>) {
        let Some(at) = self.replicas.find(replica, epoch) else { return self.stale(cx) };
        if !self.replicas.drain(at) {
            return self.stale(cx);
        }
        let fact = ReplicaDrain { replica_id: u64::from(replica.0), replica_epoch: epoch.0 };
        self.tell(fact.at(self.now.as_us()), cx);
        self.release_claims(at, cx);
        self.migrate_all(at, cx);
        self.wants_dispatch = true;
    }

    /// A replica is gone. Requests of which nothing was produced are placed again; the others go on elsewhere where that is allowed, else they end.
    pub(super) fn replica_down(&mut self, replica: ReplicaId, epoch: ReplicaEpoch, cx: &mut Cx<'_>) {
        let Some(at) = self.replicas.find(replica, epoch) else { return self.stale(cx) };
        self.replicas.drain(at);
        let lost = self.replicas.table[at].requests.len;
        self.release_claims(at, cx);
        loop {
            let slot = self.replicas.table[at].requests.head;
            if slot == NONE {
                break;
            }
            self.lose(slot, cx);
        }
        self.lose_party(replica, epoch, cx);
        self.directory.drop_replica(at);
        self.replicas.remove(at);
        let fact = ReplicaDown {
            replica_id: u64::from(replica.0),
            replica_epoch: epoch.0,
            reason_code: 0,
            lost_requests: u64::from(lost),
        };
        self.tell(fact.at(self.now.as_us()), cx);
        self.overload.replica_lost(self.now);
        self.overload.edge(Edge::ReplicaLost);
        self.wants_dispatch = true;
    }

    /// Its replica is lost.
    fn lose(&mut self, slot: u32, cx: &mut Cx<'_>) {
        self.cancel_handoff(slot, cx);
        if self.migrate(slot, MigrationCause::Lost, cx) {
            return;
        }
        let request = &mut self.requests.table[slot];
        let again = request.place.at_replica().is_some()
            && request.compute == Compute::Prefilling
            && request.run.output_tokens == 0
            && request.attempt < self.config.attempts_max;
        if again {
            request.attempt += 1;
            self.forget_ranking(slot);
            return self.come_back(slot, SKIPPED_REFUSED, cx);
        }
        let usage: Usage = request.usage();
        let end = End { outcome: Outcome::Failed(Failure::ReplicaLost), usage, retry_after_ms: 0 };
        self.end_at_replica(slot, end, cx);
    }

    /// Nobody waits for the credit of this replica any more, and none of it is withheld.
    fn release_claims(&mut self, at: u32, cx: &mut Cx<'_>) {
        while let Some(slot) = self.replicas.table[at].reserved.as_slice().first().copied() {
            self.end_reservation(slot, cx);
            debug_assert!(self.requests.table.get(slot).is_none_or(|r| r.place != Place::Reserved { replica: at }));
        }
        let withheld = self.replicas.table[at].withheld_for;
        if withheld != NONE {
            self.end_withholding(withheld);
        }
    }
}
